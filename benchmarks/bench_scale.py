"""A ZeRO-3 step of a tiny model on 64, 256 and 1,024 ranks of one process, and what a long run adds to memory.

Seconds of a rank's step stand beside those on 64 ranks, the floor of the same run: where each rank's work does not
depend on the number of ranks the ratio is 1. What a step of a long run adds to memory stands beside what it adds where
a trace keeps all its rows: blocks that Python has allocated, and the most memory that the process has held.
"""

import gc
import resource
import sys
import time
from itertools import pairwise

import numpy as np

import zerosim as zs

RANKS, STEPS = (64, 256, 1024), 3
LONG_RUN, KEPT = 10_000, 500  # steps, and rows that are kept


def engine_of(rank: zs.Rank) -> zs.Engine:
    return zs.Engine(rank, zs.models.MLP((8, 16, 4)), zs.optim.Adam(lr=0.01), stage=3)


def step(engine: zs.Engine, data: np.random.Generator) -> None:
    engine.step([(data.normal(size=(2, 8)), data.normal(size=(2, 4)))])


def timed(rank: zs.Rank, moments: list[float]) -> None:
    """Notes the processor's seconds at the start of each step, of which all ranks wait for each other, and the end."""
    engine, data = engine_of(rank), np.random.default_rng(rank.index)
    for _ in range(STEPS):
        rank.barrier()
        if rank.index == 0:
            moments.append(time.process_time())
        step(engine, data)
    rank.barrier()
    if rank.index == 0:
        moments.append(time.process_time())


def long(rank: zs.Rank, steps: int, held: list[tuple[int, int, int]]) -> None:
    """Notes what Python and the process hold when a tenth of the steps are done, and when all are."""
    engine, data = engine_of(rank), np.random.default_rng(rank.index)
    for number in range(1, steps + 1):
        step(engine, data)
        if rank.index == 0 and number in (steps // 10, steps):
            gc.collect()
            held.append((number, sys.getallocatedblocks(), most_kilobytes()))


def most_kilobytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def added(steps: int, ranks: int, trace_rows: int | None) -> tuple[float, float]:
    """Blocks, and bytes of the most memory, that one step of all ranks adds, from a tenth of the steps on."""
    held: list[tuple[int, int, int]] = []
    zs.Cluster(ranks, trace_rows=trace_rows).run(long, steps, held)
    (first, blocks, most), (last, blocks_at_end, most_at_end) = held
    return (blocks_at_end - blocks) / (last - first), 1e3 * (most_at_end - most) / (last - first)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else LONG_RUN
    for ranks in (2, 4):
        blocks, nbytes = added(steps, ranks, KEPT)  # first: the most memory never falls
        floor, floor_nbytes = added(steps // 10, ranks, None)
        print(f"a step of {ranks} ranks adds, over {steps:,} steps with {KEPT} rows kept, {blocks:.3f} blocks and "
              f"{nbytes:,.0f} bytes; with all rows {floor:,.0f} and {floor_nbytes:,.0f}: {blocks / floor:.5f} of them")
    floor = 0.0
    for ranks in RANKS:
        moments: list[float] = []
        zs.Cluster(ranks).run(timed, moments)
        seconds = min(after - before for before, after in pairwise(moments))
        floor = floor or seconds / ranks
        print(f"a ZeRO-3 step of {ranks:5,} ranks: {seconds:6.2f} s, {1e3 * seconds / ranks:5.2f} ms a rank, "
              f"{seconds / ranks / floor:5.2f} of the floor")
    print(f"most memory of this process: {most_kilobytes() / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
