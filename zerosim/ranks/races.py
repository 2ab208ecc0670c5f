"""Races of a rank program: who touches a buffer in flight, and whose result depends on the order of turns.

`explore` runs a program again and again, in other orders (`schedules`), and compares all that it returns and traces.
Its ranks deliver as devices do: a result lands in the caller's ``out=`` when the collective is carried out, and what is
sent is read only then. Each buffer of an asynchronous collective is compared with what it was, at each turn and before
each wait. What a result that is read too early changes shows when the program runs once more with other bytes in the
place of those that have not arrived. Only what was found runs again line by line (`sys.settrace`), to name the lines.
"""

import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from textwrap import shorten
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np

from zerosim.numerics.arrays import as_bytes, may_share_memory, sha256
from zerosim.numerics.checks import require_count
from zerosim.ranks.call import Backend
from zerosim.ranks.cluster import Cluster, RankProgram
from zerosim.ranks.errors import PACKAGE, place_of, text_of
from zerosim.ranks.hub import Hub, RunOptions
from zerosim.ranks.rank import Array, Rank, Work
from zerosim.ranks.schedules import Carried, Choose, Chosen, Redundant, Search, Turn, as_text, legal_orders

SHOWN_TURNS = 12  # which two schedules begin with, and that are shown all the same
STALE = 0x5A  # each byte of a result that has not arrived, where NaN and 0xA5 are to be told from what depends on them
NOT_TRACED = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")), "<",
              *(os.path.join(PACKAGE, floor) + os.sep for floor in ("ranks", "numerics")))
INTERACTIVE = ("<stdin>", "<ipython", "<python-input")


@dataclass(frozen=True, slots=True)
class Race:
    """A rank touched a buffer of an asynchronous collective before its wait, or never waited; with both places."""

    rank: int
    deed: Literal["wrote to", "read", "never waited for"]
    what: str
    issued: str
    at: str  # where the deed was done; where the program ended, of the last one
    advice: str

    def __str__(self) -> str:
        verb = {"wrote to": "written to", "never waited for": "ended"}.get(self.deed, self.deed)
        return (f"race: rank {self.rank} {self.deed} {self.what}\n  issued at {self.issued}\n  {verb} at {self.at}\n"
                f"  {self.advice}")


class RaceError(AssertionError):
    """A program that races, or whose results or traces depend on the order of turns; ``exploration`` has the rest."""

    def __init__(self, exploration: "Exploration") -> None:
        super().__init__(str(exploration))
        self.exploration = exploration


@dataclass(slots=True)
class InFlight:
    """A buffer of an asynchronous collective between issue and wait, and the bytes that it must have."""

    rank: int
    turn: Carried
    work: Work
    name: str
    array: Array
    is_out: bool
    found: bytes

    def race(self, deed: Literal["wrote to", "read"], at: str) -> Race:
        """A deed that has to come after the wait."""
        advice = "until wait() a result may arrive there, or not" if self.is_out else "until wait() it may still be sent"
        way = "wait first" if deed == "read" else "wait first, or write to memory of your own"
        return Race(self.rank, deed, f"{self.name} of {self.work.title}", self.work.where, at, f"{advice}: {way}")


class Moment(NamedTuple):
    """What a rank's program sees in a line that it comes to; ``made_at`` is the line that has just ended."""

    rank: int
    made_at: str
    here: str
    seen: dict[str, Any]
    results: tuple[InFlight, ...]  # that were still to arrive


