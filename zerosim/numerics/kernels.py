"""The loop of every optimizer's step: blocks of the arrays and scratch of the same length, in place; SGD and Adam.

Scalars are Python floats, that is double, up to the moment when they meet an array; 1 - β and 1 - β^t are therefore
correct to the last bit of a float32, which 1 - float32(β) is not (float32's 1 - 0.999 is 0.00099998713). Arrays are
float32; what is done to an element depends neither on the block it lies in nor on the block's length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import (
    BLOCK,
    SMALL,
    HostArray,
    NullArray,
    NullModule,
    Scratch,
    empty,
    flat,
    keep_freed_memory,
    put_back,
    row_of,
    slack_nbytes,
    spans,
)
from zerosim.numerics.blockwise import (
    Operation,
    cast_block,
    has_nonfinite,
    maximum,
    minimum,
    run_blocks,
    square_sum,
    sum_blocks,
    sum_rows,
    widened,
    widened_matrix,
)
from zerosim.numerics.checks import (
    FP32,
    FP64,
    check_floating,
    check_product,
    check_same_type,
    check_shapes,
    check_state,
    is_floating,
    split_divisor,
    work_type,
)
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.layer_kernels import ActivationKernels, AttentionKernels, RowKernels
from zerosim.numerics.rounding import round_to

_quiet = np.errstate(all="ignore")


class StepKernels:
    """The part of the kernels that takes optimizers' steps."""

    _scratch: Scratch

    @_quiet
    def step_blocks(self, function: Callable[..., object], *arrays: HostArray, scratch: int = 1) -> None:
        """Calls ``function(*blocks, *scratch)`` for each block of the arrays, which it may write to.

        All in float32, of one shape and without gaps; the function sees rows (b,), and scratch that holds whatever was
        in it. Raises ValueError for other arrays.
        """
        check_shapes("step_blocks", **{f"array {i}": x for i, x in enumerate(arrays)})
        for i, x in enumerate(arrays):
            if x.dtype != FP32 or not x.flags.c_contiguous:
                gaps = "" if x.flags.c_contiguous else ", with gaps or in another order"
                raise ValueError(f"step_blocks needs arrays of float32 in C order, got array {i} {x.shape} of type "
                                 f"{x.dtype.name}{gaps}")
        self._step([x.reshape(-1) for x in arrays], function, scratch)

    def _step(self, rows: list[HostArray], function: Callable[..., object], scratch: int) -> None:
        names = [f"step {i}" for i in range(scratch)]
        for span in spans(rows[0].size):
            blocks = [row[span] for row in rows]
            function(*blocks, *[self._scratch.array(name, blocks[0].size, FP32) for name in names])

    @_quiet
    def sgd_step(self, w: HostArray, g: HostArray, *, lr: float) -> None:
        """w -= lr·g, in place; w, g (n,) in float32."""
        check_state("sgd_step", w=w, g=g)

        def block(w: HostArray, g: HostArray, update: HostArray) -> None:
            np.multiply(g, lr, out=update)
            np.subtract(w, update, out=w)

        self._step([w, g], block, 1)

    @_quiet
    def adam_step(self, w: HostArray, m: HostArray, v: HostArray, g: HostArray, *, lr: float, beta1: float, beta2: float,
                  epsilon: float, step: int, weight_decay: float = 0.0) -> None:  # fmt: skip
        """One step of Adam (Kingma and Ba 2015, algorithm 1), or of AdamW (Loshchilov and Hutter 2019, algorithm 2)
        where there is weight decay; w, m, v in place; w, m, v, g (n,) in float32; `step` counts from 1."""
        check_state("adam_step", w=w, m=m, v=v, g=g)
        if step < 1:
            raise ValueError(f"adam_step counts steps from 1, got step {step}")
        correction1, correction2, decay = 1.0 - beta1**step, 1.0 - beta2**step, 1.0 - lr * weight_decay

        def block(w: HostArray, m: HostArray, v: HostArray, g: HostArray, update: HostArray, root: HostArray) -> None:
            move_average(m, g, beta1, update)
            move_square_average(v, g, beta2, update)
            np.divide(v, correction2, out=root)
            np.sqrt(root, out=root)
            np.add(root, epsilon, out=root)
            np.divide(m, correction1, out=update)
            np.multiply(update, lr, out=update)
            np.divide(update, root, out=update)
            if decay != 1.0:
                np.multiply(w, decay, out=w)
            np.subtract(w, update, out=w)

        self._step([w, m, v, g], block, 2)


