"""The puzzles about one step: mean gradients, ZeRO's first stage, a norm over shards, an overflow.

Legend: N ranks, m micro-batches, n elements, T of all tensors together, b of a bias, k = ⌈n/N⌉, K = ⌈T/N⌉, S loss
scale; rank r owns elements min(n, r·k) to min(n, (r+1)·k).
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunk_slices, chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy
from zerosim.ranks.rank import Rank

LEARNING_RATE, DECAY, SCALE = 0.1, 0.9, 1024.0
LAMB_RATE, BIAS, PADDING = 0.01, 3, 7777.0
# Odd lengths overflow: n = 1 modulo 4 with inf, 3 with NaN, 5 modulo 8 at both ends. The last ranks may own nothing.
OVERFLOW_SIZES = {4: (9, 4, 3, 8), 1: (6, 5), 2: (1, 6), 3: (7, 2), 5: (13, 4), 8: (5, 18)}


def average(ranks: int, length: int) -> Case:
    """The gradients of m = 1, 2 or 3 micro-batches on each of N ranks: one division by S·N·m, in the right place."""
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


def tensors(flat: np.ndarray, length: int) -> list[np.ndarray]:
    """A flat vector (3n+3,) as the list of its tensors."""
    return [flat[:length], flat[length:3 * length].reshape(2, length), flat[3 * length:]]


def ddp(ranks: int, length: int) -> Case:
    """Three tensors on each of N ranks: data-parallel gradients, averaged in one bucket."""
    flats = data("ddp", ranks, 3 * length + 3)
    total, every = ring_sum(flats), len(flats[0])
    lists = [tensors(flat, length) for flat in flats]
    apart = [ring_sum([mine[i].reshape(-1) for mine in lists]).reshape(lists[0][i].shape) for i in range(3)]

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return ([held_copy(rank, g, "gradient") for g in lists[rank.index]],)

    chunk = -(-every // ranks)
    return Case(
        ranks, f"n={length}, T={every}", arguments, [tensors(total / ranks, length)] * ranks,
        4 * (2 * every + 2 * chunk), [traffic("all_reduce", every, ranks)],
        mistakes={"returned the sums, and not the means": [tensors(total, length)] * ranks,
                  "returned its own gradients": lists,
                  "divided its own gradients; nothing was added": [tensors(f / ranks, length) for f in flats],
                  "reduced every tensor by a ring of its own, which adds in another order":
                      [[one / ranks for one in apart]] * ranks,
                  "divided before the sum, and so rounded every addend":
                      [tensors(ring_sum([f / ranks for f in flats]), length)] * ranks},
        reasons={"sent_nbytes": "one ring sends 2(N-1)/N of the bucket",
                 "steps": "one bucket takes 2(N-1) hops, however many tensors are in it"},
        shard_nbytes=4 * chunk)


def updated(weights: Array, momentum: Array, mean: Array) -> tuple[Array, Array]:
    """One step of the optimizer on vectors of any length."""
    fresh = DECAY * momentum + mean
    return weights - LEARNING_RATE * fresh, fresh


def zero1(ranks: int, length: int) -> Case:
    """One step of ZeRO's first stage on N ranks.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
    """
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


def squares(*parts: Array) -> float:
    """The sum of squares, in float64."""
    return sum(float(np.dot(part.astype(np.float64), part.astype(np.float64))) for part in parts)


def lamb(ranks: int, length: int) -> Case:
    """One layer, its matrix in shards, its bias everywhere: nothing may be counted twice.

    Source: You et al. 2020, "Large batch optimization for deep learning", algorithm 2 (LAMB): the ratio of two norms.
    """
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
                held_copy(rank, bias, "master"), held_copy(rank, bias_direction, "gradient"), LAMB_RATE)

    def moved(ratios: list[float]) -> list[Any]:
        """The results of ranks that move by these ratios."""
        found = []
        for rank, ratio in enumerate(ratios):
            step = LAMB_RATE * ratio
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
        right[rank], (LAMB_RATE * ratio * padded(direction, rank), LAMB_RATE * ratio * bias_direction),
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


def overflow(ranks: int, length: int) -> Case:
    """A sharded step on N ranks, in which one element or two overflow where n is odd, and every rank must skip.

    Source: Micikevicius et al. 2018 (mixed precision), section 3.2; Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    weights, gradient = data("overflow", 2, length)
    gradient = gradient * np.float32(SCALE)
    skipped = bool(length % 2)
    if skipped:
        gradient[[0, -1] if length % 8 == 5 else 2 * length // 3] = np.inf if length % 4 == 1 else np.nan
    gradients, shards = chunks(gradient, ranks), chunks(weights, ranks)

    def arguments(rank: Rank) -> tuple[Any, ...]:
        return (held_copy(rank, shards[rank.index], "master"), held_copy(rank, gradients[rank.index], "gradient"),
                LEARNING_RATE, SCALE)

    def outcome(skips: list[bool], *, halve: bool = True) -> list[tuple[Array, float, bool]]:
        with np.errstate(all="ignore"):
            moved = [w - LEARNING_RATE * (g / SCALE) for w, g in zip(shards, gradients, strict=True)]
        return [(w, SCALE / 2 if halve else SCALE, True) if skip else (new, SCALE, False)
                for w, new, skip in zip(shards, moved, skips, strict=True)]

    bad = [not np.isfinite(g).all() for g in gradients]
    gather, chunk = traffic("all_gather", ranks, ranks, 1), -(-length // ranks)
    where = "two ranks" if sum(bad) == 2 else "one rank"
    found = {1: f"inf on {where}", 3: f"NaN on {where}"}.get(length % 4, "all finite")
    return Case(
        ranks, f"n={length}, {found}", arguments, outcome([skipped] * ranks),
        8 * chunk + 1 + ranks, [gather], least_sent_nbytes=2 * (ranks - 1),
        mistakes={"decided by its own shard, and so not like the other ranks": outcome(bad),
                  "did not skip, although one rank has inf or NaN": outcome([False] * ranks),
                  "skipped, although nothing overflowed": outcome([True] * ranks),
                  "skipped, but left the scale as it was": outcome([skipped] * ranks, halve=False)},
        reasons={"sent_nbytes": "one flag of one byte from each rank is all that must travel"},
        shard_nbytes=4 * chunk)
