"""Puzzle: the mean of one number over all ranks.

Legend: N ranks; n = 1 here.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, vector_of

STATEMENT = """
Every rank has one number, and every rank wants the mean of all of them: a loss over the global batch, say.

    rank 0  [3.0]                 [2.0]
    rank 1  [1.0]   -- mean -->   [2.0]
    rank 2  [2.0]                 [2.0]

    mean(rank, x):
        x  (1,) fp32, another number on each rank
        ->  (1,) fp32, the same on all

No order of additions is prescribed. The result may differ from the true mean by N+1 roundings of the sum of
|x| / N; a wrong formula differs by more.
"""

FUNCTION = '''
def mean(rank, x):
    total = zs.puzzles.hole("add up the x of all ranks; which collective does that?")
    total /= zs.puzzles.hole("how many numbers were added?")
    return total
'''

HINTS = (
    "One collective gives every rank the sum of what all ranks have. The mean is one division away.",
    "rank.all_reduce(x) returns the sum, as a new array on every rank; rank.size is N.",
    "total = rank.all_reduce(x), then total /= rank.size, in place, so that it stays fp32 and charged.",
)


def case(ranks: int, length: int) -> Case:
    """One number on each of N ranks."""
    xs = data("mean", ranks, length)
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    weight = np.sum([np.abs(x.astype(np.float64)) for x in xs], axis=0)
    total = exact.astype(np.float32)
    return Case(
        ranks, f"n={length}", vector_of(xs), [(exact / ranks).astype(np.float32)] * ranks,
        4 * 4 * length, [traffic("all_reduce", length, ranks)],
        mistakes={"returned the sum, and not the mean": [total] * ranks,
                  "returned its own number": xs,
                  "divided its own number, and knows nothing of the others'": [x / ranks for x in xs],
                  "divided twice": [total / ranks**2] * ranks},
        bounds=[(ranks + 1) * 2.0**-24 * weight / ranks + 2.0**-24 * weight / ranks] * ranks)


PUZZLE = Puzzle(
    "mean", "The mean of one number", STATEMENT, FUNCTION, HINTS, case, dict.fromkeys((4, 1, 2, 3, 5, 8), (1,)), 0,
    allowed=frozenset({"all_reduce"}),
    score="peak: the number, the result and the ring's two buffers; bytes and steps: a ring all-reduce's")
