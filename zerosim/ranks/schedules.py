"""Other orders of turns than the hub's plain one: seeded, and each legal order of a small program.

A rank's *turn* ends where the rank waits, issues something asynchronous or has sent a message. A collective is carried
out in one turn of its own, when all of its group have issued it: at once, as late as somebody waits for it, or between.
A *schedule* is a list of turns.

Two turns commute when no rank takes part in both: in a rank's turn that rank and those that it sends to or receives
from; in a collective the ranks of its group. This holds as long as ranks share nothing but what they send. Schedules
that differ by turns that commute have one end (Godefroid 1996), and of them `Search` takes one, by his sleep sets.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from zerosim.ranks.call import GroupKey, Pending, PendingCall, PendingExchange


class Seeded:
    """Turns drawn from a seed: a ready rank may go before a collective that is due, and an issue may end a turn."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def pauses(self, rank: int, me: Pending) -> bool:
        """True where a rank that has just issued a part ends its turn, though it could go on."""
        return self.chance.random() < 0.5

    def collective_next(self, due: deque[list[PendingCall]], ready: deque[int]) -> bool:
        """True where the first of the collectives that are due has the next turn, False where the first of the ranks
        has, which is chosen here; one of the two is not empty."""
        if due and (not ready or self.chance.random() < 0.5):
            return True
        ready.rotate(self.chance.randrange(len(ready)))
        return False


Turn = int | tuple[GroupKey, int, str]  # a rank's; or that of a collective, by group, number and operation


class Redundant(BaseException):
    """A schedule that ends like another one, which is taken: raised between two turns, where no program is, and no
    error of one."""


class Chosen:
    """Asks ``choose(order, turns)`` for each turn, of all that there may be: collectives in the order in which they
    became due, then ranks in theirs. ``turns`` are those taken, and ``members`` the ranks that take part in each."""

    def __init__(self, choose: "Choose") -> None:
        self.choose = choose
        self.turns: list[Turn] = []
        self.members: list[set[int]] = []
        self.messages = False  # True when a program has sent one itself
        self.in_flight = Counter[int]()  # by rank: collectives that it has issued, and that are not carried out

    def is_alone(self, turn: Turn, turns: Sequence[Turn]) -> bool:
        """True where nothing that may come before this turn involves its ranks, as long as nobody sends messages: a
        persistent set of one turn, in Godefroid's words."""
        if isinstance(turn, int):
            return not self.in_flight[turn]
        return all(self.in_flight[rank] == 1 and rank not in turns for rank in turn[0][0])

    def pauses(self, rank: int, me: Pending) -> bool:
        self.in_flight[rank] += isinstance(me, PendingCall)
        if isinstance(me, PendingExchange):
            self.messages = True
            self.members[-1].update(peer for peer in (me.to, me.source) if peer is not None)
            return me.done
        return bool(me.where)

    def collective_next(self, due: deque[list[PendingCall]], ready: deque[int]) -> bool:
        calls: list[Turn] = [(me.call.key, me.call.number, me.call.operation) for me, *_ in due]
        turn = self.choose(self, [*calls, *sorted(ready)])
        self.turns.append(turn)
        if isinstance(turn, int):
            self.members.append({turn})
            ready.rotate(-ready.index(turn))
            return False
        self.members.append({*turn[0][0]})
        self.in_flight.subtract(turn[0][0])
        due.rotate(-calls.index(turn))
        return True


Choose = Callable[[Chosen, Sequence[Turn]], Turn]


@dataclass(slots=True)
class Choice:
    """A place in a schedule: the turns still to be taken there, of which the first is, and those that need not be, with
    their members: what begins with them has been seen, from here or before turns that commute with them."""

    awake: list[Turn]
    asleep: dict[Turn, set[int]]


class Search:
    """Takes each legal schedule once, depth first; if ``reduced``, one of all that differ by turns that commute.

    Where the program sends no ``messages``, a turn that is alone is the only one that need be taken.
    """

    def __init__(self, *, reduced: bool, messages: bool) -> None:
        self.reduced, self.messages = reduced, messages
        self.path: list[Choice] = []
        self.order = Chosen(self.choose)  # of the run under way

    def choose(self, order: Chosen, turns: Sequence[Turn]) -> Turn:
        """The next turn of the run under way; raises Redundant where that need not go on."""
        self.order, at = order, len(order.turns)
        if at == len(self.path):
            slept = self.path[-1].asleep if self.path and self.reduced else {}
            asleep = {turn: members for turn, members in slept.items() if not members & order.members[-1]}
            awake = [turn for turn in turns if turn not in asleep]
            if not awake:
                raise Redundant
            alone = [turn for turn in awake if self.reduced and not self.messages and order.is_alone(turn, turns)]
            self.path.append(Choice(alone[:1] or awake, asleep))
        return self.path[at].awake[0]

    def back(self) -> bool:
        """Goes back, after a run, to the last place with a turn to try; False where there is none."""
        while self.path:
            choice = self.path[-1]
            choice.asleep[choice.awake.pop(0)] = self.order.members[len(self.path) - 1]
            if choice.awake:
                return True
            self.path.pop()
        return False


def as_text(turns: Sequence[Turn]) -> str:
    """The turns of a schedule, in a row."""
    said = [(f"rank {turn}" if isinstance(turn, int) else f"{turn[2]} (call {turn[1]})", len([*same]))
            for turn, same in groupby(turns)]
    return ", ".join(name if count == 1 else f"{count} turns of {name}" for name, count in said)
