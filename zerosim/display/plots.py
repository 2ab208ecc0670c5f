"""The figures of things, by their class."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.course.figures.ledger import ledger, ledger_data, ledgers, ledgers_data
from zerosim.course.figures.ring_traffic import ring_traffic, ring_traffic_data
from zerosim.course.figures.step_sheet import step_sheet, step_sheet_data
from zerosim.course.figures.trace_order import trace_order, trace_order_data
from zerosim.display.drawing import DARK, LIGHT, Drawing, Style
from zerosim.display.objects import plan_drawing
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.inspect import Step
from zerosim.ranks.memory import Memories, Memory
from zerosim.ranks.trace import Trace, Traces

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PLOTS: Mapping[type, Callable[[Any, Style], Drawing]] = MappingProxyType({
    Memory: lambda memory, style: ledger(ledger_data(memory), style),
    Memories: lambda memories, style: ledgers(ledgers_data(memories), style),
    Trace: lambda trace, style: trace_order(trace_order_data([trace]), style),
    Traces: lambda traces, style: trace_order(trace_order_data(traces), style)})


def plot(thing: Any, *, dark: bool = False) -> "Figure":
    """The figure of a memory, a trace or a plan; ValueError where there is nothing to draw."""
    draw = next((PLOTS[kind] for kind in type(thing).__mro__ if kind in PLOTS), plan_drawing)
    return draw(thing, DARK if dark else LIGHT).shown()


def show_ring(cluster: Cluster, *, dark: bool = False) -> "Figure":
    """Who sent how much to whom in the last run; ValueError before the first."""
    if not cluster.runs:
        raise ValueError("this cluster has run nothing to its end yet, so its ring has carried nothing; "
                         "call run(program) first")
    size, here = cluster.ranks[0].size, len(cluster.ranks)
    if here < size and cluster.representative is None:
        raise ValueError(f"a ring of {size} ranks is drawn from all their traces, and this process has that of rank "
                         f"{cluster.ranks[0].index} alone; save() the run, and look at its report")
    data = ring_traffic_data(cluster.runs[-1].trace, size)
    return ring_traffic(data, DARK if dark else LIGHT).shown()


def draw_step(step: Step, *, dark: bool = False) -> "Axes":
    """One step of a run; ValueError for more ranks than a page holds."""
    axes: Axes = step_sheet(step_sheet_data(step), DARK if dark else LIGHT).shown().axes[0]
    return axes
