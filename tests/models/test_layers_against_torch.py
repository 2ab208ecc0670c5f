"""Every layer gives PyTorch's numbers, where PyTorch is installed: outputs, and gradients by its own backward."""

from typing import Any

import numpy as np
import pytest

from tests.models.contexts import context, normal
from zerosim.models import layers
from zerosim.models.losses import cross_entropy_backward, cross_entropy_forward

torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")
from torch.nn import functional  # noqa: E402  # only where there is one

# A few roundings of values of order 1 to 10, sums of up to 100 of them, and another tanh or exp.
NEAR = {"fp64": {"rtol": 1e-12, "atol": 1e-12}, "fp32": {"rtol": 2e-5, "atol": 2e-5}}
formats = pytest.mark.parametrize("name", NEAR)


def differentiable(*arrays: np.ndarray) -> list[Any]:
    return [torch.tensor(array, requires_grad=True) for array in arrays]


def agree(name: str, found: list[np.ndarray], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), **NEAR[name])


@formats
def test_linear_is_torchs(name):
    ctx, (x, w, b, dy) = context(name), [normal(name, s, i) for i, s in enumerate([(7, 5), (5, 3), (3,), (7, 3)])]
    tx, tw, tb = differentiable(x, w, b)
    wanted = functional.linear(tx, tw.T, tb)
    wanted.backward(torch.tensor(dy))
    y, kept = layers.linear_forward(ctx, x, w, b)
    dw, db = np.empty_like(w), np.empty_like(b)
    dx = layers.linear_backward(ctx, w, kept, dy, dw, db)
    agree(name, [y, dx, dw, db], [wanted, tx.grad, tw.grad, tb.grad])


@formats
@pytest.mark.parametrize("exact", [False, True])
def test_gelu_is_torchs(name, exact):
    ctx, x, dy = context(name), normal(name, (50, 7)) * 3, normal(name, (50, 7), 1)
    (tx,) = differentiable(x)
    wanted = functional.gelu(tx, approximate="none" if exact else "tanh")
    wanted.backward(torch.tensor(dy))
    y, kept = layers.gelu_forward(ctx, x, exact=exact)
    agree(name, [y, layers.gelu_backward(ctx, kept, dy, exact=exact)], [wanted, tx.grad])


@formats
def test_relu_is_torchs(name):
    ctx, x, dy = context(name), normal(name, (50, 7)), normal(name, (50, 7), 1)
    (tx,) = differentiable(x)
    wanted = functional.relu(tx)
    wanted.backward(torch.tensor(dy))
    y, kept = layers.relu_forward(ctx, x)
    agree(name, [y, layers.relu_backward(ctx, kept, dy)], [wanted, tx.grad])


@formats
def test_layernorm_is_torchs(name):
    ctx, x, dy = context(name), normal(name, (4, 5, 33)) + 3, normal(name, (4, 5, 33), 1)
    w, b = normal(name, (33,), 2), normal(name, (33,), 3)
    tx, tw, tb = differentiable(x, w, b)
    wanted = functional.layer_norm(tx, (33,), tw, tb, 1e-3)
    wanted.backward(torch.tensor(dy))
    y, kept = layers.layernorm_forward(ctx, x, w, b, 1e-3)
    dw, db = np.empty_like(w), np.empty_like(b)
    dx = layers.layernorm_backward(ctx, w, kept, dy, dw, db)
    agree(name, [y, dx, dw, db], [wanted, tx.grad, tw.grad, tb.grad])


@formats
def test_embedding_is_torchs(name):
    ctx, w, dy = context(name), normal(name, (9, 4)), normal(name, (3, 20, 4), 1)
    tokens = np.random.default_rng(2).integers(0, 8, (3, 20))
    (tw,) = differentiable(w)
    wanted = functional.embedding(torch.tensor(tokens), tw)
    wanted.backward(torch.tensor(dy))
    y, kept = layers.embedding_forward(ctx, tokens, w)
    dw = np.empty_like(w)
    layers.embedding_backward(ctx, kept, dy, dw)
    agree(name, [y, dw], [wanted, tw.grad])


@formats
@pytest.mark.parametrize("keep", ["probabilities", "nothing", "tiled"])
@pytest.mark.parametrize("shape", [(2, 9, 12, 3), (1, 150, 8, 1)])
def test_attention_is_torchs(name, keep, shape):
    batch, tokens, channels, heads = shape
    ctx, qkv = context(name), normal(name, (batch, tokens, 3 * channels))
    do = normal(name, (batch, tokens, channels), 1)
    (tqkv,) = differentiable(qkv)
    q, k, v = (x.view(batch, tokens, heads, -1).transpose(1, 2) for x in tqkv.split(channels, 2))
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(do.shape)
    wanted.backward(torch.tensor(do))
    o, kept = layers.attention_forward(ctx, qkv, heads, keep)
    agree(name, [o, layers.attention_backward(ctx, kept, do)], [wanted, tqkv.grad])


@formats
def test_cross_entropy_is_torchs(name):
    ctx, logits = context(name), normal(name, (3, 20, 7)) * 4
    target = np.random.default_rng(1).integers(-1, 7, (3, 20))
    (tlogits,) = differentiable(logits)
    wanted = functional.cross_entropy(tlogits.view(-1, 7), torch.tensor(target).view(-1), ignore_index=-1)
    wanted.backward()
    loss, kept = cross_entropy_forward(ctx, logits, target)
    agree(name, [np.array(loss), cross_entropy_backward(ctx, kept, 1.0)], [wanted, tlogits.grad])