def move_average(average: HostArray, x: HostArray, beta: float, scratch: HostArray) -> None:
    """average = β·average + (1-β)·x; x is left as it is, unless it is the scratch. Every operation rounds, in the order
    in which the line is read."""
    np.multiply(average, beta, out=average)
    np.multiply(x, 1.0 - beta, out=scratch)
    np.add(average, scratch, out=average)


def move_square_average(average: HostArray, x: HostArray, beta: float, scratch: HostArray) -> None:
    """average = β·average + (1-β)·(x·x); x is left as it is, unless it is the scratch."""
    np.multiply(average, beta, out=average)
    np.multiply(x, x, out=scratch)
    np.multiply(scratch, 1.0 - beta, out=scratch)
    np.add(average, scratch, out=average)


# -- Kernels for whole matrices: functions of symmetric ones, orthogonal factors, means over rows and columns --------
# Legend: a symmetric matrix A (m, m); a matrix X (r, c). Decompositions are LAPACK's, in float64, and rounded to float32
# once: the factors that optimizers keep are far too ill conditioned for float32. Sums are float64 too.


class MatrixKernels:
    """The part of the kernels that works on whole matrices. All arrays are float32."""

    _scratch: Scratch

    def trace(self, a: HostArray) -> float:
        """The sum of the diagonal of a (m, m), in float64."""
        check_square("trace", a)
        return float(np.trace(a, dtype=FP64))

    @_quiet
    def symmetric_power(self, a: HostArray, exponent: float, damping: float, out: HostArray) -> None:
        """out = (a + damping·I)^exponent for a symmetric a (m, m) without negative eigenvalues.

        Eigenvalues that rounding has made negative count as 0. Raises ValueError for what is not square or not finite.
        """
        values, vectors = self._eigen("symmetric_power", a)
        powers = (np.maximum(values, 0.0) + damping) ** exponent
        np.copyto(out, (vectors * powers) @ vectors.T, casting="same_kind")

    @_quiet
    def eigenvectors(self, a: HostArray, out: HostArray) -> None:
        """out (m, m) = the eigenvectors of a symmetric a (m, m) as columns, that of the largest eigenvalue first.

        Raises ValueError for what is not square or not finite.
        """
        np.copyto(out, self._eigen("eigenvectors", a)[1][:, ::-1], casting="same_kind")

    @_quiet
    def orthogonal_factor(self, a: HostArray, out: HostArray) -> None:
        """out (m, m) = Q, where a (m, m) = Q·R and R is upper triangular.

        Raises ValueError for what is not square or not finite.
        """
        np.copyto(out, np.linalg.qr(self._checked("orthogonal_factor", a))[0], casting="same_kind")

    def _eigen(self, call: str, a: HostArray) -> tuple[HostArray, HostArray]:
        values, vectors = np.linalg.eigh(self._checked(call, a))
        return values, vectors

    def _checked(self, call: str, a: HostArray) -> HostArray:
        check_square(call, a)
        row = a.reshape(-1)
        if any(has_nonfinite(row[span], self._scratch) for span in spans(row.size)):
            raise ValueError(f"{call} found inf or NaN in a matrix {a.shape}: sums of squares of gradients have left "
                             "float32's range; clip the gradients, or scale the loss less")
        return a.astype(FP64)

    @_quiet
    def mean_squares(self, x: HostArray, rows: HostArray, columns: HostArray) -> None:
        """rows (r,) and columns (c,) become the means of the squares of x (r, c) along the other side."""
        if x.ndim != 2 or rows.shape != x.shape[:1] or columns.shape != x.shape[1:]:
            raise ValueError(f"mean_squares takes x (r, c), rows (r,) and columns (c,), got {x.shape}, {rows.shape}, "
                             f"{columns.shape}")
        total = np.zeros(x.shape[1], FP64)
        for here, square in self._matrix_blocks(x):
            np.multiply(x[here], x[here], out=square)
            rows[here] = np.add.reduce(square, axis=1, dtype=FP64) / max(1, x.shape[1])
            total += np.add.reduce(square, axis=0, dtype=FP64)
        columns[...] = total / max(1, x.shape[0])

    @_quiet
    def divide_by_roots(self, x: HostArray, rows: HostArray, columns: HostArray, out: HostArray) -> None:
        """out = x/√V, where V = rows·columns/mean(rows) is the matrix (r, c) whose means along its sides those are."""
        mean = np.add.reduce(rows, dtype=FP64) / max(1, rows.size)
        shares = (rows / mean).astype(FP32)  # before the product, which would leave float32's range from below
        for here, root in self._matrix_blocks(x):
            np.multiply(shares[here, None], columns, out=root)
            np.sqrt(root, out=root)
            np.divide(x[here], root, out=out[here])

    def _matrix_blocks(self, x: HostArray) -> Iterator[tuple[slice, HostArray]]:
        """Some rows at a time, with scratch in their shape: at most BLOCK elements, but at least one row."""
        step = max(1, BLOCK // max(1, x.shape[1]))
        for start in range(0, x.shape[0], step):
            here = slice(start, min(start + step, x.shape[0]))
            shape = (here.stop - here.start, x.shape[1])
            yield here, self._scratch.array("matrix block", shape[0] * shape[1], FP32).reshape(shape)


def check_square(call: str, a: HostArray) -> None:
    """Raises ValueError for what is no square matrix."""
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"{call} takes a square matrix, got shape {a.shape}")


