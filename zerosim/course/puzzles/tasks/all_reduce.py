"""Puzzle: an all-reduce is a reduce-scatter and an all-gather.

Legend: N ranks, n elements, k = ⌈n/N⌉.
"""

from zerosim.course.puzzles.expected import chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, vector_of

STATEMENT = """
Every rank has a vector and wants the sum of all. Sending everything to everyone costs each rank (N-1)
vectors; two halves of work cost less than two vectors together, whatever N:

    rank 0  [a0 a1 a2]                    [s0 .  . ]                [s0 s1 s2]
    rank 1  [b0 b1 b2]  reduce-scatter    [.  s1 . ]   all-gather   [s0 s1 s2]
    rank 2  [c0 c1 c2]                    [.  .  s2]                [s0 s1 s2]

    all_reduce(rank, x):
        x  (n,) fp32
        ->  the sum (n,) fp32, the same bits on every rank

Each chunk is added in the ring's order, x[c+1] + ... + x[c]. n need not be a multiple of N.
The two that you wrote in `ring` and `gather` will do, too.
"""

FUNCTION = '''
def all_reduce(rank, x):
    shard = zs.puzzles.hole("your chunk of the sum")
    return zs.puzzles.hole("all chunks of the sum; how long is the whole?")
'''

HINTS = (
    "After the reduce-scatter every chunk of the sum is on exactly one rank. What is left is to show them around.",
    "rank.all_gather needs to know the length where the last chunks are short: length=.",
    "shard = rank.reduce_scatter(x); return rank.all_gather(shard, length=len(x)).",
)


def case(ranks: int, length: int) -> Case:
    """A vector on each of N ranks."""
    xs = data("all_reduce", ranks, length)
    total, chunk = ring_sum(xs), -(-length // ranks)
    peak = max(length + 3 * chunk, 2 * length + chunk)
    return Case(
        ranks, f"n={length}", vector_of(xs), [total] * ranks, 4 * peak,
        [traffic("all_reduce", length, ranks)],
        mistakes={"returned its own chunk alone; the all-gather is missing": chunks(total, ranks),
                  "added in the order of the ranks, and not in that of the ring": [ordered_sum(xs)] * ranks,
                  "returned the mean, and not the sum": [total / ranks] * ranks,
                  "returned its own vector, to which nothing was added": xs},
        reasons={"sent_nbytes": "a ring sends 2(N-1)/N of a vector, everyone to everyone N-1",
                 "steps": "N-1 hops reduce and N-1 gather"},
        shard_nbytes=4 * chunk)


PUZZLE = Puzzle(
    "all_reduce", "An all-reduce is both", STATEMENT, FUNCTION, HINTS, case,
    allowed=frozenset({"reduce_scatter", "all_gather"}),
    score="peak: x, the sum and a chunk (or x and three chunks); bytes: 2(N-1)/N of x; steps: 2(N-1)")
