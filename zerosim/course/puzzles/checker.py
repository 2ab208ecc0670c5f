"""Compares what ranks returned with what they should have, and finds the words for a difference.

Every complaint follows "On N=3 (n=7) rank 1 ", and is one sentence without its full stop.
"""

import _thread
import functools
import inspect
import threading
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import steps_in_sequence
from zerosim.course.puzzles.puzzle import OPEN, PASSED, REFUSED, Answer, Case, Hole, Measured, Puzzle, Refused, Score
from zerosim.numerics.arrays import checksum, poison
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import PACKAGE, DeadlockError, MismatchError, OutOfMemoryError, PendingWorkError
from zerosim.ranks.memory import Memory
from zerosim.ranks.rank import Rank, Work

Leaf = tuple[str, Any]
CLOSE = 1e-4  # of the largest element: what another order of fp32 additions may change, and a wrong formula exceeds


def complaint(case: Case, found: Sequence[Any], names: tuple[str, ...]) -> tuple[int, str] | None:
    """The first rank whose result is wrong, and what is wrong with it; None where all are right."""
    for rank, value in enumerate(found):
        if _is_endless(value):
            return rank, "returned a list that contains itself"
        text = _difference(value, case.expected[rank], _bounds(case, rank), names)
        if text:
            known = next((mistake.what for mistake in case.mistakes if _is(found, mistake.results, case)), None)
            return rank, f"{known or 'returned what is wrong'}: {text}"
    return None


def _is_endless(value: Any) -> bool:
    try:
        _structure(value)
    except RecursionError:
        return True
    return False


def _bounds(case: Case, rank: int) -> Any:
    return None if case.bounds is None else case.bounds[rank]


def _is(found: Sequence[Any], results: Sequence[Any], case: Case) -> bool:
    """True when every rank returned what this mistake returns, and that is wrong here."""
    return all(_difference(value, results[rank], _bounds(case, rank), ()) is None for rank, value in enumerate(found))


