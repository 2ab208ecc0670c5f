"""The speed of an all-reduce over MPI processes beside MPI's own, which makes each hop in C; and the sums' distance.

Started by itself it starts two processes, and prints medians of one process and their ratios; then four, for the ULPs
between MPI's sums and the ring's, since two ranks add in one order. Needs zerosim[mpi].
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

import zerosim as zs
from zerosim.connect import installed_program

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RANKS, RANKS_APART = 2, 4
CASES = [(16, np.float32, 300), (1 << 16, np.float32, 100), (1 << 22, np.float32, 9), (1 << 22, ml_dtypes.bfloat16, 9)]


def median_seconds(action: Callable[[], object], barrier: Callable[[], object], repetitions: int) -> float:
    """Median seconds of the repetitions, each begun together, after three that are not counted."""
    seconds = []
    for _ in range(repetitions + 3):
        barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def program(rank: zs.Rank) -> list[tuple[float, float, float | None]]:
    """(ring, native, MPI called directly) for each case; MPI itself has no bf16."""
    from mpi4py import MPI

    found = []
    for length, dtype, repetitions in CASES:
        x = np.full(length, rank.index + 1, np.float32).astype(dtype)
        out = np.empty_like(x)

        def timed(action: Callable[[], object], repetitions: int = repetitions) -> float:
            return median_seconds(action, MPI.COMM_WORLD.Barrier, repetitions)

        ring = timed(lambda: rank.all_reduce(x, out=out))  # noqa: B023 - called at once
        native = timed(lambda: rank.all_reduce(x, out=out, algorithm="native"))  # noqa: B023
        direct = timed(lambda: MPI.COMM_WORLD.Allreduce(x, out)) if dtype == np.float32 else None  # noqa: B023
        found.append((ring, native, direct))
    return found


def print_times(times: list[tuple[float, float, float | None]]) -> None:
    """One line for each case."""
    table = Table(title=f"all-reduce on {RANKS} processes, milliseconds", box=None)
    for column in ("elements", "dtype", "ring", "native", "MPI itself", "ring / MPI itself", "native / MPI itself"):
        table.add_column(column, justify="right")
    for (length, dtype, _), (ring, native, direct) in zip(CASES, times, strict=True):
        ratios = ("", "") if direct is None else (f"{ring / direct:.2f}", f"{native / direct:.2f}")
        table.add_row(f"{length:,}", np.dtype(dtype).name, f"{1000 * ring:.3f}", f"{1000 * native:.3f}",
                      "" if direct is None else f"{1000 * direct:.3f}", *ratios)
    Console(width=110).print(table)


def launch() -> int:
    """This script again, as processes of MPI."""
    launcher = installed_program("mpiexec")
    if launcher is None:
        print("there is no mpiexec here; pip install 'zerosim[mpi]'", file=sys.stderr)
        return 1
    started = (subprocess.run([launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__, str(ranks)])
               for ranks in (RANKS, RANKS_APART))
    return max(done.returncode for done in started)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(launch())
    from benchmarks.apart import distances, from_the_ring

    cluster = zs.connect()
    if sys.argv[1] == str(RANKS):
        times = cluster.run(program)[cluster.index]
        if cluster.index == 0:
            print_times(times)
    else:
        apart = cluster.run(from_the_ring)[cluster.index]
        if cluster.index == 0:
            print(f"\nMPI's own all-reduce from the ring, {RANKS_APART} processes: {distances(apart)}")
