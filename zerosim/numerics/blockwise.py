"""The loop of every kernel, and what the formulas of layers and matrices are written in.

A loop widens a block of each operand, computes in float32 or float64, and rounds the block once. A block is a
contiguous row (n,) of n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from zerosim.numerics.arrays import BLOCK, SMALL, Array, Scratch, in_blocks, spans
from zerosim.numerics.checks import FLOATING, FP32, FP64, work_type
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.rounding import nearest_block, pack_block, unpack_block

# A user's errstate decides about warnings of the user's own arithmetic. In kernels infinities and NaN are results.
quiet = np.errstate(all="ignore")

# Called with blocks of the inputs and, last, the block that it writes; all (n,), of one type.
Operation = Callable[..., object]


_FAST = ({FP32, FORMATS["bf16"].dtype}, {FP32, FP64})  # bf16 is the upper half of an fp32


def casts_itself(x: Array, out: Array) -> bool:
    """True where the types' own cast rounds once, and as fast as the memory, or few elements."""
    types = {x.dtype, out.dtype}
    return len(types) == 1 or types in _FAST or (out.size <= SMALL and FP32 in types and types <= FLOATING)


def cast_block(x: Array, out: Array, scratch: Scratch) -> None:
    """One block from any floating type to any, rounded once; float32 stands between the types that are narrower."""
    if x.dtype == FP64 and out.dtype not in (FP32, FP64):
        # Rounded here, exact afterwards: rounding to float32 first would round twice.
        wide = scratch.array("cast fp64", x.size, FP64)
        nearest_block(x, wide, format_of(out.dtype), scratch)
        x = wide
    if casts_itself(x, out):
        np.copyto(out, x, casting="unsafe")
    elif x.dtype == FP32:
        pack_block(x, out, scratch)
    elif out.dtype == FP32:
        unpack_block(x, out)
    else:
        middle = scratch.array("cast fp32", x.size, FP32)
        cast_block(x, middle, scratch)
        cast_block(middle, out, scratch)


