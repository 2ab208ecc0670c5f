"""cast_pack between all types, and the pieces of memory that the kernels allocate and use."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from tests.numerics.oracle import LOW, ROWS, awkward_floats, cast, every_code, rounded, same
from zerosim.numerics.arrays import BLOCK, SMALL
from zerosim.numerics.kernels import NumpyKernels

TYPES = [row.dtype for row in ROWS] + [np.dtype(np.float64)]
LENGTHS = [0, 1, SMALL, SMALL + 1, BLOCK - 1, BLOCK, BLOCK + 1]
named = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)


def packed(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    NumpyKernels().cast_pack(x, out)
    return out


@named
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_any_type_is_cast_to_any_format_with_one_rounding(dtype: np.dtype, row: object) -> None:
    x = cast(awkward_floats(1500, seed=1), dtype)
    if dtype == np.float64:  # numbers that float32 does not have, at the places where double rounding shows
        x[:500] = (1 + 2.0**-11 + 2.0**-50) * 2.0 ** np.arange(-30, -30 + 500 // 10).repeat(10)
    wide = cast(x, np.float64)
    expected = [rounded(float(one), row, "nearest") for one in wide]  # type: ignore[arg-type]
    assert same(cast(packed(x, row.dtype), np.float64), np.array(expected))  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", LOW, ids=lambda row: row.name)
@pytest.mark.parametrize("target", LOW, ids=lambda row: row.name)
def test_every_code_of_a_format_is_cast_to_every_other(source: object, target: object) -> None:
    x = every_code(source)  # type: ignore[arg-type]
    assert same(packed(x, target.dtype), cast(cast(x, np.float32), target.dtype))  # type: ignore[attr-defined]


@named
@pytest.mark.parametrize("other", TYPES, ids=lambda dtype: dtype.name)
def test_a_cast_does_not_depend_on_blocks(dtype: np.dtype, other: np.dtype) -> None:
    for length in LENGTHS:
        x = cast(awkward_floats(length, seed=length), dtype)
        whole, cut = packed(x, other), length // 3
        assert same(whole, np.concatenate([packed(x[:cut], other), packed(x[cut:], other)]))


@named
def test_a_cast_neither_warns_nor_raises_under_a_strict_errstate(dtype: np.dtype) -> None:
    x = awkward_floats(5000, seed=2)
    with np.errstate(all="raise"):
        strict = packed(x, dtype)
        back = packed(strict, np.dtype(np.float32))
    with np.errstate(all="ignore"):
        assert same(strict, packed(x, dtype))
        assert same(back, packed(strict, np.dtype(np.float32)))


def test_a_float64_on_its_way_to_16_bits_is_rounded_once() -> None:
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40])
    assert packed(x, np.dtype(np.float16)).astype(float).tolist() == [1 + 2.0**-10, 1 + 2.0**-8]
    assert packed(x, np.dtype(ml_dtypes.bfloat16)).astype(float).tolist() == [1.0, 1 + 2.0**-7]
    # ml_dtypes' own cast goes by way of float32 and loses the 2^-40 that decides.
    assert x.astype(ml_dtypes.bfloat16).astype(float).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("length", [10, 3 * BLOCK])
def test_memory_that_input_and_output_share_does_not_matter(length: int) -> None:
    x = awkward_floats(length, seed=7)
    for row in LOW:
        memory = x.copy()
        inside = memory.view(row.dtype)[:length]
        NumpyKernels().cast_pack(memory, inside)
        assert same(inside.copy(), packed(x, row.dtype))
        memory = x.copy()
        codes = memory.view(row.dtype)[-length:]
        codes[...] = packed(x, row.dtype)
        NumpyKernels().cast_pack(codes, memory)
        assert same(memory, packed(packed(x, row.dtype), np.dtype(np.float32)))


def test_any_shape_and_any_strides_are_welcome() -> None:
    x = awkward_floats(6000, seed=8).reshape(60, 100)
    expected = packed(x, np.dtype(np.float16))
    assert same(packed(x.T, np.dtype(np.float16)), np.ascontiguousarray(expected.T))
    memory = np.zeros((60, 200), np.float16)
    NumpyKernels().cast_pack(x, memory[:, ::2])
    assert same(np.ascontiguousarray(memory[:, ::2]), expected)
    assert (memory[:, 1::2] == 0).all()
    column = np.zeros(6000 * 3, np.float16)[::3]
    NumpyKernels().cast_pack(x.reshape(-1), column)
    assert same(column.copy(), expected.reshape(-1))
    scalar = np.empty((), np.float16)
    NumpyKernels().cast_pack(np.array(2.5, np.float32), scalar)
    assert scalar == 2.5


def test_integers_are_copied_to_their_own_type_only() -> None:
    x = np.arange(-5, 5, dtype=np.int32)
    assert (packed(x, x.dtype) == x).all()
    with pytest.raises(ValueError, match=r"cast_pack computes in floating point .* got x of type int32"):
        packed(x, np.dtype(np.float32))
    with pytest.raises(ValueError, match="got out of type int8"):
        packed(np.zeros(3, np.float32), np.dtype(np.int8))


def test_shapes_that_differ_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"cast_pack needs arrays of one shape, got x \(3,\), out \(1, 3\)"):
        NumpyKernels().cast_pack(np.zeros(3), np.zeros((1, 3)))


@named
def test_a_cast_takes_no_memory_that_grows_with_the_array(dtype: np.dtype) -> None:
    kernels, x, out = NumpyKernels(), np.zeros(40 * BLOCK, np.float32), np.empty(40 * BLOCK, dtype)
    kernels.cast_pack(x[:BLOCK], out[:BLOCK])
    tracemalloc.start()
    try:
        kernels.cast_pack(x, out)
        kernels.cast_pack(out, x)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 10 * BLOCK * 8


def test_large_arrays_begin_at_a_cache_line_and_small_ones_have_no_slack() -> None:
    kernels = NumpyKernels()
    for nbytes in (4096, 4100, 100_000):
        for _ in range(8):
            x = kernels.empty(nbytes, np.uint8)
            assert x.ctypes.data % 64 == 0
            assert x.base is not None
            assert x.base.nbytes == nbytes + kernels.slack_nbytes(nbytes)
            assert x.flags.writeable
            assert x.flags.c_contiguous
    small = kernels.empty((3, 4), ml_dtypes.bfloat16)
    assert small.shape == (3, 4)
    assert small.dtype == ml_dtypes.bfloat16
    assert small.base is None
    assert kernels.slack_nbytes(4095) == 0
    assert kernels.empty((0, 5), np.float32).shape == (0, 5)
    assert kernels.empty((64, 32), np.float16).shape == (64, 32)


def test_scratch_is_declared_and_stays_small() -> None:
    kernels = NumpyKernels()
    assert kernels.scratch_nbytes == 0
    out = np.empty(4 * BLOCK, np.float16)
    kernels.cast_pack(np.zeros(4 * BLOCK), out)
    held = kernels.scratch_nbytes
    assert 0 < held < 10 * BLOCK * 8
    kernels.cast_pack(np.zeros(4 * BLOCK), out)
    assert kernels.scratch_nbytes == held
