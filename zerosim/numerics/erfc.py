"""The complementary error function of arrays, which NumPy has not.

erfc(z) = t·exp(-z² + P(t)) with t = 2/(2 + z), for z >= 0: P is smooth on (0, 1], so that a Chebyshev series of few
terms is as exact as the arithmetic, and relative to the result, however small that is. The series is stored, so that
the same numbers come out of every version of NumPy.
Source: Abramowitz & Stegun 1964, 7.1.14 (continued fraction); the substitution is common.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from zerosim.numerics.blocks import Array, Scratch

SATURATED = 40.0  # beyond it exp(-z²) is 0 in float64 too
_SMALLEST = 2 / (2 + SATURATED)  # t there

# The Chebyshev coefficients of P(t) = log(erfc(z)·exp(z²)) - log(t), z = 2/t - 2, on t from _SMALLEST to 1, up to the
# last that float64 notices: those of its interpolation in 41 Chebyshev points, computed on 2026-11-22 with 60 digits
# and rounded once. A test computes them again in float64.
SERIES = (
    -0.6234339344287685, 0.6168926782133124, 0.015549576220624277, -0.008673861197536449,
    -0.0006548713320332943, 0.00031321414827867284, 2.252373240408973e-05, -1.5758183468720783e-05,
    -3.6171208348166863e-07, 8.79833056095182e-07, -4.7020038867346186e-08, -4.702843528418933e-08,
    7.406312391095885e-09, 2.0315460012999305e-09, -6.861552443507438e-10, -3.7957862121604446e-11,
    4.6817669482678025e-11, -4.284505204596573e-12, -2.180873480487288e-12, 5.941467867319483e-13,
    3.061758844878569e-14, -3.933640603592662e-14, 5.371598076958874e-15, 1.120436955296228e-15,
    -5.122386018052103e-16, 5.5351558292550955e-17,
)


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
    noticed = np.flatnonzero(np.abs(SERIES) > np.finfo(dtype).eps / 8)
    return SERIES[:noticed[-1] + 1]
