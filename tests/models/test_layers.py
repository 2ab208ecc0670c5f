"""Every layer: it is what its paper says, forward and backward, rounds once, saves and notes what it says, with data or
without.

Below: what single layers promise beyond that.
"""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.models import meaning
from tests.models.conformance import LAYERS, rounded
from tests.models.contexts import bits_of, context, normal, recorded
from tests.ranks.data import FLOATS
from tests.support import assert_refused, literally
from zerosim.models import Context, layers
from zerosim.numerics import kernels, random

FORMATS, NARROW = ["fp16", "bf16", "fp32", "fp64"], ["fp16", "bf16"]
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))


def both(ctx, layer, arrays, dy=None):
    """y and the gradients by array; ``dy`` is normal where it is not given."""
    y, saved = layer.forward(ctx, arrays)
    dy = rounded(np.random.default_rng(9).standard_normal(y.shape), "fp32").astype(y.dtype) if dy is None else dy
    return {"y": y} | {f"d{key}": g for key, g in layer.backward(ctx, arrays, saved, dy).items()}


# -- every layer ------------------------------------------------------------------------------------------------------


@every_layer
def test_a_layer_is_what_its_paper_says_and_its_backward_the_slope_of_that(layer):
    """But for some dozen roundings of float64, of sums of terms of order 1 to 10."""
    ctx = context("fp64")
    for large in (True, False):
        arrays = layer.arrays("fp64", large=large)
        y, saved = layer.forward(ctx, arrays)
        np.testing.assert_allclose(y, layer.paper(arrays), rtol=1e-12, atol=1e-13)
    c = normal("fp64", y.shape, 8)
    for key, found in layer.backward(ctx, arrays, saved, c).items():
        wanted = meaning.gradient(lambda x, key=key: np.sum(layer.paper(arrays | {key: x}) * c), arrays[key])
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13, err_msg=key)


@every_layer
@pytest.mark.parametrize("name", NARROW)
def test_a_layer_in_16_bit_is_itself_in_float64_rounded_once(name, layer):
    arrays = layer.arrays(name, large=True)
    found = both(context(name), layer, arrays)
    exact = both(context("fp64"), layer, {key: a.astype(np.float64) for key, a in arrays.items()},
                 rounded(np.random.default_rng(9).standard_normal(found["y"].shape), name).astype(np.float64))
    for what, values in exact.items():
        assert found[what].dtype == FLOATS[name]
        if layer.rounds_inside:
            continue  # see attention's own tests
        # Half a spacing of the format, and a few hundred of float32's roundings of terms of order 1.
        allowed = 2.0 ** (-11 if name == "fp16" else -8) * abs(values) + 2.0**-25 + 300 * 2.0**-24
        assert (abs(found[what].astype(np.float64) - values) <= allowed).all(), what
        assert (bits_of(found[what]) != bits_of(rounded(values, name))).mean() < 0.02, what


@every_layer
def test_a_layer_charges_its_output_and_what_it_saves_and_keeps_its_input_itself(layer):
    ctx, recorder = recorded("fp16")
    arrays = layer.arrays("fp16")
    y, saved = layer.forward(ctx, arrays)
    charged = {name: math.prod(shape) * dtype.itemsize for _, name, shape, dtype in recorder.allocated}
    assert sum(charged.values()) == y.nbytes + layer.beside(arrays)
    assert {kind for kind, *_ in recorder.allocated} == {"activation"}
    if layer.takes_out and np.ndim(arrays.get("w", 0)) < 2:  # norms and activation functions read x and write the rest
        assert recorder.nbytes == arrays["x"].nbytes + sum(charged.values())
    if not charged.keys() & {"relu.bits", "here.dropped", "embedding.y"}:  # which save no input
        first = getattr(saved, "qkv", saved[0] if isinstance(saved, tuple) else saved)
        assert first is arrays["x"]


