"""The project's own algorithms on streams: hops are NCCL's sends and receives, additions are our kernels.

So the bits are the simulator's: NCCL only moves what the kernels have added, in the order of the algorithm.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from zerosim.backends.nccl.adapter import NAP_SECONDS, NCCL, TYPES, Communicator, DeviceStreams, adds
from zerosim.numerics.arrays import on_device, words
from zerosim.ranks.call import Array, Call, Pending, PendingCall, PendingExchange, chunk_lengths
from zerosim.ranks.collectives import NATIVE, Exchanges
from zerosim.ranks.errors import MismatchError, ranks_text
from zerosim.ranks.hub import Delivery, HopEvent, RunOptions, Transport, lockstep, sent_by, steps_of
from zerosim.ranks.process import guarded
from zerosim.ranks.trace import Hop


def on_stream(streams: DeviceStreams, me: PendingCall) -> Exchanges:
    """The rank's generator, whose copies and additions go to the rank's communication stream."""
    me.kernels, steps = streams.kernels.serving(me.x), steps_of(me)
    while True:
        with streams.communicating():
            exchange = next(steps, None)
        if exchange is None:
            return
        yield exchange


def send(comm: Communicator, streams: DeviceStreams, x: Any, peer: int) -> None:
    """Sends, inside a group; where there is nothing to send, the receiver does not wait for it."""
    if x.size:
        streams.select()
        comm.send(x, peer, streams.pointer)


def receive(comm: Communicator, streams: DeviceStreams, out: Any, peer: int) -> None:
    """Receives, inside a group, unless there is nothing to come."""
    if out.size:
        streams.select()
        comm.recv(out, peer, streams.pointer)


# -- ``algorithm="native"``: NCCL's own collectives, whose order of additions is the library's -----------------------
# Sums of N terms in any order, each addition rounded once to the format: |result - sum| <= (N-1)·u·(1 + u)^(N-1)·Σ|x|,
# u the format's unit roundoff (Higham 2002, section 4.2). NCCL adds in the format, or in fp32 and rounds at the end,
# and in an order that follows the machine's topology. Its maximum and minimum need not pass a NaN on.
#
# Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].


class Native:
    """One rank's calls of one collective, to be made inside a group, with those of other ranks if they are here.

    Equal chunks have a call of NCCL's own. Uneven ones become a reduce or a broadcast for each chunk, in one group.
    """

    def __init__(self, me: PendingCall) -> None:
        """Raises ValueError for a sum in a type in which NCCL does not add."""
        self.me, self.call, self.x, self.out = me, me.call, me.x, me.out
        if "reduce" in self.call.operation and not adds(self.call.dtype):
            raise ValueError(f"{self.call.operation} by 'native' of {self.call.dtype}: through CuPy NCCL adds in "
                             f"{', '.join(TYPES)}; leave algorithm= out for our own ring, which adds in every format")
        lengths = chunk_lengths(self.call.cut)
        self.even = bool((lengths == lengths[0]).all())

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank is counted for."""
        return sent_by(self.call.normalized(), self.me.index)

    def prepare(self, copy: Callable[[Any, Any], None]) -> None:
        """On the communication stream, before the calls: what a rank has for itself is copied where it belongs."""
        index = self.me.index
        if self.call.operation == "gather" and index == self.call.root and not self.me.in_place:
            copy(self.x, self._chunk(self.out, index))
        elif self.call.operation == "all_to_all":
            copy(self._chunk(self.x, index), self._place(index))

    def enqueue(self, comm: Communicator, stream: int) -> None:
        """Makes the calls; each has elements to move."""
        if self.call.length:
            getattr(self, f"_{self.call.operation}")(comm, stream)

    # -- the collectives ------------------------------------------------------------------------------------------

    def _reduce_scatter(self, comm: Communicator, stream: int) -> None:
        if self.even:
            comm.reduce_scatter(self.x, self.out, self.call.op, stream)
            return
        for root, chunk in self._chunks(self.x):
            comm.reduce(chunk, self.out if root == self.me.index else None, self.call.op, root, stream)

    def _all_gather(self, comm: Communicator, stream: int) -> None:
        if self.even:
            comm.all_gather(self.x, self.out, stream)
            return
        for root, chunk in self._chunks(self.out):
            comm.broadcast(self.x if root == self.me.index else chunk, chunk, root, stream)

    def _all_reduce(self, comm: Communicator, stream: int) -> None:
        comm.all_reduce(self.x, self.out, self.call.op, stream)

    def _broadcast(self, comm: Communicator, stream: int) -> None:
        comm.broadcast(self.x, self.out, self.call.root, stream)

    def _reduce(self, comm: Communicator, stream: int) -> None:
        root = self.call.root
        comm.reduce(self.x, self.out if root == self.me.index else None, self.call.op, root, stream)

    def _gather(self, comm: Communicator, stream: int) -> None:
        if self.me.index != self.call.root:
            if self.x.size:
                comm.send(self.x, self.call.root, stream)
            return
        for rank, chunk in self._chunks(self.out):
            if rank != self.me.index:
                comm.recv(chunk, rank, stream)

    def _all_to_all(self, comm: Communicator, stream: int) -> None:
        for rank, chunk in self._chunks(self.x):
            if rank != self.me.index:
                comm.send(chunk, rank, stream)
        for rank in range(self.call.ranks):
            if rank != self.me.index and self._place(rank).size:
                comm.recv(self._place(rank), rank, stream)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _chunk(self, vector: Any, chunk: int) -> Any:
        return vector[self.call.cut[chunk]:self.call.cut[chunk + 1]]

    def _chunks(self, vector: Any) -> list[tuple[int, Any]]:
        """(i, chunk i) of all chunks that are not empty."""
        return [(i, self._chunk(vector, i)) for i in range(self.call.ranks) if self.call.cut[i] < self.call.cut[i + 1]]

    def _place(self, rank: int) -> Any:
        """The place of the rank's chunk in the result of an all_to_all."""
        length = self.call.cut[self.me.index + 1] - self.call.cut[self.me.index]
        return self.out[rank * length:(rank + 1) * length]


