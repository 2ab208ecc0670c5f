"""Losses: their values, gradients and roundings; means over a batch, over valid targets, over all places."""

import numpy as np
import pytest

from tests.models.contexts import bits_of, context, normal, recorded
from tests.ranks.data import FLOATS
from zerosim.models import CrossEntropy, HalfSquaredError

FORMATS = ["fp16", "bf16", "fp32", "fp64"]
TARGET = np.array([[1, 0, -1, 3], [2, -1, 1, 1]])
BATCHES = {
    "half squared error": (HalfSquaredError(), (3, 2), normal("fp64", (3, 2), 2)),
    "own": (CrossEntropy(), (2, 4, 5), TARGET), "global": (CrossEntropy("global"), (2, 4, 5), TARGET)}


def step(name, loss, y, target, scale=1.0, ctx=None):
    """The loss and S times its gradient."""
    ctx = ctx or context(name)
    value, saved = loss.forward(ctx, y, target)
    return value, loss.backward(ctx, saved, scale)


@pytest.mark.parametrize("name", BATCHES)
def test_the_gradient_is_new_memory_and_a_power_of_two_scales_it_exactly(name):
    loss, shape, target = BATCHES[name]
    y = normal("bf16", shape)
    before = y.copy()
    target = target if name != "half squared error" else target.astype(np.float32)
    plain, scaled = (step("bf16", loss, y, target, scale)[1] for scale in (1.0, 1024.0))
    np.testing.assert_array_equal(bits_of(scaled), bits_of(plain * FLOATS["bf16"].type(1024)))
    np.testing.assert_array_equal(bits_of(y), bits_of(before))
    assert not np.shares_memory(plain, y)


# -- half the squared error -------------------------------------------------------------------------------------------

HALF = HalfSquaredError()


def test_the_target_is_not_rounded_and_the_gradient_is_scaled_in_fp32_and_rounded_once():
    y, target = np.zeros((1, 1), np.float16), np.full((1, 1), 0.1, np.float32)
    value, gradient = step("fp16", HALF, y, target)
    assert value == float(np.float32(0.5 * float(np.float32(0.1)) ** 2)) != 0.5 * float(np.float16(0.1)) ** 2
    assert gradient[0, 0] == np.float16(-0.1)
    # (y - t)·(2/3) in fp16: twice rounded, the difference 2049 becomes 2048 first.
    y, target = np.array([[2050], [0], [0]], np.float16), np.array([[1], [0], [0]], np.float16)
    assert step("fp16", HALF, y, target, 2.0)[1][0, 0] == np.float16(2049 * 2 / 3) == 1366
    assert np.float16(np.float16(2050 - 1) * 2 / 3) == 1365


@pytest.mark.parametrize("batch", [1, 65535, 65536, 65537, 3 * 65536 + 5])
def test_a_batch_of_many_blocks_takes_one_block_of_memory(batch):
    ctx, recorder = recorded("fp16")
    y, target = normal("fp16", (batch, 1), 1), normal("fp16", (batch, 1), 2)
    value, kept = HALF.forward(ctx, y, target)
    difference = y.astype(np.float32) - target.astype(np.float32)
    exact = 0.5 * np.sum(difference.astype(np.float64) ** 2) / batch
    # float64 sums in another order: far inside one rounding to fp32.
    assert abs(value - exact) <= np.spacing(np.float32(exact)) * 0.5001
    assert [(kind, shape) for kind, _, shape, _ in recorder.allocated] == [("workspace", (min(batch, 65536),))]
    assert kept[0] is y, "backward computes the differences anew: they would be the widest thing kept"


def test_values_and_gradients_beyond_the_format_are_infinite_without_a_warning():
    with np.errstate(over="raise"):
        far = np.full((1, 1), 1e30, np.float32)
        assert step("fp32", HALF, far, np.zeros((1, 1), np.float32))[0] == np.inf
        y, target = np.array([[3.0], [-3.0]], np.float16), np.zeros((2, 1), np.float16)
        np.testing.assert_array_equal(step("fp16", HALF, y, target, 65536.0)[1], [[np.inf], [-np.inf]])


# -- cross-entropy ----------------------------------------------------------------------------------------------------

OWN, GLOBAL = CrossEntropy(), CrossEntropy("global")


def reference(logits, target):
    """The mean over valid targets and its gradient, in float64."""
    rows, classes = logits.astype(np.float64).reshape(-1, logits.shape[-1]), target.reshape(-1)
    p = np.exp(rows - rows.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    valid = np.flatnonzero(classes >= 0)
    gradient = np.zeros_like(p)
    gradient[valid] = p[valid]
    gradient[valid, classes[valid]] -= 1
    return -np.log(p[valid, classes[valid]]).mean(), (gradient / len(valid)).reshape(logits.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(2, 4, 5), (300, 300), (2, 70000)])
