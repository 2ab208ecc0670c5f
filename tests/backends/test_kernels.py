"""CuPy's kernels beside NumPy's: the same bits, all codes and by chance; bounds where a library computes.

Without a GPU the kernels' CUDA text is compiled by a C++ compiler and run on the CPU (see compiled_kernels), and what
is a library's on a GPU (matmul, exp) is NumPy's. With one the same tests run on it. Sums are compared with those that
NumPy adds up in a GPU's order (see gpu_order).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import zerosim as zs
from tests.backends import gpu_order
from tests.backends.doubles import differing
from tests.backends.gpu_order import InGpuOrder
from tests.cases import chosen
from tests.ranks import data
from zerosim.backends.cupy import kernels as gpus_own
from zerosim.backends.cupy import tracing
from zerosim.models import rotary
from zerosim.numerics import arrays, blockwise, random
from zerosim.optim import SGD, AdamW
from zerosim.zero.micro_batch_order import sum_of_squares

NUMPY = InGpuOrder()  # element by element they are NumPy's, and a GPU's order of additions is stated there
FLOATS, NARROW, WIDE = data.FLOATS, list(data.NARROW), ("fp32", "fp64")
INTEGERS = ("int8", "uint8", "int16", "int32", "uint32", "int64")
# Of formulas that all kernels share: what is wide, narrow, and wider. Every format is cast in the tests of casts.
COMPUTE = chosen(["fp32", "bf16", "fp64"], ["fp32", "bf16", "fp16", "fp8_e5m2", "fp64"])
EVEN, ODD = (chosen(list(FLOATS)[first::2], FLOATS) for first in (0, 1))  # half of all formats in each test, in turn


def all_codes(name: str) -> np.ndarray:
    """Every value of a format of 16 or 8 bits."""
    dtype = FLOATS[name]
    return np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)


def chance(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bit patterns: NaN, infinities and subnormals among them; half of them within a few binades of 1."""
    dtype, rng = FLOATS[name], np.random.default_rng(seed)
    found = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    with np.errstate(all="ignore"):
        found[::2] = rng.standard_normal(found[::2].size).astype(dtype)
    return found


