"""Sums, maxima and normal distributions by rows: exact where they can be, and the same wherever a row stands."""


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_row_maxima_are_the_maxima_and_nan_where_there_is_one(rows: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = np.array([-np.inf, -1, -0.0, 0, 2, np.inf, np.nan], np.float32)
    x = rng.choice(some, (2, rows, length), p=[0.3, *[0.13] * 5, 0.05])
    np.testing.assert_array_equal(KERNELS.row_maxima(x), x.max(axis=2))
