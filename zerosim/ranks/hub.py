"""The transport, which moves what ranks send each other, and the hub, which runs the ranks of a cluster in one process.

`Transport` is the one protocol of all backends. It says how a step of messages moves (`Transport.move`), between ranks
of this process and to those of others; the rest is written once: the generators of the ranks that are here are driven
in lockstep, and what they yield is moved. In one process that is every rank of a call; where each rank has a process of
its own, it is one.

The hub's ranks are greenlets (`stacks`), of which one runs at a time, in rounds: each goes on until it waits for
something that is not done, and parks. Then the hub carries out each collective that all of its group have issued, if
they agree, and moves each message of which both halves are there. Same program, same order, same bits. What a rank
hands over to compute, threads do beside other ranks (`workers`), and a rank goes on from it in its turn.
"""

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from zerosim.numerics.arrays import copy_elements, may_share_memory, poison, start
from zerosim.ranks import fast_ring
from zerosim.ranks.call import Array, Backend, Call, Exchanges, GroupKey, Hop, Pending, PendingCall, PendingExchange
from zerosim.ranks.collectives import NATIVE, Delivery, lockstep, steps_of
from zerosim.ranks.errors import (
    DeadlockError,
    MadeCall,
    MismatchError,
    RankPosition,
    RankStopped,
    RankUseError,
    add_note,
    deadlock_text,
    message_mismatch_text,
    mismatch_text,
    place_of,
    place_of_call,
    text_of,
)
from zerosim.ranks.process import Interrupts, clear_frames, guarded
from zerosim.ranks.schedules import Chosen, Seeded
from zerosim.ranks.stacks import stacks
from zerosim.ranks.workers import Workers

STOP_ITERATION = "the program let a StopIteration out; catch it where next() is called"
WORTH_A_THREAD = 2_000_000  # operations: handing work over and taking it back costs as much as some 200,000
POLL_SECONDS = 50e-6  # between two looks at what is not done yet
Watch = Literal["hop", "collective"]  # what a run stops after


@dataclass(slots=True)
class RunOptions:
    """The way in which one run is carried out: ``hop_by_hop`` makes the ring's hops too, where nobody watches them;
    ``threads`` compute, as ``workers`` that are there from the first work on that is worth a thread."""

    hop_by_hop: bool
    watch: Watch | None
    interrupts: Interrupts
    threads: int = 1
    workers: Workers | None = None

    def workers_for(self, operations: int) -> Workers | None:
        """The workers, where so many operations are worth a thread."""
        if self.threads == 1 or operations < WORTH_A_THREAD or not threading.main_thread().is_alive():
            return None  # when the program has ended, no thread can be begun
        self.workers = self.workers or Workers(self.threads)
        return self.workers


class RunEvent(NamedTuple):
    """A hop that has just been made, with a copy of the values that arrived; or, where ``hop`` is None, a collective
    that has just been carried out, before any of its ranks goes on.

    ``call`` is None for a message that the program sent itself.
    """

    call: Call | None
    hop: Any
    values: Array


# -- The transport ---------------------------------------------------------------------------------------------------
# A transport yields one delivery after the other as they are made; None means "not yet", and whoever drives it asks
# again later.

Deliveries = Generator[Delivery | None, None, None]