def _aligned(found: Any, expected: Any, names: tuple[str, ...]) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of both, where they have the same structure; else the two values as they are."""
    if _structure(found) == _structure(expected):
        return list(_leaves(found, names)), list(_leaves(expected, names))
    return [("", found)], [("", expected)]


def _structure(value: Any) -> Any:
    return [_structure(item) for item in value] if isinstance(value, list | tuple) else None


def _leaves(value: Any, names: tuple[str, ...], place: str = "") -> Iterator[Leaf]:
    if not isinstance(value, list | tuple):
        yield place, value
        return
    for number, item in enumerate(value):
        name = names[number] if number < len(names) else f"item {number}"
        yield from _leaves(item, (), f"{place}, {name}" if place else name)


def _misfit(place: str, found: Any, expected: Any) -> str | None:
    """The difference of a result in form; None where it does not."""
    name = place or "the result"
    if isinstance(expected, list | tuple):
        return f"{name} is {_kind(found)} where {len(expected)} things are expected"
    if not isinstance(expected, np.ndarray):
        fits = isinstance(found, bool | int | float | np.generic)
        return None if fits else f"{name} is {_kind(found)} where {expected!r} is expected"
    if not isinstance(found, np.ndarray):
        return f"{name} is {_kind(found)} where an array of shape {expected.shape} is expected"
    if found.shape != expected.shape:
        return f"{name} has shape {found.shape} where {expected.shape} is expected"
    if found.dtype != expected.dtype:
        return f"{name} is {found.dtype} where {expected.dtype} is expected"
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _difference(found: Any, expected: Any, bounds: Any, names: tuple[str, ...]) -> str | None:
    """The first difference of two results; None where nothing does."""
    a, b = _aligned(found, expected, names)
    allowed = [None] * len(b) if bounds is None else [leaf for _, leaf in _leaves(bounds, ())]
    for (place, one), (_, right), bound in zip(a, b, allowed, strict=True):
        text = _misfit(place, one, right) or _other_value(place, one, right, bound)
        if text:
            return text
    return None


def _other_value(place: str, found: Any, expected: Any, bound: Any) -> str | None:
    name = place or "the result"
    if not isinstance(expected, np.ndarray):
        return None if found == expected else f"{name} is {found!r} where {expected!r} is expected"
    wrong = _wrong_elements(found, expected, bound)
    if not wrong.size:
        return None
    at = int(wrong[0])
    one, right = found.reshape(-1)[at], expected.reshape(-1)[at]
    where = f"element {at}" + (f" of {place}" if place else "")
    near = _near(found, expected) if bound is None else ""
    return f"{where} is {one} where {right} is expected{near}"


def _wrong_elements(found: np.ndarray, expected: np.ndarray, bound: Any) -> np.ndarray:
    """The places at which bits differ, or at which the difference is beyond the bound."""
    if bound is None:
        unsigned = np.dtype(f"u{expected.dtype.itemsize}")
        a, b = (np.ascontiguousarray(x).reshape(-1).view(unsigned) for x in (found, expected))
        return np.flatnonzero(a != b)
    with np.errstate(all="ignore"):
        distance = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return np.flatnonzero(~(distance.reshape(-1) <= np.asarray(bound).reshape(-1)))


def _near(found: np.ndarray, expected: np.ndarray) -> str:
    """Words for a result whose numbers are right but for their rounding."""
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), expected.astype(np.float64)
        distance, largest = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
    return ", which is the same sum added or rounded in another order" if distance <= CLOSE * largest else ""


# -- What each rank really holds, beside what its ledger says: an array that was made with NumPy alone is seen here ---
# Python's tracer counts the bytes of all; since exactly one rank runs at a time, what is made between two switches is
# the running rank's.


@dataclass(slots=True)
class Watched:
    """One rank: its ledger, the bytes that it made, and the most that its ledger missed."""

    memory: Memory
    live_nbytes: int
    missed_at_rest_nbytes: int = 0
    missed_in_between_nbytes: int = 0


class Audit:
    """Watches the ranks that have entered, while the ``with`` block runs; ``ranks`` are in the order of their entry."""

    def __init__(self) -> None:
        self.ranks: dict[Any, Watched] = {}
        self._began = 0
        self._traced_before = False
        self._previous: Callable[..., None] | None = None

    def __enter__(self) -> "Audit":
        import greenlet

        self._traced_before = tracemalloc.is_tracing()
        if not self._traced_before:
            tracemalloc.start()
        self._previous = greenlet.settrace(self._switched)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        import greenlet

        greenlet.settrace(self._previous)
        self.ranks.clear()
        if not self._traced_before:
            tracemalloc.stop()

    def enter(self, memory: Memory) -> None:
        """Called by a rank's program before it makes anything."""
        from greenlet import getcurrent

        self.ranks[getcurrent()] = Watched(memory, memory.now_nbytes)
        self._begin(memory)

    def look(self) -> None:
        """Called by a rank's program at its end, when what it returns is all that it holds."""
        from greenlet import getcurrent

        self._end(self.ranks[getcurrent()])
        self._begin(self.ranks[getcurrent()].memory)

    def _switched(self, event: str, args: tuple[Any, Any]) -> None:
        origin, target = args
        if origin in self.ranks:
            self._end(self.ranks[origin])
        self._begin(self.ranks[target].memory if target in self.ranks else None)

    def _begin(self, memory: Memory | None) -> None:
        if memory is not None:
            memory.reset_peak()
        tracemalloc.reset_peak()
        self._began = tracemalloc.get_traced_memory()[0]

    def _end(self, rank: Watched) -> None:
        now, peak = tracemalloc.get_traced_memory()
        peak += rank.live_nbytes - self._began
        rank.live_nbytes += now - self._began
        at_rest = rank.live_nbytes - rank.memory.now_nbytes
        rank.missed_at_rest_nbytes = max(rank.missed_at_rest_nbytes, at_rest)
        rank.missed_in_between_nbytes = max(rank.missed_in_between_nbytes, peak - rank.memory.peak_nbytes)


# -- A rank to which every message arrives as NaN: who is right all the same has not learnt it from messages ---------