# ----------------------------------------------------------------------------------------------------
# Matrix products of fp8 operands, an experiment: each operand is scaled as a whole, so that its largest value fits
# Source: Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv:2209.05433), section 4: e4m3 for weights and
# activations, e5m2 for gradients, per-tensor scales. Real recipes take the scale from earlier steps (delayed scaling);
# here it is that of the tensor itself.


def scale_to(x: HostArray, fmt: Format | str) -> float:
    """The power of two by which x is multiplied: the largest that keeps every finite value in the format; 1 for zeros.

    A power of two moves exponents alone, so that what is rounded is the format's mantissa and nothing else. Infinities
    and NaN say nothing about the scale. It is 2^126 at most, so that it and its inverse are normal numbers of fp32: a
    tensor of nothing above 2^-127 times the format's largest number is not lifted all the way.
    """
    finite = np.abs(x.astype(np.float32, copy=False), dtype=np.float32)
    return scale_for(float(np.max(finite, where=np.isfinite(finite), initial=0.0)), format_of(fmt))


def scale_for(top: float, fmt: Format) -> float:
    """The scale of a tensor whose largest finite magnitude is `top`."""
    if top == 0:
        return 1.0
    _, exponent = math.frexp(fmt.largest / top)
    return math.ldexp(1.0, min(max(exponent - 1, -126), 126))


def quantized(x: HostArray, fmt: Format | str) -> npt.NDArray[np.float32]:
    """x as the matrix unit sees it: fp32 values that are the format's numbers divided by the scale; any shape.

    NaN stays NaN; an infinity stays one in e5m2 and becomes NaN in e4m3, which has none. Nothing finite overflows. What
    is less than the largest value times 2^-19 (e4m3) or 2^-33 (e5m2) becomes 0.
    """
    scale = np.float32(scale_to(x, fmt))
    with np.errstate(all="ignore"):
        scaled = np.multiply(x.astype(np.float32, copy=False), scale)
        return np.divide(round_to(scaled, fmt), scale)


# -- The arithmetic of a rank: every number rounded as the hardware rounds it, block by block ------------------------
# Low precision means what accelerators do: operands are widened to float32, one operation is made there, and its
# result is rounded once, to nearest even. The results depend on the operands alone: not on np.errstate, not on the
# length of a block, and not on whether `out` is one of the operands.
#
# Shapes: n elements; m rows, k inner, n columns in a product of matrices.


# Up to here the array types' own addition costs less than a block's two dozen calls.
SMALL_SUM = 4096  # elements

# A user's errstate decides about warnings of the user's own arithmetic. In here infinities and NaN are results.


