"""Puzzle: ZeRO's third stage gathers, uses and frees, and does it again in backward.

Legend: N ranks, L layers of n elements each, k = ⌈n/N⌉.
Source: Rajbhandari et al. 2020 (ZeRO), section 5.3.
"""

import numpy as np

from zerosim.course.puzzles.expected import Array, data, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.course.puzzles.tasks.layered import (
    LAYERS,
    ScalingLayer,
    held_shards,
    layer_weights,
    mean_shards,
    refuse_gathered_weights,
)


def case(ranks: int, length: int) -> Case:
    """One forward and backward of four layers on N ranks."""
    weights, inputs = layer_weights("zero3 weights", length), data("zero3", ranks, length)
    right, mistakes = mean_shards([gradients(weights, x) for x in inputs])
    gather, reduction = (traffic(collective, length, ranks) for collective in ("all_gather", "reduce_scatter"))
    chunk = -(-length // ranks)
    peak = 8 * length + LAYERS * chunk
    return Case(
        ranks, f"n={length}, L={LAYERS}",
        lambda rank: (held_shards(rank, weights), ScalingLayer(rank), held_copy(rank, inputs[rank.index])), right,
        4 * peak, [gather, gather, reduction] * LAYERS,
        mistakes=mistakes,
        reasons={"peak_nbytes": "beside the shards eight vectors: x and four activations, one layer's weights, one dx, "
                                "one dw; a name that is not deleted holds on",
                 "sent_nbytes": "two gathers and one reduce-scatter for each layer"},
        look=refuse_gathered_weights,
        shard_nbytes=4 * chunk, scratch_shards=5)


def gradients(weights: list[Array], x: Array) -> list[Array]:
    """The gradient of each layer's weights on one rank: y = w·x, loss ½·Σ y²."""
    inputs = [x]
    for w in weights:
        inputs.append(np.multiply(w, inputs[-1]))
    dy, found = inputs[-1], []
    for w, kept in zip(weights[::-1], inputs[-2::-1], strict=True):
        found.append(np.multiply(kept, dy))
        dy = np.multiply(w, dy)
    return found[::-1]


PUZZLE = read_puzzle("zero3", case)