def test_cross_entropy_is_computed_in_fp32_and_its_gradient_rounded_once(name, shape):
    logits = normal(name, shape)
    target = np.random.default_rng(1).integers(-1, shape[-1], shape[:-1])
    target[..., 0] = 0
    (loss, gradient), (exact, slopes) = step(name, OWN, logits, target), reference(logits, target)
    # The log-sum-exp (up to 12) is rounded to fp32, and with it the exponent of every probability.
    assert loss == pytest.approx(exact, rel=4e-7 if name != "fp64" else 1e-14)
    rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 0, "fp64": 0}[name]
    own = 1e-13 if name == "fp64" else 2e-6
    allowed = rounding * abs(slopes) + own / (target >= 0).sum() + (2.0**-25 if name == "fp16" else 0)
    assert gradient.dtype == FLOATS[name]
    assert (abs(gradient.astype(np.float64) - slopes) <= allowed).all()
    flat = step(name, OWN, logits.reshape(-1, shape[-1]), target.reshape(-1))
    assert loss == flat[0]
    np.testing.assert_array_equal(bits_of(gradient.reshape(-1, shape[-1])), bits_of(flat[1]))


@pytest.mark.parametrize("name", FORMATS)
def test_places_without_a_target_count_for_nothing(name):
    logits, target = normal(name, (8, 5)), TARGET.reshape(8)
    valid = target >= 0
    (loss, gradient), (wanted, slopes) = (step(name, OWN, logits[of], target[of]) for of in (slice(None), valid))
    assert loss == wanted
    np.testing.assert_array_equal(bits_of(gradient[valid]), bits_of(slopes))
    logits[~valid] = np.nan
    again, gradient = step(name, OWN, logits, target)
    assert again == loss
    assert not bits_of(gradient[~valid]).any()


def test_the_global_mean_divides_by_all_places_and_the_own_one_by_its_tokens():
    logits, none = normal("fp32", (2, 4, 5)), np.full((2, 4), -1)
    (own, own_gradient), (everywhere, gradient) = (step("fp32", loss, logits, TARGET) for loss in (OWN, GLOBAL))
    assert everywhere == np.float32(own * 6 / 8)
    np.testing.assert_allclose(gradient, own_gradient * 6 / 8, rtol=2e-7)  # two more roundings of fp32
    assert [loss.is_global for loss in (OWN, GLOBAL, HALF)] == [False, True, False]
    assert [loss.tokens(context("fp32"), TARGET) for loss in (OWN, GLOBAL, HALF)] == [6, 6, 8]
    loss, gradient = step("fp32", GLOBAL, logits, none)
    assert loss == 0, "the mean over no tokens"
    assert not bits_of(gradient).any()


@pytest.mark.parametrize("name", FORMATS)
def test_logits_at_the_end_of_the_format_overflow_nothing(name):
    largest = 6e4 if name == "fp16" else 3e38
    logits = np.array([[largest, 0, -largest], [-largest, -largest, -largest]]).astype(FLOATS[name])
    with np.errstate(all="raise"):
        loss, gradient = step(name, OWN, logits, np.array([0, 1]), 1e38)
    assert not np.isfinite(gradient[1].astype(np.float64)).all() or name != "fp16"
    loss, gradient = step(name, OWN, logits, np.array([0, 1]))
    assert loss == pytest.approx(np.log(3) / 2, rel=1e-6)
    assert np.isfinite(gradient.astype(np.float64)).all()
    np.testing.assert_array_equal(gradient[0].astype(np.float64), 0)


def test_the_scale_multiplies_in_fp32_before_the_one_rounding():
    logits, target = normal("fp16", (4, 3)) * np.float16(12), np.array([0, 1, 2, 0])
    exact = reference(logits, target)[1]
    small = abs(exact) < 2.0**-14
    found = [step("fp16", OWN, logits, target, scale)[1].astype(np.float64) / scale for scale in (2.0**15, 1.0)]
    errors = [abs(gradient - exact)[small].max() for gradient in found]
    assert 0 < errors[0] < errors[1] / 2, "what would be subnormal keeps its digits"


def test_logits_may_be_of_another_format_and_the_rows_log_sums_are_kept():
    ctx, recorder = recorded("bf16")
    gradient = step("bf16", OWN, normal("fp32", (2, 4, 5)), TARGET, ctx=ctx)[1]
    assert gradient.dtype == np.float32
    assert recorder.allocated == [("activation", "loss.log_sums", (8,), np.float32),
                                  ("activation_gradient", "loss.dlogits", (2, 4, 5), np.float32)]