class SilencedWork:
    """A Work whose result is poisoned when it is waited for."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> Any:
        """Blocks as the Work does, and returns NaN."""
        return _poisoned(self._work.wait())

    @property
    def result(self) -> Any:
        """Raises PendingWorkError before ``wait()``, as the Work does."""
        return self._work.result


def _poisoned(found: Any) -> Any:
    if isinstance(found, Work):
        return SilencedWork(found)
    if isinstance(found, np.ndarray):
        poison(found)
    return found


class SilencedRank(Rank):
    """The same rank, which takes part in everything, sends what it has, and hears nothing."""

    @classmethod
    def of(cls, rank: Rank) -> "SilencedRank":
        """A silenced handle of a rank."""
        return cls(rank._state, rank.group, rank.communicator)

    def exchange(self, *args: Any, **options: Any) -> Any:
        """As a rank's; ``out`` is NaN."""
        return _poisoned(super().exchange(*args, **options))

    def reduce_scatter(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().reduce_scatter(*args, **options))

    def all_gather(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_gather(*args, **options))

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_reduce(*args, **options))

    def all_to_all(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_to_all(*args, **options))

    def broadcast(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().broadcast(*args, **options))

    def reduce(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().reduce(*args, **options))

    def gather(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().gather(*args, **options))


# -- An answer that never ends is interrupted, as by Ctrl-C, and refused ---------------------------------------------

SECONDS = 60.0  # a case takes a fraction of one


@contextmanager
def limited(where: str, seconds: float | None = None) -> Iterator[None]:
    """Raises Refused where the ``with`` block has not ended after ``seconds`` (SECONDS where none are given).

    Only the main thread can be interrupted, and only where Ctrl-C is not ignored; elsewhere the block runs on.
    """
    limit = SECONDS if seconds is None else seconds
    alarm = _Alarm(limit)
    said = f"On {where} it has not ended after {limit:g} seconds; look for a loop that never ends"
    try:
        try:
            if threading.current_thread() is threading.main_thread():
                alarm.start()
            yield
        finally:
            alarm.put_off()
    except KeyboardInterrupt as error:
        alarm.put_off()  # once more: the interrupt may have come before the first one was done
        if alarm.has_rung:
            raise Refused(said) from error
        raise
    if alarm.has_rung:  # and somebody caught the interrupt
        raise Refused(said)


class _Alarm(threading.Thread):
    """Interrupts the main thread until it is put off, and never after the block that it watches.

    Once is not enough: an answer may catch the first interrupt, in one rank, and go on in another.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(daemon=True)
        self.has_rung = False
        self._seconds = seconds
        self._off = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._off.wait(self._seconds):
            with self._lock:
                if not self._off.is_set():
                    self.has_rung = True
                    _thread.interrupt_main()

    def put_off(self) -> None:
        with self._lock:
            self._off.set()


# -- One sentence for whatever a run raised --------------------------------------------------------------------------

def explained(where: str, error: BaseException) -> str:
    """The sentence, without its full stop, for what came out of a run on ``where``, as in ``N=3 (n=7)``."""
    match error:
        case DeadlockError():
            lines = [" ".join(line.split()) for line in str(error).splitlines()[1:-1]]
            return f"On {where} no rank can go on: {'; '.join(lines)}"
        case MismatchError():
            return f"On {where} {_first_sentence(str(error))}"
        case PendingWorkError() | OutOfMemoryError():
            return f"On {where} {_first_sentence(str(error))}"
    raised = next((note for note in getattr(error, "__notes__", ()) if note.startswith("raised by")), "")
    who = raised.removeprefix("raised by ").partition(" of ")[0] or "a rank"
    said = _first_sentence(_text(error))
    return f"On {where} {who} raised {type(error).__name__}{_line(error)}" + (f": {said}" if said else "")


def _text(error: BaseException) -> str:
    """The text of an error; nothing where saying it fails."""
    try:
        return str(error)
    except Exception:
        return ""


def _line(error: BaseException) -> str:
    """`` in line 7 of ring``, of the innermost function that is not the package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((PACKAGE, "<frozen "))]
    return f" in line {frames[-1].lineno} of {frames[-1].name}" if frames else ""


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


# ----------------------------------------------------------------------------------------------------
# Runs an answer on the simulator, case by case, and says in one sentence what is wrong with it, or how good it is

# With these one looks behind the rank that one was handed, or at memory that is not one's own.
BACK_DOORS = frozenset({"_state", "as_strided", "ctypes", "gc", "get_objects", "_getframe", "f_back", "f_locals",
                        "stride_tricks", "_transport", "greenlet", "getcurrent"})
