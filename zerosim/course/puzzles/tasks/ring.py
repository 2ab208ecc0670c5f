"""Puzzle: a ring reduce-scatter over exchange.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

from zerosim.course.puzzles.expected import chunk_slices, chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, Puzzle, vector_of

STATEMENT = """
Every rank has a vector; rank r wants chunk r of the sum of all. The ranks stand in a ring, and each speaks
with its two neighbors only. Chunk c starts on rank c+1 and goes once round, each rank adding its own copy; it
ends on rank c:

    chunk 0 of N = 4:
    rank 1 --x1--> rank 2 --x1+x2--> rank 3 --x1+x2+x3--> rank 0, which adds x0

All N chunks travel at once, each one rank behind the next, so that in every step every rank sends one chunk
and receives one:

    step 0:  rank r sends chunk r-1, its own, and receives chunk r-2
    step 1:  rank r sends chunk r-2, its own copy added, and receives chunk r-3
    ...      all modulo N

    ring(rank, x):
        x  (n,) fp32
        ->  elements min(n, rk) to min(n, (r+1)k) of the sum; k = ceil(n/N)

The last chunks may be short or empty. The order of additions is prescribed, x[c+1] + x[c+2] + ... + x[c], so
equal means equal bits. x is read-only.
"""

FUNCTION = '''
def ring(rank, x):
    n, N = len(x), rank.size
    k = -(-n // N)

    def chunk(c):
        return slice(min(n, c % N * k), min(n, (c % N + 1) * k))

    landings = [rank.memory.alloc(k, x.dtype, "workspace") for _ in range(2)]
    partial = x[chunk(rank.index - 1)]
    for step in range(N - 1):
        own = x[zs.puzzles.hole("which chunk arrives in this step?")]
        landing = landings[step % 2][:len(own)]
        zs.puzzles.hole("send partial to the right neighbor while receiving landing from the left one")
        zs.puzzles.hole("add your own copy")
        partial = landing
    return partial
'''

HINTS = (
    "Rank r receives from rank r-1 what that one sends. In step s rank r sends chunk r-1-s.",
    "So chunk r-2-s arrives. rank.exchange(send, to, out, source) sends and receives at once; two sends that wait for "
    "each other would never end.",
    "rank.exchange(partial, (rank.index + 1) % N, landing, (rank.index - 1) % N), then landing += own. Leave x alone.",
)


def case(ranks: int, length: int) -> Case:
    """A vector on each of N ranks."""
    xs = data("ring", ranks, length)
    total, cut = ring_sum(xs), chunk_slices(length, ranks)
    without = [ordered_sum([xs[(c + 1 + step) % ranks][own] for step in range(max(1, ranks - 1))])
               for c, own in enumerate(cut)]
    chunk = -(-length // ranks)
    if length % ranks == 0:  # else messages do not fit, which is said before any result is there
        passed = [[(rank - 1 - step) % ranks for step in range(ranks)] for rank in range(ranks)]
        leftwards = {"sent to its left neighbor, and received from its right one": [
            ordered_sum([xs[other][cut[(other - 1 - step) % ranks]] for step, other in enumerate(others)])
            for others in passed]}
    else:
        leftwards = {}
    return Case(
        ranks, f"n={length}", vector_of(xs), chunks(total, ranks),
        4 * (length + 2 * chunk), [traffic("reduce_scatter", length, ranks)],
        mistakes=leftwards | {
            "returned the chunk that the next rank owns": [total[cut[(rank + 1) % ranks]] for rank in range(ranks)],
            "returned the chunk that the rank before it owns":
                [total[cut[(rank - 1) % ranks]] for rank in range(ranks)],
            "added in the order of the ranks, and not in that of the ring":
                [ordered_sum([x[own] for x in xs]) for own in cut],
            "let the chunks go round the ring the other way": chunks(ring_sum(xs, -1), ranks),
            "left out its own copy": without,
            "passed the chunks on as they came, to which nothing was added":
                [xs[(c + 1) % ranks][own] for c, own in enumerate(cut)],
            "returned the mean, and not the sum": [one / ranks for one in chunks(total, ranks)],
            "returned its own chunk, to which nothing was added": [x[own] for x, own in zip(xs, cut, strict=True)],
            "returned the whole vector, and not its chunk": [total] * ranks},
        reasons={"sent_nbytes": "each chunk leaves a rank once, and its own never",
                 "steps": "all chunks travel at once, one hop a step",
                 "peak_nbytes": "two chunks are on the way at a rank, never a second vector"},
        shard_nbytes=4 * chunk)


PUZZLE = Puzzle(
    "ring", "A ring reduce-scatter", STATEMENT, FUNCTION, HINTS, case,
    score="peak: x and two chunks; bytes: (N-1)/N of x; steps: N-1")
