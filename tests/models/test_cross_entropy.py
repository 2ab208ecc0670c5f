"""Cross-entropy: its value, its gradient, its two means, places without a target, and what it refuses."""

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, normal, recorded, slope
from zerosim.models import CrossEntropy
from zerosim.models.losses import cross_entropy_backward, cross_entropy_forward

FORMATS = ["fp16", "bf16", "fp32", "fp64"]
TARGET = np.array([[1, 0, -1, 3], [2, -1, 1, 1]])


def step(name: str, logits: np.ndarray, target: np.ndarray, normalization: str = "own",
         scale: float = 1.0) -> tuple[float, np.ndarray]:
    loss, kept = cross_entropy_forward(context(name), logits, target, normalization)
    return loss, cross_entropy_backward(context(name), kept, scale)


def reference(logits: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean over valid targets and its gradient, in float64."""
    rows, classes = logits.astype(np.float64).reshape(-1, logits.shape[-1]), target.reshape(-1)
    p = np.exp(rows - rows.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    valid = np.flatnonzero(classes >= 0)
    gradient = np.zeros_like(p)
    gradient[valid] = p[valid]
    gradient[valid, classes[valid]] -= 1
    return -np.log(p[valid, classes[valid]]).mean(), (gradient / len(valid)).reshape(logits.shape)


@pytest.mark.parametrize("normalization", ["own", "global"])
def test_the_gradient_is_the_slope_of_the_loss(normalization):
    logits = normal("fp64", (2, 4, 5))
    gradient = step("fp64", logits, TARGET, normalization, 8.0)[1]
    wanted = 8 * slope(lambda: step("fp64", logits, TARGET, normalization)[0], logits)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-7, atol=1e-8)  # step², and 1e-16/step times 8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(2, 4, 5), (300, 300), (2, 70000)])
def test_it_is_computed_in_fp32_and_the_gradient_rounded_once(name, shape):
    logits = normal(name, shape)
    target = np.random.default_rng(1).integers(-1, shape[-1], shape[:-1])
    target[..., 0] = 0
    (loss, gradient), (exact, slopes) = step(name, logits, target), reference(logits, target)
    # The log-sum-exp (up to 12) is rounded to fp32, and with it the exponent of every probability.
    assert loss == pytest.approx(exact, rel=4e-7 if name != "fp64" else 1e-14)
    rounding = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 0, "fp64": 0}[name]
    own = 1e-13 if name == "fp64" else 2e-6
    allowed = rounding * abs(slopes) + own / (target >= 0).sum() * 1.0 + (2.0**-25 if name == "fp16" else 0)
    assert gradient.dtype == DTYPES[name]
    assert (abs(gradient.astype(np.float64) - slopes) <= allowed).all()


def test_the_loss_and_the_gradient_do_not_depend_on_the_shape_of_the_batch():
    logits, target = normal("fp16", (2, 4, 5)), TARGET
    whole, flat = step("fp16", logits, target), step("fp16", logits.reshape(8, 5), target.reshape(8))
    assert whole[0] == flat[0]
    np.testing.assert_array_equal(bits_of(whole[1].reshape(8, 5)), bits_of(flat[1]))


@pytest.mark.parametrize("name", FORMATS)
def test_places_without_a_target_count_for_nothing(name):
    logits = normal(name, (8, 5))
    target = TARGET.reshape(8)
    valid = target >= 0
    (loss, gradient), (wanted, slopes) = step(name, logits, target), step(name, logits[valid], target[valid])
    assert loss == wanted
    np.testing.assert_array_equal(bits_of(gradient[valid]), bits_of(slopes))
    logits[~valid] = np.nan
    again, gradient = step(name, logits, target)
    assert again == loss
    assert not bits_of(gradient[~valid]).any()


def test_the_global_mean_divides_by_all_places_and_the_own_one_by_its_tokens():
    logits = normal("fp32", (2, 4, 5))
    (own, own_gradient), (everywhere, gradient) = (step("fp32", logits, TARGET, mean) for mean in ("own", "global"))
    assert everywhere == np.float32(own * 6 / 8)
    np.testing.assert_allclose(gradient, own_gradient * 6 / 8, rtol=2e-7)  # two more roundings of fp32
    assert CrossEntropy("global").is_global
    assert not CrossEntropy().is_global
    assert CrossEntropy().tokens(context("fp32"), TARGET) == CrossEntropy("global").tokens(context("fp32"), TARGET) == 6


def test_without_a_valid_target_the_global_mean_is_0_and_there_is_no_other():
    logits, target = normal("fp16", (2, 3)), np.array([-1, -1])
    loss, gradient = step("fp16", logits, target, "global")
    assert loss == 0
    assert not bits_of(gradient).any()
    with pytest.raises(ValueError, match=r"^cross_entropy_forward asked for the mean over valid targets, and found "
                                         r"none among 2; leave such a batch out, or take normalization='global'$"):
        step("fp16", logits, target)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_at_the_end_of_the_format_overflow_nothing(name):
    largest = 6e4 if name == "fp16" else 3e38
    logits = np.array([[largest, 0, -largest], [-largest, -largest, -largest]]).astype(DTYPES[name])
    loss, gradient = step(name, logits, np.array([0, 1]))
    assert loss == pytest.approx(np.log(3) / 2, rel=1e-6)
    assert np.isfinite(gradient.astype(np.float64)).all()
    np.testing.assert_array_equal(gradient[0].astype(np.float64), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_comes_out(bad):
    logits = normal("fp32", (2, 3))
    logits[1, 2] = bad
    loss, gradient = step("fp32", logits, np.array([0, 1]))
    assert not np.isfinite(loss)
    assert np.isnan(gradient[1]).any()
    assert np.isfinite(gradient[0]).all()


def test_the_scale_multiplies_in_fp32_before_the_one_rounding():
    logits, target = normal("fp16", (4, 3)) * np.float16(12), np.array([0, 1, 2, 0])
    exact = reference(logits, target)[1]
    small = abs(exact) < 2.0**-14
    found = [step("fp16", logits, target, scale=scale)[1].astype(np.float64) / scale for scale in (2.0**15, 1.0)]
    errors = [abs(gradient - exact)[small].max() for gradient in found]
    assert 0 < errors[0] < errors[1] / 2, "what would be subnormal keeps its digits"


def test_logits_may_be_of_another_format_than_the_activations():
    logits = normal("fp32", (4, 3))
    gradient = step("bf16", logits, np.array([0, 1, 2, 0]))[1]
    assert gradient.dtype == np.float32


def test_the_gradient_is_new_memory_and_the_rows_log_sums_are_kept():
    ctx, recorder = recorded("fp16")
    logits = normal("fp16", (2, 4, 5))
    before = logits.copy()
    _, kept = cross_entropy_forward(ctx, logits, TARGET)
    cross_entropy_backward(ctx, kept, 1.0)
    np.testing.assert_array_equal(bits_of(logits), bits_of(before))
    assert recorder.allocated == [("activation", "loss.log_sums", (8,), np.float32),
                                  ("activation_gradient", "loss.dlogits", (2, 4, 5), np.float16)]


@pytest.mark.parametrize(("target", "text"), [
    (np.zeros((2, 3), int), r"asked for a target of shape \(2, 4\), and found \(2, 3\); there is one class for each"),
    (np.zeros((2, 4)), "asked for targets as integers, and found float64; a target is a class"),
    (np.full((2, 4), 5), "asked for classes from 0 to 4, and -1 where there is none, and found 5 to 5; let the logits"),
    (np.full((2, 4), -2), "asked for classes from 0 to 4, and -1 where there is none, and found -2 to -2"),
])
def test_targets_that_are_no_classes_are_refused(target, text):
    with pytest.raises(ValueError, match=f"^cross_entropy_forward {text}"):
        step("fp16", np.zeros((2, 4, 5), np.float16), target)


def test_a_mean_that_there_is_not_is_refused():
    text = " was given normalization='mean'; choose one of 'own', 'global'$"
    with pytest.raises(ValueError, match=f"^CrossEntropy{text}"):
        CrossEntropy("mean")
    with pytest.raises(ValueError, match=f"^cross_entropy_forward{text}"):
        step("fp16", np.zeros((1, 2), np.float16), np.array([0]), "mean")
