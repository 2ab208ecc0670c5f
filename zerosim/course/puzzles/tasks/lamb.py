"""Puzzle: shard an optimizer that needs a norm, without counting anything twice.

Legend: N ranks, n elements of the sharded tensor, k = ⌈n/N⌉, b elements of the bias.
Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2 (LAMB): the ratio of two norms.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunk_slices, data, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy
from zerosim.ranks.rank import Rank

LEARNING_RATE, BIAS, PADDING = 0.01, 3, 7777.0

STATEMENT = """
LAMB moves a layer by its own trust ratio: w = w - lr · (|w| / |u|) · u, where u is the direction and both
norms are over the whole layer. The layer's matrix lies in shards, padded at its end to N·k elements; its bias
lies whole on every rank:

             rank 0    rank 1    rank 2
    matrix   [w w w]   [w w w]   [w p p]   p: padding, 7777, in no norm
    bias     [b b b]   [b b b]   [b b b]   everywhere the same, once in the norm

    lamb(rank, weights, direction, valid, bias, bias_direction, lr):
        weights, direction  (k,) fp32, this rank's shard, of which the first
                            `valid` elements are real
        bias, bias_direction  (3,) fp32, equal on all ranks;  lr a number
        ->  (weights, bias), updated; padding as it was

Write into weights and bias. Add squares in float64. No order is prescribed: the result may differ by four
roundings of fp32. Two numbers from each rank are all that has to travel.
"""

FUNCTION = '''
def lamb(rank, weights, direction, valid, bias, bias_direction, lr):
    def squares(x):
        wide = x.astype(np.float64)
        return np.dot(wide, wide)

    partial = rank.memory.alloc(2, np.float64, "workspace")  # of the weights, of the direction
    partial[0] = zs.puzzles.hole("squares of what is real in your shard")
    partial[1] = zs.puzzles.hole("the same for the direction")
    total = zs.puzzles.hole("the sum over ranks")
    zs.puzzles.hole("the bias counts once, not N times")
    ratio = zs.puzzles.hole("norm of the weights by norm of the direction")
    weights[:valid] -= lr * ratio * direction[:valid]
    bias -= lr * ratio * bias_direction
    return weights, bias
'''

HINTS = (
    "A sum of squares can be added up over ranks; a norm cannot. The square root comes last.",
    "squares(weights[:valid]) leaves out the padding; total = rank.all_reduce(partial) adds up the shards.",
    "After the all-reduce: total[0] += squares(bias), total[1] += squares(bias_direction), the same on every rank; "
    "ratio = np.float32(np.sqrt(total[0] / total[1])).",
)


def squares(*parts: Array) -> float:
    """The sum of squares, in float64."""
    return sum(float(np.dot(part.astype(np.float64), part.astype(np.float64))) for part in parts)


def case(ranks: int, length: int) -> Case:
    """One layer, its matrix in shards, its bias everywhere."""
    (weights, direction), (bias, bias_direction) = data("lamb", 2, length), data("bias", 2, BIAS)
    cut, chunk = chunk_slices(length, ranks), -(-length // ranks)
    missing = ranks * chunk - length

    def padded(x: Array, rank: int) -> Array:
        shard, own = np.full(chunk, PADDING, np.float32), x[cut[rank]]
        shard[:len(own)] = own
        return shard

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return (held_copy(rank, padded(weights, rank.index), "master"),
                held_copy(rank, padded(direction, rank.index), "gradient"), len(weights[cut[rank.index]]),
                held_copy(rank, bias, "master"), held_copy(rank, bias_direction, "gradient"), LEARNING_RATE)

    def moved(ratios: list[float]) -> list[Any]:
        """The results of ranks that move by these ratios."""
        found = []
        for rank, ratio in enumerate(ratios):
            step = LEARNING_RATE * ratio
            shard = padded((weights - step * direction.astype(np.float64)).astype(np.float32), rank)
            found.append((shard, (bias - step * bias_direction.astype(np.float64)).astype(np.float32)))
        return found

    def over(*, biases: int, padding: int = 0) -> float:
        """The ratio in which the bias and the padding are counted so often."""
        extra = padding * PADDING**2
        return float(((squares(weights) + biases * squares(bias) + extra)
                      / (squares(direction) + biases * squares(bias_direction) + extra)) ** 0.5)

    ratio = over(biases=1)
    right = moved([ratio] * ranks)
    bounds = [[(4 * 2.0**-24 * (np.abs(one.astype(np.float64)) + np.abs(move))) for one, move in zip(
        right[rank], (LEARNING_RATE * ratio * padded(direction, rank), LEARNING_RATE * ratio * bias_direction),
        strict=True)] for rank in range(ranks)]
    alone = [(squares(weights[own], bias) / squares(direction[own], bias_direction)) ** 0.5 for own in cut]
    gather = traffic("all_gather", 2 * ranks, ranks, 8)
    return Case(
        ranks, f"n={length}, b={BIAS}", arguments, right,
        4 * 2 * (chunk + BIAS) + 16 + 16 * ranks, [gather], least_sent_nbytes=2 * (ranks - 1) * 16,
        mistakes={
            "counted the bias, which every rank has, once for each rank": moved([over(biases=ranks)] * ranks),
            "left the bias out of the norms": moved([over(biases=0)] * ranks),
            "counted the padding": moved([over(biases=1, padding=missing)] * ranks),
            "counted the padding, and the bias once for each rank":
                moved([over(biases=ranks, padding=missing)] * ranks),
            "took the norms of its own shard, and not of the layer": moved(alone),
            "forgot the square root": moved([ratio**2] * ranks),
            "took the ratio upside down": moved([1 / ratio] * ranks),
            "returned what it was given": moved([0.0] * ranks)},
        reasons={"sent_nbytes": "two numbers from each rank are all that has to travel",
                 "steps": "one all-gather of two numbers takes N-1 hops"},
        bounds=bounds, shard_nbytes=4 * chunk, scratch_shards=7)


PUZZLE = Puzzle(
    "lamb", "A norm over shards", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"all_gather", "all_reduce"}), changes=frozenset({"weights", "bias"}),
    returns=("weights", "bias"),
    score="peak: what is given and two numbers of each rank; bytes and steps: an all-gather of 16 bytes per rank")