@guarded
class Transport:
    """Carries out the parts that ranks of this process have issued: one primitive, `move`, and the ends of a run.

    Ranks of the whole cluster are named by their index in it, those of a group in a step by their place in the group.
    What a transport has no use for does nothing here, and is inherited.
    """

    library: str | None = None  # whose own collectives ``algorithm="native"`` asks for
    in_order = False  # True where ranks that begin calls in different orders would wait for each other for ever
    errors: tuple[type[Exception], ...] = ()  # what the library raises, also when another rank has failed
    needs_listener = False  # True where a program may wait inside the library: a thread must hear the others
    world = "all in this process"
    late: Collection[int] = ()  # the ranks that take their turns after the others
    say: Callable[[Any, int], None]  # in a run of processes: a control message to the transport of another rank

    def begin(self, options: RunOptions) -> None:
        """A run begins."""
        self.options = options

    # -- in which backends differ -------------------------------------------------------------------------------------

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Deliveries:
        """Moves all messages of a step, as one; yields each that has moved at every end that is here.

        ``call`` is None for messages that programs send themselves. Between ranks of one process it copies.
        """
        for delivery in step:
            copy_elements(delivery.sent, delivery.out)
            yield delivery

    def native(self, parts: Sequence[PendingCall]) -> Deliveries:
        """The library's own collective; yields None until it is done."""
        raise NotImplementedError

    def steps(self, me: PendingCall) -> Exchanges:
        """The generator of one rank's part, whose arithmetic is done where the rank's is."""
        return steps_of(me)

    def seen(self, key: GroupKey, delivery: Delivery) -> Array:
        """A copy of what arrived, for whoever steps through the run: a view would keep a buffer in memory."""
        assert delivery.out is not None
        return delivery.out.copy()

    def resume(self, rank: int) -> None:
        """The hub is about to let this rank's program go on."""

    def issued(self, rank: int, me: Pending) -> None:
        """The rank's program has just issued a part. Its input is there, or, where a device computes beside the host,
        will be when the device has done all that the program has asked of it so far."""

    def completed(self, rank: int, me: Pending) -> None:
        """The rank's program has waited for the part and is about to go on. What it asks for next may read the result,
        and so must not be computed before that has arrived."""

    def group_id(self, key: GroupKey) -> bytes:
        """The bytes that the first rank of a new group has to tell the others."""
        return b""

    def new_group(self, parent: GroupKey, key: GroupKey, group_id: bytes) -> None:
        """The ranks of ``key``, all of the group ``parent``, are a group of their own from here on."""

    def over(self) -> Sequence[int]:
        """The parts that have come to their end since the last call, by their numbers in this run; asked where it
        ``needs_listener``."""
        raise NotImplementedError

    def heard(self, rank: int, message: Any) -> None:
        """The transport of another process has said this (`say`)."""

    def idle(self) -> bool:
        """True when all that the ranks asked for is done, once their programs have returned; raises what went wrong."""
        return True

    def abort(self) -> None:
        """The run has failed: gives up what has not moved yet, before the ranks are unwound."""

    def drain(self) -> bool:
        """After a failure: takes and forgets what still arrives; True when nothing of these ranks' is under way."""
        return True

    def close(self) -> None:
        """The run is over on every rank, and nothing is under way."""

    def destroy(self) -> None:
        """The cluster is closed: gives back what the library keeps for it."""

    # -- written once -------------------------------------------------------------------------------------------------

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """Carries out the parts of all ranks of one call that are here."""
        call = parts[0].call
        if call.algorithm == NATIVE:
            yield from self.native(parts)
            return
        sent = {me.index: 0 for me in parts}
        for step in lockstep({me.index: self.steps(me) for me in parts}):
            for delivery in self.move(call.key, step, call):
                if delivery is not None and delivery.sent is not None:
                    sent[delivery.hop.source] += delivery.hop.nbytes
                yield delivery
        for me in parts:
            me.finish(sent[me.index])

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Deliveries:
        """Moves messages that programs send themselves; ``ends`` by the place of their rank in the group."""
        for delivery in self.move(key, step):
            if delivery is not None:
                if delivery.sent is not None:
                    ends[delivery.hop.source].sent(delivery.hop.nbytes)
                if delivery.out is not None:
                    ends[delivery.hop.destination].received()
            yield delivery


@guarded
def message_between(sender: PendingExchange | None, receiver: PendingExchange | None) -> Delivery:
    """The message that two programs' exchanges, or one's where the other is in another process, let move."""
    one = sender or receiver
    assert one is not None
    ends = (one.rank, one.to) if one is sender else (one.source, one.rank)
    source, destination = (one.key[0].index(rank) for rank in ends if rank is not None)
    return Delivery.between(0, source, destination, sender, receiver)


@guarded
class InProcess(Transport):
    """Computes in this process, large rings on the run's workers, and what it moves is there at once."""

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """Carries out a call for all ranks of its group: hop by hop, or, where nobody asks to see the hops, a ring at
        once, to the same bits."""
        call = parts[0].call
        if not self.options.hop_by_hop and fast_ring.serves(call):
            fast_ring.run(parts, self.options.workers_for(call.ranks * call.length))
            for me, nbytes in zip(parts, fast_ring.sent_nbytes(call), strict=True):
                me.finish(nbytes)
            return
        if self.options.watch == "hop":
            for me in parts:  # who looks at a result between two hops can tell what has not been written yet
                if not may_share_memory(me.x, me.out):
                    poison(me.out)
        yield from super().collective(parts)


