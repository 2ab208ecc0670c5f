"""Ranks in processes of their own: each process runs one rank, and exchanges control messages with the others.

The transport moves arrays. MPI makes each hop as a pair of non-blocking messages, which go on whenever MPI is asked;
NCCL puts all hops on a stream, and what reads the result waits for that stream. A rank that waits asks the transport
and reads control messages in turns, so that Ctrl-C, another rank's failure and a verdict on a deadlock all reach it.
Where a program may wait inside the library, a thread reads them.
"""

import itertools
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any, NoReturn

from zerosim.backends import CAUSE_SECONDS, DRAIN_SECONDS, FAREWELL_SECONDS, TIMEOUT_SECONDS
from zerosim.backends.processes import control
from zerosim.ranks.call import Backend, GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.cluster import Cluster, Events, Processor, Results
from zerosim.ranks.errors import MadeCall, MismatchError, RankStopped, add_note, place_of_call, ranks_text
from zerosim.ranks.hub import (
    POLL_SECONDS,
    STOP_ITERATION,
    Deliveries,
    RunOptions,
    Transport,
    check_thread,
    message_between,
)
from zerosim.ranks.process import clear_frames, forget_frames

SPINS = 1000              # idle turns before a waiting rank sleeps between them
LISTEN_SECONDS = 0.05     # between two looks of the thread that listens while a program waits inside a library
REMEMBERED = 64           # calls in which a rank that waits may find that others called something else
# Gives the core to another process that could run, and comes back at once where there is none; a sleep of 0 s took 70
# µs, where a message between two processes takes 3.
let_others_run: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


