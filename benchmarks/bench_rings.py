"""The speed of collectives beside their floor: the same additions in one loop without ranks, in the same run.

Prints medians, their ratio to the floor, and whether the results are bit-equal. Seconds are this machine's; trust the
ratios. Faults need the ring hop by hop; checksums are CRC-32 of each message, computed at both its ends.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import zerosim as zs

CASES = [  # ranks, elements per rank, dtype, repetitions
    (64, 1024, "float32", 15), (512, 1024, "float32", 5), (4, 1 << 24, "float32", 5), (8, 1 << 22, "float32", 5),
    (4, 1 << 22, "bfloat16", 3), (4, 1 << 22, "float16", 3)]


def floor_reduce_scatter(vectors: list[np.ndarray], outs: list[np.ndarray]) -> None:
    """The ring's additions, chunk by chunk, with whole-chunk NumPy calls and no ranks. vectors N x (n,)."""
    ranks, chunk = len(vectors), len(vectors[0]) // len(vectors)
    for c, out in enumerate(outs):
        own = slice(c * chunk, (c + 1) * chunk)
        np.add(vectors[(c + 1) % ranks][own], vectors[(c + 2) % ranks][own], out=out[own])
        for step in range(3, ranks + 1):
            np.add(out[own], vectors[(c + step) % ranks][own], out=out[own])


def floor_all_reduce(vectors: list[np.ndarray], outs: list[np.ndarray]) -> None:
    """The ring's additions, and one copy of every chunk to every other rank."""
    floor_reduce_scatter(vectors, outs)
    ranks, chunk = len(vectors), len(vectors[0]) // len(vectors)
    for rank, out in enumerate(outs):
        for c in range(ranks):
            if c != rank:
                out[c * chunk:(c + 1) * chunk] = outs[c][c * chunk:(c + 1) * chunk]


def median_seconds(action: Callable[[], object], repetitions: int) -> float:
    """Median wall-clock seconds of the repetitions, after one that is not counted."""
    action()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def cluster_seconds(vectors: list[np.ndarray], outs: list[np.ndarray], repetitions: int, **options: Any) -> float:
    """Seconds of one all-reduce: a whole run of many, the making of its cluster included, divided by their number."""

    def program(rank: zs.Rank) -> None:
        for _ in range(repetitions):
            rank.all_reduce(vectors[rank.index], out=outs[rank.index])

    zs.Cluster(len(vectors)).run(lambda rank: rank.all_reduce(vectors[rank.index], out=outs[rank.index]) is None)
    start = time.perf_counter()
    zs.Cluster(len(vectors), **options).run(program)
    return (time.perf_counter() - start) / repetitions


def main() -> None:
    """Prints one row per case."""
    import ml_dtypes  # noqa: F401 - makes "bfloat16" a dtype's name

    table = Table(title="all_reduce by the ring, per call")
    for column in ("ranks", "elements per rank", "dtype", "zerosim, ms", "floor, ms", "ratio", "same bits"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(0)
    for ranks, length, dtype, repetitions in CASES:
        vectors = [rng.standard_normal(length, np.float32).astype(np.dtype(dtype)) for _ in range(ranks)]
        ours, floors = [np.zeros_like(v) for v in vectors], [np.zeros_like(v) for v in vectors]
        floor = median_seconds(partial(floor_all_reduce, vectors, floors), repetitions)
        mine = cluster_seconds(vectors, ours, repetitions)
        same = all(a.tobytes() == b.tobytes() for a, b in zip(ours, floors, strict=True))
        table.add_row(
            str(ranks),
            f"{length:,}",
            dtype,
            f"{1e3 * mine:.2f}",
            f"{1e3 * floor:.2f}",
            f"{mine / floor:.2f}",
            "yes" if same else "NO",
        )
    Console().print(table, checksum_costs(rng))


def checksum_costs(rng: np.random.Generator) -> Table:
    """The same all-reduce at once, hop by hop, as faults need it, and with a checksum of each message."""
    table = Table(title="all_reduce by the ring, hop by hop and with checksums, per call")
    for column in ("ranks", "bytes of a message", "at once, ms", "hop by hop, ms", "with checksums, ms",
                   "ratio to hop by hop", "ns a byte"):
        table.add_column(column, justify="right")
    for ranks, length in ((4, 1 << 10), (4, 1 << 16), (4, 1 << 22)):
        vectors = [rng.standard_normal(length, np.float32) for _ in range(ranks)]
        outs = [np.zeros_like(v) for v in vectors]
        repetitions = min(200, max(5, (1 << 22) // length))
        fast, hops, checked = (min(cluster_seconds(vectors, outs, repetitions, **options) for _ in range(3))
                               for options in ({}, {"faults": zs.faults.Plan()}, {"checksums": True}))
        sent = 2 * (ranks - 1) * 4 * length  # by all ranks together
        table.add_row(str(ranks), f"{4 * length // ranks:,}", *(f"{1e3 * one:.2f}" for one in (fast, hops, checked)),
                      f"{checked / hops:.2f}", f"{1e9 * (checked - hops) / sent:.2f}")
    return table


if __name__ == "__main__":
    main()