@every_layer
def test_a_layer_runs_on_arrays_without_data_and_charges_and_notes_the_same(layer):
    def measured(of):
        ctx, recorder = recorded("bf16", of)
        arrays = {key: of.empty(shape, ctx.dtype) for key, shape in layer.shapes.items()}
        for array in arrays.values():
            array.fill(1)
        y, saved = layer.forward(ctx, arrays)
        layer.backward(ctx, arrays, saved, y)
        assert recorder.flops + recorder.nbytes
        return recorder.allocated, recorder.flops, recorder.nbytes

    assert measured(kernels.NullKernels()) == measured(kernels.NumpyKernels())


@every_layer
@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_a_users_errstate_changes_no_bit_of_a_layer(layer, name):
    arrays = layer.arrays(name)
    for number, array in enumerate(arrays.values()):
        array.reshape(-1)[::3] = np.resize([np.inf, 1e4, -1e4, 1e-7, np.nan][number:], len(array.reshape(-1)[::3]))
    plain = both(context(name), layer, arrays)
    with np.errstate(all="raise"):
        strict = both(context(name), layer, arrays)
    for what, values in plain.items():
        np.testing.assert_array_equal(bits_of(strict[what]), bits_of(values), what)


@every_layer
def test_a_layer_refuses_what_is_wider_than_at_rest_and_what_is_of_another_shape(layer):
    ctx, arrays = context("fp16"), layer.arrays("fp16")
    (y, saved), forward, back = layer.forward(ctx, arrays), partial(layer.forward, ctx), partial(layer.backward, ctx)
    wider = r"_{} computes in float16, and found \w+ in float32; round it first, with ctx\.cast\(\w+\)$"
    for key, array in arrays.items():
        twice = np.concatenate([array, array])
        if key == "x" or arrays["w"].ndim == 2:  # norms read their weights in any format
            assert_refused(partial(forward, arrays | {key: array.astype(np.float32)}), wider.format("forward"))
        if key != "x" and "x" in arrays:
            said = literally(f"_forward asked for {key} of shape {array.shape}, and found {twice.shape}; ")
            assert_refused(partial(forward, arrays | {key: twice}), f"{said}.* (column|channel) of [xw]$")
    assert_refused(partial(back, arrays, saved, y.astype(np.float32)), wider.format("backward"))
    twice = np.concatenate([y, y])
    if layer is not LAYERS["dropout"]:  # which has no shape of its own
        assert_refused(partial(back, arrays, saved, twice), literally(
            f"_backward asked for dy ... found ...{twice.shape}; hand it the gradient of this layer's own output$"))
    if layer.takes_out:
        assert_refused(partial(forward, arrays, out=y.astype(np.float32)), wider.format("forward"))
        assert_refused(partial(forward, arrays, out=twice), literally(
            f"_forward asked for out of shape {y.shape}, and found {twice.shape}; give it the shape of the result"))


@pytest.mark.parametrize("layer", [layer for layer in LAYERS.values() if layer.takes_out],
                         ids=[name for name, layer in LAYERS.items() if layer.takes_out])
def test_out_is_written_and_returned_and_changes_no_bit(layer):
    ctx, arrays = context("bf16"), layer.arrays("bf16")
    y, _ = layer.forward(ctx, arrays)
    out = np.empty_like(y)
    assert layer.forward(ctx, arrays, out=out)[0] is out
    np.testing.assert_array_equal(bits_of(out), bits_of(y))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layer", ["relu", "gelu", "exact gelu", "layernorm", "rmsnorm", "swiglu"])
