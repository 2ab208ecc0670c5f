"""Sums, maxima and normal distributions by rows: exact where they can be, and the same wherever a row stands."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim import FORMATS
from zerosim.numerics import arrays, blockwise, kernels, layer_kernels

Scratch, EINSUM_PIECE = arrays.Scratch, blockwise.EINSUM_PIECE
SATURATED, SERIES, complement = layer_kernels.SATURATED, layer_kernels.SERIES, layer_kernels.complement
KERNELS = kernels.NumpyKernels()
LENGTHS = [1, 3, 100, EINSUM_PIECE - 1, EINSUM_PIECE, EINSUM_PIECE + 1, 3 * EINSUM_PIECE + 7]


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_rows_sum_depends_on_nothing_but_the_row(length: int, dtype: type) -> None:
    x, y = normal(2, 3, length, dtype=dtype), normal(2, 3, length + 1, dtype=dtype)[..., 1:]
    sums, products = KERNELS.row_sums(x), KERNELS.row_products(x, y)
    wide = np.sum(x, axis=2, dtype=np.float64)
    # Each of n additions rounds what is of order √n.
    np.testing.assert_allclose(sums, wide, atol=np.finfo(dtype).eps * length)
    np.testing.assert_allclose(products, np.sum(x * y, axis=2, dtype=np.float64), atol=2 * np.finfo(dtype).eps * length)
    for index in np.ndindex(2, 3):
        row, other = np.concatenate([[0], x[index]]).astype(dtype)[1:], y[index].copy()  # elsewhere in memory
        assert KERNELS.row_sums(row[None])[0] == sums[index]
        assert KERNELS.row_products(row[None], other[None])[0] == products[index]


def test_einsum_cuts_longer_rows_wherever_they_begin() -> None:
    # The reason for the pieces. Should NumPy change this, they can go.
    x = normal(5, 3 * EINSUM_PIECE + 7)
    assert (np.einsum("ij->i", x) != [np.einsum("ij->i", row[None])[0] for row in x]).any()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_row_maxima_are_the_maxima_and_nan_where_there_is_one(rows: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = np.array([-np.inf, -1, -0.0, 0, 2, np.inf, np.nan], np.float32)
    x = rng.choice(some, (2, rows, length), p=[0.3, *[0.13] * 5, 0.05])
    np.testing.assert_array_equal(KERNELS.row_maxima(x), x.max(axis=2))


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 4), (np.float64, 4)])
def test_erfc_is_exact_but_for_a_few_roundings_of_its_exponent(dtype: type, bound: float) -> None:
    z = np.linspace(0, 9, 3001).astype(dtype)
    found, exact = complement(z.copy(), np.empty_like(z), Scratch()), np.array([math.erfc(v) for v in z.astype(float)])
    assert (abs(found - exact) <= np.finfo(dtype).eps * bound * (1 + z.astype(float) ** 2) * exact).all()
    ends = np.array([SATURATED, 1e30, np.inf, np.nan], dtype)
    np.testing.assert_array_equal(complement(ends, np.empty_like(ends), Scratch()), [0, 0, 0, np.nan])


def log_scaled_erfc(z: float) -> float:
    """log(erfc(z)·exp(z²)), by Lentz's algorithm where erfc is too small for a double."""
    if z < 4:
        return math.log(math.erfc(z)) + z * z
    value = ratio = z  # of the continued fraction z + (1/2)/(z + (2/2)/(z + ...))
    inverse = 0.0
    for numerator in range(1, 81):
        inverse = 1 / (z + numerator / 2 * inverse)
        ratio = z + numerator / 2 / ratio
        value *= ratio * inverse
    return -math.log(math.sqrt(math.pi) * value)


def test_the_stored_series_of_erfc_is_the_interpolation_that_it_is_said_to_be() -> None:
    count, low = 41, 2 / (2 + SATURATED)
    angles = [math.pi * (k + 0.5) / count for k in range(count)]
    ts = [(math.cos(angle) * (1 - low) + 1 + low) / 2 for angle in angles]
    values = [log_scaled_erfc(2 / t - 2) - math.log(t) for t in ts]
    for order, stored in enumerate(SERIES):  # to within the rounding of log(erfc) + z², which are of order 16
        products = (value * math.cos(order * angle) for value, angle in zip(values, angles, strict=True))
        assert abs(math.fsum(products) * (2 if order else 1) / count - stored) < 4e-15
    assert abs(SERIES[-1]) > np.finfo(float).eps / 8  # the next one would not be noticed
    assert len(SERIES) == 26


def test_the_stored_series_is_what_erfc_is_computed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.linspace(0, 9, 301)
    found = complement(z.copy(), np.empty_like(z), Scratch())
    monkeypatch.setattr("zerosim.numerics.layer_kernels.SERIES", (SERIES[0] + math.log(2), *SERIES[1:]))
    layer_kernels._series.cache_clear()
    doubled = complement(z.copy(), np.empty_like(z), Scratch())
    layer_kernels._series.cache_clear()
    np.testing.assert_allclose(doubled, 2 * found, rtol=1e-13)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_widened_from_and_settled_into_views_of_any_strides(name: str) -> None:
    dtype = FORMATS[name].dtype
    x = normal(5, 6, 7).astype(dtype)
    views = {"as it lies": x, "transposed": x.T, "every other": x[:, ::2], "reversed": x[::-1]}
    for what, view in views.items():
        wide = KERNELS.wide("test", view, np.dtype(np.float32))
        np.testing.assert_array_equal(wide, view.astype(np.float32), what)
        target = np.zeros((*view.shape, 2), dtype)[..., 0]
        room = KERNELS.room_for("room", target, np.dtype(np.float32))
        np.copyto(room, wide)
        KERNELS.settle(room, target)
        np.testing.assert_array_equal(target.astype(np.float32), wide, what)
    assert KERNELS.room_for("room", x, x.dtype) is KERNELS.wide("test", x, x.dtype) is x
