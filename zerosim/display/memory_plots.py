"""Figures of memory: one rank over a run, change by change; all ranks now and at most.

Legend: H changes of what a rank holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, look, scale_of, stack, stack_bar, within_limits
from zerosim.display.style import KIND_COLORS, PHASE_COLORS
from zerosim.display.views import words
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import Held, Row, SpanBegin, SpanEnd

MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class MemoryOverRun:
    """Memory of one rank: (H + 1,) bytes of each kind, before the run's first change and after each.

    ``phases`` are (name, from, to) of the program's forward, backward and the like, in changes.
    """

    owner: str
    nbytes: Mapping[str, tuple[int, ...]]
    capacity_nbytes: int | None
    phases: tuple[tuple[str, int, int], ...] = ()

    @property
    def totals(self) -> list[int]:
        """Of all kinds together, (H + 1,)."""
        return list(map(sum, zip(*self.nbytes.values(), strict=True)))


def memory_curve_data(memory: Memory) -> MemoryOverRun:
    """Reads the trace of the memory's last run; ValueError where nothing was held in it."""
    held = dict(memory.trace.held_at_start)
    kinds = [kind for kind in KIND_COLORS if kind in held or any(
        isinstance(row, Held) and row.kind == kind for row in memory.trace.all_rows())]
    if not kinds:
        raise ValueError(f"{memory.owner} held nothing in its last run, so there is nothing to draw")
    columns = {kind: [held.get(kind, 0)] for kind in kinds}
    for row in memory.trace.all_rows():
        if isinstance(row, Held):
            for kind, column in columns.items():
                column.append(column[-1] + row.nbytes * (kind == row.kind))
    return MemoryOverRun(memory.owner, {kind: tuple(column) for kind, column in columns.items()},
                         memory.capacity_nbytes, tuple(_phases(memory.trace.all_rows())))


def _phases(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """The stretches of one phase, by the changes in them, up to where another begins."""
    found, changes = list[tuple[str, int, int]](), 0
    for row in rows:
        changes += isinstance(row, Held)
        if isinstance(row, SpanBegin | SpanEnd) and (name := row.path[-1]) in PHASE_COLORS:
            if found and found[-1][0] == name:
                found[-1] = (name, found[-1][1], changes)
            else:
                found.append((name, changes, changes))
    return [stretch for stretch in found if stretch[2] > stretch[1]]


def memory_curve(data: MemoryOverRun, style: Style = LIGHT) -> Drawing:
    """Stacked areas by kind, from each change to the next."""
    title = f"What {data.owner} held in the last run"
    peak, final = max(data.totals), data.totals[-1]
    with _page(style, title, f"At most {peak:,} bytes, {final:,} at the end. Hatched: kinds that live only during a "
               "step.", list(data.nbytes)) as (figure, axes):
        unit, name = scale_of(max(peak, 1))
        changes = len(data.totals) - 1
        stack(axes, range(changes + 1), {kind: [nbytes / unit for nbytes in column]
                                         for kind, column in data.nbytes.items()}, lambda kind: look(kind, style))
        _capacity(axes, data.capacity_nbytes, peak, unit, style)
        axes.set(xlim=(0, max(1, changes)), ylim=(0, None), ylabel=f"held ({name})",
                 xlabel="changes of what is held, in the program's order (changes)")
        _strip(axes, data.phases, style)
        within_limits(axes)
    kinds = "; ".join(f"{words(kind)} at most {max(column):,}" for kind, column in data.nbytes.items())
    return Drawing("memory", title, f"Stacked areas of bytes by kind over {changes:,} changes of what is held: at "
                   f"most {peak:,} bytes together, {final:,} at the end. By kind: {kinds}.", style, figure)


def _strip(axes: Axes, phases: Sequence[tuple[str, int, int]], style: Style) -> None:
    """A strip of the program's phases above the areas, each named where its name has room."""
    if phases:
        (left, right), top = axes.get_xlim(), axes.get_ylim()[1]
        points = 72 / axes.figure.dpi * axes.bbox.width / (right - left)  # of one change
        for name, start, end in phases:
            axes.broken_barh([(start, end - start)], (1.02 * top, 0.07 * top), facecolor=style.faint,
                             edgecolor=style.background)
            if (end - start) * points > 7.5 * len(name):
                axes.text((start + end) / 2, 1.05 * top, name, ha="center", va="center", fontsize=11)
        axes.set_ylim(0, 1.1 * top)


def memories_bars(memories: Sequence[Memory], style: Style = LIGHT) -> Drawing:
    """Two stacked bars for each rank, of many the first ones: now, and at its fullest instant.

    Raises ValueError where none ever held anything.
    """
    shown = memories[:MOST_RANKS]
    peak = max(memory.peak_nbytes for memory in shown)
    if not peak:
        raise ValueError("no rank has held anything yet, so there is nothing to draw; run a program first")
    columns = [(memory.now_nbytes_by_kind, memory.peak_nbytes_by_kind) for memory in shown]
    kinds = [kind for kind in KIND_COLORS if any(held.get(kind) for both in columns for held in both)]
    limits, title = {memory.capacity_nbytes for memory in shown}, "What the ranks hold now, and held at their fullest"
    with _page(style, title, "Left bar of each rank: now; right bar: at its fullest instant.", kinds) as (figure, axes):
        unit, name = scale_of(peak)
        for rank, both in enumerate(columns):
            for x, held in zip((rank - 0.2, rank + 0.2), both, strict=True):
                stack_bar(axes.bar, x, 0.36, {kind: held.get(kind, 0) / unit for kind in kinds},
                          lambda kind: look(kind, style))
        _capacity(axes, limits.pop() if len(limits) == 1 else None, peak, unit, style)
        axes.set_xticks(range(len(shown)), [memory.owner.removeprefix("rank ") for memory in shown])
        axes.set(xlim=(-0.6, max(len(shown), 3) - 0.4), ylim=(0, axes.get_ylim()[1]), xlabel="rank (its number)",
                 ylabel=f"held ({name})")
        within_limits(axes)
    said = "; ".join(f"{memory.owner} {memory.now_nbytes:,} now and {memory.peak_nbytes:,} at its fullest"
                     for memory in shown)
    return Drawing("memories", title, f"Stacked bars of bytes by kind: {said}.", style, figure)


@contextmanager
def _page(style: Style, title: str, subtitle: str, kinds: Sequence[str]) -> Iterator[tuple[Any, Axes]]:
    """A figure with its heading and a legend of kinds, and axes between them."""
    width, legend = 9.6, 0.27 * -(-len(kinds) // 4)
    height = 5.3 + legend
    with style.figure(width, height, title, subtitle, below=0.76) as figure:
        axes = figure.add_axes((0.95 / width, (0.85 + legend) / height, 1 - 1.25 / width, 1 - (2.05 + legend) / height))
        axes.grid(axis="y")
        figure.key({words(kind): look(kind, style) for kind in kinds}, ncols=4)
        yield figure, axes


def _capacity(axes: Axes, capacity_nbytes: int | None, peak: int, unit: float, style: Style) -> None:
    """A dashed line at the capacity, where it is in sight of what was held."""
    if capacity_nbytes is not None and capacity_nbytes <= 2 * peak:
        axes.axhline(capacity_nbytes / unit, color=style.ink, linestyle="--", linewidth=1.2)
        axes.annotate("capacity", (1, capacity_nbytes / unit), (-4, 4), xycoords=axes.get_yaxis_transform(),
                      textcoords="offset points", ha="right")
