"""Collectives between GPUs: seconds, bus bandwidth as nccl-tests define it, and whether the ring has the right bits.

Run in the environment that a way of sharing a card needs: ``python -m benchmarks.gpu_check.collectives WAY RANKS
ELEMENTS ...`` prints one line of JSON. WAY is ``one-process`` (NCCLCluster) or ``processes`` (zs.connect).
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import zerosim as zs
from benchmarks.apart import distances, from_the_ring
from benchmarks.gpu_check.processes import Ended, Started, run
from benchmarks.gpu_check.report import python
from zerosim.numerics.arrays import to_host
from zerosim.planning.cost import bus_bytes_per_second

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = ("ring", "native")
ELEMENTS = (1 << 14, 1 << 20, 1 << 26)  # of the whole vector
SHARED_ELEMENTS = ("16384", "1048576", "16777216")
REPETITIONS = 20
Row = dict[str, Any]


def timed(rank: zs.Rank, operation: str, algorithm: str, elements: int, dtype: str, repetitions: int = REPETITIONS,
          clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one collective, of many that follow one another; the first three are not counted.

    ``elements`` are a multiple of N.
    """
    own = elements // rank.size
    x = rank.xp.zeros(own if operation == "all_gather" else elements, dtype)
    out = rank.xp.empty(own if operation == "reduce_scatter" else elements, dtype)
    began = 0.0
    for turn in range(-3, repetitions):
        if turn == 0:
            rank.xp.cuda.Device().synchronize()
            rank.barrier()
            began = clock()
        getattr(rank, operation)(x, algorithm=algorithm, out=out)
    rank.xp.cuda.Device().synchronize()
    return (clock() - began) / repetitions


def program(rank: zs.Rank, lengths: Sequence[int], repetitions: int) -> list[tuple[str, str, int, float]]:
    """(operation, algorithm, elements, seconds) of everything that is measured, on this rank, in float32.

    Lengths become multiples of N, so that all chunks are equal: NCCL's own calls know no other.
    """
    lengths = [-(-elements // rank.size) * rank.size for elements in lengths]
    return [(operation, algorithm, elements, timed(rank, operation, algorithm, elements, "float32", repetitions))
            for operation in OPERATIONS for algorithm in ALGORITHMS for elements in lengths]


def rows_of(found: Sequence[Sequence[tuple[str, str, int, float]]]) -> list[Row]:
    """One row for each measurement, by its slowest rank; ``found`` in rank order."""
    rows = []
    for measured in zip(*found, strict=True):
        operation, algorithm, elements, _ = measured[0]
        seconds, nbytes = max(row[3] for row in measured), 4 * elements
        rows.append({"operation": operation, "algorithm": algorithm, "ranks": len(found), "nbytes": nbytes,
                     "seconds": seconds,
                     "bus_bytes_per_second": bus_bytes_per_second(operation, len(found), nbytes, seconds)})
    return rows


def bits(rank: zs.Rank, algorithm: str = "ring") -> list[str]:
    """The bits of some sums, as hexadecimal numbers: in every format, of a length that no N divides."""
    import ml_dtypes

    found = []
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        values = np.random.default_rng(rank.index).standard_normal(10_007).astype(np.float32).astype(dtype)
        x = rank.xp.asarray(values.view(f"u{values.itemsize}")).view(values.dtype)
        found.append(to_host(rank.all_reduce(x, algorithm=algorithm)).tobytes().hex())
    return found


def measured(cluster: zs.Cluster, lengths: Sequence[int], repetitions: int = REPETITIONS) -> dict[str, Any]:
    """The rows, whether every rank of the ring had the simulator's bits, and how far NCCL's own sums are from those."""
    ranks = cluster.ranks[0].size
    wanted = zs.Cluster(ranks).run(bits)[0]
    same = cluster.run(bits)
    found = cluster.run(program, lengths, repetitions)
    here = cluster.ranks[0].index
    apart = {"native_is_ulps_and_share_from_the_ring": cluster.run(from_the_ring)[here]}
    if isinstance(same, zs.Results) and len(cluster.ranks) == ranks:
        return {"ring_has_the_simulators_bits": all(mine == wanted for mine in same), "rows": rows_of(list(found)),
                **apart}
    gathered = cluster.gather((same[here] == wanted, found[here]))  # type: ignore[attr-defined]
    return {"ring_has_the_simulators_bits": all(mine for mine, _ in gathered),
            "rows": rows_of([rows for _, rows in gathered]), **apart}


# -- several ranks on one card, in the environment that they need -----------------------------------------------------

SHARING_NCCL = (2, 30)  # the first that takes NCCL_MULTI_RANK_GPU_ENABLE
SHARING_SECONDS = 120.0


def in_one_process(ranks: int = 2) -> dict[str, Any]:
    """Ranks of one process on one card, as NCCL 2.30 allows it."""
    words = python("-m", "benchmarks.gpu_check.collectives", "one-process", str(ranks), *SHARED_ELEMENTS)
    return answer([run(words, SHARING_SECONDS, NCCL_MULTI_RANK_GPU_ENABLE="1")])


def by_processes(ranks: int) -> dict[str, Any]:
    """Processes on one card that take each other for different machines."""
    from tests.backends.worlds import on_one_card, torchruns

    words = python("-m", "benchmarks.gpu_check.collectives", "processes", str(ranks), *SHARED_ELEMENTS)
    started = [Started(words, **variables, **on_one_card(rank)) for rank, variables in enumerate(torchruns(ranks))]
    try:
        return answer([process.ended(SHARING_SECONDS) for process in started])
    finally:
        for process in started:
            process.end()


def answer(ends: Sequence[Ended]) -> dict[str, Any]:
    """What the first process said. Raises RuntimeError where one failed, or took too long."""
    for end in ends:
        if end.code is None:
            raise RuntimeError(f"did not end within {end.seconds:.0f} seconds, as happens where NCCL_MAX_CTAS is not "
                               f"lowered: {end.stderr.strip()[-2000:]}")
        if end.code:
            raise RuntimeError(f"exit code {end.code}: {end.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(ends[0].stdout.strip().split("\n")[-1])
    return found


def judged(found: dict[str, Any]) -> str:
    """A ring over NCCL must have the simulator's bits."""
    return "" if found["ring_has_the_simulators_bits"] else "the ring over NCCL has other bits than the simulator's"


def remark(found: dict[str, Any]) -> str:
    """The best bus bandwidth of each algorithm's all-reduce, and how far NCCL's own sums are from the ring's."""
    best: dict[str, float] = {}
    for row in found["rows"]:
        if row["operation"] == "all_reduce":
            best[row["algorithm"]] = max(row["bus_bytes_per_second"] or 0.0, best.get(row["algorithm"], 0.0))
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in best.items())
    return (f"all_reduce, bus bandwidth: {rates}; native from the ring: "
            f"{distances(found['native_is_ulps_and_share_from_the_ring'])}")


def main(way: str, ranks: str, *lengths: str) -> None:
    """Prints what was measured, on rank 0."""
    if way == "one-process":
        cluster: zs.Cluster = zs.NCCLCluster(int(ranks), share_devices=True)
    else:
        cluster = zs.connect("nccl", device="cuda:0", share_devices=True)
    found = measured(cluster, tuple(map(int, lengths)) or ELEMENTS)
    if cluster.ranks[0].index == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
