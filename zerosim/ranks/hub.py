"""The hub: runs the ranks of a cluster as greenlets, exactly one at a time, the next one chosen by a rule.

A rank parks when it waits for an entry that is not done. The hub carries out a collective when all of its group have
issued it and agree, and moves a message when both its halves are there. Same program, same order, same bits.
"""

import contextvars
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from greenlet import getcurrent, greenlet

from zerosim.ranks import explain
from zerosim.ranks.call import Call, Group
from zerosim.ranks.carriage import Carriage
from zerosim.ranks.checks import private_memory
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.errors import DeadlockError, MismatchError, RankStopped, RankUseError
from zerosim.ranks.frames import clear_frames
from zerosim.ranks.interrupts import Interrupts, guarded
from zerosim.ranks.lockstep import Ended, Event, Watch
from zerosim.ranks.threads import check_thread
from zerosim.ranks.trace import Hop

MISSING = object()


@guarded
class Hub:
    """One run of one program on N ranks, in the thread that drives it."""

    knows_the_others = True

    def __init__(self, size: int, carriage: Carriage, *, seed: int, watch: Watch | None,
                 interrupts: Interrupts) -> None:
        self.carriage, self.watch, self.interrupts = carriage, watch, interrupts
        self.chance = random.Random(seed) if seed else None
        self.thread = threading.get_ident()
        self.greenlets: list[greenlet] = []
        self.results: list[Any] = [MISSING] * size
        self.waiting: list[Entry | None] = [None] * size
        self.ready: deque[int] = deque(range(size))
        self.incomplete: dict[tuple[Group, int], dict[int, CollectiveEntry]] = {}
        self.complete: deque[list[CollectiveEntry]] = deque()
        self.mailbox: dict[int, ExchangeEntry] = {}
        self.messages: deque[Event] = deque()
        self.under_way: list[CollectiveEntry] = []  # the collective that is being carried out: for who looks
        self.failure: tuple[int, BaseException] | None = None
        self.aftermath: list[tuple[int, BaseException]] = []
        self.stopping = False

    # -- called by ranks, inside their greenlets ------------------------------------------------------------------

    @property
    def library(self) -> str | None:
        """Whose own collectives ``native`` asks for."""
        return self.carriage.library

    def progress(self) -> bool:
        """Nothing goes on while a rank runs: others take their turns when it waits."""
        return False

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is rank ``rank``'s own program, in this hub's thread."""
        check_thread(self.thread, rank)
        if getcurrent() is not self.greenlets[rank]:
            raise RankUseError(f"rank {rank} was used outside its own program (a program must only use the rank that "
                               "it was handed; reading another rank's memory and trace is fine after the run)")

    def issue(self, rank: int, entry: Entry) -> None:
        """Takes an entry; a collective becomes due when all of its group have issued it."""
        if self.stopping:
            raise RankStopped
        self.carriage.issued(rank, entry)
        if isinstance(entry, ExchangeEntry):
            self.mailbox[rank] = entry
            self._move_messages(entry)
        else:
            call = entry.call
            key = call.key, call.number
            group = self.incomplete.setdefault(key, {})
            group[entry.index] = entry
            if len(group) == call.ranks:
                del self.incomplete[key]
                self.complete.append([group[i] for i in range(call.ranks)])
        if self.chance is not None and self.chance.random() < 0.5:
            self.ready.append(rank)
            self._park()

    def join(self, parent: Group, key: Group) -> None:
        """The carriage may have to prepare the group."""
        self.carriage.join(parent, key)

    def wait(self, rank: int, entry: Entry) -> None:
        """Parks the rank until its entry is done."""
        while not entry.done:
            self.waiting[rank] = entry
            self._park()
        self.carriage.arrived(rank, entry)

    def _park(self) -> None:
        if self.stopping:
            raise RankStopped
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()
        if self.stopping:
            raise RankStopped

    # -- the loop -------------------------------------------------------------------------------------------------

    def drive(self, programs: list[Callable[[], Any]]) -> Generator[Event | Ended, None, None]:
        """Runs the programs to their end; a watched hub yields every message, and every hop made hop by hop, or every
        collective when it has ended.

        Raises what a rank raised, MismatchError or DeadlockError; whatever happens, no rank is left running.
        """
        self.greenlets = [self._greenlet(rank, program) for rank, program in enumerate(programs)]
        try:
            while self.ready or self.complete:
                self.interrupts.raise_pending()
                if self.complete and self._carries_out_now():
                    yield from self._carry_out(self.complete.popleft())
                else:
                    self._resume(self._next_ready())
                    while self.messages:
                        yield self.messages.popleft()
            if not all(g.dead for g in self.greenlets):
                raise DeadlockError(self._explain_deadlock())
            self.carriage.settle()
        except BaseException:
            self.carriage.give_up()
            raise
        finally:
            self._unwind()
            self.carriage.close()

    def _greenlet(self, rank: int, program: Callable[[], Any]) -> greenlet:
        def body() -> None:
            try:
                self.results[rank] = program()
            except RankStopped as error:
                if not self.stopping:  # the program's own, which stops nobody
                    self._failed(rank, error)
            except StopIteration as error:  # which a generator, as the hub's loop is one, must not let through
                self._failed(rank, RuntimeError("the program let a StopIteration out; catch it where next() is called"),
                             error)
            except BaseException as error:  # whatever it is, _resume raises it again
                self._failed(rank, error)

        g = greenlet(body)
        g.gr_context = contextvars.copy_context()
        return g

    def _failed(self, rank: int, error: BaseException, cause: BaseException | None = None) -> None:
        error.__cause__ = cause or error.__cause__
        if self.stopping:
            self.aftermath.append((rank, error))
        else:
            self.failure = (rank, error)

    def _carries_out_now(self) -> bool:
        """Always, unless a seeded schedule lets ready ranks run first."""
        return self.chance is None or not self.ready or self.chance.random() < 0.5

    def _next_ready(self) -> int:
        if self.chance is not None:
            self.ready.rotate(self.chance.randrange(len(self.ready)))
        return self.ready.popleft()

    def _resume(self, rank: int) -> None:
        if threading.get_ident() != self.thread:
            raise RankUseError("a run can only be continued in the thread that started it; step through it there")
        g = self.greenlets[rank]
        g.parent = getcurrent()
        self.carriage.resume(rank)
        g.switch()
        if self.failure is not None:
            raise self.failure[1]

    def _wake(self, rank: int, entry: Entry) -> None:
        if entry.done and self.waiting[rank] is entry:
            self.waiting[rank] = None
            self.ready.append(rank)

    # -- collectives and messages ---------------------------------------------------------------------------------

    def _carry_out(self, entries: list[CollectiveEntry]) -> Generator[Event | Ended, None, None]:
        call, self.under_way = entries[0].call, entries
        if any(entry.call != call for entry in entries):
            raise MismatchError(explain.mismatch({call.group[e.index]: e.call for e in entries}))
        private_memory(entries)
        sent = yield from self.carriage.collective(entries)
        for entry, nbytes in zip(entries, sent, strict=True):
            entry.finish(nbytes)
            self._wake(call.group[entry.index], entry)
        if self.watch == "collective":
            yield Ended(call)
        self.under_way = []

    def _move_messages(self, entry: ExchangeEntry) -> None:
        """Moves what the new entry makes possible: its send to a rank that receives from it, and the reverse."""
        for source, destination in dict.fromkeys([(entry.me, entry.to), (entry.source, entry.me)]):
            if source is None or destination is None:
                continue
            sender, receiver = self.mailbox.get(source), self.mailbox.get(destination)
            if (sender and receiver and sender.to_send and sender.to == destination and receiver.to_receive
                    and receiver.source == source and sender.key == receiver.key):
                self._move(sender, receiver)

    def _move(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        send, out = sender.send, receiver.out
        assert send is not None
        assert out is not None
        if send.shape != out.shape or send.dtype != out.dtype:
            raise MismatchError(explain.misfit(sender.me, send, receiver.me, out))
        self.carriage.message(sender, receiver)
        sender.to_send = receiver.to_receive = False
        sender.count(send.nbytes)
        if self.watch:
            self.messages.append(Event(None, Hop(0, sender.me, receiver.me, (), send.nbytes), out.copy()))
        for entry in (sender, receiver):
            if entry.done:
                self.mailbox.pop(entry.me, None)
                self._wake(entry.me, entry)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _explain_deadlock(self) -> str:
        return explain.deadlock([self._state(rank, entry) for rank, entry in enumerate(self.waiting)])

    def _state(self, rank: int, entry: Entry | None) -> explain.State:
        if entry is None:
            return explain.State(None)
        missing = self._absent(entry.call) if isinstance(entry, CollectiveEntry) else None
        return explain.State(entry.describe(), explain.where(self._frame(rank)), missing)

    def _absent(self, call: Call) -> list[int]:
        """The ranks of the call's group that have not issued it."""
        there = self.incomplete[call.key, call.number]
        return [rank for i, rank in enumerate(call.group) if i not in there]

    def _frame(self, rank: int) -> FrameType | None:
        frame: FrameType | None = self.greenlets[rank].gr_frame
        return frame

    def _unwind(self) -> None:
        """Stops every rank that still runs; its ``finally`` blocks run, and any further call stops it again."""
        self.stopping = True
        for rank, g in enumerate(self.greenlets if threading.get_ident() == self.thread else ()):
            if g:  # begun and not ended: one that has not begun has nothing to unwind, and would raise out of here
                g.parent = getcurrent()
                self.carriage.resume(rank)
                g.throw(RankStopped)
        self.incomplete.clear()
        self.complete.clear()
        self.ready.clear()
        self.mailbox.clear()
        self.under_way = []
        self.waiting = [None] * len(self.waiting)

    def let_go(self, error: BaseException) -> None:
        """After a failure: names the ranks in notes, and clears what the error's frames would keep in the ledgers."""
        if self.failure is not None and self.failure[1] is error:
            error.add_note(f"raised by rank {self.failure[0]} of {len(self.results)}")
        for rank, later in self.aftermath:
            error.add_note(f"rank {rank} raised {later!r} when it was stopped")
        # A rank's own error has only that rank's errors behind it; the hub's may have the caller's.
        clear_frames(error, chain=self.failure is not None)
        self.results.clear()
        self.aftermath.clear()
        self.failure = None
