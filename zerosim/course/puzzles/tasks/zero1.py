"""Puzzle: the step of ZeRO's first stage.

Legend: N ranks, n elements, k = ⌈n/N⌉; rank r owns elements min(n, r·k) to min(n, (r+1)·k).
Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
"""

from typing import Any

from zerosim.course.puzzles.expected import Array, chunk_slices, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.ranks.rank import Rank

LEARNING_RATE, DECAY = 0.1, 0.9


def updated(weights: Array, momentum: Array, mean: Array) -> tuple[Array, Array]:
    """One step of the optimizer on vectors of any length."""
    fresh = DECAY * momentum + mean
    return weights - LEARNING_RATE * fresh, fresh


def case(ranks: int, length: int) -> Case:
    """One step on N ranks."""
    weights, momentum = data("zero1 weights", 1, length)[0], data("zero1 momentum", 1, length)[0]
    gradients, cut = data("zero1", ranks, length), chunk_slices(length, ranks)
    total = ring_sum(gradients)

    def results(mean: Array) -> list[Any]:
        new, fresh = updated(weights, momentum, mean)
        return [(new, fresh[own]) for own in cut]

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return (held_copy(rank, weights, "parameter"), held_copy(rank, gradients[rank.index], "gradient"),
                held_copy(rank, momentum[cut[rank.index]], "optimizer_state"), LEARNING_RATE)

    right, alone, own_only = results(total / ranks), [], []
    for rank, own in enumerate(cut):
        mine, fresh = updated(weights, momentum, gradients[rank])
        alone.append((mine, fresh[own]))
        own_only.append((weights.copy(), right[rank][1]))
        own_only[-1][0][own] = right[rank][0][own]
    chunk = -(-length // ranks)
    mixed = weights.copy()
    for rank, own in enumerate(cut):
        mixed[own] = alone[rank][0][own]
    return Case(
        ranks, f"n={length}", arguments, right, 4 * (2 * length + 4 * chunk),
        [traffic("reduce_scatter", length, ranks), traffic("all_gather", length, ranks)],
        mistakes={"updated with the sum, and not with the mean": results(total),
                  "updated its own shard, and does not have the others'": own_only,
                  "updated with its own gradient, and not with the mean over ranks": alone,
                  "updated each shard with its owner's gradient alone; nothing was added":
                      [(mixed, alone[rank][1]) for rank in range(ranks)],
                  "returned what it was given": [(weights, momentum[own]) for own in cut]},
        reasons={"sent_nbytes": "a rank needs the sum of its own shard only, and an all-reduce brings it all"},
        shard_nbytes=4 * chunk)


PUZZLE = read_puzzle("zero1", case)
