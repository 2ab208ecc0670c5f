"""Figures of traffic: all that ranks did, in their order, with the bytes sent by then; a ring; one step of a run.

Legend: N ranks, E events of a rank. There is no clock in it: planning.timeline replays the same trace on a machine.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from zerosim.display.colors import GREEN, PHASE_COLORS, PURPOSE_COLORS, ink_on, rank_color
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, heading, in_inches, scale_of, within_limits
from zerosim.display.numbers import short
from zerosim.numerics.arrays import has_data, is_poisoned
from zerosim.numerics.units import bytes_text, counted
from zerosim.ranks.hub import expand
from zerosim.ranks.inspect import Step
from zerosim.ranks.trace import Collective, Compute, Message, Trace

MOST_LANES = 16
ARITHMETIC = "other arithmetic"  # outside the spans that have a color


@dataclass(frozen=True, slots=True)
class TraceOrder:
    """Per rank E events, each a phase of arithmetic or the purpose of what was sent, and the bytes sent in each."""

    whats: tuple[tuple[str, ...], ...]
    sent_nbytes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @property
    def busiest(self) -> int:
        """The place of the rank that sent most."""
        return max(range(len(self.names)), key=lambda place: sum(self.sent_nbytes[place]))

    def by_purpose(self, place: int) -> Mapping[str, list[int]]:
        """Bytes sent until after each event, (E + 1,) of each purpose for which the rank sent any."""
        events = list(zip(self.whats[place], self.sent_nbytes[place], strict=True))
        return {purpose: [0, *accumulate(nbytes * (what == purpose) for what, nbytes in events)]
                for purpose in PURPOSE_COLORS if any(what == purpose and nbytes for what, nbytes in events)}


def trace_order_data(traces: Sequence[Trace]) -> TraceOrder:
    """Reads the traces of ranks, in rank order; arithmetic of one phase that nothing interrupts is one event.

    A trace does not know whose it is: one alone is of "this rank". Of more than 16 ranks the first are read.
    Raises ValueError where no rank did anything.
    """
    read = [_events(trace) for trace in traces[:MOST_LANES]]
    if not any(read):
        raise ValueError("the trace has neither arithmetic nor messages, so there is nothing to draw; run a program "
                         "first")
    return TraceOrder(tuple(tuple(what for what, _ in events) for events in read),
                      tuple(tuple(nbytes for _, nbytes in events) for events in read),
                      ("this rank",) if len(read) == 1 else tuple(f"rank {place}" for place in range(len(read))))


def _events(trace: Trace) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for row in trace.rows:
        if isinstance(row, Compute):
            what = next((name for name in row.span if name in PHASE_COLORS), ARITHMETIC)
            if not found or found[-1] != (what, 0):
                found.append((what, 0))
        elif isinstance(row, Collective | Message):
            found.append((row.purpose, row.sent_nbytes))
    return found


# -- the picture --------------------------------------------------------------------------------------------------

def color_of(what: str) -> str:
    """Of a phase, or a purpose."""
    return PHASE_COLORS.get(what) or PURPOSE_COLORS.get(what) or GREEN


def trace_order(data: TraceOrder, style: Style = LIGHT) -> Drawing:
    """A lane for each rank; under them, the bytes that the busiest rank has sent by then, stacked by purpose."""
    lanes = len(data.names)
    width, height = 11.0, 5.0 + 0.42 * lanes
    with style.figure(width, height) as figure:
        grid = figure.add_gridspec(2, 1, height_ratios=(0.42 * lanes, 2.1), left=1.0 / width, right=1 - 0.3 / width,
                                   top=1 - 1.1 / height, bottom=1.45 / height, hspace=0.35 / (0.2 + 0.21 * lanes))
        order, sent = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        for place, whats in enumerate(data.whats):
            for sends, half in ((True, 0.4), (False, 0.2)):
                here = [at for at, what in enumerate(whats) if (what in PURPOSE_COLORS) is sends]
                order.broken_barh([(at, 1) for at in here], (place - half, 2 * half),
                                  facecolors=[color_of(whats[at]) for at in here], edgecolor=style.background,
                                  linewidth=0.4 if len(whats) < 300 else 0)
        order.set_yticks(range(lanes), data.names)
        order.set_ylim(lanes - 0.5, -0.5)
        order.tick_params(axis="y", length=0)
        order.tick_params(axis="x", labelbottom=False)
        _sent(sent, data, style)
        for axes in (order, sent):
            axes.set_xlim(0, max(1, *map(len, data.whats)))
        within_limits(sent)
        order.set_xticks(sent.get_xticks())
        heading(figure, TITLE, "Tall: a collective or a message; low: a stretch of "
                "arithmetic. Each is one event, however long it takes.", style)
        figure.legend(*_legend(data), loc="lower center", ncols=5, columnspacing=1.6)
    return Drawing("trace-order", TITLE, _order_description(data), style, figure)


TITLE = "What the ranks did, in their order"


def _sent(axes: Axes, data: TraceOrder, style: Style) -> None:
    curves = data.by_purpose(data.busiest)
    unit, name = scale_of(max(1, sum(curve[-1] for curve in curves.values())))
    low = [0.0] * (len(data.whats[data.busiest]) + 1)
    for purpose, curve in curves.items():
        high = [a + nbytes / unit for a, nbytes in zip(low, curve, strict=True)]
        axes.fill_between(range(len(low)), low, high, step="post", facecolor=PURPOSE_COLORS[purpose], linewidth=0)
        low = high
    axes.set_ylim(0, max(low[-1] * 1.05, 1e-9))
    axes.set_ylabel(f"sent by {data.names[data.busiest]}\nso far ({name})")
    axes.set_xlabel("what a rank did, in its order (events)")
    axes.grid(axis="y")


def _legend(data: TraceOrder) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    seen = {what for whats in data.whats for what in whats}
    names = [what for what in (*PHASE_COLORS, ARITHMETIC, *PURPOSE_COLORS) if what in seen]
    return ([Patch(facecolor=color_of(name)) for name in names],
            [f"sends: {name}" if name in PURPOSE_COLORS else f"computes: {name}" for name in names])


def _order_description(data: TraceOrder) -> str:
    ranks = [f"{name}: {len(whats):,} events, {sum(sent):,} bytes sent"
             for name, whats, sent in zip(data.names, data.whats, data.sent_nbytes, strict=True)]
    curves = ", ".join(f"{purpose} {curve[-1]:,}" for purpose, curve in data.by_purpose(data.busiest).items())
    return (f"A lane of events for each rank. {'; '.join(ranks)}. Below, the bytes that {data.names[data.busiest]} "
            f"sent by purpose: {curves or 'none'}.")


# -- Who sent how many bytes to whom in a run: the ranks on a ring, an arrow for each pair ---------------------------
# Legend: N ranks. Lengths are inches on paper; angles run clockwise from the top.


Link = tuple[int, int]  # from rank, to rank
MOST_RING_RANKS = 32


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """Bytes by link, of all collectives and messages of a run; ``collectives`` and ``messages`` count them."""

    ranks: int
    links: Mapping[Link, int]
    collectives: int
    messages: int

    @property
    def around(self) -> dict[Link, int]:
        """The links of the ring: from each rank to the next."""
        return {link: nbytes for link, nbytes in self.links.items() if (link[0] + 1) % self.ranks == link[1]}

    @property
    def nbytes(self) -> int:
        """Sent by all ranks together."""
        return sum(self.links.values())


def ring_traffic_data(traces: Sequence[Trace], ranks: int) -> RingTraffic:
    """Reads the traces; every collective is expanded to its messages, those of the same shape once.

    Raises ValueError for more ranks than a page holds, and for traces of fewer ranks than N unless one stands for all.
    """
    if ranks > MOST_RING_RANKS:
        raise ValueError(f"a page holds a ring of {MOST_RING_RANKS} ranks, found {ranks}; cluster.trace.sent_nbytes() "
                         "has the bytes of all of them")
    if len(traces) not in (1, ranks):
        raise ValueError(f"a ring of {ranks} ranks is drawn from all their traces, found {len(traces)}")
    links, times = Counter[Link](), Counter[tuple[object, tuple[int, ...]]]()
    shapes, seen, messages = {}, set(), 0
    for trace in traces:
        for row in trace.messages():
            if isinstance(row, Message):
                if row.destination is not None:
                    links[_sender(row, traces, trace), row.destination] += row.sent_nbytes
                    messages += 1
            elif (key := (row.call.key, row.call.number)) not in seen:
                seen.add(key)
                shape = row.call.normalized(), row.call.group
                times[shape] += 1
                shapes[shape] = row
    for shape, row in shapes.items():
        _expand_into(links, row, times[shape])
    others = {link: nbytes for link, nbytes in links.items() if link[0] != link[1]}
    return RingTraffic(ranks, others, len(seen), messages)


def _sender(row: Message, traces: Sequence[Trace], trace: Trace) -> int:
    assert row.destination is not None
    return next(rank for rank, other in enumerate(traces) if other is trace)


def _expand_into(links: Counter[Link], row: Collective, times: int) -> None:
    group = row.call.group
    for hop in expand(row.call):
        links[group[hop.source], group[hop.destination]] += times * hop.nbytes


# -- the picture --------------------------------------------------------------------------------------------------

SIDE, RING_TOP, RADIUS, NODE = 8.6, 1.15, 2.85, 0.34
THICKEST = 9.0  # points


def ring_traffic(data: RingTraffic, style: Style = LIGHT) -> Drawing:
    """Ranks on a circle, from rank 0 at the top clockwise; the wider an arrow, the more went over it."""
    from matplotlib.patches import Circle

    height = SIDE + RING_TOP - 0.6
    with style.figure(SIDE, height) as figure:
        axes = in_inches(figure)
        figure.text(0.2 / SIDE, 1 - 0.34 / height, _ring_title(data), va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / SIDE, 1 - 0.84 / height, _subtitle(data), va="center", color=style.muted, linespacing=1.4)
        for link, nbytes in sorted(data.links.items(), key=lambda item: item[0] in data.around):
            if nbytes:
                _arrow(axes, data, link, style)
        for rank in range(data.ranks):
            x, y = _place(rank, data.ranks, RADIUS)
            axes.add_patch(Circle((x, y), NODE, facecolor=rank_color(rank), edgecolor=style.ink, linewidth=1.2,
                                  zorder=5))
            axes.text(x, y - 0.01, str(rank), ha="center", va="center", fontsize=14, fontweight="bold", zorder=6,
                      color=ink_on(rank_color(rank)))
    return Drawing("ring-traffic", _ring_title(data), _ring_description(data), style, figure)


def _place(rank: float, ranks: int, radius: float) -> tuple[float, float]:
    angle = 2 * math.pi * rank / ranks
    return SIDE / 2 + radius * math.sin(angle), SIDE / 2 - 0.15 + radius * math.cos(angle)


def _arrow(axes: Axes, data: RingTraffic, link: Link, style: Style) -> None:
    """An arc outside the circle for a neighbor, a straight line across for any other; a neighbor's has its bytes."""
    from matplotlib.patches import FancyArrowPatch

    source, destination = link
    neighbors = link in data.around
    width = max(1.2, THICKEST * data.links[link] / max(data.links.values()))
    bulge = math.tan(math.pi / 2 / data.ranks) if neighbors else 0.08  # of a neighbor's: along the circle
    axes.add_patch(FancyArrowPatch(
        _place(source, data.ranks, RADIUS), _place(destination, data.ranks, RADIUS), arrowstyle="-|>",
        connectionstyle=f"arc3,rad={-bulge}", mutation_scale=12 + 1.5 * width, linewidth=width,
        color=rank_color(source),
        shrinkA=NODE * 72, shrinkB=NODE * 72 + 2, alpha=1.0 if neighbors else 0.55, zorder=3 if neighbors else 2))
    if neighbors and data.ranks <= 16:
        x, y = _place(source + 0.5, data.ranks, RADIUS + 0.2)
        side = math.sin(2 * math.pi * (source + 0.5) / data.ranks)
        axes.text(x, y, bytes_text(data.links[link]), ha="left" if side > 0.1 else "right" if side < -0.1 else "center",
                  va="center", zorder=7)


