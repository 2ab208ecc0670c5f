"""The CUDA kernels' arithmetic, executed on the CPU, beside NumPy's kernels: the same bits, all codes and by chance.

No GPU runs here: the kernels' text is compiled by a C++ compiler (see compiled_kernels). What a GPU does with the same
text is asked in test_on_gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.backends.fakes import differing, kernels
from zerosim.numerics.arrays import to_host
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import SGD, AdamW

__all__ = ["kernels"]
NUMPY = NumpyKernels()
DTYPES = {name: fmt.dtype for name, fmt in FORMATS.items()} | {"fp64": np.dtype(np.float64)}
NARROW = [name for name, fmt in FORMATS.items() if fmt.bits <= 16]


def all_codes(name: str) -> np.ndarray:
    """Every value of a format of 16 or 8 bits."""
    dtype = DTYPES[name]
    return np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)


def chance(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bit patterns: NaN, infinities and subnormals among them; half of them within a few binades of 1."""
    dtype, rng = DTYPES[name], np.random.default_rng(seed)
    found = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    with np.errstate(all="ignore"):
        found[::2] = rng.standard_normal(found[::2].size).astype(dtype)
    return found


def both(kernels: Any, call: Callable[..., object], *arrays: np.ndarray, written: tuple[int, ...] = (-1,)) -> None:
    """Asserts that a call leaves the same bits in the written arrays, by CUDA's text and by NumPy."""
    on_host = [x.copy() for x in arrays]
    on_device = [kernels.uploaded(x) for x in arrays]
    answers = call(NUMPY, *on_host), call(kernels, *on_device)
    assert answers[0] == answers[1] or answers[0] != answers[0]
    for i in written:
        assert differing(to_host(on_device[i]), on_host[i]) == 0


@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_of_every_code_gives_numpys_bits(kernels: Any, source: str, target: str) -> None:
    x = all_codes(source)
    both(kernels, lambda k, x, out: k.cast_pack(x, out), x, np.zeros(x.shape, DTYPES[target]))


@pytest.mark.parametrize("source", ["fp32", "fp64"])
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_of_chance_bits_rounds_once_as_numpy_does(kernels: Any, source: str, target: str) -> None:
    x = chance(source, 70001)
    if source == "fp64":  # and what lies beside the midpoints of the formats, where rounding twice would be seen
        x[1::4] = chance("fp32", x[1::4].size, 1).astype(np.float64) * (1 + 2.0**-40)
    both(kernels, lambda k, x, out: k.cast_pack(x, out), x, np.zeros(x.shape, DTYPES[target]))


@pytest.mark.parametrize("target", NARROW)
def test_midpoints_go_to_the_even_neighbor(kernels: Any, target: str) -> None:
    with np.errstate(all="ignore"):
        codes = all_codes(target).astype(np.float64)
        codes = np.unique(codes[np.isfinite(codes)])
        middle = (codes[1:] + codes[:-1]) / 2
        x = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
        x = np.concatenate([x, FORMATS[target].overflow_from * np.array([1, -1, 1 - 2.0**-20, 1 + 2.0**-20])])
    for dtype in (np.float64, np.float32):
        both(kernels, lambda k, x, out: k.cast_pack(x, out), x.astype(dtype), np.zeros(x.shape, DTYPES[target]))


@pytest.mark.parametrize("name", DTYPES)
def test_sums_and_extrema_of_elements_give_numpys_bits(kernels: Any, name: str) -> None:
    a, b = chance(name, 33333, 1), chance(name, 33333, 2)
    a[:2000:3], b[:2000:3] = b[:2000:3], a[1:2001:3]
    a[2000:3000], b[2000:3000] = 0.0, -0.0
    b[3000:4000], a[3000:4000] = 0.0, -0.0
    for operation in ("add_rounded", "maximum_rounded", "minimum_rounded"):
        both(kernels, lambda k, *x, o=operation: getattr(k, o)(*x), a, b, np.zeros_like(a))
    both(kernels, lambda k, a, b, out: k.add_rounded(a, b, b), a, b, np.zeros_like(a), written=(0, 1))


@pytest.mark.parametrize("name", NARROW)
def test_sums_of_every_code_and_its_neighbors_give_numpys_bits(kernels: Any, name: str) -> None:
    a = all_codes(name)
    for shift in (0, 1, 7, len(a) // 2, len(a) // 2 + 1):
        both(kernels, lambda k, *x: k.add_rounded(*x), a, np.roll(a, shift), np.zeros_like(a))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 34])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8_e5m2"])
def test_many_addends_are_rounded_after_each(kernels: Any, name: str, count: int) -> None:
    rows = [chance(name, 5003, seed) for seed in range(count)]
    both(kernels, lambda k, *x: k.sum_rounded(x[:-1], x[-1]), *rows, np.zeros_like(rows[0]))
    both(kernels, lambda k, *x: k.sum_rounded(x, x[-1]), *rows)


