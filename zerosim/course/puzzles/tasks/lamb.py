"""Puzzle: shard an optimizer that needs a norm, without counting anything twice.

Legend: N ranks, n elements of the sharded tensor, k = ⌈n/N⌉, b elements of the bias.
Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2 (LAMB): the ratio of two norms.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunk_slices, data, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.ranks.rank import Rank

LEARNING_RATE, BIAS, PADDING = 0.01, 3, 7777.0


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


PUZZLE = read_puzzle("lamb", case)