def normal(shape: tuple[int, ...] | int, name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(FLOATS[name])


def zeros(shape: tuple[int, ...] | int, name: str) -> np.ndarray:
    return np.zeros(shape, FLOATS[name])


def wide(name: str) -> str:
    return "fp64" if name == "fp64" else "fp32"


def both(kernels: Any, call: str | Callable[..., object], *arguments: Any, written: tuple[int, ...] = (-1,),
         within: float | None = None, case: object = "", **options: Any) -> None:
    """Asserts that a kernel, or a function of the kernels, leaves the same bits in the arguments that are written, and
    answers the same, by CUDA and by NumPy; or, within so much of the largest number, nearly the same."""
    on_host = [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]
    on_device = [kernels.uploaded(x) if isinstance(x, np.ndarray) else x for x in arguments]
    answers = [getattr(k, call)(*given, **options) if isinstance(call, str) else call(k, *given)
               for k, given in ((NUMPY, on_host), (kernels, on_device))]
    if isinstance(answers[0], float):
        assert answers[1] == pytest.approx(answers[0], rel=within or 0, abs=0, nan_ok=True), (call, case)
    else:
        assert answers[0] == answers[1], (call, case)
    for i in written:
        found = arrays.to_host(on_device[i])
        if within is None:
            assert differing(found, on_host[i]) == 0, (call, case)
        else:
            right = on_host[i].astype(np.float64)
            assert np.abs(found.astype(np.float64) - right).max() <= within * np.abs(right).max(), (call, case)


# -- casts and elements -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("target", FLOATS)
def test_a_cast_rounds_once_as_numpy_does(kernels: Any, target: str) -> None:
    for source in chosen([*WIDE, NARROW[NARROW.index(target) - 1]] if target in NARROW else FLOATS, FLOATS):
        x = all_codes(source) if source in NARROW else chance(source, 70001)
        if source == "fp64":  # and what lies beside the midpoints of the formats, where rounding twice would be seen
            x[1::4] = chance("fp32", x[1::4].size, 1).astype(np.float64) * (1 + 2.0**-40)
        both(kernels, "cast_pack", x, zeros(x.shape, target), case=source)
    if target in NARROW:
        codes = all_codes(target).astype(np.float64)
        codes = np.unique(codes[np.isfinite(codes)])
        middle = (codes[1:] + codes[:-1]) / 2  # which go to the even neighbor
        x = np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
        x = np.concatenate([x, zs.FORMATS[target].overflow_from * np.array([1, -1, 1 - 2.0**-20, 1 + 2.0**-20])])
        for dtype in (np.float64, np.float32):
            both(kernels, "cast_pack", x.astype(dtype), zeros(x.shape, target), case=f"midpoints in {dtype.__name__}")


@pytest.mark.parametrize("name", [*FLOATS, *chosen(["uint8", "int16", "uint32", "int64"], INTEGERS)])
def test_sums_and_extrema_of_elements_give_numpys_bits(kernels: Any, name: str) -> None:
    if name in FLOATS:
        a, b = chance(name, 33333, 1), chance(name, 33333, 2)
        a[:2000:3], b[:2000:3] = b[:2000:3], a[1:2001:3]
        a[2000:3000], b[2000:3000] = 0.0, -0.0
        b[3000:4000], a[3000:4000] = 0.0, -0.0
    else:
        a, b = (np.frombuffer(np.random.default_rng(seed).bytes(4000), name).copy() for seed in (1, 2))
    for operation in ("add_rounded", "maximum_rounded", "minimum_rounded"):
        both(kernels, operation, a, b, np.zeros_like(a), case=operation)
    both(kernels, lambda k, a, b, out: k.add_rounded(a, b, b), a, b, np.zeros_like(a), written=(0, 1))
    if name in NARROW:
        a = all_codes(name)
        for shift in (0, 1, 7, len(a) // 2, len(a) // 2 + 1):
            both(kernels, "add_rounded", a, np.roll(a, shift), np.zeros_like(a), case=shift)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8_e5m2"])
def test_many_addends_are_rounded_after_each(kernels: Any, name: str) -> None:
    for count in (1, 2, 3, 17, 34):
        rows = [chance(name, 5003, seed) for seed in range(count)]
        both(kernels, lambda k, *x: k.sum_rounded(x[:-1], x[-1]), *rows, np.zeros_like(rows[0]), case=count)
        both(kernels, lambda k, *x: k.sum_rounded(x, x[-1]), *rows, case=count)


@pytest.mark.parametrize("pair", [("fp16", "fp32"), ("fp32", "bf16"), ("fp8_e4m3", "fp32"), ("bf16", "bf16"),
                                  ("fp64", "fp16"), ("fp32", "fp64")])  # fmt: skip
def test_products_and_quotients_with_a_number_give_numpys_bits(kernels: Any, pair: tuple[str, str]) -> None:
    x, out = chance(pair[0], 9999), zeros(9999, pair[1])
    for scalar in (3.0, 0.1, 1e-30, 65536.0, -7.25e20, 3 * 2.0**130):
        both(kernels, "multiply_rounded", x, scalar, out, case=scalar)
        both(kernels, "divide_rounded", x, scalar, out, case=scalar)


@pytest.mark.parametrize("name", ODD)
def test_gradient_blocks_give_numpys_bits(kernels: Any, name: str) -> None:
    x = chance(name, 12345)
    if name != "fp64":
        for factor, divisor in product((1, 0.37), (3.0, 3 * 2.0**127)):
            both(kernels, "gradient_block", x, divisor, factor, zeros(x.size, "fp32"), case=(factor, divisor))


def test_fused_steps_of_optimizers_give_numpys_bits(kernels: Any) -> None:
    w, m, g = (normal(30001, "fp32", seed) for seed in range(3))
    v = np.random.default_rng(4).random(30001).astype(np.float32) * np.float32(1e-12)
    g[:9] = [np.inf, -np.inf, np.nan, 0, -0.0, 1e-45, -1e-45, 3e38, 1e-20]
    for step, decay in product((1, 2, 1000), (0.0, 0.01)):
        block = partial(AdamW(lr=1e-3, weight_decay=decay).update_block, step)
        both(kernels, "step_blocks", block, w, m, v, g, scratch=2, written=(1, 2, 3, 4), case=(step, decay))
    both(kernels, "step_blocks", partial(SGD(0.3).update_block, 1), w, g, written=(1, 2))


def test_operators_masks_and_clips_are_numpys(kernels: Any) -> None:
    def function(x: Any, y: Any) -> None:
        np.copyto(y, (2 - x) * 3 / (1 + x * x) - 0.5)
        y += np.clip(x, -0.5, 0.25)
        y *= np.sign(x)
        y -= -x if isinstance(x, np.ndarray) else np.negative(x)
        y /= np.square(x) + 1e-3
        np.copyto(y, 7.0, where=x >= 1.5)
        np.copyto(y, np.abs(x), where=x < -1.5)
        np.copyto(y, x, where=False)

    x = np.concatenate([normal(9995, "fp32"), np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40], np.float32)])
    both(kernels, lambda k, x, y: k.elementwise(function, x, out=y), x, np.zeros_like(x))


