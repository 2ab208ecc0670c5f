"""Kernels for whole matrices and for optimizer steps, against plain float64 NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics.arrays import BLOCK
from zerosim.numerics.kernels import NumpyKernels

KERNELS = NumpyKernels()


def symmetric(count: int, values: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """A symmetric matrix with these eigenvalues (1 to 2 where none are given), in fp32."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((count, count)))[0]
    found = (basis * (np.linspace(1, 2, count) if values is None else values)) @ basis.T
    return ((found + found.T) / 2).astype(np.float32)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, -0.25, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_a_power_of_a_symmetric_matrix_is_that_of_its_eigenvalues(count: int, exponent: float) -> None:
    a, out = symmetric(count), np.empty((count, count), np.float32)
    KERNELS.symmetric_power(a, exponent, 0.5, out)
    values, vectors = np.linalg.eigh(a.astype(np.float64) + 0.5 * np.eye(count))
    # Computed in float64 and rounded once: half a spacing of numbers up to 2.5.
    np.testing.assert_allclose(out, vectors @ np.diag(values**exponent) @ vectors.T, atol=2e-7)


def test_eigenvalues_that_rounding_made_negative_count_as_zero() -> None:
    a, out = symmetric(3, np.array([-1e-6, 0.0, 1.0])), np.empty((3, 3), np.float32)
    KERNELS.symmetric_power(a, -0.25, 1e-8, out)
    assert np.linalg.eigvalsh(out.astype(np.float64)).max() == pytest.approx(100, rel=1e-5)  # 1e-8 to the -1/4


@given(count=st.integers(1, 30), seed=st.integers(0, 2**32 - 1))
def test_eigenvectors_come_as_columns_the_largest_eigenvalue_first(count: int, seed: int) -> None:
    a = symmetric(count, np.linspace(1, 2 + count, count), seed)
    out = np.empty((count, count), np.float32)
    KERNELS.eigenvectors(a, out)
    turned = out.T.astype(np.float64) @ a @ out
    bound = 1e-5 * (2 + count)  # a and its eigenvectors are rounded to fp32
    np.testing.assert_allclose(turned, np.diag(np.linspace(1, 2 + count, count)[::-1]), atol=bound)


def test_the_orthogonal_factor_spans_the_same_columns() -> None:
    a, out = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32), np.empty((5, 5), np.float32)
    KERNELS.orthogonal_factor(a, out)
    q = out.astype(np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(5), atol=1e-6)  # rounded to fp32 once
    np.testing.assert_allclose(np.tril(q.T @ a, -1), 0, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (1, 4), (4, 1), (700, 300), (2, BLOCK + 3)], ids=str)
def test_mean_squares_are_those_of_float64_rounded_once(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rows, columns = np.empty(shape[0], np.float32), np.empty(shape[1], np.float32)
    KERNELS.mean_squares(x, rows, columns)
    squares = (x * x).astype(np.float64)
    np.testing.assert_allclose(rows, squares.mean(1), rtol=6.1e-8)
    np.testing.assert_allclose(columns, squares.mean(0), rtol=6.1e-8)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("shape", [(3, 5), (700, 300)], ids=str)
def test_dividing_by_the_roots_of_means_leaves_no_range(shape: tuple[int, int], scale: float) -> None:
    rng = np.random.default_rng(2)
    x, out = rng.standard_normal(shape).astype(np.float32), np.empty(shape, np.float32)
    rows, columns = (rng.uniform(0.5, 2, n).astype(np.float32) * np.float32(scale) for n in shape)
    KERNELS.divide_by_roots(x, rows, columns, out)
    v = np.outer(rows.astype(np.float64), columns.astype(np.float64)) / rows.mean(dtype=np.float64)
    np.testing.assert_allclose(out, x / np.sqrt(v), rtol=4e-7)  # four roundings


def test_the_trace_is_added_up_in_float64() -> None:
    assert KERNELS.trace(np.diag(np.array([1e8, 1, -1e8], np.float32))) == 1.0


@pytest.mark.parametrize("call", ["trace", "symmetric_power", "eigenvectors", "orthogonal_factor"])
def test_what_is_not_square_is_refused(call: str) -> None:
    a, out = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    arguments = {"trace": (a,), "symmetric_power": (a, 1.0, 0.0, out)}.get(call, (a, out))
    with pytest.raises(ValueError, match=rf"^{call} takes a square matrix, got shape \(2, 3\)$"):
        getattr(KERNELS, call)(*arguments)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("call", ["symmetric_power", "eigenvectors", "orthogonal_factor"])
def test_what_is_not_finite_is_refused_with_a_way_out(call: str, bad: float) -> None:
    a, out = np.eye(300, dtype=np.float32), np.ones((300, 300), np.float32)
    a[299, 299] = bad
    with pytest.raises(ValueError, match=rf"^{call} found inf or NaN in a matrix \(300, 300\): .* clip the gradients"):
        getattr(KERNELS, call)(*((a, 1.0, 0.0, out) if call == "symmetric_power" else (a, out)))


def test_mean_squares_that_do_not_fit_are_refused() -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"takes x \(r, c\), rows \(r,\) and columns \(c,\), got \(2, 3\), \(3,\)"):
        KERNELS.mean_squares(x, np.ones(3, np.float32), np.ones(2, np.float32))


# -- the loop of steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 4), (2 * BLOCK + 5,), (300, 500)], ids=str)
def test_step_blocks_shows_every_element_once_in_order_with_scratch_of_the_same_length(shape: tuple[int, ...]) -> None:
    w, g, lengths = np.zeros(shape, np.float32), np.ones(shape, np.float32), []

    def block(w: np.ndarray, g: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        assert w.shape == g.shape == first.shape == second.shape == (w.size,)
        assert not np.may_share_memory(first, second)
        np.add(w, g, out=w)
        lengths.append(w.size)

    KERNELS.step_blocks(block, w, g, scratch=2)
    assert (w == 1).all()
    assert sum(lengths) == w.size
    assert all(length == BLOCK for length in lengths[:-1])


def test_step_blocks_refuses_what_it_could_not_write_back_to() -> None:
    w = np.zeros((4, 6), np.float32)
    for bad, text in ((w[:, ::2], r"array 0 \(4, 3\) of type float32, with gaps or in another order$"),
                      (w.T, r"array 0 \(6, 4\) of type float32, with gaps or in another order$"),
                      (w.astype(np.float64), r"array 0 \(4, 6\) of type float64$")):
        with pytest.raises(ValueError, match=rf"^step_blocks needs arrays of float32 in C order, got {text}"):
            KERNELS.step_blocks(lambda *_: None, bad)
    with pytest.raises(ValueError, match=r"step_blocks needs arrays of one shape, got array 0 \(4, 6\), array 1"):
        KERNELS.step_blocks(lambda *_: None, w, w.T)


def test_step_blocks_keeps_its_own_errstate() -> None:
    w = np.array([1e38], np.float32)
    with np.errstate(all="raise"):
        KERNELS.step_blocks(lambda w: np.multiply(w, w, out=w), w, scratch=0)
    assert np.isinf(w[0])