# -- in words -----------------------------------------------------------------------------------------------------

def _ring_title(data: RingTraffic) -> str:
    return f"Who sent how much to whom: {counted(data.ranks, 'rank')}"


def _subtitle(data: RingTraffic) -> str:
    across = data.nbytes - sum(data.around.values())
    more = f", {bytes_text(across)} of them across" if across else ""
    return (f"{counted(data.collectives, 'collective')} and {counted(data.messages, 'message')} of the program's own: "
            f"{bytes_text(data.nbytes)} in all{more}.\nAn arrow has its sender's color; the wider, the more bytes.")


def _ring_description(data: RingTraffic) -> str:
    links = "; ".join(f"rank {a} to rank {b}: {nbytes:,} bytes"
                      for (a, b), nbytes in sorted(data.links.items()) if nbytes)
    return f"{_subtitle(data)} {links or 'Nothing was sent'}.".replace("\n", " ")


# -- One step of a run: the vectors of all ranks, chunk by chunk, and the messages of the step as arrows -------------
# Legend: N ranks of the group, n elements of the whole vector, chunk c belongs to rank c. Lengths are inches on paper.


MOST_STEP_RANKS, MOST_VALUES, MOST_WIDTH = 16, 3, 15.0
ROW, GAP, LEFT, STEP_TOP, BOTTOM, RIGHT = 0.36, 0.3, 1.75, 2.3, 0.3, 2.6
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
    if len(step.ranks) > MOST_STEP_RANKS:
        raise ValueError(f"a page holds {MOST_STEP_RANKS} ranks, found {len(step.ranks)}; look at step.ranks instead")
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
    return StepSheet(_step_title(step), _said(step), len(cut) - 1, tuple(rows), arrows)


