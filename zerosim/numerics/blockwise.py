"""The loop of every kernel: widen a block of each operand, compute in float32 or float64, round the block once.

The scratch memory is an argument; all arrays here are contiguous rows (n,), unless a line says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerosim.numerics.blocks import Array, Scratch, flat, put_back, row_of, spans
from zerosim.numerics.checks import FP32, FP64, work_type
from zerosim.numerics.formats import format_of
from zerosim.numerics.packing import pack_block, unpack_block
from zerosim.numerics.rounding import nearest_block

# Called with blocks of the inputs and, last, the block that it writes; all (n,), of one type.
Operation = Callable[..., object]


def run_blocks(
    function: Operation,
    inputs: tuple[Array, ...],
    out: Array,
    scratch: Scratch,
    *,
    work: np.dtype[Any] | None = None,
    in_place: bool = False,
) -> None:
    """out = function(*inputs), computed in the type `work`, rounded once to out's; arrays of one shape, any strides.

    With `in_place` the function may be given an input as its result; else its result is memory of its own.
    """
    work = work or work_type(*inputs, out)
    row = row_of(out)
    rows = [flat(x, row) for x in inputs]
    direct = row.dtype == work and (in_place or not any(np.may_share_memory(x, row) for x in rows))
    for span in spans(row.size):
        blocks = [widened(f"input {i}", x[span], work, scratch) for i, x in enumerate(rows)]
        result = row[span] if direct else scratch.array("result", row[span].size, work)
        function(*blocks, result)
        if not direct:
            cast_block(result, row[span], scratch)
    put_back(row, out)


def sum_blocks(addends: Sequence[Array], out: Array, scratch: Scratch) -> None:
    """out = ((addends[0] + addends[1]) + addends[2]) + ..., every sum rounded to out's type; arrays of one shape and of
    out's type, any strides.

    The partial sum stays in float32 and on the format's grid: to round it there takes half the time of packing and
    unpacking it.
    """
    work, row = work_type(out), row_of(out)
    rows = [flat(x, row) for x in addends]
    for span in spans(row.size):
        total = widened("total", rows[0][span], work, scratch)
        for place, x in enumerate(rows[1:], start=2):
            addend = widened("input 0", x[span], work, scratch)
            # Not over the first addend, which is the caller's, nor into `out`, which may be the last one's memory.
            result = scratch.array("total", total.size, work)
            total = np.add(total, addend, out=result)
            if place < len(rows) and out.dtype != work:
                nearest_block(total, total, format_of(out.dtype), scratch)
        cast_block(total, row[span], scratch)
    put_back(row, out)


def widened(name: str, x: Array, work: np.dtype[Any], scratch: Scratch) -> Array:
    """x in the type `work`: itself where it has that type, else a copy in the scratch memory of that name."""
    if x.dtype == work:
        return x
    wide = scratch.array(name, x.size, work)
    for span in spans(x.size):
        cast_block(x[span], wide[span], scratch)
    return wide


def widened_view(name: str, x: Array, work: np.dtype[Any], scratch: Scratch) -> Array:
    """x of any shape and strides in the type `work`: itself where it has that type, else a contiguous copy in the
    scratch memory of that name."""
    if x.dtype == work:
        return x
    if not x.flags.c_contiguous:
        narrow = scratch.array(f"{name} narrow", x.size, x.dtype).reshape(x.shape)
        np.copyto(narrow, x)
        x = narrow
    return widened(name, x.reshape(-1), work, scratch).reshape(x.shape)


def room_for(name: str, out: Array, work: np.dtype[Any], scratch: Scratch) -> Array:
    """Where the values of `out` are to be computed, in its shape: `out` itself where it has the type `work`, else the
    scratch memory of that name, from which `settle` rounds them."""
    return out if out.dtype == work else scratch.array(name, out.size, work).reshape(out.shape)


def settle(wide: Array, out: Array, scratch: Scratch) -> None:
    """out becomes `wide`, each value rounded once, unless they are one and the same; `wide` contiguous where not, `out`
    of any strides."""
    if wide is out:
        return
    contiguous = out.flags.c_contiguous
    source = wide.reshape(-1)
    row = out.reshape(-1) if contiguous else scratch.array("settled", out.size, out.dtype)
    for span in spans(source.size):
        cast_block(source[span], row[span], scratch)
    if not contiguous:
        np.copyto(out, row.reshape(out.shape))


def widened_matrix(name: str, x: Array, work: np.dtype[Any], scratch: Scratch) -> Array:
    """x (m, n) in the type `work`, in the order of memory that it has: BLAS takes a transposed matrix as it lies."""
    if x.dtype == work:
        return x
    if x.T.flags.c_contiguous and not x.flags.c_contiguous:
        return widened_matrix(name, x.T, work, scratch).T
    return widened(name, x.reshape(-1), work, scratch).reshape(x.shape)


def cast_block(x: Array, out: Array, scratch: Scratch) -> None:
    """One block from any floating type to any, rounded once; float32 stands between the types that are narrower."""
    if x.dtype == FP64 and out.dtype not in (FP32, FP64):
        # Rounded here, exact afterwards: rounding to float32 first would round twice.
        wide = scratch.array("cast fp64", x.size, FP64)
        nearest_block(x, wide, format_of(out.dtype), scratch)
        x = wide
    native = x.dtype in (FP32, FP64)
    if x.dtype == out.dtype or (native and out.dtype in (FP32, FP64)):
        np.copyto(out, x, casting="same_kind")
    elif x.dtype == FP32:
        pack_block(x, out, scratch)
    elif out.dtype == FP32:
        unpack_block(x, out, scratch)
    else:
        middle = scratch.array("cast fp32", x.size, FP32)
        cast_block(x, middle, scratch)
        cast_block(middle, out, scratch)
