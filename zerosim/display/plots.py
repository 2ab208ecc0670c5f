"""The figures of things, by their class: of a memory, a trace, a plan, a run's ring, a step. A plan's is drawn here.

A plan is an estimate: it is read as data, and nothing is run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.display.drawing import DARK, LIGHT, Axes, Drawing, Style
from zerosim.display.memory_plots import ledger, ledger_data, ledgers, ledgers_data
from zerosim.display.objects import PARTS, parts_of, row_name
from zerosim.display.step_plots import step_sheet, step_sheet_data
from zerosim.display.trace_plots import ring_traffic, ring_traffic_data, trace_order, trace_order_data
from zerosim.numerics.units import counted
from zerosim.planning.plan import Plan
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import Step
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.trace import Trace, Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


# -- what one rank would hold under each row of a plan, beside what its device has -------------------------------------

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
    with style.figure(11.0, 3.15 + 0.42 * len(data.bars), title, data.verdict) as figure:
        axes = figure.panel(left=1.85, right=1.7, top=1.25, bottom=1.6)
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