def test_an_element_or_row_has_the_same_bits_wherever_it_stands(layer, name):
    layer = LAYERS[layer]
    arrays = layer.arrays(name, large=True)
    dy = normal(name, layer.forward(context(name), arrays)[0].shape, 5)
    whole = both(context(name), layer, arrays, dy)
    count = len(arrays["x"])
    for here in (slice(0, 1), slice(3, 11), slice(count - 9, count - 1), slice(1, None)):
        part = both(context(name), layer, arrays | {"x": arrays["x"][here].copy()}, dy[here].copy())
        for what in ("y", "dx"):
            np.testing.assert_array_equal(bits_of(part[what]), bits_of(whole[what][here]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("layer", ["linear", "layernorm", "relu", "gelu", "exact gelu", "attention", "attention again",
                                   "attention tiled", "attention of one key, tiled", "rmsnorm", "swiglu"])
def test_what_is_not_finite_comes_out_and_stays_in_its_own_row_or_sequence(layer, bad):
    layer = LAYERS[layer]
    ctx, arrays = context("bf16"), layer.arrays("bf16")
    clean = both(ctx, layer, arrays)
    arrays["x"][1] = bad
    found = both(ctx, layer, arrays)
    assert not np.isfinite(found["y"][1].astype(np.float32)).all()
    others = np.arange(len(found["y"])) != 1
    for what in ("y", "dx"):
        np.testing.assert_array_equal(bits_of(found[what][others]), bits_of(clean[what][others]))


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NARROW, "fp8_e4m3", "fp8_e5m2"])
def test_relu_lets_positive_codes_and_nan_through_bit_for_bit_and_makes_the_others_0(name):
    bits = 8 * FLOATS[name].itemsize
    x = np.roll(np.arange(2**bits, dtype=f"u{bits // 8}"), 5).view(FLOATS[name])
    y, kept = layers.relu_forward(context(name), x)
    wide = x.astype(np.float32)
    through = ~(wide <= 0)
    np.testing.assert_array_equal(np.unpackbits(kept)[:x.size], through)
    np.testing.assert_array_equal(bits_of(y[wide > 0]), bits_of(x[wide > 0]))
    assert np.isnan(y[np.isnan(wide)].astype(np.float32)).all()
    assert not bits_of(y[~through]).any(), "-0 and all below become +0"
    dy = normal(name, x.shape)
    dy[:9] = np.nan  # a choice, not a product: no NaN is multiplied by 0
    dx = layers.relu_backward(context(name), kept, dy)
    np.testing.assert_array_equal(bits_of(dx), np.where(through, bits_of(dy), 0))
    again, kept_again = layers.relu_forward(context(name), x, out=x)
    assert again is x
    np.testing.assert_array_equal(np.append(bits_of(y), kept), np.append(bits_of(again), kept_again))


GELUS = [LAYERS["gelu"], LAYERS["exact gelu"]]
gelus = pytest.mark.parametrize("gelu", GELUS, ids=["tanh", "exact"])


@gelus
@pytest.mark.parametrize("name", [*NARROW, "fp8_e4m3", "fp8_e5m2"])
def test_looking_up_a_gelu_gives_every_code_the_bits_of_computing_it(name, gelu):
    codes = np.arange(2 ** (8 * FLOATS[name].itemsize)).astype(f"u{FLOATS[name].itemsize}")
    x = codes.view(FLOATS[name])
    dy = normal(name, x.shape, 5)
    found = both(context(name), gelu, {"x": x}, dy)
    computed = both(context("fp32"), gelu, {"x": x.astype(np.float32)}, dy.astype(np.float32))
    for what in ("y", "dx"):
        wanted = np.empty_like(x)
        kernels.NumpyKernels().cast_pack(computed[what], wanted)
        numbers = ~np.isnan(wanted.astype(np.float32))  # which NaN it is, is nobody's business
        np.testing.assert_array_equal(bits_of(found[what])[numbers], bits_of(wanted)[numbers])
        np.testing.assert_array_equal(np.isnan(found[what].astype(np.float32)), ~numbers)


