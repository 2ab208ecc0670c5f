"""Bits of Adam's and SGD's steps: those of the formula on whole arrays, and what a scale of the loss does to them."""

import numpy as np
import pytest

from tests.optim.papers import CTX, updated
from zerosim.numerics import arrays
from zerosim.optim import SGD, Adam, AdamW

F = np.float32


def normal(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(F)


def bits(array):
    return array.view(np.uint32).tolist()


@pytest.mark.parametrize("length", [0, 1, arrays.BLOCK - 1, arrays.BLOCK, arrays.BLOCK + 1])
def test_steps_in_blocks_are_the_formulas_on_whole_arrays(length):
    """Each scalar of the formulas is a float32 made from a double."""
    for optimizer, decay in ((Adam(lr=0.1), 0.0), (AdamW(lr=0.1, weight_decay=0.0), 0.0), (AdamW(lr=0.1), 0.01)):
        w, state = normal(length), {"m": normal(length, 1), "v": abs(normal(length, 2))}
        expected, m, v = w.copy(), state["m"].copy(), state["v"].copy()
        for step, g in ((1, normal(length, 3)), (2, normal(length, 4)), (7, normal(length, 5))):
            optimizer.update(CTX, w, g, state, step)
            m, v = F(0.9) * m + F(1 - 0.9) * g, F(0.999) * v + F(1 - 0.999) * (g * g)
            expected = expected * F(1 - 0.1 * decay) if decay else expected
            expected -= (F(0.1) * (m / F(1 - 0.9**step))) / (np.sqrt(v / F(1 - 0.999**step)) + F(1e-8))
            assert [bits(w), bits(state["m"]), bits(state["v"])] == [bits(expected), bits(m), bits(v)], step
    w, g = normal(length), normal(length, 1)
    assert bits(updated(SGD(lr=0.1), w, [g])[0]) == bits(w - F(0.1) * g)


@pytest.mark.parametrize("power", [-20, -3, 1, 16])
def test_adam_without_epsilon_does_not_see_a_power_of_two_on_the_loss(power):
    """It passes through products, sums and the square root (of its square) without any rounding."""
    gradients = [normal(1000, seed) for seed in range(1, 6)]
    plain, scaled = (updated(Adam(lr=0.1, epsilon=0.0), normal(1000), of)[0]
                     for of in (gradients, [np.ldexp(g, power) for g in gradients]))
    assert bits(plain) == bits(scaled)


def test_adam_without_epsilon_makes_a_weight_that_never_had_a_gradient_nan():
    w, _ = updated(Adam(lr=0.1, epsilon=0.0), np.ones(2, F), [np.array([0, 1], F)])
    assert np.isnan(w[0])
    assert w[1] == F(0.9)
