"""The project's own algorithms on streams: hops are NCCL's sends and receives, additions are our kernels.

So the bits are the simulator's: NCCL only moves what the kernels have added, in the order of the algorithm. All ranks
may be in one process, or each in one of its own. An event says when a rank's inputs are ready, and the rank's
communication stream waits for it; another says when its result is there, and ``wait()`` lets the stream that computes
wait for that one. The host waits for neither.
"""

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from zerosim.backends import FAREWELL_SECONDS
from zerosim.backends.nccl.adapter import NCCL, TYPES, Communicator, DeviceStreams
from zerosim.backends.processes.cluster import LISTEN_SECONDS
from zerosim.backends.processes.control import Channel, Elements, check_message_fits, lost_text
from zerosim.numerics.arrays import copy_elements, on_device, words
from zerosim.ranks.call import Array, Call, Exchanges, GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.collectives import Delivery, lockstep, sent_by, steps_of
from zerosim.ranks.errors import BackendError, MismatchError, RankStopped, place_of_call, ranks_text
from zerosim.ranks.hub import Deliveries, RunOptions, Transport
from zerosim.ranks.process import guarded

# -- ``algorithm="native"``: NCCL's own collectives, whose order of additions is the library's -----------------------
# Sums are within the bound that `backends.mpi` states: NCCL adds in the format, or in fp32 and rounds at the end, in an
# order that follows the machine's topology. Its maximum and minimum need not pass a NaN on.
#
# Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].


MESSAGES = ("gather", "all_to_all")  # in NCCL these are sends and receives


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
        # In one group, which tells the kernels of all to stop before it frees the memory of any. Without it an H200
        # hung (2026-11-26): CUDA frees memory when the device is idle, and a kernel of the next communicator ran.
        with suppress(Exception), self.nccl.group():  # an error has brought us here, and that one is to be raised
            for communicator in communicators:
                with suppress(Exception):
                    communicator.abort()

    def destroy(self) -> None:
        """Gives NCCL's memory back."""
        communicators, self.made = self.each(), {}
        for communicator in communicators:
            communicator.destroy()


T = TypeVar("T")


def together(channel: Channel, find: Callable[[], T]) -> T:
    """The result of ``find()`` in this process; every process calls it.

    Raises in all of them what it raised in one: there its own error, elsewhere BackendError with its rank and text.
    Ends the job where a rank cannot hear of it, as it waits for another one inside NCCL.
    """
    error: Exception | None = None
    over = threading.Event()

    def watch() -> None:
        while error is None and not channel.lost:
            if over.wait(LISTEN_SECONDS):
                return
        if not over.wait(FAREWELL_SECONDS):
            why = f"{type(error).__name__}: {error}" if error else lost_text(sorted(channel.lost), channel.size)
            print(f"rank {channel.index} of {channel.size}: {why}; not all ranks heard of it for {FAREWELL_SECONDS:g} "
                  "seconds; all processes of the job are ended", file=sys.stderr, flush=True)
            channel.abort()

    threading.Thread(target=watch, daemon=True, name="zerosim watches").start()
    try:
        found = find()
    except Exception as raised:  # whatever it is, the others wait for it
        error = raised
    try:
        texts: list[str | None] = channel.all_gather(None if error is None else f"{error}" or type(error).__name__)
    finally:
        over.set()
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise BackendError("NCCL", f"rank {rank} of {channel.size} cannot take part: {text}")
    return found


class ProcessCommunicators(Communicators):
    """Those of this process' rank, which it makes together with the processes of the other ranks."""

    def __init__(self, nccl: NCCL, streams: DeviceStreams, channel: Channel) -> None:
        super().__init__(nccl, [streams.device])
        self._streams, self._channel = streams, channel
        self._missing: set[GroupKey] = {(tuple(range(channel.size)), ())}
        self.connect()

    def connect(self) -> None:
        """Makes the communicators that are missing: at first that of all, and after a run that failed those of its
        groups too, which a program may have kept.

        Nobody goes on, and may fail and abort one, while another one still connects. All make them in one order.
        """
        if self._missing:
            first = sorted(key for key in self._missing if key[0][0] == self._channel.index)
            said = self._channel.all_gather([(key, self.nccl.unique_id()) for key in first])
            ids = {key: unique_id for those in said for key, unique_id in those if self._channel.index in key[0]}

            def join_all() -> None:
                for key in sorted(ids):
                    self.join(key, ids[key])

            together(self._channel, join_all)
            self._missing.clear()

    def abort(self) -> None:
        """Ends what is under way; the next run makes new communicators."""
        self._missing |= self.made.keys()
        super().abort()

    def join(self, key: GroupKey, unique_id: bytes) -> None:
        """Makes a group's communicator, and connects every pair of its ranks now: NCCL does it when two of them first
        meet, and lets the host wait for it."""
        self._streams.select()
        index, size = key[0].index(self._channel.index), len(key[0])
        earlier, communicator = self.made.get(key, {}), self.nccl.communicator(size, unique_id, index)
        self.made[key] = {index: communicator}
        with self._streams.communicating():
            tokens = self._streams.kernels.empty((2, size), np.uint8)
        with self.nccl.group():
            for peer in range(size):
                if peer != index:
                    communicator.send(tokens[0, peer:peer + 1], peer, self._streams.pointer)
                    communicator.recv(tokens[1, peer:peer + 1], peer, self._streams.pointer)
        self._streams.synchronize()
        for replaced in earlier.values():
            replaced.destroy()

    def of(self, key: GroupKey) -> Mapping[int, Communicator]:
        """This rank's. Raises RankStopped where the run has failed, and all were aborted."""
        if key not in self.made:
            raise RankStopped
        return self.made[key]