def check_private_memory(calls: Sequence[PendingCall], in_common: Mapping[Any, Array] | None) -> None:
    """Raises ValueError where one rank's result would be written over what another one reads or writes, but for the
    same result of all in an array that they have in common."""
    first = calls[0].out
    if in_common and all(me.out is first for me in calls) and any(room is first for room in in_common.values()):
        return
    writes = sorted((low := start(me.out), low + me.out.nbytes, me.index) for me in calls if me.out.nbytes)
    if writes and writes[0][:2] == writes[-1][:2] and any(
            start(room) <= writes[0][0] < start(room) + room.nbytes for room in (in_common or {}).values()):
        return
    shared = [(rank, other) for (_, end, rank), (begin, _, other) in pairwise(writes) if begin < end]
    for me in calls if not shared else ():
        if me.x.nbytes:
            low = start(me.x)
            after = bisect_right(writes, low, key=itemgetter(1))  # of these, which do not overlap, one may be its own
            shared += [(me.index, other) for begin, _, other in writes[after:after + 2]
                       if begin < low + me.x.nbytes and other != me.index]
    if shared:
        raise ValueError(f"ranks {min(shared[0])} and {max(shared[0])} handed the same memory to a collective that "
                         "writes to it, but a rank's memory is its own; give each rank an array of its own")


# -- The hub ---------------------------------------------------------------------------------------------------------

@guarded
def check_thread(thread: int, rank: int) -> None:
    """Raises RankUseError unless the caller is in ``thread``, the one that runs the rank's cluster."""
    if threading.get_ident() != thread:
        raise RankUseError(f"rank {rank} was used in another thread than the one that runs its cluster; "
                           "keep every call of a rank inside the program that it was handed to")


