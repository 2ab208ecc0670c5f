"""The project's own algorithms on streams: hops are NCCL's sends and receives, additions are our kernels.

So the bits are the simulator's: NCCL only moves what the kernels have added, in the order of the algorithm. All ranks
may be in one process, or each in one of its own. An event says when a rank's inputs are ready, and the rank's
communication stream waits for it; another says when its result is there, and ``wait()`` lets the stream that computes
wait for that one. The host waits for neither.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from zerosim.backends.nccl.adapter import NCCL, TYPES, Communicator, DeviceStreams, adds
from zerosim.backends.processes.notes import Channel
from zerosim.numerics.arrays import on_device, words
from zerosim.ranks.call import Array, Call, GroupKey, Pending, PendingCall, PendingExchange, chunk_lengths
from zerosim.ranks.collectives import Delivery, Exchanges, sent_by, steps_of
from zerosim.ranks.errors import MismatchError, RankStopped, ranks_text
from zerosim.ranks.hub import Carried, InProcess, RunOptions, Transport
from zerosim.ranks.process import forget_frames, guarded

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

    def prepare(self, copy: Callable[[Any, Any], None]) -> None:
        """On the communication stream, before the calls: what a rank has for itself is copied where it belongs."""
        index = self.me.index
        if self.call.operation == "gather" and index == self.call.root and not self.me.in_place:
            copy(self.x, self.me.chunk(self.out, index))
        elif self.call.operation == "all_to_all":
            copy(self.me.chunk(self.x, index), self._place(index))

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

    def _chunks(self, vector: Any) -> list[tuple[int, Any]]:
        """(i, chunk i) of all chunks that are not empty."""
        return [(i, self.me.chunk(vector, i)) for i in range(self.call.ranks) if self.me.length(i)]

    def _place(self, rank: int) -> Any:
        """The place of the rank's chunk in the result of an all_to_all."""
        length = self.call.cut[self.me.index + 1] - self.call.cut[self.me.index]
        return self.out[rank * length:(rank + 1) * length]


# -- Communicators: of each group one for each of its ranks that is here -----------------------------------------------


class Communicators:
    """NCCL's communicators of the groups of ranks in one process, each on its device; made when first needed."""

    def __init__(self, nccl: NCCL, devices: Sequence[int]) -> None:
        self.nccl, self.devices = nccl, list(devices)
        self.made: dict[GroupKey, dict[int, Communicator]] = {}  # by group, and place in it

    def each(self) -> list[Communicator]:
        """All that there are."""
        return [communicator for of_group in self.made.values() for communicator in of_group.values()]

    def of(self, key: GroupKey) -> Mapping[int, Communicator]:
        """The communicators of a group, by the places of its ranks; groups of the same ranks have the same."""
        key = key[0], ()
        if key not in self.made:
            communicators = self.nccl.communicators([self.devices[rank] for rank in key[0]])
            self.made[key] = dict(enumerate(communicators))
        return self.made[key]

    def check(self) -> None:
        """Raises NCCL's error where something has gone wrong."""
        for communicator in self.each():
            communicator.check()

    def abort(self) -> None:
        """Ends what is under way; the next run makes new communicators."""
        communicators, self.made = self.each(), {}
        for communicator in communicators:
            with suppress(Exception):  # an error has brought us here, and that one is to be raised
                communicator.abort()

    def destroy(self) -> None:
        """Gives NCCL's memory back."""
        communicators, self.made = self.each(), {}
        for communicator in communicators:
            communicator.destroy()


