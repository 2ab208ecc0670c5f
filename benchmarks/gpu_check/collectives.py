"""Collectives between GPUs: seconds, bus bandwidth as nccl-tests define it, and whether the ring has the right bits.

Run in the environment that a way of sharing a card needs: ``python -m benchmarks.gpu_check.collectives WAY RANKS``
prints one line of JSON. WAY is ``one-process`` (NCCLCluster) or ``processes`` (zs.connect).
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import zerosim as zs
from benchmarks.apart import Apart, distances, from_the_ring
from benchmarks.gpu_check import suite
from benchmarks.gpu_check.processes import Ended, Started
from benchmarks.gpu_check.report import BUDGET_SECONDS, Machine, Writer, Wrong
from zerosim.numerics.arrays import sha256, to_host
from zerosim.planning.cost import bus_bytes_per_second

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = ("ring", "native")
ELEMENTS = (1 << 14, 1 << 20, 1 << 26)  # of the whole vector
SHARED_ELEMENTS = (1 << 14, 1 << 20, 1 << 24)  # on a card that ranks share
REPETITIONS = 20
SHARING_NCCL = (2, 30)  # the first that takes NCCL_MULTI_RANK_GPU_ENABLE
SHARING_SECONDS = 120.0
Seconds = dict[tuple[str, str, int], float]  # of (operation, algorithm, elements)


def check_nccl(report: Writer, machine: Machine) -> None:
    """The conformance suite over NCCL between processes that share one card; bandwidths between two of them."""
    suite.check_worlds(report, lambda world: world.library == "NCCL" and world.cards == 1, suite.CONFORMANCE,
                       BUDGET_SECONDS / 3)
    report.check("bandwidth of 2 ranks on one GPU, as processes", by_processes, machine.missing, remark=remark)
    nccl = machine.versions.get("nccl", "0.0")
    too_old = f"NCCL {nccl} does not know NCCL_MULTI_RANK_GPU_ENABLE, which came with 2.30"
    report.check("bandwidth of 2 ranks on one GPU, in one process", in_one_process, machine.missing or (
        too_old if tuple(map(int, nccl.split(".")[:2])) < SHARING_NCCL else ""), remark=remark)


def check_cards(report: Writer, machine: Machine) -> None:
    """Bandwidths between all cards, then the conformance suite over NCCL with a card for each rank, and programs that
    fail."""
    count = len(machine.cards)
    alone = "" if count > 1 else f"this machine has {count} GPU, and ranks on GPUs of their own need 2"
    report.check("bandwidth over all GPUs, in one process", lambda: measured(zs.NCCLCluster(count), ELEMENTS),
                 machine.missing or alone, remark=remark)
    for files, test_seconds in ((suite.CONFORMANCE, suite.TEST_SECONDS), (suite.FAILURES, suite.FAILURE_SECONDS)):
        suite.check_worlds(report, lambda world: world.cards > 1, files, BUDGET_SECONDS / 4, test_seconds)


def timed(rank: zs.Rank, operation: str, algorithm: str, elements: int, repetitions: int = REPETITIONS,
          clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one collective of float32, of many that follow one another; the first three are not counted.

    ``elements`` are a multiple of N.
    """
    own = elements // rank.size
    x = rank.xp.zeros(own if operation == "all_gather" else elements, np.float32)
    out = rank.xp.empty(own if operation == "reduce_scatter" else elements, np.float32)
    began = 0.0
    for turn in range(-3, repetitions):
        if turn == 0:
            rank.xp.cuda.Device().synchronize()
            rank.barrier()
            began = clock()
        getattr(rank, operation)(x, algorithm=algorithm, out=out)
    rank.xp.cuda.Device().synchronize()
    return (clock() - began) / repetitions


def bits(rank: zs.Rank) -> str:
    """A fingerprint of the ring's sums in four formats, of a length that no N divides."""
    found = []
    for name in ("fp32", "fp16", "bf16", "fp8_e4m3"):
        values = np.random.default_rng(rank.index).standard_normal(10_007).astype(zs.FORMATS[name].dtype)
        x = rank.xp.asarray(values.view(f"u{values.itemsize}")).view(values.dtype)
        found.append(to_host(rank.all_reduce(x, algorithm="ring")))
    return sha256(found)


