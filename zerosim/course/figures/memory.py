"""Memory of one rank under each of ZeRO's stages: at rest and at the fullest instant of a step, read from its ledger.

Legend: N ranks, P parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.course.measured import MeasuredStep, measured_bytes, measured_step
from zerosim.display.colors import BLUE, GREEN, KIND_COLORS, ORANGE, VERMILLION
from zerosim.display.drawing import LIGHT, Drawing, Style, heading, look
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.optim.elementwise import SGD, Adam, Lion
from zerosim.zero.placements import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Bytes = Mapping[str, float]  # kind -> bytes per parameter


@dataclass(frozen=True, slots=True)
class Bars:
    """One stage on N ranks, in bytes per parameter of the fullest rank, by kind; ``formula`` is the closed form's."""

    stage: int
    ranks: int
    resting: Bytes
    peak: Bytes
    formula: str
    formula_value: float


@dataclass(frozen=True, slots=True)
class MemoryData:
    """All stages for every N, of one model that was trained for a step."""

    model: str
    parameter_count: int
    bars: tuple[Bars, ...]

    @property
    def worlds(self) -> list[int]:
        """The N that were run, in order."""
        return list(dict.fromkeys(bars.ranks for bars in self.bars))

    @property
    def kinds(self) -> list[str]:
        """The kinds of which anything is held, in the order of the stack."""
        return [kind for kind in KIND_COLORS if any(b.resting.get(kind) or b.peak.get(kind) for b in self.bars)]

    def of_world(self, ranks: int) -> list[Bars]:
        """The stages on N ranks."""
        return [bars for bars in self.bars if bars.ranks == ranks]


def memory_data(worlds: Sequence[int] = (4, 16), widths: Sequence[int] = (64,) * 9, rows: int = 8,
                compute: str = "fp16") -> MemoryData:
    """Trains an MLP with Adam for one step, on every N and under every stage, and reads the ledgers."""
    steps = [measured_step(widths, Adam(), ranks=ranks, stage=stage, policy=Policy(compute), rows=rows)
             for ranks in worlds for stage in STAGES]
    return MemoryData(f"an MLP of {len(widths) - 1} layers in {compute} with Adam, {rows} samples per rank",
                      steps[0].parameter_count, tuple(map(_bars, steps)))


def _bars(step: MeasuredStep) -> Bars:
    resting, peak = (_per_parameter(max(per_rank, key=lambda held: sum(held.values())), step.parameter_count)
                     for per_rank in (step.resting_nbytes, step.peak_nbytes))
    return Bars(step.stage, step.ranks, resting, peak, step.formula, float(step.formula_nbytes))


def _per_parameter(nbytes: Mapping[str, int], parameter_count: int) -> Bytes:
    return MappingProxyType({kind: held / parameter_count for kind, held in nbytes.items()})


# -- the picture --------------------------------------------------------------------------------------------------

MEMORY_TITLE = "What one rank holds under ZeRO's stages"
BAR_WIDTH, BAR_OFFSET = 0.38, 0.21
MARKER: Mapping[str, Any] = MappingProxyType({"marker": ">", "markersize": 8, "linestyle": "", "clip_on": False})


def memory(data: MemoryData, style: Style = LIGHT) -> Drawing:
    """Stacked bars by kind: per stage one at rest, with the formula's value beside it, and one at the peak."""
    with style.in_force():
        width, height = max(9.2, 5.6 * len(data.worlds) + 0.9), 7.6
        figure = style.figure(width, height)
        figure.subplots_adjust(left=0.85 / width, right=1 - 0.2 / width, top=1 - 1.6 / height, bottom=2.4 / height,
                               wspace=0.06)
        panels = figure.subplots(1, len(data.worlds), sharey=True, squeeze=False)[0]
        for axes, ranks in zip(panels, data.worlds, strict=True):
            _panel(axes, data, ranks, style)
        panels[0].set_ylabel("held by one rank (bytes per parameter)")
        heading(figure, MEMORY_TITLE, f"Measured: {data.model}; {data.parameter_count:,} parameters.\n"
                "Hatched: held only during a step.", style, below=0.84)
        figure.legend(*_legend(data, style), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.0), columnspacing=1.6)
    return Drawing("memory", MEMORY_TITLE, _memory_description(data), style, figure)


