"""The steps of a run: the figure of one, with the vectors of all ranks, chunk by chunk, and its messages as arrows; and
a slider over all of them, where ipywidgets is installed.

Legend: N ranks of the group, n elements of the whole vector, chunk c belongs to rank c. Lengths are inches on paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zerosim.display.drawing import LIGHT, Drawing, Sheet, Style
from zerosim.display.objects import step_view
from zerosim.display.render_html import as_html
from zerosim.display.style import ink_on, rank_color, short
from zerosim.numerics.arrays import has_data, is_poisoned
from zerosim.numerics.units import counted
from zerosim.ranks.inspect import Step, Steps

MOST_RANKS, MOST_VALUES, MOST_WIDTH = 16, 3, 15.0
ROW, GAP, LEFT, TOP, BOTTOM, RIGHT = 0.36, 0.3, 1.75, 2.3, 0.3, 2.6
LETTER = 0.105  # of a value's text
BLANK = "·"     # not written yet


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of an array: which of the cut, and its values as text; ``moved`` where this step sent or brought it."""

    number: int
    text: str
    moved: bool = False


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's two arrays, in chunks; empty where it takes no part."""

    rank: int
    x: tuple[Chunk, ...]
    out: tuple[Chunk, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepSheet:
    """The contents of a step's picture. ``arrows`` are (from row, to row, words)."""

    title: str
    call: str
    chunks: int
    rows: tuple[RankRow, ...]
    arrows: tuple[tuple[int, int, str], ...]


def step_sheet_data(step: Step) -> StepSheet:
    """Reads a step; ValueError for more ranks than a page holds."""
    if len(step.ranks) > MOST_RANKS:
        raise ValueError(f"a page holds {MOST_RANKS} ranks, found {len(step.ranks)}; look at step.ranks instead")
    call, group = step.call, range(len(step.ranks)) if step.call is None else step.call.group
    cut = (0,) if call is None else call.cut
    rows = []
    for now in step.ranks:
        place = now.place if now.place is not None else -1
        moved = frozenset(step.hop.chunks if step.hop and place in (step.hop.source, step.hop.destination) else ())
        out = _chunks(now.out, cut, place, moved)
        # What moves is of the result where that is written, else a partial sum, to which the rank's own chunk belongs.
        written = frozenset(chunk.number for chunk in out if chunk.text != BLANK)
        rows.append(RankRow(now.rank, _chunks(now.x, cut, place, moved - written),
                            tuple(replace(chunk, moved=chunk.moved and chunk.number in written) for chunk in out),
                            now.now_nbytes))
    arrows = tuple((group[hop.source], group[hop.destination], _words(step, hop)) for hop in step.hops[:1]
                   ) if step.hop is not None else ()
    purpose = f", for {call.purpose}" if call is not None and call.purpose != "unspecified" else ""
    return StepSheet(_step_title(step), "" if call is None else f"{call}{purpose}", len(cut) - 1, tuple(rows), arrows)


def _step_title(step: Step) -> str:
    if step.call is None:
        return f"Step {step.number}: a message of the program's own"
    after = f"after hop {step.hop.step}" if step.hop is not None else "done"
    return f"Step {step.number}: {step.call.operation.replace('_', '-')}, {after}"


def _words(step: Step, hop: Any) -> str:
    chunks = ", ".join(f"c{chunk}" for chunk in hop.chunks)
    return f"{f'{chunks}, ' * bool(chunks)}{hop.nbytes} B:\n{_text(step.values)}"


def _chunks(array: np.ndarray | None, cut: Sequence[int], place: int, moved: frozenset[int]) -> tuple[Chunk, ...]:
    """The array in the cut's chunks: all of them where it is a whole vector, else the rank's own."""
    if array is None or not array.size or len(cut) < 2:
        return ()
    if array.size == cut[-1] and not (len(cut) > 2 and array.size == cut[place + 1] - cut[place]):
        return tuple(Chunk(c, _text(array[cut[c]:cut[c + 1]]), c in moved) for c in range(len(cut) - 1)
                     if cut[c] < cut[c + 1])
    return (Chunk(place, _text(array), place in moved),)


def _text(values: np.ndarray) -> str:
    """The first values; a dot where all of it is not written yet."""
    if not has_data(values):
        return "no data"
    if not len(values):
        return "nothing"
    if is_poisoned(values):
        return BLANK
    shown = " ".join(f"{value:.4g}" if isinstance(value, float) else short(value)
                     for value in values[:MOST_VALUES].astype(object).tolist())
    return shown + (" …" if len(values) > MOST_VALUES else "")


def step_sheet(data: StepSheet, style: Style = LIGHT) -> Drawing:
    """A row for each rank, its two arrays side by side; an arrow for the hop; bold frames around what moved."""
    texts = [chunk.text for row in data.rows for chunk in (*row.x, *row.out)]
    cell = max([0.62, *(LETTER * len(text) + 0.16 for text in texts)])
    if LEFT + 2 * max(1, data.chunks) * cell + RIGHT > MOST_WIDTH:
        cell = max(0.3, (MOST_WIDTH - LEFT - RIGHT) / 2 / max(1, data.chunks))
    half = max(1, data.chunks) * cell
    height = TOP + len(data.rows) * (ROW + GAP) + BOTTOM
    with style.figure(max(9.4, LEFT + 2 * half + 0.4 + RIGHT), height) as figure:
        sheet = StepPage(axes=figure.in_inches(), style=style, data=data, cell=cell, half=half, height=height)
        sheet.names()
        for place, row in enumerate(data.rows):
            sheet.rank(place, row)
        for arrow in data.arrows:
            sheet.message(*arrow)
    return Drawing("step", data.title, _description(data), style, figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage(Sheet):
    """The sheet of a step, and the places of everything on it."""

    data: StepSheet
    cell: float
    half: float
    height: float

    def y(self, place: int) -> float:
        """The lower edge of a rank's row."""
        return self.height - TOP - (place + 1) * (ROW + GAP) + GAP

    def names(self) -> None:
        """Title, the call, and the names of the columns."""
        self.text(0.2, self.height - 0.34, self.data.title, fontsize=17, fontweight="bold")
        self.text(0.2, self.height - 0.78, self.data.call, color=self.style.muted)
        self.text(0.2, self.height - 1.22, "Bold: the chunk that moved, on both its ends; beside the arrow, the "
                  f"values that arrived.\n{BLANK}  stands where nothing is written yet.", color=self.style.muted,
                  linespacing=1.4)
        for name, left in (("brought", LEFT), ("result", LEFT + self.half + 0.4)):
            if self.data.chunks:
                self.text(left, self.height - TOP + 0.5, name, fontsize=13, fontweight="bold")
            for chunk in range(self.data.chunks):
                self.text(left + (chunk + 0.5) * self.cell, self.height - TOP + 0.17, f"c{chunk}", ha="center",
                          color=self.style.muted)

    def rank(self, place: int, row: RankRow) -> None:
        """Its name, what it holds, and its two arrays."""
        y = self.y(place) + ROW / 2
        self.text(0.2, y + 0.1, f"rank {row.rank}", fontsize=13, fontweight="bold")
        self.text(0.2, y - 0.14, f"{row.nbytes:,} B held", fontsize=11, color=self.style.muted)
        for left, chunks in ((LEFT, row.x), (LEFT + self.half + 0.4, row.out)):
            for chunk in chunks:
                self.chunk(left + chunk.number * self.cell, self.y(place), chunk)

    def chunk(self, x: float, y: float, chunk: Chunk) -> None:
        """A cell in the color of its owner; bold where it moved."""
        empty = chunk.text == BLANK
        color = self.style.background if empty else rank_color(chunk.number)
        frame: dict[str, Any] = {"linewidth": 2.6, "edgecolor": self.style.ink, "zorder": 4} if chunk.moved else {
            "linewidth": 0.9, "edgecolor": self.style.muted, "zorder": 2}
        self.box(x, y, self.cell, ROW, facecolor=color, **frame)
        if len(chunk.text) * LETTER <= self.cell:
            self.text(x + self.cell / 2, y + ROW / 2 - 0.01, chunk.text, ha="center", fontsize=11, zorder=5,
                      color=self.style.ink if empty else ink_on(color),
                      fontweight="bold" if chunk.moved else "normal")

    def message(self, source: int, destination: int, words: str) -> None:
        """An arrow on the right of the rows, from the sender's to the receiver's, with its words."""
        x = LEFT + 2 * self.half + (0.5 if self.data.chunks else -1.2)
        start, end = ((x, self.y(place) + ROW / 2) for place in (source, destination))
        bend = (0.5 if destination > source else -0.5) / max(1, abs(source - destination))
        self.arrow(start, end, connectionstyle=f"arc3,rad={-bend}", linewidth=2.4, color=rank_color(source),
                   mutation_scale=18)
        self.text(x + 0.5, (start[1] + end[1]) / 2, words, ha="left")


def _description(data: StepSheet) -> str:
    def said(chunks: Sequence[Chunk]) -> str:
        return ", ".join(f"c{chunk.number} {'not written yet' if chunk.text == BLANK else chunk.text}"
                         for chunk in chunks) or "nothing"

    moves = [f"rank {source} sends {' '.join(words.split())} to rank {destination}"
             for source, destination, words in data.arrows]
    rows = [f"rank {row.rank} brought {said(row.x)}, has {said(row.out)}, and holds {row.nbytes:,} bytes"
            for row in data.rows]
    return f"{data.call}: {counted(len(data.rows), 'rank')}. " + "; ".join([*moves, *rows]) + "."


# -- all steps of a run, under a slider --------------------------------------------------------------------------------

MOST_STEPS = 2000  # whose states are kept


def slider(steps: Steps) -> Any:
    """A widget: a slider, buttons that play, and under them the step as HTML. It takes all steps that are left.

    Raises ModuleNotFoundError where ipywidgets is not installed, before any step is taken, and ValueError where no
    step is left, or more than can be kept.
    """
    try:
        import ipywidgets
    except ImportError:
        raise ModuleNotFoundError("steps.slider() needs ipywidgets, which is not installed here; pip install ipywidgets"
                                  ", or walk by hand: for step in steps, and step.draw()") from None
    kept = _kept(steps)
    number = ipywidgets.IntSlider(value=1, min=1, max=len(kept), description="step", continuous_update=True,
                                  layout={"width": "60%"})
    play = ipywidgets.Play(value=1, min=1, max=len(kept), interval=700, description="play")
    ipywidgets.jslink((play, "value"), (number, "value"))
    page = ipywidgets.HTML(as_html(step_view(kept[0])))

    def turned(change: Any) -> None:
        page.value = as_html(step_view(kept[change["new"] - 1]))

    number.observe(turned, names="value")
    return ipywidgets.VBox([ipywidgets.HBox([play, number]), page])


def _kept(steps: Steps) -> list[Step]:
    """All steps that are left; the last one taken before, where it was the very last."""
    kept = []
    for step in steps:
        kept.append(step)
        if len(kept) > MOST_STEPS:
            steps.close()
            raise ValueError(f"a slider keeps every rank's state at each of at most {MOST_STEPS:,} steps, and this run "
                             'has more; step by="collective", or through a shorter program')
    if not kept:
        raise ValueError("no step is left to slide over: the run has ended, or it makes no step; make a new "
                         "step_through")
    return kept
