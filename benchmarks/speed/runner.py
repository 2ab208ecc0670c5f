"""Rows measured: both sides take turns, each time as new processes, so that a slow minute of the machine is both's.

A side's figure is the median over rounds of the median of its repetitions. A process has one BLAS thread unless the row
is about more. What may hold it back is left out: OPENBLAS_CORETYPE with OPENBLAS_L2_SIZE, which keep NumPy to older
instructions, and PYTHONDONTWRITEBYTECODE, for which each process compiles anew all that it imports.
"""

import json
import os
import platform
import socket
import statistics
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from zerosim.connect import installed_program
from zerosim.numerics.checks import unknown_name
from zerosim.ranks.workers import cores

from . import Row, rows

ROUNDS = 3
LEFT_OUT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PYTHONDONTWRITEBYTECODE")
PACKAGES = ("zerosim", "numpy", "ml_dtypes", "torch", "deepspeed", "mpi4py", "mpich")


@dataclass(frozen=True)
class Measured:
    """A row's seconds by round, (rounds,) of each side; ``lacking`` says why there are none."""

    row: Row
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    lacking: str = ""

    @property
    def seconds(self) -> float:
        """Ours, the median over rounds."""
        return statistics.median(self.ours)

    @property
    def seconds_against(self) -> float:
        """Theirs, the median over rounds."""
        return statistics.median(self.theirs)

    @property
    def ratio(self) -> float:
        """Ours beside theirs, or in seconds."""
        return self.seconds / self.seconds_against if self.theirs else self.seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data: seconds by round, and their ratio."""
        if self.lacking:
            return {**self.row.as_json(), "lacking": self.lacking}
        return {**self.row.as_json(), "ratio": self.ratio, "seconds": list(self.ours),
                "seconds_against": list(self.theirs)}


def chosen(names: Iterable[str], *, minutes: bool = False) -> list[Row]:
    """Rows by name, or by the beginning of several names, as "ring"; without names, all with a goal, but those that
    take minutes if these are not asked for.

    ValueError for another name.
    """
    known, found = rows(), dict[str, Row]()
    for name in names:
        fitting = [name] if name in known else [one for one in known if one.startswith(f"{name}-")]
        if not fitting:
            raise unknown_name(f"no benchmark is called {name!r}", name, known, "they are")
        found |= {one: known[one] for one in fitting}
    return [*found.values()] or [row for row in known.values() if row.goal is not None and (row.theirs or minutes)]


def measure(row: Row, rounds: int = ROUNDS) -> Measured:
    """Both sides in turns. Raises RuntimeError with what a process said that failed."""
    lacking = [name for name in row.needs if not find_spec(name)]
    if row.launcher == "mpi" and not installed_program("mpiexec"):
        lacking.append("mpiexec")
    if lacking:
        return Measured(row, lacking=f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed")
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for (side, found), processes in zip(seconds.items(), row.processes, strict=True):
            if not getattr(row, side):
                continue
            found.append(statistics.median(_child(row, [row.name, side], processes)["seconds"]))
    return Measured(row, **{side: tuple(found) for side, found in seconds.items()})


def _child(row: Row, arguments: list[str], processes: int) -> Any:
    """What the first of so many processes of `child` prints."""
    root = str(Path(__file__).resolve().parents[__package__.count(".") + 1])
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(row.threads))
    environment["PYTHONSAFEPATH"] = "1"  # a folder of that name where the command was given is none of ours
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"{__package__}.child", *arguments]
    of_each: list[dict[str, str]] = [{}]
    if processes > 1 and row.launcher == "mpi":
        launcher = [str(installed_program("mpiexec")), "-n", str(processes)]
        command = [*launcher, sys.executable, "-m", "mpi4py", *command[1:]]
    elif processes > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes),
                        "LOCAL_SIZE": str(processes), "DS_ACCELERATOR": "cpu"}
        of_each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [Popen(command, env=environment | own, stdout=PIPE, stderr=PIPE, text=True) for own in of_each]
    with ThreadPoolExecutor(len(started)) as pool:
        said = {pool.submit(one.communicate): one for one in started}
        try:
            for future in as_completed(said):
                if said[future].returncode:  # the others may wait for it for ever
                    raise RuntimeError(f"the benchmark {' '.join(arguments)} ended badly: {future.result()[1][-2000:]}")
        finally:
            for one in started:
                one.kill()
    printed = next(iter(said)).result()[0]
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def machine() -> dict[str, Any]:
    """The processor, the cores that a process may use, the BLAS of a child and its kernels, and versions."""
    return {"processor": _processor(), "cores": cores(), "blas": _child(rows()["gpt-bf16"], ["machine"], 1)["blas"],
            "python": platform.python_version(), **{name: found for name in PACKAGES if (found := _version(name))}}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
