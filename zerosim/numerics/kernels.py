"""The arithmetic of a rank: every number rounded as the hardware rounds it, block by block.

Low precision means what accelerators do: operands are widened to float32, one operation is made there, and its
result is rounded once, to nearest even. The results depend on the operands alone: not on np.errstate, not on the
length of a block, and not on whether `out` is one of the operands.

Shapes: n elements; m rows, k inner, n columns in a product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.activation_kernels import ActivationKernels
from zerosim.numerics.attention_kernels import AttentionKernels
from zerosim.numerics.blocks import (
    BLOCK,
    SMALL,
    Array,
    Scratch,
    empty,
    flat,
    keep_freed_memory,
    put_back,
    row_of,
    slack_nbytes,
    spans,
)
from zerosim.numerics.blockwise import Operation, cast_block, run_blocks, sum_blocks, widened, widened_matrix
from zerosim.numerics.checks import (
    FP32,
    FP64,
    check_floating,
    check_product,
    check_same_type,
    check_shapes,
    is_floating,
    split_divisor,
    work_type,
)
from zerosim.numerics.extrema import maximum, minimum
from zerosim.numerics.fp8 import quantized
from zerosim.numerics.matrix_kernels import MatrixKernels
from zerosim.numerics.reductions import has_nonfinite, square_sum, sum_rows
from zerosim.numerics.row_kernels import RowKernels
from zerosim.numerics.step_kernels import StepKernels

# Up to here the array types' own addition costs less than a block's two dozen calls.
SMALL_SUM = 4096  # elements

# A user's errstate decides about warnings of the user's own arithmetic. In here infinities and NaN are results.
_quiet = np.errstate(all="ignore")


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

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array that is not initialized; its data begins at a multiple of 64 bytes if there are 4096 or more."""
        return empty(shape, dtype)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """`count` elements of the kernels' own memory, (n,), not initialized, good until the next call of this name;
        it is part of `scratch_nbytes`."""
        return self._scratch.array(f"asked for: {name}", count, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes that the base of an array from `empty` holds beyond the array's own nbytes."""
        return slack_nbytes(nbytes)

    def serving(self, x: Array) -> NumpyKernels:
        """The kernels that compute with x: these."""
        return self

    # --- casts ----------------------------------------------------------------------------------------------

    @_quiet
    def cast_pack(self, x: Array, out: Array) -> None:
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

    def fill(self, out: Array, values: Callable[[slice], Array]) -> None:
        """out (n,) becomes what ``values`` gives for each block's slice, rounded once to out's type."""
        for span in spans(out.size):
            self.cast_pack(values(span), out[span])

    # --- one operation per element --------------------------------------------------------------------------

    @_quiet
    def add_rounded(self, a: Array, b: Array, out: Array) -> None:
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
    def sum_rounded(self, addends: Sequence[Array], out: Array) -> None:
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
    def maximum_rounded(self, a: Array, b: Array, out: Array) -> None:
        """out = the larger of a and b; NaN if either is; +0 is larger than -0. Types as in `add_rounded`."""
        self._extremum("maximum_rounded", np.maximum, maximum, a, b, out)

    @_quiet
    def minimum_rounded(self, a: Array, b: Array, out: Array) -> None:
        """out = the smaller of a and b; NaN if either is; -0 is smaller than +0. Types as in `add_rounded`."""
        self._extremum("minimum_rounded", np.minimum, minimum, a, b, out)

    def _extremum(self, name: str, integers: np.ufunc, floats: Operation, a: Array, b: Array, out: Array) -> None:
        check_shapes(name, a=a, b=b, out=out)
        check_same_type(name, a, out)
        b = self._recast(b, out.dtype)
        if is_floating(out.dtype):
            run_blocks(floats, (a, b), out, self._scratch)
        else:
            integers(a, b, out=out)

    @_quiet
    def multiply_rounded(self, x: Array, factor: float, out: Array) -> None:
        """out = x·factor, the factor and the product in float32 (float64 if x or out is), rounded once to out."""
        self._with_scalar("multiply_rounded", np.multiply, x, factor, out)

    @_quiet
    def divide_rounded(self, x: Array, divisor: float, out: Array) -> None:
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

        def divided(block: Array, result: Array) -> None:
            np.multiply(block, first, out=result)
            np.divide(result, second, out=result)

        self._run(divided, (x,), out, in_place=True)

    def _with_scalar(self, name: str, ufunc: np.ufunc, x: Array, scalar: float, out: Array) -> None:
        check_shapes(name, x=x, out=out)
        check_floating(name, x=x, out=out)
        operand = np.array(scalar, work_type(x, out))
        self._run(lambda block, result: ufunc(block, operand, out=result), (x,), out, in_place=True)

    @_quiet
    def accumulate(self, total: Array, x: Array) -> None:
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
    def elementwise(self, function: Operation, *inputs: Array, out: Array) -> None:
        """out = function of the inputs, element by element, in float32 (float64 if any array is), rounded once.

        `function(*blocks, result)` is called for each block of at most BLOCK elements, all (n,), and writes
        `result`, which shares no memory with the blocks. It must not call these kernels. Equal shapes.
        """
        check_shapes("elementwise", out=out, **{f"input {i}": x for i, x in enumerate(inputs)})
        check_floating("elementwise", out=out, **{f"input {i}": x for i, x in enumerate(inputs)})
        self._run(function, inputs, out)

    def _run(self, function: Operation, inputs: tuple[Array, ...], out: Array, **options: Any) -> None:
        """Every loop over elements goes through here."""
        run_blocks(function, inputs, out, self._scratch, **options)

    def _recast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        if x.dtype == dtype:
            return x
        cast = np.empty(x.shape, dtype)
        self.cast_pack(x, cast)
        return cast

    # --- products, sums, tests ------------------------------------------------------------------------------

    @_quiet
    def matmul(self, a: Array, b: Array, *, bias: Array | None = None, out: Array) -> None:
        """out (m, n) = a (m, k) @ b (k, n) + bias (n,): widened, multiplied and summed in float32 by BLAS, the bias
        added in float32, rounded once to out's type; all in float64 if any array is."""
        check_product(a, b, bias, out)
        arrays = (a, b, out) if bias is None else (a, b, bias, out)
        work = work_type(*arrays)
        left, right = (
            widened_matrix("left", a, work, self._scratch),
            widened_matrix("right", b, work, self._scratch),
        )
        direct = out.dtype == work
        product = out if direct else self._scratch.array("product", out.size, work).reshape(out.shape)
        np.matmul(left, right, out=product)
        if bias is not None:
            np.add(product, widened("bias", bias.reshape(-1), work, self._scratch), out=product)
        if not direct:
            self.cast_pack(product, out)

    @_quiet
    def widen(self, x: Array) -> Array:
        """x (m, n) in float32 (float64 as it is), for several products: itself, or a copy, good until the next call."""
        return widened_matrix("widened", x, work_type(x), self._scratch)

    @_quiet
    def quantized(self, x: Array, fmt: str) -> Array:
        """x as an 8-bit matrix unit sees it, with one scale for all of it: see `fp8`."""
        return quantized(x, fmt)

    @_quiet
    def column_sum(self, x: Array, out: Array) -> None:
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
    def all_finite(self, x: Array) -> bool:
        """Whether no element of x is infinite or NaN."""
        row = x.reshape(-1)
        return not any(has_nonfinite(row[span], self._scratch) for span in spans(row.size))

    def count_nan(self, x: Array) -> int:
        """How many elements are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        return int(np.isnan(x).sum()) if is_floating(x.dtype.newbyteorder("=")) else 0

    @_quiet
    def sum_of_squares(self, x: Array, divisor: float = 1.0) -> float:
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
    def gradient_block(self, x: Array, divisor: float, factor: float, out: Array) -> None:
        """out = x/divisor, then ·factor unless that is 1, each rounded to out's float32; equal shapes."""
        self.divide_rounded(x, divisor, out)
        if factor != 1:
            self.multiply_rounded(out, factor, out)


def _is_small_cast(x: Array, out: Array) -> bool:
    """Whether the array types' own cast does, which rounds float32 once to each format."""
    floating = is_floating(x.dtype) and is_floating(out.dtype)
    return out.size <= SMALL and floating and FP32 in (x.dtype, out.dtype)
