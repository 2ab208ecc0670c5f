"""A ring's story: every hop of a reduce-scatter and of the all-gather after it, from a run, on a sheet and animated.

Legend: N ranks, n elements, chunk c belongs to rank c. Rank r's vector is 2^r everywhere, so that the values of a
message tell whose vectors have been added in it: 11 = 1 + 2 + 8 has those of the ranks 0, 1 and 3. The sheet has ranks
side by side, time downwards, and an arrow for each message; the animation has ranks on a circle, and shows the messages
of one step after the other. Lengths are inches on paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.display.animation import Animation
from zerosim.display.drawing import LIGHT, Drawing, Point, Sheet, Style, around
from zerosim.display.style import ink_on, rank_color
from zerosim.numerics.formats import format_of
from zerosim.ranks.call import ceil_cut
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.hub import RunEvent
from zerosim.ranks.rank import Rank

MOST_RANKS = 5
# A cell has one segment for each rank that may be added in it.
SEGMENT, CELL_HEIGHT = 0.155, 0.4
LEFT, RIGHT, TOP, BOTTOM = 1.9, 0.8, 2.2, 0.75


@dataclass(frozen=True, slots=True)
class RingMessage:
    """One hop of one chunk. ``addends`` are the ranks whose vectors had been added in it, in the order of addition."""

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
    messages: tuple[RingMessage, ...]
    boards: tuple[Board, ...]  # one before the first step and one after each
    sent_nbytes: tuple[int, ...]  # per rank, by the trace

    @property
    def steps(self) -> int:
        """N-1 for each of the two collectives."""
        return len(self.boards) - 1

    def of_step(self, step: int) -> list[RingMessage]:
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
    messages: list[RingMessage] = []
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


def _message(event: RunEvent, boards: Sequence[Board], ranks: int) -> RingMessage:
    """The hop as a message of the last board's sender; its values must say the same as the board."""
    hop = event.hop
    chunk = hop.chunks[0]
    addends = boards[-1][hop.source][chunk].addends
    if len(event.values):
        total = int(event.values.astype(np.float64)[0])
        added = {rank for rank in range(ranks) if total >> rank & 1}
        assert added == set(addends), "the values that moved tell another story"
    assert event.call is not None
    return RingMessage(event.call.operation, len(boards), hop.source, hop.destination, chunk, hop.nbytes, addends)


