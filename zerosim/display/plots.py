"""The figures of things, by their class: of a memory, a trace, a plan, a run's ring, a step."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.display.drawing import DARK, LIGHT, Axes, Drawing, Style
from zerosim.display.memory_plots import ledger, ledger_data, ledgers, ledgers_data
from zerosim.display.plan_plot import plan_bars, plan_bars_data
from zerosim.display.ring_plot import ring_traffic, ring_traffic_data
from zerosim.display.step_plot import step_sheet, step_sheet_data
from zerosim.display.trace_plot import trace_order, trace_order_data
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
