"""The layers of a transformer block, one after the other: what they keep between forward and backward, to the byte.

Legend: B batch, T tokens, C channels, H heads.
"""

from typing import Any

import pytest

from tests.models.contexts import context, normal
from zerosim.models import layers
from zerosim.models.layers import Context
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.numerics.policy import Policy


def block_forward(ctx: Context, x: Any, w: dict[str, Any], heads: int, keep: str) -> tuple[Any, ...]:
    """A pre-norm block of x (B, T, C) without its residuals; returns what each of its layers kept, by name."""
    shape, kept = x.shape, {}
    rows = x.reshape(-1, shape[-1])
    h, kept["norm 1"] = layers.layernorm_forward(ctx, rows, w["one"], w["one"])
    h, _ = layers.linear_forward(ctx, h, w["qkv"])  # its input is computed again
    o, kept["attention"] = layers.attention_forward(ctx, h.reshape(*shape[:2], -1), heads, keep)
    h, kept["projection"] = layers.linear_forward(ctx, o.reshape(rows.shape), w["projection"])
    h, kept["norm 2"] = layers.layernorm_forward(ctx, h, w["one"], w["one"])
    h, _ = layers.linear_forward(ctx, h, w["up"])
    h, kept["gelu"] = layers.gelu_forward(ctx, h)
    y, kept["down"] = layers.linear_forward(ctx, h, w["down"])
    return y, kept


def block_backward(ctx: Context, kept: dict[str, Any], dy: Any, w: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """dx (B·T, C); gradients of weights go to memory that nobody reads."""
    spare = {name: ctx.kernels.empty(weight.shape, weight.dtype) for name, weight in w.items()}
    d = layers.linear_backward(ctx, w["down"], kept["down"], dy, spare["down"])
    d = layers.gelu_backward(ctx, kept["gelu"], d)
    h = layers.layernorm_output(ctx, w["one"], w["one"], kept["norm 2"])
    d = layers.linear_backward(ctx, w["up"], h, d, spare["up"])
    d = layers.layernorm_backward(ctx, w["one"], kept["norm 2"], d, spare["one"], spare["one"])
    d = layers.linear_backward(ctx, w["projection"], kept["projection"], d, spare["projection"])
    d = layers.attention_backward(ctx, kept["attention"], d.reshape(shape)).reshape(d.shape[0], -1)
    h = layers.layernorm_output(ctx, w["one"], w["one"], kept["norm 1"])
    d = layers.linear_backward(ctx, w["qkv"], h, d, spare["qkv"])
    return layers.layernorm_backward(ctx, w["one"], kept["norm 1"], d, spare["one"], spare["one"])


def arrays_in(kept: Any) -> dict[int, Any]:
    """Every array in a nest of what was kept, once, by the identity of its memory."""
    if isinstance(kept, layers.SavedAttention):
        kept = (kept.qkv, kept.p, kept.log_sums, kept.o)
    if isinstance(kept, tuple | dict):
        parts = kept.values() if isinstance(kept, dict) else kept
        return {key: array for part in parts for key, array in arrays_in(part).items()}
    return {} if kept is None else {id(kept.base if kept.base is not None else kept): kept}


def shapes_of(channels: int) -> dict[str, tuple[int, ...]]:
    c = channels
    return {"one": (c,), "qkv": (c, 3 * c), "projection": (c, c), "up": (c, 4 * c), "down": (4 * c, c)}


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("batch", "tokens", "channels", "heads"), [(2, 8, 12, 3), (1, 70, 32, 2), (3, 5, 8, 8)])
@pytest.mark.parametrize("keep", ["probabilities", "nothing", "tiled"])
def test_a_blocks_layers_keep_14_and_a_square_and_fp32_statistics(name, keep, batch, tokens, channels, heads):
    ctx, places = context(name), batch * tokens
    x = ctx.empty((batch, tokens, channels))
    x[...] = normal(name, x.shape)
    w = {key: normal(name, shape, 1) for key, shape in shapes_of(channels).items()}
    _, kept = block_forward(ctx, x, w, heads, keep)
    found = arrays_in(kept).values()
    elements = 14 * places * channels + (batch * heads * tokens**2 if keep == "probabilities" else 0)
    norms = 2 * 2 * places  # a mean and a 1/√(variance + ε) for each row of two LayerNorms
    log_sums = batch * heads * tokens if keep == "tiled" else 0
    assert sum(array.nbytes for array in found) == elements * ctx.dtype.itemsize + 4 * (norms + log_sums)
    assert all(weight is not array for weight in w.values() for array in found)


@pytest.mark.parametrize("keep", ["probabilities", "nothing", "tiled"])
def test_every_layer_runs_on_arrays_without_data_and_charges_and_notes_the_same(keep):
    def measured(kernels: NumpyKernels) -> tuple[list[Any], list[int]]:
        charged, noted = [], []

        class Books:
            def alloc(self, shape: Any, dtype: Any, kind: str, name: str = "") -> Any:
                array = kernels.empty(shape, dtype)
                charged.append((kind, name, array.shape, array.dtype))
                return array

        plain = Context.standalone(Policy(compute="bf16"), kernels)
        ctx = Context(plain.xp, plain.policy, kernels, Books(), lambda **work: noted.append(work), plain.gradients)
        x = kernels.empty((2, 70, 12), ctx.dtype)
        w = {key: kernels.empty(shape, ctx.dtype) for key, shape in shapes_of(12).items()}
        for array in (x, *w.values()):
            array.fill(1)
        y, kept = block_forward(ctx, x, w, 3, keep)
        y, dropped = layers.dropout_forward(ctx, y, 0.5, "here")
        y, bits = layers.relu_forward(ctx, y)
        dy = layers.relu_backward(ctx, bits, y)
        dy = layers.dropout_backward(ctx, dropped, dy, 0.5)
        block_backward(ctx, kept, dy, w, x.shape)
        return charged, noted

    assert measured(NullKernels()) == measured(NumpyKernels())