OTHER_WORLDS = (3, 5)
UNWRITTEN = "With NaN in new and in freed memory it fails, as if it read what was not written"
UNSENT = "In another order of the ranks, which is as good, it fails, as if they shared something that is no message"
# Seeds of other legal orders in which ranks run; debug mode; what a failure then means.
OTHER_WAYS = ((0, True, UNWRITTEN), (1, False, UNSENT), (2, False, UNSENT))
AUDIT_RANKS, SILENCED_RANKS = 4, 3
# What the audit lets pass at rest; in between, a case says how many shards an expression may take for a moment.
AT_REST_SHARDS = 0.5


def check_answer(puzzle: Puzzle, answer: Answer) -> Score:
    """Runs ``answer`` on every case of the puzzle, under other orders of the ranks too, and audits its memory.

    A hole that is still open makes a Score that says so. Raises ValueError for what is no function.
    """
    if not callable(answer):
        raise ValueError(f"check() takes a function for {puzzle.name!r}, found {answer!r}; "
                         f"write check({puzzle.name!r}, my_function), without calling it")
    rows: list[Measured] = []
    try:
        refuse_back_doors(answer)
        _refuse_clairvoyance(puzzle, answer)
        for case in puzzle.cases():
            rows.append(attempt(puzzle, case, answer))
        _try_other_worlds(puzzle, answer)
        _audit(puzzle, answer)
    except Hole as error:
        return Score(puzzle.name, OPEN, f"A hole is open: {error}.", tuple(rows))
    except Refused as error:
        return Score(puzzle.name, REFUSED, f"{error}.", tuple(rows))
    return Score(puzzle.name, PASSED, _praise(puzzle, rows), tuple(rows))


def _praise(puzzle: Puzzle, rows: list[Measured]) -> str:
    worlds = ", ".join(map(str, sorted({row.ranks for row in rows})))
    how = "within the stated bound" if puzzle.case(2, puzzle.sizes[2][0]).bounds is not None else "bit for bit"
    return f"Right on N = {worlds} in {len(rows)} cases, {how}, and when the ranks run in other orders."


def attempt(puzzle: Puzzle, case: Case, answer: Answer, *, seed: int = 0, debug: bool = False,
            audit: Audit | None = None) -> Measured:
    """One case: what it measured. Raises Refused where the answer is wrong, Hole where it has one.

    Limits hold for plain runs: debug mode copies inputs, and an audit is about another question.
    """
    cluster = Cluster(case.ranks, seed=seed, debug=debug)
    found = _run(cluster, puzzle, case, answer, audit=audit)
    _refuse_result(puzzle, case, found)
    _refuse_forbidden_calls(puzzle, case, cluster)
    sent = cluster.trace.sent_nbytes()
    if sum(sent) < case.least_sent_nbytes:
        raise Refused(f"On {case.where} the ranks sent {sum(sent):,} bytes in all where {case.least_sent_nbytes:,} "
                      "have to travel: what one rank knows of another's data must come in a message")
    measured = Measured(case.ranks, case.title, max(cluster.memory.peak_nbytes), max(sent),
                        steps_in_sequence(cluster.trace), case.target)
    if audit is None and not debug:
        _refuse_excess(case, measured)
    said = case.look(cluster.trace)
    if said:
        raise Refused(f"On {case.where} {said}")
    return measured


