"""Puzzle: a ring reduce-scatter over exchange.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

from zerosim.course.puzzles.expected import chunk_slices, chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, read_puzzle, vector_of


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


PUZZLE = read_puzzle("ring", case)
