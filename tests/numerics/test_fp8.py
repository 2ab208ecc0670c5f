"""The fp8 experiment: one scale for each tensor, a power of two, and what is rounded with it."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.numerics import oracle
from zerosim.numerics import kernels

quantized = kernels.NumpyKernels().quantized
FORMATS = ("fp8_e4m3", "fp8_e5m2")


def scale_to(x: np.ndarray, fmt: str) -> float:
    return kernels.scale_to(kernels.NumpyKernels().largest_finite(x), zs.FORMATS[fmt])


@given(top=st.floats(2.0**-149, 2.0**127, width=32), fmt=st.sampled_from(FORMATS))
def test_the_scale_is_the_largest_power_of_two_that_keeps_the_largest_value_and_has_a_normal_inverse(top, fmt):
    x, largest = np.array([top, -top / 2], np.float32), zs.FORMATS[fmt].largest
    scale = scale_to(x, fmt)
    assert np.frexp(scale)[0] == 0.5
    assert 2.0**-126 <= scale <= 2.0**126
    assert top * scale <= largest
    assert top * scale * 2 > largest or scale == 2.0**126


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_empty_tensors_have_scale_1_and_what_is_not_finite_says_nothing(fmt):
    assert scale_to(np.zeros(3, np.float32), fmt) == scale_to(np.empty(0, np.float32), fmt) == 1
    assert scale_to(np.array([np.inf, 3.0, np.nan], np.float32), fmt) == scale_to(np.array([3.0], np.float32), fmt)


@given(values=st.lists(st.floats(width=32), max_size=8), fmt=st.sampled_from(FORMATS))
def test_every_value_is_rounded_once_to_the_formats_number_times_a_power_of_two(values, fmt):
    x, row = np.array(values, np.float32), next(row for row in oracle.ROWS if row.name == fmt)
    scale = scale_to(x, fmt)
    expected = [oracle.rounded(float(value) * scale, row, "nearest") / scale for value in x]
    assert oracle.same(quantized(x, fmt), oracle.cast(np.array(expected, np.float64), np.float32))


def test_a_users_errstate_changes_nothing_and_16_bit_tensors_are_welcome_and_left_alone():
    x = np.array([np.inf, -np.inf, np.nan, 1e-45, 3e38], np.float32)
    for fmt in FORMATS:
        with np.errstate(all="raise"):
            found = quantized(x, fmt)
        np.testing.assert_array_equal(found, quantized(x, fmt))
        np.testing.assert_array_equal(np.isinf(found[:2]), fmt == "fp8_e5m2")
    x = np.array([0.3, -1.7], ml_dtypes.bfloat16)
    assert quantized(x, "fp8_e4m3").tolist() == [0.3125, -1.75]
    assert (x == np.array([0.3, -1.7], ml_dtypes.bfloat16)).all()


def test_fp8_products_change_bits_and_still_train():
    model, rng = zs.models.GPT("gpt-nano"), np.random.default_rng(0)
    batch = [tuple(rng.integers(0, 17, (4, 8)) for _ in range(2))]

    def losses(rank, matmul):
        engine = zs.Engine(rank, model, zs.optim.Adam(lr=0.02), policy=zs.Policy("bf16", matmul=matmul))
        return [engine.step(batch).losses[0] for _ in range(12)]

    plain, found = (zs.Cluster(1).run(losses, matmul)[0] for matmul in (None, "fp8"))
    assert found[0] != plain[0]
    assert found[-1] < found[0] - 0.5
