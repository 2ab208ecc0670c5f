"""What moves arrays between processes: a carrier takes a rank's part in a call and says when it is done.

A carrier of MPI makes each hop as a pair of non-blocking messages, and goes on whenever it is asked to; one of NCCL
puts all hops on a stream and is done at once, since what reads the result waits for the stream.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn, Protocol, overload

from zerosim.backends.processes.notes import (
    Agreement,
    Entered,
    Failed,
    Finished,
    Going,
    Issued,
    Joining,
    Mail,
    Note,
    Sending,
    Settled,
    Stopped,
    Waiting,
    unmet,
    verdict,
)
from zerosim.ranks.call import Call, CollectiveEntry, Entry, ExchangeEntry, Group
from zerosim.ranks.cluster import Cluster, Results
from zerosim.ranks.errors import Interrupts, MismatchError, RankStopped, clear_frames, forget_frames
from zerosim.ranks.hub import Event, Watch, check_thread, ranks_text


class Course(Protocol):
    """An entry on its way."""

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; True if it came any further."""

    def wait(self) -> None:
        """Called once, when the program waits for a course that is done: what it reads next must be there."""

    def drop(self) -> None:
        """The run has failed: gives up what has not moved yet."""


class Carrier(Protocol):
    """Moves arrays between this process' rank and the others."""

    library: str
    in_order: bool  # whether ranks that begin the same entries in different orders would wait for each other for ever

    def begin(self, entry: Entry) -> Course:
        """Takes the entry and returns at once."""

    def join(self, parent: Group, key: Group) -> None:
        """The ranks of ``key``, all of the group ``parent``, are a group of their own from here on."""

    def idle(self) -> bool:
        """When all ranks' programs have returned: True when all that they asked for is done; raises what went wrong."""

    def drain(self) -> bool:
        """After a failure: takes and forgets what still arrives; True when nothing of this rank's is under way."""

    def settle(self) -> None:
        """After a failure, when ``drain()`` was true on every rank: takes what came last, and closes."""

    def close(self) -> None:
        """The run is over on every rank, and nothing is under way."""


# -- Runs the one rank of this process, and keeps in touch with those of the others ----------------------------------
# It never blocks inside a library: it asks again and again whether something has moved, so that Ctrl-C, another rank's
# failure and a verdict on a deadlock all reach a rank that waits.


SPINS = 1000              # idle turns before a waiting rank sleeps between them
NAP_SECONDS = 50e-6
REMEMBERED = 64           # calls in which a rank that waits may find that others called something else
SETTLING_SECONDS = 5.0    # what the library has, once all have stopped, to end what all of them have begun
FAREWELL_SECONDS = 30.0   # what a failed rank leaves the others to hear of it; they hear at each call of their rank


