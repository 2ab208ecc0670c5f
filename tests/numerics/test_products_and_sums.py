"""Products of matrices, sums over rows, sums of squares, and the test for what is not finite."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics.oracle import ROWS, Row, by_low, by_row, cast, every_code, same, values
from zerosim.numerics import arrays, blockwise, kernels

BLOCK, PIECE = arrays.BLOCK, blockwise.EINSUM_PIECE
SHAPES = [(1, 1, 1), (3, 5, 2), (70, 33, 50), (1, 64, 17), (40, 1, 40), (5, 0, 4), (0, 3, 4), (300, 20, 300)]


def normal(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def product(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, dtype: np.dtype | None = None) -> np.ndarray:
    out = np.empty((a.shape[0], b.shape[1]), dtype or a.dtype)
    kernels.NumpyKernels().matmul(a, b, bias=bias, out=out)
    return out


@by_row
def test_a_product_is_float32s_with_the_bias_rounded_once(row: Row) -> None:
    """Rounding before the bias is added would give other bits."""
    for m, k, n in SHAPES:
        a, b, bias = normal((m, k), row.dtype, 1), normal((k, n), row.dtype, 2), normal((n,), row.dtype, 3)
        in_float32 = np.matmul(a.astype(np.float32), b.astype(np.float32))
        assert same(product(a, b), cast(in_float32, row.dtype))
        found = product(a, b, bias)
        assert same(found, cast(in_float32 + bias.astype(np.float32), row.dtype))
        assert same(product(a, b, bias, np.dtype(np.float32)), in_float32 + bias.astype(np.float32))
        twice = cast(product(a, b).astype(np.float32) + bias.astype(np.float32), row.dtype)
        assert row.name == "fp32" or m * n < 1000 or not same(found, twice)


@by_row
def test_a_product_is_the_same_wherever_its_factors_and_its_result_lie(row: Row) -> None:
    """Transposed, with gaps, through strides, over a factor."""
    x, dy, w = normal((31, 7), row.dtype, 4), normal((31, 12), row.dtype, 5), normal((9, 12), row.dtype, 6)
    for left, right in ((x.T, dy), (dy, w.T)):
        exact = np.matmul(left.astype(np.float32), right.astype(np.float32))
        assert same(product(left, right), cast(exact, row.dtype))
    gaps = normal((62, 14), row.dtype, 7)[::2, ::2]
    assert same(product(gaps.T, dy), product(gaps.T.copy(), dy))
    a, b = normal((16, 16), row.dtype, 8), normal((16, 16), row.dtype, 9)
    over, turned, expected = a.copy(), np.empty((16, 16), row.dtype).T, product(a, b)
    for x, out in ((over, over), (a, turned)):
        kernels.NumpyKernels().matmul(x, b, out=out)
        assert same(np.ascontiguousarray(out), expected)


def rows_in_order(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1], np.float32)
    for row in x.astype(np.float32):
        total = total + row
    return total


def column_sum(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    before, out = x.copy(), np.empty(x.shape[1], dtype)
    kernels.NumpyKernels().column_sum(x, out)
    assert same(x.copy(), before)
    return out


@by_row
def test_rows_are_added_one_after_the_other_in_float32(row: Row) -> None:
    """From +0 on; their order does change the sum."""
    for shape in [(0, 3), (1, 4), (7, 1), (1000, 1), (1000, 2), (999, 3), (513, 17), (300, 700)]:
        x = normal(shape, row.dtype, 10)
        expected = rows_in_order(x)
        assert row.name != "fp32" or x.size < 5000 or (expected != rows_in_order(x[::-1])).any()
        for dtype in (np.dtype(np.float32), row.dtype):
            for given_x in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
                assert same(column_sum(given_x, dtype), cast(expected, dtype)), shape
        zeros = np.full((3, shape[1]), -0.0, np.float32).astype(row.dtype)
        assert not np.signbit(column_sum(zeros, row.dtype)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_a_rows_sum_depends_on_nothing_but_the_row(length: int, dtype: type) -> None:
    k, x, y = kernels.NumpyKernels(), normal((2, 3, length), dtype), normal((2, 3, length + 1), dtype)[..., 1:]
    sums, products = k.row_sums(x), k.row_products(x, y)
    wide = np.sum(x, axis=2, dtype=np.float64)
    # Each of n additions rounds what is of order √n.
    np.testing.assert_allclose(sums, wide, atol=np.finfo(dtype).eps * length)
    np.testing.assert_allclose(products, np.sum(x * y, axis=2, dtype=np.float64), atol=2 * np.finfo(dtype).eps * length)
    for index in np.ndindex(2, 3):
        row, other = np.concatenate([[0], x[index]]).astype(dtype)[1:], y[index].copy()  # elsewhere in memory
        assert k.row_sums(row[None])[0] == sums[index]
        assert k.row_products(row[None], other[None])[0] == products[index]


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_row_maxima_are_the_maxima_and_nan_where_there_is_one(rows: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = np.array([-np.inf, -1, -0.0, 0, 2, np.inf, np.nan], np.float32)
    x = rng.choice(some, (2, rows, length), p=[0.3, *[0.13] * 5, 0.05])
    np.testing.assert_array_equal(kernels.NumpyKernels().row_maxima(x), x.max(axis=2))


@by_low
def test_every_code_is_finite_or_not_as_its_value_is(row: Row) -> None:
    k, finite = kernels.NumpyKernels(), np.isfinite(values(row))
    assert k.all_finite(every_code(row)[finite])
    for code in np.flatnonzero(~finite)[:: max(1, row.bits // 4)]:
        assert not k.all_finite(every_code(row)[[0, code, 1]])


@pytest.mark.parametrize("dtype", [*(row.dtype for row in ROWS), np.dtype(np.float64)], ids=str)
def test_one_element_that_is_not_finite_is_found_wherever_it_stands(dtype: np.dtype) -> None:
    """NaN is counted too; nothing and integers are finite, and no NaN."""
    k, x = kernels.NumpyKernels(), np.full(2 * BLOCK + 3, 400, np.float32).astype(dtype)
    assert k.all_finite(x)
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 2):
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = x.copy()
            spoiled[place] = bad
            assert not k.all_finite(spoiled), (place, bad)
            assert k.count_nan(spoiled) == int(np.isnan(spoiled).sum())
            assert k.all_finite(np.delete(spoiled, place).reshape(2, -1)[:, ::2])
    assert k.all_finite(np.zeros(0, dtype))
    assert k.all_finite(np.arange(3))
    assert k.count_nan(np.arange(3)) == 0


@by_row
def test_a_sum_of_squares_adds_the_blocks_sums_left_to_right(row: Row) -> None:
    for length in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        x, divisor = normal((length,), row.dtype, 12), 3.0
        expected = 0.0
        for first in range(0, length, BLOCK):
            quotient = x[first:first + BLOCK].astype(np.float32) / np.float32(divisor)
            expected += np.add.reduce(quotient.astype(np.float64) ** 2)
        found = kernels.NumpyKernels().sum_of_squares(x, divisor)
        assert found == expected
        assert isinstance(found, float)
        assert kernels.NumpyKernels().sum_of_squares(x) != found or length == 0


@by_row
def test_a_gradient_block_is_divided_and_then_scaled_in_float32(row: Row) -> None:
    x = normal((BLOCK + 2,), row.dtype, 13)
    out = np.empty(x.shape, np.float32)
    kernels.NumpyKernels().gradient_block(x, 3.0, 0.7, out)
    assert same(out, (x.astype(np.float32) / np.float32(3)) * np.float32(0.7))
    kernels.NumpyKernels().gradient_block(x, 3.0, 1.0, out)
    assert same(out, x.astype(np.float32) / np.float32(3))
    wide = normal(x.shape, np.dtype(np.float64), 13)  # as of a user's own gradients: rounded once
    kernels.NumpyKernels().gradient_block(wide, 3.0, 1.0, out)
    assert same(out, (wide / 3.0).astype(np.float32))


@pytest.mark.parametrize("divisor", [2.0**128, 3 * 2.0**127, -(2.0**140), float(np.finfo(np.float32).max) * (1 + 1e-9)])
def test_a_divisor_beyond_float32_divides_as_one_within_does(divisor: float) -> None:
    """As many significant bits as a divisor in float32's range has, down to the smallest quotient."""
    x = (normal((BLOCK + 2,), np.dtype(np.float64), 17) * 2.0 ** np.linspace(-140, 126, BLOCK + 2)).astype(np.float32)
    exact = (x.astype(np.float64) / (float(np.float32(divisor / 2**16)) * 2**16)).astype(np.float32)
    block, quotient = np.empty_like(x), np.empty_like(x)
    with np.errstate(all="raise"):
        kernels.NumpyKernels().gradient_block(x, divisor, 1.0, block)
        kernels.NumpyKernels().divide_rounded(x, divisor, quotient)
        squares = kernels.NumpyKernels().sum_of_squares(x, divisor)
    assert abs(exact).max() > 2.0**-14
    assert np.flatnonzero(exact).size > 1000
    assert same(block, exact)
    assert same(quotient, exact)
    assert squares == pytest.approx(float((exact.astype(np.float64) ** 2).sum()), rel=1e-12)
