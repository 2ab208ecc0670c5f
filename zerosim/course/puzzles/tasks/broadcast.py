"""Puzzle: a broadcast along a binomial tree, with send and recv.

Legend: N ranks, n elements.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, read_puzzle, vector_of


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


PUZZLE = read_puzzle("broadcast", case)
