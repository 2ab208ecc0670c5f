"""Puzzle: a ring all-gather over exchange.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

import numpy as np

from zerosim.course.puzzles.expected import chunk_slices, chunks, data, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, held_copy

STATEMENT = """
Rank r has chunk r of a vector, and every rank wants all of it. Each passes on to its right neighbor what it
has just got from the left one:

    N = 3     rank 0        rank 1        rank 2
    start     [a . .]       [. b .]       [. . c]
    step 0    [a . c]       [a b .]       [. b c]    r sends chunk r,   gets r-1
    step 1    [a b c]       [a b c]       [a b c]    r sends chunk r-1, gets r-2

    gather(rank, shard, n):
        shard  fp32, chunk r of the cut by k = ceil(n/N);  n  the length
        ->  the vector (n,) fp32

The last chunks may be short or empty.
"""

FUNCTION = '''
def gather(rank, shard, n):
    N, k = rank.size, -(-n // rank.size)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    whole = rank.memory.alloc(n, shard.dtype, "gathered_parameter")
    zs.puzzles.hole("put your own chunk in its place")
    for step in range(N - 1):
        zs.puzzles.hole("send one chunk of whole on, and receive another one right into its place")
    return whole
'''

HINTS = (
    "No landing place is needed: what arrives can be received where it belongs, and what is sent lies there already.",
    "In step s rank r sends chunk r-s to the right and receives chunk r-s-1 from the left.",
    "rank.exchange(whole[chunk(rank.index - step)], (rank.index + 1) % N, whole[chunk(rank.index - step - 1)], "
    "(rank.index - 1) % N), after whole[chunk(rank.index)] = shard.",
)


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


PUZZLE = Puzzle(
    "gather", "A ring all-gather", STATEMENT, FUNCTION, HINTS, case,
    score="peak: the vector and the own chunk; bytes: (N-1)/N of the vector; steps: N-1")
