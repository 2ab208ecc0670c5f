"""The worked example, by hand: every number below can be followed with pencil and paper."""

import numpy as np
import pytest

from tests.models.contexts import context
from tests.models.steps import initial_weights, loss_and_gradients
from zerosim.models import four_weights

BATCHES = {0: ((1, 3), 5, 10.125, (0, 0, 0, -4.5)), 1: ((2, 1), 7, 15.125, (-11, -5.5, -5.5, -5.5))}


def flat(arrays: dict[str, np.ndarray]) -> list[float]:
    """The four numbers in the order of the flat vector: w1, w2, w3, w4."""
    return [float(value) for name in four_weights().shapes for value in arrays[name].reshape(-1)]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rank", BATCHES)
def test_loss_and_gradients_are_those_worked_out_by_hand(name, rank):
    ctx, model = context(name), four_weights()
    x, target, loss, gradients = BATCHES[rank]
    w = initial_weights(ctx, model)
    assert flat(w) == [2, -3, 1, 0.5]
    found = loss_and_gradients(ctx, model, w, ctx.cast(np.array([x], np.float32)), np.array([[target]], np.float32))
    assert found[0] == loss
    assert flat(found[1]) == list(gradients)
    assert {gradient.dtype for gradient in found[1].values()} == {ctx.dtype}


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_a_scaled_loss_scales_the_gradients_and_not_the_reported_loss(name):
    ctx, model = context(name), four_weights()
    x, target, loss, gradients = BATCHES[1]
    found = loss_and_gradients(ctx, model, initial_weights(ctx, model), ctx.cast(np.array([x], np.float32)),
                               np.array([[target]], np.float32), scale=1024.0)
    assert found[0] == loss
    assert flat(found[1]) == [1024 * gradient for gradient in gradients]


def test_both_examples_in_one_batch_give_the_mean():
    ctx, model = context("fp32"), four_weights()
    x, target = np.array([BATCHES[0][0], BATCHES[1][0]], np.float32), np.array([[5], [7]], np.float32)
    loss, gradients = loss_and_gradients(ctx, model, initial_weights(ctx, model), x, target)
    assert loss == (10.125 + 15.125) / 2
    assert flat(gradients) == [-5.5, -2.75, -2.75, -5]


def test_the_flat_vector_is_w1_w2_w3_w4_in_two_units():
    model = four_weights((5, 6, 7, 8))
    assert [unit.shapes for unit in model.units] == [
        {"layer1.weight": (2, 1)}, {"layer2.weight": (1, 1), "layer2.bias": (1,)}]
    assert flat(initial_weights(context("fp16"), model)) == [5, 6, 7, 8]
