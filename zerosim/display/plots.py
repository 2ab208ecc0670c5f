"""Figures of memory and plans: one rank over a run, change by change; all ranks now and at most; a plan's rows.

Legend: N ranks, H changes of a ledger.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.display.colors import KIND_COLORS, PHASE_COLORS
from zerosim.display.drawing import DARK, LIGHT, Axes, Drawing, Style, heading, look, scale_of, within_limits
from zerosim.display.objects import PARTS, parts_of, row_name
from zerosim.display.traffic_plots import (
    ring_traffic,
    ring_traffic_data,
    step_sheet,
    step_sheet_data,
    trace_order,
    trace_order_data,
)
from zerosim.numerics.units import counted
from zerosim.planning.plan import Plan
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import Step
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.trace import Held, Row, SpanBegin, SpanEnd, Trace, Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class LedgerData:
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


@dataclass(frozen=True, slots=True)
class LedgersData:
    """Bytes by kind of each rank, now and at its fullest."""

    owners: tuple[str, ...]
    now: tuple[Mapping[str, int], ...]
    peak: tuple[Mapping[str, int], ...]
    capacity_nbytes: int | None


def ledger_data(memory: Memory) -> LedgerData:
    """Reads the trace of the memory's last run; ValueError where nothing was held in it."""
    held = dict(memory.trace.held_at_start)
    kinds = [kind for kind in KIND_COLORS if kind in held or any(
        isinstance(row, Held) and row.kind == kind for row in memory.trace.rows)]
    if not kinds:
        raise ValueError(f"{memory.owner} held nothing in its last run, so there is nothing to draw")
    columns = {kind: [held.get(kind, 0)] for kind in kinds}
    for row in memory.trace.rows:
        if isinstance(row, Held):
            for kind, column in columns.items():
                column.append(column[-1] + row.nbytes * (kind == row.kind))
    return LedgerData(memory.owner, {kind: tuple(column) for kind, column in columns.items()}, memory.capacity_nbytes,
                      tuple(_phases(memory.trace.rows)))


