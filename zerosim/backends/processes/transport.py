"""Ranks in processes of their own: each process runs one rank, and keeps in touch with the others.

Arrays move from point to point. MPI makes each hop as a pair of non-blocking messages, and goes on whenever it is asked
to; NCCL puts all hops on a stream and is done at once, since what reads the result waits for the stream.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from zerosim.backends.processes.notes import (
    AnnouncedCalls,
    Channel,
    Drained,
    Entered,
    Failed,
    Finished,
    Going,
    IssueCounts,
    Joining,
    Note,
    Sending,
    Stopped,
    Waiting,
    unmet,
    verdict,
)
from zerosim.ranks.call import Backend, Call, GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.cluster import Cluster, Events, Results
from zerosim.ranks.errors import MismatchError, RankStopped, ranks_text
from zerosim.ranks.hub import RunOptions, check_thread
from zerosim.ranks.process import Interrupts, clear_frames, forget_frames


class Request:
    """A call or message on its way."""

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; True if it came any further."""
        raise NotImplementedError

    def wait(self) -> None:
        """Called once, when the program waits for it and it is done: what it reads next must be there."""

    def cancel(self) -> None:
        """The run has failed: gives up what has not moved yet."""


class PointToPoint(Protocol):
    """Moves arrays between this process' rank and the others."""

    library: str
    in_order: bool  # whether ranks that begin the same calls in different orders would wait for each other for ever

    def begin(self, me: Pending) -> Request:
        """Takes the part and returns at once."""

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """The ranks of ``key``, all of the group ``parent``, are a group of their own from here on."""

    def idle(self) -> bool:
        """True when all that the ranks asked for is done, once their programs have returned; raises what went wrong."""

    def drain(self) -> bool:
        """After a failure: takes and forgets what still arrives; True when nothing of this rank's is under way."""

    def close_drained(self) -> None:
        """After a failure, when ``drain()`` was true on every rank: takes what came last, and closes."""

    def close(self) -> None:
        """The run is over on every rank, and nothing is under way."""


# -- Runs the one rank of this process, and keeps in touch with those of the others ----------------------------------
# It never blocks inside a library: it asks again and again whether something has moved, so that Ctrl-C, another rank's
# failure and a verdict on a deadlock all reach a rank that waits.


SPINS = 1000              # idle turns before a waiting rank sleeps between them
NAP_SECONDS = 50e-6
REMEMBERED = 64           # calls in which a rank that waits may find that others called something else
DRAIN_SECONDS = 5.0    # what the library has, once all have stopped, to end what all of them have begun
FAREWELL_SECONDS = 30.0   # the time that the others have to learn of a failed rank; they do at each call of theirs


