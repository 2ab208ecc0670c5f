"""The project's own algorithms on streams: hops are NCCL's sends and receives, additions are our kernels.

So the bits are the simulator's: NCCL only moves what the kernels have added, in the order of the algorithm.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from zerosim.backends.nccl.adapter import NAP_SECONDS, NCCL, TYPES, Communicator, Lane, adds
from zerosim.numerics.arrays import on_device, words
from zerosim.ranks.call import Call, CollectiveEntry, Entry, ExchangeEntry, Group, chunk_lengths
from zerosim.ranks.collectives import NATIVE, Array, Party, Steps
from zerosim.ranks.errors import Interrupts, MismatchError
from zerosim.ranks.hub import Event, InProcess, Move, Watch, anywhere, lockstep, ranks_text, sent_by, steps_of
from zerosim.ranks.trace import Hop


def party_of(entry: CollectiveEntry, lane: Lane) -> Party:
    """The rank inside the call, with the kernels of its communication stream."""
    return Party(entry.call, entry.index, lane.kernels.serving(entry.x), entry.buffers, entry.in_place)


def on_lane(lane: Lane, party: Party, x: Any, out: Any) -> Steps:
    """The rank's generator, whose copies and additions go to the lane's communication stream."""
    steps = steps_of(party, x, out)
    while True:
        with lane.communicating():
            exchange = next(steps, None)
        if exchange is None:
            return
        yield exchange


def send(comm: Communicator, lane: Lane, x: Any, peer: int) -> None:
    """Sends, inside a group; where there is nothing to send, the receiver does not wait for it."""
    if x.size:
        lane.select()
        comm.send(x, peer, lane.pointer)


def receive(comm: Communicator, lane: Lane, out: Any, peer: int) -> None:
    """Receives, inside a group, unless there is nothing to come."""
    if out.size:
        lane.select()
        comm.recv(out, peer, lane.pointer)


# -- ``algorithm="native"``: NCCL's own collectives, whose order of additions is the library's -----------------------
# Sums of N terms in any order, each addition rounded once to the format: |result - sum| <= (N-1)·u·(1 + u)^(N-1)·Σ|x|, u
# the format's unit roundoff (Higham 2002, section 4.2). NCCL adds in the format, or in fp32 and rounds at the end, and in
# an order that follows the machine's topology. Its maximum and minimum need not pass a NaN on.
#
# Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].


class Native:
    """One rank's calls of one collective, to be made inside a group, with those of other ranks if they are here.

    Equal chunks have a call of NCCL's own. Uneven ones become a reduce or a broadcast for each chunk, in one group.
    """

    def __init__(self, entry: CollectiveEntry) -> None:
        """Raises ValueError for a sum in a type in which NCCL does not add."""
        self.entry, self.call, self.x, self.out = entry, entry.call, entry.x, entry.out
        if "reduce" in self.call.operation and not adds(self.call.dtype):
            raise ValueError(f"{self.call.operation} by 'native' of {self.call.dtype}: through CuPy NCCL adds in "
                             f"{', '.join(TYPES)}; leave algorithm= out for our own ring, which adds in every format")
        lengths = chunk_lengths(self.call.cut)
        self.even = bool((lengths == lengths[0]).all())

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank is counted for."""
        return sent_by(anywhere(self.call), self.entry.index)

    def prepare(self, copy: Callable[[Any, Any], None]) -> None:
        """On the communication stream, before the calls: what a rank has for itself is copied where it belongs."""
        index = self.entry.index
        if self.call.operation == "gather" and index == self.call.root and not self.entry.in_place:
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
            comm.reduce(chunk, self.out if root == self.entry.index else None, self.call.op, root, stream)

    def _all_gather(self, comm: Communicator, stream: int) -> None:
        if self.even:
            comm.all_gather(self.x, self.out, stream)
            return
        for root, chunk in self._chunks(self.out):
            comm.broadcast(self.x if root == self.entry.index else chunk, chunk, root, stream)

    def _all_reduce(self, comm: Communicator, stream: int) -> None:
        comm.all_reduce(self.x, self.out, self.call.op, stream)

    def _broadcast(self, comm: Communicator, stream: int) -> None:
        comm.broadcast(self.x, self.out, self.call.root, stream)

    def _reduce(self, comm: Communicator, stream: int) -> None:
        root = self.call.root
        comm.reduce(self.x, self.out if root == self.entry.index else None, self.call.op, root, stream)

    def _gather(self, comm: Communicator, stream: int) -> None:
        if self.entry.index != self.call.root:
            if self.x.size:
                comm.send(self.x, self.call.root, stream)
            return
        for rank, chunk in self._chunks(self.out):
            if rank != self.entry.index:
                comm.recv(chunk, rank, stream)

    def _all_to_all(self, comm: Communicator, stream: int) -> None:
        for rank, chunk in self._chunks(self.x):
            if rank != self.entry.index:
                comm.send(chunk, rank, stream)
        for rank in range(self.call.ranks):
            if rank != self.entry.index and self._place(rank).size:
                comm.recv(self._place(rank), rank, stream)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _chunk(self, vector: Any, chunk: int) -> Any:
        return vector[self.call.cut[chunk]:self.call.cut[chunk + 1]]

    def _chunks(self, vector: Any) -> list[tuple[int, Any]]:
        """(i, chunk i) of all chunks that are not empty."""
        return [(i, self._chunk(vector, i)) for i in range(self.call.ranks) if self.call.cut[i] < self.call.cut[i + 1]]

    def _place(self, rank: int) -> Any:
        """Where the rank's chunk lands in an all_to_all."""
        length = self.call.cut[self.entry.index + 1] - self.call.cut[self.entry.index]
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
                with suppress(Exception):  # an error has brought us here, and that one is to be told
                    communicator.abort()


