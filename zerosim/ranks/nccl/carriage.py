"""All ranks in one process, each on its GPU: the hub's collectives as groups of NCCL's calls.

An event says when a rank's inputs are ready, and the rank's communication stream waits for it; another says when its
result is there, and ``wait()`` lets the stream that computes wait for that one. The host waits for neither.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from zerosim.numerics.arrays import on_device, words
from zerosim.ranks.algorithms import NATIVE
from zerosim.ranks.algorithms.party import Array, Party, Steps
from zerosim.ranks.call import Call, Group
from zerosim.ranks.carriage import InProcess
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.errors import MismatchError
from zerosim.ranks.explain import ranks_text
from zerosim.ranks.interrupts import Interrupts
from zerosim.ranks.lockstep import Event, Move, Watch, lockstep
from zerosim.ranks.nccl.adapter import NCCL, Communicator
from zerosim.ranks.nccl.devices import NAP_SECONDS, Lane
from zerosim.ranks.nccl.hops import on_lane, party_of, receive, send
from zerosim.ranks.nccl.native import Native
from zerosim.ranks.trace import Hop


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