def _after(board: Board, messages: Sequence[RingMessage], *, last: bool) -> Board:
    """The board after one step. After the ``last`` of the reduce-scatter only each rank's own chunk is still needed."""
    cells, reduces = [list(of_rank) for of_rank in board], messages[0].operation == "reduce_scatter"
    for message in messages if reduces else ():
        cells[message.source][message.chunk] = Cell((message.source,), needed=False)
    for message in messages:
        own = (message.destination,) if reduces else ()
        cells[message.destination][message.chunk] = Cell(message.addends + own)
    if last:
        cells = [[Cell(cell.addends, needed=chunk == rank) for chunk, cell in enumerate(of_rank)]
                 for rank, of_rank in enumerate(cells)]
    return tuple(tuple(of_rank) for of_rank in cells)


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The places of everything on the page, in inches from its lower left corner."""

    ranks: int
    steps: int

    @property
    def cell_width(self) -> float:
        """All N segments, and a little air."""
        return max(0.5, SEGMENT * self.ranks + 0.06)

    @property
    def rank_gap(self) -> float:
        """Between the cells of two ranks; few ranks stand further apart, under a title that is as long as ever."""
        return {2: 3.4, 3: 1.3}.get(self.ranks, 0.36)

    @property
    def step_gap(self) -> float:
        """Between the cells of two steps: room for arrows, and on the left for the name of a collective."""
        return 1.4 if self.ranks == 2 else 0.68

    @property
    def rank_width(self) -> float:
        """From one rank's first cell to the next rank's."""
        return self.cell_width * self.ranks + self.rank_gap

    @property
    def width(self) -> float:
        return LEFT + self.rank_width * self.ranks - self.rank_gap + RIGHT

    @property
    def height(self) -> float:
        return TOP + (CELL_HEIGHT + self.step_gap) * self.steps + CELL_HEIGHT + BOTTOM

    def cell(self, rank: int, chunk: int, step: int) -> Point:
        """The lower left corner of a cell after a step."""
        return (LEFT + rank * self.rank_width + chunk * self.cell_width,
                self.height - TOP - CELL_HEIGHT - step * (CELL_HEIGHT + self.step_gap))


def ring(data: RingData, style: Style = LIGHT) -> Drawing:
    """The sheet: ranks side by side, time downwards; digits and colors show what has been added in a cell."""
    layout = RingLayout(data.ranks, data.steps)
    with style.figure(layout.width, layout.height) as figure:
        sheet = Sheet(axes=figure.in_inches(), style=style, words={"ha": "center", "fontsize": 13.5})
        _sheet_words(sheet, layout, data)
        for step, board in enumerate(data.boards):
            for rank, cells in enumerate(board):
                for chunk, cell in enumerate(cells):
                    _cell(sheet, layout, layout.cell(rank, chunk, step), cell)
        for message in data.messages:
            _arrow(sheet, layout, message)
    return Drawing("ring", _title(data), _sheet_description(data), style, figure)


def _sheet_words(sheet: Sheet, layout: RingLayout, data: RingData) -> None:
    """Title, headings, the names of the steps, and what the colors mean."""
    muted, n, lengths = sheet.style.muted, data.ranks, " or ".join(map(str, sorted(set(data.chunk_nbytes))))
    sheet.text(0.2, layout.height - 0.34, _title(data), ha="left", fontsize=17, fontweight="bold")
    sheet.text(0.2, layout.height - 0.95,
               f"A cell is one chunk (c0 to c{n - 1}) on one rank: {lengths} bytes in {data.format}. "
               "Faint: no longer needed.\n"
               "Its digits are the ranks that are added in it, in order; a bold frame has them all.\n"
               "An arrow is a message, with its chunk and bytes.",
               ha="left", fontsize=12.5, linespacing=1.45, color=muted)
    for rank in range(n):
        left, _ = layout.cell(rank, 0, 0)
        center = left + n * layout.cell_width / 2
        sheet.text(center, layout.height - TOP + 0.45, f"rank {rank}", fontsize=15, fontweight="bold")
        for chunk in range(n):
            sheet.text(left + (chunk + 0.5) * layout.cell_width, layout.height - TOP + 0.15, f"c{chunk}", color=muted)
    for step in range(data.steps + 1):
        _, low = layout.cell(0, 0, step)
        sheet.text(LEFT - 0.15, low + CELL_HEIGHT / 2, f"after step {step}" if step else "at the start", ha="right")
    for words, first in (("reduce-scatter", 0), ("all-gather", n - 1)):
        top, low = layout.cell(0, 0, first)[1], layout.cell(0, 0, first + n - 1)[1] + CELL_HEIGHT
        sheet.axes.plot([0.46, 0.46], [low + 0.04, top - 0.04], color=sheet.style.ink, linewidth=1.2)
        sheet.text(0.25, (low + top) / 2, words, rotation=90, fontsize=14, fontweight="bold")
    sheet.text(0.2, 0.32, _sent_words(data), ha="left")


def _cell(sheet: Sheet, layout: RingLayout, corner: Point, cell: Cell) -> None:
    """The frame, and the addends in it."""
    (x, y), width = corner, layout.cell_width
    draw_addends(sheet, x + (width - SEGMENT * layout.ranks) / 2, y, cell, SEGMENT, CELL_HEIGHT, clip_on=False)
    whole = cell.needed and len(cell.addends) == layout.ranks
    frame: dict[str, Any] = {"edgecolor": sheet.style.ink, "linewidth": 1.8, "zorder": 3} if whole else {
        "edgecolor": sheet.style.faint, "linewidth": 0.9, "zorder": 2}
    sheet.box(x, y, width, CELL_HEIGHT, fill=False, clip_on=False, **frame)


def draw_addends(sheet: Sheet, x: float, y: float, cell: Cell, segment: float, height: float, zorder: int = 1,
                 **options: Any) -> None:
    """One colored digit for each addend, in the order of addition; faint where no longer needed."""
    for place, rank in enumerate(cell.addends):
        color = rank_color(rank)
        sheet.box(x + place * segment, y + 0.03, segment, height - 0.06, facecolor=color, linewidth=0,
                  alpha=1.0 if cell.needed else 0.22, zorder=zorder, **options)
        if cell.needed:
            sheet.text(x + (place + 0.5) * segment, y + height / 2 - 0.01, str(rank), color=ink_on(color),
                       zorder=zorder + 2)


def _arrow(sheet: Sheet, layout: RingLayout, message: RingMessage) -> None:
    """From the sender's cell down to the receiver's; the last rank's goes out on the right and comes in on the left."""
    x0, low = layout.cell(message.source, message.chunk, message.step - 1)
    x1, high = layout.cell(message.destination, message.chunk, message.step)
    start, end = (x0 + layout.cell_width / 2, low - 0.03), (x1 + layout.cell_width / 2, high + CELL_HEIGHT + 0.03)
    words = f"c{message.chunk}: {message.nbytes} B"
    if end[0] > start[0]:
        _stroke(sheet, message.source, start, end, words)
        return
    edge_right, edge_left = layout.width - 0.6, LEFT - 0.5
    out, into = edge_right - start[0], end[0] - edge_left
    middle = start[1] + (end[1] - start[1]) * out / (out + into)
    _stroke(sheet, message.source, start, (edge_right, middle), words if out >= into else "", arrowstyle="-")
    _stroke(sheet, message.source, (edge_left, middle), end, words if into > out else "")
    sheet.text(edge_right + 0.04, middle, f"to {message.destination}", ha="left", color=sheet.style.muted)
    sheet.text(edge_left - 0.04, middle, f"from {message.source}", ha="right", color=sheet.style.muted)


