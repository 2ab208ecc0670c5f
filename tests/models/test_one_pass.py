"""One pass without ranks: the loss and gradients are the engine's, the largest outputs those of the arrays."""

import numpy as np
import pytest

import zerosim as zs

MODEL = zs.models.MLP([3, 4, 2])
X, TARGET = np.float32([[1, -2, 3], [-4, 0.5, 0.25]]), np.float32([[1, 2], [3, -4]])


FP32 = zs.Policy("fp32")


def one_pass(weights, policy=FP32):
    return zs.models.one_pass(MODEL, weights, policy, X, TARGET)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_loss_and_gradients_are_those_of_an_engine_alone(compute):
    policy = zs.Policy(compute)

    def program(rank):
        engine = zs.Engine(rank, MODEL, zs.optim.SGD(lr=0.1), policy=policy)
        tape = engine.forward(X, TARGET)
        loss = tape.loss
        engine.backward(tape)
        engine.reduce()
        return loss, {name: engine.state(name)["gradient"] for name in MODEL.shapes}

    loss, gradients = zs.Cluster(1).run(program)[0]
    found = one_pass(zs.models.first_weights(MODEL), policy)
    assert found.loss == loss
    for name, gradient in gradients.items():
        assert np.array_equal(found.gradients[name].astype(np.float32), gradient.astype(np.float32))


def test_the_largest_magnitude_of_an_output_counts_negative_ones():
    weights = {name: np.zeros_like(value) for name, value in zs.models.first_weights(MODEL).items()}
    weights["layer1.bias"][...] = (-7, 3)
    assert one_pass(weights).largest == {"layer0": 0.0, "layer1": 7.0}
