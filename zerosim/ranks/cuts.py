"""Cuts: how a vector of n elements is divided into N consecutive chunks, one for each rank.

Legend: n elements, N ranks. A cut is a tuple of N+1 boundaries; chunk i is ``vector[cut[i]:cut[i + 1]]``.
"""

import operator
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from zerosim.numerics.checks import is_count

Cut = tuple[int, ...]


@lru_cache(maxsize=4096)
def ceil_cut(length: int, ranks: int) -> Cut:
    """Boundaries min(n, i * ceil(n/N)): equal chunks, of which the last ones may be short or empty.

    >>> ceil_cut(9, 4)
    (0, 3, 6, 9, 9)
    """
    chunk = -(-length // ranks)
    return tuple(min(length, i * chunk) for i in range(ranks + 1))


def checked_cut(splits: Iterable[int] | None, length: int, ranks: int) -> Cut:
    """The boundaries asked for by ``splits``, or the ceil cut when it is None.

    Raises ValueError unless ``splits`` is N+1 rising integers from 0 to n.
    """
    if splits is None:
        return ceil_cut(length, ranks)
    return _checked(whole_numbers(splits, length, ranks), length, ranks)


@lru_cache(maxsize=256)  # a model of many equal units asks for few cuts again and again, each of N+1 boundaries
def _checked(cut: Cut, length: int, ranks: int) -> Cut:
    if len(cut) != ranks + 1 or cut[0] != 0 or cut[-1] != length or any(a > b for a, b in pairwise(cut)):
        raise ValueError(f"splits={cut} does not cut {length} elements among {ranks} ranks; pass {ranks + 1} rising "
                         f"boundaries from 0 to {length}, e.g. {ceil_cut(length, ranks)}")
    return cut


def gathered_cut(splits: Iterable[int] | None, length: int | None, own: int, ranks: int) -> Cut:
    """The cut of a gather: by its splits, of a given length, or of N chunks as long as the own one.

    Raises ValueError for a length that is no count, and like ``checked_cut``.
    """
    if length is not None and (not is_count(length) or length < 0):
        raise ValueError(f"length={length!r} must be the number of elements of the whole vector, 0 or more")
    whole = own * ranks if length is None else int(length)
    if splits is None:
        return ceil_cut(whole, ranks)
    boundaries = whole_numbers(splits, whole, ranks)
    return checked_cut(boundaries, max(boundaries, default=0) if length is None else whole, ranks)


def whole_numbers(splits: Iterable[int], length: int, ranks: int) -> Cut:
    """The boundaries as integers; raises ValueError where they are none."""
    if type(splits) is tuple and set(map(type, splits)) == {int}:
        return splits
    try:
        return tuple(operator.index(boundary) for boundary in splits)
    except TypeError as error:
        raise ValueError(f"splits= must hold integers, found {splits!r}; pass N+1 boundaries, e.g. "
                         f"{ceil_cut(length, ranks)}") from error


@lru_cache(maxsize=4096)
def chunk_lengths(cut: Cut) -> np.ndarray:
    """(N,): the elements of each chunk; read-only."""
    lengths = np.diff(cut)
    lengths.flags.writeable = False
    return lengths


def largest_chunk(cut: Cut) -> int:
    """Elements of the longest chunk."""
    return int(chunk_lengths(cut).max())
