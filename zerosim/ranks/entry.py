"""What one rank hands to the transport: its part in a collective, or an exchange of its own.

A transport (the in-process hub, MPI, NCCL) offers ``issue(rank, entry)``, which returns at once, and
``wait(rank, entry)``, which returns when ``entry.done``.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from zerosim.ranks.call import Call, Group
from zerosim.ranks.trace import Collective, Message, Trace


@dataclass(slots=True, eq=False)
class CollectiveEntry:
    """A rank's part in one call: its arrays, its charged buffers, and the trace's row that counts its bytes."""

    call: Call
    index: int
    x: np.ndarray
    out: np.ndarray
    buffers: list[np.ndarray]
    in_place: bool
    row: Collective
    trace: Trace
    done: bool = False

    def finish(self, nbytes: int) -> None:
        """The transport has carried the call out, and this rank sent ``nbytes`` in it."""
        self.trace.sent(self.row, nbytes)
        self.done = True

    def let_go(self) -> None:
        """The rank has fetched its result: nothing is held through this entry any more."""
        self.x = self.out = np.empty(0, self.x.dtype)
        self.buffers = []

    def describe(self) -> str:
        """The call as an error text shows it."""
        return str(self.call)


@dataclass(slots=True, eq=False)
class ExchangeEntry:
    """The one primitive as a program uses it; indices are those of the whole cluster, None for an absent half."""

    me: int
    send: np.ndarray | None
    to: int | None
    out: np.ndarray | None
    source: int | None
    key: Group
    row: Message
    trace: Trace
    to_send: bool = field(init=False)
    to_receive: bool = field(init=False)

    def __post_init__(self) -> None:
        self.to_send, self.to_receive = self.to is not None, self.source is not None

    def count(self, nbytes: int) -> None:
        """The transport has moved the sent half."""
        self.trace.sent(self.row, nbytes)

    @property
    def done(self) -> bool:
        """True when both halves have moved."""
        return not (self.to_send or self.to_receive)

    def describe(self) -> str:
        """The halves that are still open, as an error text shows them."""
        halves = []
        if self.to_send and self.send is not None:
            halves.append(f"send({self.send.shape}, {self.send.dtype}) to rank {self.to}")
        if self.to_receive and self.out is not None:
            halves.append(f"recv({self.out.shape}, {self.out.dtype}) from rank {self.source}")
        return " and ".join(halves)


Entry = CollectiveEntry | ExchangeEntry


class Transport(Protocol):
    """What carries entries between ranks."""

    @property
    def knows_the_others(self) -> bool:
        """False where one rank stands for all."""

    @property
    def library(self) -> str | None:
        """Whose collectives ``algorithm="native"`` asks for: ``MPI``, ``NCCL``; None where there is no library."""

    def issue(self, rank: int, entry: Entry) -> None:
        """Takes the entry and returns at once."""

    def wait(self, rank: int, entry: Entry) -> None:
        """Returns when the entry is done."""

    def join(self, parent: Group, key: Group) -> None:
        """The ranks of ``key``, all of the group ``parent``, have agreed to be a group of their own."""

    def progress(self) -> bool:
        """Lets what is under way go on; True if anything moved. Asked after each piece of a program's arithmetic."""

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is the rank's own running program."""
