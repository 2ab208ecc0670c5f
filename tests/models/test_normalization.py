"""LayerNorm: its gradients, its statistics, where it rounds, and its output computed again."""

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, normal, recorded, slope
from zerosim.models import layers

NEAR = {"rtol": 1e-7, "atol": 1e-9}  # central differences: step², and 1e-16/step
FORMATS = ["fp16", "bf16", "fp32", "fp64"]


def arguments(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w, b."""
    return normal(name, shape, 1), normal(name, shape[-1:], 2), normal(name, shape[-1:], 3)


def gradients(name: str, w: np.ndarray, kept: tuple, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx, dw, db."""
    dw, db = np.empty_like(w), np.empty_like(w)
    return layers.layernorm_backward(context(name), w, kept, dy, dw, db), dw, db


def test_layernorm_backward_is_the_slope_of_layernorm_forward():
    ctx, (x, w, b) = context("fp64"), arguments("fp64", (2, 3, 5))
    c = normal("fp64", x.shape, 4)

    def weighted() -> float:
        return float(np.sum(layers.layernorm_forward(ctx, x, w, b)[0] * c))

    kept = layers.layernorm_forward(ctx, x, w, b)[1]
    for found, parameter in zip(gradients("fp64", w, kept, c), (x, w, b), strict=True):
        np.testing.assert_allclose(found, slope(weighted, parameter), **NEAR)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_layernorm_computes_in_fp32_and_rounds_once(name):
    x, w, b = arguments(name, (300, 64))
    y, kept = layers.layernorm_forward(context(name), x, w, b)
    dy = normal(name, x.shape, 4)
    found = {"y": y, "dx": None, "dw": None, "db": None}
    found["dx"], found["dw"], found["db"] = gradients(name, w, kept, dy)
    wx, ww, wb, wdy = (a.astype(np.float64) for a in (x, w, b, dy))
    rstd = 1 / np.sqrt(wx.var(1, keepdims=True) + 1e-5)
    normed = (wx - wx.mean(1, keepdims=True)) * rstd
    g = wdy * ww
    exact = {"y": normed * ww + wb, "dw": (wdy * normed).sum(0), "db": wdy.sum(0),
             "dx": (g - g.mean(1, keepdims=True) - normed * (g * normed).mean(1, keepdims=True)) * rstd}
    for what, values in exact.items():
        # Half a spacing of the format, and a few dozen of float32's roundings of terms of order 1 to 10.
        allowed = 2.0 ** (-11 if name == "fp16" else -8) * abs(values) + 2.0**-25 + 300 * 2.0**-24
        assert (abs(found[what].astype(np.float64) - values) <= allowed).all(), what
        rounded = values.astype(np.float32).astype(DTYPES[name])
        assert (bits_of(found[what]) != bits_of(rounded)).mean() < 0.02, what


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 4, 33), (700, 260), (2, 70000)])
def test_the_output_computed_again_has_the_bits_that_it_had(name, shape):
    x, w, b = arguments(name, shape)
    ctx = context(name)
    y, kept = layers.layernorm_forward(ctx, x, w, b)
    layers.layernorm_forward(ctx, normal(name, (9, 4), 7), *arguments(name, (9, 4))[1:])  # scratch is used in between
    np.testing.assert_array_equal(bits_of(layers.layernorm_output(ctx, w, b, kept)), bits_of(y))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [3, 300, 20000])
def test_a_row_has_the_same_bits_wherever_it_stands(name, channels):
    x, w, b = arguments(name, (9, channels))
    dy = normal(name, x.shape, 4)
    y, kept = layers.layernorm_forward(context(name), x, w, b)
    dx = gradients(name, w, kept, dy)[0]
    for here in (slice(0, 1), slice(4, 6), slice(8, 9)):
        alone, kept = layers.layernorm_forward(context(name), x[here].copy(), w, b)
        np.testing.assert_array_equal(bits_of(alone), bits_of(y[here]))
        np.testing.assert_array_equal(bits_of(gradients(name, w, kept, dy[here].copy())[0]), bits_of(dx[here]))


def test_the_input_and_two_fp32_numbers_per_row_are_kept():
    ctx, recorder = recorded("fp16")
    x, w, b = arguments("fp16", (2, 3, 5))
    _, kept = layers.layernorm_forward(ctx, x, w, b)
    assert kept[0] is x
    assert [(array.shape, array.dtype) for array in kept[1:]] == [((6,), np.float32)] * 2
    assert [name for _, name, _, _ in recorder.allocated] == ["layernorm.y", "layernorm.mean", "layernorm.rstd"]
    assert recorder.flops == 8 * x.size