def _step_title(step: Step) -> str:
    if step.call is None:
        return f"Step {step.number}: a message of the program's own"
    after = f"after hop {step.hop.step}" if step.hop is not None else "done"
    return f"Step {step.number}: {step.call.operation.replace('_', '-')}, {after}"


def _said(step: Step) -> str:
    return "" if step.call is None else (f"{step.call}, for {step.call.purpose}" if step.call.purpose != "unspecified"
                                         else str(step.call))


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


# -- the picture --------------------------------------------------------------------------------------------------

def step_sheet(data: StepSheet, style: Style = LIGHT) -> Drawing:
    """A row for each rank, its two arrays side by side; an arrow for the hop; bold frames around what moved."""
    texts = [chunk.text for row in data.rows for chunk in (*row.x, *row.out)]
    cell = max([0.62, *(LETTER * len(text) + 0.16 for text in texts)])
    if LEFT + 2 * max(1, data.chunks) * cell + RIGHT > MOST_WIDTH:
        cell = max(0.3, (MOST_WIDTH - LEFT - RIGHT) / 2 / max(1, data.chunks))
    half = max(1, data.chunks) * cell
    height = STEP_TOP + len(data.rows) * (ROW + GAP) + BOTTOM
    with style.figure(max(9.4, LEFT + 2 * half + 0.4 + RIGHT), height) as figure:
        sheet = StepPage(in_inches(figure), style, data, cell, half, height)
        sheet.words()
        for place, row in enumerate(data.rows):
            sheet.rank(place, row)
        for arrow in data.arrows:
            sheet.arrow(*arrow)
    return Drawing("step", data.title, _step_description(data), style, figure)


