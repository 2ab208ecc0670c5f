"""Puzzle: ZeRO's second stage reduces while backward goes, and keeps only shards.

Legend: N ranks, L layers of n_l elements, k_l = ⌈n_l/N⌉.
Source: Rajbhandari et al. 2020 (ZeRO), section 5.2.
"""

from zerosim.course.puzzles.puzzle import Case, read_puzzle
from zerosim.course.puzzles.tasks.layered import backward_case, refuse_whole_gradients


def case(ranks: int, length: int) -> Case:
    """A backward pass of four layers on N ranks."""
    return backward_case("zero2", ranks, length, alive=1, why="one layer's whole gradient is alive at a time",
                         look=refuse_whole_gradients)


PUZZLE = read_puzzle("zero2", case)
