"""Rotary positions: how far each plane of a head turns from one place to the next, and how long contexts slow it down.

Legend: D channels of a head, D/2 planes of two channels each; a frequency is in radians per place.
Sources: Su et al. 2021 (RoFormer, arXiv:2104.09864), section 3.4.2, for the frequencies; Chen et al. 2023, "Extending
context window of large language models via positional interpolation" (arXiv:2306.15595), section 2, for the linear
scaling; for Llama 3.1's `apply_scaling` in the reference code of Meta's `llama-models`
(https://github.com/meta-llama/llama-models, models/llama3/model.py), as of 2024.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_finite_number
from zerosim.numerics.ranges import Range, require_ranges

Number = Annotated[float, Range("take a positive number", lambda value: is_finite_number(value) and value > 0)]


@dataclass(frozen=True)
class RotaryScaling(ABC):
    """Slower turns, for a context longer than the one that a model was first trained on.

    Raises ValueError for numbers that are not finite and positive.
    """

    factor: Number

    def __post_init__(self) -> None:
        require_ranges(self)

    @abstractmethod
    def scaled(self, frequencies: Array) -> Array:
        """The slower frequencies of all planes (D/2,) float64."""


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """All planes turn ``factor`` times slower: places are interpolated.

    >>> LinearScaling(4.0).scaled(np.array([1.0, 0.01])).tolist()
    [0.25, 0.0025]
    """

    def scaled(self, frequencies: Array) -> Array:
        """f/factor."""
        return np.divide(frequencies, self.factor)


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1's: planes that turn at most ``low`` times round in ``original_context`` places go ``factor`` times
    slower, those that turn ``high`` times and more as they did, and those between in between.

    >>> Llama3Scaling(8.0, 1.0, 4.0, 8192).scaled(np.array([1.0, 2.5 * 2 * math.pi / 8192, 1e-5])).round(9).tolist()
    [1.0, 0.00107858, 1.25e-06]

    Raises ValueError unless ``high`` is more than ``low``, too.
    """

    low: Number
    high: Number
    original_context: Number

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high > self.low:
            raise ValueError(f"Llama3Scaling was given low={self.low!r} and high={self.high!r}, turns in the original "
                             "context; high is to be more than low")

    def scaled(self, frequencies: Array) -> Array:
        """f·((1 - s)/factor + s), s from 0 at ``low`` turns to 1 at ``high``."""
        turns = frequencies * (self.original_context / (2 * math.pi))
        s = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return np.multiply(frequencies, (1 - s) / self.factor + s)


def frequencies(width: int, base: float, scaling: RotaryScaling | None) -> tuple[float, ...]:
    """The frequencies of all planes of a head (D/2,): base^(-2i/D), scaled where a scaling is given.

    >>> frequencies(4, 100.0, None), frequencies(4, 100.0, LinearScaling(2.0))
    ((1.0, 0.1), (0.5, 0.05))
    """
    plain = base ** (-np.arange(0, width, 2) / width)
    return tuple((plain if scaling is None else scaling.scaled(plain)).tolist())
