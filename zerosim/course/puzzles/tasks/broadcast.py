"""Puzzle: a broadcast along a binomial tree, with send and recv.

Legend: N ranks, n elements.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, vector_of

STATEMENT = """
Rank 0 has the weights that training starts from; the others are to have the same. Rank 0 could send them to
each of the others, one after another, in N-1 steps. But whoever has them can send them on:

    step 1   0 -> 1
    step 2   0 -> 2   1 -> 3
    step 3   0 -> 4   1 -> 5   2 -> 6   3 -> 7

    broadcast(rank, x):
        x  (n,) fp32, on rank 0 the weights, elsewhere anything
        ->  x, which is now rank 0's

Write into x, and return it. The number of steps is to be log2 N, rounded up, for every N.
"""

FUNCTION = '''
def broadcast(rank, x):
    distance = 1  # the ranks below it have x
    while distance < rank.size:
        if rank.index < distance:
            zs.puzzles.hole("I have it: to whom do I send it, if there is such a rank?")
        elif rank.index < 2 * distance:
            zs.puzzles.hole("I get it in this step: from whom?")
        distance *= 2
    return x
'''

HINTS = (
    "In the step with distance d, rank r < d sends to rank r + d. Not every r + d is a rank.",
    "rank.send(x, to) and rank.recv(x, source) are the two halves of a message; recv writes into x.",
    "if rank.index < distance: if rank.index + distance < rank.size: rank.send(x, rank.index + distance); the "
    "receiver's source is rank.index - distance.",
)


def case(ranks: int, length: int) -> Case:
    """A vector on each of N ranks, of which only rank 0's matters."""
    xs = data("broadcast", ranks, length)
    return Case(
        ranks, f"n={length}", vector_of(xs), [xs[0]] * ranks, 4 * length,
        [traffic("broadcast", length, ranks)],
        mistakes={"kept its own x": xs,
                  "returned what the rank before it had": [xs[max(0, rank - 1)] for rank in range(ranks)],
                  "returned the sum": [ring_sum(xs)] * ranks,
                  "has x only where rank 0 sent it; the others were not reached":
                      [xs[0] if rank & (rank - 1) == 0 else xs[rank] for rank in range(ranks)]},
        reasons={"steps": "ranks that have x already could send it on meanwhile",
                 "peak_nbytes": "a second vector is not needed; receive into x"},
        shard_nbytes=np.dtype(np.float32).itemsize * length // ranks)


PUZZLE = Puzzle(
    "broadcast", "Broadcast along a tree", STATEMENT, FUNCTION, HINTS, case, changes=frozenset({"x"}),
    score="peak: x alone; bytes and steps: a binomial tree's")
