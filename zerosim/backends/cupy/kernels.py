"""The kernels on one GPU, through CuPy: fused CUDA kernels at memory's speed, and CUDA's libraries for the rest.

What is promised, beside `NumpyKernels` on the same inputs (a NaN is a NaN, whatever its code):

- The same bits: casts, sums, products and quotients of elements, maxima, accumulation, gradients' blocks, ReLU,
  dropout, taking rows, every optimizer's step that is a function of elements.
- A GPU's own order of additions, which depends on the shape alone, and so is one for all stages, ranks and worlds: sums
  of rows, of columns and of squares, adding rows; means and variances of rows, softmax's sums.
- The same formula with CUDA's exp, log and tanh, each within 2 ULP of the exact value where NumPy's are within 4
  (CUDA C++ Programming Guide, "Mathematical Functions"): GELU, softmax.
- The library's order of additions: products of matrices (cuBLAS, 16-bit operands on tensor cores, sums in float32,
  one rounding at the end), those of attention too, and decompositions of matrices. A sum of k products is within
  k·2^-23·Σ|a·b| of the exact one, before the one rounding (tensor cores cut what they add off, which doubles float32's
  2^-24).

The order: k addends are written row by row into a table of ⌈k/32⌉ columns, but at most 2^20. Each column is added up
from its top, to a 0 that it begins with, and the columns' sums are such addends again, until one is left. So threads
that are neighbors read neighboring elements, and a float32 sum is within 31·⌈log₃₂ k⌉·2^-24·Σ|x|. Rows that are
added by class are sorted, those of one class in their own order, and cut into blocks of 32. In a block those of one
class are added from the first on; the sums of a block's first and last class are such rows again, until there is one
block.

Shapes: n elements; m rows, k inner, n columns in a product of matrices; M rows, C columns, V classes. All arrays are on
the device, where a line does not say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib.resources import files
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.backends.cupy.host import HostCopies, HostKernels, PinnedKernels
from zerosim.backends.cupy.tracing import (
    FP16,
    Operand,
    TracedScratch,
    as_row,
    copied,
    launch_typed,
    may_be_read_beside,
    row_for,
    run_fused,
    where_it_lies,
)
from zerosim.numerics.arrays import (
    Scratch,
    contiguous,
    copy_elements,
    on_device,
    spans,
    start,
    to_host,
    words,
)
from zerosim.numerics.blockwise import Operation, PerColumn, PerRow, nonfinite_codes
from zerosim.numerics.checks import (
    FP32,
    FP64,
    check_floating,
    check_operands,
    check_same_type,
    check_shapes,
    is_floating,
    split_divisor,
    work_type,
)
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels

Array = Any  # cupy.ndarray
BF16 = FORMATS["bf16"].dtype
POOL_NBYTES = 512  # CuPy's pool hands out multiples of it (cupy.cuda.memory, "round up to 512")
AT_ONCE = 16  # addends of one launch
DRAWN_AT_ONCE = 1 << 22  # words from the host's generator
HEIGHT = 32  # addends of a thread: few, so that there are many threads, and sums are short
WIDTH = 1 << 20  # threads of one sum at most: enough for any GPU, and their sums take 8 MB
_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.float32)

# -- CUDA texts --------------------------------------------------------------------------------------------------------


@cache
def _texts() -> dict[str, str]:
    """The kernels of kernels.cu, by name."""
    text = files("zerosim.backends.cupy").joinpath("kernels.cu").read_text("utf-8").replace("HEIGHT", str(HEIGHT))
    found = re.finditer(r'\nextern "C" __global__ void (\w+)\(.*?\n}\n', text, re.DOTALL)
    return {kernel[1]: kernel[0] for kernel in found}


def _launch(name: str, threads: int, arguments: Sequence[Any], **types: np.dtype[Any]) -> None:
    """Runs the kernel of this name."""
    launch_typed(_texts()[name], name, threads, arguments, **types)


def _launch_by_eight(name: str, n: int, arguments: Sequence[Any], **types: np.dtype[Any]) -> None:
    """Runs the kernel of this name, of which each thread takes eight neighbors of n elements; see ZS_EIGHT."""
    aligned = all(start(x) % (8 * x.dtype.itemsize) == 0 for x in arguments if on_device(x) and x.size == n)
    _launch(name, -(-n // 8), [*arguments, n, np.int32(aligned)], **types)


def _folding(inputs: str, addend: str, join: str = "zs_add", begin: str = "(Work)0") -> str:
    """A kernel that folds many addends into few; see ZS_FOLD in prelude.cu."""
    return (f'\nextern "C" __global__ void zs_fold({inputs}, To* out, u64 line, u64 step, u64 n) '
            f"{{ ZS_FOLD({addend}, {join}, {begin}) }}\n")


_SUMS = _folding("const Rest* x", "wide(x[i])")
_PRODUCTS = _folding("const Rest* x, const Rest* y", "zs_multiply(wide(x[i]), wide(y[i]))")
_SQUARES = _folding("const Rest* x, Quotient factor, Quotient divisor",
                    "zs_square((Work)zs_divide(zs_multiply((Quotient)wide(x[i]), factor), divisor))")
_MAXIMA = _folding("const Rest* x", "wide(x[i])", "zs_maximum", "(Work)-zs_value(0x7f800000u)")


def table_width(length: int) -> int:
    """The columns of the table into which so many addends are written."""
    return min(max(1, -(-length // HEIGHT)), WIDTH)


class CupyKernels(NumpyKernels):
    """All arithmetic on CuPy's arrays, on the current device and stream. What is called on them is NumpyKernels', its
    checks included; `cast_pack` and `fill` also take NumPy arrays, which they move to the device."""

    BLOCK = STRETCH = 1 << 24  # elements: a launch costs microseconds, and there is no cache to stay in
    STRIP, TILE, GROUP = 1024, 512, 1 << 26
    LOOKS_UP = False

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self.scratch_memory = Scratch(cupy.empty, self.slack_nbytes)
        self._numbers = HostKernels(self.BLOCK, table_width)
        self._host_copies, self._pinned = HostCopies(cupy), PinnedKernels(cupy, self.BLOCK, table_width)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array on the device that is not initialized; CuPy's pool aligns it to 512 bytes."""
        dtype = np.dtype(dtype)
        if dtype.type.__module__ == "numpy":
            return self.xp.empty(shape, dtype)
        # CuPy makes no arrays of 8-bit floats, and views them as such all the same.
        return self.xp.empty(shape, f"u{dtype.itemsize}").view(dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes of CuPy's pool that an array from `empty` takes beyond its own nbytes."""
        return -nbytes % POOL_NBYTES

    def serving(self, x: Any) -> NumpyKernels:
        """These for an array on the device; NumPy's for one on the host, as flags and counts that programs make."""
        return self if on_device(x) else self._numbers

    @property
    def on_host(self) -> NumpyKernels:
        """NumPy's, in pinned memory."""
        return self._pinned

    def copy_beside(self, source: Any, out: Any) -> Callable[[], None]:
        """Begins out = source, one on the device, the other on its host, on a stream of its own; returns what waits."""
        return self._host_copies.begin(source, out)

    def uploaded(self, x: np.ndarray) -> Array:
        """A NumPy array's elements on the device, bit for bit: the one place where users' data come to it."""
        return self.xp.asarray(words(np.ascontiguousarray(x))).view(x.dtype)

    # --- what formulas are written in -----------------------------------------------------------------------

    def computes_in(self, out: Array, work: np.dtype[Any]) -> bool:
        """True where values of the type ``work`` can be computed in the memory of ``out``."""
        return bool(out.dtype == work and out.flags.c_contiguous)

    def wide(self, name: str, x: Array, work: np.dtype[Any]) -> Array:
        """x in the type `work` and contiguous: itself where it is so, else a copy in the scratch memory of the name."""
        if self.computes_in(x, work):
            return x
        wide = self.room(name, x.shape, work)
        if x.dtype == work:
            copy_elements(x, wide)
        else:
            self.apply(_copy, [x], wide)
        return wide

    def round_into(self, wide: Array, out: Array) -> None:
        """out becomes `wide`, each value rounded once, unless they are one and the same."""
        if wide is not out:
            self.apply(_copy, [wide], out)

    def apply(self, function: Callable[..., object], inputs: Sequence[Array | PerRow | PerColumn | float], out: Array,
              work: np.dtype[Any] | None = None, *, grid: np.dtype[Any] | None = None, also: Array | None = None,
              with_scratch: bool = False) -> None:
        """out = function(*inputs, result) for every element, in one launch, of which a scratch memory is variables; as
        for NumPy's arrays."""
        if with_scratch:
            function = partial(_with_scratch, function)
        numbers = tuple(x if isinstance(x, int | float) else None for x in inputs)
        rest = [x for x in inputs if not isinstance(x, int | float)]
        if len(rest) < len(inputs):
            function = partial(_with_numbers, function, numbers)
        outs = [out] if also is None else [out, also]
        if grid is not None:
            function = partial(_on_grid, function, grid, -len(outs))
        with ExitStack() as stack:
            results = [where_it_lies(one) or Operand(stack.enter_context(self._row(one, f"gaps {i}")))
                       for i, one in enumerate(outs)]
            operands = [*[_operand(x, out, results[0].array) for x in rest], *results]
            run_fused(function, operands, work or work_type(*[x for x in (*rest, out) if on_device(x)]))

    @contextmanager
    def _row(self, out: Array, name: str = "gaps") -> Iterator[Array]:
        """The row to which the elements of `out` are written: a view, or memory that is copied to it."""
        row = out.reshape(-1) if out.flags.c_contiguous else self.room(name, out.size, out.dtype)
        yield row
        if not out.flags.c_contiguous:
            copy_elements(row.reshape(out.shape), out)

    def onto_grid(self, x: Array, dtype: np.dtype[Any]) -> None:
        """Rounds wide values to the grid of a narrower type, in place."""
        if dtype != x.dtype:
            self.apply(_copy, [x], x, grid=dtype)

    def scale_past(self, s: Array, scale: float, future: np.ndarray) -> None:
        """s (..., R, S)·scale, and -inf in the last columns where the mask ``future`` (R, R) says so, in place."""
        mask = np.zeros(s.shape[-2:], np.uint8)
        mask[:, -len(future) :] = future
        self.apply(_scaled_past, [s, scale, PerColumn(self.uploaded(mask))], s)

    def row_blocks(self, x: Array) -> Iterator[slice]:
        """The rows of x (M, …) that are taken together: all."""
        return spans(len(x), max(1, len(x)))

    def row_sums(self, x: Array) -> Array:
        """The sums along the last axis of x (..., n), in its type."""
        return self._of_rows(_SUMS, [x])

    def row_products(self, x: Array, y: Array) -> Array:
        """The sums along the last axis of x·y (..., n), each product rounded."""
        return self._of_rows(_PRODUCTS, [x, y])

    def row_maxima(self, x: Array) -> Array:
        """The largest values along the last axis of x (..., n); NaN where a row has one."""
        return self._of_rows(_MAXIMA, [x])

    def _of_rows(self, text: str, inputs: Sequence[Array]) -> Array:
        *lines, length = inputs[0].shape
        found = self.xp.empty(tuple(lines), inputs[0].dtype)
        self._fold(text, [contiguous(x) for x in inputs], found.size, length, 1, found, found.dtype)
        return found

    def add_column_sums(self, x: Array, total: Array) -> None:
        """total (C,) += the sum over the rows of x (M, C), in total's type."""
        added = self.room("column sums", total.shape, total.dtype)
        self._fold(_SUMS, [contiguous(x)], 1, len(x), x.shape[1], added, total.dtype)
        self.apply(np.add, [total, added], total)

    def _fold(self, text: str, given: list[Any], lines: int, length: int, columns: int, out: Array,
              work: np.dtype[Any], **types: np.dtype[Any]) -> None:
        """out (lines, columns) = what the text makes of arrays (lines, length, columns), in the order that is stated
        at the top; ``given`` is what the text takes, out may have any shape of so many elements."""
        for turn in count():
            rows = table_width(length)
            target = out if rows == 1 else self.room(f"sums {turn % 2}", lines * rows * columns, work)
            launch_typed(text, "zs_fold", target.size,
                         [*given, target, length * columns, rows * columns, target.size],
                         Rest=given[0].dtype, To=target.dtype, Work=work, **types)
            if rows == 1:
                return
            text, given, length = _MAXIMA if text is _MAXIMA else _SUMS, [target], rows

    def picked(self, x: Array, columns: Array) -> Array:
        """The element of each row of x (M, C) in the column given for it (M,), or 0 where that is below 0."""
        found = self.room("picked", len(x), x.dtype)
        _launch("zs_pick", len(x), [x, contiguous(columns), found, x.shape[1], len(x)], Work=x.dtype,
                Target=columns.dtype)
        return found

    # --- casts ----------------------------------------------------------------------------------------------

    def cast_pack(self, x: Any, out: Any) -> None:
        """out becomes x in out's type, rounded once to nearest even; equal shapes; types as NumpyKernels has them.

        One of the two may be a NumPy array: its elements are moved over, and the cast is made on the device.
        """
        check_shapes("cast_pack", x=x, out=out)
        if not on_device(x) and not on_device(out):
            self._numbers.cast_pack(x, out)
        elif not on_device(x):
            self.cast_pack(self.uploaded(x), out)
        elif not on_device(out):
            cast = x if x.dtype == out.dtype else self.empty(x.shape, out.dtype)
            if cast is not x:
                self.cast_pack(x, cast)
            np.copyto(out, to_host(cast))
        elif x.dtype == out.dtype:
            copy_elements(x if may_be_read_beside(x, out) else copied(x), out)
        else:
            check_floating("cast_pack", x=x, out=out)
            self.apply(_copy, [x], out)

    # --- one operation per element --------------------------------------------------------------------------

    def _add(self, a: Any, b: Any, out: Any) -> None:
        self.apply(np.add, [a, b], out, _sum_type(out.dtype))

    def _extremum(self, ufunc: np.ufunc, a: Any, b: Any, out: Any) -> None:
        self.apply(partial(_extreme, ufunc), [a, b], out, _sum_type(out.dtype))

    def _sum(self, addends: Sequence[Any], out: Any) -> None:
        work = _sum_type(out.dtype)
        total = out if len(addends) <= AT_ONCE else self.room("sum", out.shape, out.dtype)
        self.apply(partial(_added, out.dtype), addends[:AT_ONCE], total, work)
        for first in range(AT_ONCE, len(addends), AT_ONCE - 1):
            self.apply(partial(_added, out.dtype), [total, *addends[first : first + AT_ONCE - 1]], total, work)
        if total is not out:
            copy_elements(total, out)

    def run_blocks(self, function: Operation, inputs: Sequence[Any], out: Any, work: np.dtype[Any] | None = None, *,
                   in_place: bool = False, with_scratch: bool = False) -> None:
        """out = function(*inputs, result), in one launch."""
        self.apply(function, inputs, out, work, with_scratch=with_scratch)

    def _step(self, rows: list[Any], function: Callable[..., object], scratch: int) -> None:
        run_fused(function, [Operand(row) for row in rows], FP32, scratch)

    # --- what lets elements through, and dropout ------------------------------------------------------------

    def relu(self, x: Any, out: Any, bits: Any) -> None:
        """out = max(x, 0), +0 for -0, NaN for NaN; bits (⌈n/8⌉,) uint8 says which elements are let through."""
        check_operands("relu", x=x, out=out)
        with self._row(out) as row:
            _launch_by_eight("zs_relu", row.size, [row_for(x, row), row, bits], Rest=x.dtype, To=out.dtype,
                             Work=work_type(x, out))

    def relu_gradient(self, bits: Any, dy: Any, out: Any) -> None:
        """out = dy where its bit is set, else +0, even for a NaN; equal shapes and types."""
        check_shapes("relu_gradient", dy=dy, out=out)
        check_same_type("relu_gradient", dy, out)
        with self._row(out) as row:
            _launch_by_eight("zs_select", row.size, [bits, words(row_for(dy, row)), words(row)], Rest=words(row).dtype)

    def drop(self, x: Any, draw: Callable[[slice], Any], threshold: int, factor: float, out: Any) -> None:
        """out = x·factor where the word drawn for the element is at least the threshold, else +0, even for a NaN.

        ``draw(span)`` gives the words of some elements, (n,), from the host; equal shapes, n elements of any.
        """
        check_operands("drop", x=x, out=out)
        work = work_type(x, out)
        with self._row(out) as row:
            source = row_for(x, row)
            for span in spans(row.size, DRAWN_AT_ONCE):
                drawn, here = draw(span), row[span]
                _launch_by_eight("zs_drop", here.size,
                                 [source[span], drawn if on_device(drawn) else self.uploaded(drawn), here, threshold,
                                  np.asarray(factor, work)[()]], Rest=x.dtype, To=out.dtype, Work=work)

    # --- products, on tensor cores: operands in 16 bits as they rest, sums in float32, one rounding at the end ---
    # cuBLAS is asked for a float32 result (`gemmEx` with 16-bit inputs and a float32 output): asked for 16 bits it may
    # round partial sums too. The order of its additions is its own. fp8 operands are widened to fp16, which has all
    # their values.

    def widen(self, x: Any) -> Any:
        """x itself: matrix units take operands as they rest."""
        return x

    def _product(self, a: Any, b: Any, bias: Any, out: Any, work: np.dtype[Any]) -> None:
        product = self.room_for("product", out, work)
        if not a.size or not b.size:
            product[...] = 0
        elif work == FP64:
            self.xp.matmul(self.matrix("left", a, work), self.matrix("right", b, work), out=product)
        else:
            narrow = {FP16 if x.dtype.itemsize == 1 else x.dtype for x in (a, b)}
            common = narrow.pop() if len(narrow) == 1 else FP32  # cuBLAS takes one type for both
            self._gemm(self.matrix("left", a, common), self.matrix("right", b, common), product)
        if bias is None:
            self.round_into(product, out)
        else:
            self.apply(np.add, [product, PerColumn(bias)], out, work)

    def _gemm(self, a: Array, b: Array, product: Array) -> None:
        """product = a @ b; cuBLAS, which counts columns first, is asked for the transposed product bᵀ @ aᵀ."""
        cublas, runtime = self.xp.cuda.cublas, self.xp.cuda.runtime
        types = {FP32: runtime.CUDA_R_32F, FP16: runtime.CUDA_R_16F, BF16: runtime.CUDA_R_16BF}
        (m, k), n = a.shape, b.shape[1]
        (a_turned, a_step), (b_turned, b_step) = _lies(a), _lies(b)
        operations = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
        cublas.gemmEx(self.xp.cuda.Device().cublas_handle, operations[b_turned], operations[a_turned], n, m, k,
                      _ONE.ctypes.data, start(b), types[b.dtype], b_step, start(a), types[a.dtype], a_step,
                      _ZERO.ctypes.data, start(product), types[FP32], n, cublas.CUBLAS_COMPUTE_32F,
                      cublas.CUBLAS_GEMM_DEFAULT)  # fmt: skip

    # --- sums and tests -------------------------------------------------------------------------------------

    def all_finite(self, x: Any) -> bool:
        """True where no element of x is infinite or NaN."""
        if not on_device(x):
            return self._numbers.all_finite(x)
        constants = nonfinite_codes(x.dtype)
        return constants is None or not self._codes_from(x, int(constants[0]), constants[1])

    def count_nan(self, x: Any) -> int:
        """The number of elements that are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        if not on_device(x):
            return self._numbers.count_nan(x)
        constants = nonfinite_codes(x.dtype)
        if constants is None:
            return 0
        has_infinity = x.dtype == np.float64 or format_of(x.dtype).has_infinity
        return self._codes_from(x, int(constants[0]), constants[1] + has_infinity)

    def _codes_from(self, x: Array, mask: int, low: int) -> int:
        """The number of elements whose code, masked, is at least `low`."""
        row, found = words(as_row(x)), self.xp.zeros(1, np.uint32)
        _launch_by_eight("zs_codes_from", row.size, [row, found, mask, low], Rest=row.dtype)
        return int(to_host(found)[0])

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64."""
        check_floating("sum_of_squares", x=x)
        if not on_device(x):
            return self._numbers.sum_of_squares(x, divisor)
        row, total, work = as_row(x), self.room("square sum", 1, FP64), work_type(x)
        with np.errstate(all="ignore"):
            numbers = [np.asarray(number, work)[()] for number in split_divisor(divisor, work)]
        self._fold(_SQUARES, [row, *numbers], 1, row.size, 1, total, FP64, Quotient=work)
        return float(to_host(total)[0])

    def _column_sum(self, x: Any, out: Any, work: np.dtype[Any]) -> None:
        with self._row(out) as row:
            self._fold(_SUMS, [contiguous(x)], 1, len(x), x.shape[1], row, work)

    def largest_finite(self, x: Any) -> float:
        """The largest of the magnitudes in float32 that are finite; 0 where there is none."""
        magnitude = self.room("magnitude", x.shape, FP32)
        self.apply(_finite_magnitude, [x], magnitude, FP32)
        # By codes, which are in the order of magnitudes: CuPy's own maximum takes subnormal numbers for zeros.
        return float(to_host(words(magnitude).max()).view(np.float32)) if x.size else 0.0

    # --- rows -----------------------------------------------------------------------------------------------

    def take_rows(self, table: Any, rows: Any, out: Any) -> None:
        """out (M, C) = table[rows]: rows (M,) of whole numbers that the table (V, C), of out's type, has."""
        copy_elements(words(table)[rows].view(out.dtype), out)

    def add_rows(self, x: Any, rows: Any, out: Any) -> None:
        """out (V, C): for each v the sum of the x[i] with rows[i] == v, 0 where there is none; x (M, C), rows (M,)."""
        work, columns, order = work_type(x, out), x.shape[1], self.xp.argsort(rows, kind="stable").astype(np.int64)
        x, classes = contiguous(x), rows[order].astype(np.int64)
        with self._row(out) as row:
            words(row).fill(0)
            for turn in count():
                blocks = -(-len(order) // HEIGHT)
                parts = self.room(f"sums {turn % 2}", (2 * blocks, columns), work)
                of_parts = self.xp.empty(2 * blocks, np.int64)
                _launch("zs_add_rows", blocks * columns,
                        [x, order, classes, parts, of_parts, row, len(order), columns, blocks * columns],
                        Rest=x.dtype, To=out.dtype, Work=work)
                if blocks <= 1:
                    return
                x, classes, order = parts, of_parts, self.xp.arange(2 * blocks, dtype=np.int64)

    def softmax_loss_gradient(self, logits: Any, targets: Any, log_sums: Any, factor: float, out: Any) -> None:
        """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
        work = work_type(logits)
        with self._row(out) as row:
            _launch_by_eight("zs_loss_gradient", row.size,
                             [row_for(logits, row), contiguous(targets), contiguous(log_sums), row,
                              np.asarray(factor, work)[()], logits.shape[1]],
                             Rest=logits.dtype, To=out.dtype, Work=work, Target=targets.dtype, Sums=log_sums.dtype)


# -- Functions of elements, and how they are bound ---------------------------------------------------------------------


def _sum_type(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The type that sums and extremes of arrays of this type are computed in; None: float32, or float64 for its own.
    fp8 is computed in fp16, two elements at once, with float32's bits (see Half2 in prelude.cu)."""
    if not is_floating(dtype):
        return dtype
    return FP16 if dtype.itemsize == 1 else None


def _copy(x: Any, result: Any) -> None:
    np.copyto(result, x)


def _added(dtype: np.dtype[Any], *blocks: Any) -> None:
    """The sum of all blocks but the last, written to the last, each partial sum rounded to the type."""
    *addends, result = blocks
    np.copyto(result, addends[0])
    for place, x in enumerate(addends[1:], start=2):
        np.add(result, x, out=result)
        if place < len(addends):
            result.tape.rounded(result, dtype)


def _extreme(ufunc: np.ufunc, a: Any, b: Any, result: Any) -> None:
    ufunc(a, b, out=result)  # by name: by position NumPy deprecates it for maxima and minima


def _scaled_past(s: Any, scale: float, mask: Any, result: Any) -> None:
    np.multiply(s, scale, out=result)
    np.copyto(result, -np.inf, where=mask > 0)


def _finite_magnitude(x: Any, result: Any) -> None:
    """|x|, and 0 for infinities and NaN."""
    magnitude = np.abs(x)
    result[...] = 0
    np.copyto(result, magnitude, where=magnitude <= FORMATS["fp32"].largest)


def _with_scratch(function: Callable[..., object], *blocks: Any) -> None:
    """The function of a scratch memory and the blocks."""
    function(TracedScratch(blocks[-1].tape), *blocks)


def _with_numbers(function: Callable[..., object], numbers: tuple[float | None, ...], *blocks: Any) -> None:
    """The function of the blocks and, in their places among them, of numbers."""
    rest = iter(blocks)
    function(*[next(rest) if number is None else number for number in numbers], *rest)


def _on_grid(function: Callable[..., object], grid: np.dtype[Any], place: int, *blocks: Any) -> None:
    """The function, its result, which is in this place, rounded to the type's grid."""
    function(*blocks)
    blocks[place].tape.rounded(blocks[place], grid)


def _operand(x: Array | PerRow | PerColumn, out: Array, written: Array) -> Operand:
    """x as an operand of a fused kernel that writes ``out``, or in its place ``written``."""
    match x:
        case PerRow(values):
            return Operand(as_row(values), "every", max(1, out.shape[-1]))
        case PerColumn(values):
            return Operand(as_row(values), "cycle", max(1, values.size))
    found = where_it_lies(x)
    return found if found and may_be_read_beside(found.array, written) else Operand(row_for(x, written))


def _lies(x: Array) -> tuple[bool, int]:
    """True for a matrix that lies transposed, False for a contiguous one; and the elements from line to line."""
    turned = not x.flags.c_contiguous
    return turned, x.shape[0 if turned else 1]
