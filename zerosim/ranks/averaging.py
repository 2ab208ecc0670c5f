"""The averaging rules by name: where a mean over N ranks divides, which decides what overflows or underflows.

Legend: N ranks. Every multiplication and division is computed in fp32 and rounded once to the array's format.
"""

from dataclasses import dataclass

import numpy as np

from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.names import did_you_mean
from zerosim.numerics.rounding import round_to


def split_factors(ranks: int) -> tuple[int, float]:
    """(before, after): a power of two near sqrt(N) that divides before the sum, and the rest that divides after it.

    Keeps fp16 sums of many ranks in range at both ends; the rule of fairscale's and PyTorch's FSDP.

    >>> split_factors(6), split_factors(64)
    ((4, 1.5), (8, 8.0))
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a rule does with each contribution before the sum, and with the sum: divide, or multiply by a factor."""

    divide_before: float = 1.0
    multiply_before: float = 1.0
    divide_after: float = 1.0

    @property
    def changes_input(self) -> bool:
        return (self.divide_before, self.multiply_before) != (1.0, 1.0)

    def before(self, kernels: NumpyKernels, x: np.ndarray, out: np.ndarray) -> None:
        """Writes the scaled contribution, (n,), to ``out``."""
        if self.multiply_before != 1.0:
            kernels.multiply_rounded(x, self.multiply_before, out)
        else:
            kernels.divide_rounded(x, self.divide_before, out)

    def after(self, kernels: NumpyKernels, total: np.ndarray) -> None:
        """Scales the sum, (n,), in place."""
        if self.divide_after != 1.0:
            kernels.divide_rounded(total, self.divide_after, total)


AVERAGES = ("sum_then_divide", "divide_then_sum", "split", "premultiply")


def scaling(rule: str, ranks: int, dtype: np.dtype) -> Scaling:
    """The factors of a rule for N ranks.

    ``sum_then_divide`` can overflow, ``divide_then_sum`` underflow; ``split`` divides by a power of two before and by
    the rest after; ``premultiply`` multiplies by 1/N rounded to the format, which biases bf16 by +0.195 % at N = 3.
    Raises ValueError for an unknown rule.
    """
    match rule:
        case "sum_then_divide":
            return Scaling(divide_after=ranks)
        case "divide_then_sum":
            return Scaling(divide_before=ranks)
        case "split":
            before, after = split_factors(ranks)
            return Scaling(divide_before=before, divide_after=after)
        case "premultiply":
            inverse = 1 / ranks if dtype == np.float64 else float(round_to(np.float32(1 / ranks), format_of(dtype)))
            return Scaling(multiply_before=inverse)
    raise ValueError(f"no averaging rule {rule!r}; choose one of {', '.join(AVERAGES)}"
                     f"{did_you_mean(rule, AVERAGES)}")
