"""The complementary error function of arrays, which NumPy has not.

erfc(z) = t·exp(-z² + P(t)) with t = 2/(2 + z), for z >= 0: P is smooth on (0, 1], so that a Chebyshev series of few
terms is as exact as the arithmetic, and relative to the result, however small that is. The series is computed at first
use from the standard library's erfc, and from its continued fraction where that is too small for a double.
Source: Abramowitz & Stegun 1964, 7.1.14 (continued fraction); the substitution is common.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from zerosim.numerics.blocks import Array, Scratch

SATURATED = 40.0  # beyond it exp(-z²) is 0 in float64 too
_SMALLEST = 2 / (2 + SATURATED)  # t there
_DEGREE = 40


def complement(z: Array, out: Array, scratch: Scratch) -> Array:
    """out = erfc(z) of one block z >= 0 (n,), float32 or float64; z is clamped to SATURATED; NaN stays NaN."""
    np.minimum(z, SATURATED, out=z)
    t = np.add(z, 2, out=out)
    np.divide(2, t, out=t)
    u = np.multiply(t, 2 / (1 - _SMALLEST), out=scratch.array("erfc u", z.size, z.dtype))
    np.subtract(u, (1 + _SMALLEST) / (1 - _SMALLEST), out=u)
    power = _chebyshev(u, _series(z.dtype), scratch)
    np.multiply(z, z, out=u)
    np.subtract(power, u, out=power)
    np.exp(power, out=power)
    return np.multiply(t, power, out=t)


def _chebyshev(u: Array, series: tuple[float, ...], scratch: Scratch) -> Array:
    """Σ series[i]·T_i(u), by Clenshaw's recurrence."""
    newer, older, spare = (scratch.array(f"erfc {name}", u.size, u.dtype) for name in ("newer", "older", "spare"))
    newer[...], older[...] = 0, 0
    for coefficient in reversed(series[1:]):
        np.multiply(u, newer, out=spare)
        np.multiply(spare, 2, out=spare)
        np.subtract(spare, older, out=spare)
        np.add(spare, coefficient, out=spare)
        newer, older, spare = spare, newer, older
    np.multiply(u, newer, out=spare)
    np.subtract(spare, older, out=spare)
    return np.add(spare, series[0], out=spare)


@cache
def _series(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """The coefficients of P up to the last that the type can notice."""
    nodes = np.polynomial.chebyshev.chebpts1(_DEGREE + 1)
    ts = (nodes * (1 - _SMALLEST) + 1 + _SMALLEST) / 2
    values = [_exponent(2 / t - 2) - math.log(t) for t in ts]
    series = np.polynomial.chebyshev.chebfit(nodes, values, _DEGREE)
    noticed = np.flatnonzero(np.abs(series) > np.finfo(dtype).eps / 8)
    return tuple(float(coefficient) for coefficient in series[:noticed[-1] + 1])


def _exponent(z: float) -> float:
    """log(erfc(z)·exp(z²))."""
    if z < 4:
        return math.log(math.erfc(z)) + z * z
    fraction = 0.0
    for numerator in range(80, 0, -1):
        fraction = numerator / 2 / (z + fraction)
    return -math.log(math.sqrt(math.pi) * (z + fraction))
