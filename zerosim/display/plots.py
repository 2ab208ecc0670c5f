"""The figures of things, by their class: of a memory, a trace, a plan, a run's ring, a step. A plan's is drawn here.

A plan is an estimate: it is read as data, and nothing is run.
"""

from collections.abc import Callable, Mapping
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.display.drawing import DARK, LIGHT, Axes, Drawing, Style, filled, stack_bar
from zerosim.display.memory_plots import memories_bars, memory_curve, memory_curve_data
from zerosim.display.objects import PARTS, row_names
from zerosim.display.step_plots import step_sheet, step_sheet_data
from zerosim.display.style import STAGE_COLORS, STAGE_MARKS
from zerosim.display.trace_plots import ring_traffic, ring_traffic_data, trace_order, trace_order_data
from zerosim.numerics.units import counted
from zerosim.planning.configuration import Plan
from zerosim.planning.plan_row import TRANSIENT
from zerosim.planning.questions import OverRanks
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import Step
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.trace import Trace, Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS: Mapping[type, Callable[[Any, Style], Drawing]] = MappingProxyType({
    Memory: lambda memory, style: memory_curve(memory_curve_data(memory), style),
    Memories: memories_bars,
    Trace: lambda trace, style: trace_order(trace_order_data([trace]), style),
    Traces: lambda traces, style: trace_order(trace_order_data(traces), style),
    Plan: lambda plan, style: plan_bars(plan, style),
    OverRanks: lambda over, style: over_ranks_curves(over, style)})


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


# -- what one rank would hold under each row of a plan, beside what its device has -------------------------------------

# The parts of what a device must hold, by the names of a row's fields, in the order of the stack; hatched: in a step.
NAMES: Mapping[str, str] = MappingProxyType({"optimizer": "optimizer and masters", "overhead": "the runtime's own",
                                             "gathered": "gathered parameters"})


def plan_bars(plan: Plan, style: Style = LIGHT) -> Drawing:
    """One stacked bar for each row of a plan, and a line where the device is full."""
    config, capacity, rows = plan.config, plan.rows[0].capacity_nbytes, [row.parts for row in plan.rows]
    title = f"What one rank would hold: {config.model.name} on {counted(config.ranks, 'rank')} of {config.device.name}"
    parts = [part for part in PARTS if any(held[part] for held in rows)]
    with style.figure(11.0, 3.4 + 0.42 * len(rows), title, fill(plan.verdict, 110), below=0.8) as figure:
        axes = figure.panel(left=1.85, right=1.7, top=1.5, bottom=1.6)
        for place, (row, held) in enumerate(zip(plan.rows, rows, strict=True)):
            end = stack_bar(axes.barh, place, 0.72, {part: held[part] / 1e9 for part in parts},
                            lambda part: _look(part, style))
            axes.annotate(f"{end:,.1f}{'' if row.fits else ' (misses)'}", (end, place), (5, 0),
                          textcoords="offset points", va="center", fontweight="normal" if row.fits else "bold",
                          annotation_clip=False, bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.6})
        axes.axvline(capacity / 1e9, color=style.ink, linestyle="--", linewidth=1.4)
        axes.annotate(f"the device has {capacity / 1e9:,.1f}", (capacity / 1e9, 1), (0, 4), ha="center", va="bottom",
                      xycoords=axes.get_xaxis_transform(), textcoords="offset points")
        axes.set_yticks(range(len(rows)), row_names(plan))
        axes.set(ylim=(len(rows) - 0.45, -0.55), xlabel="held by one rank (GB)",
                 xlim=(0, max(capacity, *(row.total_nbytes for row in plan.rows)) / 1e9 * 1.02))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        figure.key({NAMES.get(part, part): _look(part, style) for part in parts}, ncols=4)
    said = "; ".join(f"{name} {row.total_nbytes / 1e9:,.2f} GB"
                     for name, row in zip(row_names(plan), plan.rows, strict=True))
    words = f"{plan.verdict} Stacked bars: {said}. The device has {capacity / 1e9:,.2f} GB."
    return Drawing("plan", title, words, style, figure)


def over_ranks_curves(over: OverRanks, style: Style = LIGHT) -> Drawing:
    """Two curves over N of the fastest row: tokens per second of one device, and bytes that it holds."""
    fitting = [(n, row) for n, row in zip(over.numbers, over.rows, strict=True) if row is not None]
    if not fitting:
        raise ValueError("nothing fits on any of these numbers of ranks, so there is nothing to draw; name larger ones")
    config, (numbers, rows) = over.plans[0].config, zip(*fitting, strict=True)
    title = f"{config.model.name} on {config.device.name}, over the number of ranks"
    said = "; ".join(f"N = {n:,}: {row.title}, {row.tokens_per_second_per_rank:,.0f} tokens/s, "
                     f"{row.total_nbytes / 1e9:,.1f} GB" for n, row in fitting)
    with style.figure(11.0, 4.6, title, "The fastest setting that fits on each number, with its stage.") as figure:
        panels = figure.panels(1, 2, left=0.9, right=0.3, top=1.2, bottom=0.8, wspace=0.24)[0]
        for axes, values, name in ((panels[0], [row.tokens_per_second_per_rank for row in rows],
                                    "tokens per second of one device"),
                                   (panels[1], [row.total_nbytes / 1e9 for row in rows], "held by one rank (GB)")):
            axes.plot(numbers, values, color=style.muted, linewidth=1.2)
            for n, row, value in zip(numbers, rows, values, strict=True):
                axes.plot([n], [value], marker=STAGE_MARKS[row.stage], color=STAGE_COLORS[row.stage], markersize=9)
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, [f"{n:,}" for n in numbers], rotation=45 * (len(numbers) > 8))
            axes.set(ylim=(0, max(values) * 1.15), xlabel="N, ranks", title=name)
            axes.grid()
        panels[1].axhline(rows[0].capacity_nbytes / 1e9, color=style.ink, linestyle="--", linewidth=1.2)
        panels[1].set_ylim(0, rows[0].capacity_nbytes / 1e9 * 1.1)
        for stage in sorted({row.stage for row in rows}):
            panels[0].plot([], [], marker=STAGE_MARKS[stage], color=STAGE_COLORS[stage], linestyle="", markersize=9,
                           label=f"ZeRO-{stage}")
        panels[0].legend(loc="lower left")
    return Drawing("over_ranks", title, said, style, figure)


def _look(part: str, style: Style) -> dict[str, Any]:
    return filled(PARTS[part], style, hatched=part in TRANSIENT)