def on_a_rank(rank: zs.Rank, lengths: Sequence[int], repetitions: int) -> tuple[str, Apart, Seconds]:
    """The bits of the ring, how far NCCL's own sums are from those, and the seconds of everything that is measured.

    Lengths become multiples of N, so that all chunks are equal: NCCL's own calls know no other.
    """
    whole = [-(-elements // rank.size) * rank.size for elements in lengths]
    return bits(rank), from_the_ring(rank), {
        (operation, algorithm, elements): timed(rank, operation, algorithm, elements, repetitions)
        for operation in OPERATIONS for algorithm in ALGORITHMS for elements in whole}


def measured(cluster: Any, lengths: Sequence[int], repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Whether every rank of the ring had the simulator's bits, how far NCCL's own sums are from those, and a row for
    each measurement, by its slowest rank."""
    first = cluster.ranks[0]
    results = cluster.run(on_a_rank, lengths, repetitions)
    found = list(results) if len(cluster.ranks) == first.size else cluster.gather(results[first.index])
    wanted = zs.Cluster(first.size).run(bits)[0]
    return {"ring_has_the_simulators_bits": all(mine == wanted for mine, _, _ in found),
            "native_is_ulps_and_share_from_the_ring": found[0][1], "rows": rows_of([rows for _, _, rows in found])}


def rows_of(found: Sequence[Seconds]) -> list[dict[str, Any]]:
    """One row for each measurement; ``found`` in rank order."""
    rows = []
    for operation, algorithm, elements in found[0]:
        seconds, nbytes = max(its[operation, algorithm, elements] for its in found), 4 * elements
        rows.append({"operation": operation, "algorithm": algorithm, "ranks": len(found), "nbytes": nbytes,
                     "seconds": seconds,
                     "bus_bytes_per_second": bus_bytes_per_second(operation, len(found), nbytes, seconds)})
    return rows


def remark(found: dict[str, Any]) -> str:
    """The best bus bandwidth of each algorithm's all-reduce, and how far NCCL's own sums are from the ring's; Wrong
    where the ring has not the simulator's bits."""
    if not found["ring_has_the_simulators_bits"]:
        raise Wrong("the ring over NCCL has other bits than the simulator's")
    best = dict.fromkeys(ALGORITHMS, 0.0)
    for row in found["rows"]:
        if row["operation"] == "all_reduce":
            best[row["algorithm"]] = max(row["bus_bytes_per_second"] or 0.0, best[row["algorithm"]])
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in best.items())
    return (f"all_reduce, bus bandwidth: {rates}; native from the ring: "
            f"{distances(found['native_is_ulps_and_share_from_the_ring'])}")


# -- several ranks on one card, in the environment that they need -----------------------------------------------------

def in_one_process() -> dict[str, Any]:
    """Two ranks of one process on one card, as NCCL 2.30 allows it."""
    return answer_of("one-process", [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}])


def by_processes() -> dict[str, Any]:
    """Two processes on one card that take each other for different machines."""
    from tests.backends.worlds import on_one_card, torchruns

    return answer_of("processes", [variables | on_one_card(rank) for rank, variables in enumerate(torchruns(2))])


def answer_of(way: str, processes: Sequence[dict[str, str]]) -> dict[str, Any]:
    """What the first of the processes says, which have these variables."""
    words = [sys.executable, "-m", "benchmarks.gpu_check.collectives", way, "2"]
    with ExitStack() as stack:
        started = [stack.enter_context(Started(words, **variables)) for variables in processes]
        return answer([process.ended(SHARING_SECONDS) for process in started])


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


def main(way: str, ranks: str) -> None:
    """Prints what was measured, on rank 0."""
    if way == "one-process":
        cluster: zs.Cluster = zs.NCCLCluster(int(ranks), share_devices=True)
    else:
        cluster = zs.connect("nccl", device="cuda:0", share_devices=True)
    found = measured(cluster, SHARED_ELEMENTS)
    if cluster.ranks[0].index == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
