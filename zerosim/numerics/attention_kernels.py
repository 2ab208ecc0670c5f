"""Causal attention: P = softmax of QKᵀ/√D over the past, O = P V, and their gradients.

Legend: B batch, T tokens, H heads, D channels of a head, C = H·D. qkv (B, T, 3C) has the queries, keys and values of
all heads side by side. Scores and softmax are float32 and never rest; P is rounded to the type that it rests in before
it is multiplied by V, and so is dS before it is multiplied by Q and K, as matrix units take them. Rows are taken in
strips, so that little of what lies above the diagonal is computed.
Sources: Vaswani et al. 2017, section 3.2.1; Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022
(FlashAttention), section 3.1 and appendix B, for the tiled form.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerosim.numerics.blocks import Array, Scratch, spans
from zerosim.numerics.blockwise import cast_block, widened
from zerosim.numerics.checks import work_type
from zerosim.numerics.rounding import round_to

_quiet = np.errstate(all="ignore")
STRIP = 256  # rows of P at a time
TILE = 128  # rows and columns at a time, in the tiled form


class AttentionKernels:
    """The part of the kernels that attends."""

    _scratch: Scratch

    @_quiet
    def attend(self, qkv: Array, heads: int, p: Array | None, o: Array) -> None:
        """o (B, T, C) from qkv (B, T, 3C); P (B, H, T, T) is written where it is to be kept, 0 above the diagonal."""
        for b in range(len(qkv)):
            q, k, v = self._heads(qkv[b], heads, "qkv")
            wide_o = self._scratch.array("o", o[b].size, q.dtype).reshape(*o[b].shape[:1], heads, -1).transpose(1, 0, 2)
            for rows in strips(qkv.shape[1], STRIP):
                s = self._probabilities(q, k, rows, p[b] if p is not None else None, qkv.dtype)
                np.matmul(s, v[:, :rows.stop], out=wide_o[:, rows])
            self._put(wide_o.transpose(1, 0, 2), o[b])

    @_quiet
    def attend_gradient(self, qkv: Array, heads: int, p: Array, do: Array, dqkv: Array, *, again: bool = False) -> None:
        """dqkv (B, T, 3C) from do (B, T, C) and P, which is read, or written ``again`` first, to the same bits."""
        for b in range(len(qkv)):
            q, k, v = self._heads(qkv[b], heads, "qkv")
            (g,) = self._heads(do[b], heads, "do", parts=1)
            dq, dk, dv = out = self._gradients(qkv[b].size, heads, q)
            for rows in strips(qkv.shape[1], STRIP):
                s = (self._probabilities(q, k, rows, p[b], qkv.dtype) if again
                     else self._kept(p[b], rows, q.dtype))
                _add_into(dv, np.matmul(s.transpose(0, 2, 1), g[:, rows]), rows)
                ds = np.matmul(g[:, rows], v[:, :rows.stop].transpose(0, 2, 1), out=self._strip(s.shape, "ds", s.dtype))
                ds -= np.einsum("hrt,hrt->hr", s, ds)[:, :, None]
                ds *= s
                ds *= scale_of(q)
                self._round(ds, qkv.dtype)
                np.matmul(ds, k[:, :rows.stop], out=dq[:, rows])
                _add_into(dk, np.matmul(ds.transpose(0, 2, 1), q[:, rows]), rows)
            self._put_heads(out, dqkv[b])

    # --- tiled: no T·T array at any moment ------------------------------------------------------------------

    @_quiet
    def attend_tiled(self, qkv: Array, heads: int, log_sums: Array, o: Array) -> None:
        """o (B, T, C) and, in fp32, the log of the sum of each row's exponentials (B, H, T), tile by tile."""
        for b in range(len(qkv)):
            q, k, v = self._heads(qkv[b], heads, "qkv")
            wide_o = self._scratch.array("o", o[b].size, q.dtype).reshape(*o[b].shape[:1], heads, -1).transpose(1, 0, 2)
            for rows in strips(qkv.shape[1], TILE):
                top = np.full((heads, rows.stop - rows.start, 1), -np.inf, q.dtype)
                total, sums = np.zeros_like(top), np.zeros((heads, rows.stop - rows.start, q.shape[2]), q.dtype)
                for columns in strips(rows.stop, TILE):
                    s = self._scores(q, k, rows, columns)
                    higher = np.maximum(top, s.max(axis=2, keepdims=True))
                    shrink = np.exp(top - higher)
                    np.exp(np.subtract(s, higher, out=s), out=s)
                    total = total * shrink + s.sum(axis=2, keepdims=True)
                    self._round(s, qkv.dtype)
                    sums = sums * shrink + np.matmul(s, v[:, columns])
                    top = higher
                wide_o[:, rows] = sums / total
                log_sums[b, :, rows] = (top + np.log(total))[:, :, 0]
            self._put(wide_o.transpose(1, 0, 2), o[b])

    @_quiet
    def attend_tiled_gradient(self, qkv: Array, heads: int, log_sums: Array, o: Array, do: Array, dqkv: Array) -> None:
        """dqkv (B, T, 3C), every tile of P computed again from the row's log-sum-exp; Σ dO·O stands for Σ P·dP."""
        for b in range(len(qkv)):
            q, k, v = self._heads(qkv[b], heads, "qkv")
            (g,), (wide_o,) = (self._heads(x[b], heads, name, parts=1) for x, name in ((do, "do"), (o, "kept o")))
            dq, dk, dv = out = self._gradients(qkv[b].size, heads, q)
            dq[...] = 0
            for rows in strips(qkv.shape[1], TILE):
                delta = np.einsum("hrd,hrd->hr", g[:, rows], wide_o[:, rows])[:, :, None]
                for columns in strips(rows.stop, TILE):
                    s = self._scores(q, k, rows, columns)
                    np.exp(np.subtract(s, log_sums[b, :, rows, None], out=s), out=s)
                    self._round(s, qkv.dtype)
                    dv[:, columns] += np.matmul(s.transpose(0, 2, 1), g[:, rows])
                    ds = np.matmul(g[:, rows], v[:, columns].transpose(0, 2, 1))
                    ds -= delta
                    ds *= s
                    ds *= scale_of(q)
                    self._round(ds, qkv.dtype)
                    dq[:, rows] += np.matmul(ds, k[:, columns])
                    dk[:, columns] += np.matmul(ds.transpose(0, 2, 1), q[:, rows])
            self._put_heads(out, dqkv[b])

    # --- strips ---------------------------------------------------------------------------------------------

    def _probabilities(self, q: Array, k: Array, rows: slice, kept: Array | None, dtype: np.dtype[np.generic]) -> Array:
        """One strip of P (H, R, stop), wide and on the grid of its type; copied to where it is kept, (H, T, T)."""
        everything = rows == slice(0, q.shape[1])
        place = kept if kept is not None and kept.dtype == q.dtype and everything else None
        s = self._scores(q, k, rows, slice(0, rows.stop), place)
        s -= s.max(axis=2, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=2, keepdims=True)
        self._round(s, dtype)
        if kept is not None and place is None:
            self._put(s, kept[:, rows, :rows.stop])
            kept[:, rows, rows.stop:] = 0
        return s

    def _kept(self, p: Array, rows: slice, work: np.dtype[np.generic]) -> Array:
        """One strip of a kept P, wide."""
        strip = p[:, rows, :rows.stop]
        if strip.dtype == work:
            return strip
        wide = widened("kept p", strip.reshape(-1), work, self._scratch)
        return wide.reshape(strip.shape)

    def _scores(self, q: Array, k: Array, rows: slice, columns: slice, place: Array | None = None) -> Array:
        """QKᵀ/√D of some rows and columns (H, R, columns), -inf above the diagonal."""
        shape = (len(q), rows.stop - rows.start, columns.stop - columns.start)
        s = self._strip(shape, "s", q.dtype) if place is None else place
        np.matmul(q[:, rows], k[:, columns].transpose(0, 2, 1), out=s)
        s *= scale_of(q)
        if columns.stop > rows.start:
            future = np.arange(columns.start, columns.stop) > np.arange(rows.start, rows.stop)[:, None]
            np.copyto(s, -np.inf, where=future)
        return s

    def _round(self, s: Array, dtype: np.dtype[np.generic]) -> None:
        """Rounds wide values to the grid of a narrower type, in place."""
        if dtype != s.dtype:
            round_to(s, dtype, out=s)

    # --- heads ----------------------------------------------------------------------------------------------

    def _heads(self, x: Array, heads: int, name: str, parts: int = 3) -> tuple[Array, ...]:
        """x (T, parts·C), wide, as ``parts`` views (H, T, D)."""
        wide = widened(name, x.reshape(-1), work_type(x), self._scratch)
        return tuple(wide.reshape(len(x), parts, heads, -1).transpose(1, 2, 0, 3))

    def _gradients(self, count: int, heads: int, q: Array) -> tuple[Array, Array, Array]:
        """Memory for dq, dk, dv (H, T, D) each, views of (T, 3, H, D); dk and dv are zero."""
        wide = self._scratch.array("dqkv", count, q.dtype).reshape(q.shape[1], 3, heads, -1).transpose(1, 2, 0, 3)
        wide[1:] = 0
        return wide[0], wide[1], wide[2]

    def _put_heads(self, views: tuple[Array, Array, Array], out: Array) -> None:
        self._put(self._scratch.array("dqkv", out.size, views[0].dtype).reshape(out.shape), out)

    def _strip(self, shape: tuple[int, ...], name: str, dtype: np.dtype[np.generic]) -> Array:
        return self._scratch.array(name, shape[0] * shape[1] * shape[2], dtype).reshape(shape)

    def _put(self, wide: Array, out: Array) -> None:
        """Rounds wide values once into out, of the same shape."""
        source = wide.reshape(-1)
        target = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)
        for span in spans(source.size):
            cast_block(source[span], target[span], self._scratch)
        if not out.flags.c_contiguous:
            out[...] = target.reshape(out.shape)


def strips(count: int, step: int) -> Iterator[slice]:
    """The slices that cut so many rows."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def scale_of(q: Array) -> Array:
    """1/√D, in the type of the arithmetic."""
    return np.array(q.shape[2] ** -0.5, q.dtype)


def _add_into(total: Array, addend: Array, rows: slice) -> None:
    """Adds what a strip gives to the keys and values up to its end."""
    total[:, :rows.stop] += addend