class ProcessTransport:
    """One run of one program on this process' rank."""

    knows_the_others = True

    def __init__(self, mail: Mail, carrier: Carrier, interrupts: Interrupts, *, debug: bool,
                 patience_seconds: float) -> None:
        self.mail, self.carrier, self.patience_seconds = mail, carrier, patience_seconds
        self.interrupts = interrupts
        self.thread = threading.get_ident()
        self.agreement = Agreement(mail) if debug else None
        self.results: list[Any] = []
        self.issued = Issued()
        self.recent: deque[Call] = deque(maxlen=REMEMBERED)
        self.ahead: list[Entry] = []              # announced, and not agreed on yet
        self.courses: dict[Entry, Course] = {}    # begun, and not waited for yet
        self.notes: dict[int, Waiting] = {}
        self.joining: defaultdict[Group, set[int]] = defaultdict(set)  # who has said to help to make a group
        self.endings: dict[int, Finished | Stopped | Failed] = {}
        self.found: Exception | None = None       # what the notes show to be wrong
        self.settled: set[int] = set()
        self.stopping = False

    @property
    def library(self) -> str | None:
        """Whose own collectives ``native`` asks for."""
        return self.carrier.library

    # -- called by the program's rank -----------------------------------------------------------------------------

    def check_use(self, rank: int) -> None:
        """Raises RankUseError in another thread; otherwise lets everything under way go on."""
        check_thread(self.thread, rank)
        self.progress()

    def issue(self, rank: int, entry: Entry) -> None:
        """Takes an entry, and sends what can leave at once."""
        self.issued.count(entry)
        if isinstance(entry, CollectiveEntry):
            self.recent.append(entry.call)
        if self.agreement is not None:
            self.agreement.announce(entry)
            self.ahead.append(entry)
        # Who sends to this rank first may wait for what it sends, debug mode or not.
        if self.agreement is None or (isinstance(entry, ExchangeEntry) and not self.carrier.in_order):
            self.courses[entry] = self.carrier.begin(entry)
        self.progress()

    def join(self, parent: Group, key: Group) -> None:
        """The carrier makes a group of its own, for which a library blocks until all its ranks are there.

        So each says that it will come; then all come, even if a rank outside has failed meanwhile, or none does.
        """
        self.joining[key].add(self.mail.index)
        for rank in key[0]:
            self.mail.post(Joining(key), rank)
        while not self.joining[key].issuperset(key[0]):
            if any(isinstance(self.endings.get(rank), Stopped | Failed) for rank in key[0]):
                raise RankStopped
            time.sleep(0)
            self._read()
        del self.joining[key]
        self.carrier.join(parent, key)

    def wait(self, rank: int, entry: Entry) -> None:
        """Goes on until the entry is done."""
        self._until(lambda: entry.done and entry not in self.ahead,
                    lambda: Waiting.of(entry, self.issued, self.recent))
        self.courses.pop(entry).wait()

    # -- the run --------------------------------------------------------------------------------------------------

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Generator[Event, None, None]:
        """Runs the only program to its end, and until all other ranks have ended theirs; there is no event to watch.

        Raises what a rank raised, here or elsewhere, MismatchError or DeadlockError.
        """
        try:
            (program,) = programs
            result = program()
            self._check_going()
            self._end(Finished(self.issued, tuple(self.recent)))
            self._until(self._all_ended)
            self._check_met()
            self._until(self.carrier.idle)
        except BaseException as error:
            raised = self._raised(error)
            self._part(raised)
            if raised is error:
                raise
            raise raised from None
        self.carrier.close()
        self.mail.everyone(None)
        self.results = [result]
        yield from ()

    def _all_ended(self) -> bool:
        return len(self.endings) == self.mail.size

    def _check_met(self) -> None:
        """Raises what the ranks' last words show: a library takes small messages that nobody has asked for."""
        finished = {rank: note for rank, note in self.endings.items() if isinstance(note, Finished)}
        error = unmet(finished)
        if error is not None:
            raise error

    def _raised(self, error: BaseException) -> BaseException:
        """What this rank raises, and tells the others: its own error, or that of the rank that stopped it."""
        if isinstance(error, RankStopped) and self.found is not None:
            error = self.found.with_traceback(error.__traceback__)  # which shows the program's line
        failed = [(rank, note) for rank, note in self.endings.items() if isinstance(note, Failed)]
        if isinstance(error, RankStopped) and failed:
            self._end(Stopped())
            return failed[0][1].error(failed[0][0], self.mail.size)
        self._end(Failed.of(error))
        error.add_note(f"raised by rank {self.mail.index} of {self.mail.size}")
        return error

    def _end(self, ending: Finished | Stopped | Failed) -> None:
        self.endings[self.mail.index] = ending
        self.mail.post(ending)

    def _part(self, error: BaseException) -> None:
        """After a failure: lets what is under way come to rest, so that the next run finds nothing of this one.

        Ends the whole job where another rank does not hear of the failure in time, or where the library's own
        collective waits for a rank that will not come.
        """
        self.stopping = True
        deadline = time.monotonic() + FAREWELL_SECONDS
        for course in self.courses.values():
            course.drop()
        while len(self.settled) < self.mail.size:
            settled, stopped = self.carrier.drain(), self._all_stopped()  # drained from the start, as others wait
            self._read()
            if stopped:
                deadline = min(deadline, time.monotonic() + SETTLING_SECONDS)
            if self.mail.index not in self.settled:
                if stopped and settled:
                    self._tell(Settled())
                elif time.monotonic() > deadline:
                    self._give_up(error)
            time.sleep(NAP_SECONDS)
        self.carrier.settle()
        self.mail.everyone(None)
        self.ahead.clear()
        self.courses.clear()

    def _all_stopped(self) -> bool:
        return self._all_ended() and not any(isinstance(note, Finished) for note in self.endings.values())

    def _give_up(self, error: BaseException) -> None:
        silent = [rank for rank in range(self.mail.size)
                  if rank not in self.endings or isinstance(self.endings[rank], Finished)]
        why = (f"{ranks_text(silent)} did not hear of it for {FAREWELL_SECONDS:g} seconds" if silent else
               f"what rank {self.mail.index} has begun cannot be given up, and another rank does not take part in it")
        print(f"{Failed.of(error).text}\n{why}; all processes of the job are ended", file=sys.stderr, flush=True)
        self.mail.abort()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], waiting: Callable[[], Waiting] | None = None) -> None:
        """Takes turns until ``done()``; a rank that waits for long says for what, and looks for a verdict."""
        moved_at, idle, told = time.monotonic(), 0, False
        while not done():
            if self.progress():
                if told:
                    self._tell(Going())
                moved_at, idle, told = time.monotonic(), 0, False
                continue
            idle += 1
            time.sleep(0 if idle < SPINS else NAP_SECONDS)
            late = idle >= SPINS and time.monotonic() - moved_at > self.patience_seconds
            if waiting is not None and late and not told:
                told = True
                self._tell(waiting())
            self._judge()
        if told:
            self._tell(Going())

    def progress(self) -> bool:
        """Reads the mail and lets everything under way go on; True if anything moved.

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
        for entry in self.ahead.copy():
            if self.agreement is not None and self.agreement.reached(entry):
                self.ahead.remove(entry)
                if entry not in self.courses:
                    self.courses[entry] = self.carrier.begin(entry)
                moved = True
            elif self.carrier.in_order:
                break
        for entry, course in list(self.courses.items()):
            if not entry.done and entry not in self.ahead:
                moved |= course.advance()
        return moved

    def _check_going(self) -> None:
        """Raises RankStopped where the run has failed, and a Ctrl-C that had to wait."""
        self.interrupts.raise_pending()
        if (self.stopping or self.found is not None
                or any(isinstance(ending, Failed) for ending in self.endings.values())):
            raise RankStopped

    def _read(self) -> None:
        for rank, note in self.mail.arrived():
            self._hear(rank, note)

    def _tell(self, note: Waiting | Going | Settled) -> None:
        self._hear(self.mail.index, note)
        self.mail.post(note)

    def _hear(self, rank: int, note: Note) -> None:
        match note:
            case Entered() | Sending():
                if self.agreement is not None:
                    self.agreement.hear(rank, note)
            case Joining():
                self.joining[note.key].add(rank)
            case Settled():
                self.settled.add(rank)
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
        finished = {rank: note for rank, note in self.endings.items() if isinstance(note, Finished)}
        self.found = verdict({**finished, **self.notes}, self.mail.size)
        if self.found is not None:
            raise RankStopped

    def let_go(self, error: BaseException) -> None:
        """After a failure: clears what the error's frames would keep in the ledger."""
        clear_frames(error)