class NumpyKernels(ActivationKernels, RowKernels, AttentionKernels, StepKernels, MatrixKernels):
    """All arithmetic on NumPy arrays. One instance has one scratch memory, so it serves one thread at a time."""

    BLOCK = BLOCK
    xp: Any = np

    def __init__(self) -> None:
        self._scratch = Scratch()
        keep_freed_memory()

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that the kernels hold between calls: some blocks, and the widened operands of the largest
        product so far."""
        return self._scratch.nbytes

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
        """An array that is not initialized; its data begins at a multiple of 64 bytes if there are 4096 or more."""
        return empty(shape, dtype)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> HostArray:
        """`count` elements of the kernels' own memory, (n,), not initialized, good until the next call of this name;
        it is part of `scratch_nbytes`."""
        return self._scratch.array(f"asked for: {name}", count, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes that the base of an array from `empty` holds beyond the array's own nbytes."""
        return slack_nbytes(nbytes)

    def serving(self, x: HostArray) -> NumpyKernels:
        """The kernels that compute with x: these."""
        return self

    # --- casts ----------------------------------------------------------------------------------------------

    @_quiet
    def cast_pack(self, x: HostArray, out: HostArray) -> None:
        """out becomes x in out's type, rounded once to nearest even; equal shapes.

        Any pair of float64, float32 and the formats' types; other types only to themselves. Too large a number
        becomes infinite, or NaN in e4m3.
        """
        check_shapes("cast_pack", x=x, out=out)
        if x.dtype == out.dtype or _is_small_cast(x, out):
            np.copyto(out, x, casting="unsafe")
            return
        check_floating("cast_pack", x=x, out=out)
        row = row_of(out)
        source = flat(x, row)
        for span in spans(row.size):
            cast_block(source[span], row[span], self._scratch)
        put_back(row, out)

    def fill(self, out: HostArray, values: Callable[[slice], HostArray]) -> None:
        """out (n,) becomes what ``values`` gives for each block's slice, rounded once to out's type."""
        for span in spans(out.size):
            self.cast_pack(values(span), out[span])

    # --- one operation per element --------------------------------------------------------------------------

    @_quiet
    def add_rounded(self, a: HostArray, b: HostArray, out: HostArray) -> None:
        """out = a + b: one addition in float32, rounded once (float64 and integers: their own addition).

        Equal shapes; a and out of one type; b is cast to it first, which rounds if b is wider.
        """
        check_shapes("add_rounded", a=a, b=b, out=out)
        check_same_type("add_rounded", a, out)
        b = self._recast(b, out.dtype)
        # In low precision too, the array types' own addition adds in float32 and rounds: slower, not other bits.
        if out.size <= SMALL_SUM or out.dtype in (FP32, FP64) or not is_floating(out.dtype):
            np.add(a, b, out=out)
        else:
            run_blocks(np.add, (a, b), out, self._scratch, in_place=True)

    @_quiet
    def sum_rounded(self, addends: Sequence[HostArray], out: HostArray) -> None:
        """out = ((first + second) + third) + ..., each sum as `add_rounded` makes it, in half its time; at least one
        addend, all of out's type and shape, `out` among them or not."""
        if not addends:
            raise ValueError("sum_rounded needs at least one addend, got none")
        check_shapes("sum_rounded", out=out, **{f"addend {i}": x for i, x in enumerate(addends)})
        for x in addends:
            check_same_type("sum_rounded", x, out)
        if out.size > SMALL_SUM and is_floating(out.dtype):
            sum_blocks(addends, out, self._scratch)
        else:
            out[...] = reduce(np.add, addends)

    @_quiet
    def maximum_rounded(self, a: HostArray, b: HostArray, out: HostArray) -> None:
        """out = the larger of a and b; NaN if either is; +0 is larger than -0. Types as in `add_rounded`."""
        self._extremum("maximum_rounded", np.maximum, maximum, a, b, out)

    @_quiet
    def minimum_rounded(self, a: HostArray, b: HostArray, out: HostArray) -> None:
        """out = the smaller of a and b; NaN if either is; -0 is smaller than +0. Types as in `add_rounded`."""
        self._extremum("minimum_rounded", np.minimum, minimum, a, b, out)

    def _extremum(self, name: str, integers: np.ufunc, floats: Operation, a: HostArray, b: HostArray, out: HostArray) -> None:
        check_shapes(name, a=a, b=b, out=out)
        check_same_type(name, a, out)
        b = self._recast(b, out.dtype)
        if is_floating(out.dtype):
            run_blocks(floats, (a, b), out, self._scratch)
        else:
            integers(a, b, out=out)

    @_quiet
    def multiply_rounded(self, x: HostArray, factor: float, out: HostArray) -> None:
        """out = x·factor, the factor and the product in float32 (float64 if x or out is), rounded once to out."""
        self._with_scalar("multiply_rounded", np.multiply, x, factor, out)

    @_quiet
    def divide_rounded(self, x: HostArray, divisor: float, out: HostArray) -> None:
        """out = x/divisor, the divisor and the quotient in float32 (float64 if x or out is), rounded once to out.

        A divisor beyond float32's range is none that overflows: see `split_divisor`.
        """
        factor, divisor = split_divisor(divisor, work_type(x, out))
        if factor == 1:
            self._with_scalar("divide_rounded", np.divide, x, divisor, out)
            return
        check_shapes("divide_rounded", x=x, out=out)
        check_floating("divide_rounded", x=x, out=out)
        first, second = (np.array(number, work_type(x, out)) for number in (factor, divisor))

        def divided(block: HostArray, result: HostArray) -> None:
            np.multiply(block, first, out=result)
            np.divide(result, second, out=result)

        self._run(divided, (x,), out, in_place=True)

    def _with_scalar(self, name: str, ufunc: np.ufunc, x: HostArray, scalar: float, out: HostArray) -> None:
        check_shapes(name, x=x, out=out)
        check_floating(name, x=x, out=out)
        operand = np.array(scalar, work_type(x, out))
        self._run(lambda block, result: ufunc(block, operand, out=result), (x,), out, in_place=True)

    @_quiet
    def accumulate(self, total: HostArray, x: HostArray) -> None:
        """total += x, widened to total's type, which is float32 or float64; equal shapes."""
        check_shapes("accumulate", total=total, x=x)
        check_floating("accumulate", total=total, x=x)
        if total.dtype not in (FP32, FP64):
            raise ValueError(
                f"accumulate adds up in float32 or float64, got a total of type {total.dtype.name}; "
                "add_rounded adds in low precision"
            )
        self._run(np.add, (total, x), total, work=total.dtype, in_place=True)

    @_quiet
    def elementwise(self, function: Operation, *inputs: HostArray, out: HostArray) -> None:
        """out = function of the inputs, element by element, in float32 (float64 if any array is), rounded once.

        `function(*blocks, result)` is called for each block of at most BLOCK elements, all (n,), and writes
        `result`, which shares no memory with the blocks. It must not call these kernels. Equal shapes.
        """
        check_shapes("elementwise", out=out, **{f"input {i}": x for i, x in enumerate(inputs)})
        check_floating("elementwise", out=out, **{f"input {i}": x for i, x in enumerate(inputs)})
        self._run(function, inputs, out)

    def _run(self, function: Operation, inputs: tuple[HostArray, ...], out: HostArray, **options: Any) -> None:
        """Every loop over elements goes through here."""
        run_blocks(function, inputs, out, self._scratch, **options)

    def _recast(self, x: HostArray, dtype: np.dtype[Any]) -> HostArray:
        if x.dtype == dtype:
            return x
        cast = np.empty(x.shape, dtype)
        self.cast_pack(x, cast)
        return cast

    # --- products, sums, tests ------------------------------------------------------------------------------

    @_quiet
    def matmul(self, a: HostArray, b: HostArray, *, bias: HostArray | None = None, out: HostArray) -> None:
        """out (m, n) = a (m, k) @ b (k, n) + bias (n,): widened, multiplied and summed in float32 by BLAS, the bias
        added in float32, rounded once to out's type; all in float64 if any array is."""
        check_product(a, b, bias, out)
        arrays = (a, b, out) if bias is None else (a, b, bias, out)
        work = work_type(*arrays)
        left, right = (
            widened_matrix("left", a, work, self._scratch),
            widened_matrix("right", b, work, self._scratch),
        )
        # Some BLAS kernels add in another order where they write through strides; the bits must not depend on them.
        direct = out.dtype == work and out.flags.c_contiguous
        product = out if direct else self._scratch.array("product", out.size, work).reshape(out.shape)
        np.matmul(left, right, out=product)
        if bias is not None:
            np.add(product, widened("bias", bias.reshape(-1), work, self._scratch), out=product)
        if not direct:
            self.cast_pack(product, out)

    @_quiet
    def widen(self, x: HostArray) -> HostArray:
        """x (m, n) in float32 (float64 as it is), for several products: itself, or a copy, good until the next call."""
        return widened_matrix("widened", x, work_type(x), self._scratch)

    @_quiet
    def quantized(self, x: HostArray, fmt: str) -> HostArray:
        """x as an 8-bit matrix unit sees it, with one scale for all of it: see `fp8`."""
        return quantized(x, fmt)

    @_quiet
    def column_sum(self, x: HostArray, out: HostArray) -> None:
        """out (n,) = sum of the rows of x (m, n), added one after the other in float32 (float64 if x or out is),
        rounded once; zeros where m is 0."""
        check_floating("column_sum", x=x, out=out)
        if x.ndim != 2 or out.shape != x.shape[1:]:
            raise ValueError(f"column_sum adds the rows of x (m, n) into out (n,), got {x.shape} and {out.shape}")
        work = work_type(x, out)
        total = self._scratch.array("column total", out.size, work)
        sum_rows(x, total, lambda rows: widened("rows", rows.reshape(-1), work, self._scratch).reshape(rows.shape))
        self.cast_pack(total, out)

    @_quiet
    def all_finite(self, x: HostArray) -> bool:
        """Whether no element of x is infinite or NaN."""
        row = x.reshape(-1)
        return not any(has_nonfinite(row[span], self._scratch) for span in spans(row.size))

    def count_nan(self, x: HostArray) -> int:
        """How many elements are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        return int(np.isnan(x).sum()) if is_floating(x.dtype.newbyteorder("=")) else 0

    @_quiet
    def sum_of_squares(self, x: HostArray, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64: one
        np.add.reduce per block of BLOCK elements, the blocks' sums added left to right."""
        check_floating("sum_of_squares", x=x)
        work = work_type(x)
        factor, divisor = split_divisor(divisor, work)
        row, total = x.reshape(-1), 0.0
        for span in spans(row.size):
            block = widened("input 0", row[span], work, self._scratch)
            total += square_sum(block, np.array(factor, work), np.array(divisor, work), self._scratch)
        return total

    # --- optimizer ------------------------------------------------------------------------------------------

    @_quiet
    def gradient_block(self, x: HostArray, divisor: float, factor: float, out: HostArray) -> None:
        """out = x/divisor, then ·factor unless that is 1, each rounded to out's float32; equal shapes."""
        self.divide_rounded(x, divisor, out)
        if factor != 1:
            self.multiply_rounded(out, factor, out)


