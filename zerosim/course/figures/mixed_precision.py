"""One step of mixed precision, watched: the arrays from the master weights round to the master weights.

Nothing is derived: the units and the optimizer are watched as in the worked example, the rest is read from memory, the
trace and the arrays at rest. Legend: P parameters, N ranks, S loss scale. Lengths are inches on paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.course.worked_example import watched
from zerosim.display.drawing import LIGHT, Drawing, Point, Sheet, Style
from zerosim.display.style import KIND_COLORS, ink_on
from zerosim.models.small import MLP
from zerosim.numerics import random
from zerosim.numerics.formats import format_of
from zerosim.numerics.loss_scale import Static
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam, UpdateContext
from zerosim.optim.base import State
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

TITLE = "A step of mixed precision: what rests, what flows"
WIDTH, HEIGHT = 14.2, 6.7
BOX_WIDTH, BOX_HEIGHT = 2.2, 1.15
HIGH, MIDDLE, LOW = 4.3, 2.75, 1.2  # the middles of the boxes
CENTERS: Mapping[str, Point] = MappingProxyType({  # the middle of each box
    "master": (1.35, HIGH), "weights": (6.25, HIGH), "forward": (9.6, HIGH), "loss": (12.9, MIDDLE),
    "backward": (9.6, LOW), "gradient": (6.25, LOW), "adam": (1.35, LOW)})
KINDS = {"master": "master", "weights": "parameter", "gradient": "gradient", "adam": "optimizer_state"}


@dataclass(frozen=True, slots=True)
class Passed:
    """Arrays of one format that passed together."""

    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """The memory that rank 0 held, the values that it handed on and the bytes that it sent in a step.

    ``master``, ``weights``, ``gradient`` and ``state`` rest between steps. ``kept`` are the inputs of layers that
    forward keeps for backward, beside ``signs_nbytes`` of ReLU's signs; ``output`` is what it hands to the loss,
    ``output_gradient`` the gradient of S times the loss that backward begins with. ``sent_nbytes`` is what the sum of
    gradients over ranks sent, and ``gradient_divisor`` what it is divided by; ``wide_gradient`` is what the optimizer
    was handed then, in blocks of at most ``block_nbytes``.
    """

    parameter_count: int
    ranks: int
    scale: float
    skipped: bool
    master: Passed
    weights: Passed
    kept: Passed
    signs_nbytes: int
    output: Passed
    output_gradient: Passed
    gradient: Passed
    sent_nbytes: int
    gradient_divisor: float
    wide_gradient: Passed
    block_nbytes: int
    state: Passed


@dataclass(frozen=True)
class _WatchedAdam(Adam):
    """Adam; copies the gradients that it is handed."""

    handed: list[np.ndarray] = field(default_factory=list, repr=False)

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
        self.handed.append(g.copy())
        super().update(ctx, w, g, state, step)


def mixed_precision_data(compute: str = "fp16", widths: Sequence[int] = (256,) * 4, rows: int = 32, *,
                         ranks: int = 2, scale: float = 1024.0) -> ObservedStep:
    """Takes one step of an MLP without biases with Adam, at stage 0, on ``rows`` samples of each rank.

    Raises ValueError for a format that needs no master beside it, and for a step that overflows.
    """
    if format_of(compute).name == "fp32":
        raise ValueError("asked to watch a step that computes in fp32, which has one copy of the weights and nothing "
                         "to cast; take compute='fp16' or 'bf16'")
    policy = Policy(compute, loss_scale=Static(scale, skips=1))
    found: ObservedStep = Cluster(ranks).run(_observed_program, policy, tuple(widths), rows)[0]
    return found


def _observed_program(rank: Rank, policy: Policy, widths: tuple[int, ...], rows: int) -> ObservedStep:
    (model, passes), adam = watched(MLP(widths, bias=False)), _WatchedAdam()
    engine = Engine(rank, model, adam, stage=0, policy=policy)
    x, target = (random.normal((0, "observed step", rank.index, name), 0, rows * width).reshape(rows, width)
                 for name, width in (("x", widths[0]), ("target", widths[-1])))
    tape = engine.forward(x, target)
    saved = list(_arrays(tape.saved))
    kept = _passed(*(array for array in saved if array.dtype == policy.compute_dtype))
    signs_nbytes = sum(array.nbytes for array in saved if array.dtype == np.uint8)
    del saved
    engine.backward(tape)
    engine.reduce()
    divisor = engine.param_group.reduced_gradient.divisor
    result = engine.update([tape.loss])
    engine.all_gather_parameters()
    resting, group = rank.memory.now_nbytes_by_kind, engine.param_group
    last_forward, first_backward = passes[len(model.units) - 1:][:2]

    def rests(kind: str, *arrays: np.ndarray) -> Passed:
        return Passed(_passed(*arrays).format, resting[kind])

    return ObservedStep(
        model.parameter_count, rank.size, result.scale, result.skipped,
        master=rests("master", group.master), weights=rests("parameter", group.parameter), kept=kept,
        signs_nbytes=signs_nbytes, output=_passed(last_forward.values_out),
        output_gradient=_passed(first_backward.values_in), gradient=rests("gradient", group.gradient),
        sent_nbytes=rank.trace.sent_nbytes("gradients"), gradient_divisor=divisor,
        wide_gradient=_passed(*adam.handed), block_nbytes=max(g.nbytes for g in adam.handed),
        state=rests("optimizer_state", *group.slots.values()))


def _passed(*arrays: np.ndarray) -> Passed:
    """The format and the bytes of arrays, which have one format."""
    (dtype,) = {array.dtype for array in arrays}
    return Passed(format_of(dtype).name, sum(array.nbytes for array in arrays))


def _arrays(kept: Any) -> Iterator[np.ndarray]:
    """The arrays in lists and tuples of such, each once more for each time that it is there."""
    if isinstance(kept, np.ndarray):
        yield kept
    elif kept is not None:
        for one in kept:
            yield from _arrays(one)


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
        "master": ("master weights", _flow(data.master, "\n")), "weights": ("weights", _flow(data.weights, "\n")),
        "forward": ("forward", "reads weights\nand the batch"), "loss": ("loss", f"times S = {data.scale:,.0f}"),
        "backward": ("backward", "reads weights and\nwhat forward kept"),
        "gradient": ("gradient, S times", _flow(data.gradient, "\n")),
        "adam": ("Adam: m and v", _flow(data.state, "\n"))}


def _box(sheet: Sheet, name: str, lines: tuple[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), color = CENTERS[name], KIND_COLORS[KINDS[name]] if name in KINDS else sheet.style.background
    corner, (heading, below), ink = (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2), lines, ink_on(color)
    sheet.axes.add_patch(FancyBboxPatch(corner, BOX_WIDTH, BOX_HEIGHT, facecolor=color, edgecolor=sheet.style.muted,
                                        linewidth=1.2, boxstyle="round,pad=0,rounding_size=0.1"))
    sheet.text(x, y + 0.28, heading, ha="center", fontsize=14, fontweight="bold", color=ink)
    sheet.text(x, y - 0.17, below, ha="center", linespacing=1.4, color=ink)


def _arrows() -> list[tuple[Point, Point]]:
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