@dataclass(frozen=True, slots=True)
class StepPage:
    """The places of everything, and what it is drawn with."""

    axes: Axes
    style: Style
    data: StepSheet
    cell: float
    half: float
    height: float

    def y(self, place: int) -> float:
        """The lower edge of a rank's row."""
        return self.height - STEP_TOP - (place + 1) * (ROW + GAP) + GAP

    def text(self, x: float, y: float, words: str, **options: Any) -> None:
        """Words at a point."""
        self.axes.text(x, y, words, **({"va": "center"} | options))

    def words(self) -> None:
        """Title, the call, and the names of the columns."""
        self.text(0.2, self.height - 0.34, self.data.title, fontsize=17, fontweight="bold")
        self.text(0.2, self.height - 0.78, self.data.call, color=self.style.muted)
        self.text(0.2, self.height - 1.22, "Bold: the chunk that moved, on both its ends; beside the arrow, the "
                  f"values that arrived.\n{BLANK}  stands where nothing is written yet.", color=self.style.muted,
                  linespacing=1.4)
        for name, left in (("brought", LEFT), ("result", LEFT + self.half + 0.4)):
            if self.data.chunks:
                self.text(left, self.height - STEP_TOP + 0.5, name, fontsize=13, fontweight="bold")
            for chunk in range(self.data.chunks):
                self.text(left + (chunk + 0.5) * self.cell, self.height - STEP_TOP + 0.17, f"c{chunk}", ha="center",
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
        from matplotlib.patches import Rectangle

        empty = chunk.text == BLANK
        color = self.style.background if empty else rank_color(chunk.number)
        frame: dict[str, Any] = {"linewidth": 2.6, "edgecolor": self.style.ink, "zorder": 4} if chunk.moved else {
            "linewidth": 0.9, "edgecolor": self.style.muted, "zorder": 2}
        self.axes.add_patch(Rectangle((x, y), self.cell, ROW, facecolor=color, **frame))
        if len(chunk.text) * LETTER <= self.cell:
            self.text(x + self.cell / 2, y + ROW / 2 - 0.01, chunk.text, ha="center", fontsize=11, zorder=5,
                      color=self.style.ink if empty else ink_on(color),
                      fontweight="bold" if chunk.moved else "normal")

    def arrow(self, source: int, destination: int, words: str) -> None:
        """On the right of the rows, from the sender's to the receiver's, with its words."""
        x = LEFT + 2 * self.half + (0.5 if self.data.chunks else -1.2)
        ends = [(x, self.y(place) + ROW / 2) for place in (source, destination)]
        bend = 0.5 if destination > source else -0.5
        self.axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops={
            "arrowstyle": "-|>", "connectionstyle": f"arc3,rad={-bend / max(1, abs(source - destination))}",
            "linewidth": 2.4, "color": rank_color(source), "mutation_scale": 18, "shrinkA": 0, "shrinkB": 0})
        self.text(x + 0.5, (ends[0][1] + ends[1][1]) / 2, words, ha="left")


# -- in words -----------------------------------------------------------------------------------------------------

def _step_description(data: StepSheet) -> str:
    def said(chunks: Sequence[Chunk]) -> str:
        return ", ".join(f"c{chunk.number} {'not written yet' if chunk.text == BLANK else chunk.text}"
                         for chunk in chunks) or "nothing"

    moves = [f"rank {source} sends {' '.join(words.split())} to rank {destination}"
             for source, destination, words in data.arrows]
    rows = [f"rank {row.rank} brought {said(row.x)}, has {said(row.out)}, and holds {row.nbytes:,} bytes"
            for row in data.rows]
    return f"{data.call}: {counted(len(data.rows), 'rank')}. " + "; ".join([*moves, *rows]) + "."