def _phases(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """The stretches of one phase, by the changes of the ledger in them, up to where another phase begins."""
    found, changes = list[tuple[str, int, int]](), 0
    for row in rows:
        changes += isinstance(row, Held)
        if isinstance(row, SpanBegin | SpanEnd) and (name := row.path[-1]) in PHASE_COLORS:
            if found and found[-1][0] == name:
                found[-1] = (name, found[-1][1], changes)
            else:
                found.append((name, changes, changes))
    return [stretch for stretch in found if stretch[2] > stretch[1]]


def ledgers_data(memories: Sequence[Memory]) -> LedgersData:
    """Reads the ledgers of at most 16 ranks, the first ones; ValueError where none ever held anything."""
    shown = memories[:MOST_RANKS]
    if not any(memory.peak_nbytes for memory in shown):
        raise ValueError("no rank has held anything yet, so there is nothing to draw; run a program first")
    limits = {memory.capacity_nbytes for memory in shown}
    return LedgersData(tuple(memory.owner for memory in shown), tuple(memory.now_nbytes_by_kind for memory in shown),
                       tuple(memory.peak_nbytes_by_kind for memory in shown),
                       limits.pop() if len(limits) == 1 else None)


# -- the pictures -------------------------------------------------------------------------------------------------

def ledger(data: LedgerData, style: Style = LIGHT) -> Drawing:
    """Stacked areas by kind, from each change of the ledger to the next."""
    title = f"What {data.owner} held in the last run"
    peak, final = max(data.totals), data.totals[-1]
    with _page(style, title, f"At most {peak:,} bytes, {final:,} at the end. Hatched: kinds that live only during a "
               "step.", list(data.nbytes)) as (figure, axes):
        unit, name = scale_of(max(peak, 1))
        low, changes = [0.0] * len(data.totals), range(len(data.totals))
        for kind, column in data.nbytes.items():
            high = [a + nbytes / unit for a, nbytes in zip(low, column, strict=True)]
            axes.fill_between(changes, low, high, step="post", **look(kind, style))
            low = high
        _capacity(axes, data.capacity_nbytes, peak, unit, style)
        axes.set_xlim(0, max(1, len(low) - 1))
        axes.set_ylim(0, None)
        _strip(axes, data.phases, style)
        within_limits(axes)
        axes.set_xlabel("changes of the ledger, in the program's order (changes)")
        axes.set_ylabel(f"held ({name})")
        axes.grid(axis="y")
    kinds = "; ".join(f"{kind.replace('_', ' ')} at most {max(column):,}" for kind, column in data.nbytes.items())
    return Drawing("ledger", title, f"Stacked areas of bytes by kind over {len(low) - 1:,} changes of the ledger: at "
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


def ledgers(data: LedgersData, style: Style = LIGHT) -> Drawing:
    """Two stacked bars for each rank: now, and at its fullest instant."""
    title, ranks = "What the ranks hold now, and held at their fullest", len(data.owners)
    kinds = [kind for kind in KIND_COLORS if any(held.get(kind) for held in (*data.now, *data.peak))]
    peak = max(sum(held.values()) for held in data.peak)
    with _page(style, title, "Left bar of each rank: now; right bar: at its fullest instant.", kinds) as (figure, axes):
        unit, name = scale_of(peak)
        for rank, (now, full) in enumerate(zip(data.now, data.peak, strict=True)):
            for x, held in ((rank - 0.2, now), (rank + 0.2, full)):
                low = 0.0
                for kind in kinds:
                    axes.bar(x, held.get(kind, 0) / unit, 0.36, bottom=low, **look(kind, style))
                    low += held.get(kind, 0) / unit
        _capacity(axes, data.capacity_nbytes, peak, unit, style)
        axes.set_xticks(range(ranks), [owner.removeprefix("rank ") for owner in data.owners])
        axes.set_xlim(-0.6, max(ranks, 3) - 0.4)
        axes.set_ylim(0, axes.get_ylim()[1])
        within_limits(axes)
        axes.set_xlabel("rank (its number)")
        axes.set_ylabel(f"held ({name})")
        axes.grid(axis="y")
    said = "; ".join(f"{owner} {sum(now.values()):,} now and {sum(full.values()):,} at its fullest" for owner, now, full
                     in zip(data.owners, data.now, data.peak, strict=True))
    return Drawing("ledgers", title, f"Stacked bars of bytes by kind: {said}.", style, figure)


@contextmanager
def _page(style: Style, title: str, subtitle: str, kinds: Sequence[str]) -> Iterator[tuple[Any, Axes]]:
    """A figure with its heading and a legend of kinds, and axes between them."""
    from matplotlib.patches import Patch

    width, rows = 9.6, -(-len(kinds) // 4)
    height = 5.3 + 0.27 * rows
    with style.figure(width, height) as figure:
        axes = figure.add_axes((0.95 / width, (0.85 + 0.27 * rows) / height, 1 - 1.25 / width,
                                1 - (2.05 + 0.27 * rows) / height))
        heading(figure, title, subtitle, style, below=0.76)
        figure.legend([Patch(**look(kind, style)) for kind in kinds], [kind.replace("_", " ") for kind in kinds],
                      loc="lower center", ncols=4, columnspacing=1.6)
        yield figure, axes


def _capacity(axes: Axes, capacity_nbytes: int | None, peak: int, unit: float, style: Style) -> None:
    """A dashed line at the capacity, where it is in sight of what was held."""
    if capacity_nbytes is not None and capacity_nbytes <= 2 * peak:
        axes.axhline(capacity_nbytes / unit, color=style.ink, linestyle="--", linewidth=1.2)
        axes.annotate("capacity", (1, capacity_nbytes / unit), (-4, 4), xycoords=axes.get_yaxis_transform(),
                      textcoords="offset points", ha="right")


# -- What one rank would hold under each row of a plan, beside what its device has -----------------------------------
# A plan is an estimate: it is read here as data, and nothing is run.


# The parts of what a device must hold, by the names of a row's fields, in the order of the stack; hatched: in a step.
NAMES: Mapping[str, str] = MappingProxyType({"optimizer": "optimizer and masters", "overhead": "the runtime's own",
                                             "transient": "what comes and goes, at the step's fullest moment"})
HATCHED = ("transient",)


@dataclass(frozen=True, slots=True)
class PlanBars:
    """Bytes by part of each row, by its name, what the device has, and the verdict."""

    model: str
    verdict: str
    bars: Mapping[str, Mapping[str, int]]
    capacity_nbytes: int

    @property
    def parts(self) -> list[str]:
        """The parts of which any row has anything."""
        return [part for part in PARTS if any(held[part] for held in self.bars.values())]


def plan_bars_data(plan: Plan) -> PlanBars:
    """Reads a plan's rows."""
    config = plan.config
    what = f"{config.model.name} on {counted(config.ranks, 'rank')} of {config.device.name}"
    return PlanBars(what, plan.verdict, {row_name(row): parts_of(row) for row in plan.rows},
                    plan.rows[0].capacity_nbytes)


def plan_bars(data: PlanBars, style: Style = LIGHT) -> Drawing:
    """One stacked bar for each row, and a line where the device is full."""
    title = f"What one rank would hold: {data.model}"
    width, height = 11.0, 3.15 + 0.42 * len(data.bars)
    with style.figure(width, height) as figure:
        axes = figure.add_axes((1.85 / width, 1.6 / height, 1 - 3.55 / width, 1 - 2.85 / height))
        widest = max(data.capacity_nbytes, *(sum(held.values()) for held in data.bars.values())) / 1e9
        for place, held in enumerate(data.bars.values()):
            low = 0.0
            for part in data.parts:
                axes.barh(place, held[part] / 1e9, 0.72, low, **_look(part, style))
                low += held[part] / 1e9
            fits = sum(held.values()) <= data.capacity_nbytes
            axes.annotate(f"{low:,.1f}{'' if fits else ' (misses)'}", (low, place), (5, 0), textcoords="offset points",
                          va="center", fontweight="normal" if fits else "bold", annotation_clip=False,
                          bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.6})
        axes.axvline(data.capacity_nbytes / 1e9, color=style.ink, linestyle="--", linewidth=1.4)
        axes.annotate(f"the device has {data.capacity_nbytes / 1e9:,.1f}", (data.capacity_nbytes / 1e9, 1), (0, 4),
                      xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="bottom")
        axes.set_yticks(range(len(data.bars)), list(data.bars))
        axes.set_ylim(len(data.bars) - 0.45, -0.55)
        axes.set_xlim(0, widest * 1.02)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("held by one rank (GB)")
        heading(figure, title, data.verdict, style)
        figure.legend(*_legend(data, style), loc="lower center", ncols=4, columnspacing=1.6)
    said = "; ".join(f"{name} {sum(held.values()) / 1e9:,.2f} GB" for name, held in data.bars.items())
    return Drawing("plan", title, f"{data.verdict} Stacked bars: {said}. The device has "
                   f"{data.capacity_nbytes / 1e9:,.2f} GB.", style, figure)


def _look(part: str, style: Style) -> dict[str, Any]:
    hatch = "////" if part in HATCHED else ""
    return {"facecolor": PARTS[part], "edgecolor": style.background, "linewidth": 0.0, "hatch": hatch}


def _legend(data: PlanBars, style: Style) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    return [Patch(**_look(part, style)) for part in data.parts], [NAMES.get(part, part) for part in data.parts]


# -- The figures of things, by their class ---------------------------------------------------------------------------

PLOTS: Mapping[type, Callable[[Any, Style], Drawing]] = MappingProxyType({
    Memory: lambda memory, style: ledger(ledger_data(memory), style),
    Memories: lambda memories, style: ledgers(ledgers_data(memories), style),
    Trace: lambda trace, style: trace_order(trace_order_data([trace]), style),
    Traces: lambda traces, style: trace_order(trace_order_data(traces), style),
    Plan: lambda plan, style: plan_bars(plan_bars_data(plan), style)})


def plot(thing: Any, *, dark: bool = False) -> "Figure":
    """The figure of a memory, a trace or a plan; ValueError where there is nothing to draw."""
    draw = next(PLOTS[kind] for kind in type(thing).__mro__ if kind in PLOTS)
    return draw(thing, DARK if dark else LIGHT).shown()


def show_ring(cluster: Cluster, *, dark: bool = False) -> "Figure":
    """The ring of the last run: who sent how much to whom; ValueError before the first."""
    if not cluster.runs:
        raise ValueError("this cluster has run nothing to its end yet, so its ring has carried nothing; "
                         "call run(program) first")
    size, here = cluster.ranks[0].size, len(cluster.ranks)
    if here < size and cluster.representative is None:
        raise ValueError(f"a ring of {size} ranks is drawn from all their traces, and this process has that of rank "
                         f"{cluster.ranks[0].index} alone; save() the run, and look at its report")
    data = ring_traffic_data(cluster.runs[-1].trace, size)
    return ring_traffic(data, DARK if dark else LIGHT).shown()


def draw_step(step: Step, *, dark: bool = False) -> Axes:
    """One step of a run; ValueError for more ranks than a page holds."""
    axes: Axes = step_sheet(step_sheet_data(step), DARK if dark else LIGHT).shown().axes[0]
    return axes