class ProcessBackend(Backend):
    """One run of one program on this process' rank."""

    def __init__(self, channel: Channel, point_to_point: PointToPoint, interrupts: Interrupts, *, debug: bool,
                 timeout_seconds: float) -> None:
        self.channel, self.point_to_point, self.timeout_seconds = channel, point_to_point, timeout_seconds
        self.interrupts = interrupts
        self.thread = threading.get_ident()
        self.announced = AnnouncedCalls(channel) if debug else None
        self.results: list[Any] = []
        self.issued = IssueCounts()
        self.recent: deque[Call] = deque(maxlen=REMEMBERED)
        self.ahead: list[Pending] = []              # announced, and not agreed on yet
        self.requests: dict[Pending, Request] = {}    # begun, and not waited for yet
        self.notes: dict[int, Waiting] = {}
        self.joining: defaultdict[GroupKey, set[int]] = defaultdict(set)  # who has said to help to make a group
        self.endings: dict[int, Finished | Stopped | Failed] = {}
        self.found: Exception | None = None       # what the notes show to be wrong
        self.drained: set[int] = set()
        self.stopping = False

    @property
    def library(self) -> str | None:
        """The library whose own collectives ``native`` asks for."""
        return self.point_to_point.library

    # -- called by the program's rank -----------------------------------------------------------------------------

    def check_use(self, rank: int) -> None:
        """Raises RankUseError in another thread; otherwise lets everything under way go on."""
        check_thread(self.thread, rank)
        self.progress()

    def issue(self, rank: int, me: Pending) -> None:
        """Takes the part, and sends what can leave at once."""
        self.issued.count(me)
        if isinstance(me, PendingCall):
            self.recent.append(me.call)
        if self.announced is not None:
            self.announced.announce(me)
            self.ahead.append(me)
        # Who sends to this rank first may wait for what it sends, debug mode or not.
        if self.announced is None or (isinstance(me, PendingExchange) and not self.point_to_point.in_order):
            self.requests[me] = self.point_to_point.begin(me)
        self.progress()

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """Makes a group of its own, for which a library blocks until all its ranks are there.

        So each says that it will come; then all come, even if a rank outside has failed meanwhile, or none does.
        """
        self.joining[key].add(self.channel.index)
        for rank in key[0]:
            self.channel.post(Joining(key), rank)
        while not self.joining[key].issuperset(key[0]):
            if any(isinstance(self.endings.get(rank), Stopped | Failed) for rank in key[0]):
                raise RankStopped
            time.sleep(0)
            self._read()
        del self.joining[key]
        self.point_to_point.new_group(parent, key)

    def wait(self, rank: int, me: Pending) -> None:
        """Goes on until the part is done."""
        self._until(lambda: me.done and me not in self.ahead,
                    lambda: Waiting.of(me, self.issued, self.recent))
        self.requests.pop(me).wait()

    # -- the run --------------------------------------------------------------------------------------------------

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Events:
        """Runs the only program to its end, and until all other ranks have ended theirs; there is no event to watch.

        Raises what a rank raised, here or elsewhere, MismatchError or DeadlockError.
        """
        try:
            (program,) = programs
            result = program()
            self._check_going()
            self._end(Finished(self.issued, tuple(self.recent)))
            self._until(self._all_ended)
            error = unmet(self._finished)  # a library takes small messages that nobody has asked for
            if error is not None:
                raise error
            self._until(self.point_to_point.idle)
        except BaseException as failure:
            raised = self._raised(failure)
            self._part(raised)
            if raised is failure:
                raise
            raise raised from None
        self.point_to_point.close()
        self.channel.everyone(None)
        self.results = [result]
        yield from ()

    def _all_ended(self) -> bool:
        return len(self.endings) == self.channel.size

    @property
    def _finished(self) -> dict[int, Finished]:
        """The last words of the ranks whose programs have returned."""
        return {rank: note for rank, note in self.endings.items() if isinstance(note, Finished)}

    def _raised(self, error: BaseException) -> BaseException:
        """The error that this rank raises, and tells the others: its own error, or that of the rank that stopped it."""
        if isinstance(error, RankStopped) and self.found is not None:
            error = self.found.with_traceback(error.__traceback__)  # which shows the program's line
        failed = [(rank, note) for rank, note in self.endings.items() if isinstance(note, Failed)]
        if isinstance(error, RankStopped) and failed:
            self._end(Stopped())
            return failed[0][1].error(failed[0][0], self.channel.size)
        self._end(Failed.of(error))
        error.add_note(f"raised by rank {self.channel.index} of {self.channel.size}")
        return error

    def _end(self, ending: Finished | Stopped | Failed) -> None:
        self.endings[self.channel.index] = ending
        self.channel.post(ending)

    def _part(self, error: BaseException) -> None:
        """After a failure: lets what is under way come to rest, so that the next run finds nothing of this one.

        Ends the whole job where another rank does not learn of the failure in time, or where the library's own
        collective waits for a rank that will not come.
        """
        self.stopping = True
        deadline = time.monotonic() + FAREWELL_SECONDS
        for request in self.requests.values():
            request.cancel()
        while len(self.drained) < self.channel.size:
            drained = self.point_to_point.drain()  # from the start, as others wait
            stopped = self._all_stopped()
            self._read()
            if stopped:
                deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
            if self.channel.index not in self.drained:
                if stopped and drained:
                    self._tell(Drained())
                elif time.monotonic() > deadline:
                    self._abort_job(error)
            time.sleep(NAP_SECONDS)
        self.point_to_point.close_drained()
        self.channel.everyone(None)
        self.ahead.clear()
        self.requests.clear()

    def _all_stopped(self) -> bool:
        return self._all_ended() and not self._finished

    def _abort_job(self, error: BaseException) -> None:
        silent = [rank for rank in range(self.channel.size) if rank not in self.endings or rank in self._finished]
        why = (f"{ranks_text(silent)} did not hear of it for {FAREWELL_SECONDS:g} seconds" if silent else
               f"what rank {self.channel.index} has begun cannot be given up, and another rank does not take part in "
               "it")
        print(f"{Failed.of(error).text}\n{why}; all processes of the job are ended", file=sys.stderr, flush=True)
        self.channel.abort()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], waiting: Callable[[], Waiting] | None = None) -> None:
        """Takes turns until ``done()``; a rank that waits for long says for what, and looks for a verdict."""
        moved_at, idle, noted = time.monotonic(), 0, False
        while not done():
            if self.progress():
                if noted:
                    self._tell(Going())
                moved_at, idle, noted = time.monotonic(), 0, False
                continue
            idle += 1
            time.sleep(0 if idle < SPINS else NAP_SECONDS)
            late = idle >= SPINS and time.monotonic() - moved_at > self.timeout_seconds
            if waiting is not None and late and not noted:
                noted = True
                self._tell(waiting())
            self._judge()
        if noted:
            self._tell(Going())

    def progress(self) -> bool:
        """Reads the notes and lets everything under way go on; True if anything moved.

        Ranks that disagree are stopped here, by what no program can catch: none can go on in one process either.
        """
        self._check_going()
        self._read()
        self._check_going()
        try:
            return self._moved()
        except MismatchError as mismatch:
            self.found = forget_frames(mismatch)
        raise RankStopped

    def _moved(self) -> bool:
        moved = False
        for me in self.ahead.copy():
            if self.announced is not None and self.announced.reached(me):
                self.ahead.remove(me)
                if me not in self.requests:
                    self.requests[me] = self.point_to_point.begin(me)
                moved = True
            elif self.point_to_point.in_order:
                break
        for me, request in list(self.requests.items()):
            if not me.done and me not in self.ahead:
                moved |= request.advance()
        return moved

    def _check_going(self) -> None:
        """Raises RankStopped where the run has failed, and a Ctrl-C that had to wait."""
        self.interrupts.raise_pending()
        if (self.stopping or self.found is not None
                or any(isinstance(ending, Failed) for ending in self.endings.values())):
            raise RankStopped

    def _read(self) -> None:
        for rank, note in self.channel.arrived():
            self._receive(rank, note)

    def _tell(self, note: Waiting | Going | Drained) -> None:
        self._receive(self.channel.index, note)
        self.channel.post(note)

    def _receive(self, rank: int, note: Note) -> None:
        match note:
            case Entered() | Sending():
                if self.announced is not None:
                    self.announced.receive(rank, note)
            case Joining():
                self.joining[note.key].add(rank)
            case Drained():
                self.drained.add(rank)
            case Waiting():
                self.notes[rank] = note
            case Going():
                self.notes.pop(rank, None)
            case Finished() | Stopped() | Failed():
                self.endings[rank] = note

    def _judge(self) -> None:
        """Stops the rank where the notes of those that wait or have finished show what is wrong: no program can catch
        that and go on, as none can in one process."""
        if not self.notes:
            return
        self.found = verdict({**self._finished, **self.notes}, self.channel.size)
        if self.found is not None:
            raise RankStopped

    def release(self, error: BaseException) -> None:
        """After a failure: clears what the error's frames would keep in memory."""
        clear_frames(error)


