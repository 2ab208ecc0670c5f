"""The gaps between a format's numbers, and how large an update of a weight must be not to be lost.

Legend: w a weight. The gap is that from w to the next larger number of the format.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from zerosim.course.lost_updates import Task, path_of
from zerosim.course.observed_step import ObservedStep, Passed, observed_step
from zerosim.display.colors import FORMAT_COLORS, KIND_COLORS, ink_on
from zerosim.display.drawing import LIGHT, Drawing, Style, within_limits
from zerosim.numerics.formats import format_of
from zerosim.numerics.rounding import round_to
from zerosim.numerics.rounding import spacing as gap_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SPACING_TITLE = "An update smaller than half the gap is lost"


@dataclass(frozen=True, slots=True)
class SpacingData:
    """Half the gap above each of ``weights`` (powers of two), by format; NaN for weights that the format lacks."""

    weights: tuple[float, ...]
    formats: tuple[str, ...]
    half_gaps: tuple[tuple[float, ...], ...]
    update: float

    def half_gap(self, name: str, weight: float) -> float:
        """Half the gap above one of the weights in one of the formats."""
        return self.half_gaps[self.formats.index(name)][self.weights.index(weight)]


def spacing_data(formats: Sequence[str] = ("fp8_e4m3", "bf16", "fp16", "fp32"), exponents: tuple[int, int] = (-30, 17),
                 update: float = 1e-5) -> SpacingData:
    """Half the gap above 2^e for every e from the first exponent to the last, in each format."""
    names = tuple(format_of(name).name for name in formats)
    weights = 2.0 ** np.arange(exponents[0], exponents[1] + 1)
    halves = [np.where(round_to(weights, name) == weights, gap_above(weights, name) / 2, np.nan) for name in names]
    return SpacingData(tuple(weights.tolist()), names, tuple(tuple(row.tolist()) for row in halves), update)


def spacing(data: SpacingData, style: Style = LIGHT) -> Drawing:
    """A line for each format over the size of the weight, both logarithmic, and a level line at the update."""
    with style.in_force():
        figure = style.figure(10.0, 6.4)
        axes = figure.add_axes((0.11, 0.115, 0.86, 0.7))
        for name, halves in zip(data.formats, data.half_gaps, strict=True):
            axes.step(data.weights, halves, where="post", color=FORMAT_COLORS[name], linewidth=2.4)
            first = next(at for at, half in enumerate(halves) if np.isfinite(half))
            axes.annotate(name, (data.weights[first], halves[first]), (5, 20), textcoords="offset points", fontsize=13,
                          fontweight="bold")
        axes.axhline(data.update, color=style.muted, linestyle="--", linewidth=1.4)
        axes.annotate(f"an update of {data.update:g}", (0, data.update), (5, 5), color=style.muted,
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="weight (no unit)", ylabel="half the gap above it (no unit)")
        known = [half for halves in data.half_gaps for half in (*halves, data.update) if np.isfinite(half)]
        _decades(axes.xaxis, (data.weights[0], data.weights[-1] / 1.02), 2)
        _decades(axes.yaxis, (min(known) / 4, max(known) * 8), 3)
        axes.minorticks_off()
        axes.grid()
        figure.text(0.02, 0.95, SPACING_TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.02, 0.882, "Added to a positive weight, an update under the format's line is rounded away; above "
                    "the line it is not.", va="center", color=style.muted)
    return Drawing("spacing", SPACING_TITLE, _spacing_description(data), style, figure)


def _decades(axis: Any, limits: tuple[float, float], apart: int) -> None:
    """Ticks at powers of ten inside the limits, so many decades apart, or one where there are fewer."""
    low, high = limits
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    axis.set_ticks([10.0**e for e in range(first, last + 1, apart if last - first > 2 * apart else 1)])
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def _spacing_description(data: SpacingData) -> str:
    """Half a gap at 1, or at the first weight, and what becomes there of the update."""
    at = 1.0 if 1.0 in data.weights else data.weights[0]
    parts = [_spacing_words(name, data.half_gap(name, at), data.update) for name in data.formats]
    return (f"Half the gap between neighboring numbers, for weights from {data.weights[0]:.2g} to "
            f"{data.weights[-1]:g}, both axes logarithmic: stairs that double where the weight doubles, and are level "
            f"below the format's smallest normal number. Above a weight of {at:g} it is {'; '.join(parts)}. Toward 0 "
            "from a power of two the gap is half of that.")


def _spacing_words(name: str, half: float, update: float) -> str:
    if np.isnan(half):
        return f"no number in {name}, which does not reach so far"
    return f"{half:.3g} in {name}, so that {update:g} is {'kept' if update > half else 'lost'}"


# -- One weight to which the same small update is added again and again: without a master copy, and with one ---------
# Legend: w the weight, δ the update.


LOST_UPDATES_TITLE = "The same small update, added again and again"


@dataclass(frozen=True, slots=True)
class WeightPaths:
    """w before the first step and after each, (steps + 1,), while δ is added to it.

    ``master`` is w in fp32; ``copies`` are its roundings to each format, which the layers would compute with; ``alone``
    is w in the format itself, by format.
    """

    update: float
    steps: int
    master: tuple[float, ...]
    copies: tuple[tuple[float, ...], ...]
    alone: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LostUpdatesData:
    """A run for each update, all from one first weight."""

    weight: float
    formats: tuple[str, ...]
    runs: tuple[WeightPaths, ...]


def lost_updates_data(updates: Sequence[float] = (1e-5, 6e-4), steps: Sequence[int] = (3000, 60), weight: float = 1.0,
                      formats: Sequence[str] = ("bf16", "fp16")) -> LostUpdatesData:
    """Adds each update so many times, in fp32 and in every format by itself."""
    names = tuple(format_of(name).name for name in formats)
    return LostUpdatesData(weight, names, tuple(_run(names, Task(weight, (update,), count))
                                                for update, count in zip(updates, steps, strict=True)))


def _run(names: Sequence[str], task: Task) -> WeightPaths:
    master, *alone = (path_of(task, name)[:, 0].astype(np.float32) for name in ("fp32", *names))
    return WeightPaths(task.updates[0], task.steps, tuple(master.tolist()),
                       tuple(tuple(round_to(master, name).tolist()) for name in names),
                       tuple(tuple(one.tolist()) for one in alone))


def lost_updates(data: LostUpdatesData, style: Style = LIGHT) -> Drawing:
    """A panel for each update: the weight over the steps."""
    with style.in_force():
        width = max(10.6, 6.2 * len(data.runs))
        figure = style.figure(width, 6.2)
        panels = figure.subplots(1, len(data.runs), squeeze=False, gridspec_kw={
            "left": 1.05 / width, "right": 1 - 0.3 / width, "top": 0.745, "bottom": 0.235, "wspace": 0.26})[0]
        for axes, run in zip(panels, data.runs, strict=True):
            _panel(axes, data, run)
            axes.set_title(f"δ = {run.update:g}, {run.steps:,} times", loc="left", fontweight="bold", fontsize=13)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3, handlelength=3.2,
                      columnspacing=2.0)
        figure.text(0.2 / width, 0.945, LOST_UPDATES_TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / width, 0.875, "A 16-bit weight stands still, or moves by whole gaps. A master in fp32 "
                    "remembers what its 16-bit copy cannot show yet.", va="center", color=style.muted)
    return Drawing("lost-updates", LOST_UPDATES_TITLE, _lost_updates_description(data), style, figure)


def _panel(axes: "Axes", data: LostUpdatesData, run: WeightPaths) -> None:
    """Copies of the master are thin stairs; a format alone is a thick line, so that two that lie on each other show."""
    numbers = range(run.steps + 1)
    axes.plot(numbers, run.master, color=FORMAT_COLORS["fp32"], linewidth=2.0, label="master in fp32", zorder=4)
    for name, copy in zip(data.formats, run.copies, strict=True):
        axes.step(numbers, copy, where="post", color=FORMAT_COLORS[name], linewidth=1.5, label=f"its copy in {name}")
    for name, width, alone in zip(data.formats, (9.0, 3.5, 2.0), run.alone, strict=False):
        axes.plot(numbers, alone, color=FORMAT_COLORS[name], linewidth=width, solid_capstyle="butt",
                  label=f"{name} without a master")
    axes.set(xlabel="updates added (steps)", ylabel="weight (no unit)")
    axes.set_xlim(0, run.steps)
    within_limits(axes)
    axes.grid()


def _lost_updates_description(data: LostUpdatesData) -> str:
    said = []
    for run in data.runs:
        parts = [f"the fp32 master {run.master[-1]:.8g}"]
        parts += [f"its {name} copy {copy[-1]:.8g}" for name, copy in zip(data.formats, run.copies, strict=True)]
        parts += [f"{name} without a master {alone[-1]:.8g}" for name, alone in
                  zip(data.formats, run.alone, strict=True)]
        said.append(f"After {run.steps:,} times {run.update:g}: {', '.join(parts)}.")
    return f"Lines of one weight over the steps, from {data.weight:g} on. {' '.join(said)}"


# -- The arrays of one step of mixed precision, from the master weights round to the master weights ------------------
# Legend: N ranks, P parameters, S loss scale. Lengths are inches on paper.


Point = tuple[float, float]

MIXED_PRECISION_TITLE = "A step of mixed precision: what rests, what flows"
WIDTH, HEIGHT = 14.2, 6.7
BOX_WIDTH, BOX_HEIGHT = 2.2, 1.15
HIGH, MIDDLE, LOW = 4.3, 2.75, 1.2  # the middles of the boxes
CENTERS: Mapping[str, Point] = MappingProxyType({  # the middle of each box
    "master": (1.35, HIGH), "weights": (6.25, HIGH), "forward": (9.6, HIGH), "loss": (12.9, MIDDLE),
    "backward": (9.6, LOW), "gradient": (6.25, LOW), "adam": (1.35, LOW)})
KINDS = {"master": "master", "weights": "parameter", "gradient": "gradient", "adam": "optimizer_state"}


def mixed_precision_data() -> ObservedStep:
    """A step in fp16 with a loss scale of 1,024, on two ranks."""
    return observed_step()


def mixed_precision(data: ObservedStep, style: Style = LIGHT) -> Drawing:
    """Boxes for what rests and what is computed, arrows for what passes between them."""
    with style.in_force():
        figure = style.figure(WIDTH, HEIGHT)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
        axes.axis("off")
        for name, lines in _boxes(data).items():
            _box(axes, name, lines, style)
        for start, end in _arrows():
            axes.annotate("", xy=end, xytext=start, arrowprops={
                "arrowstyle": "-|>", "color": style.ink, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0,
                "mutation_scale": 17})
        for place, align, words in _mixed_precision_words(data):
            axes.text(*place, words, fontsize=12, ha=align, va="center", linespacing=1.4)
        axes.text(0.25, HEIGHT - 0.36, MIXED_PRECISION_TITLE, va="center", fontsize=17, fontweight="bold")
        axes.text(0.25, HEIGHT - 0.98, f"Rank 0 of {data.ranks}, an MLP of {data.parameter_count:,} parameters with "
                  f"Adam in {data.weights.format}, S = {data.scale:,.0f}; formats and bytes as the ledger, the trace "
                  "and the arrays have them.\nColored boxes rest between steps, in B per parameter: "
                  f"{_per_parameter(data)}.", va="center", color=style.muted, linespacing=1.45)
    return Drawing("mixed-precision", MIXED_PRECISION_TITLE, _mixed_precision_description(data), style, figure)


def _boxes(data: ObservedStep) -> dict[str, tuple[str, str]]:
    """Of each box its heading and what stands under it."""
    return {
        "master": ("master weights", _held(data.master)), "weights": ("weights", _held(data.weights)),
        "forward": ("forward", "reads weights\nand the batch"), "loss": ("loss", f"times S = {data.scale:,.0f}"),
        "backward": ("backward", "reads weights and\nwhat forward kept"),
        "gradient": ("gradient, S times", _held(data.gradient)), "adam": ("Adam: m and v", _held(data.state))}


def _box(axes: "Axes", name: str, lines: tuple[str, str], style: Style) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), color = CENTERS[name], KIND_COLORS[KINDS[name]] if name in KINDS else style.background
    ink = ink_on(color)
    axes.add_patch(FancyBboxPatch((x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2), BOX_WIDTH, BOX_HEIGHT, facecolor=color,
                                  edgecolor=style.muted, linewidth=1.2, boxstyle="round,pad=0,rounding_size=0.1"))
    heading, below = lines
    axes.text(x, y + 0.28, heading, ha="center", va="center", fontsize=14, fontweight="bold", color=ink)
    axes.text(x, y - 0.17, below, ha="center", va="center", fontsize=12, linespacing=1.4, color=ink)


def _arrows() -> list[tuple[Point, Point]]:
    """Each arrow: from where to where."""
    half, tall = BOX_WIDTH / 2, BOX_HEIGHT / 2
    (left, _), (x, _), (right, _), (loss, _) = (CENTERS[name] for name in ("master", "weights", "forward", "loss"))
    return [((left + half, HIGH), (x - half, HIGH)), ((x + half, HIGH), (right - half, HIGH)),
            ((x + half, HIGH - tall), (right - half, LOW + tall)), ((right, HIGH - tall), (right, LOW + tall)),
            ((right + half, HIGH), (loss, MIDDLE + tall)), ((loss, MIDDLE - tall), (right + half, LOW)),
            ((right - half, LOW), (x + half, LOW)), ((x - half, LOW), (left + half, LOW)),
            ((left, LOW + tall), (left, HIGH - tall))]


def _mixed_precision_words(data: ObservedStep) -> list[tuple[Point, str, str]]:
    """The words at the arrows: where, how it is aligned there, and the words."""
    (left, _), (x, _), (right, _), (loss, _) = (CENTERS[name] for name in ("master", "weights", "forward", "loss"))
    return [
        (((left + x) / 2, HIGH + 0.36), "center", f"cast, rounded once:\n{_flow(data.weights)}"),
        (((x + right) / 2, HIGH + 0.36), "center", _flow(data.weights, "\n")),
        (((x + right) / 2 - 0.22, MIDDLE), "right", _flow(data.weights, "\n")),
        ((right + 0.12, MIDDLE), "left", f"kept: {_flow(data.kept)},\n{data.signs_nbytes:,} B of signs"),
        ((loss - 0.8, HIGH + 0.1), "left", f"output:\n{_flow(data.output)}"),
        ((loss - 0.8, LOW - 0.1), "left", f"its gradient:\n{_flow(data.output_gradient)}"),
        (((x + right) / 2, LOW - 0.36), "center", _flow(data.gradient, "\n")),
        (((left + x) / 2, LOW + 0.36), "center", f"sum over {data.ranks} ranks,\neach sends {data.sent_nbytes:,} B"),
        (((left + x) / 2, LOW - 0.5), "center", f"divided by S·N = {data.gradient_divisor:,.0f}:\n"
         f"{_flow(data.wide_gradient)},\n{data.block_nbytes:,} B at a time"),
        ((left + 0.12, MIDDLE), "left", f"update, in place:\n{_flow(data.master)}")]


def _flow(passed: Passed, between: str = ", ") -> str:
    return f"{passed.format}{between}{passed.nbytes:,} B"


def _held(passed: Passed) -> str:
    return f"{passed.format}\n{passed.nbytes:,} B"


def _per_parameter(data: ObservedStep) -> str:
    parts = [passed.nbytes / data.parameter_count for passed in (data.master, data.weights, data.gradient, data.state)]
    return f"{' + '.join(f'{part:g}' for part in parts)} = {sum(parts):g}"


def _mixed_precision_description(data: ObservedStep) -> str:
    return (f"A round of boxes and arrows. The master weights ({_flow(data.master)}) are cast to weights "
            f"({_flow(data.weights)}). Forward reads them, keeps layers' inputs ({_flow(data.kept)}) and "
            f"{data.signs_nbytes:,} B of signs for backward, and hands its output ({_flow(data.output)}) to the loss. "
            f"Backward begins with the gradient of {data.scale:,.0f} times the loss ({_flow(data.output_gradient)}) "
            f"and leaves the gradient of the weights ({_flow(data.gradient)}). It is added up over {data.ranks} ranks, "
            f"each of which sends {data.sent_nbytes:,} B, and divided by {data.gradient_divisor:,.0f} in "
            f"{data.wide_gradient.format}, in blocks of {data.block_nbytes:,} of {data.wide_gradient.nbytes:,} B. "
            f"Adam, with m and v ({_flow(data.state)}), updates the master weights. At rest, in bytes per parameter: "
            f"{_per_parameter(data)}.")