# -- The transport of all ranks in one process, each on its GPU --------------------------------------------------------


@guarded
class NCCLTransport(Transport):
    """Puts what ranks ask for on their streams; elements on the host are copied there.

    ``streams`` are those of the ranks that are here, by their index in the cluster.
    """

    library = "NCCL"
    world = "each on a GPU of this machine, over NCCL"

    def __init__(self, streams: Mapping[int, DeviceStreams], communicators: Communicators) -> None:
        self.streams, self.communicators = streams, communicators

    def begin(self, options: RunOptions) -> None:
        """A run begins."""
        super().begin(options)
        self._issuing = 0
        self._ready: dict[Pending, Any] = {}
        self._done: dict[Pending, Any] = {}

    def resume(self, rank: int) -> None:
        """CuPy's current device belongs to the thread, which all ranks share."""
        self.streams[rank].select()

    def issued(self, rank: int, me: Pending) -> None:
        """Marks the place on the rank's computing stream at which the part's input is ready; its device is current."""
        self._issuing = rank
        if arrays_on_device(me):
            self._ready[me] = self.streams[rank].ready()

    def completed(self, rank: int, me: Pending) -> None:
        """Lets the rank's computing stream wait until the part's result has arrived."""
        self._ready.pop(me, None)
        done = self._done.pop(me, None)
        if done is not None:
            self.streams[rank].select()
            self.streams[rank].catch_up(done)

    # -- collectives and messages ---------------------------------------------------------------------------------

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """The call's own hops, a group of sends and receives for each step; or NCCL's own collective."""
        call, on_devices = parts[0].call, [me in self._ready for me in parts]
        deliveries = super().collective(parts)
        if any(on_devices):
            _check_all_on_device(call, on_devices)
            deliveries = self._on_streams({call.group[me.index]: me for me in parts}, deliveries)
        yield from deliveries

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Deliveries:
        """The sends and receives in one group."""
        parts = {me.rank: me for me in ends.values()}
        there = {rank: me in self._ready for rank, me in parts.items()}
        if not any(there.values()):
            yield from super().message(key, step, ends)
            return
        if not all(there.values()):
            sender, receiver = (key[0][place] for place in (step[0].hop.source, step[0].hop.destination))
            raise MismatchError(f"rank {sender} sends from {_place(there[sender])} to rank {receiver}, which "
                                f"receives on {_place(there[receiver])}; make both arrays with rank.xp")
        yield from self._on_streams(parts, super().message(key, step, ends))
        self.streams[self._issuing].select()  # the program that is running goes on

    def _on_streams(self, parts: Mapping[int, Pending], deliveries: Deliveries) -> Deliveries:
        """Lets deliveries wait on the devices for its inputs, and notes there when it is done."""
        for rank, me in parts.items():
            self.streams[rank].follow(self._ready[me])
        yield from deliveries
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

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Deliveries:
        """All messages of one step as one group; where there is nothing to send, the receiver waits for nothing."""
        if not any(on_device(array) for _, *ends in step for array in ends if array is not None):
            yield from self.move_on_host(key, step, call)
            return
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

    def move_on_host(self, key: GroupKey, step: Sequence[Delivery], call: Call | None) -> Deliveries:
        """The same of elements on the host, of which NCCL knows nothing."""
        return super().move(key, step, call)

    def native(self, parts: Sequence[PendingCall]) -> Deliveries:
        """NCCL's own collective, on the stream at once; of one that NCCL lacks, all messages of ours in one group."""
        call = parts[0].call
        if call.operation in MESSAGES:
            ours = call._replace(algorithm="pairwise")  # no message of which depends on another
            steps = lockstep({me.index: self.steps(replace(me, call=ours)) for me in parts})
            for delivery in self.move(call.key, [delivery for step in steps for delivery in step], call):
                if delivery is None:
                    yield None
        else:
            if "reduce" in call.operation and call.dtype.name not in TYPES:
                raise ValueError(f"{call.operation} by 'native' of {call.dtype}: through CuPy NCCL adds in "
                                 f"{', '.join(TYPES)}; leave algorithm= out for our own ring, which adds in every "
                                 "format")
            communicators = self.communicators.of(call.key)
            with self.communicators.nccl.group():
                for me in parts:
                    streams = self.streams[call.group[me.index]]
                    streams.select()
                    communicators[me.index].native(me, streams.pointer)
        for me in parts:
            me.finish(sent_by(call.normalized(), me.index))

    def seen(self, key: GroupKey, delivery: Delivery) -> Array:
        """A copy, for whoever steps through the run."""
        out, streams = delivery.out, self.streams[key[0][delivery.hop.destination]]
        assert out is not None, "who looks is in the process of all ranks"
        if not on_device(out):
            return super().seen(key, delivery)
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
# group issue the calls of two groups in different orders, NCCL waits for ever. Arrays on the host (flags, counts, the
# empty ones of a barrier) travel as control messages.


