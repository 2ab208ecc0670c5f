"""Kernels that work on rows: normalization, tables of rows, losses of softmax.

Legend: M rows, C columns, V classes. Everything is computed in float32 (float64 where an array is), block of rows by
block of rows, and rounded once. A row's results depend on that row alone, not on the block that it is in; sums over
rows are added block by block, from the first row on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zerosim.numerics.blocks import BLOCK, Array, Scratch
from zerosim.numerics.blockwise import room_for, settle, widened, widened_view
from zerosim.numerics.checks import work_type
from zerosim.numerics.reductions import row_maxima, row_products, row_sums

_quiet = np.errstate(all="ignore")
Tokens = npt.NDArray[np.integer]


class RowKernels:
    """The part of the kernels that works on rows."""

    _scratch: Scratch

    # --- normalization --------------------------------------------------------------------------------------

    @_quiet
    def normalize_rows(self, x: Array, w: Array, b: Array, epsilon: float, mean: Array, rstd: Array, y: Array) -> None:
        """y = (x - mean)·rstd·w + b, x and y (M, C), w and b (C,); writes mean and rstd = 1/√(variance + ε) (M,)."""
        columns = x.shape[1]
        for rows, wide in self._row_blocks(x, "rows"):
            np.divide(row_sums(wide), columns, out=mean[rows])
            centered = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            variance = row_products(centered, centered)
            variance /= columns
            variance += epsilon
            np.divide(1, np.sqrt(variance, out=variance), out=rstd[rows])
            self._scale(centered, w, b, rstd[rows], y[rows])

    @_quiet
    def scale_rows(self, x: Array, w: Array, b: Array, mean: Array, rstd: Array, y: Array) -> None:
        """y as `normalize_rows` computes it, from the statistics that it wrote: the same bits."""
        for rows, wide in self._row_blocks(x, "rows"):
            centered = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            self._scale(centered, w, b, rstd[rows], y[rows])

    def _scale(self, centered: Array, w: Array, b: Array, rstd: Array, y: Array) -> None:
        work = centered.dtype
        centered *= rstd[:, None]
        centered *= widened("row w", w, work, self._scratch)
        result = y if y.dtype == work else centered
        np.add(centered, widened("row b", b, work, self._scratch), out=result)
        settle(result, y, self._scratch)

    @_quiet
    def normalize_rows_gradient(self, x: Array, w: Array, mean: Array, rstd: Array, dy: Array, dx: Array, dw: Array,
                                db: Array) -> None:  # fmt: skip
        """dx = (dŷ - mean(dŷ) - x̂·mean(dŷ·x̂))·rstd with dŷ = dy·w; dw = Σ_M dy·x̂, db = Σ_M dy."""
        work, columns = work_type(x, dy), x.shape[1]
        sums = self._scratch.array("row sums", 2 * columns, work).reshape(2, columns)
        sums[...] = 0
        weight = widened("row w", w, work, self._scratch)
        for rows, wide in self._row_blocks(x, "rows"):
            normal = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            normal *= rstd[rows, None]
            wide_dy = widened_view("dy", dy[rows], work, self._scratch)
            gradient = np.multiply(wide_dy, normal, out=self._like(wide, "gradient"))
            sums[0] += np.add.reduce(gradient, axis=0)
            sums[1] += np.add.reduce(wide_dy, axis=0)
            np.multiply(wide_dy, weight, out=gradient)
            along, shift = row_products(gradient, normal), row_sums(gradient)
            along /= columns
            shift /= columns
            normal *= along[:, None]
            gradient -= normal
            gradient -= shift[:, None]
            target = dx[rows]
            result = target if target.dtype == work else gradient
            np.multiply(gradient, rstd[rows, None], out=result)
            settle(result, target, self._scratch)
        settle(sums[0], dw, self._scratch)
        settle(sums[1], db, self._scratch)

    # --- tables of rows -------------------------------------------------------------------------------------

    def index_range(self, x: Tokens) -> tuple[int, int]:
        """The smallest and the largest of some whole numbers; 0 and -1 where there are none."""
        return (int(x.min()), int(x.max())) if x.size else (0, -1)

    def take_rows(self, table: Array, rows: Tokens, out: Array) -> None:
        """out (M, C) = table[rows]: rows (M,) of whole numbers that the table (V, C), of out's type, has."""
        np.take(table, rows, axis=0, out=out, mode="clip")  # nothing to check, and so no buffer

    @_quiet
    def add_rows(self, x: Array, rows: Tokens, out: Array) -> None:
        """out (V, C): for each v the sum of the x[i] with rows[i] == v, 0 where there is none; x (M, C), rows (M,).

        The rows of x are sorted by v, in their order, and cut into blocks; within a block NumPy adds those of one v,
        and what a block begins with is added to what the one before has left of it.
        """
        work, columns = work_type(x, out), x.shape[1]
        out.fill(0)
        order = np.argsort(rows, kind="stable")
        step = max(1, BLOCK // max(1, columns))
        left, left_of = np.zeros(columns, work), -1  # the last v of a block may go on in the next
        for start in range(0, len(order), step):
            here = order[start : start + step]
            owners = rows[here]
            starts = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))
            present = owners[starts]
            sums = self._scratch.array("row sums", len(starts) * columns, work).reshape(len(starts), columns)
            np.add.reduceat(self._taken(x, here, work), starts, axis=0, out=sums)
            if present[0] == left_of:
                np.add(left, sums[0], out=sums[0])
            left[...], left_of = sums[-1], present[-1]
            rounded = room_for("rounded sums", sums, out.dtype, self._scratch)
            settle(sums, rounded, self._scratch)
            out[present] = rounded

    def _taken(self, x: Array, rows: Tokens, work: np.dtype[np.generic]) -> Array:
        """x[rows] in the type ``work``."""
        taken = self._scratch.array("taken", len(rows) * x.shape[1], x.dtype).reshape(len(rows), x.shape[1])
        np.take(x, rows, axis=0, out=taken, mode="clip")
        return widened_view("rows", taken, work, self._scratch)

    # --- losses of softmax ----------------------------------------------------------------------------------

    def count_targets(self, targets: Tokens) -> int:
        """How many are classes: 0 or more."""
        return int(np.count_nonzero(targets >= 0))

    @_quiet
    def softmax_loss(self, logits: Array, targets: Tokens, log_sums: Array) -> float:
        """Σ over rows with a target of log Σ_v exp(logit_v) - logit_target, in float64; targets (M,), below 0 for none.

        The log of each row's sum is written to log_sums (M,), in its own type.
        """
        total = 0.0
        for rows, wide in self._row_blocks(logits, "rows"):
            top = row_maxima(wide)
            shifted = np.subtract(wide, top[:, None], out=self._like(wide, "centered"))
            here = np.flatnonzero(targets[rows] >= 0)
            picked = shifted[here, targets[rows][here]]
            np.exp(shifted, out=shifted)
            log_sum = np.log(row_sums(shifted))
            np.add(log_sum, top, out=log_sums[rows])
            total += float(np.add.reduce(np.subtract(log_sum[here], picked, dtype=np.float64)))
        return total

    @_quiet
    def softmax_loss_gradient(self, logits: Array, targets: Tokens, log_sums: Array, factor: float, out: Array) -> None:
        """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
        for rows, wide in self._row_blocks(logits, "rows"):
            target = out[rows]
            p = room_for("centered", target, wide.dtype, self._scratch)
            np.subtract(wide, log_sums[rows, None], out=p)
            np.exp(p, out=p)
            here = np.flatnonzero(targets[rows] >= 0)
            p[here, targets[rows][here]] -= 1
            p *= p.dtype.type(factor)
            p[targets[rows] < 0] = 0
            settle(p, target, self._scratch)

    # --- blocks ---------------------------------------------------------------------------------------------

    def _row_blocks(self, x: Array, name: str) -> Iterator[tuple[slice, Array]]:
        """(rows, those rows of x (M, C), wide): at most BLOCK elements at a time, but at least one row."""
        work, step = work_type(x), max(1, BLOCK // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            yield rows, widened_view(name, x[rows], work, self._scratch)

    def _like(self, x: Array, name: str) -> Array:
        return self._scratch.array(name, x.size, x.dtype).reshape(x.shape)
