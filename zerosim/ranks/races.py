"""Races of a rank program: who touches a buffer in flight, and whose end depends on the order of turns.

`explore` runs a program in many orders (`schedules`), and compares all that it returns and traces. A result lands in
``out=`` when its collective is carried out, and what is sent is read only then, as on a device; after each turn and
before each wait buffers in flight are compared with what they must be. A result that is read too early shows in two
runs in one order, in which it is hidden behind different bytes until its own rank's wait. A run in which something was
found is made once more, line by line (`sys.settrace`), to name the lines.
"""

import random
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from textwrap import shorten
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np

from zerosim.numerics.arrays import as_bytes, may_share_memory, sha256
from zerosim.numerics.checks import require_count
from zerosim.ranks.call import Array, Backend, Pending, PendingCall
from zerosim.ranks.cluster import Cluster, RankProgram
from zerosim.ranks.errors import PACKAGE, place_of, ranks_text, text_of
from zerosim.ranks.hub import Hub, RunEvent, RunOptions
from zerosim.ranks.rank import Rank
from zerosim.ranks.schedules import Choose, Chosen, Redundant, Search, as_text

SHOWN, SHOWN_RACES = 240, 3  # characters of a schedule and of what it returns; races in a report
SIGNALS = 0xFF, 0x5A, 0x00  # each byte of what has not arrived: NaN or -1; neither; what is false
NOT_TRACED = (PACKAGE, "<frozen", "<string>", "<__array", *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib")))


@dataclass(slots=True)
class InFlight:
    """A buffer of an asynchronous collective, from its issue until its wait, and the bytes that it must have."""

    rank: int
    me: PendingCall
    role: Literal["input", "result"]
    array: Array
    found: bytes = b""

    def race(self, by: int, did: Literal["wrote to", "read"], at: str) -> "Race":
        """The race of the rank ``by``, which did before the wait what has to come after it."""
        why = "is still sent" if self.role == "input" else "may have arrived, or not"
        whose = f"rank {self.rank}'s " * (self.rank != by)
        return (by, f"{did} the {self.role} {self.array.shape} of {whose}{self.me.describe()}\n  issued at "
                f"{self.me.where}\n  {did.replace('wrote', 'written')} at {at}\n  until wait() it {why}: wait first, "
                "or take other memory")


Race = tuple[int, str]  # a rank, and the text about what it did, with both places


class LineSeen(NamedTuple):
    """The values that a rank's program has when it comes to the line ``here``, by name; ``line`` has just ended."""

    rank: int
    line: str
    here: str
    seen: dict[str, Any]
    results: tuple[InFlight, ...]  # that were still to arrive


class WatchedHub(Hub):
    """A hub that watches buffers in flight, and, if ``traced``, each line of the programs.

    Where a ``signal`` is given, it hides results until their own rank's wait.
    """

    def __init__(self, *args: Any, signal: int | None, traced: bool) -> None:
        super().__init__(*args)
        self.signal, self.traced, self.in_common = signal, traced, None
        self.hides_results, self.checks_inputs = signal is not None, False
        self.running = 0  # the rank whose turn it is
        self.hidden: Array | None = None  # what is issued next has its result there
        self.in_flight: list[InFlight] = []
        self.races: list[Race] = []
        self.history: list[LineSeen] = []
        self.line: dict[int, str] = {}  # in which each rank is

    def hide(self, out: Array) -> None:
        as_bytes(out)[...] = SIGNALS[0] if self.signal is None else self.signal
        self.hidden = out

    def issue(self, rank: int, me: Pending) -> None:
        if isinstance(me, PendingCall) and me.where:
            buffers = [InFlight(rank, me, "input", me.x)]
            if self.hidden is not None:
                buffers.append(InFlight(rank, me, "result", self.hidden))
            self.settle(buffers)
            self.in_flight += buffers
        self.hidden = None
        at = self.line.get(rank, "")
        self.note(rank, at, at, {"what is sent": me.x if isinstance(me, PendingCall) else me.send}, is_read=True)
        super().issue(rank, me)

    def wait(self, rank: int, me: Pending) -> None:
        self.look()
        super().wait(rank, me)
        self.in_flight = [one for one in self.in_flight if one.me is not me]

    def _resume(self, rank: int) -> None:
        self.running = rank
        super()._resume(rank)
        self.look()

    def _carry_out(self, calls: list[PendingCall]) -> Generator[RunEvent, None, None]:
        yield from super()._carry_out(calls)
        self.settle([one for one in self.in_flight if one.me in calls])

    def settle(self, buffers: Sequence[InFlight]) -> None:
        """The buffers are as they must be."""
        for one in buffers:
            one.found = as_bytes(one.array).tobytes()

    def look(self) -> None:
        """Finds what was written to buffers in flight."""
        changed = [one for one in self.in_flight if as_bytes(one.array).tobytes() != one.found]
        by = self.running
        self.races += [one.race(by, "wrote to", self.line.get(by) or self.place(by)) for one in changed]
        self.settle(changed)

    def end(self, rank: Rank) -> None:
        """A rank's program has returned; works that it did not wait for are a race, and forgotten."""
        at = self.history[-1].here if self.history else "its end"
        self.races += [(rank.index, f"never waited for {work.title}\n  issued at {work.where}\n  ended at {at}\n  "
                        "keep what async_op=True returns, and call wait() on it") for work in rank._state.pending]
        rank._state.pending.clear()

    # -- line by line -------------------------------------------------------------------------------------------------

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Looks and notes at each line of the program's own; see `sys.settrace`."""
        if frame.f_code.co_filename.startswith(NOT_TRACED):
            return None
        if event in ("line", "return") and not self.stopping:
            self.look()
            rank, here, returned = self.running, place_of(frame), event == "return"
            self.note(rank, here if returned else self.line.get(rank, here), here,
                      {"what is returned": arg} if returned else frame.f_locals)
            self.line[rank] = place_of(frame.f_back) if returned else here
        return self.trace

    def note(self, rank: int, line: str, here: str, values: Mapping[str, Any], is_read: bool = False) -> None:
        """Notes what the program has in its hands, but for what is in flight and not read there."""
        if self.traced:
            mine = tuple(one for one in self.in_flight if one.rank == rank)
            seen = {name: _seen(value, () if is_read else mine) for name, value in values.items()}
            self.history.append(LineSeen(rank, line, here, seen, tuple(one for one in mine if one.role == "result")))


def _seen(value: Any, hidden: Sequence[InFlight], depth: int = 4) -> Any:
    """A value as it can be compared with that of another run."""
    if isinstance(value, np.ndarray) and any(may_share_memory(value, one.array) for one in hidden):
        return "in flight"
    if depth and isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if depth and isinstance(value, list | tuple | set):
        return [_seen(part, hidden, depth - 1) for part in value]
    try:
        return sha256(value)
    except (ValueError, TypeError):
        return type(value).__name__


# -- Exploration -----------------------------------------------------------------------------------------------------


class WatchedCluster(Cluster):
    """A cluster for one run, which takes turns as they are chosen."""

    def __init__(self, ranks: int, order: Chosen, **options: Any) -> None:
        super().__init__(ranks)
        self.order, self.options = order, options

    def _backend(self, options: RunOptions) -> Backend:
        self.hub = WatchedHub(len(self.ranks), self._transport, options, self.order, **self.options)
        return self.hub


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run: what must not depend on the order of turns, and beside it what is known of this run."""

    fingerprint: str
    rows: list[list[Any]]
    returned: Any = field(compare=False)  # by all ranks, or what was raised
    order: Chosen = field(compare=False)
    hub: WatchedHub = field(compare=False)

    def __str__(self) -> str:
        end = f"raises {self.fingerprint}" if isinstance(self.returned, Exception) else f"returns {self.returned}"
        return f"  {shorten(as_text(self.order.turns), SHOWN)}\n    {shorten(end, SHOWN)}"


@dataclass(slots=True)
class Exploration:
    """A program in ``schedules`` orders of turns, and what was found.

    ``complete`` says that these stand for all legal orders. ``outcomes`` are the runs that ended differently, each in
    its shortest schedule: a correct program has one. ``races`` have their rank, and their text.
    """

    program: RankProgram = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    ranks: int
    schedules: int = 0
    complete: bool = False
    outcomes: list[RunOutcome] = field(default_factory=list, repr=False)
    races: list[Race] = field(default_factory=list)
    difference: str = ""

    def run(self, choose: Choose, *, signal: int | None = None, traced: bool = False) -> RunOutcome:
        """One run, with arguments of its own; raises Redundant where it need not go on."""
        def body(rank: Rank, *args: Any) -> Any:
            if traced:
                sys.settrace(cluster.hub.trace)
            result = self.program(rank, *args)
            cluster.hub.end(rank)
            return result

        cluster, before = WatchedCluster(self.ranks, Chosen(choose), signal=signal, traced=traced), sys.gettrace()
        args = deepcopy(self.args)
        try:
            returned: Any = list(cluster.run(body, *args))
            fingerprint, rows = sha256(returned), [trace.rows for trace in cluster.trace]
        except Exception as error:
            returned, fingerprint, rows = error, f"{type(error).__name__}: {text_of(error)}", []
        finally:
            if traced:
                sys.settrace(before)
        return RunOutcome(fingerprint, rows, returned, cluster.order, cluster.hub)

    def again(self, found: RunOutcome) -> WatchedHub:
        """The hub of the same run, made line by line."""
        turns = found.order.turns
        return self.run(lambda order, _: turns[len(order.turns)], signal=found.hub.signal, traced=True).hub

    def take(self, outcome: RunOutcome) -> None:
        """Counts a run, and keeps it if no shorter one has ended like it."""
        self.schedules += 1
        for at, other in enumerate(self.outcomes):
            if other == outcome:
                self.outcomes[at] = min(other, outcome, key=_shortest)
                return
        self.outcomes.append(outcome)

    def __str__(self) -> str:
        alone = self.schedules == 1
        stand = f", which stand{'s' * alone} for all legal orders" * self.complete
        ends = "one outcome" if len(self.outcomes) == 1 else f"{len(self.outcomes)} different outcomes"
        races = [f"race: {ranks_text(sorted({rank for rank, its in self.races if its == text}))} {text}"
                 for text in dict.fromkeys(text for _, text in self.races)]
        more = [f"and {len(races) - SHOWN_RACES} more"] * (len(races) > SHOWN_RACES)
        return "\n".join([f"{self.ranks} ranks, {self.schedules:,} schedule{'s' * (not alone)}{stand}: {ends}",
                          *races[:SHOWN_RACES], *more, *[self.difference] * bool(self.difference)])


class RaceError(AssertionError):
    """A program that races, or whose end depends on the order of turns; ``exploration`` has what was found."""

    def __init__(self, exploration: Exploration) -> None:
        super().__init__(str(exploration))
        self.exploration = exploration


def explore(program: RankProgram, *args: Any, ranks: int = 2, orders: int | Literal["reduced", "all"] = 100,
            seed: int = 1, at_most: int = 10_000) -> Exploration:
    """Runs ``program(rank, *args)`` in many legal orders of ranks and of asynchronous collectives, and looks for races.

    ``orders`` are so many schedules drawn by ``seed``; or, of a small program, every one, "all", or "reduced" to one of
    those that differ by turns that commute, ``at_most`` so many. Results and traces must be the same in all. Turns
    of two ranks commute if they share nothing but what they send: what they share in this process, as a list among
    ``args``, needs a number or "all". Each run gets a copy of ``args``. What is written and put back within one turn is
    not seen, nor what is read and changes nothing that the program has in its hands.

    Raises RaceError that says which rank wrote to a buffer in flight, read a result too early or never waited, and
    where; or which two schedules end differently, and the first line in which they differ. Raises what the program
    raises in the plain order where that is no race, and ValueError where it does not repeat itself.

    >>> import numpy as np
    >>> def program(rank):
    ...     work = rank.all_reduce(np.ones(2), async_op=True)
    ...     rank.barrier()
    ...     return work.wait()
    >>> print(explore(program, ranks=2, orders="reduced"))
    2 ranks, 8 schedules, which stand for all legal orders: one outcome
    """
    require_count("at_most", at_most, 1, "a number of schedules")
    if orders not in ("reduced", "all"):
        require_count("orders", orders, 1, "'reduced', 'all' or a number of schedules")
    found = Exploration(program, args, ranks)
    plain, same, *stale = (found.run(lambda order, turns: turns[0], signal=signal)
                           for signal in (SIGNALS[0], *SIGNALS))
    if plain != same:
        raise ValueError("the program does not repeat itself in the same order: seed what it draws, and hand over what "
                         "it changes as an argument, of which each run gets a copy")
    if isinstance(plain.returned, Exception):
        raise plain.returned
    if plain.hub.races:
        found.races += found.again(plain).races
    if early := [one for one in stale if one != plain]:
        found.races += _read_early(*_first_difference(found.again(plain), found.again(early[0])))
    chance, search = random.Random(seed), Search(reduced=orders == "reduced", messages=plain.order.messages)
    drawn, most = not isinstance(orders, str), at_most if isinstance(orders, str) else orders
    while not found.complete and found.schedules < most:
        with suppress(Redundant):
            found.take(found.run((lambda _, turns: chance.choice(turns)) if drawn else search.choose))
        found.complete = not drawn and not search.back()
    if racing := [one for one in found.outcomes if one.hub.races]:
        found.races += found.again(racing[0]).races
    if len(found.outcomes) > 1:
        two = sorted(found.outcomes, key=_shortest)[:2]
        _, place = _first_difference(*map(found.again, two))
        found.difference = "\n".join(["the end depends on the order of turns. Two schedules that differ:",
                                      *map(str, two), f"they differ first {place}"])
    if found.races or found.difference:
        raise RaceError(found)
    return found


def _shortest(outcome: RunOutcome) -> tuple[bool, int]:
    """The place of an outcome among equal ones: with a race, then in few words."""
    return not outcome.hub.races, len(as_text(outcome.order.turns))


def _first_difference(one: WatchedHub, other: WatchedHub) -> tuple[LineSeen | None, str]:
    """The first moment at which a rank saw or did something else in one run than in the other, and its place in words;
    None where no line of the program's own shows it."""
    theirs = {mine.rank: iter([its for its in other.history if its.rank == mine.rank]) for mine in one.history}
    for mine in one.history:
        its = next(theirs[mine.rank], None)
        if its is None or mine[:4] != its[:4]:
            names = [name for name, value in mine.seen.items() if its and its.seen.get(name) != value]
            return mine, f"in rank {mine.rank}, at {mine.line}" + f": {', '.join(names)} differs" * bool(names)
    if len(other.history) > len(one.history):
        return _first_difference(other, one)
    return None, "where no line of the program's own shows it"


def _read_early(moment: LineSeen | None, place: str) -> list[Race]:
    """The races of a rank that at this moment has what depends on the bytes that hide results."""
    if moment and moment.results:
        return [one.race(moment.rank, "read", moment.line) for one in moment.results]
    return [(moment.rank if moment else 0,
             f"has what was read before its wait(), {place}\n  wait first, on whatever it is from")]