@pytest.mark.parametrize(("name", "short"), [("fp32", tracing.SHORT), ("bf16", tracing.SHORT), ("bf16", 1)])
def test_numbers_of_rows_and_of_columns_are_taken_where_they_belong(
        kernels: Any, name: str, short: int, monkeypatch) -> None:
    """Rows that end in and between the elements that a thread takes at once, and shorter ones than these; and the same
    with the indices of long arrays."""
    monkeypatch.setattr(tracing, "SHORT", short)

    def function(x: Any, of_row: Any, w: Any, of_two: Any, result: Any) -> None:
        np.subtract(x, of_row, out=result)
        result *= w
        result += of_two

    def call(k: Any, x: Any, a: Any, w: Any, b: Any, out: Any) -> None:
        middle = x[..., w.size : 2 * w.size]
        k.apply(function, [middle, blockwise.PerRow(a), blockwise.PerColumn(w), blockwise.PerColumn(b)], out)

    for columns in (1, 2, 3, 4, 7, 8, 9, 16, 31, 32):
        both(kernels, call, normal((3, 2, 3 * columns), name), normal((3, 2), "fp32", 1), normal(columns, name, 2),
             normal((2, columns), "fp32", 3), zeros((3, 2, columns), name), case=columns)


@pytest.mark.parametrize(("width", "index"), [(64, "u32"), (4096, "u64")])
def test_indices_are_long_where_lines_reach_far_though_their_elements_are_few(
        kernels: Any, width: int, index: str, monkeypatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(tracing, "SHORT", 1000)
    monkeypatch.setattr(tracing, "launch", lambda text, *_: launched.append(text))
    x, out = kernels.uploaded(zeros((4, width), "fp32")), kernels.empty((4, 16), np.float32)
    kernels.multiply_rounded(x[:, 16:32], 3.0, out)
    assert [f"{index} n" in text for text in launched] == [True]


@pytest.mark.parametrize("grid", [None, FLOATS["bf16"]])
def test_a_second_result_has_no_grid_and_its_type_and_that_of_numbers_of_rows_widen_nothing(
        kernels: Any, grid: np.dtype[Any] | None) -> None:
    def function(x: Any, scale: Any, result: Any, second: Any) -> None:
        np.divide(x, scale, out=second)
        np.multiply(x, scale, out=result)

    both(kernels, lambda k, x, scale, out, also: k.apply(
        function, [x, blockwise.PerRow(scale)], out, grid=grid, also=also),
         normal((37, 11), "fp32"), normal(37, "fp64"), zeros((37, 11), "fp32"), zeros((37, 11), "fp64"), written=(2, 3))


def test_numpys_float64_scalars_widen_the_operation_as_in_numpy(kernels: Any) -> None:
    factor = np.float64(0.1)

    def function(x: Any, result: Any) -> None:
        np.multiply(x, factor, out=result, casting="same_kind") if isinstance(x, np.ndarray) else np.multiply(
            x, factor, out=result)
        np.copyto(result, 7.0, where=x > factor)

    x = np.append(chance("fp32", 999), np.float32(factor))  # which is larger
    both(kernels, lambda k, x, out: k.elementwise(function, x, out=out), x, np.zeros_like(x))


def test_strided_and_overlapping_arrays_are_read_before_they_are_written(kernels: Any) -> None:
    def shifted(k: Any, x: Any, _: Any) -> None:
        k.add_rounded(x[:-1], x[1:], x[1:])
        k.cast_pack(x[:-3], x[3:])
        k.cast_pack(x[27:57], x[13:73:2])

    def strided(k: Any, x: Any, _: Any) -> None:
        square = x[:4096].reshape(64, 64)
        k.multiply_rounded(square.T, 3.0, square[:, ::1])
        k.add_rounded(square[:, ::2], square[:, 1::2], square[:, ::2])
        k.apply(np.add, [square[:, 32:], 1.0], square[:, 32:], grid=FLOATS["fp8_e5m2"])
        k.relu_gradient(k.uploaded(np.arange(256, dtype=np.uint8)), square[:, 32:], square[:, :32])

    def in_lines(k: Any, x: Any, y: Any) -> None:
        """Halves of rows, some heads of many, one of these beside what lies askew, and rows in reverse."""
        rows, heads, askew = x.reshape(-1, 128), x.reshape(5, 2, 4, 8, 16)[:, :, 1:3], y[1:1281].reshape(10, 128)
        k.add_rounded(rows[:, 32:64], rows[:, 64:96], rows[:, 32:64])
        k.multiply_rounded(heads, 3.0, y[:2560].reshape(heads.shape))
        k.multiply_rounded(rows[:10, :], 3.0, askew)
        k.add_rounded(rows[:10, 32:64], y[1:321].reshape(10, 32), rows[:10, 96:])
        k.add_rounded(rows[:10, 32:64], askew[:, 32:64], rows[:10, 96:])
        k.add_rounded(rows[:1, :64], rows[:1, 64:], rows[:1, :64])
        k.multiply_rounded(rows[::-1, 64:], 3.0, y[:2560].reshape(40, 64))

    for name, call in product(("fp32", "bf16", "fp8_e4m3"), (shifted, strided, in_lines)):
        both(kernels, call, chance(name, 5120), chance(name, 5120, 1), written=(0, 1), case=name)


# -- sums and tests ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", EVEN)
def test_sums_of_squares_and_columns_have_the_stated_order(kernels: Any, name: str) -> None:
    for count, divisor in product((0, 1, 32, 33, 1024, 1025, 40000), (1.0, 3.0, 3 * 2.0**127)):
        x = (normal(count, "fp64", count) * 0.01).astype(FLOATS[name])
        both(kernels, "sum_of_squares", x, divisor, written=(), case=(count, divisor))
    for shape in ((0, 3), (1, 1), (700, 1), (33, 65), (3000, 40)):
        x = normal(shape, name)
        x[: shape[0] // 2] *= -0.0 if shape[0] < 50 else 1
        for out in ("fp32", name):
            both(kernels, "column_sum", x, zeros(shape[1], out), case=shape)
        if shape[1] == 65:
            both(kernels, lambda k, x, out: k.column_sum(x[:, 2:7], out), x, zeros(5, name))


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_sums_products_and_maxima_of_rows_have_the_stated_order(kernels: Any, name: str) -> None:
    for shape in ((1, 1), (3, 32), (40, 33), (2, 3, 1025), (5, 3000)):
        x, y = normal(shape, name), normal(shape, name, 1)
        x[0, ..., 0], x[-1] = np.inf, 1e-45  # of float32 the smallest, and not 0
        given = kernels.uploaded(x), kernels.uploaded(y)
        for call, taken in (("row_sums", 1), ("row_products", 2), ("row_maxima", 1)):
            found, expected = getattr(kernels, call)(*given[:taken]), getattr(NUMPY, call)(*(x, y)[:taken])
            assert differing(arrays.to_host(found), expected) == 0, (call, shape)


def test_long_sums_have_more_than_32_rows_in_their_table(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, whole = normal(9000, "fp32"), NUMPY.sum_of_squares(normal(9000, "fp32"))
    assert gpu_order.WIDTH == gpus_own.WIDTH
    for module in (gpu_order, gpus_own):
        monkeypatch.setattr(module, "WIDTH", 64)
    both(kernels, "sum_of_squares", x, written=())
    assert NUMPY.sum_of_squares(x) != whole


@pytest.mark.parametrize("name", EVEN)
def test_what_is_not_finite_is_found_and_nan_is_counted(kernels: Any, name: str) -> None:
    x = chance(name, 5000)
    clean = np.where(np.isfinite(x.astype(np.float64)), x, x.dtype.type(0))
    for values in (x, clean, clean[:0], np.arange(5)):
        both(kernels, lambda k, x: (k.all_finite(x), k.count_nan(x)), values, written=())


# -- layers -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ODD)
def test_relu_and_dropout_let_the_same_elements_through(kernels: Any, name: str) -> None:
    x, dy = chance(name, 4099), chance(name, 4099, 1)
    both(kernels, "relu", x, np.zeros_like(x), np.zeros(513, np.uint8), written=(1, 2))
    bits = np.random.default_rng(2).integers(0, 256, 513).astype(np.uint8)
    both(kernels, "relu_gradient", bits, dy, np.zeros_like(dy))

    def draw(span: slice) -> np.ndarray:
        return random.bits((1, "dropout", 0, "x"), span.start, span.stop - span.start)

    both(kernels, "drop", x, draw, round(0.3 * 2**32), 1 / 0.7, np.zeros_like(x))

    def askew(k: Any, x: Any, bits: Any) -> None:
        """Each result begins one element behind what it overwrites."""
        k.relu(x[:999], x[1:1000], bits)
        k.relu_gradient(bits, x[1000:1999], x[1001:2000])
        k.drop(x[2000:2999], draw, round(0.3 * 2**32), 1 / 0.7, x[2001:3000])

    both(kernels, askew, x, bits[:125], written=(0, 1))


@pytest.mark.parametrize("name", zs.FORMATS)
def test_rows_are_taken_and_added_in_the_stated_order(kernels: Any, name: str) -> None:
    rows, table, x = np.random.default_rng(6).integers(0, 11, 900), chance(name, 13 * 200), normal((900, 200), name)
    both(kernels, "take_rows", table.reshape(13, 200), rows, zeros((900, 200), name))
    both(kernels, "add_rows", x, rows, zeros((13, 200), name))
    if name == "fp32":  # classes within a block, at its edges, and over many; one that has nothing but -0; and none
        for count, classes in product((0, 1, 32, 33, 64, 2000, 20000), (1, 2, 700)):
            x, rows = normal((count, 2), "fp32", 7), np.random.default_rng(8).integers(0, classes, count)
            x[rows == 1] = -0.0
            both(kernels, "add_rows", x, rows, normal((classes + 1, 2), "fp32"), case=(count, classes))


@pytest.mark.parametrize("name", COMPUTE)
def test_rows_are_normalized_to_the_same_bits(kernels: Any, name: str) -> None:
    for shape in ((1, 1), (40, 24), (700, 130)):
        rows, columns = shape
        x, w, b, dy = normal(shape, name), normal(columns, name, 1), normal(columns, name, 2), normal(shape, name, 3)
        mean, rstd = zeros(rows, wide(name)), zeros(rows, wide(name))
        y, dx, dw, db = zeros(shape, name), zeros(shape, name), zeros(columns, name), zeros(columns, name)
        both(kernels, "normalize_rows", x, w, b, 1e-5, mean, rstd, y, written=(4, 5, 6), case=shape)
        NUMPY.normalize_rows(x, w, b, 1e-5, mean, rstd, np.empty_like(x))
        both(kernels, "scale_rows", x, w, b, mean, rstd, y, case=shape)
        if columns > 1:
            both(kernels, "normalize_rows_gradient", x, w, mean, rstd, dy, dx, dw, db, written=(5, 6, 7), case=shape)
    for shape in ((1, 1), (700, 130), (40, 3, 24)):  # RMSNorm, and of heads, which lie beside others
        x, w, dy = normal(shape, name), normal(shape[-1], name, 1), normal(shape, name, 3)
        rstd, y, dw = zeros(shape[:-1], wide(name)), zeros((*shape[:-1], shape[-1] + 5), name), zeros(shape[-1], name)
        both(kernels, lambda k, x, w, r, y: k.normalize_rows(x, w, None, 1e-5, None, r, y[..., 5:]), x, w, rstd, y,
             written=(2, 3), case=shape)
        NUMPY.normalize_rows(x, w, None, 1e-5, None, rstd, np.empty_like(x))
        both(kernels, lambda k, x, w, r, y: k.scale_rows(x, w, None, None, r, y), x, w, rstd, zeros(shape, name))
        both(kernels, lambda k, x, w, r, dy, dw: k.normalize_rows_gradient(x, w, None, r, dy, dy, dw, None),
             x, w, rstd, dy, dw, written=(3, 4), case=shape)


@pytest.mark.parametrize("name", COMPUTE)
def test_queries_and_keys_are_turned_to_the_same_bits(kernels: Any, name: str) -> None:
    for shape, heads, width in (((1, 1, 2), 1, 2), ((3, 9, 24), 2, 6), ((2, 70, 48), 6, 8)):
        for back in (False, True):
            both(kernels, "rotate", normal(shape, name), heads, rotary.frequencies(width, 100.0, None), written=(0,),
                 case=shape, back=back)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_operand_is_scaled_and_rounded_as_in_numpy(kernels: Any, fmt: str) -> None:
    for x in (chance("fp32", 4000).reshape(40, 100), chance("bf16", 600).reshape(6, 100), zeros((2, 3), "fp32"),
              np.full((2, 2), 3e-42, np.float32)):
        assert differing(arrays.to_host(kernels.quantized(kernels.uploaded(x), fmt)), NUMPY.quantized(x, fmt)) == 0


def test_an_exact_sum_of_squares_is_that_of_numpy(kernels: Any) -> None:
    for name in ("fp32", "bf16", "fp16"):
        x = chance(name, 5000)
        assert sum_of_squares(kernels, kernels.uploaded(x), 3.0) == sum_of_squares(NUMPY, x, 3.0) > 0


# -- what a library computes on a GPU: its formula, on the stand-in ----------------------------------------------------

@pytest.mark.parametrize("name", chosen(["fp32", "bf16"], [*NARROW, "fp32"]))
def test_gelu_is_numpys_formula(stand_in: Any, name: str) -> None:
    """With NumPy's exp and tanh called back, so that what is compared is the formula and its order of operations."""
    every = chosen([97], [29])[0] if name in ("fp16", "bf16") else 1
    x = all_codes(name)[::every] if name in NARROW else chance(name, chosen([700], [2000])[0])
    for exact in (False, True):
        both(stand_in, "gelu", x, np.zeros_like(x), exact=exact)
        both(stand_in, "gelu_gradient", x, np.roll(x, 5), np.zeros_like(x), exact=exact)
    h = x[:len(x) // 6 * 6].reshape(-1, 6)
    both(stand_in, "swiglu", h, np.zeros_like(h[:, :3]))
    both(stand_in, "swiglu_gradient", h, np.roll(h, 1)[:, 3:].copy(), np.zeros_like(h))


@pytest.mark.parametrize("name", COMPUTE)
def test_products_are_rounded_once_with_their_bias(stand_in: Any, name: str) -> None:
    for m, k, n in ((1, 1, 1), (5, 7, 3), (64, 33, 17), (3, 0, 2)):
        a, b, bias = normal((m, k), name), normal((k, n), name, 1), normal(n, name, 2)
        for out in (name, wide(name)):
            both(stand_in, lambda k, a, b, out: k.matmul(a, b, out=out), a, b, zeros((m, n), out))
            both(stand_in, lambda k, a, b, c, out: k.matmul(a, b, bias=c, out=out), a, b, bias, zeros((m, n), out))
        both(stand_in, lambda k, a, b, out: k.matmul(a.T, b.T, out=out), a.T.copy(), b.T.copy(), zeros((m, n), name))
        both(stand_in, lambda k, a, b, out: k.matmul(a[::2], b, out=out[::2]), a, b, zeros((m, n), name))
    a, b = normal((9, 20), "bf16"), normal((20, 11), "fp16", 1)  # two formats are multiplied as float32
    both(stand_in, lambda k, a, b, out: k.matmul(k.widen(a), b, out=out), a, b, zeros((9, 11), "bf16"))


@pytest.mark.parametrize("name", COMPUTE)
def test_the_loss_of_softmax_is_the_same_formula(stand_in: Any, name: str) -> None:
    long = [((140, 500), np.int64)] * (name == "bf16")  # whose losses are added up by blocks of rows
    for shape, dtype in (((1, 2), np.int64), ((9, 5), np.int32), ((50, 11), np.int64), *long):
        logits, targets = normal(shape, name), np.random.default_rng(1).integers(-1, shape[1], shape[0]).astype(dtype)
        log_sums = zeros(shape[0], wide(name))
        both(stand_in, "softmax_loss", logits, targets, log_sums, case=shape)
        if logits.size > arrays.BLOCK:
            continue
        both(stand_in, lambda k, t: (k.count_targets(t), k.index_range(t)), targets, written=())
        NUMPY.softmax_loss(logits, targets, log_sums)
        both(stand_in, "softmax_loss_gradient", logits, targets, log_sums, 0.37, zeros(shape, name), case=shape)
        both(stand_in, lambda k, x, t, s: k.softmax_loss_gradient(x, t, s, 0.37, x), logits, targets, log_sums,
             written=(0,), case=shape)
        both(stand_in, lambda k, x, t, s, out: k.softmax_loss_gradient(x.T, t, s, 0.37, out.T), logits.T.copy(),
             targets, log_sums, zeros(shape[::-1], name), case=shape)


@pytest.mark.parametrize("name", chosen(["fp32", "bf16"], ["fp32", "bf16", "fp16", "fp64"]))
def test_attention_is_the_same_formula(stand_in: Any, name: str) -> None:
    for batch, tokens, heads, shared, width in ((1, 1, 1, 1, 1), (2, 9, 3, 3, 4), (3, 64, 2, 2, 8), (2, 9, 6, 2, 4)):
        channels, shape = heads * width, (batch, heads, tokens, tokens)
        qkv = normal((batch, tokens, channels + 2 * shared * width), name)
        do = normal((batch, tokens, channels), name, 1)
        p, o, dqkv = zeros(shape, name), zeros(do.shape, name), zeros(qkv.shape, name)
        both(stand_in, "attend", qkv, heads, p, o, written=(2, 3), case=shape)
        both(stand_in, "attend", qkv, heads, None, o, case=shape)
        NUMPY.attend(qkv, heads, p, o)
        for again in (False, True):
            both(stand_in, "attend_gradient", qkv, heads, p, do, dqkv, again=again, written=(2, 4), case=shape)
        sums = zeros((batch, heads, tokens), wide(name))
        both(stand_in, "attend_tiled", qkv, heads, sums, o, written=(2, 3))
        NUMPY.attend_tiled(qkv, heads, sums, o)
        both(stand_in, "attend_tiled_gradient", qkv, heads, sums, o, do, dqkv)


def test_attention_in_strips_tiles_and_groups_is_that_of_one(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short strips, so that a strip has a past; the sums over tiles are in another order."""
    for name, value in (("STRIP", 5), ("TILE", 4), ("GROUP", 100)):
        monkeypatch.setattr(type(stand_in), name, value)
    attention_is_near(stand_in, normal((2, 13, 24), "fp32"), 2, 1e-5)
    attention_is_near(stand_in, normal((2, 13, 40), "fp32"), 6, 1e-5, shared=2)


def attention_is_near(kernels: Any, qkv: np.ndarray, heads: int, within: float, shared: int | None = None) -> None:
    """Every kernel of attention, each on what NumPy has made of the one before; each writes all of its results."""
    batch, tokens = qkv.shape[:2]
    channels = qkv.shape[2] * heads // (heads + 2 * (shared or heads))
    do = np.random.default_rng(1).standard_normal((batch, tokens, channels)).astype(qkv.dtype)
    p, o, dqkv = (np.full(shape, np.nan, qkv.dtype) for shape in ((batch, heads, tokens, tokens), do.shape, qkv.shape))
    sums = np.full((batch, heads, tokens), np.nan, np.float32)
    for call, arguments, written, options in (
            ("attend", (qkv, heads, p, o), (2, 3), {}), ("attend_gradient", (qkv, heads, p, do, dqkv), (4,), {}),
            ("attend_gradient", (qkv, heads, p, do, dqkv), (4,), {"again": True}),
            ("attend_tiled", (qkv, heads, sums, o), (2, 3), {}),
            ("attend_tiled_gradient", (qkv, heads, sums, o, do, dqkv), (5,), {})):
        both(kernels, call, *arguments, written=written, within=within, case=options, **options)
        getattr(NUMPY, call)(*arguments, **options)


def test_decompositions_and_means_of_matrices_are_the_same_formula(stand_in: Any) -> None:
    x = normal((12, 12), "fp32")
    a = x @ x.T
    both(stand_in, "trace", a, written=())
    for call in ("eigenvectors", "orthogonal_factor"):
        both(stand_in, call, a, np.zeros_like(a), case=call)
    both(stand_in, "symmetric_power", a, -0.25, 1e-4, np.zeros_like(a), within=1e-5)
    y, rows, columns = normal((40, 9), "fp32"), np.abs(normal(40, "fp32", 1)), np.abs(normal(9, "fp32", 2))
    both(stand_in, "mean_squares", y, np.zeros_like(rows), np.zeros_like(columns), written=(1, 2))
    both(stand_in, "divide_by_roots", y, rows, columns, np.zeros_like(y))


# -- and its bound, on a GPU ------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NARROW, "fp32"])
def test_gelu_is_within_a_few_steps_of_numpys(card: Any, name: str) -> None:
    """16 and 8 bits: one step of the format. fp32: 1e-6 of 1 + |x|, since 1 + tanh cancels for negative x."""
    x = all_codes(name) if name in NARROW else chance("fp32", 100_000)
    for exact in (False, True):
        found, expected = card.uploaded(np.zeros_like(x)), np.zeros_like(x)
        card.gelu(card.uploaded(x), found, exact=exact)
        NUMPY.gelu(x, expected, exact=exact)
        size = np.abs(x.astype(np.float64))
        difference = np.abs(arrays.to_host(found).astype(np.float64) - expected.astype(np.float64))
        allowed = (1 + size) * (1e-6 if name == "fp32" else 2.0**-zs.FORMATS[name].mantissa_bits)
        assert (difference <= allowed)[size < 100].all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp64"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 5), (256, 512, 128), (128, 4096, 64)])
def test_products_are_within_their_bound(card: Any, name: str, shape: tuple[int, int, int]) -> None:
    """k·2^-23·Σ|a·b| for the sum in float32, and half a step of the result's format for the one rounding."""
    m, k, n = shape
    a, b, bias = (normal(s, name, seed) for seed, s in enumerate(((m, k), (k, n), n)))
    wides = [x.astype(np.float64) for x in (a, b, bias)]
    right, size = wides[0] @ wides[1] + wides[2], np.abs(wides[0]) @ np.abs(wides[1]) + np.abs(wides[2])
    sums = (k + 1) * size * (2.0**-23 if name != "fp64" else 2.0**-51)
    for turned, out in product((False, True), (name, wide(name))):
        operands = [card.uploaded(x.T.copy()).T if turned else card.uploaded(x) for x in (a, b)]
        found = card.uploaded(zeros((m, n), out))
        card.matmul(*operands, bias=card.uploaded(bias), out=found)
        step = 2.0 ** -(52 if out == "fp64" else zs.FORMATS[out].mantissa_bits)
        assert (np.abs(arrays.to_host(found).astype(np.float64) - right) <= sums + step * (np.abs(right) + sums)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_rows_attention_and_loss_are_near_numpys(card: Any, name: str) -> None:
    """fp32: 2e-5 of the largest value; bf16: two of its steps there."""
    attention_is_near(card, normal((2, 100, 96), name), 4, 2e-5 if name == "fp32" else 2.0**-6)
    logits, targets = normal((300, 600), name, 2), np.random.default_rng(1).integers(-1, 600, 300)
    both(card, "softmax_loss", logits, targets, zeros(300, "fp32"), written=(), within=1e-6)
