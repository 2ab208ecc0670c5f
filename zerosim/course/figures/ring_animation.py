"""The ring's story as an animation: ranks on a circle, their chunks in boxes, the messages of one step after the other.

Legend: N ranks, chunk c belongs to rank c. Lengths are inches on paper.
"""

import math
from dataclasses import dataclass
from typing import Any

from zerosim.course.figures.ring import Cell, RingData, RingMessage, draw_addends
from zerosim.display.animation import Animation
from zerosim.display.drawing import LIGHT, Drawing, Sheet, Style, around
from zerosim.display.style import rank_color

SIDE, FRAME_TOP, RADIUS, FRAME_SEGMENT, ROW = 8.4, 1.1, 2.65, 0.22, 0.3
MIDDLE = (SIDE / 2, (SIDE - FRAME_TOP) / 2)
WORDS = {"ha": "center", "zorder": 8, "fontsize": 11}
SECONDS = 1.2  # of a frame


def ring_animation(data: RingData, style: Style = LIGHT) -> Animation:
    """Two frames for each step, the messages on their way and what every rank has then; one frame before the first."""
    frames = [_frame(data, 0, (), style)]
    for step in range(1, data.steps + 1):
        frames += [_frame(data, step - 1, tuple(data.of_step(step)), style), _frame(data, step, (), style)]
    return Animation("ring", f"A ring of {data.ranks} ranks: reduce-scatter, then all-gather", tuple(frames), SECONDS,
                     style)


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