class ProcessBackend(Backend):
    """One run of one program on this process' rank."""

    def __init__(self, channel: control.Channel, transport: Transport, options: RunOptions, *, debug: bool,
                 timeout_seconds: float) -> None:
        self.channel, self.transport, self.timeout_seconds = channel, transport, timeout_seconds
        self.interrupts, self.library = options.interrupts, transport.library
        transport.begin(options)
        transport.say = self._say
        self.thread = threading.get_ident()
        self.results: list[Any] = []
        self.announced = control.AnnouncedCalls() if debug else None
        # This rank's parts, as far as they are under way.
        self.not_agreed: list[Pending] = []      # announced, and not all who take part have said the same yet
        self.begun: dict[Pending, Deliveries] = {}  # handed to the transport, and not waited for yet
        self.issued: control.Counts = {}
        self.recent: deque[MadeCall] = deque(maxlen=REMEMBERED)
        # The ranks' control messages, this one's among them, and what they come to.
        self.joining: defaultdict[GroupKey, dict[int, bytes]] = defaultdict(dict)  # ids of groups being made
        self.waiting: dict[int, control.Waiting] = {}
        self.endings: dict[int, control.Ending] = {}
        self.verdict: Exception | None = None    # the error that the control messages show
        self.stopping = False
        # Where a thread listens, it takes turns with the program by the lock, and knows of each part, by its number,
        # the control message to send if the program waits for it.
        self.lock = threading.RLock()
        self.not_over: dict[int, control.Waiting] = {}
        self.parts = itertools.count()

    # -- called by the program's rank -----------------------------------------------------------------------------

    def check_use(self, rank: int) -> None:
        """Raises RankUseError in another thread; otherwise lets everything under way go on."""
        check_thread(self.thread, rank)
        self.progress()

    def issue(self, rank: int, me: Pending) -> None:
        """Takes the part, and sends what can leave at once."""
        with self.lock:
            control.count(self.issued, me)
            if isinstance(me, PendingCall):
                self.recent.append(MadeCall(me.call, me.where or place_of_call()))
            if self.transport.needs_listener:
                self.not_over[next(self.parts)] = self._waiting(me)
        self.transport.issued(rank, me)
        if self.announced is not None:
            self.announced.announce(me, self._say)
            self.not_agreed.append(me)
        # In debug mode a part begins when all have agreed on it. An exchange is posted at once all the same: before the
        # rank that it receives from comes to send, that one may wait for what this one sends.
        if self.announced is None or (isinstance(me, PendingExchange) and not self.transport.in_order):
            self.begun[me] = self._deliveries(me)
        self.progress()

    def _waiting(self, me: Pending) -> control.Waiting:
        return control.Waiting.of(me, place_of_call(), self.issued, self.recent)

    def _deliveries(self, me: Pending) -> Deliveries:
        """The part, on its way as far as the transport has been asked."""
        if isinstance(me, PendingCall):
            return self.transport.collective([me])
        step = [message_between(me, None)] if me.to is not None else []
        step += [message_between(None, me)] if me.source is not None else []
        return self.transport.message(me.key, step, {me.key[0].index(me.rank): me})

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """Makes a group of its own, in which a library blocks until all its ranks have called it.

        So each rank first says that it will call. When all have, all do, even if a rank of another group has failed
        meanwhile; when one of them has failed, none does. Then each waits until all are out of the library again: one
        that went on sooner might fail while another is still inside.
        """
        with self.interrupts:  # no Ctrl-C keeps a rank from the call that it has promised
            group_id = self._rendezvous(key, self.transport.group_id(key))[key[0][0]]
            try:
                self.transport.new_group(parent, key, group_id)
            except self.transport.errors as error:
                self._await_cause(error)
            self._rendezvous(key, b"")
        self.interrupts.raise_pending()

    def _await_cause(self, error: Exception) -> NoReturn:
        """Raises RankStopped when the message has come about another rank's failure, which the library's error may be
        about: that rank, or one that heard of it first, has aborted the call. Without such a message: the error itself.
        """
        forget_frames(error)  # they hold the call's arrays, which would count as held while the error is kept
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            self._read()
            if self._is_over():
                raise RankStopped
            time.sleep(POLL_SECONDS)
        raise error

    def _idle(self) -> bool:
        """True when the device is; the library's error may be about another rank's failure, and comes before its
        message. Meanwhile the thread that listens does not abort what is asked."""
        try:
            with self.lock:
                return self.transport.idle()
        except self.transport.errors as error:
            self._await_cause(error)

    def _rendezvous(self, key: GroupKey, group_id: bytes) -> dict[int, bytes]:
        """Waits until each rank of a group has said that it is here; returns what each gave as the group's id."""
        for rank in key[0]:
            self._say(control.Joining(key, group_id), rank)
        while not self.joining[key].keys() >= set(key[0]):
            if any(isinstance(self.endings.get(rank), control.Failed) for rank in key[0]):
                raise RankStopped
            let_others_run()
            self._read()
        return self.joining.pop(key)

    def wait(self, rank: int, me: Pending) -> None:
        """Goes on until the part is done."""
        self._until(lambda: me.done and me not in self.not_agreed,
                    None if self.transport.needs_listener else partial(self._waiting, me))
        self.begun.pop(me)
        self.transport.completed(rank, me)

    # -- the run --------------------------------------------------------------------------------------------------

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Events:
        """Runs the only program to its end, and until all other ranks have ended theirs; there is no event to watch.

        Raises what a rank raised, here or elsewhere, MismatchError or DeadlockError.
        """
        with ExitStack() as ending:  # at the end the ranks meet, and a Ctrl-C on one of them waits until they have
            try:
                with self._listening():
                    (program,) = programs
                    try:
                        result = program()
                    except StopIteration as error:  # which this generator must not let through
                        raise RuntimeError(STOP_ITERATION) from error
                    self._check_going()
                    if self.transport.needs_listener:  # the device may still wait, and the listener says for whom
                        self._until(self._idle)
                    ending.enter_context(self.interrupts)  # a rank that has said Finished must not fail
                    self._say(control.Finished(self.issued, tuple(self.recent)))
                    self._until(lambda: len(self.endings) == self.channel.size)
                    unlike = control.unmet(self._finished)  # a library takes small messages that nobody has asked for
                    if unlike is not None:
                        raise unlike
                    self._until(self._idle)
            except BaseException as failure:
                ending.enter_context(self.interrupts)
                raised = self._raised(failure)
                self._drain(raised)
                if raised is failure:
                    raise
                raise raised from None
            self.transport.close()
            self.channel.all_gather(None)
        self.results = [result]
        yield from ()

    @property
    def _finished(self) -> dict[int, control.Finished]:
        """The last words of the ranks whose programs have returned."""
        return {rank: message for rank, message in self.endings.items() if isinstance(message, control.Finished)}

    @property
    def _failed(self) -> list[control.Failed]:
        """The last words of the others that have ended."""
        return [message for message in self.endings.values() if isinstance(message, control.Failed)]

    def _raised(self, error: BaseException) -> BaseException:
        """The error that this rank raises, and tells the others: its own error, or that of the rank that stopped it."""
        if isinstance(error, RankStopped) and self.verdict is not None:
            error = self.verdict.with_traceback(error.__traceback__)  # which shows the program's line
        if isinstance(error, RankStopped) and self._failed:
            first = self._failed[0]
            self._say(replace(first, drained=False))
            return first.error(self.channel.size)
        self._say(control.Failed.of(error, self.channel.index))
        add_note(error, f"raised by rank {self.channel.index} of {self.channel.size}")
        return error

    def _drain(self, error: BaseException) -> None:
        """After a failure: waits until nothing is under way, so that the next run finds nothing of this one.

        Ends the whole job where another rank does not learn of the failure in time, or where the library's own
        collective waits for a rank that will not come.
        """
        self.stopping = True
        deadline = time.monotonic() + FAREWELL_SECONDS
        self.transport.abort()
        while sum(message.drained for message in self._failed) < self.channel.size:
            stopped = len(self._failed) == self.channel.size
            nothing_left = self.transport.drain()  # from the start, as others wait
            self._read()
            if stopped:
                deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
            mine = self.endings[self.channel.index]
            if isinstance(mine, control.Failed) and not mine.drained:
                if stopped and nothing_left:
                    self._say(replace(mine, drained=True))
                elif time.monotonic() > deadline:
                    self._abort_job(error)
            time.sleep(POLL_SECONDS)
        self.transport.drain()  # what came with the last control message
        self.transport.close()
        self.channel.all_gather(None)
        self.not_agreed.clear()
        self.begun.clear()

    def _abort_job(self, error: BaseException) -> None:
        silent = [rank for rank in range(self.channel.size) if not isinstance(self.endings.get(rank), control.Failed)]
        why = (f"{ranks_text(silent)} did not hear of it for {FAREWELL_SECONDS:g} seconds" if silent else
               f"what rank {self.channel.index} has begun cannot be given up, and another rank does not take part in "
               "it")
        text = control.Failed.of(error, self.channel.index).text
        print(f"{text}\n{why}; all processes of the job are ended", file=sys.stderr, flush=True)
        self.channel.abort()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], waiting: Callable[[], control.Waiting] | None = None) -> None:
        """Takes turns until ``done()``; a rank that waits for long says for what, and looks for a verdict.

        Raises what another rank raised, where ``done()`` holds only because the thread that listens has heard of a
        failure and has aborted what was under way.
        """
        moved_at, idle = time.monotonic(), 0
        while not done():
            if self.progress():
                self._say_waiting(None)
                moved_at, idle = time.monotonic(), 0
                continue
            idle += 1
            if idle < SPINS:
                let_others_run()
            else:
                time.sleep(POLL_SECONDS)
            if waiting is not None and idle >= SPINS and time.monotonic() - moved_at > self.timeout_seconds:
                self._say_waiting(waiting)
            self._judge()
        self._check_going()
        self._say_waiting(None)

    def progress(self) -> bool:
        """Reads the control messages and lets everything under way go on; True if anything moved.

        Ranks that disagree are stopped here, by what no program can catch: none can go on in one process either.
        """
        self._check_going()
        with self.interrupts:  # between an arrival and what is known of it
            self._read()
            self._check_going()
            try:
                moved = self._moved()
            except MismatchError as mismatch:
                self.verdict = forget_frames(mismatch)
        self._check_going()
        return moved

    def _moved(self) -> bool:
        moved = False
        for me in self.not_agreed.copy():
            with self.lock:
                agreed = self.announced is not None and self.announced.reached(me)
            if agreed:
                self.not_agreed.remove(me)
                if me not in self.begun:
                    self.begun[me] = self._deliveries(me)
                moved = True
            elif self.transport.in_order:
                break
        for me, deliveries in list(self.begun.items()):
            # A message that is not agreed on yet is posted, and no more.
            if not me.done and (me not in self.not_agreed or getgeneratorstate(deliveries) == GEN_CREATED):
                try:
                    for delivery in deliveries:
                        if delivery is None:
                            break
                        moved = True
                except self.transport.errors as error:
                    add_note(error, f"raised by {self.library} when it was asked for {me.describe()}")
                    self._await_cause(error)
        return moved

    def _is_over(self) -> bool:
        """True where the run has failed: here, elsewhere, or for all."""
        return self.stopping or self.verdict is not None or bool(self.endings and self._failed)

    def _check_going(self) -> None:
        """Raises RankStopped where the run has failed, and a Ctrl-C that had to wait."""
        self.interrupts.raise_pending()
        if self._is_over():
            raise RankStopped

    # -- control messages -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        with self.lock:
            for rank, message in self.channel.arrived():
                self._receive(rank, message)

    def _say(self, message: control.Control, to: int | None = None) -> None:
        """Sends a control message to one rank, or to all; what is for this rank it takes at once."""
        with self.lock:
            if to in (None, self.channel.index):
                self._receive(self.channel.index, message)
            if to != self.channel.index:
                self.channel.send(message, to)

    def _say_waiting(self, waiting: Callable[[], control.Waiting] | None) -> None:
        """Tells the others for what this rank waits, or that it goes on, unless they know."""
        with self.lock:
            if (waiting is None) == (self.channel.index in self.waiting):
                self._say(None if waiting is None else waiting())

    def _receive(self, rank: int, message: control.Control) -> None:
        match message:
            case control.Entered() | control.Sending():
                if self.announced is not None:
                    self.announced.receive(rank, message)
            case control.Elements():
                self.transport.heard(rank, message)
            case control.Joining():
                self.joining[message.key][rank] = message.group_id
            case control.Waiting():
                self.waiting[rank] = message
            case None:
                self.waiting.pop(rank, None)
            case control.Finished() | control.Failed():
                self.endings = {**self.endings, rank: message}  # a program goes through the old ones without the lock

    def _judge(self) -> None:
        """Finds where the messages of those that wait or have finished show what is wrong. No program can catch that
        and go on, as none can in one process."""
        with self.lock:
            if self.waiting and self.verdict is None:
                self.verdict = control.verdict({**self._finished, **self.waiting}, self.channel.size)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside, a thread listens, where the program may wait inside the library."""
        over = threading.Event()
        thread = threading.Thread(target=self._listen, args=(over,), daemon=True, name="zerosim listens")
        if self.transport.needs_listener:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self.transport.needs_listener:
                thread.join()

    def _listen(self, run_over: threading.Event) -> None:
        """A thread, where the program may wait inside the library, which does not ask: says for it what it waits for,
        and ends the library's calls when another rank has failed, or when nobody can go on."""
        since = time.monotonic()
        while not run_over.wait(LISTEN_SECONDS):
            with self.lock, suppress(Exception):  # what goes wrong on a device is raised where the program meets it
                self._read()
                over = self.transport.over()
                for number in over:
                    del self.not_over[number]
                if over or not self.not_over:
                    self._say_waiting(None)
                    since = time.monotonic()
                elif time.monotonic() - since > self.timeout_seconds:
                    self._say_waiting(lambda: next(iter(self.not_over.values())))
                self._judge()
                if self._is_over():
                    self.transport.abort()
                    return

    def release(self, error: BaseException, handled: BaseException | None) -> None:
        """After a failure: clears what the error's frames would keep in memory."""
        clear_frames(error, until=handled)