def _stroke(sheet: Sheet, sender: int, start: Point, end: Point, words: str, **look: Any) -> None:
    """One straight line in the sender's color, with its words in the middle."""
    sheet.arrow(start, end, zorder=4, color=rank_color(sender), linewidth=1.6, mutation_scale=12, **look)
    if words:
        sheet.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, words, zorder=5,
                   bbox={"facecolor": sheet.style.background, "edgecolor": "none", "pad": 1.2})


def _title(data: RingData) -> str:
    return f"A ring of {data.ranks} ranks: reduce-scatter, then all-gather"


def _sent_words(data: RingData) -> str:
    """The bytes that each rank sent in all, beside the whole vector."""
    n, vector, (low, *_, high) = data.ranks, sum(data.chunk_nbytes), sorted(data.sent_nbytes)
    share = f"{low} bytes in all: 2 · {n - 1}/{n} of the vector's {vector}" if low == high else (
        f"{low} to {high} bytes in all; the vector has {vector}")
    return f"Every rank sends {n - 1} + {n - 1} messages, {share}."


def _sheet_description(data: RingData) -> str:
    steps = []
    for step in range(1, data.steps + 1):
        hops = [f"rank {m.source} sends chunk {m.chunk} ({m.nbytes} bytes, {_joined(m.addends)}) to rank "
                f"{m.destination}" for m in data.of_step(step)]
        steps.append(f"Step {step}, {data.of_step(step)[0].operation.replace('_', '-')}: " + "; ".join(hops) + ".")
    return " ".join([*steps, f"After step {data.ranks - 1} each rank has the whole sum of its own chunk, after step "
                     f"{data.steps} of all chunks.", _sent_words(data)])


def _joined(ranks: Sequence[int]) -> str:
    return f"the sum of ranks {' + '.join(map(str, ranks))}" if len(ranks) > 1 else "its own"


# -- the same as an animation ------------------------------------------------------------------------------------------

SIDE, FRAME_TOP, RADIUS, FRAME_SEGMENT, ROW = 8.4, 1.1, 2.65, 0.22, 0.3
MIDDLE = (SIDE / 2, (SIDE - FRAME_TOP) / 2)
WORDS = {"ha": "center", "zorder": 8, "fontsize": 11}
SECONDS = 1.2  # of a frame


def ring_animation(data: RingData, style: Style = LIGHT) -> Animation:
    """Two frames for each step, the messages on their way and what every rank has then; one frame before the first."""
    frames = [_frame(data, 0, (), style)]
    for step in range(1, data.steps + 1):
        frames += [_frame(data, step - 1, tuple(data.of_step(step)), style), _frame(data, step, (), style)]
    return Animation("ring", _title(data), tuple(frames), SECONDS, style)


