"""The same training side by side: loss by step, what a rank holds, what it sends.

Legend: N ranks.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from zerosim.course.precision_runs import BATCHES, POLICIES, SMALL_UNIT, FormatRun, format_run
from zerosim.course.training import Comparison
from zerosim.display.colors import BLUE, FORMAT_COLORS, KIND_COLORS, ORANGE, PURPLE, VERMILLION, rank_color
from zerosim.display.drawing import DARK, LIGHT, SUFFIXES, Drawing, Style, heading, within_limits
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted
from zerosim.ranks.memory import RESTING_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COMPARISON_TITLE = "The same training, side by side"
COMPARISON_DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
MEGA = 1e6
PURPOSES: Mapping[str, str] = MappingProxyType(
    {"parameters": KIND_COLORS["parameter"], "gradients": KIND_COLORS["gradient"],
     "state": KIND_COLORS["optimizer_state"]})
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
    unigram_entropy: float


def comparison_data(found: Comparison) -> ComparisonData:
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


def comparison(data: ComparisonData, style: Style = LIGHT) -> Drawing:
    """Three panels: losses as lines, memory as stacked bars by kind, traffic as stacked bars by purpose."""
    with style.in_force():
        figure = style.figure(14, 7)
        figure.subplots_adjust(left=0.055, right=0.985, top=0.82, bottom=0.38, wspace=0.24)
        losses, held, sent = figure.subplots(1, 3)
        _losses(losses, data, style)
        _bars(held, data, data.peaks, KIND_COLORS, style)
        held.set_ylabel("held at the peak (MB)")
        _bars(sent, data, data.sent, PURPOSES, style)
        sent.set_ylabel("sent per step (MB)")
        for panel in (losses, held, sent):
            box = panel.get_position()
            figure.legend(*panel.get_legend_handles_labels(), loc="upper center", ncols=2, handlelength=3.4,
                          bbox_to_anchor=(box.x0 + box.width / 2, LEGEND_TOP))
        heading(figure, COMPARISON_TITLE, f"Measured: {data.what}. Bytes of the rank that holds or sends most; "
                "hatched: held only during a step.", style)
    return Drawing("comparison", COMPARISON_TITLE, _comparison_description(data), style, figure)


def require_place(path: str) -> Path:
    """Checks the place of a figure: ValueError for an ending that there is not, and for no folder to write into."""
    place = Path(path)
    if place.suffix not in SUFFIXES:
        raise ValueError(f"no figure can be saved as {place.name!r}; end its name with one of {', '.join(SUFFIXES)}")
    if not place.parent.is_dir() or place.is_dir():
        raise ValueError(f"asked to draw into {path!r}, which is {'a folder' if place.is_dir() else 'in no folder'}; "
                         "name a file in a folder that exists")
    try:
        with tempfile.TemporaryFile(dir=place.parent):
            return place
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> ValueError:
    return ValueError(f"asked to draw into {path!r}, but: {error.strerror}; name a file that can be written")


def save_comparison(found: Comparison, path: str, *, dark: bool = False) -> Path:
    """Draws a comparison into a file, .svg or .png; ValueError for a place that cannot be written."""
    place = require_place(path)
    try:
        return comparison(comparison_data(found), DARK if dark else LIGHT).save(place)
    except OSError as error:
        raise _unwritable(path, error) from None


def _losses(axes: "Axes", data: ComparisonData, style: Style) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, (label, losses) in enumerate(zip(data.labels, data.losses, strict=True)):
        axes.plot(range(1, len(losses) + 1), losses, color=rank_color(place), linewidth=2.2,
                  linestyle=COMPARISON_DASHES[place % len(COMPARISON_DASHES)],
                  label=f"{data.over} {label}" if label.isdigit() else label)
    axes.axhline(data.unigram_entropy, color=style.muted, linewidth=1, label="entropy of single bytes")
    axes.set_xlabel("step")
    steps = max(map(len, data.losses))
    axes.set_xticks([tick for tick in MaxNLocator(8, integer=True).tick_values(1, steps) if 1 <= tick <= steps])
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(axis="y")
    within_limits(axes)


def _bars(axes: "Axes", data: ComparisonData, stacks: tuple[Mapping[str, float], ...], colors: Mapping[str, str],
          style: Style) -> None:
    present = [kind for kind in colors if any(stack.get(kind) for stack in stacks)]
    for place, stack in enumerate(stacks):
        low = 0.0
        for kind in present:
            hatch = "" if kind in (*RESTING_KINDS, *PURPOSES) else "////"
            axes.bar(place, stack.get(kind, 0) / MEGA, 0.62, bottom=low, facecolor=colors[kind], hatch=hatch,
                     edgecolor=style.background, linewidth=0.6, label=kind.replace("_", " ") if not place else None)
            low += stack.get(kind, 0) / MEGA
        axes.annotate(f"{low:.3g}", (place, low), (0, 4), textcoords="offset points", ha="center")
    long = max(map(len, data.labels)) * len(data.labels) > LETTERS
    axes.set_xticks(range(len(data.labels)), data.labels, rotation=20 if long else 0)
    axes.set_xlabel(data.over)
    axes.grid(axis="y")
    axes.set_ylim(0, 1.1 * max(sum(stack.get(kind, 0) for kind in present) for stack in stacks) / MEGA)
    within_limits(axes)


def _comparison_description(data: ComparisonData) -> str:
    """Last losses, peaks and traffic of every run, in words."""
    runs = [f"{data.over} {label}: last loss {losses[-1]:.3f} nats, at most {sum(peak.values()):,} bytes held, "
            f"{sum(sent.values()):,.0f} bytes sent per step"
            for label, losses, peak, sent in zip(data.labels, data.losses, data.peaks, data.sent, strict=True)]
    return (f"Three panels, measured on {data.what}: the loss by step, the bytes held by kind, the bytes sent by "
            f"purpose. {'; '.join(runs)}. The entropy of single bytes is {data.unigram_entropy:.3f} nats.")


# ----------------------------------------------------------------------------------------------------
# The loss scale over a training whose gradients overflow now and then: two rules, and the steps that were skipped
# Legend: N ranks, S loss scale.


LOSS_SCALE_TITLE = "Dynamic loss scaling: S grows until gradients overflow"
EVERYWHERE, SOMEWHERE, IN_THE_SUM = "on every rank", "on some ranks", "in the sum over ranks alone"
MARKS: Mapping[str, tuple[str, str]] = MappingProxyType({
    EVERYWHERE: ("X", VERMILLION), SOMEWHERE: ("^", ORANGE), IN_THE_SUM: ("o", PURPLE)})


@dataclass(frozen=True, slots=True)
class LossScaleData:
    """The same training under several rules."""

    rules: tuple[Dynamic, ...]
    runs: tuple[FormatRun, ...]

    def skips(self, place: int) -> dict[str, list[int]]:
        """The steps that one run skipped, counted from 1, by where a gradient was not finite."""
        run, found = self.runs[place], {where: list[int]() for where in MARKS}
        for number, (skipped, ranks) in enumerate(zip(run.skipped, run.overflowed, strict=True), 1):
            if skipped:
                where = IN_THE_SUM if not ranks else EVERYWHERE if len(ranks) == run.ranks else SOMEWHERE
                found[where].append(number)
        return found


def loss_scale_data(kinds: Sequence[tuple[str, int]] = (("torch", 1), ("deepspeed", 2)), steps: int = 120,
                    ranks: int = 3, window: int = 16, initial: float = 2.0**20) -> LossScaleData:
    """Trains in fp16 under each rule, (kind, hysteresis); the window is short, so that much happens in few steps."""
    rules = tuple(Dynamic(kind, initial, window, hysteresis) for kind, hysteresis in kinds)
    return LossScaleData(rules, tuple(format_run(Policy("fp16", loss_scale=rule), steps, ranks=ranks)
                                      for rule in rules))


def loss_scale(data: LossScaleData, style: Style = LIGHT) -> Drawing:
    """A panel for each rule: stairs of S, and a mark on each skipped step."""
    with style.in_force():
        width, height = 11.6, 2.95 + 2.5 * len(data.runs)
        figure = style.figure(width, height)
        panels = figure.subplots(len(data.runs), 1, sharex=True, squeeze=False, gridspec_kw={
            "left": 1.1 / width, "right": 1 - 0.3 / width, "top": 1 - 1.8 / height, "bottom": 1.4 / height,
            "hspace": 0.3})[:, 0]
        for place, axes in enumerate(panels):
            _panel(axes, data, place)
        panels[-1].set_xlabel("step of the training (steps)")
        heading(figure, LOSS_SCALE_TITLE, f"A small network in fp16 on {data.runs[0].ranks} ranks. A mark is "
                "a step that all of them skipped, since a gradient was inf or NaN.\nThe window is how many good "
                f"steps it takes until S grows{_one_more(data)}.", style, below=0.88)
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend([lines[name] for name in _labels()], _labels(), loc="lower center", ncols=4, columnspacing=1.8)
    return Drawing("loss-scale", LOSS_SCALE_TITLE, _loss_scale_description(data), style, figure)


def _one_more(data: LossScaleData) -> str:
    return "; after an overflow deepspeed takes one more" * any(rule.kind == "deepspeed" for rule in data.rules)


def _labels() -> list[str]:
    return ["loss scale", *(f"overflow {where}" for where in MARKS)]


def _panel(axes: "Axes", data: LossScaleData, place: int) -> None:
    run = data.runs[place]
    numbers, (first, *labels) = range(1, len(run.scales) + 1), _labels()
    axes.step(numbers, run.scales, where="mid", color=BLUE, linewidth=2.0, label=first)
    for label, (where, steps) in zip(labels, data.skips(place).items(), strict=True):
        mark, color = MARKS[where]
        axes.plot(steps, [run.scales[number - 1] for number in steps], mark, color=color, markersize=10, label=label)
    axes.set_yscale("log", base=2)
    powers = {scale for each in data.runs for scale in each.scales}
    axes.set_ylim(min(powers) / 1.8, max(powers) * 1.8)
    axes.set_yticks(sorted(powers)[::-2])
    axes.minorticks_off()
    axes.set_xlim(0, len(run.scales) + 1)
    within_limits(axes)
    axes.grid()
    axes.set_ylabel("loss scale S\n(no unit)")
    axes.set_title(_heading(data, place), loc="left", fontweight="bold", fontsize=12)


def _heading(data: LossScaleData, place: int) -> str:
    rule, run = data.rules[place], data.runs[place]
    hysteresis = f", hysteresis {rule.hysteresis}" if rule.hysteresis > 1 else ""
    return f"{rule.kind}{hysteresis}, window {rule.window}: {sum(run.skipped)} of {len(run.skipped)} steps skipped"


def _loss_scale_description(data: LossScaleData) -> str:
    said = []
    for place, run in enumerate(data.runs):
        skips = "; ".join(f"overflow {where}: {', '.join(map(str, steps)) or 'none'}"
                          for where, steps in data.skips(place).items())
        said.append(f"{_heading(data, place)}, S from {run.scales[0]:,.0f} to {run.scales[-1]:,.0f}, the smallest "
                    f"{min(run.scales):,.0f} (skipped steps by {skips}).")
    return f"Stairs of the loss scale over the steps of a training on {data.runs[0].ranks} ranks. {' '.join(said)}"


# -- Loss curves of the same small training in several formats, with and without what makes 16 bits work -------------
# Legend: S loss scale, u the unit of the data.


FORMAT_LOSSES_TITLE = "The same training in several formats"
FORMAT_DASHES = (0, (5, 1.5))
# The first three lie on each other, each narrower than the one below it. Dashed: something is left out.
LOOKS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "fp32": {"color": FORMAT_COLORS["fp32"], "linewidth": 9.0},
    "bf16 with a master": {"color": FORMAT_COLORS["bf16"], "linewidth": 5.0},
    "fp16 with a master and loss scaling": {"color": FORMAT_COLORS["fp16"], "linewidth": 1.8},
    "fp16 with a master, S = 1": {"color": FORMAT_COLORS["fp16"], "linewidth": 2.4, "linestyle": FORMAT_DASHES},
    "bf16 without a master": {"color": FORMAT_COLORS["bf16"], "linewidth": 2.4, "linestyle": FORMAT_DASHES},
})


@dataclass(frozen=True, slots=True)
class FormatLosses:
    """Each run by its name, all with the data in one unit."""

    unit: float
    window: int
    runs: Mapping[str, FormatRun]

    def curve(self, name: str) -> list[float]:
        """The mean loss of the last ``window`` steps, from the step on that has so many."""
        found: list[float] = np.convolve(self.runs[name].losses, np.ones(self.window) / self.window, "valid").tolist()
        return found


def format_losses_data(steps: int = 160, unit: float = SMALL_UNIT, names: Sequence[str] = tuple(POLICIES),
                       window: int = BATCHES) -> FormatLosses:
    """Trains with each of POLICIES that is named, ``window`` being 1 to ``steps`` steps; ValueError otherwise."""
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names or not 1 <= window <= steps:
        raise ValueError(f"losses of formats take names of {', '.join(POLICIES)}, and means of 1 to {steps} steps; "
                         f"found {', '.join(map(repr, unknown)) or len(names)} and {window}")
    return FormatLosses(unit, window, MappingProxyType({name: format_run(POLICIES[name], steps, unit=unit)
                                                        for name in names}))


def format_losses(data: FormatLosses, style: Style = LIGHT) -> Drawing:
    """A line for each format, named at its end."""
    with style.in_force():
        width, height = 11.6, 6.8
        figure = style.figure(width, height)
        axes = figure.add_axes((1.0 / width, 1.75 / height, 1 - 1.35 / width, 1 - 3.2 / height))
        for name in data.runs:
            curve = data.curve(name)
            (line,) = axes.plot(range(data.window, data.window + len(curve)), curve, solid_capstyle="butt",
                                label=f"{name}: {curve[-1]:.4f} at the end", **LOOKS[name])
            # All points: which of them Matplotlib would leave out hangs on the last bits of a processor's BLAS.
            line.get_path().should_simplify = False
        axes.set(xlabel="step of the training (steps)", ylabel=f"loss, mean of {data.window} steps (no unit)")
        within_limits(axes)
        axes.grid()
        figure.legend(loc="lower center", ncols=2, handlelength=3.4, columnspacing=2.0)
        heading(figure, FORMAT_LOSSES_TITLE, f"Adam on a small network. {_about(data.unit)}\nDashed: something "
                "is left out.", style, below=0.88)
    return Drawing("format-losses", FORMAT_LOSSES_TITLE, _format_losses_description(data), style, figure)


def _about(unit: float) -> str:
    return "" if unit == 1 else (f"Its data are measured in a unit {1 / unit:,.0f} times as large, which makes "
                                 "gradients small.")


def _format_losses_description(data: FormatLosses) -> str:
    said = [f"{name}: {data.curve(name)[0]:.3g} at first, {data.curve(name)[-1]:.3g} at the end, "
            f"{sum(run.skipped)} steps skipped" for name, run in data.runs.items()]
    return f"Loss curves of a small network trained with Adam. {_about(data.unit)} {'; '.join(said)}."