def extremum(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
    """out (n,) = np.maximum or np.minimum of the blocks a and b (n,), NaN if either is; of +0 and -0, of which NumPy's
    own return the one or the other, the larger is +0 and the smaller -0."""
    ufunc(a, b, out=out)  # out is neither a nor b: both are read again
    word, signs = np.dtype(f"u{out.dtype.itemsize}"), np.bitwise_and if ufunc is np.maximum else np.bitwise_or
    # Where a equals b their bits are equal, but for zeros' signs.
    signs(a.view(word), b.view(word), out=out.view(word), where=a == b)


@cache
def nonfinite_codes(dtype: np.dtype[Any]) -> tuple[Array, int] | None:
    """The mask that takes the sign away and the smallest code of what is not finite; None for integers."""
    overflow_values = {fmt.dtype: fmt.overflow_value for fmt in FORMATS.values()} | {np.dtype(np.float64): np.inf}
    if dtype not in overflow_values:
        return None
    code = np.dtype(f"u{dtype.itemsize}")
    mask = np.array((1 << (8 * dtype.itemsize - 1)) - 1, code)
    return mask, int(np.array(overflow_values[dtype], dtype).view(code) & mask)


# -- What the formulas of layers and matrices are written in -----------------------------------------------------------

# Longer rows einsum cuts into pieces of this length, begun wherever the rows before have ended.
EINSUM_PIECE = 8192  # elements


@dataclass(frozen=True, slots=True)
class PerRow:
    """One number for each row: an array (..., M) beside others (..., M, C)."""

    values: Array


@dataclass(frozen=True, slots=True)
class PerColumn:
    """One number for each column: an array (C,) beside others (..., C), or (R, S) beside (..., R, S)."""

    values: Array


class BlockKernels:
    """Room, casts, functions of elements and sums along rows: on NumPy's arrays, or, overridden, on a device's."""

    xp: Any = np
    BLOCK = BLOCK
    STRIP = 64  # rows of P at a time, in attention
    TILE = 128  # rows and columns at a time, in its tiled form
    GROUP = 131072  # elements of a strip of all heads that are taken together
    LOOKS_UP = True  # functions of numbers of 16 bits, in tables of all their values
    scratch_memory: Scratch

    def run_blocks(self, function: Operation, inputs: Sequence[Array], out: Array, work: np.dtype[Any] | None = None, *,
                   in_place: bool = False, with_scratch: bool = False) -> None:
        """out = function(*inputs, result), block by block, computed in the type `work`, rounded once to out's; arrays
        of one shape, any strides.

        With `in_place` the function may be given an input as its result; else its result is memory of its own. With
        `with_scratch` its first argument is a scratch memory.
        """
        work = work or work_type(*inputs, out)
        scratch = [self.scratch_memory] if with_scratch else []
        for here, *rest in in_blocks(out, *inputs):
            apart = here.dtype != work or (not in_place and any(x is here for x in rest))
            result = self.room("result", here.size, work) if apart else here
            blocks = [x if x.dtype == work else self.wide(f"input {i}", x, work) for i, x in enumerate(rest)]
            function(*scratch, *blocks, result)
            self.round_into(result, here)

    def uploaded(self, x: Array) -> Array:
        """x where these kernels compute, bit for bit: here."""
        return x

    def room(self, name: str, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The scratch memory of that name, not initialized, as an array of this shape."""
        return self.scratch_memory.array(name, shape, dtype)

    def computes_in(self, out: Array, work: np.dtype[Any]) -> bool:
        """True where values of the type ``work`` can be computed in the memory of ``out``."""
        return out.dtype == work

    def room_for(self, name: str, out: Array, work: np.dtype[Any]) -> Array:
        """The array in which the values of ``out`` are to be computed, in its shape: itself where that can be, else the
        scratch memory of that name, from which `round_into` takes them."""
        return out if self.computes_in(out, work) else self.room(name, out.shape, work)

    def round_into(self, wide: Array, out: Array) -> None:
        """out becomes `wide`, each value rounded once, unless they are one and the same; any strides."""
        if wide is out:
            return
        if wide.dtype == out.dtype and wide.shape == out.shape:
            np.copyto(out, wide)
            return
        row = out if out.flags.c_contiguous else self.room("rounded", out.shape, out.dtype)
        self._cast(wide.reshape(-1), row.reshape(-1))
        if row is not out:
            np.copyto(out, row)

    def wide(self, name: str, x: Array, work: np.dtype[Any]) -> Array:
        """x of any shape and strides in the type ``work``: itself where it has that type, else a contiguous copy in the
        scratch memory of that name."""
        if x.dtype == work:
            return x
        if not x.flags.c_contiguous:
            narrow = self.room(f"{name} narrow", x.shape, x.dtype)
            np.copyto(narrow, x)
            x = narrow
        wide = self.room(name, x.shape, work)
        self._cast(x.reshape(-1), wide.reshape(-1))
        return wide

    def _cast(self, x: Array, out: Array) -> None:
        """out (n,) = x (n,), both contiguous, block by block where it takes several operations."""
        if x.size != out.size:
            raise ValueError(f"{x.size} numbers were to be written to an array of {out.size}; pass one of their shape")
        if casts_itself(x, out):
            np.copyto(out, x, casting="unsafe")
            return
        for span in spans(out.size):
            cast_block(x[span], out[span], self.scratch_memory)

    def matrix(self, name: str, x: Array, dtype: np.dtype[Any]) -> Array:
        """x (m, n) in a type, in the order of memory that it has: a BLAS takes a transposed matrix as it lies."""
        if not x.flags.c_contiguous and x.T.flags.c_contiguous:
            return self.matrix(name, x.T, dtype).T
        return self.wide(name, x, dtype)

    def apply(self, function: Operation, inputs: Sequence[Array | PerRow | PerColumn | float], out: Array,
              work: np.dtype[Any] | None = None, *, grid: np.dtype[Any] | None = None, also: Array | None = None,
              with_scratch: bool = False) -> None:
        """out = function(*inputs, result) for every element, computed in the type ``work`` (that of the arrays if it is
        None), on the grid of the type ``grid``, rounded once to out's type.

        ``out`` may be an input's memory: a function writes its result when it has read what it needs of the element.
        ``also`` takes a second result, which the function writes to its last argument and which no grid changes; it is
        no input's memory. With `with_scratch` the function's first argument is a scratch memory.
        """
        work = work or work_type(*(x for x in (*inputs, out) if isinstance(x, np.ndarray)))
        blocks = [self._beside(i, x, work) for i, x in enumerate(inputs)]
        outs = [out] if also is None else [out, also]
        results = [self.room_for("second " * i + "result", one, work) for i, one in enumerate(outs)]
        function(*([self.scratch_memory] if with_scratch else ()), *blocks, *results)
        if grid is not None:
            self.onto_grid(results[0], grid)
        for result, one in zip(results, outs, strict=True):
            self.round_into(result, one)

    def _beside(self, i: int, x: Array | PerRow | PerColumn | float, work: np.dtype[Any]) -> Array | float:
        values: Any = x.values if isinstance(x, PerRow | PerColumn) else x
        if isinstance(values, np.ndarray) and values.dtype != work:
            values = self.wide(f"input {i}", values, work)
        found: Array | float = values[..., None] if isinstance(x, PerRow) else values
        return found

    def onto_grid(self, x: Array, dtype: np.dtype[Any]) -> None:
        """Rounds wide values to the grid of a narrower type, in place."""
        if dtype != x.dtype:
            for here, block in in_blocks(x, x):
                nearest_block(block, here, format_of(dtype), self.scratch_memory)

    def scale_past(self, s: Array, scale: float, future: Array) -> None:
        """s (..., R, S)·scale, and -inf in the last columns where the mask ``future`` (R, R) says so, in place."""
        s *= scale
        np.copyto(s[..., -len(future) :], -np.inf, where=future)

    def row_blocks(self, x: Array) -> Iterator[slice]:
        """The rows of x (M, …) that are taken together: at most BLOCK elements, but at least one row."""
        return spans(len(x), max(1, self.BLOCK // max(1, prod(x.shape[1:]))))

    def row_sums(self, x: Array) -> Array:
        """The sums along the last axis of x (..., n), in its type; a row's sum depends on nothing but the row."""
        return self._sums_of_rows("...n->...", x)

    def row_products(self, x: Array, y: Array) -> Array:
        """The sums along the last axis of x·y (..., n), likewise; no array of products is made."""
        return self._sums_of_rows("...n,...n->...", x, y)

    def _sums_of_rows(self, subscripts: str, *factors: Array) -> Array:
        total: Array = np.einsum(subscripts, *[x[..., :EINSUM_PIECE] for x in factors])
        for first in range(EINSUM_PIECE, factors[0].shape[-1], EINSUM_PIECE):
            total += np.einsum(subscripts, *[x[..., first : first + EINSUM_PIECE] for x in factors])
        return total

    def row_maxima(self, x: Array) -> Array:
        """The largest values along the last axis of x (..., n), contiguous, n >= 1; NaN where a row has one.

        NumPy looks for the place of the maximum with vector instructions, three times as fast as for its value.
        """
        rows = x.reshape(-1, x.shape[-1])
        places = rows.argmax(axis=1)
        places += np.arange(0, rows.size, rows.shape[1])
        maxima: Array = rows.reshape(-1).take(places).reshape(x.shape[:-1])
        return maxima

    def add_column_sums(self, x: Array, total: Array) -> None:
        """total (C,) += the sum over the rows of x (M, C), in total's type."""
        total += np.add.reduce(x, axis=0, dtype=total.dtype)

    def picked(self, x: Array, columns: Array) -> Array:
        """The element of each row of x (M, C) in the column given for it (M,), or any where that is below 0."""
        found: Array = np.take_along_axis(x, np.maximum(columns, 0)[:, None], axis=1)[:, 0]
        return found
