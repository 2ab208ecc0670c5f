"""What a number or a text of a device or a link must be, each refusal a sentence that says where it stands."""

import math
from collections.abc import Iterable
from typing import Any

from zerosim.numerics.names import did_you_mean

LEAST, MOST = 1e-30, 1e30  # in SI units no machine is beyond, and quotients of these and of counts are finite


def positive(where: str, key: str, value: Any, *, or_zero: bool = False) -> float:
    """The value as a float; raises ValueError unless it is a number from 1e-30 (zero, if that may be) to 1e30."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (value == 0 and not or_zero):
        least = "that is not negative" if or_zero else "above 0"
        raise ValueError(f"{where}: {key} must be a finite number {least}, got {value!r}")
    if value > MOST or (value < LEAST and not or_zero):
        raise ValueError(f"{where}: {key} must be between {0 if or_zero else LEAST:g} and {MOST:g}, got "
                         f"{value!r:.30}; look at its unit")
    return float(value)


def whole(where: str, key: str, value: Any) -> int:
    """The value as an int, of 80e9 too; raises ValueError unless it is a whole number above zero."""
    if positive(where, key, value) != int(value):
        raise ValueError(f"{where}: {key} must be a whole number of bytes, got {value!r}")
    return int(value)


def checked_text(where: str, key: str, value: Any) -> str:
    """The text; raises ValueError for what is none, or blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key} must be a text, got {value!r}; a number without a {key} cannot be checked")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of the known names, or nothing."""
    return did_you_mean(str(name).lower(), known, most=3, likeness=0.5)
