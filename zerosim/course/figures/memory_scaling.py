"""Memory that one rank holds at rest as N, P and the optimizer vary, under each of ZeRO's stages, as measured.

Legend: N ranks, P parameters. The runs have shapes and no data, so that a model of any size fits on a laptop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.course.measured import measured_step
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, log_log
from zerosim.display.style import STAGE_COLORS, STAGE_MARKS
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.optim.elementwise import SGD, Adam, Lion
from zerosim.zero.placements import STAGES

TITLE = "What one rank holds at rest, as N, P and the optimizer vary"
OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = MappingProxyType({
    "SGD": lambda: SGD(lr=0.1), "Lion": Lion, "Adam": Adam})
LAYERS = 8
DEVICE_GIGABYTES = 80


@dataclass(frozen=True, slots=True)
class ScalingPanel:
    """The thing that varies: its values as shown, and [stage][value] bytes at rest on one rank."""

    what: str
    fixed: str
    values: tuple[float, ...]
    names: tuple[str, ...]
    resting_nbytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MemoryScaling:
    """Three panels: against N, against P, by optimizer."""

    model: str
    panels: tuple[ScalingPanel, ScalingPanel, ScalingPanel]


def widths_of(parameters: float) -> tuple[int, ...]:
    """The widths of an MLP of 8 equal layers with about so many parameters: 8w² + 8w."""
    return (round((math.sqrt(1 + parameters / 2) - 1) / 2),) * (LAYERS + 1)


def memory_scaling_data(parameters: float = 7.5e9, ranks: int = 64, worlds: Sequence[int] = (1, 4, 16, 64, 256, 1024),
                        sizes: Sequence[float] = (1e8, 1e9, 1e10, 1e11, 1e12)) -> MemoryScaling:
    """Measures one step for each point: three panels of every stage."""
    def at_rest(count: float, n: int, optimizer: Callable[[], Optimizer]) -> list[int]:
        steps = (measured_step(widths_of(count), optimizer(), ranks=n, stage=stage, policy=Policy("fp16"),
                               with_data=False) for stage in STAGES)
        return [sum(step.resting_nbytes[0].values()) for step in steps]

    def by_stage(columns: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*columns, strict=True))

    model = f"an MLP of {LAYERS} layers in fp16"
    billions = f"{parameters / 1e9:g}·10⁹ parameters"
    return MemoryScaling(model, (
        ScalingPanel("N (ranks)", f"{billions}, Adam", tuple(worlds), tuple(map(str, worlds)),
                     by_stage([at_rest(parameters, n, Adam) for n in worlds])),
        ScalingPanel("P (parameters)", f"N = {ranks}, Adam", tuple(sizes), tuple(
            "10" + f"{math.log10(size):.0f}".translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")) for size in sizes),
                     by_stage([at_rest(size, ranks, Adam) for size in sizes])),
        ScalingPanel("optimizer (name)", f"{billions}, N = {ranks}", tuple(range(len(OPTIMIZERS))), tuple(OPTIMIZERS),
                     by_stage([at_rest(parameters, ranks, make) for make in OPTIMIZERS.values()]))))


def memory_scaling(data: MemoryScaling, style: Style = LIGHT) -> Drawing:
    """Two panels of lines on logarithmic scales, and one of bars."""
    words = (f"Measured: {data.model}, parameters, gradients and optimizer state. Dashed: a device of "
             f"{DEVICE_GIGABYTES} GB.")
    with style.figure(14.5, 6.2, TITLE, words) as figure:
        (panels,) = figure.panels(1, 3, left=1.05, right=0.2, top=1.65, bottom=1.3, wspace=0.3)
        for axes, panel in zip(panels[:2], data.panels[:2], strict=True):
            _lines(axes, panel, style)
        _grouped(panels[2], data.panels[2], style)
        for axes, panel in zip(panels, data.panels, strict=True):
            axes.set_title(panel.fixed, fontsize=13)
            axes.set(xlabel=panel.what, ylabel="held at rest by one rank (GB)")
            axes.grid(axis="y")
        figure.legend(*panels[0].get_legend_handles_labels(), ncols=4)
    return Drawing("memory-scaling", TITLE, _description(data), style, figure)


def _lines(axes: Axes, panel: ScalingPanel, style: Style) -> None:
    for stage, column in enumerate(panel.resting_nbytes):
        axes.plot(panel.values, [nbytes / 1e9 for nbytes in column], color=STAGE_COLORS[stage],
                  marker=STAGE_MARKS[stage], markersize=7, linewidth=2.2, label=f"stage {stage}")
    axes.axhline(DEVICE_GIGABYTES, color=style.ink, linestyle="--", linewidth=1.1, zorder=1)
    log_log(axes, panel.values, panel.names)


def _grouped(axes: Axes, panel: ScalingPanel, style: Style) -> None:
    for stage, column in enumerate(panel.resting_nbytes):
        for place, nbytes in enumerate(column):
            x = place + (stage - 1.5) * 0.21
            axes.bar(x, nbytes / 1e9, 0.19, color=STAGE_COLORS[stage])
    axes.axhline(DEVICE_GIGABYTES, color=style.ink, linestyle="--", linewidth=1.1, zorder=1)
    axes.set_xticks(range(len(panel.names)), panel.names)
    axes.tick_params(axis="x", length=0)


def _description(data: MemoryScaling) -> str:
    said = []
    for panel in data.panels:
        rows = "; ".join(f"stage {stage}: " + ", ".join(f"{nbytes / 1e9:.3g} at {name}" for name, nbytes in zip(
            panel.names, column, strict=True)) for stage, column in enumerate(panel.resting_nbytes))
        said.append(f"By {panel.what}, with {panel.fixed}, in GB: {rows}.")
    return f"What one rank holds at rest, measured on {data.model}. " + " ".join(said)
