"""Kernels that work on rows, on the device: normalization, tables of rows, losses of softmax.

Legend: M rows, C columns, V classes. Everything is computed in float32 (float64 where an array is) and rounded once;
the sums along rows are CuPy's, in an order of its own that depends on nothing but the row's length; sums over rows are
added in NumPy's order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.numerics.arrays import contiguous, copy_elements, on_device, to_host, words
from zerosim.numerics.blocks import BLOCK
from zerosim.numerics.checks import work_type
from zerosim.numerics.cupy_base import CupyBase
from zerosim.numerics.cupy_launch import Operand, launch
from zerosim.numerics.cupy_source import narrowed, storage_of, widened

Array = Any  # cupy.ndarray
HALVINGS = 11  # of BLOCK rows, until 128 or fewer are left of each part, whose lengths are rounded to multiples of 8

# A thread adds one column of one class, in the blocks that NumPy's kernel makes: the class's first row in the block,
# plus the others, which np.add.reduceat halves down to 128 and adds in eight partial sums. Halves that wait for their
# other half are kept in arrays: of recursion a compiler cannot tell how much of a thread's stack, 1 KiB, it takes.
_ADD_ROWS = """
ZS {work} zs_element_{name}(const {rest}* x, u64 place) {{
  {rest} element = x[place];
  return {wide};
}}
ZS {work} zs_leaf_{name}(const {rest}* x, const long long* order, u64 columns, u64 column, u32 n) {{
  {work} part[8], sum = 0;
  u32 at = 0;
  for (; at + 8 <= n; at += 8)
    for (int j = 0; j < 8; ++j) {{
      {work} value = zs_element_{name}(x, order[at + j] * columns + column);
      part[j] = at ? zs_add(part[j], value) : value;
    }}
  if (at) sum = zs_add(zs_add(zs_add(part[0], part[1]), zs_add(part[2], part[3])),
                       zs_add(zs_add(part[4], part[5]), zs_add(part[6], part[7])));
  for (; at < n; ++at) {{
    {work} value = zs_element_{name}(x, order[at] * columns + column);
    sum = at ? zs_add(sum, value) : value;
  }}
  return sum;
}}
ZS {work} zs_pairwise_{name}(const {rest}* x, const long long* order, u64 columns, u64 column, u32 n) {{
  {work} left[{halvings}];  // a left half's sum, while the right one is added
  u32 right[{halvings}];    // rows of a right half that is not begun yet; 0 when it is
  for (int depth = 0;;) {{
    for (; n > 128; ++depth) {{
      u32 half = n / 2 - n / 2 % 8;
      right[depth] = n - half;
      n = half;
    }}
    {work} sum = zs_leaf_{name}(x, order, columns, column, n);
    order += n;
    for (; depth && !right[depth - 1]; --depth) sum = zs_add(left[depth - 1], sum);
    if (!depth) return sum;
    left[depth - 1] = sum;
    n = right[depth - 1];
    right[depth - 1] = 0;
  }}
}}
extern "C" __global__ void zs_add_rows_{name}(const {rest}* x, const long long* order, const long long* starts,
                                              {to}* out, u64 columns, u64 step, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 first = starts[i / columns], stop = starts[i / columns + 1], column = i % columns;
  {work} sum = 0;
  for (u64 at = first; at < stop;) {{
    u64 ends = (at / step + 1) * step < stop ? (at / step + 1) * step : stop;
    {work} part = zs_element_{name}(x, order[at] * columns + column);
    if (ends > at + 1)
      part = zs_add(part, zs_pairwise_{name}(x, order + at + 1, columns, column, (u32)(ends - at - 1)));
    sum = at == first ? part : zs_add(sum, part);
    at = ends;
  }}
  out[i] = {narrow};
}}
"""

_PICK = """
extern "C" __global__ void zs_pick_{name}(const {work}* shifted, const {target}* targets, {work}* picked, u64 columns,
                                          u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) picked[i] = (long long)targets[i] < 0 ? ({work})0 : shifted[i * columns + targets[i]];
}}
"""

_LOSS_GRADIENT = """
extern "C" __global__ void zs_loss_gradient_{name}(const {rest}* x, const {target}* targets, const {sums}* log_sums,
                                                   {to}* out, {work} factor, u64 columns, u64 n) {{
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  {rest} element = x[i];
  long long target = (long long)targets[i / columns];
  {work} p = zs_exp(zs_subtract({wide}, ({work})log_sums[i / columns]));
  if (target == (long long)(i % columns)) p = zs_subtract(p, ({work})1);
  p = target < 0 ? ({work})0 : zs_multiply(p, factor);
  out[i] = {narrow};
}}
"""


class CupyRows(CupyBase):
    """The part of the CuPy kernels that works on rows."""

    # --- normalization --------------------------------------------------------------------------------------

    def normalize_rows(self, x: Any, w: Any, b: Any, epsilon: float, mean: Any, rstd: Any, y: Any) -> None:
        """y = (x - mean)·rstd·w + b, x and y (M, C), w and b (C,); writes mean and rstd = 1/√(variance + ε) (M,)."""
        work, columns = work_type(x), x.shape[1]
        wide = self._widened("rows", x, work)
        self._fused(lambda s, result: np.divide(s, columns, out=result), [self._row_sums(wide)], mean)
        centered = self._room("centered", x.shape, work)
        self._fused(_subtract, [wide, _per_row(mean, x)], centered, work)

        def deviation(s: Any, result: Any) -> None:
            np.divide(s, columns, out=result)
            result += epsilon
            np.divide(1, np.sqrt(result, out=result), out=result)

        self._fused(deviation, [self._row_products(centered, centered)], rstd)
        self.scale_rows(x, w, b, mean, rstd, y)

    def scale_rows(self, x: Any, w: Any, b: Any, mean: Any, rstd: Any, y: Any) -> None:
        """y as `normalize_rows` computes it, from the statistics that it wrote: the same bits."""

        def scaled(x: Any, mean: Any, rstd: Any, w: Any, b: Any, result: Any) -> None:
            np.subtract(x, mean, out=result)
            result *= rstd
            result *= w
            result += b

        self._fused(scaled, [x, _per_row(mean, x), _per_row(rstd, x), _per_column(w), _per_column(b)], y, work_type(x))

    def normalize_rows_gradient(self, x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any,
                                db: Any) -> None:  # fmt: skip
        """dx = (dŷ - mean(dŷ) - x̂·mean(dŷ·x̂))·rstd with dŷ = dy·w; dw = Σ_M dy·x̂, db = Σ_M dy."""
        work, columns = work_type(x, dy), x.shape[1]
        normal, gradient = (self._room(name, x.shape, work) for name in ("centered", "gradient"))
        statistics = [_per_row(mean, x), _per_row(rstd, x)]
        wide_dy = self._widened("dy", dy, work)
        self._fused(_normal, [x, *statistics], normal, work)
        self._fused(lambda dy, x, result: np.multiply(dy, x, out=result), [wide_dy, normal], gradient, work)
        self._sum_over_rows(gradient, dw, work)
        self._sum_over_rows(wide_dy, db, work)
        self._fused(lambda dy, w, result: np.multiply(dy, w, out=result), [wide_dy, _per_column(w)], gradient, work)
        along, shift = self._row_products(gradient, normal), self._row_sums(gradient)

        def finished(g: Any, normal: Any, along: Any, shift: Any, rstd: Any, result: Any) -> None:
            np.multiply(normal, np.divide(along, columns), out=result)
            np.subtract(g, result, out=result)
            result -= np.divide(shift, columns)
            result *= rstd

        self._fused(finished, [gradient, normal, _per_row(along, x), _per_row(shift, x), statistics[1]], dx, work)

    def _sum_over_rows(self, x: Array, out: Array, work: np.dtype[Any]) -> None:
        """out (C,) = the sums over the rows of x (M, C), blocks of BLOCK elements first, then the blocks."""
        step = max(1, BLOCK // max(1, x.shape[1]))
        sums = self._room("sums of blocks", (-(-len(x) // step), x.shape[1]), work)
        self._columns(x, sums, step, work)
        self._columns(sums, out, max(1, len(sums)), work)

    # --- tables of rows -------------------------------------------------------------------------------------

    def index_range(self, x: Any) -> tuple[int, int]:
        """The smallest and the largest of some whole numbers; 0 and -1 where there are none."""
        return (int(x.min()), int(x.max())) if x.size else (0, -1)

    def take_rows(self, table: Any, rows: Any, out: Any) -> None:
        """out (M, C) = table[rows]: rows (M,) of whole numbers that the table (V, C), of out's type, has."""
        copy_elements(words(table)[rows].view(out.dtype), out)

    def add_rows(self, x: Any, rows: Any, out: Any) -> None:
        """out (V, C): for each v the sum of the x[i] with rows[i] == v, 0 where there is none; x (M, C), rows (M,);
        added in NumPy's order."""
        work, columns = work_type(x, out), x.shape[1]
        order = self.xp.argsort(rows.astype(np.int64), kind="stable")
        starts = self.xp.searchsorted(rows.astype(np.int64)[order], self.xp.arange(out.shape[0] + 1))
        name = f"{x.dtype.name}_{out.dtype.name}"
        text = _ADD_ROWS.format(name=name, rest=storage_of(x.dtype), to=storage_of(out.dtype), work=storage_of(work),
                                wide=widened("element", x.dtype, work), narrow=narrowed("sum", work, out.dtype),
                                halvings=HALVINGS)
        target = out if out.flags.c_contiguous else self._room("rows", out.shape, out.dtype)
        launch(text, f"zs_add_rows_{name}", out.size,
               [contiguous(x), order.astype(np.int64), starts.astype(np.int64), target,
                *map(np.uint64, (columns, max(1, BLOCK // max(1, columns)), out.size))])  # fmt: skip
        if target is not out:
            copy_elements(target, out)

    # --- losses of softmax ----------------------------------------------------------------------------------

    def count_targets(self, targets: Any) -> int:
        """How many are classes: 0 or more."""
        return int((targets >= 0).sum()) if on_device(targets) else int(np.count_nonzero(targets >= 0))

    def softmax_loss(self, logits: Any, targets: Any, log_sums: Any) -> float:
        """Σ over rows with a target of log Σ_v exp(logit_v) - logit_target, in float64; targets (M,), below 0 for none.

        The log of each row's sum is written to log_sums (M,), in its own type.
        """
        if not logits.size:
            return 0.0
        work, columns = work_type(logits), logits.shape[1]
        wide = self._widened("rows", logits, work)
        top = wide.max(axis=1)
        shifted = self._room("centered", logits.shape, work)
        self._fused(_subtract, [wide, _per_row(top, logits)], shifted, work)
        picked = self._room("picked", len(logits), work)
        name = f"{work.name}_{targets.dtype.name}"
        text = _PICK.format(name=name, work=storage_of(work), target=storage_of(targets.dtype))
        launch(text, f"zs_pick_{name}", len(logits),
               [shifted, contiguous(targets), picked, np.uint64(columns), np.uint64(len(logits))])
        self._fused(lambda x, result: np.exp(x, out=result), [shifted], shifted, work)
        logs = self._room("logs", len(logits), work)
        self._fused(lambda s, result: np.log(s, out=result), [self._row_sums(shifted)], logs, work)
        self._fused(lambda log, top, result: np.add(log, top, out=result), [logs, top], log_sums, work)
        return _total(to_host(logs), to_host(picked), to_host(targets), columns)

    def softmax_loss_gradient(self, logits: Any, targets: Any, log_sums: Any, factor: float, out: Any) -> None:
        """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
        work, columns = work_type(logits), logits.shape[1]
        name = "_".join(x.dtype.name for x in (logits, targets, log_sums, out))
        text = _LOSS_GRADIENT.format(
            name=name, rest=storage_of(logits.dtype), target=storage_of(targets.dtype), to=storage_of(out.dtype),
            sums=storage_of(log_sums.dtype), work=storage_of(work), wide=widened("element", logits.dtype, work),
            narrow=narrowed("p", work, out.dtype))  # fmt: skip
        target = out if out.flags.c_contiguous else self._room("gradient", out.shape, out.dtype)
        launch(text, f"zs_loss_gradient_{name}", out.size,
               [contiguous(logits), contiguous(targets), contiguous(log_sums), target, np.asarray(factor, work)[()],
                np.uint64(columns), np.uint64(out.size)])  # fmt: skip
        if target is not out:
            copy_elements(target, out)


def _total(logs: np.ndarray, picked: np.ndarray, targets: np.ndarray, columns: int) -> float:
    """The sum of the losses of rows with a target, in float64, on the host and in NumPy's order."""
    total, step = 0.0, max(1, BLOCK // max(1, columns))
    with np.errstate(all="ignore"):
        for first in range(0, len(logs), step):
            here = first + np.flatnonzero(targets[first : first + step] >= 0)
            total += float(np.add.reduce(np.subtract(logs[here], picked[here], dtype=np.float64)))
    return total


def _per_row(values: Array, x: Array) -> Operand:
    return Operand(values, every=max(1, x.shape[-1]))


def _per_column(values: Array) -> Operand:
    return Operand(values, cycle=max(1, values.size))


def _subtract(x: Any, y: Any, result: Any) -> None:
    np.subtract(x, y, out=result)


def _normal(x: Any, mean: Any, rstd: Any, result: Any) -> None:
    np.subtract(x, mean, out=result)
    result *= rstd