class Watch(Chosen):
    """An order of turns that looks at buffers in flight before each turn, and, if ``traced``, in each line.

    With ``copies`` a result is hidden until its own rank's wait, behind NaN, or other bytes if ``stale``.
    """

    def __init__(self, choose: Choose, *, copies: bool = False, stale: bool = False, traced: bool = False) -> None:
        super().__init__(choose)
        self.copies, self.stale, self.traced = copies, stale, traced
        self.in_flight: list[InFlight] = []
        self.races: list[Race] = []
        self.history: list[Moment] = []
        self.line: dict[int, str] = {}  # in which each rank is
        self.last: dict[int, str] = {}  # from which its program returned

    def collective_next(self, due: Any, ready: Any) -> bool:
        self.look()
        return super().collective_next(due, ready)

    def look(self) -> None:
        """Finds what a program wrote to buffers in flight; the turn of a collective may write to its own."""
        self.in_flight = [one for one in self.in_flight if not one.work.waited]
        for one in self.in_flight:
            found = as_bytes(one.array).tobytes()
            if found != one.found and one.turn != self.turns[-1]:
                self.races.append(one.race("wrote to", self.place(one.rank)))
            one.found = found

    def place(self, rank: int) -> str:
        """The line in which a rank is."""
        return self.line.get(rank, "a line that is not traced")

    def add(self, rank: int, turn: Carried, work: Work, **buffers: Array | None) -> None:
        """Watches the buffers of a new work from here on, and looks at all of them before it is waited for."""
        finish, work._x = work._finish, None  # its own check would hide what a change does
        assert finish is not None
        out = buffers["out"]
        if self.stale and out is not None:
            as_bytes(out)[...] = STALE
        for role, array in buffers.items():
            if array is not None:
                said = f"{_name(array)}, the {'result' if role == 'out' else 'input'}"
                self.in_flight.append(InFlight(rank, turn, work, said, array, array is out, as_bytes(array).tobytes()))

        def look_and_finish() -> Array | None:
            self.look()
            return finish()

        work._finish = look_and_finish

    def end(self, rank: int, works: list[Work]) -> None:
        """A rank's program has returned, with these works that it did not wait for, and that are forgotten here."""
        self.look()
        self.races += [Race(rank, "never waited for", work.title, work.where, self.last.get(rank, "its end"),
                            "keep what async_op=True returns, and call wait() on it") for work in works]
        works.clear()

    # -- line by line -------------------------------------------------------------------------------------------------

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Looks and notes at each line of the program, and of the package's that compute for it; see `sys.settrace`."""
        name = frame.f_code.co_filename
        if name.startswith(NOT_TRACED) and not name.startswith(INTERACTIVE):
            return None
        rank = self.turns[-1]
        if event in ("line", "return") and isinstance(rank, int):
            self.look()
            here = _spot(frame)
            if event == "line":
                self.note(rank, self.place(rank), here, frame.f_locals)
            else:
                self.note(rank, here, here, {"what is returned": arg})
            self.line[rank] = self.last[rank] = here
            if event == "return":
                self.line[rank] = _spot(frame.f_back)
        return self.trace

    def note(self, rank: int, made_at: str, here: str, values: Mapping[str, Any]) -> None:
        """Notes what the program has in its hands, but for what is in flight."""
        mine = tuple(one for one in self.in_flight if one.rank == rank)
        seen = {name: _seen(value, mine) for name, value in values.items()}
        self.history.append(Moment(rank, made_at, here, seen, tuple(one for one in mine if one.is_out)))

    def parts_from(self, other: "Watch") -> tuple[Moment, list[str]] | None:
        """The first moment at which a rank saw or did something else than in the other run, and the names of what."""
        theirs: dict[int, Iterator[Moment]] = {
            rank: iter([one for one in other.history if one.rank == rank]) for rank in {m.rank for m in self.history}}
        for mine in self.history:
            its = next(theirs[mine.rank], None)
            if its is None or mine[:4] != its[:4]:
                return mine, [] if its is None else [
                    name for name in mine.seen if mine.seen[name] != its.seen.get(name, name)]
        return None


def _spot(frame: FrameType | None) -> str:
    """The place in the program, and, where that is in a line of the package's, that one."""
    where = place_of(frame)
    if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        where += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"
    return where


