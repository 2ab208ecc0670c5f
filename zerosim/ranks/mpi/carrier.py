"""Collectives over MPI: each hop of an algorithm is a pair of non-blocking messages, made by whoever asks next."""

from typing import Any

import numpy as np

from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.algorithms import NATIVE, Exchange, Party
from zerosim.ranks.call import Group
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.lockstep import row_of
from zerosim.ranks.mpi.messages import Halves, Leftovers
from zerosim.ranks.mpi.native import NativeCourse
from zerosim.ranks.processes.carrier import Course

MESSAGES = 0  # the tag of a program's own messages; a collective's is 1 + its number, modulo what MPI can hold


class MessageCourse:
    """A message that the program sends itself."""

    def __init__(self, entry: ExchangeEntry, halves: Halves, leftovers: Leftovers) -> None:
        self.entry, self._halves, self._leftovers = entry, halves, leftovers

    def advance(self) -> bool:
        """Looks whether either half has moved."""
        entry, before = self.entry, (self.entry.to_send, self.entry.to_receive)
        if entry.to_send and self._halves.sent():
            assert entry.send is not None
            entry.to_send = False
            entry.count(entry.send.nbytes)
        if entry.to_receive and self._halves.received(f"rank {entry.me}"):
            entry.to_receive = False
        return before != (entry.to_send, entry.to_receive)

    def wait(self) -> None:
        """What has arrived is there."""

    def drop(self) -> None:
        """Gives up the halves that have not moved."""
        self._halves.drop(self._leftovers)


class HopsCourse:
    """A collective on its way: this rank's generator, and the hop that it waits for."""

    def __init__(self, entry: CollectiveEntry, mpi: Any, comm: Any, kernels: NumpyKernels,
                 leftovers: Leftovers) -> None:
        self.entry, self._mpi, self._comm, self._leftovers = entry, mpi, comm, leftovers
        self._tag = 1 + entry.call.number % (comm.Get_attr(mpi.TAG_UB) - 1)
        party = Party(entry.call, entry.index, kernels.serving(entry.x), entry.buffers, entry.in_place)
        self._steps = row_of(entry.call).steps(party, entry.x, entry.out)
        self._nbytes = 0
        self._hop: Exchange | None = None
        self._halves: Halves | None = None
        self._next()

    def _next(self) -> None:
        self._hop, self._halves = next(self._steps, None), None
        if self._hop is None:
            self.entry.finish(self._nbytes)
            return
        hop = self._hop
        self._halves = Halves(self._mpi, self._comm, self._tag, hop.send, hop.to, hop.out, hop.source)
        self._nbytes += 0 if hop.send is None else hop.send.nbytes

    def advance(self) -> bool:
        """Makes every hop whose messages have arrived and left."""
        moved = False
        while self._halves is not None and self._halves.received(str(self.entry.call)) and self._halves.sent():
            self._next()
            moved = True
        return moved

    def wait(self) -> None:
        """The result is in memory."""

    def drop(self) -> None:
        """Gives up the hop under way, and all that would have followed."""
        if self._halves is not None:
            self._halves.drop(self._leftovers)


class MPICarrier:
    """Makes the hops of this process' rank; one communicator for each group of ranks."""

    library = "MPI"
    in_order = False  # every call has a tag, every group a communicator

    def __init__(self, mpi: Any, comm: Any, kernels: NumpyKernels, *, rendezvous: bool) -> None:
        self._mpi, self._kernels, self._rendezvous = mpi, kernels, rendezvous
        self._world: Group = tuple(range(comm.size)), ()
        self._comms: dict[Group, Any] = {self._world: comm}
        self._leftovers: Leftovers = []

    def begin(self, entry: Entry) -> Course:
        """Posts the first messages of the entry."""
        if isinstance(entry, ExchangeEntry):
            group, comm = entry.key[0], self._comms[entry.key]
            to = None if entry.to is None else group.index(entry.to)
            source = None if entry.source is None else group.index(entry.source)
            halves = Halves(self._mpi, comm, MESSAGES, entry.send, to, entry.out, source, rendezvous=self._rendezvous)
            return MessageCourse(entry, halves, self._leftovers)
        comm = self._comms[entry.call.key]
        if entry.call.algorithm == NATIVE:
            return NativeCourse(entry, self._mpi, comm, self._kernels, self._leftovers)
        return HopsCourse(entry, self._mpi, comm, self._kernels, self._leftovers)

    def join(self, parent: Group, key: Group) -> None:
        """A communicator for the group; only its members are here, and all of them."""
        everyone, comm = self._comms[parent].Get_group(), self._comms[parent]
        members = everyone.Incl([parent[0].index(rank) for rank in key[0]])
        self._comms[key] = comm.Create_group(members)
        members.Free()
        everyone.Free()

    def idle(self) -> bool:
        """What a program has waited for is done, and it waits for all."""
        return True

    def drain(self) -> bool:
        """Takes and forgets what arrives; True when nothing that this rank has begun is under way."""
        for comm in self._comms.values():
            status = self._mpi.Status()
            while (message := comm.Improbe(status=status)) is not None:
                message.Recv([np.empty(status.Get_count(self._mpi.BYTE), np.uint8), self._mpi.BYTE])
        self._leftovers[:] = [is_over for is_over in self._leftovers if not is_over()]
        return not self._leftovers

    def settle(self) -> None:
        """Takes what came with the last note, and gives back the communicators."""
        self.drain()
        self.close()

    def close(self) -> None:
        """Gives back the communicators of the groups that this run made."""
        for key, comm in self._comms.items():
            if key != self._world:
                comm.Free()

