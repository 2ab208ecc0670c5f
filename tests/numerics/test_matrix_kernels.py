"""Kernels for whole matrices and for optimizer steps, against plain float64 NumPy; eigenvectors and Q are SOAP's."""

import numpy as np
import pytest

from zerosim.numerics import arrays, kernels

BLOCK = arrays.BLOCK
KERNELS = kernels.NumpyKernels()


def symmetric(count: int, values: np.ndarray | None = None) -> np.ndarray:
    """A symmetric matrix with these eigenvalues (1 to 2 where none are given), in fp32."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((count, count)))[0]
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


def test_the_trace_does_not_depend_on_the_size_of_numpys_buffers() -> None:
    rng = np.random.default_rng(3)
    a = np.diag(rng.standard_normal(300) * np.exp(15 * rng.standard_normal(300))).astype(np.float32)
    expected = KERNELS.trace(a)
    with np.errstate():  # ends with the size that was before
        np.setbufsize(16)
        assert KERNELS.trace(a) == expected


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 4), (2 * BLOCK + 5,), (300, 500)], ids=str)
def test_step_blocks_shows_every_element_once_in_order_with_scratch_of_the_same_length(shape: tuple[int, ...]) -> None:
    w, g, seen = np.zeros(shape, np.float32), np.arange(np.prod(shape), dtype=np.float32).reshape(shape), []

    def block(w: np.ndarray, g: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        assert w.shape == g.shape == first.shape == second.shape == (w.size,)
        assert not np.may_share_memory(first, second)
        np.add(w, g, out=w)
        seen.append(g.copy())

    KERNELS.step_blocks(block, w, g, scratch=2)
    assert (w == g).all()
    assert (np.concatenate([*seen, np.empty(0)]) == g.reshape(-1)).all()
    assert all(g.size == BLOCK for g in seen[:-1])