class ProcessCommunicators(Communicators):
    """Those of this process' rank, which it makes together with the processes of the other ranks."""

    def __init__(self, nccl: NCCL, streams: DeviceStreams, channel: Channel) -> None:
        super().__init__(nccl, [streams.device])
        self._streams, self._channel = streams, channel
        self._world: GroupKey = tuple(range(channel.size)), ()
        self.connect()

    def connect(self) -> None:
        """Makes the communicator of all, unless there is one: at first, and after a run that failed."""
        if self._world not in self.made:
            unique_id = self._channel.everyone(self.nccl.unique_id() if self._channel.index == 0 else None)[0]
            self.join(self._world, unique_id)

    def join(self, key: GroupKey, unique_id: bytes) -> None:
        """Makes a group's communicator, and connects every pair of its ranks now: NCCL does it when two of them first
        meet, and lets the host wait for it."""
        self._streams.select()
        index, size = key[0].index(self._channel.index), len(key[0])
        communicator = self.nccl.communicator(size, unique_id, index)
        self.made[key] = {index: communicator}
        with self._streams.communicating():
            tokens = self._streams.kernels.empty((2, size), np.uint8)
        with self.nccl.group():
            for peer in range(size):
                if peer != index:
                    communicator.send(tokens[0, peer:peer + 1], peer, self._streams.pointer)
                    communicator.recv(tokens[1, peer:peer + 1], peer, self._streams.pointer)
        self._streams.synchronize()

    def of(self, key: GroupKey) -> Mapping[int, Communicator]:
        """This rank's. Raises RankStopped where the run has failed, and all were aborted."""
        if key not in self.made:
            raise RankStopped
        return self.made[key]

    def close_groups(self) -> None:
        """Gives back those of the groups that a run has made."""
        for key in [key for key in self.made if key != self._world]:
            for communicator in self.made.pop(key).values():
                communicator.destroy()


# -- The transport of all ranks in one process, each on its GPU --------------------------------------------------------


