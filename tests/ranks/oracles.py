"""The orders of additions, written once more and plainly: one element-wise addition in fp32, one rounding.

Legend: n elements, N ranks, x = N vectors (n,), chunk i = vector[cut[i]:cut[i + 1]].
"""

from collections.abc import Callable, Sequence

import numpy as np

Vectors = Sequence[np.ndarray]
F32 = np.dtype(np.float32)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b as hardware does it: in fp32 (fp64 and integers in their own type), rounded once to a's type."""
    with np.errstate(all="ignore"):
        if a.dtype == np.float64 or a.dtype.kind in "iu":
            return a + b
        return (a.astype(F32) + b.astype(F32)).astype(a.dtype)


def left_to_right(vectors: Vectors) -> np.ndarray:
    """((x0 + x1) + x2) + ..."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = add(total, vector)
    return total


def rank_order(x: Vectors, root: int = 0) -> np.ndarray:
    """x[root] + x[root+1] + ... round the ranks."""
    return left_to_right([x[(root + i) % len(x)] for i in range(len(x))])


def by_chunk(x: Vectors, cut: Sequence[int], one: Callable[[list[np.ndarray], int], np.ndarray]) -> np.ndarray:
    """Each chunk c summed by ``one(the chunk of every rank, c)``, put together."""
    return np.concatenate([one([v[cut[c]:cut[c + 1]] for v in x], c) for c in range(len(cut) - 1)])


def from_the_next(chunks: list[np.ndarray], c: int) -> list[np.ndarray]:
    """Chunk c's addends in the order c+1, ..., c."""
    return chunks[c + 1:] + chunks[:c + 1]


def ring(x: Vectors, cut: Sequence[int]) -> np.ndarray:
    """x[c+1] + x[c+2] + ... + x[c], rounded after each addition."""
    return by_chunk(x, cut, lambda chunks, c: left_to_right(from_the_next(chunks, c)))


def ring_in(wire: np.dtype, x: Vectors, cut: Sequence[int]) -> np.ndarray:
    """The same order with all additions in another type, and one rounding at the end."""
    with np.errstate(all="ignore"):
        return ring([v.astype(wire) for v in x], cut).astype(x[0].dtype)


def rank_order_in(wide: np.dtype, x: Vectors) -> np.ndarray:
    """Rank order with all additions in another type, and one rounding at the end."""
    with np.errstate(all="ignore"):
        return rank_order([v.astype(wide) for v in x]).astype(x[0].dtype)


def folded(x: Vectors) -> list[np.ndarray]:
    """2^m vectors: of the first pairs of ranks each pair is one."""
    active = 1 << (len(x).bit_length() - 1)
    pairs = len(x) - active
    return [add(x[2 * i], x[2 * i + 1]) for i in range(pairs)] + list(x[2 * pairs:])


def butterfly(x: Vectors, distances: Sequence[int], index: int) -> np.ndarray:
    """What rank ``index`` has after adding partners at these distances, one after another."""
    if not distances:
        return x[index]
    *before, last = distances
    return add(butterfly(x, before, index), butterfly(x, before, index ^ last))


def powers(ranks: int) -> list[int]:
    """1, 2, 4, ... below N."""
    return [1 << i for i in range(ranks.bit_length() - 1)]


def doubling(x: Vectors) -> np.ndarray:
    """Whole vectors, partners at distance 1, 2, 4, ..."""
    active = folded(x)
    return butterfly(active, powers(len(active)), 0)


def halving(x: Vectors, cut: Sequence[int]) -> np.ndarray:
    """Chunk c by partners at distance N/2, ..., 2, 1 of rank c."""
    return by_chunk(x, cut, lambda chunks, c: butterfly(chunks, powers(len(x))[::-1], c))


def tree(x: Vectors, root: int = 0) -> np.ndarray:
    """Place v, counted from the root, adds what v+1, v+2, v+4, ... have summed up, as far as below its lowest bit."""
    ranks = len(x)

    def below(v: int) -> np.ndarray:
        total, reach = x[(root + v) % ranks], 1
        while v + reach < ranks and not v & reach:
            total, reach = add(total, below(v + reach)), 2 * reach
        return total

    return below(0)


def reduced(operation: str, algorithm: str, x: Vectors, cut: Sequence[int], root: int = 0) -> np.ndarray:
    """The whole sum (n,), in the order of the algorithm."""
    if algorithm in ("ring", "pairwise"):
        return ring(x, cut)
    if algorithm == "rabenseifner":
        active = folded(x)
        chunk = -(-len(x[0]) // len(active))
        own = [min(len(x[0]), i * chunk) for i in range(len(active) + 1)]
        return halving(active, cut if len(active) == len(x) else own)
    if algorithm == "tree":
        return tree(x, root)
    if algorithm in ("naive", "everyone"):
        return rank_order(x, root)
    return doubling(x) if algorithm == "doubling" else halving(x, cut)
