"""A GPU's order of additions, written once more in plain NumPy; kernels, and clusters, that keep it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np

import zerosim as zs
from zerosim.numerics import kernels
from zerosim.ranks import cluster

HEIGHT, WIDTH = 32, 2**20


def added(x: np.ndarray) -> np.ndarray:
    """The sums (lines, columns) of x (lines, length, columns), from 0 on: as in a table of 32 rows, or of more where it
    would be wider than 2^20, whose columns are added up from the top; the sums are such numbers again."""
    lines, length, columns = x.shape
    width = min(max(1, -(-length // HEIGHT)), WIDTH)
    total = np.zeros((lines, width, columns), x.dtype)
    for first in range(0, length, width):
        row = x[:, first:first + width]
        total[:, :row.shape[1]] += row
    return total[:, 0] if width == 1 else added(total)


def added_by_class(x: np.ndarray, classes: np.ndarray, out: np.ndarray) -> None:
    """out (V, C) = the sums of the rows of x (M, C) by class (M,), in blocks of 32 sorted rows; the sums of the first
    and of the last class of each block are such rows again, while there are several blocks."""
    out[...] = 0
    rows = [(classes[i], x[i]) for i in np.argsort(classes, kind="stable")]
    while len(rows) > HEIGHT:
        ends: list[tuple[int, np.ndarray]] = []
        for first in range(0, len(rows), HEIGHT):
            head, *others = runs(rows[first:first + HEIGHT])
            for owner, total in others[:-1]:
                out[owner] = total
            ends += [head, others[-1] if others else (head[0], np.full_like(head[1], -0.0))]
        rows = ends
    for owner, total in runs(rows):
        out[owner] = total


def runs(rows: list[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    """Each class among sorted rows, and the sum of its own, from the first on."""
    for owner, its in groupby(rows, key=lambda row: row[0]):
        yield owner, reduce(np.add, (x for _, x in its))


class InGpuOrder(kernels.NumpyKernels):
    """NumPy's arithmetic with a GPU's sums. Products of matrices are NumPy's."""

    def row_blocks(self, x: np.ndarray) -> Iterator[slice]:
        yield slice(0, len(x))

    def row_sums(self, x: np.ndarray, work: Any = None) -> np.ndarray:
        x = x.astype(work or x.dtype)
        return added(x.reshape(-1, x.shape[-1], 1)).reshape(x.shape[:-1])

    def row_products(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self.row_sums(x * y)

    def add_column_sums(self, x: np.ndarray, total: np.ndarray) -> None:
        total += added(x[None].astype(total.dtype))[0]

    def _column_sum(self, x: np.ndarray, out: np.ndarray, work: Any) -> None:
        self.cast_pack(added(self.wide("rows", np.ascontiguousarray(x), work)[None])[0], out)

    def sum_of_squares(self, x: np.ndarray, divisor: float = 1.0) -> float:
        quotient = np.empty(x.size, np.float64 if x.dtype == np.float64 else np.float32)
        self.divide_rounded(x.reshape(-1), divisor, quotient)
        with np.errstate(all="ignore"):
            return float(added(np.square(quotient.astype(np.float64))[None, :, None]).item())

    def add_rows(self, x: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        wide = np.empty(out.shape, np.float64 if np.float64 in (x.dtype, out.dtype) else np.float32)
        added_by_class(x.astype(wide.dtype), rows, wide)
        self.cast_pack(wide, out)


class _Host(cluster.Processor):
    def kernels(self, count: int) -> list[InGpuOrder]:
        return [InGpuOrder()] * count


def cluster_in_gpu_order(ranks: int, **options: Any) -> zs.Cluster:
    """A Cluster whose sums are a GPU's."""
    return zs.Cluster(ranks, processor=_Host(), **options)
