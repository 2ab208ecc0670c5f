"""The loss scale over a training whose gradients overflow now and then: two rules, and the steps that were skipped.

Legend: N ranks, S loss scale.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.course.precision_runs import SmallRun, format_run
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, within_limits
from zerosim.display.style import BLUE, ORANGE, PURPLE, VERMILLION
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy

TITLE = "Dynamic loss scaling: S grows until gradients overflow"
EVERYWHERE, SOMEWHERE, IN_THE_SUM = "on every rank", "on some ranks", "in the sum over ranks alone"
MARKS: Mapping[str, tuple[str, str]] = MappingProxyType({
    EVERYWHERE: ("X", VERMILLION), SOMEWHERE: ("^", ORANGE), IN_THE_SUM: ("o", PURPLE)})


@dataclass(frozen=True, slots=True)
class LossScaleData:
    """The same training under several rules."""

    rules: tuple[Dynamic, ...]
    runs: tuple[SmallRun, ...]

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
    one_more = "; after an overflow deepspeed takes one more" * any(rule.kind == "deepspeed" for rule in data.rules)
    rows, words = len(data.runs), (
        f"A small network in fp16 on {data.runs[0].ranks} ranks. A mark is a step that all of them skipped, since a "
        "gradient was inf or NaN.\nThe window is how many good steps it takes until S grows" + one_more + ".")
    with style.figure(11.6, 2.95 + 2.5 * rows, TITLE, words, below=0.88) as figure:
        panels = figure.panels(rows, 1, left=1.1, right=0.3, top=1.8, bottom=1.4, hspace=0.3, sharex=True)[:, 0]
        for place, axes in enumerate(panels):
            _panel(axes, data, place)
        panels[-1].set_xlabel("step of the training (steps)")
        lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend([lines[name] for name in _labels()], _labels(), ncols=4, columnspacing=1.8)
    return Drawing("loss-scale", TITLE, _description(data), style, figure)


def _labels() -> list[str]:
    return ["loss scale", *(f"overflow {where}" for where in MARKS)]


def _panel(axes: Axes, data: LossScaleData, place: int) -> None:
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
    axes.set(ylabel="loss scale S", title=_heading(data, place))


def _heading(data: LossScaleData, place: int) -> str:
    rule, run = data.rules[place], data.runs[place]
    hysteresis = f", hysteresis {rule.hysteresis}" if rule.hysteresis > 1 else ""
    return f"{rule.kind}{hysteresis}, window {rule.window}: {sum(run.skipped)} of {len(run.skipped)} steps skipped"


def _description(data: LossScaleData) -> str:
    said = []
    for place, run in enumerate(data.runs):
        skips = "; ".join(f"overflow {where}: {', '.join(map(str, steps)) or 'none'}"
                          for where, steps in data.skips(place).items())
        said.append(f"{_heading(data, place)}, S from {run.scales[0]:,.0f} to {run.scales[-1]:,.0f}, the smallest "
                    f"{min(run.scales):,.0f} (skipped steps by {skips}).")
    return f"Stairs of the loss scale over the steps of a training on {data.runs[0].ranks} ranks. {' '.join(said)}"
