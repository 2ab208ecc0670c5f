"""The right answers, in plain NumPy on all ranks' data at once, and the traffic of good ones, as planned.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from zerosim.planning.collectives import Sent, sent
from zerosim.planning.cuts import ceil_cut

Array = np.ndarray


def data(seed: str, ranks: int, length: int) -> list[Array]:
    """A vector (n,) fp32 for every rank, all different, of magnitudes from 0.01 to 100."""
    return [_vector(seed, length, rank).copy() for rank in range(ranks)]


@cache  # a check asks for the same cases again and again
def _vector(seed: str, length: int, rank: int) -> Array:
    rng = np.random.default_rng([*seed.encode(), length, rank])
    return (rng.standard_normal(length) * 10.0 ** rng.integers(-2, 3, length)).astype(np.float32)


def chunk_slices(length: int, ranks: int) -> list[slice]:
    """Every rank's chunk of a vector (n,)."""
    return [slice(*bounds) for bounds in pairwise(ceil_cut(length, ranks))]


def ring_sum(vectors: Sequence[Array], way: int = 1) -> Array:
    """The sum (n,) whose chunk c is x[c+1] + x[c+2] + ... + x[c], as a ring adds it; the other way round for -1."""
    ranks, total = len(vectors), np.empty_like(vectors[0])
    for c, own in enumerate(chunk_slices(len(total), ranks)):
        total[own] = ordered_sum([vectors[(c + way * step) % ranks][own] for step in range(1, ranks + 1)])
    return total


def ordered_sum(vectors: Sequence[Array]) -> Array:
    """x[0] + x[1] + ..., from left to right, rounded after every addition."""
    total = vectors[0].copy()
    for x in vectors[1:]:
        total += x
    return total


def chunks(vector: Array, ranks: int) -> list[Array]:
    """The vector's chunk of each rank."""
    return [vector[own].copy() for own in chunk_slices(len(vector), ranks)]


def traffic(collective: str, length: int, ranks: int, itemsize: int = 4) -> Sent:
    """The traffic of a collective of n elements: round a ring, or for a "broadcast" along a tree from rank 0."""
    return sent(collective, "tree" if collective == "broadcast" else "ring", ceil_cut(length, ranks), itemsize)
