"""Puzzle: a broken program, with three mistakes in it.

Legend: N ranks, L layers of n elements each, k = ⌈n/N⌉.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import chunks, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.course.puzzles.tasks.layered import (
    LAYERS,
    ScalingLayer,
    held_shards,
    layer_weights,
    refuse_gathered_weights,
)
from zerosim.ranks.rank import Rank


def case(ranks: int, length: int) -> Case:
    """Four layers forward and one gradient on N ranks."""
    weights = layer_weights("repair weights", length)
    xs, gradients = data("repair x", ranks, length), data("repair", ranks, length)
    ys = [x.copy() for x in xs]
    for y in ys:
        for w in weights:
            np.multiply(w, y, out=y)

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return (held_shards(rank, weights), ScalingLayer(rank), held_copy(rank, xs[rank.index]),
                held_copy(rank, gradients[rank.index], "gradient"))

    total = ring_sum(gradients)
    left = chunks(ring_sum(gradients, -1), ranks)
    chunk = -(-length // ranks)
    peak = 5 * length + LAYERS * chunk
    return Case(
        ranks, f"n={length}, L={LAYERS}", arguments,
        [(y, mean) for y, mean in zip(ys, chunks(total / ranks, ranks), strict=True)],
        4 * peak, [*[traffic("all_gather", length, ranks)] * LAYERS, traffic("reduce_scatter", length, ranks)],
        mistakes={"returned the sum of the gradients, and not their mean":
                      list(zip(ys, chunks(total, ranks), strict=True)),
                  "let the gradients go round the ring the other way":
                      [(y, one / ranks) for y, one in zip(ys, left, strict=True)],
                  "let the gradients go round the ring the other way, and returned their sum, not their mean":
                      list(zip(ys, left, strict=True))},
        reasons={"peak_nbytes": "the shards, x, the gradient, two activations and one layer's weights are all at once",
                 "sent_nbytes": "one gather for each layer, and one reduce-scatter"},
        look=refuse_gathered_weights,
        shard_nbytes=4 * chunk, scratch_shards=5)


PUZZLE = read_puzzle("repair", case)
