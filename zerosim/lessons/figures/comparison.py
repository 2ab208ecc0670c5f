"""The same training side by side: loss by step, what a rank holds, what it sends.

Legend: N ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerosim.lessons.comparing import Comparison
from zerosim.lessons.figures.drawing import FORMATS, Drawing
from zerosim.lessons.figures.style import KIND_COLORS, LIGHT, RANK_COLORS, RESTING_KINDS, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "The same training, side by side"
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
MEGA = 1e6


@dataclass(frozen=True, slots=True)
class ComparisonData:
    """Of each run: its label, the losses by step in nats, rank 0's peak by kind and bytes sent per step by purpose."""

    what: str
    labels: tuple[str, ...]
    losses: tuple[tuple[float, ...], ...]
    peaks: tuple[Mapping[str, int], ...]
    sent: tuple[Mapping[str, float], ...]
    unigram_entropy: float


def comparison_data(found: Comparison) -> ComparisonData:
    """What the picture shows of a comparison, and nothing else."""
    options = found.runs[0].options
    return ComparisonData(
        f"{options.model}, {options.ranks} ranks, {options.micro_batches} micro-batch(es) of {options.batch} sequences",
        tuple(f"{found.over} {value}" for value in found.values),
        tuple(tuple(step.loss for step in run.steps) for run in found.runs),
        tuple(run.peak_nbytes_by_kind for run in found.runs),
        tuple(
            {purpose: nbytes[0] / len(run.steps) for purpose, nbytes in run.sent_nbytes.items() if purpose != "control"}
            for run in found.runs
        ),
        found.runs[0].unigram_entropy,
    )


def comparison(data: ComparisonData, style: Style = LIGHT) -> Drawing:
    """Three panels: losses as lines, memory as stacked bars by kind, traffic as stacked bars by purpose."""
    with style.in_force():
        width, height = 13.5, 5.6
        figure = style.figure(width, height)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.3, wspace=0.24)
        losses, held, sent = figure.subplots(1, 3, width_ratios=(1.25, 1, 0.8))
        _losses(losses, data, style)
        _bars(held, data.labels, data.peaks, {kind: KIND_COLORS[kind] for kind in KIND_COLORS}, style)
        held.set_ylabel("held at the peak by rank 0 (MB)")
        _bars(
            sent,
            data.labels,
            data.sent,
            {"parameters": KIND_COLORS["parameter"], "gradients": KIND_COLORS["gradient"]},
            style,
        )
        sent.set_ylabel("sent by rank 0 per step (MB)")
        figure.text(0.015, 0.94, TITLE, ha="left", va="center", fontsize=17, fontweight="bold")
        figure.text(0.015, 0.865, f"Measured: {data.what}. Hatched: held only during a step.", ha="left", va="center",
                    color=style.muted)
    return Drawing("comparison", TITLE, _description(data), style, figure)


def save_comparison(found: Comparison, path: str) -> Path:
    """Draws a comparison into a file, .svg or .png; ValueError for another ending or a place that cannot be written."""
    place = Path(path)
    if place.suffix.removeprefix(".") not in FORMATS:
        raise ValueError(f"no figure can be saved as {place.name!r}; end its name with one of "
                         f"{', '.join('.' + name for name in FORMATS)}")
    try:
        return comparison(comparison_data(found)).save(place)
    except OSError as error:
        raise ValueError(
            f"asked to draw into {path!r}, but: {error.strerror}; name a file that can be written"
        ) from None


def _losses(axes: "Axes", data: ComparisonData, style: Style) -> None:
    for place, (label, losses) in enumerate(zip(data.labels, data.losses, strict=True)):
        axes.plot(range(1, len(losses) + 1), losses, color=RANK_COLORS[place % len(RANK_COLORS)],
                  linestyle=DASHES[place % len(DASHES)], linewidth=2.2, label=label)
    axes.axhline(data.unigram_entropy, color=style.muted, linewidth=1)
    axes.annotate("entropy of single bytes", (1.0, data.unigram_entropy), (-4, 4), xycoords=axes.get_yaxis_transform(),
                  textcoords="offset points", ha="right", color=style.muted)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(axis="y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _bars(axes: "Axes", labels: tuple[str, ...], stacks: tuple[Mapping[str, float], ...], colors: Mapping[str, str],
          style: Style) -> None:
    present = [kind for kind in colors if any(stack.get(kind) for stack in stacks)]
    for place, stack in enumerate(stacks):
        low = 0.0
        for kind in present:
            hatch = "" if kind in (*RESTING_KINDS, "parameters", "gradients") else "////"
            axes.bar(place, stack.get(kind, 0) / MEGA, 0.62, bottom=low, facecolor=colors[kind], hatch=hatch,
                     edgecolor=style.background, linewidth=0.6, label=kind.replace("_", " ") if not place else None)
            low += stack.get(kind, 0) / MEGA
        axes.annotate(f"{low:.3g}", (place, low), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(labels)), [label.split()[-1] for label in labels])
    axes.set_xlabel(labels[0].split()[0])
    axes.grid(axis="y")
    axes.margins(y=0.1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=9)


def _description(data: ComparisonData) -> str:
    """Last losses, peaks and traffic of every run, in words."""
    runs = [f"{label}: last loss {losses[-1]:.3f} nats, at most {sum(peak.values()):,} bytes held, "
            f"{sum(sent.values()):,.0f} bytes sent per step"
            for label, losses, peak, sent in zip(data.labels, data.losses, data.peaks, data.sent, strict=True)]
    return f"Measured on {data.what}. " + "; ".join(runs) + "."
