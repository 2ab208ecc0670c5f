"""GELU, both forms: the exact one against the standard library's error function, tables against the formula."""

import math

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, normal, slope
from zerosim.models import layers
from zerosim.numerics.kernels import NumpyKernels

FORMS = [False, True]
NARROW = ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"]


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """x·Φ(x) in float64."""
    return np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])


def test_the_exact_gelus_backward_is_the_slope_of_its_forward():
    ctx, x, c = context("fp64"), np.linspace(-6, 6, 41), normal("fp64", (41,))
    found = layers.gelu_backward(ctx, layers.gelu_forward(ctx, x, exact=True)[1], c, exact=True)
    wanted = slope(lambda: float(np.sum(layers.gelu_forward(ctx, x, exact=True)[0] * c)), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_the_exact_gelu_is_exact_however_small_it_is(name):
    x = np.linspace(-12, 12, 5001).astype(DTYPES[name])
    y, _ = layers.gelu_forward(context(name), x, exact=True)
    exact = exact_gelu(x)
    # A dozen roundings, and those of the exponential's argument x²/2, which weigh x²/2 times as much in its result.
    limits = np.finfo(DTYPES[name])
    allowed = limits.eps * (16 + 2 * x.astype(np.float64) ** 2) * abs(exact) + limits.tiny
    assert (abs(y - exact) <= allowed).all()
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x], np.float32)
    lossy = np.float32(0.5) * x.astype(np.float32) * (1 + erf)
    assert (abs(lossy - exact) > np.maximum(allowed, 0.01 * abs(exact))).any(), "1 + erf loses its digits below -4"


def test_the_two_forms_differ_by_less_than_a_thousandth():
    x = np.linspace(-6, 6, 1001)
    one, other = (layers.gelu_forward(context("fp64"), x, exact=form)[0] for form in FORMS)
    assert 1e-4 < abs(one - other).max() < 1e-3


@pytest.mark.parametrize("exact", FORMS)
@pytest.mark.parametrize("name", NARROW)
def test_looking_up_gives_every_code_the_bits_of_computing_it(name, exact):
    codes = np.arange(2 ** (8 * DTYPES[name].itemsize)).astype(f"u{DTYPES[name].itemsize}")
    x, kernels = codes.view(DTYPES[name]), NumpyKernels()
    dy = normal(name, x.shape, 5)
    wide, wide_dy, computed, slopes = x.astype(np.float32), dy.astype(np.float32), *np.empty((2, x.size), np.float32)
    kernels.gelu(wide, computed, exact=exact)
    kernels.gelu_gradient(wide, wide_dy, slopes, exact=exact)
    y, kept = layers.gelu_forward(context(name), x, exact=exact)
    dx = layers.gelu_backward(context(name), kept, dy, exact=exact)
    for found, wanted in [(y, computed), (dx, slopes)]:
        rounded = np.empty_like(x)
        kernels.cast_pack(wanted, rounded)
        numbers = ~np.isnan(rounded.astype(np.float32))  # which NaN it is, is nobody's business
        np.testing.assert_array_equal(bits_of(found)[numbers], bits_of(rounded)[numbers])
        np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), ~numbers)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64"])
def test_the_exact_gelu_has_its_limits_at_the_ends_of_every_format(name):
    ctx = context(name)
    largest = 60000 if name == "fp16" else 1e38
    x = np.array([-np.inf, -largest, -60, 60, largest, np.inf, np.nan]).astype(DTYPES[name])
    y, kept = layers.gelu_forward(ctx, x, exact=True)
    np.testing.assert_array_equal(y.astype(np.float64), np.maximum(x.astype(np.float64), 0))
    dx = layers.gelu_backward(ctx, kept, np.ones(7, DTYPES[name]), exact=True)
    np.testing.assert_array_equal(dx.astype(np.float64), [0, 0, 0, 1, 1, 1, np.nan])


@pytest.mark.parametrize("exact", FORMS)
@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_strided_gradients_and_results_are_those_of_contiguous_ones(name, exact):
    kernels, x, dy = NumpyKernels(), normal(name, (300, 7)), normal(name, (300, 7), 1)
    wanted, spread = np.empty_like(x), np.empty((7, 600), DTYPES[name]).T[::2]
    kernels.gelu_gradient(x, dy, wanted, exact=exact)
    kernels.gelu_gradient(np.asfortranarray(x), dy[::-1][::-1], spread, exact=exact)
    np.testing.assert_array_equal(bits_of(np.ascontiguousarray(spread)), bits_of(wanted))
    kernels.gelu(x, wanted, exact=exact)
    kernels.gelu(x, spread, exact=exact)
    np.testing.assert_array_equal(bits_of(np.ascontiguousarray(spread)), bits_of(wanted))


def test_gelu_refuses_shapes_and_types_that_do_not_fit():
    with pytest.raises(ValueError, match=r"gelu needs arrays of one shape, got x \(3,\), out \(4,\)"):
        NumpyKernels().gelu(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match=r"gelu_gradient computes in floating point .* got dy of type int64"):
        NumpyKernels().gelu_gradient(np.zeros(3), np.zeros(3, np.int64), np.zeros(3))
