"""Embedding and dropout: rows that add up, masks that are drawn again, and what both refuse."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.contexts import DTYPES, bits_of, context, normal, recorded, slope
from zerosim.models import layers
from zerosim.numerics import random

FORMATS = ["fp16", "bf16", "fp32", "fp64"]


# -- embedding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16])
def test_an_embedding_gives_each_token_its_row(dtype):
    w, tokens = normal("bf16", (5, 3)), np.array([[4, 0, 4], [1, 1, 2]], dtype)
    y, kept = layers.embedding_forward(context("bf16"), tokens, w)
    np.testing.assert_array_equal(bits_of(y), bits_of(w)[tokens])
    assert kept is tokens


def test_embedding_backward_is_the_slope_of_embedding_forward():
    ctx, w, tokens = context("fp64"), normal("fp64", (5, 3)), np.array([[4, 0, 4], [1, 1, 2]])
    c, dw = normal("fp64", (2, 3, 3), 1), np.full((5, 3), np.nan)
    layers.embedding_backward(ctx, tokens, c, dw)
    wanted = slope(lambda: float(np.sum(layers.embedding_forward(ctx, tokens, w)[0] * c)), w)
    np.testing.assert_allclose(dw, wanted, rtol=1e-7, atol=1e-9)
    assert not dw[3].any(), "no token named row 3"


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 9), st.integers(0, 9))
def test_rows_add_up_whatever_the_tokens(count, vocabulary, channels, seed):
    rng = np.random.default_rng(seed)
    tokens, dy = rng.integers(0, vocabulary, count), rng.integers(-9, 10, (count, channels)).astype(np.float32)
    dw, wanted = np.empty((vocabulary, channels), np.float32), np.zeros((vocabulary, channels), np.float32)
    layers.embedding_backward(context("fp32"), tokens, dy, dw)
    np.add.at(wanted, tokens, dy)  # whole numbers: exact in any order
    np.testing.assert_array_equal(dw, wanted)


@pytest.mark.parametrize(("count", "channels", "vocabulary"), [
    (5000, 64, 3), (5000, 64, 4999), (70000, 1, 2), (3, 70000, 2)])
def test_rows_add_up_over_blocks(count, channels, vocabulary):
    rng = np.random.default_rng(0)
    tokens, dy = rng.integers(0, vocabulary, count), rng.integers(-9, 10, (count, channels)).astype(np.float32)
    dw = np.empty((vocabulary, channels), np.float32)
    layers.embedding_backward(context("fp32"), tokens, dy, dw)
    for row in (0, vocabulary // 2, vocabulary - 1):
        np.testing.assert_array_equal(dw[row], dy[tokens == row].sum(0))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_duplicates_are_added_in_fp32_and_rounded_once(name):
    tokens, dy = np.zeros((3, 1000), np.int64), np.ones((3, 1000, 2), DTYPES[name])
    tokens[:, 7], dw = 1, np.empty((2, 2), DTYPES[name])
    layers.embedding_backward(context(name), tokens, dy, dw)
    exact = np.array([[2997, 2997], [3, 3]], np.float32)
    np.testing.assert_array_equal(bits_of(dw), bits_of(exact.astype(dw.dtype)))
    in_the_format = np.add.accumulate(dy.reshape(-1, 2), axis=0, dtype=dw.dtype)[-1]
    assert (in_the_format < 2997).all(), "sums in 16 bit stall at 2048 or 256"


def test_a_nan_spoils_the_row_of_its_token_only():
    tokens, dy = np.array([2, 0, 2, 1]), np.ones((4, 3), np.float16)
    dy[2, 1], dw = np.nan, np.empty((4, 3), np.float16)
    layers.embedding_backward(context("fp16"), tokens, dy, dw)
    np.testing.assert_array_equal(dw, [[1, 1, 1], [1, 1, 1], [2, np.nan, 2], [0, 0, 0]])


@pytest.mark.parametrize(("tokens", "text"), [
    (np.zeros((2, 3)), "asked for tokens as integers, and found float64; a token is the index of a row"),
    (np.array([0, 5]), "asked for tokens from 0 to 4, and found 0 to 5; take a vocabulary that has them all"),
    (np.array([-1, 2]), "asked for tokens from 0 to 4, and found -1 to 2"),
])
def test_an_embedding_refuses_what_is_no_row(tokens, text):
    with pytest.raises(ValueError, match=f"^embedding_forward {text}"):
        layers.embedding_forward(context("fp16"), tokens, np.zeros((5, 3), np.float16))


def test_embedding_refuses_other_shapes():
    ctx, tokens = context("fp16"), np.zeros((2, 3), np.int64)
    with pytest.raises(ValueError, match=r"^embedding_forward asked for w of shape \(V, C\), and found \(5,\)"):
        layers.embedding_forward(ctx, tokens, np.zeros(5, np.float16))
    with pytest.raises(ValueError, match=r"^embedding_backward asked for dy of shape \(2, 3, 4\), and found \(3, "):
        layers.embedding_backward(ctx, tokens, np.zeros((3, 2, 4), np.float16), np.zeros((5, 4), np.float16))


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_backward_drops_what_forward_dropped(name):
    ctx, ones = context(name), np.ones((50, 7), DTYPES[name])
    y, kept = layers.dropout_forward(ctx, ones, 0.3, "here")
    dx = layers.dropout_backward(ctx, kept, ones, 0.3)
    np.testing.assert_array_equal(bits_of(y), bits_of(dx))
    through = np.float32(1 / 0.7).astype(DTYPES[name]) if name != "fp64" else 1 / 0.7
    assert set(y.reshape(-1).tolist()) == {0, float(through)}


@pytest.mark.parametrize("count", [1, 9, 65536, 150001])
def test_an_element_is_dropped_by_its_own_word_wherever_blocks_end(count):
    x = normal("bf16", (count,))
    y, _ = layers.dropout_forward(context("bf16"), x, 0.25, "here")
    through = random.bits((0, "dropout of micro-batch 0", 0, "here"), 0, count) >= 2**30
    wide = x.astype(np.float32) * np.float32(1 / 0.75)
    np.testing.assert_array_equal(bits_of(y), bits_of(np.where(through, wide, 0).astype(np.float32).astype(y.dtype)))


def test_the_share_that_is_dropped_is_the_rate():
    for rate in (0.1, 0.5, 0.9):
        y, _ = layers.dropout_forward(context("fp32"), np.ones(2**16, np.float32), rate, "share")
        # A binomial's deviation is at most 1/2·2⁻⁸; five of them.
        assert abs((y == 0).mean() - rate) < 5 * 2.0**-9


def test_every_place_and_every_stream_has_a_mask_of_its_own():
    ctx, ones = context("fp32"), np.ones(1000, np.float32)
    other = replace(ctx, draw=lambda name, count, span: random.bits((1, "dropout", 0, name), 0, count)[span])
    masks = [layers.dropout_forward(c, ones, 0.5, name)[0] for c, name in [(ctx, "a"), (ctx, "b"), (other, "a")]]
    assert all((masks[i] != masks[j]).mean() > 0.3 for i, j in [(0, 1), (0, 2), (1, 2)])


def test_rate_0_is_the_identity_without_a_copy_and_draws_nothing():
    ctx, recorder = recorded("fp16")
    ctx, x = replace(ctx, draw=None), normal("fp16", (3,))
    assert layers.dropout_forward(ctx, x, 0.0, "here") == (x, "here")
    assert layers.dropout_backward(ctx, "here", x, 0) is x
    assert recorder.allocated == []


def test_no_mask_is_kept():
    ctx, recorder = recorded("fp16")
    _, kept = layers.dropout_forward(ctx, normal("fp16", (100,)), 0.5, "here")
    assert kept == "here"
    assert [(kind, shape) for kind, _, shape, _ in recorder.allocated] == [("activation", (100,))]


def test_a_dropped_nan_is_0_and_one_that_is_let_through_stays():
    ctx = context("bf16")
    kept, _ = layers.dropout_forward(ctx, np.ones(200, DTYPES["bf16"]), 0.5, "here")
    for bad in (np.nan, np.inf, -np.inf):
        y, _ = layers.dropout_forward(ctx, np.full(200, bad, DTYPES["bf16"]), 0.5, "here")
        np.testing.assert_array_equal(y.astype(np.float32), np.where(kept.astype(np.float32) > 0, np.float32(bad), 0))
        assert not bits_of(y)[kept.astype(np.float32) == 0].any()


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, np.nan, "0.5", True])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"^dropout_forward was given rate=.*; the share of elements that are dropped "
                                         r"lies in \[0, 1\)$"):
        layers.dropout_forward(context("fp16"), np.zeros(3, np.float16), rate, "here")
