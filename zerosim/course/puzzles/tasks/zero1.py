"""Puzzle: the step of ZeRO's first stage.

Legend: N ranks, n elements, k = ⌈n/N⌉; rank r owns elements min(n, r·k) to min(n, (r+1)·k).
Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
"""

from typing import Any

from zerosim.course.puzzles.expected import Array, chunk_slices, data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy
from zerosim.ranks.rank import Rank

LEARNING_RATE, DECAY = 0.1, 0.9

STATEMENT = """
ZeRO-1: every rank has all weights and its own gradient of all of them, but the optimizer's state (here a
momentum) only for the shard that it owns. So it needs the mean gradient of that shard only, updates that, and
then all show what they have updated:

    gradient   [ a a a | a a a | a a ]  on every rank another one
                    reduce-scatter
    rank 1             [ s s s ]          the sum, of its own shard
                 / N, momentum, update
    weights    [ . . . | w w w | . . ]    only its own shard is new
                     all-gather
    weights    [ w w w | w w w | w w ]    on every rank the same again

    zero1(rank, weights, gradient, momentum, lr):
        weights, gradient  (n,) fp32
        momentum  fp32, of the own shard, elements min(n, rk) to min(n, (r+1)k)
        ->  (weights, momentum), updated:
            momentum = 0.9·momentum + mean;  weights = weights - lr·momentum

Write into weights and momentum, and return them; the gradient is read-only. The ring's order is prescribed.
An all-reduce sends twice what is needed.
"""

FUNCTION = '''
def zero1(rank, weights, gradient, momentum, lr):
    n, k = len(weights), -(-len(weights) // rank.size)
    own = slice(min(n, rank.index * k), min(n, (rank.index + 1) * k))
    mean = zs.puzzles.hole("the sum over ranks of the own shard of the gradient")
    zs.puzzles.hole("make it the mean")
    momentum *= 0.9
    momentum += mean
    weights[own] -= lr * momentum
    zs.puzzles.hole("show the own shard to all, and get theirs; right into weights")
    return weights, momentum
'''

HINTS = (
    "Sum, and to each his own part of it: that is one collective. Parts, and to each all of them: that is another one.",
    "rank.reduce_scatter(gradient) returns a new array, so that mean /= rank.size changes nobody's gradient.",
    "rank.all_gather(weights[own], out=weights, length=n) puts all shards in their places.",
)


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


PUZZLE = Puzzle(
    "zero1", "The step of ZeRO-1", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"reduce_scatter", "all_gather", "all_reduce"}), changes=frozenset({"weights", "momentum"}),
    returns=("weights", "momentum"),
    score="peak: weights, gradient and four shards; bytes: 2(N-1)/N of the gradient; steps: 2(N-1)")
