"""Sums and tests over arrays on the device, in NumPy's own order of additions where one is promised.

Shapes: n elements or columns; m rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.numerics.arrays import contiguous, on_device, to_host, words
from zerosim.numerics.blocks import BLOCK
from zerosim.numerics.checks import FP32, check_floating, split_divisor, work_type
from zerosim.numerics.cupy_base import CupyBase
from zerosim.numerics.cupy_launch import as_row, launch
from zerosim.numerics.cupy_source import narrowed, storage_of, widened
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.fp8 import scale_for
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.reductions import nonfinite_codes

Array = Any  # cupy.ndarray
LEAF = 128  # elements that NumPy's pairwise sum adds without halving (PW_BLOCKSIZE, numpy/_core/src/umath)

_CODES_FROM = """
extern "C" __global__ void zs_codes_from_{code}(const {code}* x, u32* found, u64 mask, u64 low, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && ((u64)x[i] & mask) >= low) {action};
}}
"""

# A thread adds a leaf as NumPy does, in eight partial sums; 512 leaves make a block, halved and halved again.
_LEAVES = """
extern "C" __global__ void zs_leaves_{name}(const {rest}* x, double* sums, {work} factor, {work} divisor,
                                            u64 leaves) {{
  u64 leaf = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (leaf >= leaves) return;
  double part[8];
  for (int i = 0; i < 128; i += 8) {{
    #pragma unroll
    for (int j = 0; j < 8; ++j) {{
      {rest} element = x[leaf * 128 + i + j];
      double quotient = zs_divide(zs_multiply({wide}, factor), divisor), square = zs_multiply(quotient, quotient);
      part[j] = i ? zs_add(part[j], square) : square;
    }}
  }}
  sums[leaf] = zs_add(zs_add(zs_add(part[0], part[1]), zs_add(part[2], part[3])),
                      zs_add(zs_add(part[4], part[5]), zs_add(part[6], part[7])));
}}
"""

_HALVES = """
extern "C" __global__ void zs_halves(const double* leaves, double* sums, u64 blocks) {
  u64 block = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  double level[10];  // level[k]: a sum of 2^k leaves that waits for its neighbor
  double sum = 0;
  for (int i = 0; i < 512; ++i) {
    sum = leaves[block * 512 + i];
    int k = 0;
    for (; (i >> k) & 1; ++k) sum = zs_add(level[k], sum);
    level[k] = sum;
  }
  sums[block] = sum;
}
"""

_COLUMNS = """
extern "C" __global__ void zs_columns_{name}(const {rest}* x, {to}* out, u64 rows, u64 columns, u64 step, u64 n,
                                             int ends) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 first = i / columns * step, column = i % columns, stop = first + step < rows ? first + step : rows;
  {work} sum = 0;
  #pragma unroll 8
  for (u64 row = first; row < stop; ++row) {{
    {rest} element = x[row * columns + column];
    sum = row == first ? {wide} : zs_add(sum, {wide});
  }}
  if (ends) sum = zs_add(sum, ({work})0);
  out[i] = {narrow};
}}
"""


class CupyReductions(CupyBase):
    """The part of the CuPy kernels that makes few numbers of many."""

    _numbers: NumpyKernels

    def all_finite(self, x: Any) -> bool:
        """Whether no element of x is infinite or NaN."""
        constants = nonfinite_codes(x.dtype)
        if not on_device(x) or constants is None:
            return self._numbers.all_finite(x) if constants else True
        return not self._codes_from(x, int(constants[0]), constants[1], "*found = 1u")

    def count_nan(self, x: Any) -> int:
        """How many elements are NaN; none of a type that has no NaN. Any type, byte order and strides."""
        if not on_device(x):
            return self._numbers.count_nan(x)
        constants = nonfinite_codes(x.dtype)
        if constants is None:
            return 0
        has_infinity = x.dtype == np.float64 or format_of(x.dtype).has_infinity
        return self._codes_from(x, int(constants[0]), constants[1] + has_infinity, "atomicAdd(found, 1u)")

    def _codes_from(self, x: Array, mask: int, low: int, action: str) -> int:
        """What `action` leaves of 0 after every element whose code, masked, is at least `low`."""
        row, found = as_row(x), self.xp.zeros(1, np.uint32)
        code = f"u{8 * x.dtype.itemsize}"
        launch(_CODES_FROM.format(code=code, action=action), f"zs_codes_from_{code}", row.size,
               [row, found, np.uint64(mask), np.uint64(low), np.uint64(row.size)])
        return int(to_host(found)[0])

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)², the quotient in float32 (float64 if x is), squares and sums in float64: NumPy's
        order, that is blocks of BLOCK elements added pairwise and their sums left to right. The last, shorter block is
        brought to the host, where NumPy itself adds it."""
        check_floating("sum_of_squares", x=x)
        if not on_device(x):
            return self._numbers.sum_of_squares(x, divisor)
        row, total = as_row(x), 0.0
        blocks = row.size // BLOCK
        if blocks:
            for sum_of_block in to_host(self._square_sums(row, blocks, divisor)).tolist():
                total += sum_of_block
        if row.size % BLOCK:
            total += self._numbers.sum_of_squares(to_host(row[blocks * BLOCK :]), divisor)
        return total

    def _square_sums(self, row: Array, blocks: int, divisor: float) -> Array:
        work, count = work_type(row), blocks * (BLOCK // LEAF)
        leaves, sums = self._room("leaves", count, np.float64), self._room("square sums", blocks, np.float64)
        text = _LEAVES.format(name=row.dtype.name, rest=storage_of(row.dtype), work=storage_of(work),
                              wide=widened("element", row.dtype, work))  # fmt: skip
        with np.errstate(all="ignore"):
            numbers = [np.asarray(number, work)[()] for number in split_divisor(divisor, work)]
        launch(text, f"zs_leaves_{row.dtype.name}", count, [row, leaves, *numbers, np.uint64(count)])
        launch(_HALVES, "zs_halves", blocks, [leaves, sums, np.uint64(blocks)])
        return sums

    def column_sum(self, x: Any, out: Any) -> None:
        """out (n,) = sum of the rows of x (m, n), added one after the other in float32 (float64 if x or out is),
        rounded once; zeros where m is 0. A thread has a column: the order is NumPy's."""
        check_floating("column_sum", x=x, out=out)
        if x.ndim != 2 or out.shape != x.shape[1:]:
            raise ValueError(f"column_sum adds the rows of x (m, n) into out (n,), got {x.shape} and {out.shape}")
        self._columns(x, out, max(1, x.shape[0]), work_type(x, out), ends=True)

    def _columns(self, x: Array, out: Array, step: int, work: np.dtype[Any], *, ends: bool = False) -> None:
        """out (⌈m/step⌉, n) = the sums of every `step` rows of x (m, n), from the first to the last."""
        row = out.reshape(-1) if out.flags.c_contiguous else self._room("columns", out.size, out.dtype)
        name = f"{x.dtype.name}_{out.dtype.name}_{work.name}"
        text = _COLUMNS.format(name=name, rest=storage_of(x.dtype), to=storage_of(out.dtype), work=storage_of(work),
                               wide=widened("element", x.dtype, work), narrow=narrowed("sum", work, out.dtype))
        launch(text, f"zs_columns_{name}", row.size,
               [contiguous(x), row, *map(np.uint64, (*x.shape, step, row.size)), np.int32(ends)])
        if not out.flags.c_contiguous:
            out[...] = row.reshape(out.shape)

    def quantized(self, x: Any, fmt: str) -> Any:
        """x as an 8-bit matrix unit sees it, with one scale for all of it: see `fp8`."""
        row, dtype = as_row(x), format_of(fmt).dtype
        values = self.empty(x.shape, np.float32)
        self._fused(_finite_magnitude, [row], values.reshape(-1), FP32)
        # By codes, which are in the order of magnitudes: CuPy's own maximum takes subnormal numbers for zeros.
        top = float(to_host(words(values).max()).view(np.float32)) if x.size else 0.0
        scale = np.float32(scale_for(top, format_of(fmt)))

        def rounded(x: Any, result: Any) -> None:
            np.multiply(x, scale, out=result)
            result.tape.rounded(result, dtype)
            np.divide(result, scale, out=result)

        self._fused(rounded, [row], values.reshape(-1), FP32)
        return values


def _finite_magnitude(x: Any, result: Any) -> None:
    """|x|, and 0 for infinities and NaN."""
    magnitude = np.abs(x)
    result[...] = 0
    np.copyto(result, magnitude, where=magnitude <= FORMATS["fp32"].largest)