@pytest.mark.parametrize("pair", [("fp16", "fp32"), ("fp32", "bf16"), ("fp8_e4m3", "fp32"), ("bf16", "bf16"),
                                  ("fp64", "fp16"), ("fp32", "fp64")])  # fmt: skip
@pytest.mark.parametrize("scalar", [3.0, 0.1, 1e-30, 65536.0, -7.25e20, 3 * 2.0**130])
def test_products_and_quotients_with_a_number_give_numpys_bits(kernels: Any, pair: tuple[str, str],
                                                              scalar: float) -> None:  # fmt: skip
    x, out = chance(pair[0], 9999), np.zeros(9999, DTYPES[pair[1]])
    both(kernels, lambda k, x, out: k.multiply_rounded(x, scalar, out), x, out)
    both(kernels, lambda k, x, out: k.divide_rounded(x, scalar, out), x, out)


@pytest.mark.parametrize("name", DTYPES)
def test_accumulation_and_gradient_blocks_give_numpys_bits(kernels: Any, name: str) -> None:
    x = chance(name, 12345)
    for total in ("fp32", "fp64"):
        both(kernels, lambda k, total, x: k.accumulate(total, x), chance(total, 12345, 5), x, written=(0,))
    if name != "fp64":
        for factor in (1, 0.37):
            for divisor in (3.0, 3 * 2.0**127):
                both(kernels, lambda k, x, g, f=factor, d=divisor: k.gradient_block(x, d, f, g), x,
                     np.zeros(x.size, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64"])
def test_whole_numbers_are_added_and_compared_as_they_are(kernels: Any, dtype: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (np.frombuffer(rng.bytes(4000), dtype).copy() for _ in range(2))
    for operation in ("add_rounded", "maximum_rounded", "minimum_rounded"):
        both(kernels, lambda k, *x, o=operation: getattr(k, o)(*x), a, b, np.zeros_like(a))


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_fused_step_of_adam_gives_numpys_bits(kernels: Any, step: int, decay: float) -> None:
    rng = np.random.default_rng(4)
    w, m, g = (rng.standard_normal(30001).astype(np.float32) for _ in range(3))
    v = rng.random(30001).astype(np.float32) * np.float32(1e-12)
    g[:9] = [np.inf, -np.inf, np.nan, 0, -0.0, 1e-45, -1e-45, 3e38, 1e-20]
    adam = AdamW(weight_decay=decay).block(step)
    both(kernels, lambda k, *x: k.step_blocks(adam, *x, scratch=2), w, m, v, g, written=(0, 1, 2, 3))
    both(kernels, lambda k, *x: k.step_blocks(SGD(0.3).block(1), *x), w, g, written=(0, 1))


def test_a_fused_multiply_add_would_be_seen(kernels: Any) -> None:
    """If a product and the sum after it were contracted into one rounding, bits would differ: the test can fail."""
    x = chance("fp32", 4096)[::2].copy()
    once = (x.astype(np.float64) * x.astype(np.float64) + x.astype(np.float64)).astype(np.float32)
    twice = x * x + x
    assert (once != twice).sum() > 100

    def function(x: Any, result: Any) -> None:
        np.multiply(x, x, out=result)
        np.add(result, x, out=result)

    both(kernels, lambda k, x, out: k.elementwise(function, x, out=out), x, np.zeros_like(x))


def test_numpys_float64_scalars_widen_the_operation_as_in_numpy(kernels: Any) -> None:
    factor = np.float64(0.1)
    x = chance("fp32", 999)

    def function(x: Any, result: Any) -> None:
        np.multiply(x, factor, out=result, casting="same_kind") if isinstance(x, np.ndarray) else np.multiply(
            x, factor, out=result)

    with np.errstate(all="ignore"):
        both(kernels, lambda k, x, out: k.elementwise(function, x, out=out), x, np.zeros_like(x))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 127, 65536, 65537, 200000])
def test_sums_of_squares_are_numpys_to_the_last_bit(kernels: Any, name: str, count: int) -> None:
    x = (np.random.default_rng(count).standard_normal(count) * 0.01).astype(DTYPES[name])
    for divisor in (1.0, 3.0, 1024.0, 3 * 2.0**127):
        both(kernels, lambda k, x, d=divisor: k.sum_of_squares(x, d), x, written=())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (700, 1), (33, 65), (3000, 40)])
