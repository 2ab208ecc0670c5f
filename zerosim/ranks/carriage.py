"""What carries out the collectives and messages of ranks that share a process. The hub decides when.

``InProcess`` computes with NumPy in the hub's own thread, and what it carries is there at once. NCCL's carriage puts
everything on streams of GPUs, and lets a rank's own stream wait for it.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

from zerosim.numerics.arrays import copy_elements, poison
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks import direct
from zerosim.ranks.algorithms import Party
from zerosim.ranks.call import Group
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.interrupts import Interrupts, guarded
from zerosim.ranks.lockstep import Event, Watch, lockstep


@guarded
class Carriage(Protocol):
    """Moves the arrays of all ranks of one hub; ranks are named by their index in the whole cluster."""

    @property
    def library(self) -> str | None:
        """Whose own collectives ``algorithm="native"`` asks for; None where there is no library."""

    def resume(self, rank: int) -> None:
        """The hub is about to let this rank's program go on."""

    def issued(self, rank: int, entry: Entry) -> None:
        """The rank's program has issued the entry: what it reads has been written, or is about to be."""

    def collective(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        """Carries one call out for all ranks of its group; returns the bytes that each sent. Yields what is watched."""

    def message(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        """Moves the elements of ``sender.send`` to ``receiver.out``, which have one shape and dtype.

        It is called by the program that issued one of the two, and last.
        """

    def arrived(self, rank: int, entry: Entry) -> None:
        """The rank's program goes on with an entry that is done: what it reads next must be there."""

    def join(self, parent: Group, key: Group) -> None:
        """One of the ranks of ``key``, all of the group ``parent``, has heard that they are a group of their own."""

    def settle(self) -> None:
        """All programs have returned: waits until all that they asked for is done."""

    def give_up(self) -> None:
        """The run has failed: ends what is under way, before the ranks are unwound."""

    def close(self) -> None:
        """The run is over, and no rank runs any more."""


@guarded
class InProcess:
    """Additions by the ranks' own kernels: all ranks in lockstep, or directly where no one watches the hops."""

    library = None

    def __init__(self, kernels: NumpyKernels, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> None:
        self.kernels, self.hop_by_hop, self.watch, self.interrupts = kernels, hop_by_hop, watch, interrupts

    def resume(self, rank: int) -> None:
        """Nothing belongs to the thread that would be another rank's."""

    def issued(self, rank: int, entry: Entry) -> None:
        """What the entry reads is there."""

    def collective(self, entries: Sequence[CollectiveEntry]) -> Generator[Event, None, list[int]]:
        """The call's own hops; a ring, where nobody watches, without them."""
        call, kernels = entries[0].call, self.kernels.serving(entries[0].x)
        if not self.hop_by_hop and direct.serves(call):
            direct.run(call, kernels, entries)
            return [direct.sent_nbytes(call, entry.index) for entry in entries]
        sent = [0] * len(entries)
        parties = [Party(call, e.index, kernels, e.buffers, e.in_place) for e in entries]
        if self.watch == "hop":  # who looks between two hops sees what is not written yet
            for entry in entries:
                if not entry.in_place:
                    poison(entry.out)
        for hop, values in lockstep(parties, [(e.x, e.out) for e in entries]):
            sent[hop.source] += hop.nbytes
            self.interrupts.raise_pending()
            if self.watch == "hop":  # a copy, since who keeps a view keeps a buffer in the ledger
                yield Event(call, hop, values.copy())
        return sent

    def message(self, sender: ExchangeEntry, receiver: ExchangeEntry) -> None:
        """A copy."""
        copy_elements(sender.send, receiver.out)

    def arrived(self, rank: int, entry: Entry) -> None:
        """What is done is there."""

    def join(self, parent: Group, key: Group) -> None:
        """Nothing to do: entries name their group."""

    def settle(self) -> None:
        """All is done when it is asked for."""

    def give_up(self) -> None:
        """Nothing is under way between two hops."""

    def close(self) -> None:
        """Nothing to give back."""
