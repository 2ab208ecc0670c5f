"""Puzzle: a ring all-gather over exchange.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

import numpy as np

from zerosim.course.puzzles.expected import chunk_slices, chunks, data, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, read_puzzle


def case(ranks: int, length: int) -> Case:
    """A vector in chunks on N ranks."""
    whole = data("gather", 1, length)[0]
    shards, cut = chunks(whole, ranks), chunk_slices(length, ranks)
    chunk = -(-length // ranks)
    turned = [np.concatenate([shards[(rank + step) % ranks] for step in range(ranks)]) for rank in range(ranks)]
    alone = []
    for own in cut:
        alone.append(np.zeros_like(whole))
        alone[-1][own] = whole[own]
    return Case(
        ranks, f"n={length}", lambda rank: (held_copy(rank, shards[rank.index], "parameter"), length), [whole] * ranks,
        4 * (length + chunk), [traffic("all_gather", length, ranks)],
        mistakes={"put the chunks in the order of their arrival, its own first": turned,
                  "put the chunks in the wrong order, the last one first": [np.concatenate(shards[::-1])] * ranks,
                  "has its own chunk alone; nothing arrived": alone},
        reasons={"sent_nbytes": "a rank sends every chunk on once, but the last to arrive",
                 "steps": "all chunks travel at once, one hop a step",
                 "peak_nbytes": "receive each chunk where it belongs; a second vector is not needed"},
        shard_nbytes=4 * chunk)


PUZZLE = read_puzzle("gather", case)
