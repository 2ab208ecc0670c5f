"""One pass without ranks: the loss and gradients are the engine's, the largest outputs those of the arrays."""

import numpy as np
import pytest

import zerosim as zs

MODEL = zs.models.MLP([3, 4, 2])
X, TARGET = np.float32([[1, -2, 3], [-4, 0.5, 0.25]]), np.float32([[1, 2], [3, -4]])
TOKENS, NEXT = np.random.default_rng(0).integers(0, 17, (2, 3, 8))
SCALE = 64.0


@pytest.mark.parametrize(("compute", "model", "x", "target"), [
    ("fp32", MODEL, X, TARGET), ("bf16", MODEL, X, TARGET), ("fp16", MODEL, X, TARGET),
    ("fp32", zs.models.GPT("gpt-nano", tied=True), TOKENS, NEXT), ("bf16", zs.models.GPT("gpt-nano"), TOKENS, NEXT),
    ("fp16", zs.models.GPT("gpt-nano", tied=True), TOKENS, NEXT),
    ("fp64", zs.models.GPT("gpt-nano", tied=True), TOKENS, NEXT)])
def test_loss_and_gradients_are_those_of_an_engine_alone_and_weights_and_data_stay_as_they_are(
        compute, model, x, target):
    policy, weights = zs.Policy(compute, loss_scale=SCALE), zs.models.first_weights(model)
    before = [array.tobytes() for array in (*weights.values(), x, target)]

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=0.1), policy=policy)
        tape = engine.forward(x, target)
        engine.backward(tape)
        engine.reduce()
        return tape.loss, {name: engine.state(name)["gradient"].reshape(shape) for name, shape in model.shapes.items()}

    loss, gradients = zs.Cluster(1).run(program)[0]
    found = zs.models.one_pass(model, weights, policy, x, target, SCALE)
    assert found.loss == loss
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in found.gradients.items():
        wide = np.float64 if compute == "fp64" else np.float32
        assert gradients[name].dtype == wide
        np.testing.assert_array_equal(gradient.astype(wide) / wide(SCALE), gradients[name])
    assert [array.tobytes() for array in (*weights.values(), x, target)] == before


def test_the_largest_outputs_and_the_gradient_where_backward_begins_are_those_of_the_arrays():
    w = zs.models.first_weights(MODEL) | {"layer1.bias": np.float32([-9, 3])}
    found = zs.models.one_pass(MODEL, w, zs.Policy(), X, TARGET, 4.0)
    hidden = np.maximum(X @ w["layer0.weight"], 0)
    y = hidden @ w["layer1.weight"] + w["layer1.bias"]
    assert -y.min() > y.max(), "a negative output is the largest"
    assert found.largest == pytest.approx({"layer0": hidden.max(), "layer1": -y.min()}, rel=1e-6)
    np.testing.assert_allclose(found.output_gradient, 4 * (y - TARGET) / len(X), rtol=1e-5, atol=1e-6)


def test_in_float64_weights_are_not_rounded():
    weights = {name: value.astype(np.float64) for name, value in zs.models.first_weights(MODEL).items()}
    moved = {name: value * (1 + 1e-12) for name, value in weights.items()}
    losses = {policy: [zs.models.one_pass(MODEL, w, policy, X, TARGET).loss for w in (weights, moved)]
              for policy in ("fp64", "fp32")}
    assert 0 < abs(losses["fp64"][1] - losses["fp64"][0]) < 1e-10
    assert losses["fp32"][0] == losses["fp32"][1]
