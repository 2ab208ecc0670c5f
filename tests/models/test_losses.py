"""Half the squared error: its value, its gradient, its roundings."""

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, normal, recorded, slope
from zerosim.models import HalfSquaredError
from zerosim.models.losses import half_squared_error_backward, half_squared_error_forward


def test_the_loss_is_the_mean_over_the_batch_of_half_the_squared_distance():
    ctx, loss = context("fp32"), HalfSquaredError()
    y, target = np.array([[1, 2], [3, 4]], np.float32), np.array([[0, 2], [3, 1]], np.float32)
    value, kept = loss.forward(ctx, y, target)
    assert value == (0.5 * 1 + 0.5 * 9) / 2
    np.testing.assert_array_equal(loss.backward(ctx, kept, 1.0), [[0.5, 0], [0, 1.5]])


def test_the_gradient_of_the_loss_is_its_slope():
    ctx, y, target = context("fp64"), normal("fp64", (3, 2), 1), normal("fp64", (3, 2), 2)
    dy = half_squared_error_backward(ctx, half_squared_error_forward(ctx, y, target)[1], 8.0)
    # The loss is quadratic, so central differences are exact but for 1e-16/step.
    np.testing.assert_allclose(dy, 8 * slope(lambda: half_squared_error_forward(ctx, y, target)[0], y), atol=1e-9)


def test_the_target_is_not_rounded_to_the_compute_format():
    ctx, y, target = context("fp16"), np.zeros((1, 1), np.float16), np.full((1, 1), 0.1, np.float32)
    value, kept = half_squared_error_forward(ctx, y, target)
    assert value == float(np.float32(0.5 * float(np.float32(0.1)) ** 2))
    assert value != 0.5 * float(np.float16(0.1)) ** 2
    assert half_squared_error_backward(ctx, kept, 1.0)[0, 0] == np.float16(-0.1)


def test_the_gradient_is_scaled_in_fp32_and_rounded_once():
    # (y - t)·(2/3) in fp16: twice rounded, the difference 2049 becomes 2048 first.
    y, target = np.array([[2050], [0], [0]], np.float16), np.array([[1], [0], [0]], np.float16)
    dy = half_squared_error_backward(context("fp16"), (y, target), 2.0)
    assert dy[0, 0] == np.float16(2049 * 2 / 3) == 1366
    assert np.float16(np.float16(2050 - 1) * 2 / 3) == 1365


def test_a_large_scale_overflows_to_infinity_without_a_warning():
    y, target = np.array([[3.0], [-3.0]], np.float16), np.zeros((2, 1), np.float16)
    dy = half_squared_error_backward(context("fp16"), (y, target), 65536.0)
    np.testing.assert_array_equal(dy, [[np.inf], [-np.inf]])


def test_scaling_by_a_power_of_two_scales_the_gradient_exactly():
    y, target = normal("bf16", (5, 3), 1), normal("bf16", (5, 3), 2)
    plain, scaled = (half_squared_error_backward(context("bf16"), (y, target), scale) for scale in (1.0, 1024.0))
    np.testing.assert_array_equal(bits_of(scaled), bits_of(plain * DTYPES["bf16"].type(1024)))


@pytest.mark.parametrize("batch", [1, 65535, 65536, 65537, 3 * 65536 + 5])
def test_a_batch_of_many_blocks_takes_one_block_of_memory(batch):
    ctx, recorder = recorded("fp16")
    y, target = normal("fp16", (batch, 1), 1), normal("fp16", (batch, 1), 2)
    value, kept = half_squared_error_forward(ctx, y, target)
    difference = y.astype(np.float32) - target.astype(np.float32)
    exact = 0.5 * np.sum(difference.astype(np.float64) ** 2) / batch
    # float64 sums in another order: far inside one rounding to fp32.
    assert abs(value - exact) <= np.spacing(np.float32(exact)) * 0.5001
    assert [(kind, shape) for kind, _, shape, _ in recorder.allocated] == [("workspace", (min(batch, 65536),))]
    assert kept[0] is y, "backward computes the differences anew: they would be the widest thing kept"


def test_a_target_of_another_shape_is_refused_and_not_broadcast():
    with pytest.raises(ValueError, match=r"asked for a target of shape \(4, 1\), and found \(4,\); a target has one "
                                         "value for each output of the model; broadcasting would compare every row"):
        half_squared_error_forward(context("fp16"), np.zeros((4, 1), np.float16), np.zeros(4, np.float32))


def test_an_empty_batch_is_refused():
    empty = np.zeros((0, 2), np.float16)
    with pytest.raises(ValueError, match=r"asked for a batch, and found shape \(0, 2\); a mean needs a row or more"):
        half_squared_error_forward(context("fp16"), empty, empty)


def test_a_target_wider_than_the_arithmetic_is_refused():
    y, target = np.zeros((1, 1), np.float16), np.zeros((1, 1))
    with pytest.raises(ValueError, match="computes in float32, and found a target in float64; round it first, with"):
        half_squared_error_forward(context("fp16"), y, target)


def test_a_loss_beyond_fp32_is_infinite_without_a_warning():
    y, target = np.full((1, 1), 1e30, np.float32), np.zeros((1, 1), np.float32)
    with np.errstate(over="raise"):
        assert half_squared_error_forward(context("fp32"), y, target)[0] == np.inf


def test_an_output_in_another_format_is_refused():
    with pytest.raises(ValueError, match="computes in float16, and found y in float32"):
        half_squared_error_forward(context("fp16"), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))
