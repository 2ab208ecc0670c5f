"""Puzzle: an overflow on one rank makes every rank skip.

Legend: N ranks, n elements, k = ⌈n/N⌉, S loss scale.
Source: Micikevicius et al. 2018 (mixed precision), section 3.2; Rajbhandari et al. 2020 (ZeRO), section 5.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, chunks, data, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.ranks.rank import Rank

LEARNING_RATE, SCALE = 0.1, 1024.0
# Odd lengths overflow: n = 1 modulo 4 with inf, 3 with NaN. The last ranks may own nothing.
SIZES = {4: (9, 4, 3, 8), 1: (6, 5), 2: (1, 6), 3: (7, 2), 5: (13, 4), 8: (5, 18)}


def case(ranks: int, length: int) -> Case:
    """A sharded step on N ranks, in which one element overflows where n is odd."""
    weights, gradient = data("overflow", 2, length)
    gradient = gradient * np.float32(SCALE)
    skipped = bool(length % 2)
    if skipped:
        gradient[2 * length // 3] = np.inf if length % 4 == 1 else np.nan
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
    found = {1: "inf on one rank", 3: "NaN on one rank"}.get(length % 4, "all finite")
    return Case(
        ranks, f"n={length}, {found}", arguments, outcome([skipped] * ranks),
        8 * chunk + 1 + ranks, [gather], least_sent_nbytes=2 * (ranks - 1),
        mistakes={"decided by its own shard, and so not like the other ranks": outcome(bad),
                  "did not skip, although one rank has inf or NaN": outcome([False] * ranks),
                  "skipped, although nothing overflowed": outcome([True] * ranks),
                  "skipped, but left the scale as it was": outcome([skipped] * ranks, halve=False)},
        reasons={"sent_nbytes": "one flag of one byte from each rank is all that must travel"},
        shard_nbytes=4 * chunk)


PUZZLE = read_puzzle("overflow", case, SIZES)