def _is_small_cast(x: HostArray, out: HostArray) -> bool:
    """Whether the array types' own cast does, which rounds float32 once to each format."""
    floating = is_floating(x.dtype) and is_floating(out.dtype)
    return out.size <= SMALL and floating and FP32 in (x.dtype, out.dtype)


# -- Kernels without data: each call is one event that computes nothing, and all is finite, by declaration -----------

class NullKernels:
    """The kernels of a run without numbers: allocation gives null arrays, arithmetic does nothing, and everything
    is finite, by declaration."""

    BLOCK = sys.maxsize  # what is never computed is one block, however long
    scratch_nbytes = 0
    xp = NullModule()

    def __init__(self) -> None:
        self._numbers = NumpyKernels()

    def serving(self, x: Any) -> Any:
        """These for an array without data; NumPy's for one with data, as flags and counts that programs make."""
        return self if isinstance(x, NullArray) else self._numbers

    def fill(self, out: Any, values: Any) -> None: ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NullArray:
        return NullArray(shape, dtype)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> NullArray:
        return NullArray(count, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """As for real arrays, so that ledgers agree."""
        return slack_nbytes(nbytes)

    def cast_pack(self, x: Any, out: Any) -> None: ...
    def add_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def sum_rounded(self, addends: Any, out: Any) -> None: ...
    def maximum_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def minimum_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def multiply_rounded(self, x: Any, factor: float, out: Any) -> None: ...
    def divide_rounded(self, x: Any, divisor: float, out: Any) -> None: ...
    def accumulate(self, total: Any, x: Any) -> None: ...
    def matmul(self, a: Any, b: Any, *, bias: Any = None, out: Any) -> None: ...
    def elementwise(self, function: Any, *inputs: Any, out: Any) -> None: ...
    def column_sum(self, x: Any, out: Any) -> None: ...
    def gradient_block(self, x: Any, divisor: float, factor: float, out: Any) -> None: ...
    def normalize_rows(self, x: Any, w: Any, b: Any, epsilon: Any, mean: Any, rstd: Any, y: Any) -> None: ...
    def scale_rows(self, x: Any, w: Any, b: Any, mean: Any, rstd: Any, y: Any) -> None: ...

    def normalize_rows_gradient(self, x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any,
                                db: Any) -> None: ...  # fmt: skip

    def take_rows(self, table: Any, rows: Any, out: Any) -> None: ...
    def add_rows(self, x: Any, rows: Any, out: Any) -> None: ...
    def relu(self, x: Any, out: Any, bits: Any) -> None: ...
    def relu_gradient(self, bits: Any, dy: Any, out: Any) -> None: ...
    def gelu(self, x: Any, out: Any, *, exact: bool = False) -> None: ...
    def gelu_gradient(self, x: Any, dy: Any, out: Any, *, exact: bool = False) -> None: ...
    def drop(self, x: Any, draw: Any, threshold: int, factor: float, out: Any) -> None: ...
    def softmax_loss_gradient(self, logits: Any, targets: Any, log_sums: Any, factor: Any, out: Any) -> None: ...
    def attend(self, qkv: Any, heads: Any, p: Any, o: Any) -> None: ...
    def attend_gradient(self, qkv: Any, heads: Any, p: Any, do: Any, dqkv: Any, *, again: Any = False) -> None: ...
    def attend_tiled(self, qkv: Any, heads: Any, log_sums: Any, o: Any) -> None: ...
    def attend_tiled_gradient(self, qkv: Any, heads: Any, log_sums: Any, o: Any, do: Any, dqkv: Any) -> None: ...
    def step_blocks(self, function: Any, *arrays: Any, scratch: int = 1) -> None: ...
    def sgd_step(self, w: Any, g: Any, *, lr: float) -> None: ...

    def adam_step(self, w: Any, m: Any, v: Any, g: Any, *, lr: float, beta1: float, beta2: float,
                  epsilon: float, step: int, weight_decay: float = 0.0) -> None: ...  # fmt: skip

    def widen(self, x: Any) -> Any:
        """The same: no number becomes another."""
        return x

    def quantized(self, x: Any, fmt: str) -> Any:
        """The same: no number becomes another."""
        return x

    def index_range(self, x: Any) -> tuple[int, int]:
        """0 and 0: every index is that of the first, by declaration."""
        return 0, 0

    def count_targets(self, targets: Any) -> int:
        """All of them, by declaration."""
        return int(targets.size)

    def count_nan(self, x: Any) -> int:
        """0: everything is finite, by declaration."""
        return 0

    def symmetric_power(self, a: Any, exponent: float, damping: float, out: Any) -> None: ...
    def eigenvectors(self, a: Any, out: Any) -> None: ...
    def orthogonal_factor(self, a: Any, out: Any) -> None: ...
    def mean_squares(self, x: Any, rows: Any, columns: Any) -> None: ...
    def divide_by_roots(self, x: Any, rows: Any, columns: Any, out: Any) -> None: ...

    def trace(self, a: Any) -> float:
        """0: there is nothing to add."""
        return 0.0

    def softmax_loss(self, logits: Any, targets: Any, log_sums: Any) -> float:
        """0: there is nothing to add."""
        return 0.0

    def all_finite(self, x: Any) -> bool:
        return True

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """0: there is nothing to add."""
        return 0.0
