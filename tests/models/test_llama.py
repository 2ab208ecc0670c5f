"""Llama: its shapes, turned heads, shared keys and values.

What every model, layer and policy promises is held for it in `test_models`, `test_layers` and `test_gpt_activations`.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import meaning
from tests.models.contexts import bits_of, context, normal
from zerosim.models import Llama, layers, llama
from zerosim.numerics import kernels


@pytest.mark.parametrize("name", llama.PRESETS)
def test_the_parameters_are_two_tables_and_per_block_two_norms_and_matrices_without_biases(name: str) -> None:
    of = llama.PRESETS[name]
    c, k = of.channels, of.key_value_heads * of.head_channels
    block = 2 * c + c * (c + 2 * k) + c * c + 3 * c * of.feed_forward
    assert Llama(name).parameter_count == 2 * of.vocabulary * c + of.layers * block + c
    assert Llama(name, tied=True).parameter_count == Llama(name).parameter_count - of.vocabulary * c
    assert (of.base, of.epsilon) == (10_000, 1e-5), "RoFormer's, and Llama 2's"
    assert not any("bias" in parameter for parameter in Llama(name).shapes)


def test_heads_are_turned_from_place_0_on_and_back_and_those_after_them_are_left_alone() -> None:
    x, thetas, k = normal("fp64", (2, 9, 24)), meaning.frequencies(8, 100.0), kernels.NumpyKernels()
    first, second, third = meaning.heads_of(x, 8)
    found = x.copy()
    k.rotate(found, 2, tuple(thetas))
    wanted = np.concatenate([meaning.turned(first, thetas), meaning.turned(second, thetas), third], 2)
    np.testing.assert_allclose(found, wanted, atol=1e-14)  # a few roundings of numbers of order 1
    k.rotate(found, 2, tuple(thetas), back=True)
    np.testing.assert_allclose(found, x, atol=1e-14)


@pytest.mark.parametrize("keep", ["all", "selective", "tiled"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_shared_keys_and_values_are_copies_whose_gradients_are_added_up(keep: str, dtype: str) -> None:
    """More heads than a group of the kernels takes, so that no group parts heads that share."""
    batch, tokens, shared, sharing, width = 2, 90, 10, 3, 2
    qkv, do = normal(dtype, (batch, tokens, (sharing + 2) * shared * width)), normal(dtype, (batch, tokens, 60))
    queries, keys, values = np.split(qkv.reshape(batch, tokens, -1, width), [30, 40], axis=2)
    copies = [np.repeat(x, sharing, 2) for x in (keys, values)]
    copied = np.concatenate([queries, *copies], 2).reshape(batch, tokens, -1)
    ctx = replace(context(dtype), keep=keep)
    o, saved = layers.attention_forward(ctx, qkv, 30, shared)
    wanted, of_copies = layers.attention_forward(ctx, copied, 30)
    np.testing.assert_array_equal(bits_of(o), bits_of(wanted))
    dqkv = layers.attention_backward(context(dtype), saved, do).reshape(batch, tokens, -1, width)
    gradients = layers.attention_backward(context(dtype), of_copies, do).reshape(batch, tokens, -1, width)
    np.testing.assert_array_equal(bits_of(dqkv[:, :, :30]), bits_of(gradients[:, :, :30]))
    sums = gradients[:, :, 30:].astype(np.float64).reshape(batch, tokens, 20, sharing, width)
    # Each copy's gradient is rounded before it is added here, and the sum alone there.
    bound = (sharing + 1) * 2.0 ** (-24 if dtype == "fp32" else -8) * abs(sums).sum(3)
    assert (abs(dqkv[:, :, 30:].astype(np.float64) - sums.sum(3)) <= bound).all()
