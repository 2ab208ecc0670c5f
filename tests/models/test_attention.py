"""Attention beyond what every layer promises: strips and tiles, where it rounds, what computing again gives.

Legend: B batch, T tokens, C channels, H heads, D = C/H.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.models.contexts import bits_of, context, normal, recorded
from tests.ranks.data import FLOATS
from zerosim.models import layers

KEEPS = ["all", "selective", "tiled"]
FORMATS = ["fp16", "bf16", "fp32", "fp64"]
# B, T, C, H: one token; odd everything; around a strip of 64 and a tile of 128 rows; more heads than a group takes.
SHAPES = [(3, 1, 4, 2), (2, 7, 6, 3), (1, 64, 8, 1), (2, 65, 6, 2), (1, 128, 8, 2), (1, 200, 15, 5), (2, 90, 60, 30)]
# Half a spacing just above 1: what one rounding loses, relative to the number.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24, "fp64": 2.0**-53}


def both(name: str, qkv: np.ndarray, do: np.ndarray, heads: int, keep: str) -> tuple[np.ndarray, np.ndarray]:
    """o (B, T, C) and dqkv (B, T, 3C)."""
    o, kept = layers.attention_forward(replace(context(name), keep=keep), qkv, heads)
    return o, layers.attention_backward(context(name), kept, do)


def by_head(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, T, C) -> (B, H, T, D), float64."""
    return x.astype(np.float64).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def reference(qkv: np.ndarray, do: np.ndarray, heads: int, rounded=lambda x: x) -> dict[str, np.ndarray]:
    """Everything from the formulas, head by head and whole, in float64; P and dS are ``rounded`` before products."""
    q, k, v = (by_head(x, heads) for x in np.split(qkv, 3, axis=2))
    g, scale = by_head(do, heads), 1 / np.sqrt(qkv.shape[2] / 3 / heads)
    s = np.where(np.tril(np.ones((qkv.shape[1],) * 2, bool)), q @ k.swapaxes(2, 3) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = rounded(p / p.sum(-1, keepdims=True))
    dp = g @ v.swapaxes(2, 3)
    ds = rounded(p * (dp - (p * dp).sum(-1, keepdims=True)) * scale)
    o, dqkv = p @ v, [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g]
    # What the sums are sums of, without their signs: by how much may the order of additions change them?
    row_sums = (p * abs(dp)).sum(-1, keepdims=True) + (abs(g) * (p @ abs(v))).sum(-1, keepdims=True)
    terms = p * (abs(dp) + row_sums) * scale
    sums = [terms @ abs(k), terms.swapaxes(2, 3) @ abs(q), p.swapaxes(2, 3) @ abs(g)]
    flat = [x.transpose(0, 2, 1, 3).reshape(*do.shape) for x in (o, *dqkv, p @ abs(v), *sums)]
    return {"o": flat[0], "dqkv": np.concatenate(flat[1:4], 2), "|o|": flat[4],
            "|dqkv|": np.concatenate(flat[5:], 2)}


def inputs(name: str, shape: tuple[int, int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    batch, tokens, channels, heads = shape
    return normal(name, (batch, tokens, 3 * channels), seed), normal(name, (batch, tokens, channels), seed + 1), heads


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", KEEPS)
def test_strips_and_tiles_compute_what_the_whole_formula_does(keep, shape):
    qkv, do, heads = inputs("fp64", shape)
    wanted, (o, dqkv) = reference(qkv, do, heads), both("fp64", qkv, do, heads, keep)
    # Sums of up to T terms, each rounded: T·2⁻⁵³ of the sum of their magnitudes, and a few for what is inside a term.
    bound = (shape[1] + 20) * ROUNDING["fp64"]
    assert (abs(o - wanted["o"]) <= bound * wanted["|o|"]).all()
    assert (abs(dqkv - wanted["dqkv"]) <= bound * wanted["|dqkv|"]).all()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bit_attention_rounds_p_and_ds_and_the_results_and_nothing_else(name):
    qkv, do, heads = inputs(name, (4, 33, 32, 2))
    o, dqkv = both(name, qkv, do, heads, "all")

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(FLOATS[name]).astype(np.float64)

    # Where float32's own roundings lie next to a midpoint of the format, a value of P falls to the other side: that is
    # rare, and moves some results by a rounding. Values that are never rounded inside move most of them.
    for rule, few in [(rounded, True), (lambda x: x, False)]:
        wanted = reference(qkv, do, heads, rule)
        for found, exact in [(o, wanted["o"]), (dqkv, wanted["dqkv"])]:
            other = (bits_of(found) != bits_of(exact.astype(np.float32).astype(FLOATS[name]))).mean()
            assert other < 0.05 if few else other > 0.1


# -- computed again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_computed_again_give_the_bits_of_those_that_were_kept(name, shape):
    qkv, do, heads = inputs(name, shape)
    results = (both(name, qkv, do, heads, keep) for keep in ("all", "selective"))
    for kept, again in zip(*results, strict=True):
        np.testing.assert_array_equal(bits_of(kept), bits_of(again))
    p = layers.attention_forward(context(name), qkv, heads)[1].p
    assert not bits_of(p[..., ~np.tril(np.ones((shape[1],) * 2, bool))]).any(), "of later tokens"


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_attention_differs_by_four_roundings_of_what_it_adds_up(name, shape):
    qkv, do, heads = inputs(name, shape)
    terms = reference(qkv, do, heads)
    # P is rounded after or before the division by its sum, and dS once each; results are rounded once each; the fp32
    # sums of up to T terms are made in another order.
    bound = 4 * ROUNDING[name] + shape[1] * ROUNDING["fp32"]
    whole, tiled = (both(name, qkv, do, heads, keep) for keep in ("all", "tiled"))
    for one, other, magnitude in zip(whole, tiled, (terms["|o|"], terms["|dqkv|"]), strict=True):
        difference = abs(one.astype(np.float64) - other.astype(np.float64))
        assert (difference <= bound * magnitude + 2.0**-24).all()  # and fp16's smallest subnormal
    assert shape[1] < 200 or (bits_of(whole[0]) != bits_of(tiled[0])).mean() > 0.1, "another order of additions"


# -- causality, and what is not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
def test_scores_beyond_the_range_of_the_exponential_give_one_and_zero(keep):
    qkv = np.zeros((1, 3, 3), np.float32)
    qkv[0, :, 0], qkv[0, :, 1], qkv[0, :, 2] = 1e4, [1, 2, 3], [5, 6, 7]  # scores grow by 1e4 with every key
    o, dqkv = both("fp32", qkv, np.ones((1, 3, 1), np.float32), 1, keep)
    np.testing.assert_array_equal(o[0, :, 0], [5, 6, 7])
    np.testing.assert_array_equal(dqkv[0, :, 2], [1, 1, 1])
    assert not dqkv[0, :, :2].any()


def test_tiled_attention_never_holds_a_square_of_the_tokens():
    qkv, do, heads = inputs("bf16", (1, 1500, 4, 1))
    ctx, recorder = recorded("bf16")
    _, kept = layers.attention_forward(replace(ctx, keep="tiled"), qkv, heads)
    layers.attention_backward(ctx, kept, do)
    assert max(int(np.prod(shape)) for _, _, shape, _ in recorder.allocated) < 1500 * 1500 // 100
    # Scratch: a dozen tiles of 128 x 128 in fp32, and wide copies of rows (T, 3C).
    assert ctx.kernels.scratch_nbytes < 12 * 4 * 128 * 128 + 12 * 4 * qkv.size < 4 * 1500 * 1500
