"""What a step of a long run adds to memory, beside what it adds where a trace keeps all its rows: blocks that Python
has allocated, and the most memory that the process has held."""

import gc
import resource
import sys

import numpy as np

import zerosim as zs

LONG_RUN, KEPT = 10_000, 500  # steps, and rows that are kept


def engine_of(rank: zs.Rank) -> zs.Engine:
    return zs.Engine(rank, zs.models.MLP((8, 16, 4)), zs.optim.Adam(lr=0.01), stage=3)


def step(engine: zs.Engine, data: np.random.Generator) -> None:
    engine.step([(data.normal(size=(2, 8)), data.normal(size=(2, 4)))])


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


if __name__ == "__main__":
    main()
