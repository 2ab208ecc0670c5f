"""Transfers between a rank's device, its host and its disk (offload): their rows in the trace, and their bytes."""

from dataclasses import dataclass
from typing import Any


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


def begin_transfer(trace: Any, direction: str, kind: str, nbytes: int) -> Transfer:
    """Notes in a rank's trace that a transfer begins, and counts its bytes in ``trace.moved_nbytes``."""
    row = Transfer(direction, kind, nbytes, next(trace.transfer_numbers), trace.path)
    trace.moved_nbytes[direction] += nbytes
    trace.add(row)
    return row
