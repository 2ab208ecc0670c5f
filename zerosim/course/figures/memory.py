"""Memory of one rank under each of ZeRO's stages: at rest and at the fullest instant of a step, as measured.

Legend: N ranks, P parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.course.measured import MeasuredStep, measured_step
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, look, stack_bar
from zerosim.display.style import KIND_COLORS
from zerosim.display.views import words
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted
from zerosim.optim.elementwise import Adam
from zerosim.zero.placements import STAGES

TITLE = "What one rank holds under ZeRO's stages"
BAR_WIDTH, BAR_OFFSET = 0.38, 0.21
MARKER: Mapping[str, Any] = MappingProxyType({"marker": ">", "markersize": 8, "linestyle": "", "clip_on": False})
Bytes = Mapping[str, float]  # kind -> bytes per parameter


@dataclass(frozen=True, slots=True)
class MemoryData:
    """A step of one model under all stages for every N."""

    model: str
    steps: tuple[MeasuredStep, ...]

    @property
    def parameter_count(self) -> int:
        """P."""
        return self.steps[0].parameter_count

    @property
    def worlds(self) -> list[int]:
        """The N that were run, in order."""
        return list(dict.fromkeys(step.ranks for step in self.steps))

    @property
    def kinds(self) -> list[str]:
        """The kinds of which anything is held, in the order of the stack."""
        return [kind for kind in KIND_COLORS if any(self.resting(step).get(kind) or self.peak(step).get(kind)
                                                    for step in self.steps)]

    def of_world(self, ranks: int) -> list[MeasuredStep]:
        """The stages on N ranks."""
        return [step for step in self.steps if step.ranks == ranks]

    def resting(self, step: MeasuredStep) -> Bytes:
        """Bytes per parameter of each kind that a rank holds at rest; units are padded, and all ranks hold the same."""
        return {kind: nbytes / self.parameter_count for kind, nbytes in step.resting_nbytes[0].items()}

    def peak(self, step: MeasuredStep) -> Bytes:
        """The same at its fullest instant."""
        return {kind: nbytes / self.parameter_count for kind, nbytes in step.peak_nbytes[0].items()}


def memory_data(worlds: Sequence[int] = (4, 16), widths: Sequence[int] = (64,) * 9, rows: int = 8,
                compute: str = "fp16") -> MemoryData:
    """Trains an MLP with Adam for one step, on every N and under every stage, and reads the ranks' memory."""
    return MemoryData(f"an MLP of {len(widths) - 1} layers in {compute} with Adam, {rows} samples per rank", tuple(
        measured_step(widths, Adam(), ranks=ranks, stage=stage, policy=Policy(compute), rows=rows)
        for ranks in worlds for stage in STAGES))


def memory(data: MemoryData, style: Style = LIGHT) -> Drawing:
    """Stacked bars by kind: per stage one at rest, with the formula's value beside it, and one at the peak."""
    columns, words = len(data.worlds), (
        f"Measured: {data.model}; {data.parameter_count:,} parameters.\nHatched: held only during a step.")
    with style.figure(max(9.2, 5.6 * columns + 0.9), 7.6, TITLE, words, below=0.84) as figure:
        (panels,) = figure.panels(1, columns, left=0.85, right=0.2, top=1.6, bottom=2.4, wspace=0.06, sharey=True)
        for axes, ranks in zip(panels, data.worlds, strict=True):
            _panel(axes, data, ranks, style)
        panels[0].set_ylabel("held by one rank (bytes per parameter)")
        figure.legend(*_legend(data, style), ncols=4, columnspacing=1.6)
    return Drawing("memory", TITLE, _description(data), style, figure)


def _panel(axes: Axes, data: MemoryData, ranks: int, style: Style) -> None:
    """The stages on N ranks."""
    steps = data.of_world(ranks)
    for place, step in enumerate(steps):
        for offset, held in ((-BAR_OFFSET, data.resting(step)), (BAR_OFFSET, data.peak(step))):
            total = stack_bar(axes.bar, place + offset, BAR_WIDTH, {kind: held[kind] for kind in data.kinds
                                                                    if held.get(kind)},
                              lambda kind: look(kind, style, 0.6))
            axes.annotate(f"{total:.3g}", (place + offset, total), (0, 4), textcoords="offset points", ha="center",
                          bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.8})
        axes.plot(place - BAR_OFFSET - 0.26, float(step.formula_nbytes), color=style.ink, **MARKER)
        axes.text(place, -0.085, f"stage {step.stage}\n{step.formula}", transform=axes.get_xaxis_transform(),
                  ha="center", va="top", linespacing=1.4)
    axes.set_title(f"N = {counted(ranks, 'rank')}", loc="center", fontsize=13)
    highest = max(sum(step.peak_nbytes[0].values()) for step in data.steps) / data.parameter_count
    axes.set(ylim=(0, 1.08 * highest), xlim=(-0.62, len(steps) - 0.4))
    axes.grid(axis="y")
    axes.set_xticks([place + offset for place in range(len(steps)) for offset in (-BAR_OFFSET, BAR_OFFSET)],
                    ["rest", "peak"] * len(steps))
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("ZeRO stage and its formula (bytes per parameter)", labelpad=56)


def _legend(data: MemoryData, style: Style) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marker = Line2D([], [], color=style.ink, **MARKER)
    return ([Patch(**look(kind, style, 0.6)) for kind in data.kinds] + [marker],
            [words(kind) for kind in data.kinds] + ["formula for what rests"])


def _description(data: MemoryData) -> str:
    sentences = [f"Stacked bars in bytes per parameter, measured on {data.model}, {data.parameter_count:,} parameters."]
    for ranks in data.worlds:
        bars = [f"stage {step.stage} rests at {sum(data.resting(step).values()):.3g} (by formula {step.formula}) and "
                f"peaks at {sum(data.peak(step).values()):.3g}" for step in data.of_world(ranks)]
        sentences.append(f"On {counted(ranks, 'rank')}: {'; '.join(bars)}.")
    last, peak = data.steps[-1], data.peak(data.steps[-1])
    parts = ", ".join(f"{words(kind)} {peak[kind]:.3g}" for kind in data.kinds if peak.get(kind))
    sentences.append(f"At its peak on {counted(last.ranks, 'rank')} stage {last.stage} holds {parts}.")
    return " ".join(sentences)
