"""The worlds on which the one suite runs: each runs a program on N ranks and says what came of it on every rank."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import zerosim as zs
from tests.architecture.source import ROOT
from tests.backends import compiled_kernels, doubles
from tests.backends.gpu_order import cluster_in_gpu_order
from zerosim.backends.cupy.cluster import cupy_on, device_count
from zerosim.backends.nccl.adapter import NCCL
from zerosim.connect import installed_program

# After which processes are taken to hang, on a busy machine too; on a GPU's own machine gpu-check asks for less.
SECONDS = float(os.environ.get("ZEROSIM_TEST_SECONDS", "600"))


@dataclass(frozen=True)
class Task:
    """A program, as a function of an importable module, on so many of a job's processes, and the cluster's options."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    ranks: int
    backend: str = "mpi"
    doubled_gpus: int = 0
    on_gpus: bool = False


@dataclass(frozen=True)
class Outcome:
    """One rank's: its result, bytes sent and peak; or the exception that it raised, and bytes held."""

    result: Any = None
    sent_nbytes: int = 0
    peak_nbytes: int = 0
    error: BaseException | None = None
    held_nbytes: int = 0


def outcomes_of(cluster: zs.Cluster, program: Callable[..., Any], *args: Any) -> list[Outcome]:
    """What came of a program on each rank that this process has."""
    try:
        results = cluster.run(program, *args)
    except Exception as error:
        return [Outcome(error=error, held_nbytes=held) for held in cluster.memory.now_nbytes]
    return [Outcome(results[rank.index], sent, peak) for rank, sent, peak
            in zip(cluster.ranks, cluster.trace.sent_nbytes(), cluster.memory.peak_nbytes, strict=True)]


