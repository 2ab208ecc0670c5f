"""Lost updates: which small changes a number format does not see, what helps, and what does not.

Everything is run with the package's own arithmetic; nothing is recited. Legend: w a weight, δ an update, lr the
learning rate, g a gradient.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from zerosim.course.lost_updates import cures, one_addition
from zerosim.course.lost_updates import moments as lost_moments
from zerosim.course.lost_updates import sizes as update_sizes
from zerosim.display.tables import without_infinities
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to
from zerosim.optim import Adam

# The numbers of a popular example: so small an update that its readers are told to keep their weights in fp32.
POPULAR_LR = 0.001
POPULAR_GRADIENT = 0.00001
POPULAR_UPDATE = POPULAR_LR * POPULAR_GRADIENT
POPULAR_WEIGHTS = (1.0, 0.5, 0.25, 0.1)
FIRST_GRADIENTS = (1.0, 1e-2, POPULAR_GRADIENT, 1e-8)
SMALL_VALUES = (6e-5, 1e-6, 4e-8, 2.9e-8)
MOMENT_GRADIENT = 1e-3
MOMENT_STEPS = (1, 10, 100, 1000, 2000)
SEEDS = tuple(range(256))


@dataclass(frozen=True, slots=True)
class Question:
    """What can be asked: is w + δ lost in a format, and where does w come in so many steps?

    Raises ValueError for an unknown format, for a weight that is not finite or too large for the format, for an update
    that is 0 or not finite, and for fewer than one step.
    """

    format: str = "fp16"
    weight: float = 1.0
    update: float = 1e-5
    steps: int = 10_000

    def __post_init__(self) -> None:
        row = format_of(self.format)
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight must be a finite number, found {self.weight}")
        if not (math.isfinite(self.update) and self.update):
            raise ValueError(f"the update must be a finite number other than 0, found {self.update}")
        if self.steps < 1:
            raise ValueError(f"the update is added at least once, found steps={self.steps}")
        if not fits(row.name, self.weight):
            raise ValueError(f"{row.name} has no number as large as the weight {self.weight:g}: its largest is "
                             f"{row.largest:g}; take a smaller weight, or a format that reaches further")  # fmt: skip

    @property
    def updates(self) -> tuple[float, ...]:
        """The update asked for, and beside it that of the popular example."""
        return tuple(dict.fromkeys((self.update, POPULAR_UPDATE)))

    @property
    def formats(self) -> list[str]:
        """The format asked for, then the three in which models are trained; without those too small for the weight."""
        return [name for name in dict.fromkeys((self.format, "fp16", "bf16", "fp32")) if fits(name, self.weight)]


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """All answers. ``exact`` is w + steps·δ for each of ``updates``; ``seeds`` are those of stochastic rounding;
    ``popular_limit`` is the largest w that fp32 changes by adding the popular example's update."""

    question: Question
    additions: tuple[one_addition.Addition, ...]
    updates: tuple[float, ...]
    exact: tuple[float, ...]
    seeds: tuple[int, ...]
    outcomes: tuple[cures.Outcome, ...]
    survivors: tuple[update_sizes.Survivor, ...]
    popular_limit: float
    first_steps: tuple[update_sizes.FirstStep, ...]
    thresholds: tuple[update_sizes.Threshold, ...]
    moments: tuple[lost_moments.Moments, ...]
    format_facts: tuple[update_sizes.FormatFacts, ...]
    underflows: tuple[update_sizes.Underflow, ...]

    def addition(self, fmt: str) -> one_addition.Addition:
        """w + δ in one format."""
        return next(found for found in self.additions if found.format == fmt)

    def outcome(self, method: cures.Method, fmt: str, update: float) -> cures.Outcome:
        """Where one method has come in one format with one update."""
        return next(found for found in self.outcomes
                    if (found.method, found.format, found.update) == (method, fmt, update))  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The same as plain data. Numbers are the shortest decimals that give back the same value; what is no finite
        number is the text "inf", "-inf" or "nan", since JSON has no such numbers."""
        plain: dict[str, Any] = without_infinities(dataclasses.asdict(self))
        return plain


def lost_updates(question: Question, *, seeds: tuple[int, ...] = SEEDS) -> LostUpdates:
    """Runs everything that the question needs: a second or two for 10,000 steps."""
    kernels = NumpyKernels()
    task = cures.Task(question.weight, question.updates, question.steps)
    fitting = [name for name in FORMATS if fits(name, question.weight)]
    low = [name for name in question.formats if name != "fp32"]
    return LostUpdates(
        question,
        tuple(one_addition.add_once(kernels, name, question.weight, question.update) for name in FORMATS),
        task.updates,
        tuple(map(task.exact, task.updates)),
        seeds,
        tuple(cures.all_outcomes(kernels, task, question.formats, seeds)),
        tuple(update_sizes.survivors(kernels, POPULAR_WEIGHTS, POPULAR_UPDATE)),
        update_sizes.largest_that_moves(kernels, POPULAR_UPDATE),
        tuple(update_sizes.first_steps(kernels, question.format, question.weight, POPULAR_LR, FIRST_GRADIENTS)),
        tuple(update_sizes.adam_thresholds(kernels, fitting, question.weight)),
        tuple(row for name in ("fp32", *low)
              for row in lost_moments.moments(kernels, name, Adam(), MOMENT_GRADIENT, MOMENT_STEPS)),
        tuple(update_sizes.format_facts()),
        tuple(update_sizes.underflows("fp16", SMALL_VALUES)),
    )  # fmt: skip


def fits(fmt: str, weight: float) -> bool:
    """Whether a format has a finite number for the weight."""
    return math.isfinite(float(round_to(float(weight), fmt)))