@gelus
@pytest.mark.parametrize("name", FORMATS)
def test_a_gelu_has_its_limits_at_the_ends_of_every_format(name, gelu):
    largest = 60000 if name == "fp16" else 1e38
    x = np.array([-np.inf, -largest, -60, 60, largest, np.inf, np.nan]).astype(FLOATS[name])
    found = both(context(name), gelu, {"x": x}, np.ones(7, FLOATS[name]))
    np.testing.assert_array_equal(found["y"].astype(np.float64), np.maximum(x.astype(np.float64), 0))
    np.testing.assert_array_equal(found["dx"].astype(np.float64), [0, 0, 0, 1, 1, 1, np.nan])


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_the_exact_gelu_is_exact_however_small_it_is_and_near_the_other(name):
    x = np.linspace(-12, 12, 5001).astype(FLOATS[name])
    tanh, found = (gelu.forward(context(name), {"x": x})[0] for gelu in GELUS)
    exact = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])
    # A dozen roundings, and those of the exponential's argument x²/2, which weigh x²/2 times as much in its result.
    limits = np.finfo(FLOATS[name])
    allowed = limits.eps * (16 + 2 * x.astype(np.float64) ** 2) * abs(exact) + limits.tiny
    assert (abs(found - exact) <= allowed).all()
    erf = np.array([math.erf(v / math.sqrt(2)) for v in x], np.float32)
    lossy = np.float32(0.5) * x.astype(np.float32) * (1 + erf)
    assert (abs(lossy - exact) > np.maximum(allowed, 0.01 * abs(exact))).any(), "1 + erf loses its digits below -4"
    np.testing.assert_allclose(tanh, meaning.gelu(x.astype(np.float64)), rtol=0, atol=8 * limits.eps * 12)
    assert 1e-4 < abs(tanh - found).max() < 1e-3


# -- LayerNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 4, 33), (700, 260), (2, 70000)])
def test_a_norms_output_computed_again_has_the_bits_that_it_had(name, shape):
    x, w, b = (normal(name, of, seed) for seed, of in enumerate((shape, shape[-1:], shape[-1:])))
    ctx = context(name)
    for weights in ((w, b), (w,)):
        y, kept = layers.norm_forward(ctx, x, *weights)
        layers.norm_forward(ctx, *LAYERS["layernorm"].arrays(name).values())  # scratch is used in between
        np.testing.assert_array_equal(bits_of(layers.norm_output(ctx, kept, *weights)), bits_of(y))


def test_layernorms_variance_is_that_of_the_deviations_not_a_difference_of_squares():
    x = (1e4 + normal("fp32", (4, 256))).astype(np.float32)
    y, _ = layers.norm_forward(context("fp32"), x, np.ones(256, np.float32), np.zeros(256, np.float32))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    # The mean is one of float32, off by up to 1e4·2⁻²⁴ = 6e-4, which shifts a row.
    np.testing.assert_allclose(y, exact, atol=2e-3)
    squares = (x * x).mean(1) - x.mean(1) ** 2
    assert (abs(squares - wide.var(1)) > 0.1).any(), "the difference of squares is off by more than a tenth"


def test_layernorm_makes_equal_values_the_bias_and_takes_weights_in_fp32_beside_16_bit_activations():
    x, w, b = np.full((2, 3), 7, np.float32), normal("fp32", (3,), 1), normal("fp32", (3,), 2)
    y, kept = layers.norm_forward(context("fp32"), x, w, b, epsilon=0.25)
    np.testing.assert_array_equal(y, [b, b])
    np.testing.assert_array_equal(kept[2], [2, 2])  # 1/√(0 + 0.25)
    x, ctx = normal("bf16", (4, 3)), context("bf16")
    y, kept = layers.norm_forward(ctx, x, w, b)
    low, _ = layers.norm_forward(ctx, x, *(a.astype(FLOATS["bf16"]) for a in (w, b)))
    assert y.dtype == FLOATS["bf16"]
    assert (bits_of(y) != bits_of(low)).any()
    assert LAYERS["layernorm"].backward(ctx, {"w": w, "b": b}, kept, x)["w"].dtype == np.float32