class World:
    """N ranks somewhere, on doubles of so many GPUs or on so many cards. ``library`` names whose own collectives
    ``native`` asks for."""

    library: str | None = None
    checks = True  # that ranks send what others do not expect is found, and not only in debug mode
    in_order = False  # calls that some ranks begin in another order than others wait for each other for ever

    def __init__(self, name: str, ranks: int, *, doubled_gpus: int = 0, cards: int = 0, **options: Any) -> None:
        self.name, self.ranks, self.doubled_gpus, self.cards, self.options = name, ranks, doubled_gpus, cards, options
        # Whose bits are had where numbers are added up. On cards matrices are multiplied by cuBLAS.
        self.kind: Callable[[int], zs.Cluster] = (
            cluster_in_gpu_order if doubled_gpus else zs.CuPyCluster if cards else zs.Cluster)

    def missing(self) -> str | None:
        """Why this world cannot be had here; None where it can."""
        if self.doubled_gpus and compiled_kernels.COMPILER is None:
            return compiled_kernels.MISSING
        return lacking_gpus(self.cards, nccl=self.library == "NCCL") if self.cards else None

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        """What came of it on every rank, in rank order."""
        raise NotImplementedError

    def run(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        """Like ``outcomes``, where nothing may go wrong."""
        found = self.outcomes(program, *args, **options)
        for outcome in found:
            if outcome.error is not None:
                raise outcome.error
        return found


class Here(World):
    """All ranks in this process, on a cluster of NumPy's arrays or of GPUs'."""

    def __init__(self, name: str, ranks: int, cluster: Callable[..., zs.Cluster] = zs.Cluster, **more: Any) -> None:
        super().__init__(name, ranks, **more)
        self.cluster, self.library = cluster, "NCCL" if cluster is zs.NCCLCluster else None

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        options.pop("timeout_seconds", None)  # the hub knows at once
        with doubles.installed(self.doubled_gpus) if self.doubled_gpus else ExitStack():
            return outcomes_of(self.cluster(self.ranks, **self.options | options), program, *args)


class Job:
    """N processes, each with a line to the tests; begun when they are first asked, and again after a task that ended
    them. ``launcher``: mpiexec, or torchrun, whose variables the processes are given."""

    def __init__(self, ranks: int, launcher: str) -> None:
        self.ranks, self.launcher = ranks, launcher
        self.lines: list[Connection] = []
        self.processes: list[subprocess.Popen[str]] = []

    def ask(self, what: Task | tuple[str, ...], ranks: int) -> list[Any]:
        """What the first processes answer. Raises RuntimeError, with what was said, where one of them has ended."""
        if not self.lines:
            self.begin()
        for line in self.lines[:ranks]:
            line.send(what)
        try:
            return [self._answer(line) for line in self.lines[:ranks]]
        except EOFError:
            raise RuntimeError(f"a process ended in the midst of a test:\n{self.end()}") from None

    def said(self, *words: str) -> list[Any]:
        """``zerosim ...``, typed on every process; ``{rank}`` in a word is its number."""
        return self.ask(words, self.ranks)

    def _answer(self, line: Connection) -> Any:
        if not line.poll(SECONDS):
            raise TimeoutError(f"no answer within {SECONDS:g} seconds:\n{self.end()}")
        return line.recv()

    def begin(self) -> None:
        """Starts the processes, and waits for their lines."""
        key, found = secrets.token_bytes(16), {}
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed at the end
        with socket.create_server(("127.0.0.1", 0), backlog=self.ranks) as server:
            server.settimeout(1.0)  # how often the processes are looked at, of which one may have ended
            self.processes = self.start(["tests.backends.worker", str(server.getsockname()[1]), key.hex()],
                                         stderr=self._stderr)
            while len(found) < self.ranks:
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    if any(process.poll() is not None for process in self.processes):
                        raise RuntimeError(f"a process has ended at once:\n{self.end()}") from None
                    continue
                accepted.setblocking(True)
                line = Connection(accepted.detach())
                deliver_challenge(line, key)
                answer_challenge(line, key)
                found[line.recv()] = line
        self.lines = [found[rank] for rank in range(self.ranks)]

    def start(self, words: list[str], **more: Any) -> list[subprocess.Popen[str]]:
        """The processes, or the launcher that has them, with ``python -m`` before the words."""
        options = {"cwd": ROOT, "text": True, "stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, **more}
        if self.launcher == "mpiexec":
            return [subprocess.Popen([*launch(self.ranks), sys.executable, "-m", "mpi4py", "-m", *words],
                                     env=one_thread(), **options)]
        return [subprocess.Popen([sys.executable, "-m", *words], env={**one_thread(), **variables}, **options)
                for variables in torchruns(self.ranks)]

    def end(self) -> str:
        """Hangs up, and waits for the processes to end; what they have said on stderr."""
        if not self.processes:
            return ""
        for line in self.lines:
            line.close()
        until = time.monotonic() + SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.lines, self.processes = [], []
        with self._stderr:
            self._stderr.seek(0)
            return self._stderr.read()


class Processes(World):
    """Each rank a process of a job that serves all tests of the session; options are its cluster's."""

    def __init__(self, name: str, ranks: int, job: Job, backend: str = "mpi", **more: Any) -> None:
        super().__init__(name, ranks, **more)
        self.job, self.backend, self.library = job, backend, backend.upper()
        self.in_order = backend == "nccl"
        self.checks = not self.in_order  # NCCL trusts both sides of a message, and its doubles ask the first they see

    def missing(self) -> str | None:
        return super().missing() or (mpi_missing() if self.job.launcher == "mpiexec" else None)

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        return self.job.ask(Task(program, args, self.options | options, self.ranks, self.backend, self.doubled_gpus,
                                 bool(self.doubled_gpus or self.cards)), self.ranks)


def lacking_gpus(count: int, *, nccl: bool = False) -> str | None:
    """Why so many GPUs, and NCCL, cannot be had here; None where they can."""
    try:
        found = device_count(cupy_on(0))
        if nccl:
            NCCL()
    except zs.BackendError as error:
        return str(error)
    return None if found >= count else f"needs {count} GPUs, and this machine has {found}"


def mpi_missing() -> str | None:
    """Why there are no processes of MPI here; None where there are."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; pip install 'zerosim[mpi]'"
    return None if installed_program("mpiexec") else "there is no mpiexec; pip install 'zerosim[mpi]'"


@cache
def launch(ranks: int) -> tuple[str, ...]:
    """The launcher's words for N processes, more than there are cores."""
    launcher = installed_program("mpiexec")
    assert launcher is not None
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    return (launcher, *(("--oversubscribe",) if "Open MPI" in said or "OpenRTE" in said else ()), "-n", str(ranks))


def one_thread() -> dict[str, str]:
    """This environment, with what a launcher of processes needs."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def torchruns(ranks: int) -> list[dict[str, str]]:
    """The variables that torchrun sets for each process of a job on this machine."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": str(ranks)}
    return [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def processes(count: int) -> str:
    """So many of them, in words."""
    return f"{count} process{'es' * (count != 1)}"


def on_one_card(rank: int) -> dict[str, str]:
    """The settings with which NCCL takes processes that share a card for machines that are linked by sockets."""
    return {"NCCL_HOSTID": f"zerosim-{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo"}


# One pool of MPI's processes, of which a world takes the first; and one job without MPI, as torchrun starts it. What
# has GPUs has processes of its own: in those of a double CuPy is the double.
POOL, TORCHRUN = Job(4, "mpiexec"), Job(3, "torchrun")
POOL_ON_CARDS, TORCHRUN_ON_CARDS, ALONE = Job(4, "mpiexec"), Job(3, "torchrun"), Job(1, "torchrun")
ON_ONE_CARD = {ranks: Job(ranks, "torchrun") for ranks in (1, 2, 3, 4)}
JOBS = (POOL, TORCHRUN, ALONE, POOL_ON_CARDS, TORCHRUN_ON_CARDS, *ON_ONE_CARD.values())
HERE = Here("in-process, 5 ranks in another order", 5, seed=7)
MPI = [Processes(f"MPI, {processes(ranks)}", ranks, POOL) for ranks in (1, 2, 3, 4)]
DOUBLES = [Here("a double of one GPU, 3 ranks", 3, zs.CuPyCluster, doubled_gpus=1),
           Here("doubles of 3 GPUs in one process", 3, zs.NCCLCluster, doubled_gpus=3),
           Processes("doubles of GPUs, over MPI by way of the host", 2, POOL, doubled_gpus=4),
           Processes("doubles of GPUs, 2 processes of MPI", 2, POOL, "nccl", doubled_gpus=4),
           Processes("doubles of GPUs, 1 process of torchrun's", 1, ALONE, "nccl", doubled_gpus=4),
           Processes("doubles of GPUs, 3 processes of torchrun's", 3, TORCHRUN, "nccl", doubled_gpus=4)]
GPUS = [Here("CuPy, 3 ranks on one GPU", 3, zs.CuPyCluster, cards=1),
        *(Here(f"NCCL, {ranks} GPUs in one process", ranks, zs.NCCLCluster, cards=ranks) for ranks in (2, 3, 4, 8)),
        *(Processes(f"CuPy over MPI, {processes(ranks)}", ranks, POOL_ON_CARDS, cards=1) for ranks in (1, 2, 3, 4)),
        *(Processes(f"NCCL, {processes(ranks)} on one GPU", ranks, job, "nccl", cards=1, device="cuda:0",
                    share_devices=True) for ranks, job in ON_ONE_CARD.items()),
        Processes("NCCL, 2 processes of MPI", 2, POOL_ON_CARDS, "nccl", cards=2),
        Processes("NCCL, 3 processes", 3, TORCHRUN_ON_CARDS, "nccl", cards=3)]