# -- A cluster of which one rank runs in this process: the same program, the others elsewhere ------------------------
# Legend: N ranks.


class OwnResult(Results):
    """The result of this process' rank, at that rank's index; the others' are in other processes."""

    def __init__(self, index: int, ranks: int, value: Any) -> None:
        super().__init__((value,))
        self._index, self._ranks = index, ranks

    def __getitem__(self, index: Any) -> Any:
        if index not in (self._index, self._index - self._ranks):
            self._elsewhere(index)
        return self._values[0]

    def __iter__(self) -> Iterator[Any]:
        # A sequence's own way stops at the first IndexError, and would seem to have gone through all results.
        for index in range(self._ranks):
            if index != self._index:
                self._elsewhere(index)
        return iter(self._values)

    def __len__(self) -> int:
        return self._ranks

    def __repr__(self) -> str:
        return f"rank {self._index}: {self._values[0]!r}"

    def _elsewhere(self, index: object) -> NoReturn:
        asked = f"rank {index}" if isinstance(index, int) and -self._ranks <= index < self._ranks else repr(index)
        raise IndexError(f"results[{index!r}] asks for the result of {asked}, but this process ran rank {self._index} "
                         f"of {self._ranks} and has its result alone: results[{self._index}]. "
                         "cluster.gather(value) gives every process the values of all")


class ProcessCluster(Cluster):
    """N processes, each of which runs one rank: ``ranks``, ``trace`` and ``memory`` have this process' alone.

    Every process makes the cluster and calls ``run`` with the same program. ``debug=True`` also checks before each
    collective and each message that all who take part mean the same call, shape and dtype. Ranks that have waited for
    ``timeout_seconds`` tell each other for what, so that a deadlock is explained.
    """

    def __init__(self, channel: Channel, *, capacity_nbytes: int | None, debug: bool, blas_threads: int,
                 timeout_seconds: float) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds!r} must be above 0: how long a rank waits "
                             "before it tells the others for what")
        self._channel, self.timeout_seconds = channel, timeout_seconds
        super().__init__(channel.size, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads)

    @property
    def index(self) -> int:
        """The index of the rank that this process runs."""
        return self._channel.index

    @property
    def world(self) -> str:
        """The place of the ranks, in words."""
        return f"each a process, over {self._point_to_point().library}"

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, on each of them; any picklable values. Every process calls it."""
        return self._channel.everyone(value)

    def close(self) -> None:
        """Gives back what the library keeps for this cluster; it runs nothing afterwards. Every process calls it."""
        self._channel.close()

    def _point_to_point(self) -> PointToPoint:
        raise NotImplementedError

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (self._channel.index,)

    def _backend(self, options: RunOptions) -> ProcessBackend:
        if options.watch:
            raise ValueError("stepping through a run shows all ranks between two hops, but the others of this one are "
                             "in other processes; step through the same program on zs.Cluster(ranks)")
        return ProcessBackend(self._channel, self._point_to_point(), options.interrupts, debug=self.debug,
                              timeout_seconds=self.timeout_seconds)

    def _results(self, values: Sequence[Any]) -> Results:
        return OwnResult(self.index, self._channel.size, values[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.index} of {self._channel.size}, {len(self.runs)} runs>"
