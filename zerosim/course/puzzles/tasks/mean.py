"""Puzzle: the mean of one number over all ranks.

Legend: N ranks; n = 1 here.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, traffic
from zerosim.course.puzzles.puzzle import Case, read_puzzle, vector_of


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


PUZZLE = read_puzzle("mean", case, dict.fromkeys((4, 1, 2, 3, 5, 8), (1,)), 0)
