"""All-reduces by the ring: beside one copy of the same bytes, beside fp32, beside MPI's own."""

from collections.abc import Callable
from typing import Any

import numpy as np

import zerosim as zs
from zerosim.numerics.formats import format_of

from . import Action, Row, Side


def vectors_of(ranks: int, length: int, format: str = "fp32") -> list[np.ndarray]:
    """N vectors (length,), different on every rank."""
    return [np.random.default_rng(rank).standard_normal(length, np.float32).astype(format_of(format).dtype)
            for rank in range(ranks)]


def all_reduce(ranks: int, length: int, format: str = "fp32", *, calls: int = 1, workers: int | None = None,
               then: Callable[[zs.Cluster], object] = lambda cluster: None, **options: Any) -> Side:
    """So many all-reduces of one run, on ``workers`` threads; ``then`` is timed too."""
    def prepare(small: bool) -> Action:
        n = min(ranks, 8) if small else ranks
        vectors = vectors_of(n, 1000 if small else length, format)
        outs = [np.zeros_like(vector) for vector in vectors]
        cluster = zs.Cluster(n, workers=workers, **options)

        def program(rank: zs.Rank) -> None:
            for _ in range(calls):
                rank.all_reduce(vectors[rank.index], out=outs[rank.index])

        def action() -> np.ndarray:
            cluster.run(program)
            then(cluster)
            cluster.runs.clear()
            return outs[-1]

        return action

    return prepare


def copies(ranks: int, length: int, *, calls: int = 1) -> Side:
    """One copy of each rank's vector: as many bytes are read and written as a ring must."""
    def prepare(small: bool) -> Action:
        vectors = vectors_of(min(ranks, 8) if small else ranks, 1000 if small else length)
        outs = [np.zeros_like(vector) for vector in vectors]

        def action() -> None:
            for _ in range(calls):
                for vector, out in zip(vectors, outs, strict=True):
                    np.copyto(out, vector)

        return action

    return prepare


def every_hop(cluster: zs.Cluster) -> int:
    """The number of hops of all ranks in the collectives, which any rank's trace tells one by one."""
    return sum(len(row.hops()) for row in cluster.trace[0].collectives())


# -- processes of MPI -------------------------------------------------------------------------------------------------


def mpi_side(length: int, calls: int, algorithm: str | None) -> Side:
    """So many all-reduces of two processes: by the ring, or, with None, by MPI itself, called directly."""
    def prepare(small: bool) -> Action:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        x = np.full(length, world.rank + 1, np.float32)
        out = np.empty_like(x)
        cluster = zs.connect() if algorithm else None

        def direct() -> np.ndarray:
            for _ in range(calls):
                world.Allreduce(x, out)
            return out

        def program(rank: zs.Rank) -> np.ndarray:
            for _ in range(calls):
                rank.all_reduce(x, out=out, algorithm=algorithm)
            return out

        def action() -> np.ndarray:
            world.Barrier()
            return direct() if cluster is None else cluster.run(program)[cluster.index]

        return action

    return prepare


MI = 1 << 20
THREADS = {1: "one thread", 2: "two threads"}
COPY = "one copy of the same bytes"
ROWS = (
    *(Row(f"ring-{ranks}-{threads}", f"fp32 ring all-reduce of 4 Mi elements, N = {ranks}, {words}", COPY,
          1.1 if threads == 1 else 0.7, all_reduce(ranks, 4 * MI, calls=4, workers=threads),
          copies(ranks, 4 * MI, calls=4))
      for threads, words in THREADS.items() for ranks in (4, 8)),
    *(Row(f"ring-64-{threads}", f"fp32 ring all-reduce of 256 k elements, N = 64, {words}", COPY, 1.4,
          all_reduce(64, MI // 4, calls=4, workers=threads), copies(64, MI // 4, calls=4))
      for threads, words in THREADS.items()),
    *(Row(f"wire-{format}", f"{format} ring all-reduce of 4 Mi elements, N = 4, one thread", "the fp32 ring", goal,
          all_reduce(4, 4 * MI, format, calls=4, workers=1), all_reduce(4, 4 * MI, calls=4, workers=1))
      for format, goal in (("bf16", 1.3), ("fp16", 2.0), ("fp8_e4m3", 2.0))),
    Row("hops", "fp32 ring all-reduce of 16 k elements, N = 1,024, every hop told", "hop by hop", 0.2,
        all_reduce(1024, 16 * 1024, then=every_hop),
        all_reduce(1024, 16 * 1024, then=every_hop, faults=zs.faults.Plan()), repetitions=1, tolerance=0.0),
    *(Row(f"mpi-{length}", f"MPI ring all-reduce of {length:,} fp32 elements, 2 processes", "MPI's own", goal,
          mpi_side(length, calls, "ring"), mpi_side(length, calls, None), needs=("mpi4py",), processes=(2, 2),
          launcher="mpi")
      for length, calls, goal in ((16, 300, 10.0), (65_536, 100, 2.0), (4 * MI, 5, 0.8))),
)
