"""Learning-rate schedules: the factor of every lr, by the step, counted from 1; skipped steps are not counted."""

import math
from dataclasses import dataclass

from zerosim.numerics.ranges import AtLeastZero, Count, CountOrZero, require_ranges


@dataclass(frozen=True, slots=True)
class Constant:
    """Always 1."""

    def __call__(self, step: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Warmup:
    """Rises from 1/steps to 1 in so many steps, and stays."""

    steps: Count

    def __post_init__(self) -> None:
        """Raises ValueError for fewer than one step."""
        require_ranges(self)

    def __call__(self, step: int) -> float:
        """min(1, step/steps)."""
        return min(1.0, step / self.steps)


@dataclass(frozen=True, slots=True)
class WarmupCosine:
    """Rises in ``warmup`` steps (0: not at all), then falls along half a cosine to ``final`` at ``steps``, and stays.

    Loshchilov & Hutter 2017 (arXiv:1608.03983), equation 5, without restarts.
    """

    warmup: CountOrZero
    steps: Count
    final: AtLeastZero = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what are no steps, a warmup that does not end before the run does, a final below 0."""
        require_ranges(self)
        if self.warmup >= self.steps:
            raise ValueError(
                f"WarmupCosine was given warmup={self.warmup} of steps={self.steps}; the cosine needs steps "
                "after the warmup"
            )

    def __call__(self, step: int) -> float:
        """The factor of this step."""
        if step <= self.warmup:
            return step / self.warmup
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * share))
