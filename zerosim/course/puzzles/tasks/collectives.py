"""The collectives' puzzles: a mean, a broadcast, the ring's two halves, and an all-reduce of both.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

import numpy as np

from zerosim.course.puzzles.expected import chunk_slices, chunks, data, ordered_sum, ring_sum, traffic
from zerosim.course.puzzles.puzzle import Case, held_copy, vector_of


def mean(ranks: int, length: int) -> Case:
    """The mean of one number over all ranks."""
    xs = data("mean", ranks, length)
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    weight = np.sum([np.abs(x.astype(np.float64)) for x in xs], axis=0)
    total = exact.astype(np.float32)
    return Case(
        ranks, f"n={length}", vector_of(xs), [(exact / ranks).astype(np.float32)] * ranks,
        4 * 4 * length, [traffic("all_reduce", length, ranks)],
        mistakes={"returned the sum, and not the mean": [total] * ranks,
                  "returned its own number": xs,
                  "divided its own number, and knows nothing of the others'": [x / ranks for x in xs],
                  "divided twice": [total / ranks**2] * ranks},
        bounds=[(ranks + 1) * 2.0**-24 * weight / ranks + 2.0**-24 * weight / ranks] * ranks)


def broadcast(ranks: int, length: int) -> Case:
    """A vector on each of N ranks, of which only rank 0's matters: a binomial tree, with send and recv."""
    xs = data("broadcast", ranks, length)
    return Case(
        ranks, f"n={length}", vector_of(xs), [xs[0]] * ranks, 4 * length,
        [traffic("broadcast", length, ranks)],
        mistakes={"kept its own x": xs,
                  "returned what the rank before it had": [xs[max(0, rank - 1)] for rank in range(ranks)],
                  "returned the sum": [ring_sum(xs)] * ranks,
                  "has x only where rank 0 sent it; the others were not reached":
                      [xs[0] if rank & (rank - 1) == 0 else xs[rank] for rank in range(ranks)]},
        reasons={"steps": "ranks that have x already could send it on meanwhile",
                 "peak_nbytes": "a second vector is not needed; receive into x"},
        shard_nbytes=np.dtype(np.float32).itemsize * length // ranks)


def ring(ranks: int, length: int) -> Case:
    """A vector on each of N ranks: a ring reduce-scatter over exchange."""
    xs = data("ring", ranks, length)
    total, cut = ring_sum(xs), chunk_slices(length, ranks)
    without = [ordered_sum([xs[(c + 1 + step) % ranks][own] for step in range(max(1, ranks - 1))])
               for c, own in enumerate(cut)]
    chunk = -(-length // ranks)
    leftwards: dict[str, list[np.ndarray]] = {}
    if length % ranks == 0:  # else messages do not fit, which is said before any result is there
        passed = [[(rank - 1 - step) % ranks for step in range(ranks)] for rank in range(ranks)]
        leftwards = {"sent to its left neighbor, and received from its right one": [
            ordered_sum([xs[other][cut[(other - 1 - step) % ranks]] for step, other in enumerate(others)])
            for others in passed]}
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


def gather(ranks: int, length: int) -> Case:
    """A vector in chunks on N ranks: a ring all-gather over exchange."""
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


def all_reduce(ranks: int, length: int) -> Case:
    """A vector on each of N ranks: an all-reduce is a reduce-scatter and an all-gather."""
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
