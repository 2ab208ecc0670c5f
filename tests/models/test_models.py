"""Every model as a whole: its loss is that of its paper, its gradients are the slopes of that, and the products of what
its linear layers show; one GPT and one Llama have PyTorch's too.

That no unit keeps a weight from forward to backward is held where a sharded engine frees it, in `tests/zero`.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, note
from hypothesis import strategies as st

from tests.models import meaning
from tests.models.runs import Arrays, Run, batch_of, run_of
from zerosim.models import GPT, MLP, GPTConfig, LinearScaling, Llama, Llama3Scaling, LlamaConfig, Model

BIASES = ("qkv", "projection", "feed_forward")
SCALINGS = [None, LinearScaling(3.0), Llama3Scaling(8.0, 0.25, 1.5, 16)]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model of any kind, every option of which is drawn."""
    def some(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    kind = some("MLP", "GPT", "Llama", "Llama")
    if kind == "MLP":
        widths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
        return MLP(widths, activation=some(None, "relu", "gelu"), bias=some(True, False), seed=3)
    shared, sharing = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, width = shared * sharing, 2 * draw(st.integers(1, 3))
    of = {"layers": some(1, 2), "channels": heads * width, "heads": heads, "context": draw(st.integers(1, 9)),
          "vocabulary": draw(st.integers(2, 9)), "dropout": some(0.0, 0.3), "epsilon": some(1e-5, 0.1)}
    options = {"tied": some(True, False), "units": some("block", "sub_block", 2),
               "normalization": some("own", "global")}
    if kind == "GPT":
        return GPT(GPTConfig(**of), **options)
    own = {"key_value_heads": shared, "head_channels": width, "feed_forward": draw(st.integers(1, 7)),
           "channels": draw(st.integers(3, 12)), "base": some(50.0, 10_000.0), "scaling": some(*SCALINGS),
           "biases": tuple(name for name in BIASES if some(True, False)), "head_norms": some(True, False)}
    return Llama(LlamaConfig(**of | own), **options)


def loss_of(model: Model, run: Run, x: np.ndarray, target: np.ndarray, w: Arrays) -> Any:
    """What the loss of these weights is by the papers, with the random numbers of the run's dropout."""
    if isinstance(model, MLP):
        y = meaning.mlp(w, len(model.units), model.units[0].activation, x)
        return meaning.half_squared_error(y, target)
    of = model.config

    def drop(name: str, h: np.ndarray) -> np.ndarray:
        words = run.ctx.draw(name, slice(0, h.size)).reshape(h.shape)
        return h * (words >= round(of.dropout * 2**32)) / (1 - of.dropout)

    decoder = meaning.gpt
    if isinstance(model, Llama):
        scaling = asdict(of.scaling) if of.scaling else {}
        decoder = partial(meaning.llama, thetas=meaning.frequencies(of.head_channels, of.base, **scaling))
    logits = decoder(w, of, x, tied=model.tied, drop=drop)
    return meaning.cross_entropy(logits, target, everywhere=model.normalization == "global")


def batch_for(model: Model, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows or sequences of at most the context, and targets, of which some places have none."""
    rng = np.random.default_rng(seed)
    if isinstance(model, MLP):
        return batch_of(model, 3)
    x, target = batch_of(model, 2, rng.integers(1, model.config.context + 1), seed)
    target.reshape(-1)[1:][rng.random(target.size - 1) < 0.3] = -1
    return x, target


@example(GPT(GPTConfig(2, 12, 3, 9, 7, 0.3, epsilon=0.1), normalization="global"), "selective", 1)
@example(Llama(LlamaConfig(2, 10, 6, 9, 7, 0.3, key_value_heads=2, head_channels=4, feed_forward=5, base=50.0,
                           scaling=SCALINGS[2], biases=BIASES, head_norms=True), tied=True), "sub_block", 1)
@example(Llama(LlamaConfig(1, 12, 2, 9, 7, scaling=SCALINGS[1])), "tiled", 1)
@given(models(), st.sampled_from(["none", "selective", "sub_block", "tiled", "block"]), st.integers(0, 2**32 - 1))
def test_a_model_has_the_loss_of_its_paper_and_the_slopes_of_that_for_gradients(
        model: Model, policy: str, seed: int) -> None:
    """Some dozen roundings after each other, of 1.1e-16 in float64 and 6e-8 in fp32, of sums of terms of one size."""
    note(f"{getattr(model, 'config', model.shapes)}")
    x, target = batch_for(model, seed)
    wide, narrow = run_of(model, "fp64", scatter=0.3), run_of(model, "fp32", scatter=0.3)
    wide.w = {name: value.astype(np.float64) for name, value in narrow.w.items()}
    wanted, rng, slopes = loss_of(model, wide, x, target, wide.w), np.random.default_rng(seed), {}
    directions = {name: rng.standard_normal(value.shape) for name, value in wide.w.items()}
    for name, direction in directions.items():
        slopes[name] = meaning.slope(lambda value, name=name: loss_of(model, wide, x, target, wide.w | {name: value}),
                                     wide.w[name], direction)
    for run, bound in ((wide, 1e-12), (narrow, 1e-4)):
        values = [a if a.dtype.kind == "i" else a.astype(run.ctx.dtype) for a in (x, target)]
        loss, gradients = run.gradients(*values, policy)
        assert loss == pytest.approx(wanted, rel=bound, abs=bound)
        assert gradients.keys() == model.shapes.keys()
        terms = {name: gradients[name] * direction for name, direction in directions.items()}
        largest = max(np.abs(of).max() for of in terms.values())
        for name, of in terms.items():
            assert abs(of.sum() - slopes[name]) <= bound * (np.abs(of).sum() + largest), name


@given(models())
def test_who_changes_a_unit_s_shapes_changes_a_copy(model: Model) -> None:
    for unit in model.units:
        unit.shapes.clear()
        assert unit.shapes


@given(models())
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


@pytest.mark.peer
@pytest.mark.parametrize("model", [GPT(GPTConfig(3, 40, 5, 16, 256)), Llama(WIDE)], ids=["GPT", "Llama"])
def test_loss_and_gradients_are_pytorchs(model: Model) -> None:
    """Every element, but for some dozen roundings of float64; and so does the PyTorch that the benchmarks time."""
    torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")
    from benchmarks.speed import torch_decoders

    run = run_of(model, "fp64", scatter=0.2)
    x, target = batch_of(model, batch=3)
    loss, gradients = run.gradients(x, target)
    w = torch_decoders.tensors_of(run.w)
    wanted = torch_decoders.step(model, w, torch.tensor(x), torch.tensor(target), fused=isinstance(model, Llama))
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    assert w.keys() == gradients.keys()
    for name, gradient in gradients.items():
        theirs = w[name].grad.numpy()
        assert np.abs(gradient - theirs).max() <= 1e-12 * np.abs(theirs).max(), name