@guarded
class NCCLProcessTransport(NCCLTransport):
    """Puts what this process' rank asks for on its stream."""

    world = "each a process with a GPU, over NCCL"
    in_order = True  # there is one stream
    needs_listener = True

    communicators: ProcessCommunicators

    def __init__(self, index: int, streams: DeviceStreams, communicators: ProcessCommunicators) -> None:
        super().__init__({index: streams}, communicators)
        self._index, self._own_streams, self.errors = index, streams, (communicators.nccl.error,)

    def begin(self, options: RunOptions) -> None:
        """A run begins; after one that failed the communicators are made anew, by all processes together."""
        super().begin(options)
        # Parts are known by their numbers: one that is kept would keep its arrays, and the thread that listens would be
        # the one to let them go.
        self._begun = 0
        self._ends: deque[tuple[int, Any]] = deque()  # number, and event at the end
        self._arrived: defaultdict[Any, deque[Any]] = defaultdict(deque)  # by group, call and rank
        self._own_streams.select()
        self.communicators.connect()

    # -- calls ----------------------------------------------------------------------------------------------------

    def collective(self, parts: Sequence[PendingCall]) -> Deliveries:
        """This rank's part, on the stream."""
        return self._observed(parts[0], super().collective(parts))

    def message(self, key: GroupKey, step: Sequence[Delivery], ends: Mapping[int, PendingExchange]) -> Deliveries:
        """The halves of this rank's exchange, in one group; one with itself that lacks a half waits for ever, as in one
        process: NCCL would refuse it."""
        (me,) = ends.values()
        lacks_a_half = (me.to == me.rank) != (me.source == me.rank)
        return self._observed(me, repeat(None) if lacks_a_half else super().message(key, step, ends))

    def _observed(self, me: Pending, deliveries: Iterable[Delivery | None]) -> Deliveries:
        """Remembers the end of a part."""
        number, self._begun = self._begun, self._begun + 1
        yield from deliveries
        self._ends.append((number, self._done.get(me) or self._own_streams.finished()))

    def over(self) -> list[int]:
        """The parts to whose end the device has come since the last call."""
        found = []
        while self._ends and self._own_streams.reached(self._ends[0][1]):
            found.append(self._ends.popleft()[0])
        return found

    def move_on_host(self, key: GroupKey, step: Sequence[Delivery], call: Call | None) -> Deliveries:
        """A control message for each array."""
        group, number = key[0], None if call is None else call.number
        for hop, sent, _ in step:
            if sent is not None:
                self.say(Elements(key, number, sent.copy(), place_of_call()), group[hop.destination])
        for delivery in step:
            if delivery.out is not None:
                out, source = delivery.out, group[delivery.hop.source]
                arrived = self._arrived[key, number, source]
                while not arrived:
                    yield None
                found = arrived.popleft()
                check_message_fits(source, found.elements, found.where, self._index, out)
                copy_elements(found.elements, out)
            yield delivery

    def heard(self, rank: int, message: Elements) -> None:
        """Elements on the host have come from another rank."""
        self._arrived[message.group, message.number, rank].append(message)

    # -- groups and ends ------------------------------------------------------------------------------------------

    def group_id(self, key: GroupKey) -> bytes:
        """The communicator's id, from the first of its ranks."""
        return self.communicators.nccl.unique_id() if self._index == key[0][0] else b""

    def new_group(self, parent: GroupKey, key: GroupKey, group_id: bytes) -> None:
        """A communicator for the group."""
        self.communicators.join(key, group_id)
