"""The cupy row of the kernels: the arithmetic of `kernels` on one GPU, in fused CUDA kernels at memory's speed.

What is promised, beside `NumpyKernels` on the same inputs (a NaN is a NaN, whatever its code):

- The same bits: casts, sums, products and quotients of elements, maxima, accumulation, gradients' blocks, ReLU,
  dropout, taking and adding rows, column sums, sums of squares, every optimizer's step that is a function of elements.
- The same formula with CUDA's exp, log and tanh, each within 2 ULP of the exact value where NumPy's are within 4
  (CUDA C++ Programming Guide, "Mathematical Functions"): GELU, softmax.
- The library's order of additions: products of matrices (cuBLAS, 16-bit operands on tensor cores, sums in float32, one
  rounding at the end), means and variances of rows, softmax's sums, attention, decompositions of matrices. A sum of k
  products is within k·2^-23·Σ|a·b| of the exact one, before the one rounding (tensor cores cut what they add off, which
  doubles float32's 2^-24). CuPy's own sums along rows take subnormal float32 numbers for zeros.

Shapes: n elements; m rows, k inner, n columns in a product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import copy_elements, is_same_memory, may_share_memory, on_device, to_host
from zerosim.numerics.blocks import spans
from zerosim.numerics.blockwise import Operation
from zerosim.numerics.checks import check_floating, check_same_type, check_shapes, is_floating, split_divisor, work_type
from zerosim.numerics.cupy_activations import CupyActivations
from zerosim.numerics.cupy_attention import CupyAttention
from zerosim.numerics.cupy_base import CupyBase, DeviceScratch, copy, pool_slack_nbytes
from zerosim.numerics.cupy_launch import copied, run_in_place
from zerosim.numerics.cupy_matrix import CupyMatrix
from zerosim.numerics.cupy_products import CupyProducts
from zerosim.numerics.cupy_reductions import CupyReductions
from zerosim.numerics.cupy_rows import CupyRows
from zerosim.numerics.kernels import NumpyKernels

AT_ONCE = 16  # addends of one launch


class CupyKernels(CupyReductions, CupyActivations, CupyRows, CupyAttention, CupyMatrix, CupyProducts, CupyBase,
                  NumpyKernels):  # fmt: skip
    """All arithmetic on CuPy's arrays, on the current device and stream. What is called on them is NumpyKernels', its
    checks included; `cast_pack` and `fill` also take NumPy arrays, which they move to the device."""

    BLOCK = 1 << 24  # elements: a launch costs microseconds, and there is no cache to stay in

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._device_scratch = DeviceScratch(cupy)
        self._numbers = NumpyKernels()

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of CuPy's pool that the kernels hold between calls."""
        return self._device_scratch.nbytes

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> Any:
        """`count` elements of the kernels' own memory, (n,), not initialized, good until the next call of this name;
        it is part of `scratch_nbytes`."""
        return self._room(f"asked for: {name}", count, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """The bytes of CuPy's pool that an array from `empty` takes beyond its own nbytes."""
        return pool_slack_nbytes(nbytes)

    def serving(self, x: Any) -> NumpyKernels:
        """These for an array on the device; NumPy's for one on the host, as flags and counts that programs make."""
        return self if on_device(x) else self._numbers

    # --- casts ----------------------------------------------------------------------------------------------

    def cast_pack(self, x: Any, out: Any) -> None:
        """out becomes x in out's type, rounded once to nearest even; equal shapes; types as NumpyKernels has them.

        One of the two may be a NumPy array: its elements are moved over, and the cast is made on the device.
        """
        check_shapes("cast_pack", x=x, out=out)
        if not on_device(x) and not on_device(out):
            self._numbers.cast_pack(x, out)
        elif not on_device(x):
            self.cast_pack(self._uploaded(x), out)
        elif not on_device(out):
            cast = x if x.dtype == out.dtype else self.empty(x.shape, out.dtype)
            if cast is not x:
                self.cast_pack(x, cast)
            np.copyto(out, to_host(cast))
        elif x.dtype == out.dtype:
            overlap = may_share_memory(x, out) and not is_same_memory(x, out)
            copy_elements(copied(x) if overlap else x, out)
        else:
            check_floating("cast_pack", x=x, out=out)
            self._fused(copy, [x], out)

    def fill(self, out: Any, values: Callable[[slice], Any]) -> None:
        """out (n,) becomes what ``values`` gives for each block's slice, rounded once to out's type."""
        for span in spans(out.size, 1 << 20):
            self.cast_pack(values(span), out[span])

    # --- one operation per element --------------------------------------------------------------------------

    def add_rounded(self, a: Any, b: Any, out: Any) -> None:
        """out = a + b: one addition in float32, rounded once (float64 and integers: their own addition).

        Equal shapes; a and out of one type; b is cast to it first, which rounds if b is wider.
        """
        check_shapes("add_rounded", a=a, b=b, out=out)
        self._with_cast("add_rounded", np.add, a, b, out)

    def _with_cast(self, name: str, ufunc: np.ufunc, a: Any, b: Any, out: Any) -> None:
        check_same_type(name, a, out)
        if b.dtype != out.dtype:
            check_floating(name, b=b, out=out)
            cast = self._room("recast", b.shape, out.dtype)
            self.cast_pack(b, cast)
            b = cast
        work = None if is_floating(out.dtype) else out.dtype
        self._fused(lambda a, b, result: ufunc(a, b, out=result), [a, b], out, work)

    def sum_rounded(self, addends: Sequence[Any], out: Any) -> None:
        """out = ((first + second) + third) + ..., each sum as `add_rounded` makes it, every addend read once; at least
        one addend, all of out's type and shape, `out` among them or not."""
        if not addends:
            raise ValueError("sum_rounded needs at least one addend, got none")
        check_shapes("sum_rounded", out=out, **{f"addend {i}": x for i, x in enumerate(addends)})
        for x in addends:
            check_same_type("sum_rounded", x, out)
        work = None if is_floating(out.dtype) else out.dtype
        total = out if len(addends) <= AT_ONCE else self._room("sum", out.shape, out.dtype)
        some = list(addends[:AT_ONCE])
        self._fused(_summed(out.dtype), some, total, work)
        for start in range(AT_ONCE, len(addends), AT_ONCE - 1):
            some = [total, *addends[start : start + AT_ONCE - 1]]
            self._fused(_summed(out.dtype), some, total, work)
        if total is not out:
            copy_elements(total, out)

    def _extremum(self, name: str, integers: np.ufunc, floats: Operation, a: Any, b: Any, out: Any) -> None:
        check_shapes(name, a=a, b=b, out=out)
        self._with_cast(name, integers, a, b, out)

    def _run(self, function: Operation, inputs: tuple[Any, ...], out: Any, **options: Any) -> None:
        self._fused(function, list(inputs), out, options.get("work"))

    # --- optimizer ------------------------------------------------------------------------------------------

    def gradient_block(self, x: Any, divisor: float, factor: float, out: Any) -> None:
        """out = x/divisor, then ·factor unless that is 1, each rounded to out's float32; equal shapes."""
        check_shapes("gradient_block", x=x, out=out)
        check_floating("gradient_block", x=x, out=out)

        brought, into_range = split_divisor(divisor, work_type(x, out))

        def scaled(x: Any, result: Any) -> None:
            if brought != 1:
                np.multiply(x, brought, out=result)
            np.divide(x if brought == 1 else result, into_range, out=result)
            result.tape.rounded(result, out.dtype)
            if factor != 1:
                np.multiply(result, factor, out=result)

        self._fused(scaled, [x], out)

    def _step(self, rows: list[Any], function: Callable[..., object], scratch: int) -> None:
        run_in_place(function, rows, scratch)


def _summed(dtype: np.dtype[Any]) -> Callable[..., None]:
    """The sum of all symbols but the last, written to the last, each partial sum rounded to the type."""

    def summed(*blocks: Any) -> None:
        *addends, result = blocks
        np.copyto(result, addends[0])
        for place, x in enumerate(addends[1:], start=2):
            np.add(result, x, out=result)
            if place < len(addends):
                result.tape.rounded(result, dtype)

    return summed