class NCCLCarriage:
    """Puts what the hub decides on the streams of all ranks; arrays on the host are carried as without GPUs."""

    library = "NCCL"

    def __init__(self, lanes: Sequence[Lane], communicators: Communicators, host: InProcess, *, watch: Watch | None,
                 interrupts: Interrupts) -> None:
        self.lanes, self.communicators, self.host = lanes, communicators, host
        self.watch, self.interrupts = watch, interrupts
        self._issuing = 0
        self._ready: dict[Entry, Any] = {}
        self._done: dict[Entry, Any] = {}

    def resume(self, rank: int) -> None:
        """CuPy's current device belongs to the thread, which all ranks share."""
        self.lanes[rank].select()

    def issued(self, rank: int, entry: Entry) -> None:
        """Remembers when on the rank's stream the inputs are ready; its device is current."""
        self._issuing = rank
        if arrays_on_device(entry):
            self._ready[entry] = self.lanes[rank].ready()

    def arrived(self, rank: int, entry: Entry) -> None:
        """The rank's stream waits for what was communicated, and what it reads next is there."""
        self._ready.pop(entry, None)
        done = self._done.pop(entry, None)
        if done is not None:
            self.lanes[rank].catch_up(done)

    # -- collectives ----------------------------------------------------------------------------------------------

    def collective(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        """The call's own hops, a group of sends and receives for each step; or NCCL's own collective."""
        call = entries[0].call
        on_devices = [arrays_on_device(entry) for entry in entries]
        if not any(on_devices):
            return (yield from self.host.collective(entries))
        _check_all_on_device(call, on_devices)
        for entry in entries:
            self._lane(call, entry.index).follow(self._ready[entry])
        carry = self._native if call.algorithm == NATIVE else self._hops
        sent = yield from carry(entries)
        for entry in entries:
            self._done[entry] = self._lane(call, entry.index).finished()
        return sent

    def _lane(self, call: Call, index: int) -> Lane:
        return self.lanes[call.group[index]]

    def _hops(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        call, sent = entries[0].call, [0] * len(entries)

        def begin(party: Party, x: Array, out: Array) -> Steps:
            return on_lane(self._lane(call, party.index), party, x, out)

        def carry(moves: Sequence[Move]) -> Iterator[tuple[Hop, Array]]:
            return self._grouped(call, moves)

        parties = [party_of(entry, self._lane(call, entry.index)) for entry in entries]
        for hop, values in lockstep(parties, [(e.x, e.out) for e in entries], begin=begin, carry=carry):
            sent[hop.source] += hop.nbytes
            self.interrupts.raise_pending()
            if self.watch == "hop":
                yield Event(call, hop, self._seen(self._lane(call, hop.destination), values))
        return sent

    def _grouped(self, call: Call, moves: Sequence[Move]) -> Iterator[tuple[Hop, Array]]:
        """All hops of one step as one group."""
        self._move(call.group, [(move.hop.source, move.sent, move.hop.destination, move.out) for move in moves])
        for move in moves:
            yield move.hop, move.out

    def _move(self, group: tuple[int, ...], messages: Sequence[tuple[int, Array, int, Array]]) -> None:
        """(source, what it sends, destination, what arrives) of each message, by indices of the group."""
        communicators = self.communicators.of(group)
        with self.communicators.nccl.group():
            for source, sent, destination, out in messages:
                send(communicators[source], self.lanes[group[source]], sent, destination)
                receive(communicators[destination], self.lanes[group[destination]], out, source)

    def _native(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        call, calls = entries[0].call, [Native(entry) for entry in entries]
        communicators = self.communicators.of(call.group)
        for native, entry in zip(calls, entries, strict=True):
            lane = self._lane(call, entry.index)
            with lane.communicating():
                native.prepare(lane.kernels.serving(entry.x).cast_pack)
        with self.communicators.nccl.group():
            for native, entry in zip(calls, entries, strict=True):
                lane = self._lane(call, entry.index)
                lane.select()
                native.enqueue(communicators[entry.index], lane.pointer)
        yield from ()
        return [native.sent_nbytes for native in calls]

    def _seen(self, lane: Lane, values: Array) -> Array:
        """A copy, for whoever steps through the run."""
        with lane.communicating():
            copy = words(values).copy().view(values.dtype)
        lane.synchronize()
        return copy

    # -- messages -------------------------------------------------------------------------------------------------

    def message(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        """A send and its receive in one group; elements on the host are copied as without GPUs."""
        both = [arrays_on_device(sender), arrays_on_device(receiver)]
        if not any(both):
            self.host.message(sender, receiver)
            return
        if not all(both):
            raise MismatchError(f"rank {sender.me} sends from {_place(both[0])} to rank {receiver.me}, which receives "
                                f"on {_place(both[1])}; make both arrays with rank.xp")
        group = sender.key[0]
        for entry in (sender, receiver):
            self.lanes[entry.me].follow(self._ready[entry])
        self._move(group, [(group.index(sender.me), sender.send, group.index(receiver.me), receiver.out)])
        for entry in (sender, receiver):
            self._done[entry] = self.lanes[entry.me].finished()
        self.lanes[self._issuing].select()  # the program that is running goes on

    # -- groups and ends ------------------------------------------------------------------------------------------

    def join(self, parent: Group, key: Group) -> None:
        """Nothing yet: the group's communicators are made when it first communicates."""

    def settle(self) -> None:
        """Waits until every device is idle; raises what went wrong on one of them."""
        while not all(lane.idle() for lane in self.lanes):
            self.interrupts.raise_pending()
            self.communicators.check()
            time.sleep(NAP_SECONDS)

    def give_up(self) -> None:
        """Aborts all communicators, so that nobody waits for a message that will not come."""
        self.communicators.abort()
        for lane in self.lanes:
            lane.rest()

    def close(self) -> None:
        """Lets go of the run's entries."""
        self._ready.clear()
        self._done.clear()


def arrays_on_device(entry: Entry) -> bool:
    """True where what the entry moves lies on a device; all of it does, or nothing.

    Raises ValueError for an entry with both kinds of arrays.
    """
    pair = (entry.x, entry.out) if isinstance(entry, CollectiveEntry) else (entry.send, entry.out)
    kinds = {on_device(array) for array in pair if array is not None and array.size}
    if len(kinds) == 2:
        raise ValueError(f"{entry.describe()} was given an array on a device and one on the host; make both with "
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
