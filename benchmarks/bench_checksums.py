"""What checksums cost an all-reduce: at once, hop by hop, as faults need it, and with CRC-32 of each message, computed
at both its ends.

Seconds are this machine's; trust the ratios.
"""

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import zerosim as zs


def cluster_seconds(vectors: list[np.ndarray], outs: list[np.ndarray], repetitions: int, **options: Any) -> float:
    """Seconds of one all-reduce: a whole run of many, the making of its cluster included, divided by their number."""

    def program(rank: zs.Rank) -> None:
        for _ in range(repetitions):
            rank.all_reduce(vectors[rank.index], out=outs[rank.index])

    zs.Cluster(len(vectors)).run(lambda rank: rank.all_reduce(vectors[rank.index], out=outs[rank.index]) is None)
    start = time.perf_counter()
    zs.Cluster(len(vectors), **options).run(program)
    return (time.perf_counter() - start) / repetitions


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
    Console().print(checksum_costs(np.random.default_rng(0)))
