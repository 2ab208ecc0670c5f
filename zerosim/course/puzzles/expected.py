"""The right answers, in plain NumPy on all ranks' data at once, and the traffic of good ones, from the closed forms.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerosim.planning.collectives import sent
from zerosim.planning.cuts import ceil_cut

Array = np.ndarray


def data(seed: str, ranks: int, length: int) -> list[Array]:
    """A vector (n,) fp32 for every rank, all different, of magnitudes from 0.01 to 100."""
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng([*seed.encode(), length, rank])
        found.append((rng.standard_normal(length) * 10.0 ** rng.integers(-2, 3, length)).astype(np.float32))
    return found


def chunk_slices(length: int, ranks: int) -> list[slice]:
    """Every rank's chunk of a vector (n,)."""
    chunk = -(-length // ranks)
    return [slice(min(length, rank * chunk), min(length, (rank + 1) * chunk)) for rank in range(ranks)]


def ring_sum(vectors: Sequence[Array]) -> Array:
    """The sum (n,) whose chunk c is x[c+1] + x[c+2] + ... + x[c], as a ring adds it."""
    ranks, total = len(vectors), np.empty_like(vectors[0])
    for c, own in enumerate(chunk_slices(len(total), ranks)):
        total[own] = ordered_sum([vectors[(c + 1 + step) % ranks][own] for step in range(ranks)])
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


class Wire(NamedTuple):
    """The traffic of a collective: the bytes of the rank that sends most, of all ranks together, and the steps."""

    most_nbytes: int
    all_nbytes: int
    steps: int


def ring_wire(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A ring's: "reduce_scatter", "all_gather" or "all_reduce" of n elements."""
    return _wire(collective, "ring", length, ranks, itemsize)


def tree_wire(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A binomial tree's: "broadcast" or "reduce" of n elements, with root 0."""
    return _wire(collective, "tree", length, ranks, itemsize)


def _wire(collective: str, algorithm: str, length: int, ranks: int, itemsize: int) -> Wire:
    found = sent(collective, algorithm, ceil_cut(length, ranks), itemsize)
    return Wire(max(found.nbytes), sum(found.nbytes), found.steps)


def in_sequence(*wires: Wire) -> Wire:
    """Several collectives, one after another; the most is that of a rank that sends most in each."""
    return Wire(sum(wire.most_nbytes for wire in wires), sum(wire.all_nbytes for wire in wires),
                sum(wire.steps for wire in wires))
