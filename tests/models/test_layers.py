"""Layers: their gradients, where they round, what they keep, what they refuse."""

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, normal, recorded, slope
from zerosim.models import layers

SIXTEEN_BITS = ["fp16", "bf16"]
# Central differences of step 1e-5 in float64 err by step² times a third derivative of order 1, and by
# 1e-16/step.
NEAR = {"rtol": 1e-7, "atol": 1e-9}


def test_linear_backward_is_the_slope_of_linear_forward():
    ctx = context("fp64")
    x, w, b, c = (normal("fp64", shape, seed) for seed, shape in enumerate([(3, 4), (4, 5), (5,), (3, 5)]))

    def weighted() -> float:
        return float(np.sum(layers.linear_forward(ctx, x, w, b)[0] * c))

    dw, db = np.empty_like(w), np.empty_like(b)
    dx = layers.linear_backward(ctx, w, layers.linear_forward(ctx, x, w, b)[1], c, dw, db)
    np.testing.assert_allclose(dx, slope(weighted, x), **NEAR)
    np.testing.assert_allclose(dw, slope(weighted, w), **NEAR)
    np.testing.assert_allclose(db, slope(weighted, b), **NEAR)


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_backward_of_an_activation_is_the_slope_of_its_forward(name):
    forward, backward = getattr(layers, f"{name}_forward"), getattr(layers, f"{name}_backward")
    ctx = context("fp64")
    x, c = np.linspace(-4, 4, 23)[:, None] + 0.01, normal("fp64", (23, 1))
    dx = backward(ctx, forward(ctx, x)[1], c)
    np.testing.assert_allclose(dx, slope(lambda: float(np.sum(forward(ctx, x)[0] * c)), x), **NEAR)


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_linear_adds_in_fp32_and_rounds_once(name):
    # Products and partial sums are whole numbers below 2^24, exact in fp32 in any order: the oracle needs no
    # BLAS.
    rng = np.random.default_rng(0)
    x, w, b = (rng.integers(-60, 61, shape).astype(DTYPES[name]) for shape in [(8, 64), (64, 16), (16,)])
    exact = x.astype(np.int64) @ w.astype(np.int64) + b.astype(np.int64)
    y, _ = layers.linear_forward(context(name), x, w, b)
    np.testing.assert_array_equal(bits_of(y), bits_of(exact.astype(np.float32).astype(DTYPES[name])))

    every_product_rounded = np.zeros_like(y)
    for i in range(64):
        every_product_rounded = every_product_rounded + x[:, i:i + 1] * w[i]
    assert (bits_of(every_product_rounded + b) != bits_of(y)).mean() > 0.1


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_linear_backward_adds_in_fp32_and_rounds_once(name):
    rng = np.random.default_rng(1)
    x, w, dy = (rng.integers(-60, 61, shape).astype(DTYPES[name]) for shape in [(64, 8), (8, 16), (64, 16)])
    dw, db = np.empty_like(w), np.empty(16, DTYPES[name])
    dx = layers.linear_backward(context(name), w, x, dy, dw, db)
    wx, ww, wdy = (a.astype(np.int64) for a in (x, w, dy))
    for found, exact in [(dx, wdy @ ww.T), (dw, wx.T @ wdy), (db, wdy.sum(0))]:
        np.testing.assert_array_equal(bits_of(found), bits_of(exact.astype(np.float32).astype(DTYPES[name])))


def test_the_bias_is_added_before_the_rounding():
    x, w, b = np.array([[2048, 1]], np.float16), np.ones((2, 1), np.float16), np.ones(1, np.float16)
    y, _ = layers.linear_forward(context("fp16"), x, w, b)
    assert y[0, 0] == 2050
    assert np.float16(2048 + 1) + b[0] == 2048, "rounded before the bias, and again after it"


@pytest.mark.parametrize("name", [*SIXTEEN_BITS, "fp8_e4m3", "fp8_e5m2"])
def test_relu_treats_every_code_alike_wherever_it_stands(name):
    bits = 8 * DTYPES[name].itemsize
    x = np.arange(2**bits, dtype=f"u{bits // 8}").view(DTYPES[name])
    for shift in (0, 1, 5):
        rolled = np.roll(x, shift)
        y, kept = layers.relu_forward(context(name), rolled)
        wide = rolled.astype(np.float32)
        through = ~(wide <= 0)
        np.testing.assert_array_equal(bits_of(y[wide > 0]), bits_of(rolled[wide > 0]))
        assert np.isnan(y[np.isnan(wide)].astype(np.float32)).all()
        assert not bits_of(y[~through]).any(), "-0 and all below become +0"
        dy = normal(name, x.shape)
        dx = layers.relu_backward(context(name), kept, dy)
        np.testing.assert_array_equal(bits_of(dx), np.where(through, bits_of(dy), 0))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 17, 65536, 65536 + 3, 2 * 65536 + 9])
