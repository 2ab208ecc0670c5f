"""SGD, Adam and AdamW: golden bits, a scalar reference, and the property that lets ZeRO cut their state anywhere."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import SGD, Adam, AdamW, Optimizer
from zerosim.optim.base import UpdateContext

OPTIMIZERS = [SGD(lr=0.1), Adam(lr=0.1), AdamW(lr=0.1, weight_decay=0.1)]
KERNELS = NumpyKernels()
CTX = UpdateContext(KERNELS)


def name_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def new_state(optimizer: Optimizer, count: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots((count,)).items()}


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def updated(optimizer: Optimizer, w: np.ndarray,
            gradients: list[np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The weights and the state after one step per gradient; ``w`` stays as it is."""
    w, state = w.copy(), new_state(optimizer, w.size)
    for step, g in enumerate(gradients, start=1):
        optimizer.update(CTX, w, g, state, step)
    return w, state


def in_double(optimizer: Optimizer, w: float, gradients: list[float]) -> float:
    """The update rules of the papers for one weight, in Python's doubles."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        if isinstance(optimizer, SGD):
            w = w - optimizer.lr * g
            continue
        assert isinstance(optimizer, Adam | AdamW)
        w = w - optimizer.lr * (optimizer.weight_decay if isinstance(optimizer, AdamW) else 0.0) * w
        m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
        v = optimizer.beta2 * v + (1 - optimizer.beta2) * g**2
        w = w - optimizer.lr * (m / (1 - optimizer.beta1**t)) / (math.sqrt(v / (1 - optimizer.beta2**t))
                                                                 + optimizer.epsilon)
    return w


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_twenty_steps_stay_near_the_reference_in_double(optimizer):
    count, steps = 200, 20
    w, gradients = normal(count), [normal(count, seed) for seed in range(1, steps + 1)]
    found, _ = updated(optimizer, w, gradients)
    expected = [in_double(optimizer, float(w[i]), [float(g[i]) for g in gradients]) for i in range(count)]
    # A step rounds w (half a spacing of 4, its greatest size here, is 2.4e-7) and an update of at most 0.4,
    # from moments whose own roundings are of that relative size; all errors of one sign make steps times the
    # sum.
    np.testing.assert_allclose(found, expected, rtol=0, atol=steps * 4e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_the_reference_tells_the_optimizers_apart(optimizer):
    others = [other for other in OPTIMIZERS if other is not optimizer]
    gradients = [normal(8, seed) for seed in range(1, 4)]
    found, _ = updated(optimizer, normal(8), gradients)
    for other in others:
        assert np.abs(found - updated(other, normal(8), gradients)[0]).max() > 1e-3


def test_adam_on_the_worked_example_has_these_very_bits():
    w = np.array([2, -3, 1, 0.5], np.float32)
    w, state = updated(Adam(lr=0.1), w, [np.array([-5.5, -2.75, -2.75, -5], np.float32)])
    np.testing.assert_array_equal(state["m"], np.array([-0.55, -0.275, -0.275, -0.5], np.float32))
    np.testing.assert_array_equal(state["v"], np.array([0.030250002, 0.0075625004, 0.0075625004, 0.025], np.float32))
    np.testing.assert_array_equal(w, np.array([2.1, -2.9, 1.1, 0.6], np.float32))


def test_adam_factors_in_fp32_would_give_other_bits():
    g = np.array([-5.5, -2.75, -2.75, -5], np.float32)
    _, state = updated(Adam(lr=0.1), np.zeros(4, np.float32), [g])
    assert (state["v"] != (np.float32(1) - np.float32(0.999)) * (g * g)).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
@given(cuts=st.lists(st.integers(0, 300), max_size=5), seed=st.integers(0, 2**32 - 1))
def test_cutting_the_vector_anywhere_changes_no_bit(optimizer, cuts, seed):
    count, steps = 300, 3
    w, gradients = normal(count, seed), [normal(count, seed + 1 + step) for step in range(steps)]
    whole_w, whole_state = updated(optimizer, w, gradients)
    borders = [0, *sorted(cuts), count]
    for lo, hi in pairwise(borders):
        piece_w, piece_state = updated(optimizer, w[lo:hi], [g[lo:hi] for g in gradients])
        np.testing.assert_array_equal(piece_w.view(np.uint32), whole_w[lo:hi].view(np.uint32))
        for name, slot in piece_state.items():
            np.testing.assert_array_equal(slot.view(np.uint32), whole_state[name][lo:hi].view(np.uint32))
    assert optimizer.cut == "anywhere"
    assert optimizer.needs == frozenset()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_cutting_across_the_kernels_blocks_changes_no_bit(optimizer):
    count, cut = 2 * 65536 + 7, 65536 - 3
    w, gradients = normal(count), [normal(count, 1)]
    whole, _ = updated(optimizer, w, gradients)
    for here in (slice(0, cut), slice(cut, count)):
        piece, _ = updated(optimizer, w[here], [g[here] for g in gradients])
        np.testing.assert_array_equal(piece.view(np.uint32), whole[here].view(np.uint32))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_an_empty_shard_is_updated_like_any_other(optimizer):
    w, state = updated(optimizer, normal(0), [normal(0), normal(0)])
    assert w.shape == (0,)
    assert state.keys() == optimizer.slots((0,)).keys()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_the_gradient_is_not_changed(optimizer):
    g = normal(50, 1)
    updated(optimizer, normal(50), [g])
    np.testing.assert_array_equal(g, normal(50, 1))


@pytest.mark.parametrize("power", [-20, -3, 1, 16])
def test_adam_without_epsilon_does_not_see_a_power_of_two_on_the_loss(power):
    # A power of two passes through products, sums and the square root (of its square) without any rounding.
    optimizer, w = Adam(lr=0.1, epsilon=0.0), normal(1000)
    gradients = [normal(1000, seed) for seed in range(1, 6)]
    plain, _ = updated(optimizer, w, gradients)
    scaled, _ = updated(optimizer, w, [np.ldexp(g, power) for g in gradients])
    np.testing.assert_array_equal(plain.view(np.uint32), scaled.view(np.uint32))


def test_adam_sees_another_scale_of_the_loss_by_roundings_only():
    optimizer, w = Adam(lr=0.1, epsilon=0.0), np.zeros(1000, np.float32)
    gradients = [normal(1000, seed) for seed in range(1, 6)]
    plain, _ = updated(optimizer, w, gradients)
    scaled, _ = updated(optimizer, w, [np.float32(3) * g for g in gradients])
    # Each of 5 updates, of 0.25 at most, differs by some ten fp32 roundings of 6e-8, cancellation in m
    # included since the sum of |terms| of m is at most 3 times the root of v here.
    np.testing.assert_allclose(plain, scaled, rtol=0, atol=5 * 0.25 * 3 * 10 * 6e-8)
    assert (plain != scaled).any()


def test_adam_sees_the_scale_of_the_loss_through_epsilon():
    w, g = np.zeros(1, np.float32), np.full(1, 1e-8, np.float32)
    small, _ = updated(Adam(lr=0.1), w, [g])
    scaled, _ = updated(Adam(lr=0.1), w, [g * np.float32(2**20)])
    assert small[0] == pytest.approx(-0.05, rel=1e-6), "|g| equal to epsilon halves the first step"
    assert scaled[0] == pytest.approx(-0.1 / (1 + 2**-20), rel=1e-6)


def test_sgd_sees_the_scale_of_the_loss():
    w, g = normal(10), normal(10, 1)
    assert (updated(SGD(lr=0.1), w, [g])[0] != updated(SGD(lr=0.1), w, [2 * g])[0]).all()


def test_adam_without_epsilon_makes_a_weight_that_never_had_a_gradient_nan():
    w, _ = updated(Adam(lr=0.1, epsilon=0.0), np.ones(2, np.float32), [np.array([0, 1], np.float32)])
    assert np.isnan(w[0])
    assert w[1] == np.float32(0.9)


def test_adamw_decays_the_weight_before_the_step_and_outside_the_moments():
    w, state = updated(AdamW(lr=0.1, weight_decay=0.5), np.ones(1, np.float32), [np.zeros(1, np.float32)])
    assert w[0] == np.float32(0.95)
    assert not state["m"].any()
    assert not state["v"].any()


def test_adamw_without_decay_is_adam_bit_for_bit():
    w, gradients = normal(100), [normal(100, seed) for seed in (1, 2)]
    np.testing.assert_array_equal(updated(AdamW(weight_decay=0.0), w, gradients)[0], updated(Adam(), w, gradients)[0])


def test_the_step_number_changes_bits():
    w, state = normal(10), new_state(Adam(), 10)
    first, tenth = w.copy(), w.copy()
    Adam().update(CTX, first, normal(10, 1), {name: slot.copy() for name, slot in state.items()}, 1)
    Adam().update(CTX, tenth, normal(10, 1), state, 10)
    assert (first != tenth).all()