# -- embedding --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 9), st.sampled_from([np.int64, np.uint8, np.int16]))
@example(5000, 3, 64, np.uint8)  # blocks that end within a token's rows, tokens of their own, one column, wide rows
@example(5000, 4999, 64, np.int16)
@example(70000, 2, 1, np.int64)
@example(3, 2, 70000, np.int64)
def test_an_embedding_gives_each_token_its_row_and_adds_up_gradients_whatever_the_tokens(
        count, vocabulary, channels, dtype):
    rng, w = np.random.default_rng(count), normal("fp32", (vocabulary, channels))
    tokens = rng.integers(0, vocabulary, count).astype(dtype)
    y, kept = layers.embedding_forward(context("fp32"), tokens, w)
    assert kept is tokens
    np.testing.assert_array_equal(y, w[tokens])
    dy = rng.integers(-9, 10, (count, channels)).astype(np.float32)
    dw, wanted = np.full_like(w, np.nan), np.zeros_like(w)
    layers.embedding_backward(context("fp32"), tokens, dy, dw)
    np.add.at(wanted, tokens, dy)  # whole numbers: exact in any order
    np.testing.assert_array_equal(dw, wanted)


@pytest.mark.parametrize("name", NARROW)
def test_an_embeddings_duplicates_are_added_in_fp32_and_a_nan_spoils_the_row_of_its_token_only(name):
    tokens, dy = np.zeros((3, 1000), np.int64), np.ones((3, 1000, 2), FLOATS[name])
    tokens[:, 7], dw = 1, np.empty((2, 2), FLOATS[name])
    layers.embedding_backward(context(name), tokens, dy, dw)
    np.testing.assert_array_equal(bits_of(dw), bits_of(rounded(np.array([[2997, 2997], [3, 3]]), name)))
    in_the_format = np.add.accumulate(dy.reshape(-1, 2), axis=0, dtype=dw.dtype)[-1]
    assert (in_the_format < 2997).all(), "sums in 16 bit stall at 2048 or 256"
    dy[0, 7, 1] = np.nan
    layers.embedding_backward(context(name), tokens, dy, dw)
    np.testing.assert_array_equal(np.isnan(dw.astype(np.float32)), [[False, False], [False, True]])


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 9, 65536, 150001])
def test_an_element_is_dropped_by_its_own_word_whatever_it_is_and_wherever_blocks_end(count):
    x = normal("bf16", (count,))
    x[::7], x[3::9] = np.nan, np.inf
    for rate, threshold in ((0.25, 2**30), (0.9, round(0.9 * 2**32))):
        y, kept = layers.dropout_forward(context("bf16"), x, rate, "here")
        through = random.bits((0, "dropout of micro-batch 0", 0, "here"), 0, count) >= threshold
        wanted = rounded(x.astype(np.float32) * np.float32(1 / (1 - rate)), "bf16").astype(np.float32)
        np.testing.assert_array_equal(y.astype(np.float32)[through], wanted[through])
        assert not bits_of(y)[~through].any()
        assert kept == "here", "no mask is saved"
    border = np.empty(3, np.float32)
    kernels.NumpyKernels().drop(np.ones(3, np.float32), lambda span: np.uint32([6, 7, 8])[span], 7, 2.0, border)
    assert border.tolist() == [0, 2, 2]


def test_every_seed_step_micro_batch_and_place_draws_random_words_of_its_own():
    drawn = [(0, 0, 0, "a"), (1, 0, 0, "a"), (0, 1, 0, "a"), (0, 0, 1, "a"), (0, 0, 0, "b")]
    assert len({layers.draw_for(*of, slice(0, 8)).tobytes() for of in drawn}) == len(drawn)


def test_rate_0_is_the_identity_without_a_copy_and_draws_nothing():
    ctx, x = context("fp16"), normal("fp16", (3,))
    ctx = Context(ctx.xp, ctx.policy, ctx.kernels, None, ctx.note, ctx.gradients, draw=None)
    assert layers.dropout_forward(ctx, x, 0.0, "here") == (x, "here")
    assert layers.dropout_backward(ctx, "here", x, 0) is x
