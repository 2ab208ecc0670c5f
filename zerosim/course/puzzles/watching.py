"""The checker's instruments: a limit of time, measures of a run, words for errors, silenced ranks, an audit."""

import signal
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from zerosim.course.puzzles.score import Hole, Measured, Measures, Refused
from zerosim.numerics.arrays import poison
from zerosim.planning.hardware import MOST, Device, Link, Machine, Network
from zerosim.planning.recording import record
from zerosim.planning.timeline import replay
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import (
    PACKAGE,
    DeadlockError,
    MismatchError,
    OutOfMemoryError,
    PendingWorkError,
    text_of,
)
from zerosim.ranks.memory import Memory
from zerosim.ranks.process import Interrupts, guarded
from zerosim.ranks.rank import Rank, Work
from zerosim.ranks.trace import Traces

SECONDS = 20.0  # of the processor; a case takes a fraction of one
WAITING = 600.0  # seconds of the clock, for what waits and computes nothing: no loaded machine is so slow
MADE_UP = "made up, so that seconds are steps", "today"
COUNTS_STEPS = Machine(Device("computes in no time", 1, 1, MOST, {"fp32": MOST}, *MADE_UP),
                       Network(Link("a second for every message", MOST, 1, *MADE_UP)), "fp32")


@guarded
def run(cluster: Cluster, where: str, program: Callable[..., Any], *args: Any) -> Sequence[Any]:
    """The result of each rank; Refused, in one sentence about ``where`` (``N=3 (n=7)``), for whatever is raised.

    A run that never ends is interrupted, as by Ctrl-C. Hole and a KeyboardInterrupt of the reader's pass through.
    """
    with limited(where):
        try:
            return cluster.run(program, *args)
        except (Hole, KeyboardInterrupt):
            raise
        except Refused as error:
            raise Refused(f"On {where} {error}") from error
        except BaseException as error:  # sys.exit() too must not end the check, as if all were well
            raise Refused(explained(where, error)) from error


def refuse_few_bytes(where: str, cluster: Cluster, least: int, more: str = "") -> None:
    """Refuses a run in which all ranks together sent less than what has to travel; ``more`` ends the sentence."""
    sent = sum(cluster.trace.sent_nbytes())
    if sent < least:
        raise Refused(f"On {where} the ranks sent {sent:,} bytes in all where {least:,} have to travel: what one rank "
                      f"knows of another's data must come in a message{more}")


def measured(cluster: Cluster, title: str, target: Measures) -> Measured:
    """The measures of the last run, beside a target.

    Raises Refused for a run that would wait for itself where a rank's communication goes in the order of its calls.
    """
    try:
        found = measures(cluster)
    except ValueError as error:
        raise Refused(f"On N={len(cluster.ranks)} ({title}) {_first_sentence(str(error))}") from error
    fullest = cluster.memory.peak_nbytes.index(found.peak_nbytes)
    return Measured(len(cluster.ranks), title, found.peak_nbytes, found.sent_nbytes, found.steps, target,
                    cluster.memory.peak_nbytes_by_kind[fullest])


def measures(cluster: Cluster) -> Measures:
    """The most that a rank of the last run held and sent, and the steps in sequence."""
    return Measures(max(cluster.memory.peak_nbytes), max(cluster.trace.sent_nbytes()),
                    steps_in_sequence(cluster.trace))


def steps_in_sequence(traces: Traces) -> int:
    """The hops on the longest chain of a run: its seconds where a message takes one, and computing none.

    >>> cluster = Cluster(4)
    >>> _ = cluster.run(lambda rank: rank.all_reduce(np.ones(8)))
    >>> steps_in_sequence(cluster.trace)
    6
    """
    seconds: float = replay(record(traces), COUNTS_STEPS).step_seconds
    return round(seconds)