# -- A cluster of which one rank runs in this process: the same program, the others elsewhere ------------------------
# Legend: N ranks.


class OwnResult(Results):
    """The result of this process' rank, at that rank's index; the others' are in other processes."""

    def __init__(self, index: int, ranks: int, value: Any) -> None:
        super().__init__((value,))
        self._index, self._ranks = index, ranks

    def __getitem__(self, index: Any) -> Any:
        if index in (self._index, self._index - self._ranks):
            return self._values[0]
        asked = f"rank {index}" if isinstance(index, int) and -self._ranks <= index < self._ranks else repr(index)
        raise IndexError(f"results[{index!r}] asks for the result of {asked}, but this process ran rank {self._index} "
                         f"of {self._ranks} and has its result alone: results[{self._index}]. "
                         "cluster.gather(value) gives every process the values of all")

    def __iter__(self) -> Iterator[Any]:
        # A sequence's own way stops at the first IndexError, and would seem to have gone through all results.
        return iter([self[index] for index in range(self._ranks)])

    def __len__(self) -> int:
        return self._ranks

    def __repr__(self) -> str:
        return f"rank {self._index}: {self._values[0]!r}"


class ProcessCluster(Cluster):
    """N processes, each of which runs one rank: ``ranks``, ``trace`` and ``memory`` have this process' alone.

    Every process makes the cluster and calls ``run`` with the same program. ``debug=True`` also checks before each
    collective and each message that all who take part mean the same call, shape and dtype. Ranks that have waited for
    ``timeout_seconds`` tell each other for what, so that a deadlock is explained.
    """

    def __init__(self, channel: control.Channel, transport: Transport, processor: Processor | None = None, *,
                 capacity_nbytes: int | None = None, debug: bool = False, blas_threads: int = 1,
                 trace_rows: int | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds!r} must be above 0: how long a rank waits "
                             "before it tells the others for what")
        self._channel, self.timeout_seconds = channel, timeout_seconds
        super().__init__(channel.size, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads,
                         trace_rows=trace_rows, processor=processor, transport=transport)

    @property
    def index(self) -> int:
        """The index of the rank that this process runs."""
        return self._channel.index

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order, on each of them; plain data, or
        over MPI any picklable values. Every process calls it."""
        return self._channel.all_gather(value)

    def close(self) -> None:
        """Gives back what the library keeps for this cluster; it runs nothing afterwards. Every process calls it."""
        self._transport.destroy()
        self._channel.close()

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return (self._channel.index,)

    def _backend(self, options: RunOptions) -> ProcessBackend:
        if options.watch:
            raise ValueError("stepping through a run shows all ranks between two hops, but the others of this one are "
                             "in other processes; step through the same program on zs.Cluster(ranks)")
        return ProcessBackend(self._channel, self._transport, options, debug=self.debug,
                              timeout_seconds=self.timeout_seconds)

    def _results(self, values: Sequence[Any]) -> Results:
        return OwnResult(self.index, self._channel.size, values[0])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.index} of {self._channel.size}, {len(self.runs)} runs>"