def _frame(data: RingData, step: int, moving: tuple[RingMessage, ...], style: Style) -> Drawing:
    """The board after a step, and the messages that leave it."""
    title, words = _frame_title(data, step, moving), _frame_words(data, step, moving)
    with style.figure(SIDE, SIDE) as figure:
        sheet = FrameSheet(axes=figure.in_inches(), style=style, words=WORDS, ranks=data.ranks)
        sheet.text(0.2, SIDE - 0.34, title, ha="left", zorder=3, fontsize=17, fontweight="bold")
        sheet.text(0.2, SIDE - 0.76, words, ha="left", zorder=3, fontsize=12, color=style.muted)
        for message in moving:
            sheet.message(message)
        for rank, cells in enumerate(data.boards[step]):
            leaving = {message.chunk for message in moving if message.source == rank}
            sheet.rank(rank, cells, leaving)
    name, said = f"ring-{2 * step + bool(moving)}", f"{title}. {_frame_description(data, step, moving)}"
    return Drawing(name, title, said, style, figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSheet(Sheet):
    """The sheet of a frame: ranks on a circle."""

    ranks: int

    def rank(self, rank: int, cells: tuple[Cell, ...], leaving: set[int]) -> None:
        """A box with its name and a row for each chunk."""
        x, y, _ = around(rank, self.ranks, RADIUS, MIDDLE)
        width, height = 0.62 + FRAME_SEGMENT * self.ranks, ROW * self.ranks + 0.42
        left, low = x - width / 2, y - height / 2
        self.box(left, low, width, height, facecolor=self.style.background, edgecolor=rank_color(rank), linewidth=2.5,
                 zorder=5)
        self.text(x, low + height - 0.2, f"rank {rank}", fontweight="bold", fontsize=13)
        for chunk, cell in enumerate(cells):
            self.cell(left + 0.46, low + height - 0.4 - (chunk + 1) * ROW, chunk, cell, chunk in leaving)

    def cell(self, x: float, y: float, chunk: int, cell: Cell, leaves: bool) -> None:
        """A chunk's name, and its addends; framed where it leaves, or has all of them."""
        self.text(x - 0.22, y + ROW / 2, f"c{chunk}", color=self.style.muted)
        draw_addends(self, x, y, cell, FRAME_SEGMENT, ROW, zorder=6)
        whole = cell.needed and len(cell.addends) == self.ranks
        look: dict[str, Any] = {"edgecolor": self.style.ink, "linewidth": 2.2} if leaves or whole else {
            "edgecolor": self.style.faint, "linewidth": 0.8}
        self.box(x, y + 0.03, FRAME_SEGMENT * self.ranks, ROW - 0.06, fill=False, zorder=7,
                 linestyle="--" if leaves and not whole else "-", **look)

    def message(self, message: RingMessage) -> None:
        """Along the circle, with the chunk and its bytes outside of it."""
        bulge = math.tan(math.pi / 2 / self.ranks) * (0.75 if self.ranks > 2 else 0.6)
        start, end = (around(rank, self.ranks, RADIUS, MIDDLE)[:2] for rank in (message.source, message.destination))
        self.arrow(start, end, connectionstyle=f"arc3,rad={-bulge}", linewidth=3.0, mutation_scale=24,
                   color=rank_color(message.source), shrinkA=62, shrinkB=66 if self.ranks < 5 else 86)
        away = RADIUS * (1.0 if self.ranks > 2 else 0.75) + 0.15
        x, y, side = around(message.source + 0.5, self.ranks, away, MIDDLE)
        self.text(x, y, f"c{message.chunk}: {message.nbytes} B", ha=side, fontsize=13)


def _frame_title(data: RingData, step: int, moving: tuple[RingMessage, ...]) -> str:
    if moving:
        return f"Step {step + 1} of {data.steps}, {moving[0].operation.replace('_', '-')}: on the way"
    return f"After step {step} of {data.steps}" if step else f"A ring of {data.ranks} ranks, at the start"


def _frame_words(data: RingData, step: int, moving: tuple[RingMessage, ...]) -> str:
    if moving:
        adds = moving[0].operation == "reduce_scatter"
        return "Each rank sends one chunk to the next, which " + ("adds its own to it." if adds else "keeps it.")
    if step == data.ranks - 1:
        return "Each rank has the whole sum of its own chunk: a reduce-scatter is done."
    if step == data.steps:
        return "Every rank has the whole sum of all chunks: the two together are an all-reduce."
    return "Digits: whose vectors are added in a chunk. Bold: all of them. Faint: no longer needed."


def _frame_description(data: RingData, step: int, moving: tuple[RingMessage, ...]) -> str:
    if moving:
        return " ".join(f"Rank {m.source} sends rank {m.destination} chunk {m.chunk} with the sum of ranks "
                        f"{' + '.join(map(str, m.addends))}, {m.nbytes} bytes." for m in moving)
    has = [f"rank {rank} has " + ", ".join(f"c{chunk} of ranks {' + '.join(map(str, cell.addends))}"
                                           for chunk, cell in enumerate(cells) if cell.needed)
           for rank, cells in enumerate(data.boards[step])]
    return "; ".join(has).capitalize() + "."
