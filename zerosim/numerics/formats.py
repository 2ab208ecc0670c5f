"""The number formats, each a row of one table.

p is the number of mantissa bits that are stored; emin and emax are the exponents of the smallest and of the
largest normal number. The values of a format are the *grid*: |y| = k·2^(e-p) with emin <= e <= emax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)  # a row equals itself only: comparing all fields costs microseconds
class Format:
    """A binary floating-point format, and the array type whose elements have it."""

    name: str
    dtype: np.dtype[Any]
    exponent_bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    largest: float
    has_infinity: bool = True

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize

    @property
    def bits(self) -> int:
        return 8 * self.nbytes

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def overflow_from(self) -> float:
        """The midpoint between the largest number and the one that would come next. Rounding to nearest even
        overflows above it, and at it too where the largest number's last bit is odd: in the formats with
        infinities, whose largest number has all its mantissa bits set, so not in e4m3."""
        return self.largest + 2.0 ** (self.max_exponent - self.mantissa_bits - 1)

    @property
    def overflow_value(self) -> float:
        """The value of a positive number too large for the format: infinity, or NaN where there is none."""
        return float("inf") if self.has_infinity else float("nan")

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled row is the row itself."""
        return format_of, (self.name,)


def _row(name: str, dtype: npt.DTypeLike, exponent: int, mantissa: int, emin: int, emax: int,
         largest: float, has_infinity: bool = True) -> tuple[str, Format]:  # fmt: skip
    return name, Format(name, np.dtype(dtype), exponent, mantissa, emin, emax, largest, has_infinity)


# IEEE 754 binary32 and binary16; bfloat16; and the two 8-bit formats of the Open Compute Project's OFP8 (2023).
FORMATS: Mapping[str, Format] = MappingProxyType(dict([
    #    name        array type                 exponent, mantissa bits   emin  emax   largest
    _row("fp32",     np.float32,                8, 23,                    -126, 127,   (2 - 2.0**-23) * 2.0**127),
    _row("fp16",     np.float16,                5, 10,                    -14,  15,    65504.0),
    _row("bf16",     ml_dtypes.bfloat16,        8, 7,                     -126, 127,   (2 - 2.0**-7) * 2.0**127),
    _row("fp8_e4m3", ml_dtypes.float8_e4m3fn,   4, 3,                     -6,   8,     448.0, has_infinity=False),
    _row("fp8_e5m2", ml_dtypes.float8_e5m2,     5, 2,                     -14,  15,    57344.0),
]))  # fmt: skip

_BY_DTYPE: Mapping[np.dtype[Any], Format] = {fmt.dtype: fmt for fmt in FORMATS.values()}


def format_of(asked: Format | str | npt.DTypeLike) -> Format:
    """The row that a name or an array type stands for; a Format stands for itself.

    Raises ValueError with the names there are, the most similar first.
    """
    if isinstance(asked, Format):
        return asked
    if isinstance(asked, str):
        if asked in FORMATS:
            return FORMATS[asked]
        fp64 = "; only the compute of a policy may be fp64" * (asked in ("fp64", "float64", "double"))
        raise ValueError(f"no number format is named {asked!r}; there are {_nearest_first(asked)}{fp64}")
    try:
        if asked is None:  # NumPy takes it for float64
            raise TypeError
        dtype = np.dtype(asked)
    except TypeError:
        raise ValueError(f"no number format is {asked!r}; there are {', '.join(FORMATS)}") from None
    if dtype in _BY_DTYPE:
        return _BY_DTYPE[dtype]
    known = ", ".join(f"{fmt.name} ({fmt.dtype.name})" for fmt in FORMATS.values())
    raise ValueError(f"no number format has the array type {dtype.name}; there are {known}")


def _nearest_first(asked: str) -> str:
    return ", ".join(sorted(FORMATS, key=lambda name: -SequenceMatcher(None, asked.lower(), name).ratio()))
