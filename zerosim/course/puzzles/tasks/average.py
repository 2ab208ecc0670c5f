"""Puzzle: the mean in the right place, one division by S·N·m.

Legend: N ranks, m micro-batches, n elements, S loss scale, k = ⌈n/N⌉.
"""

import numpy as np

from zerosim.course.puzzles.expected import data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy

SCALE = 1024.0

STATEMENT = """
A step of training has m micro-batches on each of N ranks. Every one of these N·m gradients is that of S times
the mean loss of its own micro-batch. The optimizer wants the gradient of the mean loss over all, so something
is to be divided by S, by N and by m. Where?

    rank 0   g00 + g01   \\
    rank 1   g10 + g11    >  ring -> sum -> by S·N·m -> mean, on every rank
    rank 2   g20 + g21   /

Once, at the end: three divisions round three times, and a division before the sum can lose small numbers
altogether.

    average(rank, gradients, scale):
        gradients  (m, n) fp32, this rank's;  scale  S
        ->  the mean gradient (n,) fp32

Prescribed: a rank adds its own micro-batches in their order; the ring adds the ranks; then x / (S·N·m) in
fp32. The gradients are read-only.
"""

FUNCTION = '''
def average(rank, gradients, scale):
    m, n = gradients.shape
    total = rank.memory.alloc(n, np.float32, "gradient")
    total[...] = gradients[0]
    for gradient in gradients[1:]:
        total += gradient
    zs.puzzles.hole("add up over ranks, in place")
    total /= zs.puzzles.hole("by how much, in all?")
    return total
'''

HINTS = (
    "The ring's sum has N·m gradients in it, each of them S times too large.",
    "rank.all_reduce(total, out=total) needs no second vector.",
    "total /= scale * rank.size * m, as one number.",
)


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


PUZZLE = Puzzle(
    "average", "The mean in the right place", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"reduce_scatter", "all_gather", "all_reduce"}),
    score="peak: the m gradients, their sum, two chunks on the ring; bytes and steps: one all-reduce")
