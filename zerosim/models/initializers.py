"""First values of parameters.

An initializer takes the parameter's name, a start and a count, and returns fp32 (count,). An element depends on the
name and its index alone: any rank can ask for any piece, and nothing depends on how the vector is cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.arrays import Array

Initializer = Callable[[str, int, int], Array]


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal values of mean 0 and a given standard deviation, keyed by the seed and the parameter's name."""

    seed: int
    deviation: float

    def __call__(self, name: str, start: int, count: int) -> Array:
        """fp32 (count,)."""
        return random.normal((self.seed, "init", 0, name), start, count) * np.float32(self.deviation)


@dataclass(frozen=True, slots=True)
class Filled:
    """The same value everywhere, as 0 in a bias and 1 in a norm's weight."""

    value: float

    def __call__(self, name: str, start: int, count: int) -> Array:
        """fp32 (count,)."""
        return np.full(count, self.value, np.float32)


@dataclass(frozen=True, slots=True)
class Constants:
    """Values written out one by one, in row-major order."""

    values: tuple[float, ...]

    def __call__(self, name: str, start: int, count: int) -> Array:
        """fp32 (count,)."""
        return np.array(self.values[start:start + count], np.float32)
