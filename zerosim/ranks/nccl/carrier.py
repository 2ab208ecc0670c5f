"""One process per GPU: this rank's part in each call, put on its communication stream as soon as it is issued.

Hops, additions and all follow one another on that stream, so a call is done for the host when it is asked for, and what
reads the result waits on the device. Ranks must therefore issue their calls in one order: where two ranks of one group
issue the calls of two groups in different orders, NCCL waits for ever. The debug mode finds out who disagrees.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from zerosim.numerics.arrays import words
from zerosim.ranks.algorithms import NATIVE
from zerosim.ranks.call import Group
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.frames import forget_frames
from zerosim.ranks.nccl.adapter import ID_NBYTES, NCCL, Communicator
from zerosim.ranks.nccl.carriage import arrays_on_device
from zerosim.ranks.nccl.devices import Lane
from zerosim.ranks.nccl.hops import on_lane, party_of, receive, send
from zerosim.ranks.nccl.native import Native
from zerosim.ranks.processes.carrier import Course

HEARSAY_SECONDS = 5.0
Finish = Callable[[], None]


class OnDevice:
    """An entry whose arrays lie on the device: done for the host, under way there."""

    def __init__(self, lane: Lane, abort: Finish) -> None:
        self._lane, self._abort, self._finished = lane, abort, lane.finished()

    def advance(self) -> bool:
        """Nothing is left for the host to do."""
        return False

    def wait(self) -> None:
        """The stream that computes waits; the host does not."""
        self._lane.select()
        self._lane.catch_up(self._finished)

    def drop(self) -> None:
        """Aborts NCCL: a call on a stream cannot be taken back."""
        self._abort()


class OnHost:
    """An entry whose arrays lie on the host, carried by copies on the device: done when what arrived is copied back."""

    def __init__(self, lane: Lane, abort: Finish, finish: Finish) -> None:
        self._lane, self._abort, self._finished = lane, abort, lane.finished()
        self._finish: Finish | None = finish

    def advance(self) -> bool:
        """Looks whether the device is done, and if so copies what has arrived."""
        if self._finish is None or not self._lane.reached(self._finished):
            return False
        self._finish()
        self._finish = None
        return True

    def wait(self) -> None:
        """What arrived is in memory."""

    def drop(self) -> None:
        """Aborts NCCL: a call on a stream cannot be taken back."""
        self._abort()


class Broken:
    """An entry that NCCL refused, perhaps because another rank has failed: then the mail soon says so. If not, NCCL's
    error is this rank's own."""

    def __init__(self, error: Exception, abort: Finish) -> None:
        # Its frames know the entry's arrays and, by way of the transport's, this object: the ledger would keep those.
        self._error, self._abort = forget_frames(error), abort
        self._deadline = time.monotonic() + HEARSAY_SECONDS

    def advance(self) -> bool:
        """Raises NCCL's error when nobody has been heard to have failed for some time."""
        if time.monotonic() > self._deadline:
            raise self._error
        return False

    def wait(self) -> None:
        """Never called: the entry is never done."""

    def drop(self) -> None:
        """Aborts NCCL."""
        self._abort()


