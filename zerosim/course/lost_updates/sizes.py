"""How large an update is, and how large it must be: SGD beside Adam, and the smallest learning rates that are not lost.

Legend: w a weight, g its gradient, lr the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zerosim.course.lost_updates.one_addition import add_once, last_that, shortest
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to, spacing
from zerosim.optim import SGD, Adam, Optimizer, UpdateContext

Direction = Literal["down", "up"]
EPSILON = Adam().epsilon


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What SGD and Adam subtract from w in their first step, in fp32, and what w becomes of it in ``format``."""

    format: str
    gradient: float
    sgd_update: float
    sgd_result: float
    sgd_lost: bool
    adam_update: float
    adam_result: float
    adam_lost: bool


@dataclass(frozen=True, slots=True)
class Threshold:
    """The largest learning rate at which Adam's first step leaves w where it is, in one format and direction."""

    format: str
    direction: Direction
    lost_up_to: float


@dataclass(frozen=True, slots=True)
class Survivor:
    """fp32 with a small update: what w becomes when it is subtracted and when it is added."""

    weight: float
    gap_below: float
    gap_above: float
    down_lost: bool
    up_lost: bool


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """The size of a format's steps, and where it ends below: all positive numbers up to ``zero_up_to`` become 0."""

    format: str
    bits: int
    mantissa_bits: int
    gap_at_one: float
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    zero_up_to: float


@dataclass(frozen=True, slots=True)
class Underflow:
    """A small number, and what a format makes of it."""

    format: str
    value: float
    stored: float


def first_update(kernels: NumpyKernels, optimizer: Optimizer, gradient: float) -> float:
    """What the optimizer subtracts from a weight in its first step, in fp32: its own step, made on a weight of 0."""
    w, g = np.zeros(1, np.float32), np.array([gradient], np.float32)
    state = {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(w.shape).items()}
    optimizer.update(UpdateContext(kernels), w, g, state, step=1)
    return -float(w[0])


def first_steps(kernels: NumpyKernels, fmt: str, weight: float, lr: float,
                gradients: tuple[float, ...]) -> Iterator[FirstStep]:  # fmt: skip
    """SGD's update is lr·g. Adam's is lr·g/(|g| + ε), which is lr whatever |g|, as long as |g| is larger than ε."""
    for gradient in gradients:
        sgd, adam = (first_update(kernels, optimizer, gradient) for optimizer in (SGD(lr), Adam(lr)))
        with_sgd, with_adam = add_once(kernels, fmt, weight, -sgd), add_once(kernels, fmt, weight, -adam)
        yield FirstStep(fmt, gradient, shortest(sgd), with_sgd.result, with_sgd.lost,
                        shortest(adam), with_adam.result, with_adam.lost)  # fmt: skip


def adam_thresholds(kernels: NumpyKernels, formats: list[str], weight: float) -> Iterator[Threshold]:
    """For each format, downwards (g = 1) and upwards (g = -1): by bisection, each question a real step of Adam."""
    directions: tuple[tuple[Direction, float], ...] = (("down", 1.0), ("up", -1.0))
    for name in formats:
        for direction, gradient in directions:

            def lost(lr: float, name: str = name, gradient: float = gradient) -> bool:
                return add_once(kernels, name, weight, -first_update(kernels, Adam(lr), gradient)).lost

            yield Threshold(name, direction, last_that(lost, up_to=FORMATS["fp32"].largest))


def survivors(kernels: NumpyKernels, weights: tuple[float, ...], update: float) -> Iterator[Survivor]:
    """Whether fp32 keeps w - update and w + update."""
    for weight in weights:
        down, up = (add_once(kernels, "fp32", weight, change) for change in (-update, update))
        yield Survivor(weight, 2 * down.half_gap, 2 * up.half_gap, down.lost, up.lost)


def largest_that_moves(kernels: NumpyKernels, update: float) -> float:
    """The largest number of fp32 that changes when the update is added; found by bisection."""

    def moves(weight: float) -> bool:
        return not add_once(kernels, "fp32", weight, update).lost

    # The bisection's last float64 is near the end of those that round to the number looked for.
    return shortest(last_that(moves, up_to=FORMATS["fp32"].largest))


def format_facts() -> Iterator[FormatFacts]:
    """One row for each format; ``zero_up_to`` is found by bisection on the real rounding."""
    for name, row in FORMATS.items():

        def vanishes(value: float, name: str = name) -> bool:
            return float(round_to(value, name)) == 0.0

        yield FormatFacts(name, row.bits, row.mantissa_bits, float(spacing(1.0, name)), row.largest,
                          row.smallest_normal, row.smallest_subnormal, last_that(vanishes, up_to=1.0))  # fmt: skip


def underflows(fmt: str, values: tuple[float, ...]) -> Iterator[Underflow]:
    """What the format makes of small numbers."""
    for value in values:
        yield Underflow(format_of(fmt).name, value, shortest(float(round_to(value, fmt))))
