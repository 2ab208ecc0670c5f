"""Puzzle: an all-reduce is a reduce-scatter and an all-gather.

Legend: N ranks, n elements, k = ⌈n/N⌉.
"""

from zerosim.course.puzzles.expected import chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, read_puzzle, vector_of


def case(ranks: int, length: int) -> Case:
    """A vector on each of N ranks."""
    xs = data("all_reduce", ranks, length)
    total, chunk = ring_sum(xs), -(-length // ranks)
    peak = max(length + 3 * chunk, 2 * length + chunk)
    return Case(
        ranks, f"n={length}", vector_of(xs), [total] * ranks, 4 * peak,
        [traffic("all_reduce", length, ranks)],
        mistakes={"returned its own chunk alone; the all-gather is missing": chunks(total, ranks),
                  "added in the order of the ranks, and not in that of the ring": [ordered_sum(xs)] * ranks,
                  "returned the mean, and not the sum": [total / ranks] * ranks,
                  "returned its own vector, to which nothing was added": xs},
        reasons={"sent_nbytes": "a ring sends 2(N-1)/N of a vector, everyone to everyone N-1",
                 "steps": "N-1 hops reduce and N-1 gather"},
        shard_nbytes=4 * chunk)


PUZZLE = read_puzzle("all_reduce", case)