@guarded
class NCCLTransport(Transport):
    """Puts what ranks ask for on their streams; arrays on the host are carried as without GPUs.

    ``streams`` are those of the ranks that are here, by their index in the cluster.
    """

    library = "NCCL"
    world = "each on a GPU of this machine, over NCCL"

    def __init__(self, streams: Mapping[int, DeviceStreams], communicators: Communicators) -> None:
        self.streams, self.communicators = streams, communicators
        self.host = InProcess()

    def begin(self, options: RunOptions) -> None:
        """A run begins."""
        super().begin(options)
        self.host.begin(options)
        self._issuing = 0
        self._ready: dict[Pending, Any] = {}
        self._done: dict[Pending, Any] = {}

    def resume(self, rank: int) -> None:
        """CuPy's current device belongs to the thread, which all ranks share."""
        self.streams[rank].select()

    def issued(self, rank: int, me: Pending) -> None:
        """Remembers when on the rank's stream the inputs are ready; its device is current."""
        self._issuing = rank
        if arrays_on_device(me):
            self._ready[me] = self.streams[rank].ready()

    def completed(self, rank: int, me: Pending) -> None:
        """The rank's stream waits for what was communicated, and what it reads next is there."""
        self._ready.pop(me, None)
        done = self._done.pop(me, None)
        if done is not None:
            self.streams[rank].select()
            self.streams[rank].catch_up(done)

    # -- collectives and messages ---------------------------------------------------------------------------------

    def collective(self, parts: Sequence[PendingCall]) -> Carried:
        """The call's own hops, a group of sends and receives for each step; or NCCL's own collective."""
        call, on_devices = parts[0].call, [me in self._ready for me in parts]
        if any(on_devices):
            _check_all_on_device(call, on_devices)
            yield from self._on_streams({call.group[me.index]: me for me in parts}, super().collective(parts))
        else:
            yield from self.on_host(parts)

    def on_host(self, parts: Sequence[PendingCall]) -> Carried:
        """A call whose arrays lie on the host."""
        return self.host.collective(parts)

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Carried:
        """A send and its receive in one group; elements on the host are copied as without GPUs."""
        parts = {me.rank: me for me in ends.values()}
        there = {rank: me in self._ready for rank, me in parts.items()}
        if not any(there.values()):
            yield from self.host.message(key, step, ends)
            return
        if not all(there.values()):
            sender, receiver = (key[0][place] for place in (step[0].hop.source, step[0].hop.destination))
            raise MismatchError(f"rank {sender} sends from {_place(there[sender])} to rank {receiver}, which "
                                f"receives on {_place(there[receiver])}; make both arrays with rank.xp")
        yield from self._on_streams(parts, super().message(key, step, ends))
        self.streams[self._issuing].select()  # the program that is running goes on

    def _on_streams(self, parts: Mapping[int, Pending], carried: Carried) -> Carried:
        """Lets what is carried wait on the devices for its inputs, and notes there when it is done."""
        for rank, me in parts.items():
            self.streams[rank].follow(self._ready[me])
        yield from carried
        for rank, me in parts.items():
            self._done[me] = self.streams[rank].finished()

    def steps(self, me: PendingCall) -> Exchanges:
        """The rank's generator, whose copies and additions go to the rank's communication stream."""
        streams = self.streams[me.call.group[me.index]]
        me.kernels, steps = streams.kernels.serving(me.x), steps_of(me)
        while True:
            with streams.communicating():
                exchange = next(steps, None)
            if exchange is None:
                return
            yield exchange

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Carried:
        """All messages of one step as one group; where there is nothing to send, the receiver waits for nothing."""
        communicators = self.communicators.of(key)
        with self.communicators.nccl.group():
            for hop, sent, out in step:
                for place, peer, array, is_sent in ((hop.source, hop.destination, sent, True),
                                                    (hop.destination, hop.source, out, False)):
                    if array is not None and array.size:
                        streams, communicator = self.streams[key[0][place]], communicators[place]
                        streams.select()
                        (communicator.send if is_sent else communicator.recv)(array, peer, streams.pointer)
        yield from step

    def native(self, parts: Sequence[PendingCall]) -> Carried:
        """NCCL's own collective: on the stream at once."""
        call, natives = parts[0].call, [Native(me) for me in parts]
        communicators = self.communicators.of(call.key)
        for native in natives:
            streams = self.streams[call.group[native.me.index]]
            with streams.communicating():
                native.prepare(streams.kernels.serving(native.x).cast_pack)
        with self.communicators.nccl.group():
            for native in natives:
                streams = self.streams[call.group[native.me.index]]
                streams.select()
                native.enqueue(communicators[native.me.index], streams.pointer)
        for me in parts:
            me.finish(sent_by(call.normalized(), me.index))
        yield from ()

    def seen(self, key: GroupKey, delivery: Delivery) -> Array:
        """A copy, for whoever steps through the run."""
        out, streams = delivery.out, self.streams[key[0][delivery.hop.destination]]
        assert out is not None, "who looks is in the process of all ranks"
        if not on_device(out):
            return self.host.seen(key, delivery)
        with streams.communicating():
            copy = words(out).copy().view(out.dtype)
        streams.synchronize()
        return copy

    # -- ends -----------------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """True when every device is; raises what went wrong there, or on the way to another rank."""
        self.communicators.check()
        return all(streams.idle() for streams in self.streams.values())

    def abort(self) -> None:
        """Aborts all communicators, so that nobody waits for a message that will not come."""
        self.communicators.abort()
        for streams in self.streams.values():
            streams.rest()

    def close(self) -> None:
        """Lets go of the run's calls."""
        self._ready.clear()
        self._done.clear()

    def destroy(self) -> None:
        """Gives NCCL's memory back."""
        self.communicators.destroy()


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


# -- One process per GPU: this rank's part in each call, put on its communication stream as soon as it is issued -------
# Hops, additions and all follow one another on that stream, so a call is done for the host when it is asked for, and
# what reads the result waits on the device. Ranks must therefore issue their calls in one order: where two ranks of one
# group issue the calls of two groups in different orders, NCCL waits for ever. Arrays on the host travel hop by hop by
# way of the device.

HEARSAY_SECONDS = 5.0


