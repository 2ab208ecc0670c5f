"""What is often said about low precision, and is not so."""

import ml_dtypes
import numpy as np
import pytest

from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to, spacing

bf16 = ml_dtypes.bfloat16


def test_numbers_below_fp16s_smallest_normal_do_not_flush_to_zero() -> None:
    assert round_to(6e-8, "fp16") == 2.0**-24
    assert round_to(3e-8, "fp16") == 2.0**-24  # it even goes up
    assert round_to(2.0**-25, "fp16") == 0
    assert round_to(np.nextafter(2.0**-25, 1), "fp16") == 2.0**-24


def test_fp32_does_not_keep_every_small_update() -> None:
    def kept(w: float, update: float) -> bool:
        return bool(round_to(w + update, "fp32") != w)

    assert not kept(1.0, 1e-8)
    assert not kept(0.5, 1e-8)
    assert not kept(0.25, 1e-8)
    assert kept(0.25, -1e-8)  # the gap below a power of two is half the gap above
    assert kept(float(np.float32(0.1)), 1e-8)


def test_an_update_is_not_lost_alike_on_both_sides_of_a_power_of_two() -> None:
    assert round_to(1 - 3e-4, "fp16") != 1
    assert round_to(1 + 3e-4, "fp16") == 1


def test_bf16s_mantissa_is_not_similar_to_fp16s() -> None:
    assert spacing(1.0, "bf16") == 8 * spacing(1.0, "fp16")


def test_e4m3_does_not_overflow_to_infinity() -> None:
    assert np.isnan(round_to(np.inf, "fp8_e4m3"))
    assert np.isnan(round_to(1000.0, "fp8_e4m3"))
    assert round_to(464.0, "fp8_e4m3") == 448  # nor right above its largest number


def test_a_sum_of_ones_does_not_count_in_bf16() -> None:
    ones = np.ones(4096, bf16)
    assert np.add.reduce(ones) == 256
    total = np.empty(1, bf16)
    NumpyKernels().column_sum(ones.reshape(-1, 1), total)
    assert total == 4096


def test_a_python_scalar_does_not_leave_bf16_in_bf16() -> None:
    assert (np.ones(2, bf16) * 0.1).dtype == np.float32
    assert (np.ones(2, np.float16) * 0.1).dtype == np.float16


def test_rounding_twice_is_not_rounding_once() -> None:
    x = 1 + 2.0**-11 + 2.0**-40
    assert round_to(round_to(x, "fp32"), "fp16") != round_to(x, "fp16")


def test_casting_float64_to_bf16_does_not_round_once_in_ml_dtypes() -> None:
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    packed = np.empty(1, bf16)
    NumpyKernels().cast_pack(x, packed)
    assert packed != x.astype(bf16)
    assert packed.astype(np.float64) == round_to(x, "bf16")


def test_addition_in_low_precision_is_not_associative() -> None:
    kernels, out = NumpyKernels(), np.empty(1, np.float16)
    one, small = np.ones(1, np.float16), np.full(1, 2.0**-11, np.float16)
    kernels.add_rounded(one, small, out)
    kernels.add_rounded(out, small, out)
    assert out == 1
    kernels.add_rounded(small, small, out)
    kernels.add_rounded(one, out, out)
    assert out == 1 + 2.0**-10


def test_one_minus_beta_is_not_what_float32_makes_of_it() -> None:
    assert np.float32(1) - np.float32(0.999) == np.float32(0.00099998713)
    assert np.float32(1 - 0.999) == np.float32(0.001)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_toward_zero_is_not_nearest(name: str) -> None:
    almost_two = 2 - 2.0**-20
    assert round_to(almost_two, name) == 2
    assert round_to(almost_two, name, "toward_zero") < 2  # type: ignore[arg-type]
