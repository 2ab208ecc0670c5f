"""Blocks: how the kernels walk over long arrays, and the memory they do it in.

One NumPy call costs half a microsecond, and a result that falls out of the cache is paid for twice. Blocks of
BLOCK elements are long enough to hide the first and short enough to avoid the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 65536  # elements
# Up to here the array types' own casts cost less than the dozen calls of a packed block, even on subnormals.
SMALL = 256  # elements
ALIGNMENT_NBYTES = 64  # a cache line
ALIGNED_FROM_NBYTES = 4096  # smaller arrays are not worth a cache line of slack
ADAPTS_UP_TO_NBYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bit (malloc.c, 2.6 and later)


def spans(count: int, block: int = BLOCK) -> Iterator[slice]:
    """The slices that cut `count` elements into blocks, left to right; none where count is 0."""
    for start in range(0, count, block):
        yield slice(start, min(start + block, count))


def slack_nbytes(nbytes: int) -> int:
    """The bytes that the base of an array from `empty` holds beyond the array's own."""
    return ALIGNMENT_NBYTES if nbytes >= ALIGNED_FROM_NBYTES else 0


def empty(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array that is not initialized; from 4096 bytes on, its data begins at a multiple of 64 bytes.

    A copy between two arrays whose addresses differ by a few bytes modulo 4096 is up to fifteen times slower than
    one between aligned arrays (glibc's memcpy on some processors), and malloc aligns to 16 bytes only.
    """
    dtype = np.dtype(dtype)
    nbytes = (prod(map(int, shape)) if isinstance(shape, tuple) else int(shape)) * dtype.itemsize
    slack = slack_nbytes(nbytes)
    if not slack:
        return np.empty(shape, dtype)
    base = np.empty(nbytes + slack, np.uint8)
    offset = -base.ctypes.data % ALIGNMENT_NBYTES
    return base[offset : offset + nbytes].view(dtype).reshape(shape)


@cache  # malloc is the process's: once is enough, and a second time its page would really be zeroed
def keep_freed_memory() -> None:
    """Makes malloc keep the memory of arrays that die for those that come, where it adapts to what it sees (glibc).

    It gives arrays back to the system when they die, and takes zeroed pages for the next ones, which costs a training
    step up to a fifth of its time; but not those that are shorter than the longest that it has seen die, up to a limit.
    So an array of that length dies here, which nobody has touched: it takes microseconds.
    """
    bytes(ADAPTS_UP_TO_NBYTES - 65536)  # less some pages for its header


class Scratch:
    """Named pieces of memory that are used again and again; what is in one of them is only good until the next
    call for the same name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now, slack included."""
        return sum(buffer.nbytes + slack_nbytes(buffer.nbytes) for buffer in self._buffers.values())

    def array(self, name: str, count: int, dtype: npt.DTypeLike) -> Array:
        """`count` elements, not initialized; the memory grows to the longest ever asked for under this name."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self._buffers[name] = buffer = empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


def flat(x: Array, out: Array) -> Array:
    """x as one row of elements that may be read while `out` is written block by block.

    A copy where x is strided, or shares memory with `out` without being the same elements in the same type: a
    blockwise kernel would read what it has just overwritten.
    """
    row = x.reshape(-1)
    if not np.may_share_memory(row, out):
        return row
    same = row.ctypes.data == out.ctypes.data and row.strides == out.strides and row.dtype == out.dtype
    return row if same else row.copy()


def row_of(out: Array) -> Array:
    """Where the elements of `out` are to be written as one row: a view, or memory that `put_back` copies from."""
    return out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)


def put_back(row: Array, out: Array) -> None:
    """Ends what `row_of` began."""
    if not out.flags.c_contiguous:
        out[...] = row.reshape(out.shape)
