"""One bit per element: which elements a ReLU let through.

Both directions look at the values' bit patterns and compute nothing, so no format is widened and none is
rounded.
"""

from collections.abc import Iterator

import numpy as np

from zerosim.numerics.blocks import Array, spans

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def packed_nbytes(count: int) -> int:
    """Bytes that ``count`` bits take."""
    return -(-count // 8)


def pack_nonzero(y: Array, out: Array) -> None:
    """Sets bit i of ``out`` (uint8, ⌈n/8⌉) iff element i of ``y`` (n elements, any shape) is not +0."""
    words = _words(y)
    for here, packed in _blocks(words.shape[0]):
        out[packed] = np.packbits(words[here] != 0)


def select(bits: Array, x: Array, out: Array) -> None:
    """``out`` = x where its bit is set, else +0, even where x is NaN; both of n elements in one dtype."""
    words, chosen = _words(x), _words(out)
    for here, packed in _blocks(words.shape[0]):
        mask = np.unpackbits(bits[packed])[:words[here].shape[0]]
        np.multiply(words[here], mask, out=chosen[here])


def _words(x: Array) -> Array:
    return x.reshape(-1).view(WORDS[x.dtype.itemsize])


def _blocks(count: int) -> Iterator[tuple[slice, slice]]:
    """The elements of each block, and the bytes that hold their bits: blocks begin at multiples of 8."""
    for here in spans(count):
        yield here, slice(here.start // 8, packed_nbytes(here.stop))