def test_column_sums_are_numpys_to_the_last_bit(kernels: Any, name: str, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(DTYPES[name])
    x[: shape[0] // 2] *= -0.0 if shape[0] < 50 else 1
    for out in ("fp32", name):
        both(kernels, lambda k, x, out: k.column_sum(x, out), x, np.zeros(shape[1], DTYPES[out]))
    if shape[1] == 65:
        both(kernels, lambda k, x, out: k.column_sum(x[:, 2:7], out), x, np.zeros(5, DTYPES[name]))


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_not_finite_is_found_and_nan_is_counted(kernels: Any, name: str) -> None:
    x = chance(name, 5000)
    clean = np.where(np.isfinite(x.astype(np.float64)), x, x.dtype.type(0))
    for values in (x, clean, clean[:0]):
        both(kernels, lambda k, x: k.all_finite(x), values, written=())
        both(kernels, lambda k, x: k.count_nan(x), values, written=())
    assert kernels.count_nan(kernels.uploaded(np.arange(5))) == 0
    assert kernels.all_finite(kernels.uploaded(np.arange(5)))


@pytest.mark.parametrize("name", DTYPES)
def test_relu_and_its_gradient_give_numpys_bits(kernels: Any, name: str) -> None:
    x, dy = chance(name, 4099), chance(name, 4099, 1)
    both(kernels, lambda k, x, y, bits: k.relu(x, y, bits), x, np.zeros_like(x), np.zeros(513, np.uint8),
         written=(1, 2))
    bits = np.random.default_rng(2).integers(0, 256, 513).astype(np.uint8)
    both(kernels, lambda k, bits, dy, dx: k.relu_gradient(bits, dy, dx), bits, dy, np.zeros_like(dy))


@pytest.mark.parametrize("name", [*NARROW, "fp32"])
def test_gelu_of_every_code_is_numpys_formula(kernels: Any, name: str) -> None:
    """With NumPy's exp and tanh called back, so that what is compared is the formula and its order of operations."""
    x = all_codes(name)[::7] if name in NARROW else chance(name, 3000)
    dy = np.roll(x, 5)
    for exact in (False, True):
        both(kernels, lambda k, x, y, e=exact: k.gelu(x, y, exact=e), x, np.zeros_like(x))
        both(kernels, lambda k, x, dy, dx, e=exact: k.gelu_gradient(x, dy, dx, exact=e), x, dy, np.zeros_like(x))


@pytest.mark.parametrize("name", DTYPES)
def test_dropout_lets_the_same_elements_through(kernels: Any, name: str) -> None:
    from zerosim.numerics import random

    x = chance(name, 3001)

    def draw(span: slice) -> np.ndarray:
        return random.bits((1, "dropout", 0, "x"), span.start, span.stop - span.start)

    both(kernels, lambda k, x, y: k.drop(x, draw, round(0.3 * 2**32), 1 / 0.7, y), x, np.zeros_like(x))


def test_strided_and_overlapping_arrays_are_read_before_they_are_written(kernels: Any) -> None:
    def shifted(k: Any, x: Any) -> None:
        k.add_rounded(x[:-1], x[1:], x[1:])
        k.cast_pack(x[:-3], x[3:])

    def strided(k: Any, x: Any) -> None:
        square = x[:4096].reshape(64, 64)
        k.multiply_rounded(square.T, 3.0, square[:, ::1])
        k.add_rounded(square[:, ::2], square[:, 1::2], square[:, ::2])

    for name in ("fp32", "bf16", "fp8_e4m3"):
        both(kernels, shifted, chance(name, 5000))
        both(kernels, strided, chance(name, 5000))


@pytest.mark.parametrize("name", [*FORMATS])
def test_rows_are_taken_and_added_in_numpys_order(kernels: Any, name: str) -> None:
    rng = np.random.default_rng(6)
    rows = rng.integers(0, 11, 900)
    table, x = chance(name, 13 * 200).reshape(13, 200), rng.standard_normal((900, 200)).astype(DTYPES[name])
    both(kernels, lambda k, t, r, out: k.take_rows(t, r, out), table, rows, np.zeros((900, 200), DTYPES[name]))
    both(kernels, lambda k, x, r, out: k.add_rows(x, r, out), x, rows, np.zeros((13, 200), DTYPES[name]))


@pytest.mark.parametrize("count", [128, 129, 257, 4097, 65536, 65537, 140000])
def test_many_rows_of_one_class_are_halved_as_numpy_does(kernels: Any, count: int) -> None:
    """One channel makes the longest blocks, of 65,536 rows."""
    x, rows = np.random.default_rng(7).standard_normal((count, 1)).astype(np.float32), np.zeros(count, np.int64)
    rows[::3001] = 1
    both(kernels, lambda k, x, r, out: k.add_rows(x, r, out), x, rows, np.zeros((2, 1), np.float32))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_operand_is_scaled_and_rounded_as_in_numpy(kernels: Any, fmt: str) -> None:
    for x in (chance("fp32", 4000).reshape(40, 100), chance("bf16", 600).reshape(6, 100), np.zeros((2, 3), np.float32),
              np.full((2, 2), 3e-42, np.float32)):
        assert differing(to_host(kernels.quantized(kernels.uploaded(x), fmt)), NUMPY.quantized(x, fmt)) == 0
