"""The arrays of one step of mixed precision, from the master weights round to the master weights.

Legend: N ranks, P parameters, S loss scale. Lengths are inches on paper.
"""

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.course.observed_step import ObservedStep, Passed, observed_step
from zerosim.display.drawing import LIGHT, Drawing, Point, Sheet, Style
from zerosim.display.style import KIND_COLORS, ink_on

TITLE = "A step of mixed precision: what rests, what flows"
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
    with style.figure(WIDTH, HEIGHT) as figure:
        sheet = Sheet(axes=figure.in_inches(), style=style)
        for name, lines in _boxes(data).items():
            _box(sheet, name, lines)
        for start, end in _arrows():
            sheet.arrow(start, end, color=style.ink, linewidth=1.8, mutation_scale=17)
        for place, align, words in _words(data):
            sheet.text(*place, words, ha=align, linespacing=1.4)
        sheet.text(0.25, HEIGHT - 0.36, TITLE, fontsize=17, fontweight="bold")
        sheet.text(0.25, HEIGHT - 0.98, f"Rank 0 of {data.ranks}, an MLP of {data.parameter_count:,} parameters with "
                   f"Adam in {data.weights.format}, S = {data.scale:,.0f}; formats and bytes are "
                   "measured.\nColored boxes rest between steps, in B per parameter: "
                   f"{_per_parameter(data)}.", color=style.muted, linespacing=1.45)
    return Drawing("mixed-precision", TITLE, _description(data), style, figure)


def _boxes(data: ObservedStep) -> dict[str, tuple[str, str]]:
    """Of each box its heading and what stands under it."""
    return {
        "master": ("master weights", _held(data.master)), "weights": ("weights", _held(data.weights)),
        "forward": ("forward", "reads weights\nand the batch"), "loss": ("loss", f"times S = {data.scale:,.0f}"),
        "backward": ("backward", "reads weights and\nwhat forward kept"),
        "gradient": ("gradient, S times", _held(data.gradient)), "adam": ("Adam: m and v", _held(data.state))}


def _box(sheet: Sheet, name: str, lines: tuple[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), color = CENTERS[name], KIND_COLORS[KINDS[name]] if name in KINDS else sheet.style.background
    corner, (heading, below), ink = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2), lines, ink_on(color)
    sheet.axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, facecolor=color, edgecolor=sheet.style.muted,
                                        linewidth=1.2, boxstyle="round,pad=0,rounding_size=0.1"))
    sheet.text(x, y + 0.28, heading, ha="center", fontsize=14, fontweight="bold", color=ink)
    sheet.text(x, y - 0.17, below, ha="center", linespacing=1.4, color=ink)


def _arrows() -> list[tuple[Point, Point]]:
    """Each arrow: from where to where."""
    half, tall = BOX_WIDTH / 2, BOX_HEIGHT / 2
    (left, _), (x, _), (right, _), (loss, _) = (CENTERS[name] for name in ("master", "weights", "forward", "loss"))
    return [((left + half, HIGH), (x - half, HIGH)), ((x + half, HIGH), (right - half, HIGH)),
            ((x + half, HIGH - tall), (right - half, LOW + tall)), ((right, HIGH - tall), (right, LOW + tall)),
            ((right + half, HIGH), (loss, MIDDLE + tall)), ((loss, MIDDLE - tall), (right + half, LOW)),
            ((right - half, LOW), (x + half, LOW)), ((x - half, LOW), (left + half, LOW)),
            ((left, LOW + tall), (left, HIGH - tall))]


def _words(data: ObservedStep) -> list[tuple[Point, str, str]]:
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


def _description(data: ObservedStep) -> str:
    return (f"A round of boxes and arrows. The master weights ({_flow(data.master)}) are cast to weights "
            f"({_flow(data.weights)}). Forward reads them, keeps layers' inputs ({_flow(data.kept)}) and "
            f"{data.signs_nbytes:,} B of signs for backward, and hands its output ({_flow(data.output)}) to the loss. "
            f"Backward begins with the gradient of {data.scale:,.0f} times the loss ({_flow(data.output_gradient)}) "
            f"and leaves the gradient of the weights ({_flow(data.gradient)}). It is added up over {data.ranks} ranks, "
            f"each of which sends {data.sent_nbytes:,} B, and divided by {data.gradient_divisor:,.0f} in "
            f"{data.wide_gradient.format}, in blocks of {data.block_nbytes:,} of {data.wide_gradient.nbytes:,} B. "
            f"Adam, with m and v ({_flow(data.state)}), updates the master weights. At rest, in bytes per parameter: "
            f"{_per_parameter(data)}.")
