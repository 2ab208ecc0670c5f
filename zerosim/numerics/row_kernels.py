"""Kernels that work on rows: normalization, tables of rows, dropout, losses of softmax.

Legend: M rows, C columns, V classes. Everything is computed in float32 (float64 where an array is), block of rows by
block of rows, each row by itself, so that no bit depends on the blocks; results are rounded once. Sums over rows are
added block by block, from the first row on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zerosim.numerics.blocks import BLOCK, Array, Scratch, spans
from zerosim.numerics.blockwise import cast_block, widened
from zerosim.numerics.checks import work_type

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
            np.divide(np.add.reduce(wide, axis=1), columns, out=mean[rows])
            centered = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            variance = np.einsum("ij,ij->i", centered, centered)
            variance /= columns
            variance += epsilon
            np.divide(1, np.sqrt(variance, out=variance), out=rstd[rows])
            self._scaled(centered, w, b, rstd[rows], y[rows])

    @_quiet
    def scale_rows(self, x: Array, w: Array, b: Array, mean: Array, rstd: Array, y: Array) -> None:
        """y as `normalize_rows` computes it, from the statistics that it wrote: the same bits."""
        for rows, wide in self._row_blocks(x, "rows"):
            centered = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            self._scaled(centered, w, b, rstd[rows], y[rows])

    def _scaled(self, centered: Array, w: Array, b: Array, rstd: Array, y: Array) -> None:
        centered *= rstd[:, None]
        centered *= self._wide_row(w, "row w", centered.dtype)
        centered += self._wide_row(b, "row b", centered.dtype)
        self._put(centered, y)

    @_quiet
    def normalize_rows_gradient(self, x: Array, w: Array, mean: Array, rstd: Array, dy: Array, dx: Array, dw: Array,
                                db: Array) -> None:
        """dx = (dŷ - mean(dŷ) - x̂·mean(dŷ·x̂))·rstd with dŷ = dy·w; dw = Σ_M dy·x̂, db = Σ_M dy."""
        work, columns = work_type(x, dy), x.shape[1]
        sums = self._scratch.array("row sums", 2 * columns, work).reshape(2, columns)
        sums[...] = 0
        weight = self._wide_row(w, "row w", work)
        for rows, wide in self._row_blocks(x, "rows"):
            normal = np.subtract(wide, mean[rows, None], out=self._like(wide, "centered"))
            normal *= rstd[rows, None]
            wide_dy = widened("dy", dy[rows].reshape(-1), work, self._scratch).reshape(wide.shape)
            gradient = np.multiply(wide_dy, normal, out=self._like(wide, "gradient"))
            sums[0] += np.add.reduce(gradient, axis=0)
            sums[1] += np.add.reduce(wide_dy, axis=0)
            np.multiply(wide_dy, weight, out=gradient)
            along = np.einsum("ij,ij->i", gradient, normal)
            along /= columns
            shift = np.add.reduce(gradient, axis=1)
            shift /= columns
            normal *= along[:, None]
            gradient -= normal
            gradient -= shift[:, None]
            gradient *= rstd[rows, None]
            self._put(gradient, dx[rows])
        self._put(sums[0], dw)
        self._put(sums[1], db)

    # --- tables of rows -------------------------------------------------------------------------------------

    def take_rows(self, table: Array, rows: Tokens, out: Array) -> None:
        """out (M, C) = table[rows]: rows (M,), table (V, C) of out's type."""
        np.take(table, rows, axis=0, out=out, mode="clip")  # the caller has checked; clip avoids a buffer

    @_quiet
    def add_rows(self, x: Array, rows: Tokens, out: Array) -> None:
        """out (V, C): for each v the sum of x[i] over the i with rows[i] == v, in the order of i; else 0."""
        work = work_type(x, out)
        order = np.argsort(rows, kind="stable")
        present, starts = np.unique(rows[order], return_index=True)
        out.fill(0)
        if len(order):
            wide = widened("rows", x.reshape(-1), work, self._scratch).reshape(x.shape)
            sums = np.add.reduceat(wide[order], starts, axis=0)
            out[present] = sums if out.dtype == work else self._rounded(sums, out.dtype)

    # --- dropout --------------------------------------------------------------------------------------------

    @_quiet
    def drop(self, x: Array, words: npt.NDArray[np.uint32], threshold: int, factor: float, y: Array) -> None:
        """y = x·factor where the word is at least the threshold, else +0; x, words, y (n,); no NaN meets a 0."""
        work = work_type(x, y)
        scale = np.array(factor, work)
        for span in spans(y.size):
            result = self._scratch.array("result", y[span].size, work)
            np.multiply(widened("input 0", x[span], work, self._scratch), scale, out=result)
            result[words[span] < threshold] = 0
            cast_block(result, y[span], self._scratch)

    # --- losses of softmax ----------------------------------------------------------------------------------

    @_quiet
    def softmax_loss(self, logits: Array, targets: Tokens, log_sums: Array) -> float:
        """Σ over rows with a target of log Σ_v exp(logit_v) - logit_target, in float64; targets (M,), below 0 for none.

        The log of each row's sum is written to log_sums (M,), in its own type.
        """
        total = 0.0
        for rows, wide in self._row_blocks(logits, "rows"):
            top = np.max(wide, axis=1)
            picked = wide[np.arange(len(wide)), np.maximum(targets[rows], 0)]
            shifted = np.subtract(wide, top[:, None], out=self._like(wide, "centered"))
            np.exp(shifted, out=shifted)
            np.add(np.log(np.add.reduce(shifted, axis=1)), top, out=log_sums[rows])
            losses = np.subtract(log_sums[rows], picked, dtype=np.float64)
            total += float(np.add.reduce(losses[targets[rows] >= 0]))
        return total

    @_quiet
    def softmax_loss_gradient(self, logits: Array, targets: Tokens, log_sums: Array, factor: float, out: Array) -> None:
        """out = (softmax(logits) - [v = target])·factor, 0 in rows without a target; out (M, V) may be the logits."""
        for rows, wide in self._row_blocks(logits, "rows"):
            p = np.subtract(wide, log_sums[rows, None], out=self._like(wide, "centered"))
            np.exp(p, out=p)
            p[np.arange(len(p)), np.maximum(targets[rows], 0)] -= 1
            p *= p.dtype.type(factor)
            p[targets[rows] < 0] = 0
            self._put(p, out[rows])

    # --- blocks ---------------------------------------------------------------------------------------------

    def _row_blocks(self, x: Array, name: str) -> Iterator[tuple[slice, Array]]:
        """(rows, those rows of x (M, C), wide): at most BLOCK elements at a time, but at least one row."""
        work, step = work_type(x), max(1, BLOCK // max(1, x.shape[1]))
        for start in range(0, len(x), step):
            rows = slice(start, min(start + step, len(x)))
            block = x[rows]
            yield rows, widened(name, block.reshape(-1), work, self._scratch).reshape(block.shape)

    def _like(self, x: Array, name: str) -> Array:
        return self._scratch.array(name, x.size, x.dtype).reshape(x.shape)

    def _wide_row(self, x: Array, name: str, work: np.dtype[np.generic]) -> Array:
        return widened(name, x, work, self._scratch)

    def _rounded(self, x: Array, dtype: np.dtype[np.generic]) -> Array:
        out = np.empty(x.shape, dtype)
        self._put(x, out)
        return out

    def _put(self, wide: Array, out: Array) -> None:
        """Rounds wide values once into out, of the same shape; contiguous rows."""
        source, target = wide.reshape(-1), out.reshape(-1)
        if not np.may_share_memory(target, out):
            target = np.empty(out.size, out.dtype)
        for span in spans(source.size):
            cast_block(source[span], target[span], self._scratch)
        if not np.may_share_memory(target, out):
            out[...] = target.reshape(out.shape)
