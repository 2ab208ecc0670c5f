"""What a collective must give, written once more and plainly: one element-wise addition in fp32, one rounding.

Legend: n elements, N ranks, x = N vectors (n,), chunk i = vector[cut[i]:cut[i + 1]].
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from tests.ranks.data import FLOATS

Vectors = Sequence[np.ndarray]
F32, F64 = FLOATS["fp32"], FLOATS["fp64"]


@np.errstate(all="ignore")
def rounded(operation: Callable[..., np.ndarray], a: np.ndarray, b: Any) -> np.ndarray:
    """One operation as hardware does it: in fp32 (fp64 and integers in their own type), rounded once to a's type."""
    if a.dtype == F64 or a.dtype.kind in "iu":
        return operation(a, b)
    return operation(a.astype(F32), b.astype(F32) if isinstance(b, np.ndarray) else F32.type(b)).astype(a.dtype)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b, rounded once."""
    return rounded(np.add, a, b)


@np.errstate(all="ignore")
def cast(x: Vectors, dtype: np.dtype) -> list[np.ndarray]:
    """All vectors in another type."""
    return [vector.astype(dtype) for vector in x]


def ceil_cut(length: int, ranks: int) -> tuple[int, ...]:
    """The default cut, by its definition: equal chunks, the last ones short or empty."""
    chunk = (length + ranks - 1) // ranks
    return tuple(min(length, index * chunk) for index in range(ranks + 1))


# -- orders of additions ----------------------------------------------------------------------------------------------

def rank_order(x: Vectors, cut: Sequence[int] = (), root: int = 0) -> np.ndarray:
    """x[root] + x[root+1] + ... round the ranks, rounded after each addition."""
    return reduce(add, [x[(root + i) % len(x)] for i in range(len(x))])


def by_chunk(x: Vectors, cut: Sequence[int], one: Callable[[list[np.ndarray], int], np.ndarray]) -> np.ndarray:
    """Each chunk c summed by ``one(the chunk of every rank, c)``, put together."""
    return np.concatenate([one([v[cut[c]:cut[c + 1]] for v in x], c) for c in range(len(cut) - 1)])


def ring(x: Vectors, cut: Sequence[int], root: int = 0) -> np.ndarray:
    """x[c+1] + x[c+2] + ... + x[c]."""
    return by_chunk(x, cut, lambda chunks, c: rank_order(chunks, root=c + 1))


def folded(x: Vectors) -> list[np.ndarray]:
    """2^m vectors: of the first pairs of ranks each pair is one."""
    pairs = len(x) - (1 << (len(x).bit_length() - 1))
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


def doubling(x: Vectors, cut: Sequence[int], root: int = 0) -> np.ndarray:
    """Partners at distance 1, 2, ..., N/2."""
    active = folded(x)
    return butterfly(active, powers(len(active)), 0)


def halving(x: Vectors, cut: Sequence[int], root: int = 0) -> np.ndarray:
    """Chunk c by partners at distance N/2, ..., 2, 1 of rank c; by a cut of its own where ranks sit out."""
    active = folded(x)
    bounds = cut if len(active) == len(x) else ceil_cut(len(x[0]), len(active))
    return by_chunk(active, bounds, lambda chunks, c: butterfly(chunks, powers(len(active))[::-1], c))


def tree(x: Vectors, cut: Sequence[int], root: int = 0) -> np.ndarray:
    """Place v, counted from the root, adds what v+1, v+2, v+4, ... have summed up, as far as below its lowest bit."""
    ranks = len(x)

    def below(v: int) -> np.ndarray:
        total, reach = x[(root + v) % ranks], 1
        while v + reach < ranks and not v & reach:
            total, reach = add(total, below(v + reach)), 2 * reach
        return total

    return below(0)


ORDERS: dict[str, Callable[[Vectors, Sequence[int], int], np.ndarray]] = {
    "ring": ring, "pairwise": ring, "halving": halving, "rabenseifner": halving, "doubling": doubling, "tree": tree,
    "naive": rank_order, "everyone": rank_order}


# -- results ----------------------------------------------------------------------------------------------------------

# The division factors before and after the sum, as PyTorch's and fairscale's FSDP have them.
SPLIT_FACTORS = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 4: (2, 2), 5: (2, 2.5), 6: (4, 1.5), 7: (2, 3.5), 8: (4, 2),
                 9: (2, 4.5), 16: (4, 4)}


def reduced(algorithm: str, x: Vectors, cut: Sequence[int], root: int = 0, *, op: str = "sum",
            average: str | None = None, wire: str | None = None, accumulate: str | None = None) -> np.ndarray:
    """The whole reduction (n,), in the order of the algorithm."""
    dtype, ranks = x[0].dtype, len(x)
    if op in ("max", "min"):
        return (np.maximum if op == "max" else np.minimum).reduce(np.array(cast(x, F64))).astype(dtype)
    before, after = 1.0, 1.0
    if op == "mean":
        before, after = {"divide_then_sum": (ranks, 1), "split": SPLIT_FACTORS[ranks], "premultiply": (1, 1)}.get(
            average or "sum_then_divide", (1, ranks))
    if average == "premultiply":
        inverse = 1 / ranks if dtype == F64 else float(np.float32(1 / ranks).astype(dtype))
        x = [rounded(np.multiply, vector, inverse) for vector in x]
    elif before != 1:
        x = [rounded(np.divide, vector, before) for vector in x]
    wide = FLOATS[wire or accumulate] if wire or accumulate else dtype
    if ranks > 1:  # a rank that is alone sends nothing, so nothing is rounded
        x = cast(x, wide)
    total = cast([ORDERS[algorithm](x, cut, root)], dtype)[0]
    return rounded(np.divide, total, after) if after != 1 else total


def results(operation: str, algorithm: str, x: Vectors, cut: Sequence[int], root: int = 0,
            **options: Any) -> list[np.ndarray | None]:
    """What each rank receives."""
    own = [slice(low, high) for low, high in pairwise(cut)]
    if "reduce" in operation:
        whole = reduced(algorithm, x, cut, root, **options)
    elif operation == "broadcast":
        whole = x[root]
    else:
        whole = np.concatenate([vector[chunk] for vector, chunk in zip(x, own, strict=True)])
    match operation:
        case "reduce_scatter":
            return [whole[chunk] for chunk in own]
        case "all_to_all":
            return [np.concatenate([vector[chunk] for vector in x]) for chunk in own]
        case "reduce" | "gather":
            return [whole if index == root else None for index in range(len(x))]
    return [whole] * len(x)