@guarded
@contextmanager
def limited(where: str) -> Iterator[None]:
    """Raises Refused where the ``with`` block has taken SECONDS of the processor, or WAITING of the clock.

    A timer interrupts it, as by Ctrl-C, again and again until it ends: an answer may catch an interrupt. Only the main
    thread has timers, and on Windows none has: elsewhere Ctrl-C ends what never ends, and the command its process.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    began, computed, said = time.monotonic(), time.thread_time(), ""

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal said
        if time.thread_time() - computed > SECONDS:
            said = f"it has not ended after {SECONDS:g} seconds of the processor; look for a loop that never ends"
        elif time.monotonic() - began > WAITING:
            said = f"it has not ended after {WAITING:g} seconds; look for what it waits for"
        if said:
            Interrupts()(number, frame)  # raises KeyboardInterrupt, but inside the bookkeeping only the next time

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, *[min(SECONDS, WAITING) / 20] * 2)
    try:
        yield
    except KeyboardInterrupt:
        if not said:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)  # None: one that is not Python's
    if said:
        raise Refused(f"On {where} {said}")


def explained(where: str, error: BaseException) -> str:
    """The sentence, without its full stop, for what came out of a run on ``where``, as in ``N=3 (n=7)``."""
    match error:
        case DeadlockError():
            lines = [" ".join(line.split()) for line in str(error).splitlines()[1:-1]]
            return f"On {where} no rank can go on: {'; '.join(lines)}"
        case MismatchError() | PendingWorkError() | OutOfMemoryError():
            return f"On {where} {_first_sentence(str(error))}"
    raised = next((note for note in getattr(error, "__notes__", ()) if note.startswith("raised by")), "")
    who = raised.removeprefix("raised by ").partition(" of ")[0] or "a rank"
    said = _first_sentence(text_of(error))
    return f"On {where} {who} raised {type(error).__name__}{_line(error)}" + (f": {said}" if said else "")


def _line(error: BaseException) -> str:
    """`` in line 7 of ring``, of the innermost function that is not the package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith((PACKAGE, "<frozen "))]
    return f" in line {frames[-1].lineno} of {frames[-1].name}" if frames else ""


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


class SilencedRank(Rank):
    """The same rank, which takes part in everything, sends what it has, and hears nothing: what arrives is NaN.

    An answer that is right all the same has not learnt it from messages.
    """

    def exchange(self, *args: Any, **options: Any) -> Any:
        """The exchange of the rank, after which ``out`` is NaN."""
        return _poisoned(super().exchange(*args, **options))

    def _collective(self, *args: Any, **options: Any) -> Any:
        return _poisoned(super()._collective(*args, **options))

    def _joined(self, members: Sequence[int], *number: int) -> Rank:
        return SilencedRank.of(super()._joined(members, *number))

    @classmethod
    def of(cls, rank: Rank) -> "SilencedRank":
        """A silenced handle of a rank."""
        return cls(rank._state, rank.group, rank.communicator)


def _poisoned(found: Any) -> Any:
    """An array of NaN, or a Work whose result will be one."""
    if isinstance(found, Work):
        finish = found._finish
        found._finish = lambda: _poisoned(finish and finish())
    elif isinstance(found, np.ndarray):
        poison(found)
    return found


def refuse_unheard(where: str, attempt: Callable[[], object]) -> None:
    """Refuses an answer that is right in an attempt on silenced ranks."""
    try:
        attempt()
    except (Refused, Hole):
        return
    raise Refused(f"On {where} its results are right even when every message arrives as NaN, so it sees other ranks' "
                  "data where no message brought them; a rank knows its arguments, and what others send it")


class AuditedRank:
    """The bytes that one rank really holds, of NumPy's arrays and all else, beside those that its memory counts.

    Python's tracer counts the bytes of all; since one thread computes (``workers=1``), what is made between `resume`
    and `pause` is the running rank's.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory, self.live_nbytes = memory, memory.now_nbytes
        self.missed_at_rest_nbytes = self.missed_in_between_nbytes = 0  # the most that its memory has not counted
        self.resume()

    def resume(self) -> None:
        """The rank begins, or goes on."""
        self.memory.reset_peak()
        tracemalloc.reset_peak()
        self._began = tracemalloc.get_traced_memory()[0]

    def pause(self) -> None:
        """Another one goes on, or the rank has ended."""
        now, peak = tracemalloc.get_traced_memory()
        peak += self.live_nbytes - self._began
        self.live_nbytes += now - self._began
        self.missed_at_rest_nbytes = max(self.missed_at_rest_nbytes, self.live_nbytes - self.memory.now_nbytes)
        self.missed_in_between_nbytes = max(self.missed_in_between_nbytes, peak - self.memory.peak_nbytes)


Audit = dict[Any, AuditedRank]  # by greenlet, in the order in which ranks begin


@contextmanager
def audited() -> Iterator[Audit]:
    """An empty audit, to which the ranks that run in the ``with`` block add themselves before they make anything."""
    import greenlet

    ranks: Audit = {}

    def switched(event: str, ends: tuple[Any, Any]) -> None:
        origin, target = ends
        if origin in ranks:
            ranks[origin].pause()
        if target in ranks:
            ranks[target].resume()

    traced_before = tracemalloc.is_tracing()
    if not traced_before:
        tracemalloc.start()
    previous = greenlet.settrace(switched)
    try:
        yield ranks
    finally:
        greenlet.settrace(previous)
        ranks.clear()
        if not traced_before:
            tracemalloc.stop()
