"""Every model as a whole: gradients are the slopes of its loss, and the products of what its linear layers show;
decoders have PyTorch's.

That no unit keeps a weight from forward to backward is held where a sharded engine frees it, in `tests/zero`.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.models.runs import Run, batch_of, run_of
from zerosim.models import GPT, MLP, PRESETS, GPTConfig, Llama, LlamaConfig, Model

NANO = PRESETS["gpt-nano"]
GPTS = {f"GPT, tied={tied}, dropout={dropout}": GPT(replace(NANO, dropout=dropout), tied=tied)
        for tied, dropout in product((True, False), (0.0, 0.3))}
MLPS = {f"MLP {widths}, {activation}, bias={bias}": MLP(widths, activation=activation, bias=bias, seed=3)
        for widths, activation, bias in product([(3, 2), (3, 5, 4, 2)], [None, "relu", "gelu"], [True, False])}
QWEN2 = LlamaConfig(2, 16, 4, 8, 17, 0.3, key_value_heads=2, feed_forward=10, biases=("qkv", "feed_forward"))
QWEN3 = LlamaConfig(2, 12, 4, 8, 17, key_value_heads=2, head_channels=6, feed_forward=10, biases=("projection",),
                    head_norms=True)
LLAMAS = {"Llama": Llama("llama-nano"), "Qwen 2": Llama(QWEN2, tied=True), "Qwen 3": Llama(QWEN3, units="sub_block")}
MODELS = GPTS | MLPS | LLAMAS
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))


def slope_along(run: Run, name: str, direction: np.ndarray, x: np.ndarray, target: np.ndarray) -> float:
    """The central difference of the loss along a direction of one parameter, all in float64; its error is O(step²)."""
    step, first = 1e-5, run.w[name]
    losses = []
    for sign in (1, -1):
        run.w[name] = first + sign * step * direction
        losses.append(run.loss(x, target))
    run.w[name] = first
    return (losses[0] - losses[1]) / (2 * step)


@every_model
def test_who_changes_a_unit_s_shapes_changes_a_copy(model: Model) -> None:
    for unit in model.units:
        unit.shapes.clear()
        assert unit.shapes


@every_model
def test_gradients_of_the_whole_model_are_the_slopes_of_its_loss(model: Model) -> None:
    run = run_of(model, "fp64", scatter=0.2)
    x, target = batch_of(model, batch=3)
    if model.loss.integer_targets:
        target[0, :3] = -1  # places without a target
    _, gradients = run.gradients(x, target)
    rng = np.random.default_rng(2)
    assert gradients.keys() == model.shapes.keys()
    for name, gradient in gradients.items():
        # A direction that has a part of every element, and one that has a single one.
        single = np.zeros(gradient.shape)
        single.reshape(-1)[rng.integers(single.size)] = 1
        for direction in (rng.standard_normal(gradient.shape), single):
            wanted = slope_along(run, name, direction, x, target)
            assert float(np.sum(gradient * direction)) == pytest.approx(wanted, rel=1e-6, abs=1e-8), name


@every_model
def test_the_linear_layers_show_what_the_factors_of_their_gradients_are_made_of(model: Model) -> None:
    """For every weight that a unit calls factored: an input x and an output gradient dy with xᵀ dy the gradient."""
    run, seen = run_of(model, "fp64", scatter=0.2), {}
    run.ctx = replace(run.ctx, observe=lambda name, x, dy: seen.update({name: x.T @ dy}))
    _, gradients = run.gradients(*batch_of(model))
    assert seen.keys() == {name for unit in model.units for name in unit.factored} == {
        name for name, shape in model.shapes.items() if len(shape) == 2 and name not in ("wte", "wpe")}
    for name, product_of_factors in seen.items():
        np.testing.assert_allclose(product_of_factors, gradients[name], rtol=1e-10, atol=1e-14)  # the same sums


WIDE = LlamaConfig(3, 40, 10, 16, 256, key_value_heads=5, head_channels=6, feed_forward=30, biases=("qkv",),
                   head_norms=True)


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_pytorchs(dtype: str, tied: bool) -> None:
    """float64: some dozen roundings of 1.1e-16 after each other; fp32: the same of 6e-8."""
    torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")
    from benchmarks import torch_gpt

    bound = {"fp64": 1e-12, "fp32": 1e-4}[dtype]
    for config in (GPTConfig(2, 12, 3, 8, 17), GPTConfig(1, 64, 1, 33, 40), GPTConfig(3, 40, 5, 16, 256),
                   LLAMAS["Llama"].config, LlamaConfig(1, 64, 1, 33, 40), replace(WIDE, head_norms=False), WIDE):
        gpt = isinstance(config, GPTConfig)
        run = run_of((GPT if gpt else Llama)(config, tied=tied), dtype, scatter=0.2)
        x, target = batch_of(run.model, batch=3)
        loss, gradients = run.gradients(x, target)
        w = torch_gpt.tensors_of(run.w)
        wanted = torch_gpt.step(run.model, w, torch.tensor(x), torch.tensor(target), fused=not gpt)
        assert loss == pytest.approx(wanted.item(), rel=bound)
        assert w.keys() == gradients.keys()
        for name, gradient in gradients.items():
            theirs = w[name].grad.numpy()
            assert np.abs(gradient - theirs).max() <= bound * np.abs(theirs).max(), name