def test_the_variance_is_that_of_the_deviations_not_a_difference_of_squares():
    x = (1e4 + normal("fp32", (4, 256))).astype(np.float32)
    y, _ = layers.layernorm_forward(context("fp32"), x, np.ones(256, np.float32), np.zeros(256, np.float32))
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    # The mean is one of float32, off by up to 1e4·2⁻²⁴ = 6e-4, which shifts a row.
    np.testing.assert_allclose(y, exact, atol=2e-3)
    squares = (x * x).mean(1) - x.mean(1) ** 2
    assert (abs(squares - wide.var(1)) > 0.1).any(), "the difference of squares is off by more than a tenth"


def test_a_row_of_equal_values_becomes_the_bias():
    x, w, b = np.full((2, 3), 7, np.float32), normal("fp32", (3,), 1), normal("fp32", (3,), 2)
    y, kept = layers.layernorm_forward(context("fp32"), x, w, b, epsilon=0.25)
    np.testing.assert_array_equal(y, [b, b])
    np.testing.assert_array_equal(kept[2], [2, 2])  # 1/√(0 + 0.25)


def test_weights_may_be_kept_in_fp32_beside_16_bit_activations():
    x, w, b = normal("bf16", (4, 8)), normal("fp32", (8,), 1), normal("fp32", (8,), 2)
    y, kept = layers.layernorm_forward(context("bf16"), x, w, b)
    low, _ = layers.layernorm_forward(context("bf16"), x, *(a.astype(DTYPES["bf16"]) for a in (w, b)))
    assert y.dtype == DTYPES["bf16"]
    assert (bits_of(y) != bits_of(low)).any()
    assert gradients("bf16", w, kept, x)[1].dtype == np.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_row_and_the_weights_gradients(bad):
    x, w, b = arguments("bf16", (3, 5))
    clean, _ = layers.layernorm_forward(context("bf16"), x, w, b)
    x[1, 2] = bad
    y, kept = layers.layernorm_forward(context("bf16"), x, w, b)
    assert np.isnan(y[1].astype(np.float32)).all()
    np.testing.assert_array_equal(bits_of(y[[0, 2]]), bits_of(clean[[0, 2]]))
    dx, dw, db = (g.astype(np.float32) for g in gradients("bf16", w, kept, clean))
    assert np.isnan(dx[1]).all()
    assert np.isfinite(dx[[0, 2]]).all()
    assert np.isnan(dw).all()
    assert np.isfinite(db).all()


def test_out_is_written_and_returned():
    ctx, (x, w, b) = context("bf16"), arguments("bf16", (2, 3, 4))
    out = np.empty_like(x)
    assert layers.layernorm_forward(ctx, x, w, b, out=out)[0] is out
    np.testing.assert_array_equal(bits_of(out), bits_of(layers.layernorm_forward(ctx, x, w, b)[0]))


@pytest.mark.parametrize(("changed", "text"), [
    ({"w": np.zeros(3, np.float16)}, r"asked for w of shape \(4,\), and found \(3,\); w has one element per channel"),
    ({"b": np.zeros((1, 4), np.float16)}, r"asked for b of shape \(4,\), and found \(1, 4\); b has one element per"),
    ({"x": np.zeros((2, 4))}, "computes in float16, and found x in float64"),
    ({"epsilon": -1}, "was given epsilon=-1; it is added to a variance, so take 0 or a small positive number"),
    ({"epsilon": "1e-5"}, "was given epsilon='1e-5'"),
    ({"out": np.zeros((3, 4), np.float16)}, r"asked for out of shape \(2, 4\), and found \(3, 4\)"),
])
def test_layernorm_refuses_what_does_not_fit(changed, text):
    given = {"x": np.zeros((2, 4), np.float16), "w": np.zeros(4, np.float16), "b": np.zeros(4, np.float16)} | changed
    with pytest.raises(ValueError, match=f"^layernorm_forward {text}"):
        layers.layernorm_forward(context("fp16"), **given)


def test_layernorm_refuses_an_out_whose_rows_have_no_single_stride():
    x, w, b = arguments("fp16", (2, 3, 4))
    out = np.empty((3, 2, 4), np.float16).transpose(1, 0, 2)
    with pytest.raises(ValueError, match=r"for an out whose rows can be numbered, and found strides \(8, 16, 2\)"):
        layers.layernorm_forward(context("fp16"), x, w, b, out=out)


def test_layernorm_backward_refuses_a_gradient_of_another_shape():
    x, w, b = arguments("fp16", (2, 4))
    _, kept = layers.layernorm_forward(context("fp16"), x, w, b)
    with pytest.raises(ValueError, match=r"^layernorm_backward asked for dy of shape \(2, 4\), and found \(4, 2\)"):
        gradients("fp16", w, kept, x.reshape(4, 2))