# -- All ranks in one process, each on its GPU: the hub's collectives as groups of NCCL's calls ----------------------
# An event says when a rank's inputs are ready, and the rank's communication stream waits for it; another says when its
# result is there, and ``wait()`` lets the stream that computes wait for that one. The host waits for neither.


class Communicators:
    """NCCL's communicators of the groups of one process' ranks; each is made when it is first needed."""

    def __init__(self, nccl: NCCL, devices: Sequence[int]) -> None:
        self.nccl, self.devices = nccl, list(devices)
        self._made: dict[tuple[int, ...], list[Communicator]] = {}

    def of(self, group: tuple[int, ...]) -> list[Communicator]:
        """One communicator for each rank of the group."""
        if group not in self._made:
            self._made[group] = self.nccl.communicators([self.devices[rank] for rank in group])
        return self._made[group]

    def check(self) -> None:
        """Raises NCCL's error where something has gone wrong."""
        for communicators in self._made.values():
            for communicator in communicators:
                communicator.check()

    def abort(self) -> None:
        """Ends what is under way; the next call makes new communicators."""
        made, self._made = self._made, {}
        for communicators in made.values():
            for communicator in communicators:
                with suppress(Exception):  # an error has brought us here, and that one is to be raised
                    communicator.abort()


@guarded
class NCCLTransport(Transport):
    """Puts what the hub decides on the streams of all ranks; arrays on the host are carried as without GPUs."""

    library = "NCCL"

    def __init__(self, all_streams: Sequence[DeviceStreams], communicators: Communicators,
                 options: RunOptions) -> None:
        super().__init__(options)
        self.all_streams, self.communicators = all_streams, communicators
        self._issuing = 0
        self._ready: dict[Pending, Any] = {}
        self._done: dict[Pending, Any] = {}

    def resume(self, rank: int) -> None:
        """CuPy's current device belongs to the thread, which all ranks share."""
        self.all_streams[rank].select()

    def issued(self, rank: int, me: Pending) -> None:
        """Remembers when on the rank's stream the inputs are ready; its device is current."""
        self._issuing = rank
        if arrays_on_device(me):
            self._ready[me] = self.all_streams[rank].ready()

    def completed(self, rank: int, me: Pending) -> None:
        """The rank's stream waits for what was communicated, and what it reads next is there."""
        self._ready.pop(me, None)
        done = self._done.pop(me, None)
        if done is not None:
            self.all_streams[rank].catch_up(done)

    # -- collectives ----------------------------------------------------------------------------------------------

    def collective(self, calls: Sequence[PendingCall]) -> Generator[HopEvent, None, list[int]]:
        """The call's own hops, a group of sends and receives for each step; or NCCL's own collective."""
        call = calls[0].call
        on_devices = [arrays_on_device(me) for me in calls]
        if not any(on_devices):
            return (yield from super().collective(calls))
        _check_all_on_device(call, on_devices)
        for me in calls:
            self._streams(call, me.index).follow(self._ready[me])
        carry = self._native if call.algorithm == NATIVE else self._hops
        sent = yield from carry(calls)
        for me in calls:
            self._done[me] = self._streams(call, me.index).finished()
        return sent

    def _streams(self, call: Call, index: int) -> DeviceStreams:
        return self.all_streams[call.group[index]]

    def _hops(self, calls: Sequence[PendingCall]) -> Generator[HopEvent, None, list[int]]:
        call, sent = calls[0].call, [0] * len(calls)

        def begin(me: PendingCall) -> Exchanges:
            return on_stream(self._streams(call, me.index), me)

        def carry(deliveries: Sequence[Delivery]) -> Iterator[tuple[Hop, Array]]:
            """All hops of one step as one group."""
            self._move(call.group, [(each.hop.source, each.sent, each.hop.destination, each.out)
                                    for each in deliveries])
            for each in deliveries:
                yield each.hop, each.out

        for hop, values in lockstep(calls, begin=begin, carry=carry):
            sent[hop.source] += hop.nbytes
            self.interrupts.raise_pending()
            if self.watch == "hop":
                yield HopEvent(call, hop, self._seen(self._streams(call, hop.destination), values))
        return sent

    def _move(self, group: tuple[int, ...], messages: Sequence[tuple[int, Array, int, Array]]) -> None:
        """(source, what it sends, destination, what arrives) of each message, by indices of the group."""
        communicators = self.communicators.of(group)
        with self.communicators.nccl.group():
            for source, sent, destination, out in messages:
                send(communicators[source], self.all_streams[group[source]], sent, destination)
                receive(communicators[destination], self.all_streams[group[destination]], out, source)

    def _native(self, calls: Sequence[PendingCall]) -> Generator[HopEvent, None, list[int]]:
        call, natives = calls[0].call, [Native(me) for me in calls]
        communicators = self.communicators.of(call.group)
        for native, me in zip(natives, calls, strict=True):
            streams = self._streams(call, me.index)
            with streams.communicating():
                native.prepare(streams.kernels.serving(me.x).cast_pack)
        with self.communicators.nccl.group():
            for native, me in zip(natives, calls, strict=True):
                streams = self._streams(call, me.index)
                streams.select()
                native.enqueue(communicators[me.index], streams.pointer)
        yield from ()
        return [native.sent_nbytes for native in natives]

    def _seen(self, streams: DeviceStreams, values: Array) -> Array:
        """A copy, for whoever steps through the run."""
        with streams.communicating():
            copy = words(values).copy().view(values.dtype)
        streams.synchronize()
        return copy

    # -- messages -------------------------------------------------------------------------------------------------

    def message(self, sender: PendingExchange, receiver: PendingExchange) -> None:
        """A send and its receive in one group; elements on the host are copied as without GPUs."""
        both = [arrays_on_device(sender), arrays_on_device(receiver)]
        if not any(both):
            super().message(sender, receiver)
            return
        if not all(both):
            raise MismatchError(f"rank {sender.rank} sends from {_place(both[0])} to rank {receiver.rank}, which "
                                f"receives on {_place(both[1])}; make both arrays with rank.xp")
        group = sender.key[0]
        for me in (sender, receiver):
            self.all_streams[me.rank].follow(self._ready[me])
        self._move(group, [(group.index(sender.rank), sender.send, group.index(receiver.rank), receiver.out)])
        for me in (sender, receiver):
            self._done[me] = self.all_streams[me.rank].finished()
        self.all_streams[self._issuing].select()  # the program that is running goes on

    # -- ends -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until every device is idle; raises what went wrong on one of them."""
        while not all(streams.idle() for streams in self.all_streams):
            self.interrupts.raise_pending()
            self.communicators.check()
            time.sleep(NAP_SECONDS)

    def abort(self) -> None:
        """Aborts all communicators, so that nobody waits for a message that will not come."""
        self.communicators.abort()
        for streams in self.all_streams:
            streams.rest()

    def close(self) -> None:
        """Lets go of the run's calls."""
        self._ready.clear()
        self._done.clear()


def arrays_on_device(me: Pending) -> bool:
    """True where what the part moves lies on a device; all of it does, or nothing.

    Raises ValueError for a part with both kinds of arrays.
    """
    pair = (me.x, me.out) if isinstance(me, PendingCall) else (me.send, me.out)
    kinds = {on_device(array) for array in pair if array is not None and array.size}
    if len(kinds) == 2:
        raise ValueError(f"{me.describe()} was given an array on a device and one on the host; make both with "
                         "rank.xp")
    return kinds == {True} or (not kinds and any(on_device(array) for array in pair))


def _check_all_on_device(call: Call, on_devices: Sequence[bool]) -> None:
    if not all(on_devices):
        there = [call.group[index] for index, found in enumerate(on_devices) if found]
        here = [call.group[index] for index, found in enumerate(on_devices) if not found]
        raise MismatchError(f"in {call} {ranks_text(there)} brought arrays on a device and {ranks_text(here)} on the "
                            "host; make them with rank.xp on every rank")


def _place(on_device: bool) -> str:
    return "a device" if on_device else "the host"
