"""Puzzle: data-parallel gradients, averaged in one bucket.

Legend: N ranks, T elements of all tensors together, K = ⌈T/N⌉.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy
from zerosim.ranks.rank import Rank

STATEMENT = """
Data-parallel training: every rank has the whole model and the gradients of its own batch, a list of tensors;
every rank wants their means. A ring for each tensor would cost 2(N-1) messages each. One flat bucket costs
that once:

    gradients   [ (n,) | (2, n) | (3,) ]     a list, other on every rank
                   |       |       |
    bucket      [ . . . . . . . . . . . ]    flat, T elements, in that order
                        all-reduce
    means       [ (n,) | (2, n) | (3,) ]     a list again; views will do

    ddp(rank, gradients):
        gradients  a list of fp32 arrays of any shapes
        ->  the list of their means over ranks

Prescribed: the bucket is reduced by one ring (chunks of K = ceil(T/N)), then divided by N, once. The
gradients are read-only.
"""

FUNCTION = '''
def ddp(rank, gradients):
    bucket = rank.memory.alloc(sum(g.size for g in gradients), np.float32, "gradient")
    start = 0
    for g in gradients:
        zs.puzzles.hole("put g into the bucket, flat, from start on; where does the next one start?")
    zs.puzzles.hole("one all-reduce, in place, and the mean")
    return zs.puzzles.hole("the tensors, in their shapes again")
'''

HINTS = (
    "The bucket is a vector like any other; its chunks need not end where tensors do.",
    "bucket[start:start + g.size] = g.reshape(-1); rank.all_reduce(bucket, out=bucket); bucket /= rank.size.",
    "Cut it again as you filled it: bucket[start:start + g.size].reshape(g.shape), for every g.",
)


def tensors(flat: np.ndarray, length: int) -> list[np.ndarray]:
    """A flat vector (3n+3,) as the list of its tensors."""
    return [flat[:length], flat[length:3 * length].reshape(2, length), flat[3 * length:]]


def case(ranks: int, length: int) -> Case:
    """Three tensors on each of N ranks."""
    flats = data("ddp", ranks, 3 * length + 3)
    total, every = ring_sum(flats), len(flats[0])
    lists = [tensors(flat, length) for flat in flats]
    apart = [ring_sum([mine[i].reshape(-1) for mine in lists]).reshape(lists[0][i].shape) for i in range(3)]

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return ([held_copy(rank, g, "gradient") for g in lists[rank.index]],)

    chunk = -(-every // ranks)
    return Case(
        ranks, f"n={length}, T={every}", arguments, [tensors(total / ranks, length)] * ranks,
        4 * (2 * every + 2 * chunk), [traffic("all_reduce", every, ranks)],
        mistakes={"returned the sums, and not the means": [tensors(total, length)] * ranks,
                  "returned its own gradients": lists,
                  "divided its own gradients; nothing was added": [tensors(f / ranks, length) for f in flats],
                  "reduced every tensor by a ring of its own, which adds in another order":
                      [[one / ranks for one in apart]] * ranks,
                  "divided before the sum, and so rounded every addend":
                      [tensors(ring_sum([f / ranks for f in flats]), length)] * ranks},
        reasons={"sent_nbytes": "one ring sends 2(N-1)/N of the bucket",
                 "steps": "one bucket takes 2(N-1) hops, however many tensors are in it"},
        shard_nbytes=4 * chunk)


PUZZLE = Puzzle(
    "ddp", "Average data-parallel gradients", STATEMENT, FUNCTION, HINTS, case, audit_length=1 << 16,
    allowed=frozenset({"reduce_scatter", "all_gather", "all_reduce"}),
    score="peak: the gradients, the bucket, two chunks on the ring; bytes and steps: one all-reduce of the bucket")