@guarded
class Hub(Backend):
    """One run of one program on N ranks, in the thread that drives it.

    No other program goes on while a rank's runs: they take their turns when it waits or computes.
    """

    def __init__(self, size: int, transport: Transport, options: RunOptions, order: Seeded | Chosen | None) -> None:
        """``order`` None: in rounds."""
        self.transport, self.watch, self.interrupts = transport, options.watch, options.interrupts
        self.library = transport.library
        transport.begin(options)
        self.order = order
        self.options = options
        self.stacks = stacks()
        self.current = self.stacks.current
        self.thread = threading.get_ident()
        self.greenlets: list[Any] = []
        self.results: list[Any] = [None] * size
        self.waiting: list[Pending | None] = [None] * size
        self.ready: deque[int] = deque(range(size))
        self.incomplete: dict[tuple[GroupKey, int], dict[int, PendingCall]] = {}
        self.complete: deque[list[PendingCall]] = deque()
        self.exchanges: dict[int, PendingExchange] = {}
        self.issued: dict[int, list[Pending]] = {}  # in this round, by rank
        self.messages: deque[RunEvent] = deque()
        self.under_way: list[PendingCall] = []  # the collective that is being carried out, for a look at it
        if order is None and isinstance(transport, InProcess) and not (options.watch or transport.options.hop_by_hop):
            # In debug mode a rank poisons what it frees; who steps would see what others wrote.
            self.arrays_in_common = WeakValueDictionary()
        self.failure: tuple[int, BaseException] | None = None
        self.aftermath: list[tuple[int, BaseException]] = []
        self.stopping = False

    # -- called by ranks, inside their greenlets ------------------------------------------------------------------

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is rank ``rank``'s own program, in this hub's thread."""
        if self.current() is not self.greenlets[rank]:
            check_thread(self.thread, rank)
            raise RankUseError(f"rank {rank} was used outside its own program (a program must only use the rank that "
                               "it was handed; reading another rank's memory and trace is fine after the run)")

    def issue(self, rank: int, me: Pending) -> None:
        """Takes the rank's part, in the plain order at the end of the round."""
        if self.stopping:
            raise RankStopped
        self.transport.issued(rank, me)
        if self.order is None:
            self.issued.setdefault(rank, []).append(me)
        else:
            self._take(rank, [me])
        if rank in self.transport.late or (self.order is not None and self.order.pauses(rank, me)):
            self.ready.append(rank)
            self._park()

    def _take(self, rank: int, parts: Iterable[Pending]) -> None:
        """Takes what a rank has issued; a collective becomes due when all of its group have issued theirs."""
        for me in parts:
            if isinstance(me, PendingExchange):
                self.exchanges[rank] = me
                self._move_messages(me)
            else:
                key = me.call.key, me.call.number
                issued = self.incomplete.setdefault(key, {})
                issued[me.index] = me
                if len(issued) == me.size:
                    del self.incomplete[key]
                    self.complete.append([*map(issued.__getitem__, range(me.size))])

    def wait(self, rank: int, me: Pending) -> None:
        """Parks the rank until its part is done."""
        while not me.done:
            self.waiting[rank] = me
            self._park()
        self.transport.completed(rank, me)

    def compute(self, rank: int, work: Callable[[], Any], operations: int) -> Any:
        """The result of the work, computed beside that of other ranks where it is worth a thread."""
        workers = self.options.workers_for(operations) if self.order is None and not self.stopping else None
        if workers is None:
            return copy_context().run(work)  # as on a thread, what it sets there ends with it
        box = workers.begin(rank, work)
        del work  # so that nothing but the rank's program holds what it computes with
        try:
            self._park()
            return box.pop()()
        finally:
            del box  # it may hold an error, and that this frame with its arrays

    def _park(self) -> None:
        if self.stopping:
            raise RankStopped
        parent = self.current().parent
        assert parent is not None
        parent.switch()
        if self.stopping:
            raise RankStopped

    # -- the loop -------------------------------------------------------------------------------------------------

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Generator[RunEvent, None, None]:
        """Runs the programs to their end; a watched hub yields every message, and every hop made hop by hop, or every
        collective when it has ended.

        Raises what a rank raised, MismatchError or DeadlockError; whatever happens, no rank is left running.
        """
        self.greenlets = [self._greenlet(rank, program) for rank, program in enumerate(programs)]
        try:
            yield from self._rounds() if self.order is None else self._turns(self.order)
            if not all(g.dead for g in self.greenlets):
                raise DeadlockError(deadlock_text([self._position(rank, me) for rank, me in enumerate(self.waiting)]))
            self.synchronize()
        except BaseException:
            self.transport.abort()
            raise
        finally:
            if self.options.workers:
                self.options.workers.close()
            self._unwind()
            self.transport.close()

    def _rounds(self) -> Generator[RunEvent, None, None]:
        """The plain order: each rank that can goes on until it waits; then what they have issued is carried out.

        Of several ranks that fail, the first in the round has failed.
        """
        while self.ready:
            place: dict[int, int] = {}  # of each rank in the round
            while self.ready or ((workers := self.options.workers) and workers.computing):
                if self.interrupts.pending:
                    self.interrupts.raise_pending()
                rank = self.ready.popleft() if self.ready or not workers else workers.next_rank()
                if self.failure is None or place.get(rank, len(place)) < place[self.failure[0]]:
                    place.setdefault(rank, len(place))
                    self._resume(rank)
            if self.failure is not None:
                raise self.failure[1]
            for rank in place:
                self._take(rank, self.issued.pop(rank, ()))
            while self.messages:
                yield self.messages.popleft()
            while self.complete:
                if self.interrupts.pending:
                    self.interrupts.raise_pending()
                yield from self._carry_out(self.complete.popleft())

    def _turns(self, order: Seeded | Chosen) -> Generator[RunEvent, None, None]:
        """Another legal order: what a rank issues is taken at once, and who is next is chosen turn by turn."""
        while self.ready or self.complete:
            if self.interrupts.pending:
                self.interrupts.raise_pending()
            if order.collective_next(self.complete, self.ready):
                yield from self._carry_out(self.complete.popleft())
                continue
            self._resume(self.ready.popleft())
            if self.failure is not None:
                raise self.failure[1]
            while self.messages:
                yield self.messages.popleft()

    def _greenlet(self, rank: int, program: Callable[[], Any]) -> Any:
        def body() -> None:
            try:
                self.results[rank] = program()
            except RankStopped as error:
                if self.stopping:
                    clear_frames(error)
                else:  # the program's own, which stops nobody
                    self._failed(rank, error)
            except StopIteration as error:  # which a generator, as the hub's loop is one, must not let through
                self._failed(rank, RuntimeError(STOP_ITERATION), error)
            except BaseException as error:  # whatever it is, the loop raises it again
                self._failed(rank, error)

        return self.stacks.new(body)

    def _failed(self, rank: int, error: BaseException, cause: BaseException | None = None) -> None:
        error.__cause__ = cause or error.__cause__
        if self.stopping:
            self.aftermath.append((rank, error))
        else:
            self.failure = (rank, error)

    def _resume(self, rank: int) -> None:
        if threading.get_ident() != self.thread:
            raise RankUseError("a run can only be continued in the thread that started it; step through it there")
        g = self.greenlets[rank]
        g.parent = self.current()
        self.transport.resume(rank)
        g.switch()

    def _wake(self, rank: int, me: Pending) -> None:
        if self.waiting[rank] is me and me.done:
            self.waiting[rank] = None
            self.ready.append(rank)

    # -- collectives and messages ---------------------------------------------------------------------------------

    def _carry_out(self, calls: list[PendingCall]) -> Generator[RunEvent, None, None]:
        call, self.under_way = calls[0].call, calls
        for me in calls:
            if me.call != call:
                raise MismatchError(mismatch_text({rank: MadeCall(each.call, each.where or self.place(rank))
                                                   for rank, each in zip(call.group, calls, strict=True)}))
        check_private_memory(calls, self.arrays_in_common)
        for delivery in self._awaited(self.transport.collective(calls)):
            if self.watch == "hop":
                yield RunEvent(call, delivery.hop, self.transport.seen(call.key, delivery))
        for me in calls:
            self._wake(call.group[me.index], me)
        if self.watch == "collective":
            yield RunEvent(call, None, np.empty(0, call.dtype))
        self.under_way = []

    def _awaited(self, deliveries: Iterable[Delivery | None]) -> Iterator[Delivery]:
        """The deliveries that are made, waiting where one is not made yet."""
        for delivery in deliveries:
            self.interrupts.raise_pending()
            if delivery is None:
                time.sleep(POLL_SECONDS)
            else:
                yield delivery

    def _move_messages(self, me: PendingExchange) -> None:
        """Moves what the new exchange makes possible: its send to a rank that receives from it, and the reverse."""
        for source, destination in dict.fromkeys([(me.rank, me.to), (me.source, me.rank)]):
            if source is None or destination is None:
                continue
            sender, receiver = self.exchanges.get(source), self.exchanges.get(destination)
            if (sender and receiver and sender.to_send and sender.to == destination and receiver.to_receive
                    and receiver.source == source and sender.key == receiver.key):
                self._move(sender, receiver)

    def _move(self, sender: PendingExchange, receiver: PendingExchange) -> None:
        send, out = sender.send, receiver.out
        assert send is not None
        assert out is not None
        if send.shape != out.shape or send.dtype != out.dtype:
            raise MismatchError(message_mismatch_text(sender.rank, send, receiver.rank, out, self.place(sender.rank),
                                                      self.place(receiver.rank)))
        message = message_between(sender, receiver)
        ends = {message.hop.source: sender, message.hop.destination: receiver}
        for delivery in self._awaited(self.transport.message(sender.key, [message], ends)):
            if self.watch:
                hop = Hop(0, sender.rank, receiver.rank, (), send.nbytes)
                self.messages.append(RunEvent(None, hop, self.transport.seen(sender.key, delivery)))
        for me in (sender, receiver):
            if me.done:
                self.exchanges.pop(me.rank, None)
                self._wake(me.rank, me)

    # -- ends -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until all that the ranks asked for is done; raises what went wrong with it."""
        while not self.transport.idle():
            self.interrupts.raise_pending()
            time.sleep(POLL_SECONDS)

    def _position(self, rank: int, me: Pending | None) -> RankPosition:
        if me is None:
            return RankPosition(None)
        missing = None
        if isinstance(me, PendingCall):
            issued = self.incomplete.get((me.call.key, me.call.number))  # None: all have, and it does not end
            missing = None if issued is None else [member for i, member in enumerate(me.call.group) if i not in issued]
        return RankPosition(me.describe(), self.place(rank), missing)

    def place(self, rank: int) -> str:
        """The line at which the program of a rank that has begun and not finished waits, or runs."""
        program = self.greenlets[rank]
        return place_of_call() if program is self.current() else place_of(program.gr_frame)

    def _unwind(self) -> None:
        """Stops every rank that still runs; its ``finally`` blocks run, and any further call stops it again."""
        self.stopping = True
        for rank, g in enumerate(self.greenlets if threading.get_ident() == self.thread else ()):
            if g:  # begun and not ended: one that has not begun has nothing to unwind, and would raise out of here
                g.parent = self.current()
                self.transport.resume(rank)
                g.throw(RankStopped)
        self.issued.clear()
        self.incomplete.clear()
        self.complete.clear()
        self.ready.clear()
        self.exchanges.clear()
        self.under_way = []
        self.waiting = [None] * len(self.waiting)

    def release(self, error: BaseException, handled: BaseException | None) -> None:
        """After a failure: names the ranks in notes, and clears what the error's frames would keep in memory."""
        if self.failure is not None and self.failure[1] is error:
            add_note(error, f"raised by rank {self.failure[0]} of {len(self.results)}")
        for rank, later in self.aftermath:
            add_note(error, f"rank {rank} raised {text_of(later, repr)} when it was stopped")
            clear_frames(later, until=handled)
        clear_frames(error, until=handled)
        self.results.clear()
        self.aftermath.clear()
        self.failure = None
