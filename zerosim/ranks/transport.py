"""The transport: moves what ranks send each other. The one protocol of all backends.

A transport says how a step of messages moves (`Transport.move`), between ranks of this process and to those of others.
The rest is written once: each rank's generator is driven hop by hop, in lockstep with those of the other ranks that are
here, and what it yields is moved. In one process that is every rank of a call; where each rank has a process of its
own, it is one.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from zerosim.numerics.arrays import copy_elements, poison
from zerosim.numerics.kernels import NullKernels
from zerosim.numerics.null_arrays import NullArray
from zerosim.ranks import fast_ring
from zerosim.ranks.call import Array, Call, GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.collectives import ALGORITHMS, NATIVE, Exchange, Exchanges, row_of
from zerosim.ranks.process import Interrupts, guarded
from zerosim.ranks.trace import Hop

Watch = Literal["hop", "collective"]  # what a run stops after


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The way in which one run is carried out: ``hop_by_hop`` makes the ring's hops too, where nobody watches them."""

    hop_by_hop: bool
    watch: Watch | None
    interrupts: Interrupts


# -- Lockstep: the ranks of one call that are here, step by step -----------------------------------------------------
# A message moves when all its ends that are here are there: the sender has yielded ``send``, the receiver ``out``. All
# messages that can move in one round make one step.


class Delivery(NamedTuple):
    """A message that can move: the hop, by indices of the group; what is sent, and where it arrives.

    ``sent`` is None where the sender is in another process, ``out`` where the receiver is.
    """

    hop: Hop
    sent: Array | None
    out: Array | None


class Runner:
    """One rank's generator: the exchange that it waits for, and with whom its halves are still open."""

    def __init__(self, steps: Exchanges) -> None:
        self.steps = steps
        self.advance()

    def advance(self) -> None:
        """Runs the generator to its next exchange; ``waiting`` is None when it has none left."""
        self.waiting: Exchange | None = next(self.steps, None)
        self.to = None if self.waiting is None else self.waiting.to
        self.source = None if self.waiting is None else self.waiting.source


def steps_of(me: PendingCall) -> Exchanges:
    """The generator of one rank's part in a call."""
    return row_of(me.call).steps(me, me.x, me.out)


def lockstep(steps: Mapping[int, Exchanges]) -> Iterator[list[Delivery]]:
    """The messages of each step, of the ranks whose generators these are, by their indices in the group.

    Who asks for the next step has moved them.
    """
    runners = {index: Runner(its) for index, its in steps.items()}
    step, arrived = 0, list(runners)  # at an exchange that is new; of the others nothing can move yet
    while any(runners[rank].waiting is not None for rank in arrived):
        ends = {(rank, to) for rank in arrived if (to := runners[rank].to) is not None}
        ends |= {(source, rank) for rank in arrived if (source := runners[rank].source) is not None}
        moved = [(source, to) for source, to in sorted(ends)
                 if (source not in runners or runners[source].to == to)
                 and (to not in runners or runners[to].source == source)]
        yield [_delivery(runners, step, source, to) for source, to in moved]
        for source, to in moved:
            if source in runners:
                runners[source].to = None
            if to in runners:
                runners[to].source = None
        arrived = [rank for rank in sorted({end for pair in moved for end in pair} & runners.keys())
                   if runners[rank].to is None and runners[rank].source is None]
        for rank in arrived:
            runners[rank].advance()
        step += 1
    assert all(runner.waiting is None for runner in runners.values()), "the algorithm waits for itself"


def _delivery(runners: Mapping[int, Runner], step: int, source: int, destination: int) -> Delivery:
    sender = runners[source].waiting if source in runners else None
    receiver = runners[destination].waiting if destination in runners else None
    sent, out = sender.send if sender else None, receiver.out if receiver else None
    moved = out if sent is None else sent
    assert moved is not None
    if sent is not None and out is not None:
        assert len(sent) == len(out)
        assert sent.dtype == out.dtype, "a message arrives in the format in which it left"
    return Delivery(Hop(step, source, destination, sender.chunks if sender else (), moved.nbytes), sent, out)


def expand(call: Call) -> list[Hop]:
    """Every hop of the call, from its own generators, run on arrays without data. Ranks are the group's indices."""
    return list(_expand(call.normalized()))


@lru_cache(maxsize=8)  # few: 512 ranks in a ring make half a million hops
def _expand(call: Call) -> tuple[Hop, ...]:
    return tuple(delivery.hop for step in lockstep_without_data(call) for delivery in step)