@guarded
class NCCLProcessTransport(NCCLTransport):
    """Puts what this process' rank asks for on its stream."""

    world = "each a process with a GPU, over NCCL"
    in_order = True  # there is one stream
    watched = True

    communicators: ProcessCommunicators

    def __init__(self, index: int, streams: DeviceStreams, communicators: ProcessCommunicators) -> None:
        super().__init__({index: streams}, communicators)
        self._index, self._its = index, streams

    def begin(self, options: RunOptions) -> None:
        """A run begins; after one that failed the communicators are made anew, by all processes together."""
        super().begin(options)
        self._ends: deque[Any] = deque()  # events at the ends of parts, in their order
        self._over = 0
        self._its.select()
        self.communicators.connect()

    # -- calls ----------------------------------------------------------------------------------------------------

    def collective(self, parts: Sequence[PendingCall]) -> Carried:
        """This rank's part, on the stream."""
        (me,) = parts
        return self._observed(me, self._barrier(me) if me.call.operation == "barrier" else super().collective(parts))

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Carried:
        """The halves of this rank's exchange, in one group."""
        (me,) = ends.values()
        carried = Transport.message(self, key, step, ends)
        return self._observed(me, self._on_streams({me.rank: me}, carried) if me in self._ready else carried)

    def on_host(self, parts: Sequence[PendingCall]) -> Carried:
        """Hop by hop by way of the device."""
        return Transport.collective(self, parts)

    def _observed(self, me: Pending, carried: Carried) -> Carried:
        """Notes the end of a part. Where NCCL refuses, perhaps because another rank has failed, a note soon says so; if
        not, NCCL's error is this rank's own."""
        try:
            yield from carried
            self._ends.append(self._done.get(me) or self._its.finished())
            return
        except self.communicators.nccl.error as error:
            error.add_note(f"raised by NCCL when it was asked for {me.describe()}")
            # Its frames know the arrays of the call and, by way of the backend's, this part: memory would keep those.
            refused = forget_frames(error)
        deadline = time.monotonic() + HEARSAY_SECONDS
        while time.monotonic() < deadline:
            yield None
        raise refused

    def over(self) -> int:
        """The parts of this run that the device has come to the end of."""
        while self._ends and self._its.reached(self._ends[0]):
            self._ends.popleft()
            self._over += 1
        return self._over

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Carried:
        """One group; elements on the host are copied to the device, and what has arrived is fetched from there."""
        its, staged = self._its, []
        with its.communicating():
            for hop, sent, out in step:
                if sent is not None and not on_device(sent):
                    sent = its.kernels.uploaded(sent)
                if out is not None and not on_device(out):
                    out = its.kernels.empty(out.shape, out.dtype)
                staged.append(Delivery(hop, sent, out))
        for _ in super().move(key, staged, call):
            pass
        by_way = [(mine.out, there.out) for mine, there in zip(step, staged, strict=True)
                  if mine.out is not None and mine.out is not there.out]
        if by_way:
            yield from self._reached()
        for out, there in by_way:
            out[...] = its.fetch(there)
        yield from step

    def _barrier(self, me: PendingCall) -> Carried:
        """Empty messages are none to NCCL, so one number is added up; all that was communicated before is done then."""
        its = self._its
        with its.communicating():
            token = its.kernels.uploaded(np.zeros(1, np.int32))
        with self.communicators.nccl.group():
            self.communicators.of(me.call.key)[me.index].all_reduce(token, token, "sum", its.pointer)
        yield from self._reached()
        me.finish(0)

    def _reached(self) -> Carried:
        """Waits until all that was communicated so far has arrived."""
        finished = self._its.finished()
        while not self._its.reached(finished):
            yield None

    # -- groups and ends ------------------------------------------------------------------------------------------

    def invitation(self, key: GroupKey) -> bytes:
        """The communicator's id, from the first of its ranks."""
        return self.communicators.nccl.unique_id() if self._index == key[0][0] else b""

    def new_group(self, parent: GroupKey, key: GroupKey, invitation: bytes) -> None:
        """A communicator for the group."""
        self.communicators.join(key, invitation)

    def close(self) -> None:
        """Lets go of the run's calls and groups."""
        super().close()
        self.communicators.close_groups()
