"""What is right, in exact fractions and one number at a time; imports nothing of zerosim.

p mantissa bits; emin and emax the exponents of the smallest and the largest normal number.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import inf, isinf, isnan, nan
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Row:
    """A format as its definition has it: all the rest follows."""

    name: str
    dtype: np.dtype[Any]
    exponent_bits: int
    p: int
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.p

    @property
    def code(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.bits // 8}")

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        return 1 - self.bias

    @property
    def largest(self) -> Fraction:
        """With infinities the largest exponent is theirs; without, only its last code is NaN."""
        if self.has_infinity:
            return (2 - Fraction(1, 2**self.p)) * Fraction(2) ** self.bias
        return (2 - Fraction(2, 2**self.p)) * Fraction(2) ** (self.bias + 1)


ROWS = [
    Row("fp32", np.dtype(np.float32), 8, 23),
    Row("fp16", np.dtype(np.float16), 5, 10),
    Row("bf16", np.dtype(ml_dtypes.bfloat16), 8, 7),
    Row("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, has_infinity=False),
    Row("fp8_e5m2", np.dtype(ml_dtypes.float8_e5m2), 5, 2),
]
LOW = ROWS[1:]
by_row, by_low = (pytest.mark.parametrize("row", rows, ids=lambda row: row.name) for rows in (ROWS, LOW))


def exponent_of(magnitude: Fraction) -> int:
    """e with 2^e <= magnitude < 2^(e+1)."""
    e = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return e if magnitude >= Fraction(2) ** e else e - 1


def rounded(x: float, row: Row, mode: str = "nearest", word: int | None = None, *, saturate: bool = False) -> float:
    """x in the format; for stochastic rounding with this word of 32 bits."""
    if isnan(x):
        return nan
    sign = np.copysign(1.0, x)
    overflow = sign * (float(row.largest) if saturate else inf if row.has_infinity else nan)
    if isinf(x):
        return overflow
    magnitude = abs(Fraction(x))
    if magnitude == 0:
        return sign * 0.0
    q = Fraction(2) ** (max(exponent_of(magnitude), row.emin) - row.p)
    steps, fraction = divmod(magnitude / q, 1)
    up = {
        "nearest": fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and steps % 2 == 1),
        "toward_zero": False,
        "stochastic": word is not None and (word + Fraction(1, 2)) / 2**32 < fraction,
    }[mode]
    result = (steps + up) * q
    if result > row.largest:
        return sign * float(row.largest) if mode == "toward_zero" else overflow
    return sign * float(result)


def values(row: Row) -> npt.NDArray[np.float64]:
    """The values of all codes, in the order of the codes (2^bits,), by the array type's own cast."""
    with np.errstate(all="ignore"):
        return np.arange(2**row.bits).astype(row.code).view(row.dtype).astype(np.float32).astype(np.float64)


def magnitudes(row: Row) -> npt.NDArray[np.float64]:
    """The finite values from 0 to the largest, in order: the value of code i stands at place i."""
    all_values = values(row)[: 2 ** (row.bits - 1)]
    return all_values[np.isfinite(all_values)]


def same(a: Array, b: Array) -> bool:
    """Whether two arrays of one type are equal in bits, any NaN being as good as another."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    word = f"u{a.dtype.itemsize}"
    with np.errstate(invalid="ignore"):  # a signaling NaN of bf16 raises the flag even when asked what it is
        nan_in_both = np.isnan(a) & np.isnan(b)
    return bool(((a.view(word) == b.view(word)) | nan_in_both).all())


def every_code(row: Row) -> Array:
    """All codes of an 8- or 16-bit format, as an array of its type."""
    return np.arange(2**row.bits).astype(row.code).view(row.dtype)


def cast(x: Array, dtype: npt.DTypeLike) -> Array:
    """The array type's own cast, silent."""
    with np.errstate(all="ignore"):
        return x.astype(dtype)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)


@cache
def awkward_floats(count: int, seed: int) -> npt.NDArray[np.float32]:
    """float32 (count,): a third of them random bits, a third gradients of all magnitudes from 1e-10 on, a third around
    the largest numbers of the formats; first zeros, infinities, NaN, and the ends of float32's range."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    gradients = (rng.standard_normal(count) * 10.0 ** rng.uniform(-10, 0, count)).astype(np.float32)
    tops = np.array([65504, 57344, 448, 3.39e38, 65520, 61440, 464], np.float32)
    large = cast(rng.choice(tops, count) * rng.uniform(0.9, 1.1, count), np.float32)
    picked = np.choose(rng.integers(0, 3, count), [bits, gradients, large]).astype(np.float32)
    picked[:SPECIAL.size] = SPECIAL[:count]
    picked.flags.writeable = False
    return picked