def lockstep_without_data(call: Call) -> Iterator[list[Delivery]]:
    """The steps of all ranks of a call, on arrays without data."""
    kernels = NullKernels()
    return lockstep({index: steps_of(without_data(call, index, kernels)) for index in range(call.ranks)})


def sent_by(call: Call, index: int) -> int:
    """The bytes that one rank sends, from its own generator alone, which needs no partner where there is no data.

    What a library's own collective sends is not known; it is counted as the first algorithm of the table would send.
    """
    if call.algorithm == NATIVE:
        call = replace(call, algorithm=next(iter(ALGORITHMS[call.operation])))
    if fast_ring.serves(call):
        return fast_ring.sent_nbytes(call, index)
    steps = steps_of(without_data(call, index, NullKernels()))
    return sum(exchange.send.nbytes for exchange in steps if exchange.send is not None)


def without_data(call: Call, index: int, kernels: NullKernels) -> PendingCall:
    """One rank's part in the call on arrays without data, of the lengths that the operation has on this rank."""
    n = call.length
    own = call.cut[index + 1] - call.cut[index]
    x, out = {"reduce_scatter": (n, own), "all_gather": (own, n), "gather": (own, n),
              "all_to_all": (n, call.ranks * own)}.get(call.operation, (n, n))
    me = PendingCall(call, index, kernels, NullArray(x, call.dtype), NullArray(out, call.dtype))
    me.buffers = [NullArray(length, dtype) for length, dtype in row_of(call).buffers(me)]
    return me


# -- The transport ---------------------------------------------------------------------------------------------------
# What moves is told one delivery after the other; None stands for "not yet": whoever drives it asks again later.

Carried = Generator[Delivery | None, None, None]


@guarded
class Transport:
    """Carries out the parts that ranks of this process have issued: one primitive, `move`, and the ends of a run.

    Ranks of the whole cluster are named by their index in it, those of a group in a step by their place in the group.
    What a transport has no use for, it inherits from here: these methods do nothing.
    """

    library: str | None = None  # whose own collectives ``algorithm="native"`` asks for
    in_order = False  # True where ranks that begin calls in different orders would wait for each other for ever
    watched = False   # True where a program may wait inside the library, so that a thread must listen to the others
    world = "all in this process"

    def begin(self, options: RunOptions) -> None:
        """A run begins."""
        self.hop_by_hop, self.watch, self.interrupts = options.hop_by_hop, options.watch, options.interrupts

    # -- in which backends differ -------------------------------------------------------------------------------------

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Carried:
        """Moves all messages of a step, as one; yields each that has moved at every end that is here.

        ``call`` is None for messages that programs send themselves.
        """
        raise NotImplementedError

    def native(self, parts: Sequence[PendingCall]) -> Carried:
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
        """The rank's program has issued its part: what it reads has been written, or is about to be."""

    def completed(self, rank: int, me: Pending) -> None:
        """The rank's program goes on with a part that is done: what it reads next must be there."""

    def invitation(self, key: GroupKey) -> bytes:
        """Whatever the first rank of a new group has to tell the others."""
        return b""

    def new_group(self, parent: GroupKey, key: GroupKey, invitation: bytes) -> None:
        """The ranks of ``key``, all of the group ``parent``, are a group of their own from here on."""

    def over(self) -> int:
        """Where a thread listens: the parts of this run that are at their end, in the order in which they began."""
        raise NotImplementedError

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

    def collective(self, parts: Sequence[PendingCall]) -> Carried:
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

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Carried:
        """Moves messages that programs send themselves; ``ends`` by the place of their rank in the group."""
        for delivery in self.move(key, step):
            if delivery is not None:
                if delivery.sent is not None:
                    ends[delivery.hop.source].sent()
                if delivery.out is not None:
                    ends[delivery.hop.destination].received()
            yield delivery


@guarded
class InProcess(Transport):
    """Computes in the hub's own thread, and what it moves is there at once."""

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Carried:
        """Copies each message to where it arrives, one after the other."""
        for delivery in step:
            copy_elements(delivery.sent, delivery.out)
            yield delivery

    def collective(self, parts: Sequence[PendingCall]) -> Carried:
        """Carries out a call for all ranks of its group; a ring whose hops nobody watches is computed without them."""
        call = parts[0].call
        if not self.hop_by_hop and fast_ring.serves(call):
            fast_ring.run(parts)
            for me in parts:
                me.finish(fast_ring.sent_nbytes(call, me.index))
            return
        if self.watch == "hop":  # who looks between two hops sees what is not written yet
            for me in parts:
                if not me.in_place:
                    poison(me.out)
        yield from super().collective(parts)
