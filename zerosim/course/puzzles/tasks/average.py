"""Puzzle: the mean in the right place, one division by S·N·m.

Legend: N ranks, m micro-batches, n elements, S loss scale, k = ⌈n/N⌉.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle

SCALE = 1024.0


def case(ranks: int, length: int) -> Case:
    """The gradients of m = 1, 2 or 3 micro-batches on each of N ranks."""
    m = 1 + (ranks + length) % 3
    stacks = [np.stack([g * np.float32(SCALE) for g in data(f"average {j}", ranks, length)]) for j in range(m)]
    gradients = [np.stack([stack[rank] for stack in stacks]) for rank in range(ranks)]
    local = [ordered_sum(list(mine)) for mine in gradients]
    total, divisor = ring_sum(local), np.float32(SCALE * ranks * m)
    expected = total / divisor
    chunk = -(-length // ranks)
    wrong = {
        "did not divide by N, the number of ranks": total / np.float32(SCALE * m),
        "did not divide by m, the number of micro-batches": total / np.float32(SCALE * ranks),
        "did not divide by S, the loss scale": total / np.float32(ranks * m),
        "returned the sum, and divided by nothing": total,
        "divided by N twice": total / np.float32(SCALE * ranks * ranks * m),
        "divided before the sum over ranks, and so rounded every addend":
            ring_sum([one / divisor for one in local]),
        "divided more than once, and rounded each time": total / np.float32(SCALE) / np.float32(ranks) / np.float32(m)}
    return Case(
        ranks, f"n={length}, m={m}", lambda rank: (held_copy(rank, gradients[rank.index], "gradient"), SCALE),
        [expected] * ranks, 4 * ((m + 1) * length + 2 * chunk),
        [traffic("all_reduce", length, ranks)],
        mistakes={**{what: [result] * ranks for what, result in wrong.items()},
                  "averaged its own gradients alone": [one / np.float32(SCALE * m) for one in local]},
        reasons={"sent_nbytes": "add up the micro-batches first, and reduce once"},
        shard_nbytes=4 * chunk)


PUZZLE = read_puzzle("average", case)
