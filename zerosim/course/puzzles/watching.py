"""The checker's instruments: an alarm, measures of a run, words for errors, a rank that hears nothing, an audit."""

import _thread
import ctypes
import signal
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from zerosim.course.puzzles.score import Hole, Measured, Measures, Refused
from zerosim.numerics.arrays import poison
from zerosim.planning.hardware import MOST, Device, Link, Machine, Network
from zerosim.planning.recording import record
from zerosim.planning.timeline import replay
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import PACKAGE, DeadlockError, MismatchError, OutOfMemoryError, PendingWorkError
from zerosim.ranks.memory import Memory
from zerosim.ranks.rank import Rank, Work
from zerosim.ranks.trace import Traces

SECONDS = 20.0  # of the processor; a case takes a fraction of one
WAITING = 600.0  # seconds of the clock, for what waits and computes nothing: no loaded machine is so slow
MADE_UP = "made up, so that seconds are steps", "today"
COUNTS_STEPS = Machine(Device("computes in no time", 1, 1, MOST, {"fp32": MOST}, *MADE_UP),
                       Network(Link("a second for every message", MOST, 1, *MADE_UP)), "fp32")


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


@contextmanager
def limited(where: str) -> Iterator[None]:
    """Raises Refused where the ``with`` block has taken SECONDS of the processor, or WAITING of the clock.

    The thread that runs it is interrupted, as by Ctrl-C, until the block ends: an answer may catch an interrupt or
    more. One that catches them all, or computes without end in one operation, is beyond the reach of its own process.
    """
    alarm = _Alarm()
    try:
        try:
            alarm.start()
            yield
        finally:
            alarm.put_off()
    except KeyboardInterrupt as error:
        alarm.put_off()  # once more: the interrupt may have come before the first one was done
        if alarm.said:
            raise Refused(f"On {where} {alarm.said}") from error
        raise
    if alarm.said:  # and somebody caught the interrupt
        raise Refused(f"On {where} {alarm.said}")


class _Alarm(threading.Thread):
    """Interrupts the thread that made it until it is put off, and never after the block that it watches.

    ``said`` is the reason, once it has rung.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.said = ""
        self._watched, self._processor_seconds = threading.current_thread(), _processor_clock()
        self._off = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        began, computed = time.monotonic(), self._processor_seconds()
        while not self._off.wait(min(SECONDS, WAITING) / 20):
            if self._processor_seconds() - computed > SECONDS:
                self._ring(f"it has not ended after {SECONDS:g} seconds of the processor; look for a loop that never "
                           "ends")
            elif time.monotonic() - began > WAITING:
                self._ring(f"it has not ended after {WAITING:g} seconds; look for what it waits for")

    def _ring(self, said: str) -> None:
        with self._lock:
            if not self._off.is_set():
                _interrupt(self._watched, again=bool(self.said))
                self.said = self.said or said

    def put_off(self) -> None:
        with self._lock:
            self._off.set()
        for _ in range(2):  # whatever has been raised in this thread and waits for Python to look comes up here
            pass


def _processor_clock() -> Callable[[], float]:
    """The processor's seconds of this thread; of the process, where threads have no clocks."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def _interrupt(thread: threading.Thread, *, again: bool) -> None:
    """As Ctrl-C does: by a real signal, where there are some, which also ends a wait, as for a lock or in time.sleep().

    In a thread that is not the main one, and where a signal had no effect, by an exception that Python raises there.
    """
    if thread is threading.main_thread() and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread.ident or 0, signal.SIGINT)
    elif thread is threading.main_thread():
        _thread.interrupt_main()
    if again or thread is not threading.main_thread():
        # Never taken back by NULL: CPython 3.11 would go on looking for it at every call, and without end in a trace.
        ident = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))


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


def _silenced(operation: str) -> Callable[..., Any]:
    def called(self: "SilencedRank", *args: Any, **options: Any) -> Any:
        return _poisoned(getattr(super(SilencedRank, self), operation)(*args, **options))

    return called


class SilencedRank(Rank):
    """The same rank, which takes part in everything, sends what it has, and hears nothing: what arrives is NaN.

    An answer that is right all the same has not learnt it from messages.
    """

    exchange = _silenced("exchange")
    reduce_scatter = _silenced("reduce_scatter")
    all_gather = _silenced("all_gather")
    all_reduce = _silenced("all_reduce")
    all_to_all = _silenced("all_to_all")
    broadcast = _silenced("broadcast")
    reduce = _silenced("reduce")
    gather = _silenced("gather")

    @classmethod
    def of(cls, rank: Rank) -> "SilencedRank":
        """A silenced handle of a rank."""
        return cls(rank._state, rank.group, rank.communicator)


@dataclass(slots=True)
class AuditedRank:
    """One rank: its memory, the bytes that it made, and the most of them that its memory has not counted."""

    memory: Memory
    live_nbytes: int
    missed_at_rest_nbytes: int = 0
    missed_in_between_nbytes: int = 0


class Audit:
    """Sees what each rank really holds, beside what its memory counts, in the ``with`` block: NumPy's arrays too.

    Python's tracer counts the bytes of all; since exactly one rank runs at a time, what is made between two switches is
    the running rank's. ``ranks`` are those that have entered, in the order of their entry.
    """

    def __init__(self) -> None:
        self.ranks: dict[Any, AuditedRank] = {}
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

        self.ranks[getcurrent()] = AuditedRank(memory, memory.now_nbytes)
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

    def _end(self, rank: AuditedRank) -> None:
        now, peak = tracemalloc.get_traced_memory()
        peak += rank.live_nbytes - self._began
        rank.live_nbytes += now - self._began
        at_rest = rank.live_nbytes - rank.memory.now_nbytes
        rank.missed_at_rest_nbytes = max(rank.missed_at_rest_nbytes, at_rest)
        rank.missed_in_between_nbytes = max(rank.missed_in_between_nbytes, peak - rank.memory.peak_nbytes)
