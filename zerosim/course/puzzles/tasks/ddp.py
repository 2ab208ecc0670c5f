"""Puzzle: data-parallel gradients, averaged in one bucket.

Legend: N ranks, T elements of all tensors together, K = ⌈T/N⌉.
"""

from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import data, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle
from zerosim.ranks.rank import Rank


def tensors(flat: np.ndarray, length: int) -> list[np.ndarray]:
    """A flat vector (3n+3,) as the list of its tensors."""
    return [flat[:length], flat[length:3 * length].reshape(2, length), flat[3 * length:]]


def case(ranks: int, length: int) -> Case:
    """Three tensors on each of N ranks."""
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


PUZZLE = read_puzzle("ddp", case, audit_length=1 << 16)
