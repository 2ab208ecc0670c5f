"""The arithmetic of a rank: every number rounded as the hardware rounds it, block by block.

Low precision means what accelerators do: operands are widened to float32, one operation is made there, and its
result is rounded once, to nearest even. The results depend on the operands alone: not on np.errstate, not on the
length of a block, and not on whether `out` is one of the operands.

In order: averages that optimizers keep, whole matrices, fp8 operands; `NumpyKernels`, with these and the kernels of
layers as methods; `NullKernels`, for arrays without data.

Legend: n elements; m rows, k inner, n columns in a product of matrices.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics import layer_kernels
from zerosim.numerics.arrays import (
    BLOCK,
    WIDE_BLOCK,
    Array,
    Scratch,
    copy_elements,
    empty,
    in_blocks,
    keep_freed_memory,
    slack_nbytes,
    spans,
    to_host,
)
from zerosim.numerics.blockwise import (
    BlockKernels,
    Operation,
    PerColumn,
    PerRow,
    cast_block,
    casts_itself,
    extremum,
    nonfinite_codes,
    quiet,
)
from zerosim.numerics.checks import (
    FLOATING,
    FP32,
    FP64,
    check_floating,
    check_operands,
    check_product,
    check_same_type,
    check_shapes,
    is_floating,
    split_divisor,
    work_type,
)
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.null_arrays import NullArray, NullModule

# -- Averages that optimizers keep -------------------------------------------------------------------------------------
# Scalars are Python floats, that is double, up to the moment when they meet an array; 1 - β and 1 - β^t are therefore
# correct to the last bit of a float32, which 1 - float32(β) is not (float32's 1 - 0.999 is 0.00099998713).

def move_average(beta: float, average: Array, x: Array, scratch: Array) -> None:
    """average = β·average + (1-β)·x; x is left as it is, unless it is the scratch. Every operation rounds, in the order
    in which the line is read."""
    np.multiply(average, beta, out=average)
    np.multiply(x, 1.0 - beta, out=scratch)
    np.add(average, scratch, out=average)


def move_square_average(beta: float, average: Array, x: Array, scratch: Array) -> None:
    """average = β·average + (1-β)·(x·x); x is left as it is, unless it is the scratch."""
    np.multiply(x, x, out=scratch)
    move_average(beta, average, scratch, scratch)


def corrected_root(average: Array, correction: float, epsilon: float, out: Array) -> None:
    """out = √(average/correction) + ε, by which an averaged gradient is divided."""
    np.divide(average, correction, out=out)
    np.sqrt(out, out=out)
    np.add(out, epsilon, out=out)


def descend(rate: float, decay: float, w: Array, change: Array) -> None:
    """w = decay·w - rate·change; the change is overwritten."""
    np.multiply(change, rate, out=change)
    if decay != 1.0:
        np.multiply(w, decay, out=w)
    np.subtract(w, change, out=w)


# -- Whole matrices ----------------------------------------------------------------------------------------------------
# A symmetric matrix A (m, m); a matrix X (r, c); all float32. Decompositions are LAPACK's, in float64, and rounded to
# float32 once: the factors that optimizers keep are far too ill conditioned for float32. Sums are float64 too. On a
# device they are its library's; eigenvectors then differ by their signs, and in the space of equal eigenvalues.

def trace(k: BlockKernels, a: Array) -> float:
    """The sum of the diagonal of a (m, m), in float64."""
    check_square("trace", a)
    return float(np.add.reduce(to_host(a.diagonal().copy()).astype(FP64)))


def symmetric_power(k: NumpyKernels, a: Array, exponent: float, damping: float, out: Array) -> None:
    """out = (a + damping·I)^exponent for a symmetric a (m, m) without negative eigenvalues.

    Eigenvalues that rounding has made negative count as 0. Raises ValueError for what is not square or not finite.
    """
    values, vectors = k.xp.linalg.eigh(_checked(k, "symmetric_power", a))
    powers = k.uploaded((np.maximum(to_host(values), 0.0) + damping) ** exponent)
    scaled = k.empty(vectors.shape, FP64)
    k.apply(np.multiply, [vectors, PerColumn(powers)], scaled)
    k.round_into(k.xp.matmul(scaled, vectors.T), out)


def eigenvectors(k: NumpyKernels, a: Array, out: Array) -> None:
    """out (m, m) = the eigenvectors of a symmetric a (m, m) as columns, that of the largest eigenvalue first.

    Raises ValueError for what is not square or not finite.
    """
    k.round_into(k.xp.linalg.eigh(_checked(k, "eigenvectors", a))[1][:, ::-1], out)


def orthogonal_factor(k: NumpyKernels, a: Array, out: Array) -> None:
    """out (m, m) = Q, where a (m, m) = Q·R and R is upper triangular.

    Raises ValueError for what is not square or not finite.
    """
    k.round_into(k.xp.linalg.qr(_checked(k, "orthogonal_factor", a))[0], out)


def _checked(k: NumpyKernels, call: str, a: Array) -> Array:
    check_square(call, a)
    if not k.all_finite(a):
        raise ValueError(f"{call} found inf or NaN in a matrix {a.shape}: sums of squares of gradients have left "
                         "float32's range; clip the gradients, or scale the loss less")
    return a.astype(FP64)


def mean_squares(k: BlockKernels, x: Array, rows: Array, columns: Array) -> None:
    """rows (r,) and columns (c,) become the means of the squares of x (r, c) along the other side; the squares are
    float32, their sums float64."""
    if x.ndim != 2 or rows.shape != x.shape[:1] or columns.shape != x.shape[1:]:
        raise ValueError(f"mean_squares takes x (r, c), rows (r,) and columns (c,), got {x.shape}, {rows.shape}, "
                         f"{columns.shape}")
    total = k.xp.zeros(x.shape[1], FP64)
    for here in k.row_blocks(x):
        squares = k.room("matrix block", x[here].shape, FP64)
        k.apply(np.multiply, [x[here], x[here]], squares, FP32)
        k.apply(np.divide, [k.row_sums(squares), max(1, x.shape[1])], rows[here])
        k.add_column_sums(squares, total)
    k.apply(np.divide, [total, max(1, x.shape[0])], columns)


def divide_by_roots(k: BlockKernels, x: Array, rows: Array, columns: Array, out: Array) -> None:
    """out = x/√V, where V = rows·columns/mean(rows) is the matrix (r, c) whose means along its sides those are."""
    mean = float(np.add.reduce(to_host(rows).astype(FP64)) / max(1, rows.size))
    shares = k.room("shares", rows.shape, FP32)  # before the product, which would leave float32's range from below
    k.apply(np.divide, [rows, mean], shares, FP64)
    for here in k.row_blocks(x):
        k.apply(_over_root, [x[here], PerRow(shares[here]), PerColumn(columns)], out[here], FP32)


def _over_root(x: Array, share: Array, column: Array, result: Array) -> None:
    np.divide(x, np.sqrt(np.multiply(share, column)), out=result)


def check_square(call: str, a: Array) -> None:
    """Raises ValueError for what is no square matrix."""
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"{call} takes a square matrix, got shape {a.shape}")


# -- fp8 operands of matrix products, an experiment --------------------------------------------------------------------
# Each operand is scaled as a whole, so that its largest value fits.
# Source: Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv:2209.05433), section 4: e4m3 for weights and
# activations, e5m2 for gradients, per-tensor scales. Real recipes take the scale from earlier steps (delayed scaling);
# here it is that of the tensor itself.

def scale_to(top: float, fmt: Format) -> float:
    """The scale of a tensor whose largest finite magnitude is `top`: the largest power of two by which that one stays
    in the format; 1 for 0.

    A power of two moves exponents alone, so that what is rounded is the format's mantissa and nothing else. It is 2^126
    at most, so that it and its inverse are normal numbers of fp32: a tensor of nothing above 2^-127 times the format's
    largest number is not lifted all the way.
    """
    if top == 0:
        return 1.0
    _, exponent = math.frexp(fmt.largest / top)
    return math.ldexp(1.0, min(exponent - 1, 126))


def quantized(k: NumpyKernels, x: Array, fmt: str) -> Array:
    """x as the matrix unit sees it: fp32 values that are the format's numbers divided by the scale; any shape.

    NaN stays NaN; an infinity stays one in e5m2 and becomes NaN in e4m3, which has none. Nothing finite overflows. What
    is less than the largest value times 2^-19 (e4m3) or 2^-33 (e5m2) becomes 0.
    """
    row, values = format_of(fmt), k.empty(x.shape, FP32)
    scale = scale_to(k.largest_finite(x), row)
    k.apply(np.multiply, [x, scale], values, FP32, grid=row.dtype)
    k.apply(np.divide, [values, scale], values)
    return values


# -- The kernels of NumPy ----------------------------------------------------------------------------------------------

# Up to here the array types' own addition costs less than a block's two dozen calls.
SMALL_SUM = 4096  # elements
FILLED_AT_ONCE = 1 << 20  # elements at most, which come from the host


class NumpyKernels(BlockKernels):
    """All arithmetic on NumPy arrays. One instance serves any number of threads: each has scratch memory of its own."""

    empty, slack_nbytes = staticmethod(empty), staticmethod(slack_nbytes)
    STRETCH = WIDE_BLOCK  # elements at most that offload moves at once: whole blocks, so that no sum depends on it

    # --- of layers, of whole matrices, and of fp8 operands ----------------------------------------------------

    relu, relu_gradient = quiet(layer_kernels.relu), staticmethod(layer_kernels.relu_gradient)
    gelu, gelu_gradient = quiet(layer_kernels.gelu), quiet(layer_kernels.gelu_gradient)
    swiglu, swiglu_gradient = quiet(layer_kernels.swiglu), quiet(layer_kernels.swiglu_gradient)
    drop, rotate = quiet(layer_kernels.drop), quiet(layer_kernels.rotate)
    attend, attend_gradient = quiet(layer_kernels.attend), quiet(layer_kernels.attend_gradient)
    attend_tiled, attend_tiled_gradient = quiet(layer_kernels.attend_tiled), quiet(layer_kernels.attend_tiled_gradient)
    normalize_rows, scale_rows = quiet(layer_kernels.normalize_rows), quiet(layer_kernels.scale_rows)
    normalize_rows_gradient = quiet(layer_kernels.normalize_rows_gradient)
    take_rows, add_rows = staticmethod(layer_kernels.take_rows), quiet(layer_kernels.add_rows)
    index_range, count_targets = staticmethod(layer_kernels.index_range), staticmethod(layer_kernels.count_targets)
    softmax_loss, softmax_loss_gradient = quiet(layer_kernels.softmax_loss), quiet(layer_kernels.softmax_loss_gradient)
    trace, symmetric_power, eigenvectors = quiet(trace), quiet(symmetric_power), quiet(eigenvectors)
    orthogonal_factor, mean_squares = quiet(orthogonal_factor), quiet(mean_squares)
    divide_by_roots, quantized = quiet(divide_by_roots), quiet(quantized)

    def __init__(self) -> None:
        self.scratch_memory = Scratch()
        keep_freed_memory()

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that the kernels hold between calls in this thread: some blocks, and the widened operands of the
        largest product so far."""
        return self.scratch_memory.nbytes

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """`count` elements of the kernels' own memory, (n,), not initialized, good until the next call of this name;
        it is part of `scratch_nbytes`."""
        return self.scratch_memory.array(f"asked for: {name}", count, dtype)

    def serving(self, x: Array) -> NumpyKernels:
        """The kernels that compute with x: these."""
        return self

    @property
    def on_host(self) -> NumpyKernels:
        """The kernels of the host, and its memory, where state rests that is not on the device (offload): these."""
        return self

    def copy_beside(self, source: Array, out: Array) -> Callable[[], None]:
        """Begins out = source, one on the device, the other on its host, beside what is computed; returns what waits
        for it. Here both are one."""
        copy_elements(source, out)
        return do_nothing

    # --- casts ----------------------------------------------------------------------------------------------

    @quiet
    def cast_pack(self, x: Array, out: Array) -> None:
        """out becomes x in out's type, rounded once to nearest even; equal shapes.

        Any pair of float64, float32 and the formats' types; other types only to themselves. Too large a number
        becomes infinite, or NaN in e4m3.
        """
        check_shapes("cast_pack", x=x, out=out)
        if casts_itself(x, out):
            # NumPy copies within one row in an order that is right for equal steps alone.
            safe = x.strides == out.strides or not np.may_share_memory(x, out)
            np.copyto(out, x if safe else x.copy(), casting="unsafe")
            return
        check_floating("cast_pack", x=x, out=out)
        for here, block in in_blocks(out, x):
            cast_block(block, here, self.scratch_memory)

    def fill(self, out: Array, values: Callable[[slice], Array]) -> None:
        """out (n,) becomes what ``values`` gives for each block's slice, rounded once to out's type."""
        for span in spans(out.size, min(self.BLOCK, FILLED_AT_ONCE)):
            self.cast_pack(values(span), out[span])

    # --- one operation per element --------------------------------------------------------------------------

    @quiet
    def add_rounded(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b: one addition in float32, rounded once (float64 and integers: their own addition).

        Equal shapes; a and out of one type; b is cast to it first, which rounds if b is wider.
        """
        self._add(a, self._fitting("add_rounded", a, b, out), out)

    def _add(self, a: Array, b: Array, out: Array) -> None:
        # In low precision too, the array types' own addition adds in float32 and rounds: slower, not other bits.
        if out.size <= SMALL_SUM or out.dtype in (FP32, FP64) or not is_floating(out.dtype):
            np.add(a, b, out=out)
        else:
            self.run_blocks(np.add, (a, b), out, in_place=True)

    @quiet
    def sum_rounded(self, addends: Sequence[Array], out: Array) -> None:
        """out = ((first + second) + third) + ..., each sum as `add_rounded` makes it, on a device in one launch; at
        least one addend, all of out's type and shape, `out` among them or not."""
        if not addends:
            raise ValueError("sum_rounded needs at least one addend, got none")
        for x in addends:
            if x.shape != out.shape or x.dtype != out.dtype:
                check_shapes("sum_rounded", out=out, **{f"addend {i}": each for i, each in enumerate(addends)})
                check_same_type("sum_rounded", x, out)
        self._sum(addends, out)

    def _sum(self, addends: Sequence[Array], out: Array) -> None:
        total = addends[0].copy()  # not `out`, which may be an addend
        for x in addends[1:]:
            self._add(total, x, total)
        copy_elements(total, out)

    @quiet
    def maximum_rounded(self, a: Array, b: Array, out: Array) -> None:
        """out = the larger of a and b; NaN if either is; +0 is larger than -0. Types as in `add_rounded`."""
        self._extremum(np.maximum, a, self._fitting("maximum_rounded", a, b, out), out)

    @quiet
    def minimum_rounded(self, a: Array, b: Array, out: Array) -> None:
        """out = the smaller of a and b; NaN if either is; -0 is smaller than +0. Types as in `add_rounded`."""
        self._extremum(np.minimum, a, self._fitting("minimum_rounded", a, b, out), out)

    def _extremum(self, ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
        if is_floating(out.dtype):
            self.run_blocks(partial(extremum, ufunc), (a, b), out)
        else:
            ufunc(a, b, out=out)

    def _fitting(self, name: str, a: Array, b: Array, out: Array) -> Array:
        """b in out's type. Raises ValueError for shapes that differ, and for an `a` of another type."""
        check_shapes(name, a=a, b=b, out=out)
        check_same_type(name, a, out)
        if b.dtype == out.dtype:
            return b
        cast = self.empty(b.shape, out.dtype)
        self.cast_pack(b, cast)
        return cast

    @quiet
    def multiply_rounded(self, x: Array, factor: float, out: Array) -> None:
        """out = x·factor, the factor and the product in float32 (float64 if x or out is), rounded once to out."""
        check_operands("multiply_rounded", x=x, out=out)
        number = np.asarray(factor, work_type(x, out))[()]
        self.run_blocks(partial(np.multiply, number), (x,), out, in_place=True)

    @quiet
    def divide_rounded(self, x: Array, divisor: float, out: Array) -> None:
        """out = x/divisor, the divisor and the quotient in float32 (float64 if x or out is), rounded once to out.

        The divisor itself may lie beyond float32's range: see `split_divisor`.
        """
        check_operands("divide_rounded", x=x, out=out)
        self.run_blocks(_division_by(divisor, work_type(x, out)), (x,), out, in_place=True)

    @quiet
    def elementwise(self, function: Operation, *inputs: Array, out: Array) -> None:
        """out = function of the inputs, element by element, in float32 (float64 if any array is), rounded once.

        `function(*blocks, result)` is called for each block of at most BLOCK elements, all (n,), and writes
        `result`, which shares no memory with the blocks. It must not call these kernels. Equal shapes.
        """
        for x in (out, *inputs):
            if x.shape != out.shape or x.dtype not in FLOATING:
                check_operands("elementwise", out=out, **{f"input {i}": each for i, each in enumerate(inputs)})
        self.run_blocks(function, inputs, out)

    # --- products, sums, tests ------------------------------------------------------------------------------

    @quiet
    def matmul(self, a: Array, b: Array, *, bias: Array | None = None, out: Array) -> None:
        """out (m, n) = a (m, k) @ b (k, n) + bias (n,): widened, multiplied and summed in float32 by BLAS, the bias
        added in float32, rounded once to out's type; all in float64 if any array is."""
        check_product(a, b, bias, out)
        self._product(a, b, bias, out, work_type(a, b, out) if bias is None else work_type(a, b, bias, out))

    def _product(self, a: Array, b: Array, bias: Array | None, out: Array, work: np.dtype[Any]) -> None:
        left, right = self.matrix("left", a, work), self.matrix("right", b, work)
        # Some BLAS kernels add in another order where they write through strides; the bits must not depend on them.
        direct = out.dtype == work and out.flags.c_contiguous
        product = out if direct else self.room("product", out.shape, work)
        np.matmul(left, right, out=product)
        if bias is not None:
            np.add(product, self.wide("bias", bias, work), out=product)
        if not direct:
            self.cast_pack(product, out)

    @quiet
    def widen(self, x: Array) -> Array:
        """x (m, n) in float32 (float64 as it is), for several products: itself, or a copy, good until the next call."""
        return self.matrix("widened", x, work_type(x))

    @quiet
    def column_sum(self, x: Array, out: Array) -> None:
        """out (n,) = sum of the rows of x (m, n), added one after the other in float32 (float64 if x or out is),
        rounded once; zeros where m is 0."""
        check_floating("column_sum", x=x, out=out)
        if x.ndim != 2 or out.shape != x.shape[1:]:
            raise ValueError(f"column_sum adds the rows of x (m, n) into out (n,), got {x.shape} and {out.shape}")
        self._column_sum(x, out, work_type(x, out))

    def _column_sum(self, x: Array, out: Array, work: np.dtype[Any]) -> None:
        # NumPy adds the rows of contiguous rows in order, those of contiguous columns pairwise, as it does one column.
        m, n = x.shape
        rows_at_once = max(1, BLOCK // max(1, n)) if x.dtype != work else max(1, m)
        total = self.room("column total", n, work)
        total[...] = 0
        for here in spans(m, rows_at_once):
            rows = self.wide("rows", np.ascontiguousarray(x[here]), work)
            if here.start > 0:
                np.add(total, rows[0], out=rows[0])
            if n == 1:
                total[...] = np.add.accumulate(rows[:, 0])[-1]
            else:
                np.add.reduce(rows, axis=0, out=total)
        np.add(total, 0, out=total)  # whether NumPy's sum of negative zeros is negative depends on its version
        self.round_into(total, out)

    @quiet
    def all_finite(self, x: Array) -> bool:
        """True if no element of x is infinite or NaN: without the sign, their codes are the largest there are."""
        constants = nonfinite_codes(x.dtype)
        if constants is None:
            return True
        (mask, first), row = constants, x.reshape(-1)
        for span in spans(row.size):
            codes = row[span].view(mask.dtype)
            magnitudes = np.bitwise_and(codes, mask, out=self.room("magnitude code", codes.size, mask.dtype))
            if np.maximum.reduce(magnitudes) >= first:
                return False
        return True

    def count_nan(self, x: Array) -> int:
        """The number of elements that are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        return int(np.count_nonzero(np.isnan(x))) if is_floating(x.dtype.newbyteorder("=")) else 0

    def largest_finite(self, x: Array) -> float:
        """The largest of the magnitudes in float32 that are finite; 0 where there is none."""
        magnitude = np.abs(x.astype(FP32, copy=False), dtype=FP32)
        return float(np.max(magnitude, where=np.isfinite(magnitude), initial=0.0))

    @quiet
    def sum_of_squares(self, x: Array, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64: one
        np.add.reduce per block of BLOCK elements, the blocks' sums added left to right."""
        check_floating("sum_of_squares", x=x)
        work, row, total = work_type(x), x.reshape(-1), 0.0
        divide = _division_by(divisor, work)
        for span in spans(row.size):
            block = self.wide("input 0", row[span], work)
            quotient, square = self.room("quotient", block.size, work), self.room("square", block.size, FP64)
            divide(block, quotient)
            np.copyto(square, quotient)
            np.multiply(square, square, out=square)
            total += float(np.add.reduce(square))
        return total

    # --- steps of optimizers --------------------------------------------------------------------------------

    @quiet
    def step_blocks(self, function: Callable[..., object], *arrays: Array, scratch: int = 1) -> None:
        """Calls ``function(*blocks, *scratch)`` for each block of the arrays, which it may write to.

        All in float32, of one shape and without gaps; the function sees rows (b,), and scratch that holds whatever was
        in it. Raises ValueError for other arrays.
        """
        for i, x in enumerate(arrays):
            if x.shape != arrays[0].shape:
                check_shapes("step_blocks", **{f"array {i}": each for i, each in enumerate(arrays)})
            if x.dtype != FP32 or not x.flags.c_contiguous:
                gaps = "" if x.flags.c_contiguous else ", with gaps or in another order"
                raise ValueError(f"step_blocks needs arrays of float32 in C order, got array {i} {x.shape} of type "
                                 f"{x.dtype.name}{gaps}")
        self._step([x.reshape(-1) for x in arrays], function, scratch)

    def _step(self, rows: list[Array], function: Callable[..., object], scratch: int) -> None:
        names = [f"step {i}" for i in range(scratch)]
        for span in spans(rows[0].size, WIDE_BLOCK):  # wide: threads hand Python's lock over less often
            blocks = [row[span] for row in rows]
            function(*blocks, *[self.room(name, blocks[0].size, FP32) for name in names])

    @quiet
    def gradient_block(self, x: Array, divisor: float, factor: float, out: Array) -> None:
        """out = x/divisor, then ·factor unless that is 1, each in float32 (float64 if x is); out float32, equal shapes.
        """
        check_operands("gradient_block", x=x, out=out)
        work = work_type(x, out)
        scaled = partial(_scaled, _division_by(divisor, work), np.asarray(factor, work)[()])
        self.run_blocks(scaled, (x,), out, work, in_place=True)


def _division_by(divisor: float, work: np.dtype[Any]) -> Operation:
    """result = block/divisor in a type, also where the divisor lies beyond its range."""
    return partial(_divided, *[np.asarray(number, work)[()] for number in split_divisor(divisor, work)])


def _divided(factor: Any, divisor: Any, block: Array, result: Array) -> None:
    """result = block·factor/divisor, of a divisor that `split_divisor` has split."""
    if factor != 1:
        np.multiply(block, factor, out=result)
    np.divide(block if factor == 1 else result, divisor, out=result)


def _scaled(divide: Operation, factor: Any, block: Array, result: Array) -> None:
    divide(block, result)
    if factor != 1:
        np.multiply(result, factor, out=result)


# -- The kernels of arrays without data --------------------------------------------------------------------------------

def do_nothing(*arguments: Any, **options: Any) -> None:
    """A kernel without data, or a note of what was computed that nobody reads."""


# Every index is that of the first row, and every sum 0.
DECLARED = {"all_finite": True, "count_nan": 0, "index_range": (0, 0), "trace": 0.0, "softmax_loss": 0.0,
            "sum_of_squares": 0.0, "copy_beside": do_nothing}


class NullKernels:
    """The kernels of a run without numbers: allocation gives null arrays, a kernel that answers gives what is DECLARED,
    and every other kernel of `NumpyKernels` does nothing."""

    BLOCK, STRETCH = sys.maxsize, NumpyKernels.STRETCH  # what is never computed is one block, however long
    scratch_nbytes = 0
    xp = NullModule()
    slack_nbytes = staticmethod(slack_nbytes)  # as for real arrays, so that memories agree

    def __init__(self) -> None:
        self._numbers = NumpyKernels()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not hasattr(NumpyKernels, name):
            raise AttributeError(f"there is no kernel {name!r}")
        return partial(_answer, DECLARED[name]) if name in DECLARED else do_nothing

    def serving(self, x: Any) -> Any:
        """These for an array without data; NumPy's for one with data, as flags and counts that programs make."""
        return self if isinstance(x, NullArray) else self._numbers

    @property
    def on_host(self) -> Any:
        """These."""
        return self

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NullArray:
        return NullArray(shape, dtype)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> NullArray:
        return NullArray(count, dtype)

    def widen(self, x: Any) -> Any:
        """The same: no number becomes another."""
        return x

    def quantized(self, x: Any, fmt: str) -> Any:
        """The same: no number becomes another."""
        return x

    def count_targets(self, targets: Any) -> int:
        """All of them, by declaration."""
        return int(targets.size)


def _answer(declared: Any, *arguments: Any, **options: Any) -> Any:
    return declared
