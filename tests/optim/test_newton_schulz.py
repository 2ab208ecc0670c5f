"""Newton-Schulz: the published bands of singular values, what converges and what does not.

A matrix goes through the iteration of its singular values, which `test_papers.py` holds of Muon's steps.
"""

import numpy as np
import pytest

from tests.optim.papers import CTX
from zerosim.optim import matrix, orthogonalize


def iterated(s, steps, iteration):
    """The iteration on single numbers, in float64."""
    a, b, c = matrix.COEFFICIENTS[iteration]
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def test_five_quintic_steps_bring_singular_values_from_001_to_1_into_the_published_band():
    found = iterated(np.geomspace(0.01, 1, 100_000), 5, "quintic")
    assert (round(found.min(), 2), round(found.max(), 2)) == (0.68, 1.13)


def test_the_quintic_does_not_converge_and_the_cubic_is_slow_and_does():
    assert sum(matrix.COEFFICIENTS["quintic"]) == pytest.approx(0.701, abs=5e-4)
    assert all(abs(iterated(0.3, steps, "quintic") - 1) > 0.04 for steps in (5, 6, 20, 50))
    for steps, expected in ((5, 0.076), (10, 0.53), (20, 1.0)):
        assert iterated(0.01, steps, "cubic") == pytest.approx(expected, abs=5e-3)  # to the digits printed


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_the_scale_of_the_matrix_does_not_matter(power):
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    scaled = x * np.float32(2.0**power)
    for array in (x, scaled):
        orthogonalize(CTX, array)
    assert x.tobytes() == scaled.tobytes()