# -- A cluster of which one rank runs in this process: the same program, the others elsewhere ------------------------
# Legend: N ranks.




class OwnResult(Results):
    """What the program returned on this process' rank, at that rank's index; the others' are in other processes."""

    def __init__(self, index: int, ranks: int, value: Any) -> None:
        super().__init__((value,))
        self._index, self._ranks = index, ranks

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
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
    ``patience_seconds`` tell each other for what, so that a deadlock is explained.
    """

    def __init__(self, mail: Mail, *, capacity_nbytes: int | None, debug: bool, blas_threads: int,
                 patience_seconds: float) -> None:
        if not patience_seconds > 0:
            raise ValueError(f"patience_seconds={patience_seconds!r} must be above 0: how long a rank waits before it "
                             "tells the others for what")
        self._mail, self.patience_seconds = mail, patience_seconds
        super().__init__(mail.size, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads)

    @property
    def index(self) -> int:
        """The index of the rank that this process runs."""
        return self._mail.index

    @property
    def world(self) -> str:
        """Where the ranks are, in words."""
        return f"each a process, over {self._carrier().library}"

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, on each of them; any picklable values. Every process calls it."""
        return self._mail.everyone(value)

    def close(self) -> None:
        """Gives back what the library keeps for this cluster; it runs nothing afterwards. Every process calls it."""
        self._mail.close()

    def _carrier(self) -> Carrier:
        raise NotImplementedError

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (self._mail.index,)

    def _driver(self, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> ProcessTransport:
        if watch:
            raise ValueError("stepping through a run shows all ranks between two hops, but the others of this one are "
                             "in other processes; step through the same program on zs.Cluster(ranks)")
        return ProcessTransport(self._mail, self._carrier(), interrupts, debug=self.debug,
                                patience_seconds=self.patience_seconds)

    def _results(self, values: Sequence[Any]) -> Results:
        return OwnResult(self.index, self._mail.size, values[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.index} of {self._mail.size}, {len(self.runs)} runs>"