def test_relu_keeps_one_bit_per_element(count):
    ctx, recorder = recorded("fp16")
    x = normal("fp16", (count,))
    _, kept = layers.relu_forward(ctx, x)
    assert kept.nbytes == -(-count // 8)
    np.testing.assert_array_equal(np.unpackbits(kept)[:count], x > 0)
    assert [(kind, name) for kind, name, _, _ in recorder.allocated] == [
        ("activation", "relu.y"), ("activation", "relu.bits")]


def test_relu_in_place_gives_the_same_bits():
    ctx, x = context("bf16"), normal("bf16", (5, 7))
    y, kept = layers.relu_forward(ctx, x.copy())
    again, kept_again = layers.relu_forward(ctx, x, out=x)
    assert again is x
    np.testing.assert_array_equal(bits_of(y), bits_of(again))
    np.testing.assert_array_equal(kept, kept_again)


def test_relu_does_not_multiply_a_nan_by_zero():
    ctx = context("fp32")
    _, kept = layers.relu_forward(ctx, np.array([-1, 1], np.float32))
    dx = layers.relu_backward(ctx, kept, np.array([np.nan, np.nan], np.float32))
    assert dx[0] == 0
    assert np.isnan(dx[1])


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_gelu_rounds_an_fp32_value_once(name):
    x = np.linspace(-6, 6, 4001).astype(np.float32).astype(DTYPES[name])
    wide = x.astype(np.float64)
    exact = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    y, _ = layers.gelu_forward(context(name), x)
    # Half a spacing of the format, subnormals too, for the rounding; a few fp32 roundings of 1 + tanh for the rest.
    allowed = 2.0 ** (-11 if name == "fp16" else -8) * np.abs(exact) + 2.0**-25 + 4e-7 * np.abs(wide)
    assert (np.abs(y.astype(np.float64) - exact) <= allowed).all()

    number = DTYPES[name].type
    rounded_at_every_step = number(0.5) * x * (1 + np.tanh(number(0.7979) * (x + number(0.044715) * x * x * x)))
    assert (np.abs(rounded_at_every_step.astype(np.float64) - exact) > allowed).mean() > 0.1


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "fp64"])
def test_gelu_has_its_limits_at_the_ends_of_every_format(name):
    ctx = context(name)
    largest = 60000 if name == "fp16" else 1e38
    x = np.array([-np.inf, -largest, -20, 20, largest, np.inf, np.nan]).astype(DTYPES[name])
    y, kept = layers.gelu_forward(ctx, x)
    np.testing.assert_array_equal(y.astype(np.float64), np.maximum(x.astype(np.float64), 0))
    dx = layers.gelu_backward(ctx, kept, np.ones(7, DTYPES[name]))
    np.testing.assert_array_equal(dx.astype(np.float64), [0, 0, 0, 1, 1, 1, np.nan])


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_elementwise_layers_give_an_element_the_same_bits_wherever_it_stands(name):
    ctx, x, dy = context(name), normal(name, (70001,), 1), normal(name, (70001,), 2)
    whole, kept = layers.gelu_forward(ctx, x)
    whole_dx = layers.gelu_backward(ctx, kept, dy)
    for here in (slice(0, 1), slice(3, 11), slice(65530, 65541), slice(1, None)):
        y, kept = layers.gelu_forward(ctx, x[here].copy())
        np.testing.assert_array_equal(bits_of(y), bits_of(whole[here]))
        np.testing.assert_array_equal(bits_of(layers.gelu_backward(ctx, kept, dy[here].copy())),
                                      bits_of(whole_dx[here]))


def test_linear_notes_its_arithmetic_and_charges_what_it_returns():
    ctx, recorder = recorded("fp16")
    x, w, b, dy = (normal("fp16", shape) for shape in [(3, 4), (4, 5), (5,), (3, 5)])
    layers.linear_forward(ctx, x, w, b)
    assert (recorder.flops, recorder.nbytes) == (2 * 3 * 4 * 5 + 3 * 5, 2 * (12 + 20 + 5 + 15))
    layers.linear_backward(ctx, w, x, dy, np.empty_like(w), np.empty_like(b))
    assert recorder.flops == 3 * (2 * 3 * 4 * 5) + 2 * (3 * 5)
    half = np.dtype(np.float16)
    assert recorder.allocated == [("activation", "linear.y", (3, 5), half),
                                  ("activation_gradient", "linear.dx", (3, 4), half)]


def test_the_input_gradient_is_not_computed_where_nobody_reads_it():
    ctx, recorder = recorded("fp16")
    x, w, dy = normal("fp16", (3, 4)), normal("fp16", (4, 5)), normal("fp16", (3, 5))
    assert layers.linear_backward(ctx, w, x, dy, np.empty_like(w), input_gradient=False) is None
    assert recorder.allocated == []
    assert recorder.flops == 2 * 3 * 4 * 5