def _panel(axes: "Axes", data: MemoryData, ranks: int, style: Style) -> None:
    """The stages on N ranks."""
    bars = data.of_world(ranks)
    for place, stage in enumerate(bars):
        for offset, held in ((-BAR_OFFSET, stage.resting), (BAR_OFFSET, stage.peak)):
            total = _stack(axes, place + offset, held, data.kinds, style)
            axes.annotate(f"{total:.3g}", (place + offset, total), (0, 4), textcoords="offset points", ha="center",
                          bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.8})
        axes.plot(place - BAR_OFFSET - 0.26, stage.formula_value, color=style.ink, **MARKER)
        axes.text(place, -0.085, f"stage {stage.stage}\n{stage.formula}", transform=axes.get_xaxis_transform(),
                  ha="center", va="top", linespacing=1.4)
    axes.set_title(f"N = {_ranks(ranks)}", fontweight="bold")
    axes.set_ylim(0, 1.08 * max(sum(held.values()) for b in data.bars for held in (b.resting, b.peak)))
    axes.set_xlim(-0.62, len(bars) - 0.4)
    axes.grid(axis="y")
    axes.set_xticks([place + offset for place in range(len(bars)) for offset in (-BAR_OFFSET, BAR_OFFSET)],
                    ["rest", "peak"] * len(bars))
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("ZeRO stage and its formula (bytes per parameter)", labelpad=56)


def _stack(axes: "Axes", x: float, held: Bytes, kinds: Sequence[str], style: Style) -> float:
    """One bar of kinds, from the bottom up; returns its height."""
    low = 0.0
    for kind in kinds:
        if held.get(kind):
            axes.bar(x, held[kind], BAR_WIDTH, bottom=low, **look(kind, style, 0.6))
            low += held[kind]
    return low


def _legend(data: MemoryData, style: Style) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marker = Line2D([], [], color=style.ink, **MARKER)
    return ([Patch(**look(kind, style, 0.6)) for kind in data.kinds] + [marker],
            [kind.replace("_", " ") for kind in data.kinds] + ["formula for what rests"])


# -- in words -----------------------------------------------------------------------------------------------------

def _memory_description(data: MemoryData) -> str:
    """Every bar's height, and the parts of the stage that shards most."""
    sentences = [f"Stacked bars in bytes per parameter, measured on {data.model}, {data.parameter_count:,} parameters."]
    for ranks in data.worlds:
        bars = [f"stage {b.stage} rests at {sum(b.resting.values()):.3g} (by formula {b.formula}) and "
                f"peaks at {sum(b.peak.values()):.3g}" for b in data.of_world(ranks)]
        sentences.append(f"On {_ranks(ranks)}: {'; '.join(bars)}.")
    last = data.bars[-1]
    parts = ", ".join(f"{kind.replace('_', ' ')} {last.peak[kind]:.3g}" for kind in data.kinds if last.peak.get(kind))
    sentences.append(f"At its peak on {_ranks(last.ranks)} stage {last.stage} holds {parts}.")
    return " ".join(sentences)


def _ranks(count: int) -> str:
    """1 rank, 4 ranks."""
    return f"{count} rank" + "s" * (count != 1)


# -- What one rank sends in a step under each of ZeRO's stages, against the number of ranks: read from traces --------
# Legend: N ranks, P parameters, Ψ = 2P bytes, a vector of all parameters or gradients in 16 bit.