def _name(array: Array) -> str:
    """The name of an array in the function that issued a collective of it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__):
        frame = frame.f_back
    names = [] if frame is None else [name for name, value in frame.f_locals.items() if value is array]
    return names[0] if names else f"an array of shape {array.shape}"


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


# -- Ranks that are watched ------------------------------------------------------------------------------------------


class WatchedRank(Rank):
    """A rank whose asynchronous collectives are watched, and deliver as the watch says."""

    @property
    def _watch(self) -> Watch:
        hub = self._state.in_use()
        assert isinstance(hub, Hub)
        assert isinstance(hub.order, Watch)
        return hub.order

    def _note(self, sent: Array | None) -> None:
        watch, rank = self._watch, self._state.index
        if watch.traced:
            watch.note(rank, watch.place(rank), watch.place(rank), {"what is sent": sent})

    def exchange(self, send: Array | None, to: int | None, out: Array | None, source: int | None, *,
                 purpose: str = "unspecified") -> Array | None:
        self._note(send)
        return super().exchange(send, to, out, source, purpose=purpose)

    def _collective(self, operation: str, algorithm: str, x: Array, cut: Any, *, out: Array | None,
                    **options: Any) -> Any:
        self._note(x)
        watch, number = self._watch, self._state.calls[self.key]
        result = super()._collective(operation, algorithm, x, cut, out=out,
                                     **options | {"copy_in_flight": watch.copies})
        if isinstance(result, Work):
            watch.add(self._state.index, Carried(self.key, number, operation), result, out=out,
                      x=None if out is x else x)
        return result


class WatchedCluster(Cluster):
    """A cluster for one run, of watched ranks that take turns as the watch has them chosen."""

    def __init__(self, ranks: int, watch: Watch) -> None:
        super().__init__(ranks)
        self.watch = watch
        self.ranks = [WatchedRank(rank._state, rank.group) for rank in self.ranks]

    def _backend(self, options: RunOptions) -> Backend:
        return Hub(len(self.ranks), self._transport, options, self.watch)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The end of a run in one schedule: all that must not depend on it, and what was seen beside."""

    watch: Watch
    results: str
    shown: str
    rows: list[list[Any]]
    error: Exception | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and (self.results, self.rows) == (other.results, other.rows)


@dataclass(frozen=True, slots=True)
class Explored:
    """A program that is run in many orders; each run has arguments of its own, copied from those given."""

    program: RankProgram
    args: tuple[Any, ...]
    ranks: int

    def run(self, watch: Watch) -> Outcome:
        """One run; raises Redundant where the watch's order says that it need not go on."""
        def body(rank: Rank, *args: Any) -> Any:
            if watch.traced:
                sys.settrace(watch.trace)
            result = self.program(rank, *args)
            watch.end(rank.index, rank._state.pending)
            return result

        cluster, before = WatchedCluster(self.ranks, watch), sys.gettrace()
        try:
            results = list(cluster.run(body, *deepcopy(self.args)))
            return Outcome(watch, sha256(results), f"returns {results}", [trace.rows for trace in cluster.trace], None)
        except Redundant:
            raise
        except Exception as error:
            said = f"raises {type(error).__name__}: {text_of(error)}"
            return Outcome(watch, said, said, [], error)
        finally:
            if watch.traced:
                sys.settrace(before)

    def again(self, found: Outcome) -> Watch:
        """The same run once more, line by line."""
        watch, turns = found.watch, found.watch.turns
        return self.run(Watch(lambda order, _: turns[len(order.turns)], copies=watch.copies, stale=watch.stale,
                              traced=True)).watch


# -- Exploration -----------------------------------------------------------------------------------------------------


def first(order: Chosen, turns: Sequence[Turn]) -> Turn:
    """The plain order: a collective as soon as it is due, then the first rank that is ready."""
    return turns[0]


@dataclass(slots=True)
class Exploration:
    """A program in ``schedules`` orders of turns, and what was found.

    ``legal`` is the number of orders that these stand for, with all that differ from them by turns that commute; of
    schedules drawn by seed, a lower bound; None where it was not counted. ``complete`` says that there are no others.
    ``outcomes`` are the runs that ended differently, each in its shortest schedule: a right program has one.
    """

    ranks: int
    schedules: int = 0
    legal: int | None = 0
    complete: bool = False
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    races: list[Race] = field(default_factory=list)
    difference: str = ""

    def take(self, outcome: Outcome) -> None:
        """Notes one more run."""
        self.schedules += 1
        same = next((at for at, other in enumerate(self.outcomes) if outcome == other), len(self.outcomes))
        self.outcomes[same:same + 1] = [min([outcome, *self.outcomes[same:same + 1]],
                                            key=lambda one: len(as_text(one.watch.turns)))]

    def add(self, races: Sequence[Race]) -> None:
        """Adds those races that are not known yet."""
        self.races += [race for race in dict.fromkeys(races) if race not in self.races]

    def __str__(self) -> str:
        stand = "" if self.legal is None else f", which stand for {'all ' * self.complete}{self.legal:,} legal orders"
        if not self.complete and self.legal is not None:
            stand = f" of at least {self.legal:,} legal orders"
        ends = "one outcome" if len(self.outcomes) == 1 else f"{len(self.outcomes)} different outcomes"
        return "\n".join([f"{self.ranks} ranks, {self.schedules:,} schedules{stand}: {ends}",
                          *map(str, self.races), *[self.difference] * bool(self.difference)])


