"""Runs the one rank of this process, and keeps in touch with those of the others.

It never blocks inside a library: it asks again and again whether something has moved, so that Ctrl-C, another rank's
failure and a verdict on a deadlock all reach a rank that waits.
"""

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from zerosim.ranks import explain
from zerosim.ranks.call import Call, Group
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.errors import MismatchError, RankStopped
from zerosim.ranks.frames import clear_frames, forget_frames
from zerosim.ranks.interrupts import Interrupts
from zerosim.ranks.lockstep import Event
from zerosim.ranks.processes.agreement import Agreement
from zerosim.ranks.processes.carrier import Carrier, Course
from zerosim.ranks.processes.mail import Mail
from zerosim.ranks.processes.notes import (
    Entered,
    Failed,
    Finished,
    Going,
    Issued,
    Joining,
    Note,
    Sending,
    Settled,
    Stopped,
    Waiting,
)
from zerosim.ranks.processes.verdict import unmet, verdict
from zerosim.ranks.threads import check_thread

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
        why = (f"{explain.ranks_text(silent)} did not hear of it for {FAREWELL_SECONDS:g} seconds" if silent else
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
