"""One addition of a small number to a larger one, in one format: what becomes of it, and why.

Legend: w a weight, δ (delta) the update that is added to it. A *gap* is the distance between two neighboring numbers
of a format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to, spacing

Why = Literal["kept", "below_half_gap", "tie_to_even", "update_rounds_to_zero", "overflows", "weight_too_large"]


@dataclass(frozen=True, slots=True)
class Addition:
    """w + δ in one format: ``lost`` is what the arithmetic did, ``why`` what the rule says about it.

    ``weight`` and ``update`` are w and δ as the format stores them, and ``moved`` is result - weight, exactly.
    ``neighbor`` is the next number on δ's side, infinite beyond the largest, and ``half_gap`` half the way to it.
    """

    format: str
    weight: float
    update: float
    neighbor: float
    half_gap: float
    weight_is_even: bool
    result: float
    moved: float
    lost: bool
    why: Why


def shortest(value: float | np.generic) -> float:
    """The float with the shortest decimals that give back the same fp32: 1.1001358, not 1.1001358032226562."""
    return float(str(np.float32(value)))


def stored(kernels: NumpyKernels, values: Sequence[float], fmt: Format | str) -> Array:
    """The values (n,) as a format stores them: in its own array type, rounded once, to nearest even."""
    row = np.empty(len(values), format_of(fmt).dtype)
    kernels.cast_pack(np.array(values, np.float64), row)
    return row


def add_once(kernels: NumpyKernels, fmt: Format | str, weight: float, update: float) -> Addition:
    """w + δ, both stored in the format first, made by the kernels and explained by the rule.

    The rule: δ is lost if it is smaller than half the gap from w to its neighbor on δ's side; or just as large while
    w's last bit is 0, since ties go to the even neighbor. Below a power of two the gap is half of that above.
    """
    fmt = format_of(fmt)
    w, delta = stored(kernels, [weight], fmt), stored(kernels, [update], fmt)
    total = np.empty_like(w)
    kernels.add_rounded(w, delta, total)
    before, moved_by, after = (float(x[0]) for x in (w, delta, total))
    if not math.isfinite(before):
        return Addition(fmt.name, before, shortest(moved_by), math.nan, math.nan, False, math.nan, 0.0, True,
                        "weight_too_large")  # fmt: skip
    neighbor, gap = neighbor_of(before, fmt, upward=update > 0)
    even = abs(Fraction(before)) / Fraction(float(spacing(before, fmt))) % 2 == 0
    # A neighbor beyond the largest number has no value of its own, but the gap to it counts all the same.
    return Addition(fmt.name, shortest(before), shortest(moved_by), shortest(neighbor), gap / 2, even, shortest(after),
                    after - before, after == before, _why(moved_by, gap / 2, even, after))  # fmt: skip


def neighbor_of(number: float, fmt: Format, *, upward: bool) -> tuple[float, float]:
    """The next number of the format, and the gap to it. Beyond the largest number: infinity, and the last gap."""
    magnitude = abs(number)
    if number == 0.0 or (number > 0) == upward:
        gap = float(spacing(magnitude, fmt))
        beyond = magnitude + gap if magnitude + gap <= fmt.largest else math.inf
    else:
        beyond = float(round_to(np.nextafter(magnitude, 0.0), fmt, "toward_zero"))
        gap = magnitude - beyond
    return math.copysign(beyond, number) if number else (beyond if upward else -beyond), gap


def _why(update: float, half_gap: float, even: bool, result: float) -> Why:
    if update == 0:
        return "update_rounds_to_zero"
    if abs(update) < half_gap:
        return "below_half_gap"
    if abs(update) == half_gap and even:
        return "tie_to_even"
    return "kept" if math.isfinite(result) else "overflows"


def last_that(holds: Callable[[float], bool], *, up_to: float) -> float:
    """The largest float64 x in [0, up_to) for which ``holds(x)``, which is true from 0 on and false at the end.

    Found by bisection over the bits, whose order is that of the positive numbers: 63 questions at most.
    """
    low, high = 0, int(np.float64(up_to).view(np.int64))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(_from_bits(middle)) else (low, middle)
    return _from_bits(low)


def _from_bits(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
