"""The fp8 experiment: one scale for each tensor, a power of two, and what is rounded with it."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.models.context import Context
from zerosim.numerics.formats import format_of
from zerosim.numerics.fp8 import quantized, scale_to

FORMATS = ("fp8_e4m3", "fp8_e5m2")


@given(top=st.floats(2.0**-100, 2.0**100), fmt=st.sampled_from(FORMATS))
def test_the_scale_is_the_largest_power_of_two_that_keeps_the_largest_value(top, fmt):
    x, largest = np.array([top, -top / 2], np.float32), format_of(fmt).largest
    scale = scale_to(x, fmt)
    assert np.frexp(scale)[0] == 0.5
    assert float(x[0]) * scale <= largest < float(x[0]) * scale * 2


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_empty_tensors_have_scale_1_and_what_is_not_finite_says_nothing(fmt):
    assert scale_to(np.zeros(3, np.float32), fmt) == scale_to(np.empty(0, np.float32), fmt) == 1
    assert scale_to(np.array([np.inf, 3.0, np.nan], np.float32), fmt) == scale_to(np.array([3.0], np.float32), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_are_those_of_ml_dtypes_at_that_scale(fmt):
    x = np.random.default_rng(0).standard_normal((7, 9)).astype(np.float32) * 1e-4
    scale = np.float32(scale_to(x, fmt))
    expected = (x * scale).astype(format_of(fmt).dtype).astype(np.float32) / scale
    np.testing.assert_array_equal(quantized(x, fmt), expected)


def test_16_bit_tensors_are_welcome_and_left_alone():
    x = np.array([0.3, -1.7], ml_dtypes.bfloat16)
    before = x.copy()
    assert quantized(x, "fp8_e4m3").tolist() == [0.3125, -1.75]
    assert (x == before).all()


def test_infinity_becomes_nan_in_e4m3_which_has_none_and_stays_in_e5m2():
    x = np.array([np.inf, 1.0], np.float32)
    assert np.isnan(quantized(x, "fp8_e4m3")[0])
    assert quantized(x, "fp8_e5m2")[0] == np.inf


def test_a_gradient_is_rounded_to_e5m2_and_the_other_operand_to_e4m3():
    ctx = Context.standalone(zs.Policy("bf16", matmul="fp8"))
    a, b = (np.array([[1.1875]], ml_dtypes.bfloat16) for _ in range(2))  # 1.25 in e5m2, 1.125 or 1.25 in e4m3
    for gradient, expected in ((None, 1.25 * 1.25), ("a", 1.25 * 1.25), ("b", 1.25 * 1.25)):
        out = np.empty((1, 1), np.float32)
        ctx.matmul(a, b, out, gradient=gradient)
        e4m3, e5m2 = (float(quantized(a, fmt)[0, 0]) for fmt in FORMATS)
        operands = {None: (e4m3, e4m3), "a": (e5m2, e4m3), "b": (e4m3, e5m2)}[gradient]
        assert out[0, 0] == operands[0] * operands[1], expected


def test_fp8_products_change_bits_and_still_train():
    model = zs.models.GPT("gpt-nano")
    rng = np.random.default_rng(0)
    batch = [tuple(rng.integers(0, 17, (4, 8)) for _ in range(2))]
    losses = {}
    for matmul in (None, "fp8"):
        policy = zs.Policy("bf16", matmul=matmul)
        losses[matmul] = zs.Cluster(2).run(lambda rank, p=policy: [zs_step(rank, model, p, batch)])[0][0]
    assert losses["fp8"][0] != losses[None][0]
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.5


def zs_step(rank, model, policy, batch):
    engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.01), stage=3, policy=policy)
    return [engine.step(batch).losses[0] for _ in range(25)]
