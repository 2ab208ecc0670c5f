"""Newton-Schulz: the published bands of singular values, what converges and what does not."""

import numpy as np
import pytest

from tests.optim.papers import KERNELS
from zerosim.optim import UpdateContext, matrix, orthogonalize

CTX = UpdateContext(KERNELS)


def matrix_of(s, rows, columns, seed=0):
    """A matrix (rows, columns) with these singular values, in fp32."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (rows, columns))
    return ((left[:, :len(s)] * s) @ right[:len(s)]).astype(np.float32)


def after(s, steps, iteration, scale=1.0):
    """Singular values after the iterations, largest first, on a matrix that has s; the Frobenius norm of s is 1."""
    x = matrix_of(s, len(s), len(s) + 3) * np.float32(scale)
    orthogonalize(CTX, x, iteration, steps)
    return np.linalg.svd(x.astype(np.float64))[1]


def pair(small):
    """Two singular values whose squares add up to 1."""
    return np.array([small, np.sqrt(1 - small * small)])


def iterated(s, steps, iteration):
    """The iteration on single numbers, in float64."""
    a, b, c = matrix.COEFFICIENTS[iteration]
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def test_five_quintic_steps_bring_singular_values_from_001_to_1_into_the_published_band():
    found = np.concatenate([after(pair(small), 5, "quintic") for small in np.geomspace(0.01, 0.7071, 200)])
    exact = iterated(np.geomspace(0.01, 1, 100_000), 5, "quintic")
    assert (round(exact.min(), 2), round(exact.max(), 2)) == (0.68, 1.13)
    # Five iterations of fp32 products are off by some 1e-6, and these singular values are not all that there are.
    assert exact.min() - 1e-5 < found.min() < 0.70
    assert 1.12 < found.max() < exact.max() + 1e-5


def test_the_quintic_does_not_converge():
    assert sum(matrix.COEFFICIENTS["quintic"]) == pytest.approx(0.701, abs=5e-4)
    for steps in (5, 6, 20, 50):
        assert np.abs(after(pair(0.3), steps, "quintic") - 1).max() > 0.04, steps


@pytest.mark.parametrize(("steps", "expected"), [(5, 0.076), (10, 0.53), (20, 1.0)])
def test_the_cubic_is_slow_and_converges(steps, expected):
    assert after(pair(0.01), steps, "cubic").min() == pytest.approx(expected, abs=5e-3)  # to the digits printed


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_the_scale_of_the_matrix_does_not_matter(power):
    assert after(pair(0.3), 5, "quintic").tobytes() == after(pair(0.3), 5, "quintic", 2.0**power).tobytes()


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (0, 3), (3, 0)], ids=str)
def test_zeros_stay_zeros(shape):
    x = np.zeros(shape, np.float32)
    orthogonalize(CTX, x)
    assert not x.any()