def explore(program: RankProgram, *args: Any, ranks: int = 2, orders: int | Literal["reduced", "all"] = 100,
            seed: int = 1, at_most: int = 10_000) -> Exploration:
    """Runs ``program(rank, *args)`` in many legal orders of ranks and of asynchronous collectives, and looks for races.

    ``orders`` are so many schedules drawn by ``seed``, or, of a small program, every one: "reduced", one of those that
    differ by turns that commute, or "all"; at most so many. Results, by fingerprint, and traces must be the same in all
    of them. Turns of two ranks commute if ranks share nothing but what they send; what they share in this process, as a
    list among ``args``, is explored by a number or by "all". Each run gets copies of ``args`` of its own.

    Raises RaceError that says which rank wrote to a buffer in flight, read a result too early or never waited, and
    where; or which two schedules end differently, and the first line in which they part. Raises what the program
    raises in the plain order where that is no race, and ValueError for one that does not repeat itself.

    >>> import numpy as np
    >>> def program(rank):
    ...     work = rank.all_reduce(np.ones(2), async_op=True)
    ...     rank.barrier()
    ...     return work.wait()
    >>> print(explore(program, ranks=2, orders="reduced"))
    2 ranks, 8 schedules, which stand for all 92 legal orders: one outcome
    """
    require_count("at_most", at_most, 1, "a number of schedules")
    if orders not in ("reduced", "all"):
        require_count("orders", orders, 1, "a number of schedules, 'reduced' or 'all'")
    explored, found = Explored(program, args, ranks), Exploration(ranks)
    plain, again, stale = (explored.run(Watch(first, copies=True, stale=stale)) for stale in (False, False, True))
    if plain != again:
        raise ValueError("the program does not repeat itself in the same order: seed what it draws, and hand over what "
                         "it changes as an argument, of which each run gets a copy")
    if plain.watch.races:
        found.add(explored.again(plain).races)
    if plain != stale:
        found.add(_read_early(explored.again(plain), explored.again(stale)))
    if plain.error is not None and not found.races:
        raise plain.error
    members = _take_all(explored, found, orders, random.Random(seed), at_most)
    racing = next((one for one in found.outcomes if one.watch.races), None)
    if racing is not None:
        found.add(explored.again(racing).races)
    if len(found.outcomes) > 1:
        two = sorted(found.outcomes, key=lambda one: len(as_text(one.watch.turns)))[:2]
        found.difference = _difference(*two, *map(explored.again, two))
    if found.races or found.difference:
        raise RaceError(found)
    return found


def _take_all(explored: Explored, found: Exploration, orders: int | str, chance: random.Random, at_most: int) -> None:
    """The runs in the orders that are asked for."""
    search = Search(reduced=orders == "reduced")
    if isinstance(orders, int):
        for _ in range(orders):
            found.take(explored.run(Watch(lambda _, turns: chance.choice(turns))))
        found.legal = legal_orders(found.outcomes[0].watch.members, found.ranks)
        return
    while found.schedules < at_most and not found.complete:
        watch = Watch(search.choose)
        try:
            found.take(explored.run(watch))
        except Redundant:
            pass
        else:
            count = legal_orders(watch.members, found.ranks) if search.reduced else 1
            found.legal = None if count is None or found.legal is None else found.legal + count
        found.complete = not search.back(watch)


def _read_early(mine: Watch, stale: Watch) -> list[Race]:
    """The race of two runs in one order that part where other bytes stand for what has not arrived."""
    found = mine.parts_from(stale)
    return [] if found is None else [one.race("read", found[0].made_at) for one in found[0].results]


def _difference(one: Outcome, other: Outcome, mine: Watch, its: Watch) -> str:
    """The text about two schedules that end differently."""
    found = mine.parts_from(its) or its.parts_from(mine)
    where = "where no line of the program shows it"
    if found is not None:
        moment, names = found
        where = f"in rank {moment.rank}, at {moment.made_at}" + f": {', '.join(names)} differs" * bool(names)
    same = len(os.path.commonprefix([one.watch.turns, other.watch.turns]))
    same = same if same > SHOWN_TURNS else 0
    said = [f"the end depends on the order of turns. Two schedules that differ{f', after {same} turns' * bool(same)}:"]
    said += [f"  {as_text(outcome.watch.turns[same:])}\n    {shorten(outcome.shown, 160)}" for outcome in (one, other)]
    return "\n".join([*said, f"they part {where}"])