class NCCLCarrier:
    """Makes the calls of this process' rank: one communicator for each group of ranks, one stream for all of them.

    ``gone`` is called once when the communicators have been aborted.
    """

    library = "NCCL"
    in_order = True  # there is one stream

    def __init__(self, nccl: NCCL, lane: Lane, world: Communicator, index: int, ranks: int, gone: Finish) -> None:
        self._nccl, self._lane, self._index, self._gone = nccl, lane, index, gone
        self._world: Group = tuple(range(ranks)), ()
        self._comms: dict[Group, Communicator] = {self._world: world}

    def begin(self, entry: Entry) -> Course:
        """Puts all that the entry asks for on the stream."""
        lane, on_device = self._lane, arrays_on_device(entry)
        lane.select()
        lane.follow(lane.ready())
        try:
            finish = self._carried(entry, on_device)
        except self._nccl.error as error:
            error.add_note(f"raised by NCCL when it was asked for {entry.describe()}")
            return Broken(error, self._abort)
        if on_device:
            finish()
            return OnDevice(lane, self._abort)
        return OnHost(lane, self._abort, finish)

    def _carried(self, entry: Entry, on_device: bool) -> Finish:
        """Makes the calls; what is returned ends the entry, when the device is done where arrays are on the host."""
        if isinstance(entry, ExchangeEntry):
            return self._exchange(entry, on_device)
        if entry.call.operation == "barrier":
            return self._barrier(entry)
        return self._collective(entry, on_device)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, entry: CollectiveEntry, on_device: bool) -> Finish:
        staged = entry if on_device else replace(
            entry, x=self._uploaded(entry.x), out=self._like(entry.out), in_place=False,
            buffers=[self._like(buffer) for buffer in entry.buffers])
        sent = (self._native if entry.call.algorithm == NATIVE else self._hops)(staged)

        def finish() -> None:
            if staged is not entry:
                entry.out[...] = self._lane.fetch(staged.out)
            entry.finish(sent)

        return finish

    def _hops(self, entry: CollectiveEntry) -> int:
        lane, comm, sent = self._lane, self._comms[entry.call.key], 0
        for hop in on_lane(lane, party_of(entry, lane), entry.x, entry.out):
            with self._nccl.group():
                if hop.to is not None:
                    send(comm, lane, hop.send, hop.to)
                if hop.source is not None:
                    receive(comm, lane, hop.out, hop.source)
            sent += 0 if hop.send is None else hop.send.nbytes
        return sent

    def _native(self, entry: CollectiveEntry) -> int:
        lane, native = self._lane, Native(entry)
        with lane.communicating():
            native.prepare(lane.kernels.serving(entry.x).cast_pack)
        with self._nccl.group():
            native.enqueue(self._comms[entry.call.key], lane.pointer)
        return native.sent_nbytes

    def _barrier(self, entry: CollectiveEntry) -> Finish:
        """Empty messages are none to NCCL, so one number is added up; all that was communicated before is done then."""
        token = self._uploaded(np.zeros(1, np.int32))
        with self._nccl.group():
            self._comms[entry.call.key].all_reduce(token, token, "sum", self._lane.pointer)

        def finish() -> None:
            assert token.size  # held until the device has no more use for it
            entry.finish(0)

        return finish

    # -- messages -------------------------------------------------------------------------------------------------

    def _exchange(self, entry: ExchangeEntry, on_device: bool) -> Finish:
        sent, out = entry.send, entry.out
        if not on_device:
            sent, out = (None if sent is None else self._uploaded(sent)), (None if out is None else self._like(out))
        group, comm, lane = entry.key[0], self._comms[entry.key], self._lane
        with self._nccl.group():
            if entry.to is not None:
                send(comm, lane, sent, group.index(entry.to))
            if entry.source is not None:
                receive(comm, lane, out, group.index(entry.source))

        def finish() -> None:
            if entry.out is not None and out is not entry.out:
                entry.out[...] = lane.fetch(out)
            entry.to_send = entry.to_receive = False
            if entry.send is not None:
                entry.count(entry.send.nbytes)

        return finish

    # -- copies on the device of what lies on the host ------------------------------------------------------------

    def _uploaded(self, x: np.ndarray) -> Any:
        with self._lane.communicating():
            return self._lane.kernels.xp.asarray(words(x)).view(x.dtype)

    def _like(self, x: np.ndarray) -> Any:
        with self._lane.communicating():
            return self._lane.kernels.empty(x.shape, x.dtype)

    # -- groups and ends ------------------------------------------------------------------------------------------

    def join(self, parent: Group, key: Group) -> None:
        """A communicator for the group. Its id comes from its first member, over the parent's communicator: so ranks
        that join no group need not take part, as they would have to in NCCL's own split."""
        members, lane = key[0], self._lane
        first = self._index == members[0]
        on_device = self._uploaded(np.frombuffer(self._nccl.unique_id() if first else bytes(ID_NBYTES), np.uint8))
        with self._nccl.group():
            if first:
                for rank in members[1:]:
                    send(self._comms[parent], lane, on_device, parent[0].index(rank))
            else:
                receive(self._comms[parent], lane, on_device, parent[0].index(members[0]))
        lane.synchronize()
        unique_id = lane.fetch(on_device).tobytes()
        self._comms[key] = self._nccl.communicator(len(members), unique_id, members.index(self._index))

    def _abort(self) -> None:
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            with suppress(Exception):  # an error has brought us here, and that one is to be told
                comm.abort()
        if comms:
            self._lane.rest()
            self._gone()

    def drain(self) -> bool:
        """Aborts all communicators: nothing of this rank is under way any more."""
        self._abort()
        return True

    def settle(self) -> None:
        """All is aborted here; where it is not yet, nobody waits for this rank."""

    def idle(self) -> bool:
        """True when the device is; raises what has gone wrong there, or on the way to another rank."""
        for comm in self._comms.values():
            comm.check()
        return self._lane.idle()

    def close(self) -> None:
        """Gives back the communicators of the groups that this run made."""
        for key, comm in self._comms.items():
            if key != self._world:
                comm.destroy()
