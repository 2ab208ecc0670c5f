"""Numbers that share a scale: blockwise quantized vectors come back within the bound, and what is not finite stays so;
a tensor in fp8 has one scale, a power of two, and is rounded once.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.numerics import oracle
from tests.support import assert_refused, literally
from zerosim.numerics import formats, kernels, quantization

KERNELS = kernels.NumpyKernels()


def back(form, x):
    """The vector as it comes back, in fp32, and its bytes on the wire."""
    packed, out = np.full(form.nbytes(len(x)), 0xA5, np.uint8), np.empty(len(x), np.float32)
    form.quantize(KERNELS, x, packed)
    form.dequantize(KERNELS, packed, out)
    return out, packed


@pytest.mark.parametrize(("name", "block", "length", "scale", "compute"), covering(
    ("int8", "int4"), (2, 8, 256), (0, 1, 5, 256, 257, 70_001), (1.0, 1e-44, 5e-44, 1e-38, 1e30, 1e-3),
    ("fp32", "bf16", "fp16")))
def test_every_element_comes_back_within_the_bound_which_some_nearly_reach(name, block, length, scale, compute):
    form, rng = quantization.Blockwise(name, block), np.random.default_rng(length)
    with np.errstate(all="ignore"):
        x = np.clip(rng.standard_normal(length) * scale, -6e4, 6e4).astype(formats.format_of(compute).dtype)
    found, packed = back(form, x)
    error, bound = np.abs(found - x.astype(np.float64)), form.error_bound(x.astype(np.float64))
    assert (error <= bound).all()
    assert (error > 0.9 * bound).any() or length < 1000 or abs(np.log10(scale)) > 4
    assert len(packed) % 4 == 0
    bits = {"int8": 8, "int4": 4}[name]
    assert len(packed) - 4 * -(-length // block) - (length * bits + 7) // 8 in range(4)
    twice, onto = back(form, found)[0], np.ones(length, np.float32)
    assert np.abs(twice - found).max(initial=0) <= 2.0**-20 * np.abs(found).max(initial=0) or scale < 1e-30
    form.dequantize(KERNELS, packed, onto, add=True)
    assert (onto == 1 + found).all()


def test_the_largest_numbers_of_fp32_do_not_overflow():
    x = np.nextafter(np.finfo(np.float32).max, 0, dtype=np.float32) * np.linspace(-1, 1, 40, dtype=np.float32)
    x = np.concatenate([x, np.full(8, np.finfo(np.float32).max)])
    for name in ("int8", "int4"):
        form = quantization.Blockwise(name, 8)
        assert (np.abs(back(form, x)[0] - x.astype(np.float64)) <= form.error_bound(x.astype(np.float64))).all()


def test_a_block_has_its_own_scale_and_keeps_inf_and_nan_to_itself():
    x = np.tile(np.float32([1, -1, 0.6, 0]), 4)
    x[4], x[9], x[12] = np.nan, np.inf, 1e30
    found, _ = back(quantization.Blockwise("int4", 4), x)
    assert np.isfinite(found).reshape(4, 4).any(axis=1).tolist() == [True, False, False, True]
    assert found[:4].tolist() == pytest.approx([1, -1, 4 / 7, 0])
    assert found[12:].tolist() == pytest.approx([1e30, 0, 0, 0])
    assert back(quantization.Blockwise("int8"), np.zeros(3, np.float32))[0].tolist() == [0, 0, 0]


def test_what_exceeds_a_subnormal_scale_is_the_largest_integer():
    x = np.float32([143, 1, -143, 0]) * np.float32(2.0**-149)  # the scale, 143/127 of the smallest number, is that
    assert (back(quantization.Blockwise("int8", 4), x)[0].astype(np.float64) * 2.0**149).tolist() == [127, 1, -127, 0]


def test_other_formats_and_blocks_are_refused():
    assert_refused(lambda: quantization.Blockwise("int2"),
                   literally("no quantized format 'int2'; choose one of int8, int4; did"))
    for block in (0, 3, 1.5, True):
        assert_refused(lambda block=block: quantization.Blockwise("int8", block),
                       literally(f"block={block} must be an even number"))


# -- the fp8 experiment: one scale for each tensor ---------------------------------------------------------------------

quantized = KERNELS.quantized
FP8 = ("fp8_e4m3", "fp8_e5m2")


def scale_to(x: np.ndarray, fmt: str) -> float:
    return kernels.scale_to(KERNELS.largest_finite(x), zs.FORMATS[fmt])


@given(top=st.floats(2.0**-149, 2.0**127, width=32), fmt=st.sampled_from(FP8))
def test_the_scale_is_the_largest_power_of_two_that_keeps_the_largest_value_and_has_a_normal_inverse(top, fmt):
    x, largest = np.array([top, -top / 2], np.float32), zs.FORMATS[fmt].largest
    scale = scale_to(x, fmt)
    assert np.frexp(scale)[0] == 0.5
    assert 2.0**-126 <= scale <= 2.0**126
    assert top * scale <= largest
    assert top * scale * 2 > largest or scale == 2.0**126


@pytest.mark.parametrize("fmt", FP8)
def test_zeros_and_empty_tensors_have_scale_1_and_what_is_not_finite_says_nothing(fmt):
    assert scale_to(np.zeros(3, np.float32), fmt) == scale_to(np.empty(0, np.float32), fmt) == 1
    assert scale_to(np.array([np.inf, 3.0, np.nan], np.float32), fmt) == scale_to(np.array([3.0], np.float32), fmt)


@given(values=st.lists(st.floats(width=32), max_size=8), fmt=st.sampled_from(FP8))
def test_every_value_is_rounded_once_to_the_formats_number_times_a_power_of_two(values, fmt):
    x, row = np.array(values, np.float32), next(row for row in oracle.ROWS if row.name == fmt)
    scale = scale_to(x, fmt)
    expected = [oracle.rounded(float(value) * scale, row, "nearest") / scale for value in x]
    assert oracle.same(quantized(x, fmt), oracle.cast(np.array(expected, np.float64), np.float32))


def test_a_users_errstate_changes_nothing_and_16_bit_tensors_are_welcome_and_left_alone():
    x = np.array([np.inf, -np.inf, np.nan, 1e-45, 3e38], np.float32)
    for fmt in FP8:
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