STAGE_COLORS = (ORANGE, BLUE, GREEN, VERMILLION)
STAGE_MARKS = ("o", "s", "^", "D")
SIZES = (13, 9, 5, 8)  # of the marks: the first three lie on each other


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per parameter that one rank sends in a step, of parameters and gradients: [stage][place in worlds]."""

    model: str
    parameter_count: int
    worlds: tuple[int, ...]
    sent: tuple[tuple[float, ...], ...]


def traffic_data(worlds: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128), widths: Sequence[int] = (1024,) * 9) -> Traffic:
    """Runs one step of an MLP with Adam in bf16 without data, under every stage on every N, and reads what was sent.

    The widths are multiples of every N, so that nothing is padded but the borders of units.
    """
    rows = [[measured_bytes(widths, Adam(), ranks=ranks, stage=stage, policy=Policy("bf16")) for ranks in worlds]
            for stage in STAGES]
    count = rows[0][0].parameter_count
    return Traffic(f"an MLP of {len(widths) - 1} layers in bf16 with Adam", count, tuple(worlds), tuple(tuple(
        (one.sent_nbytes["gradients"] + one.sent_nbytes["parameters"]) / count for one in row) for row in rows))


TRAFFIC_TITLE = "What one rank sends in a step, against the number of ranks"


def traffic(data: Traffic, style: Style = LIGHT) -> Drawing:
    """One line for each stage; dotted, the limits 2Ψ and 3Ψ of many ranks."""
    with style.in_force():
        width, height = 10.0, 6.4
        figure = style.figure(width, height)
        axes = figure.add_axes((1.1 / width, 1.45 / height, 1 - 1.9 / width, 1 - 2.75 / height))
        for stage, sent in enumerate(data.sent):
            axes.plot(data.worlds, sent, color=STAGE_COLORS[stage], marker=STAGE_MARKS[stage], markersize=SIZES[stage],
                      linewidth=(7, 4, 1.6, 2.2)[stage], label=f"stage {stage}")
        for vectors in (2, 3):
            axes.axhline(2 * vectors, color=style.muted, linestyle=":", linewidth=1.4, zorder=1)
            axes.annotate(f"{vectors}Ψ", (1, 2 * vectors), (6, 0), xycoords=axes.get_yaxis_transform(), va="center",
                          textcoords="offset points", color=style.muted)
        axes.set_xscale("log", base=2)
        axes.set_xticks(data.worlds, [f"{ranks}" for ranks in data.worlds])
        axes.minorticks_off()
        axes.set_yticks(range(7))
        axes.set_ylim(0, 6.6)
        axes.grid(axis="y")
        axes.set_xlabel("N (ranks)")
        axes.set_ylabel("sent by one rank in a step\n(bytes per parameter)")
        heading(figure, TRAFFIC_TITLE, f"Measured: {data.model}, {data.parameter_count:,} parameters; "
                "Ψ is 2 bytes for each.\nStages 0, 1 and 2 send the same, 2Ψ(N - 1)/N; stage 3 "
                "gathers once more, 3Ψ(N - 1)/N.", style, below=0.86)
        figure.legend(loc="lower center", ncols=4, columnspacing=2.0)
    return Drawing("traffic", TRAFFIC_TITLE, _traffic_description(data), style, figure)


def _traffic_description(data: Traffic) -> str:
    said = "; ".join(f"stage {stage}: " + ", ".join(f"{sent:.3g} on {ranks}" for ranks, sent in zip(
        data.worlds, row, strict=True)) for stage, row in enumerate(data.sent))
    return f"Lines of bytes per parameter that one rank sends in a step, measured on {data.model}, by N: {said}."


# -- What one rank holds at rest as N, P and the optimizer vary, under each of ZeRO's stages: read from ledgers ------
# Legend: N ranks, P parameters. The runs have shapes and no data, so that a model of any size fits on a laptop.


OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = MappingProxyType({
    "SGD": lambda: SGD(lr=0.1), "Lion": Lion, "Adam": Adam})
LAYERS = 8
DEVICE_GIGABYTES = 80


@dataclass(frozen=True, slots=True)
class Panel:
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
    panels: tuple[Panel, Panel, Panel]


def widths_of(parameters: float) -> tuple[int, ...]:
    """The widths of an MLP of 8 equal layers with about so many parameters: 8w² + 8w."""
    return (round((math.sqrt(1 + parameters / 2) - 1) / 2),) * (LAYERS + 1)


def memory_scaling_data(parameters: float = 7.5e9, ranks: int = 64, worlds: Sequence[int] = (1, 4, 16, 64, 256, 1024),
                        sizes: Sequence[float] = (1e8, 1e9, 1e10, 1e11, 1e12)) -> MemoryScaling:
    """Measures one step for each point: three panels of every stage."""
    def at_rest(count: float, n: int, optimizer: Callable[[], Optimizer]) -> list[int]:
        return [sum(measured_bytes(widths_of(count), optimizer(), ranks=n, stage=stage, policy=Policy("fp16")
                                   ).resting_nbytes.values()) for stage in STAGES]

    def by_stage(columns: list[list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(*columns, strict=True))

    model = f"an MLP of {LAYERS} layers in fp16"
    billions = f"{parameters / 1e9:g}·10⁹ parameters"
    return MemoryScaling(model, (
        Panel("N (ranks)", f"{billions}, Adam", tuple(worlds), tuple(map(str, worlds)),
              by_stage([at_rest(parameters, n, Adam) for n in worlds])),
        Panel("P (parameters)", f"N = {ranks}, Adam", tuple(sizes), tuple(_power(size) for size in sizes),
              by_stage([at_rest(size, ranks, Adam) for size in sizes])),
        Panel("optimizer (name)", f"{billions}, N = {ranks}", tuple(range(len(OPTIMIZERS))), tuple(OPTIMIZERS),
              by_stage([at_rest(parameters, ranks, make) for make in OPTIMIZERS.values()]))))


def _power(size: float) -> str:
    return "10" + str(round(math.log10(size))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


MEMORY_SCALING_TITLE = "What one rank holds at rest, as N, P and the optimizer vary"


def memory_scaling(data: MemoryScaling, style: Style = LIGHT) -> Drawing:
    """Two panels of lines on logarithmic scales, and one of bars."""
    with style.in_force():
        width, height = 14.5, 6.2
        figure = style.figure(width, height)
        panels = figure.subplots(1, 3, gridspec_kw={
            "left": 1.05 / width, "right": 1 - 0.2 / width, "top": 1 - 1.65 / height, "bottom": 1.3 / height,
            "wspace": 0.3})
        for axes, panel in zip(panels[:2], data.panels[:2], strict=True):
            _lines(axes, panel, style)
        _grouped(panels[2], data.panels[2], style)
        for axes, panel in zip(panels, data.panels, strict=True):
            axes.set_title(panel.fixed, fontweight="bold", loc="left")
            axes.set_xlabel(panel.what)
            axes.set_ylabel("held at rest by one rank (GB)")
            axes.grid(axis="y")
        heading(figure, MEMORY_SCALING_TITLE, f"Measured: {data.model}, parameters, gradients and optimizer "
                f"state. Dashed: a device of {DEVICE_GIGABYTES} GB.", style)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=4, columnspacing=2.0)
    return Drawing("memory-scaling", MEMORY_SCALING_TITLE, _memory_scaling_description(data), style, figure)


def _lines(axes: "Axes", panel: Panel, style: Style) -> None:
    for stage, column in enumerate(panel.resting_nbytes):
        axes.plot(panel.values, [nbytes / 1e9 for nbytes in column], color=STAGE_COLORS[stage],
                  marker=STAGE_MARKS[stage], markersize=7, linewidth=2.2, label=f"stage {stage}")
    axes.axhline(DEVICE_GIGABYTES, color=style.ink, linestyle="--", linewidth=1.1, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(panel.values, panel.names)
    axes.minorticks_off()
    _plain_ticks(axes)


def _plain_ticks(axes: "Axes") -> None:
    """1000 and 0.1, not powers of ten: these are read as gigabytes."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _grouped(axes: "Axes", panel: Panel, style: Style) -> None:
    for stage, column in enumerate(panel.resting_nbytes):
        for place, nbytes in enumerate(column):
            x = place + (stage - 1.5) * 0.21
            axes.bar(x, nbytes / 1e9, 0.19, color=STAGE_COLORS[stage])
    axes.axhline(DEVICE_GIGABYTES, color=style.ink, linestyle="--", linewidth=1.1, zorder=1)
    axes.set_xticks(range(len(panel.names)), panel.names)
    axes.tick_params(axis="x", length=0)


def _memory_scaling_description(data: MemoryScaling) -> str:
    said = []
    for panel in data.panels:
        rows = "; ".join(f"stage {stage}: " + ", ".join(f"{nbytes / 1e9:.3g} at {name}" for name, nbytes in zip(
            panel.names, column, strict=True)) for stage, column in enumerate(panel.resting_nbytes))
        said.append(f"By {panel.what}, with {panel.fixed}, in GB: {rows}.")
    return f"What one rank holds at rest, measured on {data.model}. " + " ".join(said)
