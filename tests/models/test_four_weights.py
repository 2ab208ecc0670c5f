"""The worked example, by hand: every number below can be followed with pencil and paper."""

import numpy as np
import pytest

from tests.models.runs import run_of
from zerosim.models import four_weights

BATCHES = {0: ((1, 3), 5, 10.125, (0, 0, 0, -4.5)), 1: ((2, 1), 7, 15.125, (-11, -5.5, -5.5, -5.5))}


def flat(arrays: dict[str, np.ndarray]) -> list[float]:
    """The four numbers in the order of the flat vector: w1, w2, w3, w4."""
    return [float(value) for name in four_weights().shapes for value in arrays[name].reshape(-1)]


def gradients_of(name: str, x: list, target: list, scale: float = 1.0) -> tuple[float, list[float]]:
    """The loss and the gradients of a batch, computed in this format."""
    run = run_of(four_weights(), name)
    loss, found = run.gradients(run.ctx.cast(np.array(x, np.float32)), np.array(target, np.float32), scale=scale)
    assert {gradient.dtype for gradient in found.values()} == {run.ctx.dtype}
    return loss, flat(found)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rank", BATCHES)
def test_loss_and_gradients_are_those_worked_out_by_hand_and_a_scaled_loss_scales_the_gradients_alone(name, rank):
    x, target, loss, gradients = BATCHES[rank]
    for scale in (1, 1024):
        assert gradients_of(name, [x], [[target]], scale) == (loss, [scale * gradient for gradient in gradients])


def test_the_flat_vector_is_w1_w2_w3_w4_in_two_units():
    model = four_weights((5, 6, 7, 8))
    assert [unit.shapes for unit in model.units] == [
        {"layer1.weight": (2, 1)}, {"layer2.weight": (1, 1), "layer2.bias": (1,)}]
    assert [flat(run_of(of, "fp16").w) for of in (model, four_weights())] == [[5, 6, 7, 8], [2, -3, 1, 0.5]]