def test_out_is_written_and_returned():
    ctx, x, w = context("bf16"), normal("bf16", (3, 4)), normal("bf16", (4, 5))
    out = np.empty((3, 5), DTYPES["bf16"])
    assert layers.linear_forward(ctx, x, w, out=out)[0] is out
    np.testing.assert_array_equal(bits_of(out), bits_of(layers.linear_forward(ctx, x, w)[0]))
    assert layers.gelu_forward(ctx, x, out=(spare := np.empty_like(x)))[0] is spare


@pytest.mark.parametrize(("shapes", "text"), [
    (((4,), (4, 5), (5,)), r"asked for x of shape \(B, I\), and found \(4,\); reshape it to two dimensions"),
    (((3, 4), (4,), (5,)), r"asked for w of shape \(I, O\), and found \(4,\)"),
    (((3, 4), (5, 4), (4,)), r"asked for w of shape \(4, 4\), and found \(5, 4\); w needs a row for each column"),
    (((3, 4), (4, 5), (4,)), r"asked for b of shape \(5,\), and found \(4,\); a bias has one element per column"),
])
def test_linear_forward_refuses_shapes_that_do_not_fit(shapes, text):
    x, w, b = (np.zeros(shape, np.float16) for shape in shapes)
    with pytest.raises(ValueError, match=f"^linear_forward {text}"):
        layers.linear_forward(context("fp16"), x, w, b)


def test_linear_forward_refuses_an_out_of_another_shape():
    x, w, out = (np.zeros(shape, np.float16) for shape in [(3, 4), (4, 5), (5, 3)])
    with pytest.raises(ValueError, match=r"asked for out of shape \(3, 5\), and found \(5, 3\); give it the shape of"):
        layers.linear_forward(context("fp16"), x, w, out=out)


def test_an_out_that_would_overwrite_what_is_kept_is_refused():
    ctx, x, w = context("fp16"), normal("fp16", (4, 4)), normal("fp16", (4, 4))
    for call in (lambda: layers.linear_forward(ctx, x, w, out=x), lambda: layers.gelu_forward(ctx, x, out=x[:])):
        with pytest.raises(ValueError, match="found one that shares memory with x, which it saves for backward"):
            call()


@pytest.mark.parametrize(("what", "shape", "text"), [
    ("dy", (3, 4), r"asked for dy of shape \(3, 5\), and found \(3, 4\); hand it the gradient of this layer's own"),
    ("dw", (5, 4), r"asked for dw of shape \(4, 5\), and found \(5, 4\); the gradient has the shape of the weight"),
    ("db", (4,), r"asked for db of shape \(5,\), and found \(4,\); the gradient has the shape of the bias"),
])
def test_linear_backward_refuses_shapes_that_do_not_fit(what, shape, text):
    arrays = {"dy": np.zeros((3, 5), np.float16), "dw": np.zeros((4, 5), np.float16), "db": np.zeros(5, np.float16)}
    arrays[what] = np.zeros(shape, np.float16)
    with pytest.raises(ValueError, match=f"^linear_backward {text}"):
        layers.linear_backward(context("fp16"), np.zeros((4, 5), np.float16), np.zeros((3, 4), np.float16), **arrays)


def test_activations_refuse_a_gradient_of_another_length():
    ctx, x = context("fp16"), np.zeros((2, 8), np.float16)
    with pytest.raises(ValueError, match=r"asked for dy with one element per bit that was saved \(2 bytes of them\), "
                                         r"and found shape \(3, 8\); hand it the gradient of this layer's own"):
        layers.relu_backward(ctx, layers.relu_forward(ctx, x)[1], np.zeros((3, 8), np.float16))
    with pytest.raises(ValueError, match=r"^gelu_backward asked for dy of shape \(2, 8\), and found \(3, 8\)"):
        layers.gelu_backward(ctx, x, np.zeros((3, 8), np.float16))


def test_layers_refuse_to_compute_with_values_wider_than_the_policy_says():
    ctx, half, wide = context("fp16"), np.zeros((2, 2), np.float16), np.zeros((2, 2), np.float32)
    text = r" computes in float16, and found {} in float32; round it first, with ctx\.cast\({}\)$"
    for what, call in {
        "x": lambda: layers.linear_forward(ctx, wide, half),
        "w": lambda: layers.linear_forward(ctx, half, wide),
        "dy": lambda: layers.linear_backward(ctx, half, half, wide, half.copy()),
        "out": lambda: layers.relu_forward(ctx, half, out=wide),
    }.items():
        with pytest.raises(ValueError, match=text.format(what, what)):
            call()
