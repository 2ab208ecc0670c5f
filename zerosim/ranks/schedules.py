"""Other orders of turns than the hub's plain one: seeded, and each legal order of a small program, once.

A *turn* is a rank's way from where it stands to where it next waits, issues something asynchronous or has sent a
message; or the carrying out, as one, of a collective that all of its group have issued. So a collective may be carried
out as soon as it is issued, as late as somebody waits for it, and at any turn between. A *schedule* is a list of turns.

Two turns commute when no rank takes part in both: in a rank's turn the rank itself, and those that it sends to or
receives from; in a collective the ranks of its group. This holds as long as ranks share nothing but what they send.
Schedules that differ by turns that commute end alike, and of them `Search` takes one: sleep sets (Patrice Godefroid,
"Partial-Order Methods for the Verification of Concurrent Systems", LNCS 1032, Springer 1996,
https://doi.org/10.1007/3-540-60761-7).
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from zerosim.ranks.call import GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.hub import Order

COUNTED_STATES = 20_000  # of a program, after so many turns; more are not counted through


class Seeded(Order):
    """Drawn from a seed: a ready rank may go before a collective that is due, and an issue may be the end of a turn."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def pauses(self, rank: int, me: Pending) -> bool:
        return self.chance.random() < 0.5

    def collective_next(self, due: deque[list[PendingCall]], ready: deque[int]) -> bool:
        if due and (not ready or self.chance.random() < 0.5):
            return True
        ready.rotate(self.chance.randrange(len(ready)))
        return False


class Carried(NamedTuple):
    """The turn in which a collective is carried out."""

    key: GroupKey
    number: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} (call {self.number})"


Turn = int | Carried  # a rank's, or a collective's


class Redundant(Exception):
    """Whatever follows commutes to a schedule that has been taken: raised between two turns, where no program is."""


class Chosen(Order):
    """Asks ``choose(order, turns)`` for each turn, of all that there may be: collectives in the order in which they
    became due, then ranks in theirs. ``turns`` are those taken, and ``members`` the ranks that take part in each."""

    def __init__(self, choose: "Choose") -> None:
        self.choose = choose
        self.turns: list[Turn] = []
        self.members: list[set[int]] = []

    def pauses(self, rank: int, me: Pending) -> bool:
        if isinstance(me, PendingExchange):
            self.members[-1] |= {me.to, me.source} - {None}
            return me.done
        return bool(me.where)

    def collective_next(self, due: deque[list[PendingCall]], ready: deque[int]) -> bool:
        calls = {Carried(parts[0].call.key, parts[0].call.number, parts[0].call.operation): parts for parts in due}
        turn = self.choose(self, [*calls, *sorted(ready)])
        if isinstance(turn, Carried):
            due.remove(calls[turn])
            due.appendleft(calls[turn])
        else:
            ready.remove(turn)
            ready.appendleft(turn)
        self.turns.append(turn)
        self.members.append(set(turn.key[0]) if isinstance(turn, Carried) else {turn})
        return isinstance(turn, Carried)


Choose = Callable[[Chosen, Sequence[Turn]], Turn]


@dataclass(slots=True)
class Fork:
    """A place in a schedule: the turns that there may be, the one that is taken, and those that need not be, with who
    takes part in them: what begins with them has been seen, from here or in another order of turns that commute."""

    turns: Sequence[Turn]
    asleep: dict[Turn, set[int]]
    turn: Turn


class Search:
    """Takes each legal schedule once, depth first; if ``reduced``, one of all that differ by turns that commute."""

    def __init__(self, reduced: bool) -> None:
        self.reduced = reduced
        self.path: list[Fork] = []

    def choose(self, order: Chosen, turns: Sequence[Turn]) -> Turn:
        """The next turn of the run under way; raises Redundant where that need not go on."""
        if len(order.turns) < len(self.path):
            return self.path[len(order.turns)].turn
        asleep = {turn: members for turn, members in self.path[-1].asleep.items()
                  if self.reduced and not members & order.members[-1]} if self.path else {}
        turn = next((turn for turn in turns if turn not in asleep), None)
        if turn is None:
            raise Redundant
        self.path.append(Fork(turns, asleep, turn))
        return turn

    def back(self, order: Chosen) -> bool:
        """Goes back, after a run in this order, to the last fork with a turn to try; False where there is none."""
        while self.path:
            fork = self.path[-1]
            fork.asleep[fork.turn] = order.members[len(self.path) - 1]
            turn = next((turn for turn in fork.turns if turn not in fork.asleep), None)
            if turn is not None:
                fork.turn = turn
                return True
            self.path.pop()
        return False


def legal_orders(members: Sequence[set[int]], ranks: int) -> int | None:
    """The number of schedules that differ from one by turns that commute, itself included; None where that takes long.

    ``members`` are the ranks in each of its turns. A turn may come when it is the next one of all its ranks.

    >>> legal_orders([{0}, {1}, {0, 1}, {1}, {0}], 2)
    4
    """
    own = [[turn for turn, those in enumerate(members) if rank in those] for rank in range(ranks)]
    ways = Counter({(0,) * ranks: 1})  # by how many of its own turns each rank has taken
    for _ in members:
        following = Counter[tuple[int, ...]]()
        for taken, count in ways.items():
            heads = [mine[at] if at < len(mine) else None for mine, at in zip(own, taken, strict=True)]
            for turn in {*heads} - {None}:
                if all(heads[rank] == turn for rank in members[turn]):
                    following[tuple(at + (rank in members[turn]) for rank, at in enumerate(taken))] += count
        ways = following
        if len(ways) > COUNTED_STATES:
            return None
    return next(iter(ways.values()))


def as_text(turns: Sequence[Turn]) -> str:
    """The turns of a schedule, in a row."""
    said = [(str(turn) if isinstance(turn, Carried) else f"rank {turn}", len([*same]))
            for turn, same in groupby(turns)]
    return ", ".join(name if count == 1 else f"{name} {count} times" for name, count in said)
