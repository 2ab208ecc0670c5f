"""A ring's story as data: every hop of a reduce-scatter and of the all-gather after it, read from a run.

Legend: N ranks, n elements, chunk c belongs to rank c. Rank r's vector is 2^r everywhere, so that the values of a
message tell whose vectors have been added in it: 11 = 1 + 2 + 8 has those of the ranks 0, 1 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zerosim.numerics.formats import format_of
from zerosim.ranks.call import ceil_cut
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.hub import HopEvent
from zerosim.ranks.rank import Rank

MOST_RANKS = 5


@dataclass(frozen=True, slots=True)
class Message:
    """What moved in one hop. ``addends`` are the ranks whose vectors had been added in it, in the order of addition."""

    operation: str
    step: int  # from 1 on, through both collectives
    source: int
    destination: int
    chunk: int
    nbytes: int
    addends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One chunk on one rank: the ranks whose vectors are added in it, and whether it is still needed there."""

    addends: tuple[int, ...]
    needed: bool = True


Board = tuple[tuple[Cell, ...], ...]  # [rank][chunk]


@dataclass(frozen=True, slots=True)
class RingData:
    """A ring reduce-scatter and all-gather of N ranks: the messages, and what every rank had after each step."""

    ranks: int
    format: str
    chunk_nbytes: tuple[int, ...]
    messages: tuple[Message, ...]
    boards: tuple[Board, ...]  # one before the first step and one after each
    sent_nbytes: tuple[int, ...]  # per rank, by the trace

    @property
    def steps(self) -> int:
        """N-1 for each of the two collectives."""
        return len(self.boards) - 1

    def of_step(self, step: int) -> list[Message]:
        """The messages of one step, counted from 1."""
        return [message for message in self.messages if message.step == step]


def ring_data(ranks: int = 4, length: int = 8, format: str = "fp32") -> RingData:
    """Runs the two collectives on N ranks, hop by hop, and reads who had what from the values that moved.

    ``length`` is n, cut as ranks cut a vector by default. Raises ValueError for fewer than 2 or more than 5 ranks,
    and for a format that cannot hold 2^N - 1 exactly.
    """
    row = format_of(format)
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"a ring of {ranks} ranks cannot be drawn on one sheet; ask for 2 to {MOST_RANKS}")
    if ranks > row.mantissa_bits + 1:
        raise ValueError(f"{row.name} cannot tell the sums of {ranks} ranks' vectors apart; ask for at most "
                         f"{row.mantissa_bits + 1} ranks, or for a format with more mantissa bits")
    cluster = Cluster(ranks)
    messages: list[Message] = []
    boards = [tuple(tuple(Cell((rank,)) for _ in range(ranks)) for rank in range(ranks))]
    for event in cluster.events(_program, length, row.dtype, hop_by_hop=True):
        messages.append(_message(event, boards, ranks))
        if len(messages) % ranks == 0:
            boards.append(_after(boards[-1], messages[-ranks:], last=len(boards) == ranks - 1))
    nbytes = tuple((high - low) * row.nbytes for low, high in pairwise(ceil_cut(length, ranks)))
    return RingData(ranks, row.name, nbytes, tuple(messages), tuple(boards), tuple(cluster.trace.sent_nbytes()))


def _program(rank: Rank, length: int, dtype: np.dtype) -> None:
    chunk = rank.reduce_scatter(np.full(length, 2**rank.index, dtype))
    rank.all_gather(chunk, length=length)


def _message(event: HopEvent, boards: Sequence[Board], ranks: int) -> Message:
    """The hop as a message of the last board's sender; its values must say the same as the board."""
    hop = event.hop
    chunk = hop.chunks[0]
    addends = boards[-1][hop.source][chunk].addends
    if len(event.values):
        total = int(event.values.astype(np.float64)[0])
        added = {rank for rank in range(ranks) if total >> rank & 1}
        assert added == set(addends), "the values that moved tell another story"
    assert event.call is not None
    return Message(event.call.operation, len(boards), hop.source, hop.destination, chunk, hop.nbytes, addends)


def _after(board: Board, messages: Sequence[Message], *, last: bool) -> Board:
    """The board after one step. After the ``last`` of the reduce-scatter only each rank's own chunk is still needed."""
    cells = [list(of_rank) for of_rank in board]
    for message in messages:
        reduces = message.operation == "reduce_scatter"
        if reduces:
            cells[message.source][message.chunk] = Cell((message.source,), needed=False)
    for message in messages:
        own = (message.destination,) if message.operation == "reduce_scatter" else ()
        cells[message.destination][message.chunk] = Cell(message.addends + own)
    if last:
        cells = [[Cell(cell.addends, needed=chunk == rank) for chunk, cell in enumerate(of_rank)]
                 for rank, of_rank in enumerate(cells)]
    return tuple(tuple(of_rank) for of_rank in cells)