def _run(cluster: Cluster, puzzle: Puzzle, case: Case, answer: Answer, *, audit: Audit | None = None,
         silenced: bool = False) -> list[Any]:
    """The result of each rank; Refused for whatever is raised on the way."""
    changed: list[tuple[int, str]] = []

    def program(rank: Rank) -> Any:
        if audit is not None:
            audit.enter(rank.memory)
        given = case.arguments(rank)
        before = [_bits(value) for value in given]
        result = answer(SilencedRank.of(rank) if silenced else rank, *given)
        for name, value, bits in zip(puzzle.parameters, given, before, strict=True):
            if name not in puzzle.changes and _bits(value) != bits:
                changed.append((rank.index, name))
        del given
        if audit is not None:
            audit.look()
        return result

    with limited(case.where):
        try:
            with np.errstate(all="ignore"):  # inf and NaN are part of some cases
                found = list(cluster.run(program))
        except (Hole, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit() too must not end the check, as if all were well
            raise Refused(explained(case.where, error)) from error
    if changed:
        rank, name = changed[0]
        raise Refused(f"On {case.where} rank {rank} changed its argument {name}, which is read-only; work on a copy "
                      "that you take from rank.memory.alloc()")
    return found


def _bits(value: Any) -> Any:
    """A checksum that shows whether an argument was changed; no copy, which the audit would see."""
    if isinstance(value, np.ndarray):
        return value.shape, checksum(value)
    return [_bits(item) for item in value] if isinstance(value, list | tuple) else None


def _refuse_result(puzzle: Puzzle, case: Case, found: list[Any]) -> None:
    said = complaint(case, found, puzzle.returns)
    if said:
        raise Refused(f"On {case.where} rank {said[0]} {said[1]}")


def _refuse_forbidden_calls(puzzle: Puzzle, case: Case, cluster: Cluster) -> None:
    for row in cluster.trace[0].collectives():
        if row.call.operation not in puzzle.allowed:
            allowed = ", ".join(["exchange", *sorted(puzzle.allowed)])
            raise Refused(f"On {case.where} it calls {row.call.operation}, but this puzzle is to be solved with "
                          f"{allowed}")


def _refuse_excess(case: Case, measured: Measured) -> None:
    for limit in case.limits:
        found = getattr(measured, limit.measure)
        if found > limit.most:
            what = {"peak_nbytes": "a rank holds {:,} bytes at its fullest where {:,} are enough",
                    "sent_nbytes": "a rank sends {:,} bytes where {:,} are enough",
                    "steps": "there are {:,} steps in sequence where {:,} are enough"}[limit.measure]
            raise Refused(f"On {case.where} {what.format(found, limit.most)}: {limit.why}")


def _refuse_clairvoyance(puzzle: Puzzle, answer: Answer) -> None:
    """Refuses an answer that is right although all messages arrive as NaN, in every case of three ranks."""
    cases = [puzzle.case(SILENCED_RANKS, length) for length in puzzle.sizes[SILENCED_RANKS]]
    for case in cases:
        try:
            found = _run(Cluster(case.ranks), puzzle, case, answer, silenced=True)
        except (Refused, Hole):
            return
        if complaint(case, found, puzzle.returns):
            return
    raise Refused(f"On {cases[-1].where} its results are right even when every message arrives as NaN, "
                  "so it sees other ranks' data where no message brought them; a rank knows its arguments, and what "
                  "others send it")


def _try_other_worlds(puzzle: Puzzle, answer: Answer) -> None:
    """Refuses an answer that fails where new memory is NaN, or when the ranks run in another order."""
    for ranks in OTHER_WORLDS:
        case = puzzle.case(ranks, puzzle.sizes[ranks][-1])
        for seed, debug, how in OTHER_WAYS:
            try:
                attempt(puzzle, case, answer, seed=seed, debug=debug)
            except Refused as error:
                raise Refused(f"{how}: {error}") from error


def _audit(puzzle: Puzzle, answer: Answer) -> None:
    """Refuses arrays that the ledger does not know, on a run whose shards are long enough to stand out."""
    if not puzzle.audit_length:
        return
    case = puzzle.case(AUDIT_RANKS, puzzle.audit_length)
    with Audit() as audit:
        attempt(puzzle, case, answer, audit=audit)
        for index, rank in enumerate(audit.ranks.values()):
            missed = [nbytes for nbytes, share in ((rank.missed_at_rest_nbytes, AT_REST_SHARDS),
                                                   (rank.missed_in_between_nbytes, case.scratch_shards))
                      if nbytes > share * case.shard_nbytes]
            if missed:
                raise Refused(f"On {case.where} rank {index} holds about {missed[0] // 1000 * 1000:,} bytes that its "
                              "ledger does not know: take arrays from rank.memory.alloc(shape, dtype, kind), or charge "
                              "them with rank.memory.hold(array, kind), and write into them with out=")


def refuse_back_doors(answer: Answer) -> None:
    """Refuses a function whose code names what looks behind its rank, or at foreign memory."""
    code = getattr(inspect.unwrap(_whole(answer)), "__code__", None)
    for name in () if code is None else _names(code):
        if name in BACK_DOORS:
            raise Refused(f"It uses {name}, with which one sees what is not one's own; a rank knows its arguments, "
                          "and what others send it")


def _whole(answer: Any) -> Any:
    while isinstance(answer, functools.partial):
        answer = answer.func
    return answer


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
