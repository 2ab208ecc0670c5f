"""Rows that options add to a trace: transfers between a rank's device, its host and its disk (offload), and faults."""

from dataclasses import dataclass
from typing import Any

from zerosim.ranks.call import Call, Hop


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of one kind begin to move between the rank's device and its host, or its host and its disk: offload.

    ``direction`` is one of `numerics.places.DIRECTIONS`, ``number`` counts the transfers of the run, ``span`` is the
    path of spans in which it begins.
    """

    direction: str
    kind: str
    nbytes: int
    number: int
    span: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TransferWait:
    """The program waited here for the transfer."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that `ranks.faults` has injected: its text; the rank, the training step (0: before the first), the call
    and the message that it struck, whose ranks are the cluster's; and the bytes of the message, or of files.
    """

    fault: str
    rank: int
    step: int
    call: Call | None = None
    hop: Hop | None = None
    nbytes: int = 0

    @staticmethod
    def place(call: Call | None, hop: Hop | None) -> str:
        """The message or the call in words, without what else its ranks have agreed on."""
        said = str(call._replace(agreement="")) if call else "a message"
        if hop is None:
            return said
        return (f"{f'hop {hop.step} of {said}' if call else said} from rank {hop.source} to rank {hop.destination}, "
                + f"chunks {list(hop.chunks)}, " * bool(hop.chunks) + f"{hop.nbytes:,} bytes")

    def __str__(self) -> str:
        where = self.place(self.call, self.hop) if self.call or self.hop else f"after {self.nbytes:,} bytes of files"
        return f"{self.fault}: in step {self.step}, {where}"


def begin_transfer(trace: Any, direction: str, kind: str, nbytes: int) -> Transfer:
    """Notes in a rank's trace that a transfer begins, and counts its bytes in ``trace.moved_nbytes``."""
    row = Transfer(direction, kind, nbytes, next(trace.transfer_numbers), trace.path)
    trace.moved_nbytes[direction] += nbytes
    trace.add(row)
    return row
