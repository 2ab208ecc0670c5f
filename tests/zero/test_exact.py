"""Sums of squares that nothing rounds."""

import math
from fractions import Fraction

import numpy as np
import pytest

from zerosim.numerics import kernels
from zerosim.zero import micro_batch_order as exact

KERNELS = kernels.NumpyKernels()
EDGES = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, 1.5e-30], np.float32)


def numbers(count):
    """Codes of all exponents, without inf and NaN, and the edges."""
    codes = np.random.default_rng(count).integers(0, 2**32, count, np.uint32)
    found = np.concatenate([EDGES, codes.view(np.float32)])
    return found[np.isfinite(found)]


@pytest.mark.parametrize("divisor", [1.0, 3.0, 1024.0])
def test_the_sum_is_that_of_fractions_in_any_order_and_cut(divisor):
    x = numbers(300)
    with np.errstate(all="ignore"):
        quotients = x / np.float32(divisor)
    expected = sum(Fraction(float(q)) ** 2 for q in quotients)
    found = exact.sum_of_squares(KERNELS, x, divisor)
    assert Fraction(found, 2**exact.UNIT_BITS) == expected
    for cut in (0, 1, 100):
        parts = [exact.sum_of_squares(KERNELS, part, divisor) for part in (x[cut:][::-1].copy(), x[:cut])]
        assert exact.root(map(exact.to_bytes, parts)) == exact.root([exact.to_bytes(found)])


def test_a_sum_of_more_than_a_block_is_rounded_once_and_then_its_root():
    x = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    found = exact.root([exact.to_bytes(exact.sum_of_squares(KERNELS, x))])
    assert found == math.sqrt(math.fsum(x.astype(np.float64) ** 2))


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_the_root_is_nan_where_a_number_is_not_finite(odd):
    x = np.full(3, 3.4e38, np.float32)
    x[1] = odd
    spoiled = exact.to_bytes(exact.sum_of_squares(KERNELS, x))
    assert math.isnan(exact.root([exact.to_bytes(1), spoiled, spoiled]))
    assert math.isfinite(exact.root([exact.to_bytes(exact.sum_of_squares(KERNELS, x[::2].copy()))] * 1000))
