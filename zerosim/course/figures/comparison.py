"""The same training side by side: loss by step, what a rank holds, what it sends.

Legend: N ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.course.precision_runs import samples
from zerosim.display.drawing import (
    DARK,
    FORMATS,
    LIGHT,
    Axes,
    Drawing,
    Style,
    filled,
    scale_of,
    stack_bar,
    within_limits,
)
from zerosim.display.style import KIND_COLORS, rank_color
from zerosim.display.views import words
from zerosim.models.small import MLP
from zerosim.numerics.files import refusal, require_writable
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted
from zerosim.optim.elementwise import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine
from zerosim.zero.placements import STAGES

if TYPE_CHECKING:
    from zerosim.course.training import Comparison

TITLE = "The same training, side by side"
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
PURPOSES: Mapping[str, str] = MappingProxyType(
    {"parameters": KIND_COLORS["parameter"], "gradients": KIND_COLORS["gradient"],
     "state": KIND_COLORS["optimizer_state"]})
STAGES_WIDTHS = (8, 48, 48, 48, 48, 2)
LEGEND_TOP = 0.25  # of the page
LETTERS = 30  # that stand side by side under a panel


@dataclass(frozen=True, slots=True)
class ComparisonData:
    """Of each run: its label, the losses by step in nats, the peak by kind of the rank that held
    most, and the most that a rank sent per step by purpose."""

    what: str
    over: str
    labels: tuple[str, ...]
    losses: tuple[tuple[float, ...], ...]
    peaks: tuple[Mapping[str, int], ...]
    sent: tuple[Mapping[str, float], ...]
    unigram_entropy: float | None = None  # in nats; None where the loss is none of a text
    loss: str = "loss (nats per byte)"


def comparison_data(found: "Comparison") -> ComparisonData:
    """All that the picture shows of a comparison."""
    options = found.runs[0].options
    return ComparisonData(
        f"{options.model}, {counted(options.ranks, 'rank')} with {counted(options.micro_batches, 'micro-batch')} of "
        f"{counted(options.batch, 'sequence')} each",
        found.over,
        tuple(str(value) for value in found.values),
        tuple(tuple(step.loss for step in run.steps) for run in found.runs),
        tuple(run.peak_nbytes_by_kind for run in found.runs),
        tuple({purpose: max(run.sent_nbytes.get(purpose, [0])) / len(run.steps) for purpose in PURPOSES}
              for run in found.runs),
        found.runs[0].unigram_entropy,
    )


def stages_data(ranks: int = 4, steps: int = 30, compute: str = "bf16") -> ComparisonData:
    """Trains a small network under every stage, with Adam, on 8 samples of `precision_runs` that differ by rank."""
    def program(rank: Rank, stage: int) -> list[float]:
        engine = Engine(rank, MLP(STAGES_WIDTHS), Adam(0.003), stage=stage, policy=Policy(compute))
        x, target = samples(0, rank.index)
        return [engine.step([(x[:8], target[:8])]).losses[0] for _ in range(steps)]

    losses, peaks, sent = [], [], []
    for stage in STAGES:
        cluster = Cluster(ranks)
        by_rank = cluster.run(program, stage)
        losses.append(tuple(sum(of_step) / ranks for of_step in zip(*by_rank, strict=True)))
        peaks.append(max(cluster.memory.peak_nbytes_by_kind, key=lambda held: sum(held.values())))
        sent.append({purpose: max(cluster.trace.sent_nbytes(purpose)) / steps for purpose in PURPOSES})
    return ComparisonData(f"a small network in {compute} with Adam, {counted(ranks, 'rank')} of 8 samples each",
                          "stage", tuple(map(str, STAGES)), tuple(losses), tuple(peaks), tuple(sent),
                          loss="loss, mean over ranks")


def stages(data: ComparisonData, style: Style = LIGHT) -> Drawing:
    """The same loss under every stage, on fewer bytes: a comparison of the stages."""
    return replace(comparison(data, style, "The same training under every stage"), name="stages")


def comparison(data: ComparisonData, style: Style = LIGHT, title: str = TITLE) -> Drawing:
    """Three panels: losses as lines, memory as stacked bars by kind, traffic as stacked bars by purpose."""
    words = f"Measured: {data.what}. Bytes of the rank that holds or sends most; hatched: held only during a step."
    with style.figure(14, 7, title, words) as figure:
        figure.subplots_adjust(left=0.055, right=0.985, top=0.82, bottom=0.38, wspace=0.24)
        losses, held, sent = figure.subplots(1, 3)
        _losses(losses, data, style)
        _bars(held, data, data.peaks, KIND_COLORS, style)
        held.set_ylabel(f"held at the peak ({_unit(data.peaks)[1]})")
        _bars(sent, data, data.sent, PURPOSES, style)
        sent.set_ylabel(f"sent per step ({_unit(data.sent)[1]})")
        for panel in (losses, held, sent):
            box = panel.get_position()
            figure.legend(*panel.get_legend_handles_labels(), loc="upper center", ncols=2, handlelength=3.4,
                          bbox_to_anchor=(box.x0 + box.width / 2, LEGEND_TOP))
    return Drawing("comparison", title, _description(data), style, figure)


def checked_place(path: str) -> Path:
    """Checks the place of a figure: ValueError for an ending that there is not, and for no folder to write into."""
    place = Path(path)
    suffixes = [f".{format}" for format in FORMATS]
    if place.suffix not in suffixes:
        raise ValueError(f"no figure can be saved as {place.name!r}; end its name with one of {', '.join(suffixes)}")
    if not place.parent.is_dir() or place.is_dir():
        raise ValueError(f"asked to draw into {path!r}, which is {'a folder' if place.is_dir() else 'in no folder'}; "
                         "name a file in a folder that exists")
    require_writable(place, "draw into")
    return place


def save_comparison(found: "Comparison", path: str, *, dark: bool = False) -> Path:
    """Draws a comparison into a file, .svg or .png; ValueError for a place that cannot be written."""
    place = checked_place(path)
    try:
        return comparison(comparison_data(found), DARK if dark else LIGHT).save(place)
    except OSError as error:
        raise refusal(place, "draw into", error) from None


def _losses(axes: Axes, data: ComparisonData, style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, (label, losses) in enumerate(zip(data.labels, data.losses, strict=True)):
        axes.plot(range(1, len(losses) + 1), losses, color=rank_color(place), linewidth=2.2,
                  linestyle=DASHES[place % len(DASHES)],
                  label=f"{data.over} {label}" if label.isdigit() else label)
    if data.unigram_entropy is not None:
        axes.axhline(data.unigram_entropy, color=style.muted, linewidth=1, label="entropy of single bytes")
    axes.set(xlabel="step of the training (steps)", ylabel=data.loss)
    steps = max(map(len, data.losses))
    axes.set_xticks([tick for tick in MaxNLocator(8, integer=True).tick_values(1, steps) if 1 <= tick <= steps])
    axes.grid(axis="y")
    within_limits(axes)


def _bars(axes: Axes, data: ComparisonData, stacks: tuple[Mapping[str, float], ...], colors: Mapping[str, str],
          style: Style) -> None:
    present, unit = [kind for kind in colors if any(stack.get(kind) for stack in stacks)], _unit(stacks)[0]

    def looks(kind: str) -> dict[str, Any]:
        return filled(colors[kind], style, hatched=kind not in (*RESTING_KINDS, *PURPOSES), linewidth=0.6)

    for place, stack in enumerate(stacks):
        total = stack_bar(axes.bar, place, 0.62, {kind: stack.get(kind, 0) / unit for kind in present}, looks)
        axes.annotate(f"{total:.3g}", (place, total), (0, 4), textcoords="offset points", ha="center")
    for kind, bars in zip(present, axes.containers, strict=False):  # of the first bar, by which the legend goes
        bars.set_label(words(kind))
    long = max(map(len, data.labels)) * len(data.labels) > LETTERS
    axes.set_xticks(range(len(data.labels)), data.labels, rotation=20 if long else 0)
    axes.set(xlabel=data.over,
             ylim=(0, 1.1 * max(sum(stack.get(kind, 0) for kind in present) for stack in stacks) / unit))
    axes.grid(axis="y")
    within_limits(axes)


def _unit(stacks: tuple[Mapping[str, float], ...]) -> tuple[float, str]:
    return scale_of(max(sum(stack.values()) for stack in stacks))


def _description(data: ComparisonData) -> str:
    nats = "" if data.unigram_entropy is None else " nats"
    runs = [f"{data.over} {label}: last loss {losses[-1]:.3f}{nats}, at most {sum(peak.values()):,} bytes held, "
            f"{sum(sent.values()):,.0f} bytes sent per step"
            for label, losses, peak, sent in zip(data.labels, data.losses, data.peaks, data.sent, strict=True)]
    entropy = data.unigram_entropy
    return (f"Three panels, measured on {data.what}: the {data.loss}, by step, the bytes held by kind, the bytes sent "
            f"by purpose. {'; '.join(runs)}."
            + ("" if entropy is None else f" The entropy of single bytes is {entropy:.3f} nats."))
