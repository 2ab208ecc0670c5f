"""The parts of this installation, and the backends that can be used on this machine: facts, each found by trying.

Whatever could crash or hang (a library for MPI, a driver for a GPU) is tried in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape

from zerosim import __version__
from zerosim.connect import LAUNCHERS, installed_program
from zerosim.display.views import TextLine, View, marked_table
from zerosim.ranks import Cluster, Rank
from zerosim.ranks.workers import cores
from zerosim.shown import Answer

PACKAGES = ("numpy", "ml_dtypes", "greenlet", "matplotlib", "rich", "typer", "threadpoolctl")
CUDA = "CUDA (CuPy, NCCL)"
REQUIRABLE = {"in-process": "in-process", "mpi": "MPI", "nccl": CUDA}  # as one asks for them: as they are called here
# The first import of CuPy or of an MPI library on a cold disk takes some ten seconds; on a busy machine a trial of two
# processes of MPI was seen to take more than a minute. Only what hangs takes all of it.
PROBE_SECONDS = 300.0

MPI_PROBE = "import mpi4py; from mpi4py import MPI; print(mpi4py.__version__, '·', MPI.Get_library_version())"
MPI_TRIAL = """
import numpy, zerosim
cluster = zerosim.connect()
program = lambda rank: float(rank.all_reduce(numpy.array([rank.index + 1.0]))[0])
sums = cluster.gather(cluster.run(program)[cluster.index])
if cluster.index == 0:
    print(*sums)
"""
CUPY_PROBE = """
import cupy
count = cupy.cuda.runtime.getDeviceCount()
names = [cupy.cuda.runtime.getDeviceProperties(i)['name'].decode() for i in range(count)]
print(cupy.__version__, '·', ', '.join(names) or 'no device')
"""
# NCCL's own sum, and the ring over its sends, on as many GPUs as there are, two at the most.
CUDA_TRIAL = """
import numpy as np, zerosim as zs
from zerosim.backends.cupy.cluster import cupy_on, device_count
ranks = min(2, device_count(cupy_on(0)))
def program(rank):
    x = rank.xp.asarray(np.full(2, rank.index + 1, np.float32))
    return [rank.all_reduce(x, algorithm=name).get().tolist() for name in ('ring', 'native')]
sums = zs.NCCLCluster(ranks).run(program)
print('right' if list(sums) == [[[ranks * (ranks + 1) / 2] * 2] * 2] * ranks else list(sums))
"""


@dataclass(frozen=True, slots=True)
class Version:
    """A package and its version; None where it is not installed."""

    name: str
    version: str | None


@dataclass(frozen=True, slots=True)
class Blas:
    """One loaded library for matrix products, and the threads that it uses when nobody limits it."""

    name: str
    version: str | None
    architecture: str | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A way to connect ranks: whether it can be used here and now, and why or why not."""

    name: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Doctor(Answer):
    """All that was found. ``blas_threads_in_a_run`` is what a running cluster leaves BLAS; None where that failed."""

    versions: tuple[Version, ...]
    platform: str
    executable: str
    cores: int
    blas: tuple[Blas, ...]
    blas_threads_in_a_run: int | None
    backends: tuple[BackendRow, ...]

    def view(self) -> View:
        """Versions, the machine and BLAS, and the backends."""
        rows = [(version.name, version.version or "not installed") for version in self.versions]
        rows += [("platform", self.platform), ("interpreter", self.executable), ("cores", f"{self.cores} usable")]
        rows += [("BLAS", blas_text(library)) for library in self.blas]
        if self.blas_threads_in_a_run is not None:
            rows.append(("", f"{self.blas_threads_in_a_run} while ranks run, since that number changes bits"))
        backends = ((backend.name, "[green]yes[/]" if backend.usable else "[red]no[/]", escape(backend.reason))
                    for backend in self.backends)
        return View("", "", (
            marked_table("what", "found", rows=((what, escape(text)) for what, text in rows)), TextLine(""),
            marked_table("backend", "usable", "why, or why not", rows=backends)))


def examine() -> Doctor:
    """Looks at everything; takes a second, or more where MPI or CuPy is installed."""
    own = Version("python", platform.python_version()), Version("zerosim", __version__)
    backend, threads = in_process()
    return Doctor((*own, *map(version_of, PACKAGES)), platform.platform(), sys.executable, cores(),
                  tuple(blas_libraries()), threads, (backend, mpi(), cuda()))  # fmt: skip


def requirable(names: Sequence[str]) -> list[str]:
    """The names of these backends in the report.

    Raises ValueError for an unknown name.
    """
    unknown = [name for name in names if name not in REQUIRABLE]
    if unknown:
        raise ValueError(f"--require names {', '.join(map(repr, unknown))}, and the backends are "
                         f"{', '.join(REQUIRABLE)}; name one or more of these, with commas between")
    return [REQUIRABLE[name] for name in names]


def lacking(found: Doctor, names: Sequence[str]) -> list[BackendRow]:
    """The backends of these names in the report that cannot be used."""
    return [backend for backend in found.backends if backend.name in names and not backend.usable]


def version_of(package: str) -> Version:
    """The installed version of a package, without importing it."""
    try:
        return Version(package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Version(package, None)


def blas_libraries() -> list[Blas]:
    """The libraries with which NumPy multiplies matrices; one unknown to threadpoolctl as NumPy names it."""
    from threadpoolctl import threadpool_info

    found = [Blas(library["internal_api"], library["version"], library.get("architecture"), library["num_threads"])
             for library in threadpool_info() if library["user_api"] == "blas"]  # fmt: skip
    built: Any = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    return found or [Blas(blas.get("name", "unknown"), blas.get("version"), None, None)]


def in_process() -> tuple[BackendRow, int | None]:
    """Two ranks in this process really make an all-reduce; beside it, the BLAS threads that they had."""
    name = "in-process"
    try:
        began = time.perf_counter()
        results = Cluster(2).run(_all_reduce)
        seconds = time.perf_counter() - began
    except Exception as error:  # whatever is broken in this installation is what a doctor is asked for
        return BackendRow(name, False, f"an all-reduce on 2 ranks failed: {type(error).__name__}: {error}"), None
    sums, threads = [total for total, _ in results], results[0][1]
    is_right = sums == [[3.0, 3.0], [3.0, 3.0]]
    found = f"3 on both, in {1000 * seconds:.1f} ms" if is_right else f"{sums} instead of 3 everywhere"
    return BackendRow(name, is_right, f"an all-reduce of 1 and 2 on 2 ranks gave {found}"), threads


def _all_reduce(rank: Rank) -> tuple[list[float], int | None]:
    total = rank.all_reduce(np.full(2, rank.index + 1, np.float32))
    return total.tolist(), blas_libraries()[0].threads


def mpi() -> BackendRow:
    """Two processes under the launcher really make an all-reduce; where they cannot, the reason says what is amiss."""
    launcher = installed_program(*LAUNCHERS)
    here = probe("mpi4py", MPI_PROBE)
    if launcher is None or here.startswith("mpi4py is "):
        started = f"{launcher} is there" if launcher else f"no {' or '.join(LAUNCHERS)} on the PATH"
        return BackendRow("MPI", False, f"{here}; {started}; pip install 'zerosim[mpi]'")
    failed = failure_of([launcher, "-n", "2", sys.executable, "-m", "mpi4py", "-c", MPI_TRIAL], "3.0 3.0")
    return BackendRow("MPI", failed is None, "an all-reduce of 1 and 2 on 2 processes "
                      f"{failed or 'gave 3 on both'}; {here}; {launcher}")


def failure_of(words: Sequence[str], expected: str) -> str | None:
    """The failure of a command that should print this, whatever the space between its words; None if it did."""
    done = ended(words)
    if done is None:
        return f"did not end within {PROBE_SECONDS:g} seconds"
    if done.returncode:
        line = last_line if "Traceback" in done.stderr else first_line  # in which a program says its error
        return f"failed: {line(done.stderr) or f'exit code {done.returncode}'}"
    found = " ".join(done.stdout.split())
    return None if found == expected else f"printed {found!r} instead of {expected!r}"


def cuda() -> BackendRow:
    """The GPUs really make an all-reduce through CuPy and NCCL; where they cannot, the reason says what is missing."""
    here = probe("cupy", CUPY_PROBE)
    devices = visible_gpus()
    seen = f"GPU: {', '.join(devices)}" if devices else "no NVIDIA GPU to be seen"
    if here.startswith("cupy is "):
        return BackendRow(CUDA, False, f"{here}; {seen}; pip install 'zerosim[gpu]', on a machine with an NVIDIA GPU")
    failed = failure_of([sys.executable, "-c", CUDA_TRIAL], "right")
    what = "an all-reduce on at most two GPUs, by our ring over NCCL and by NCCL's own,"
    if failed is not None:
        return BackendRow(CUDA, False, f"{what} {failed}; {here}; {seen}")
    return BackendRow(CUDA, True, f"{what} gave the right sums; {here}")


def probe(package: str, program: str, seconds: float = PROBE_SECONDS) -> str:
    """Runs a program that imports a package in a fresh interpreter; what it printed, or, after "PACKAGE is", why it
    failed: in one line."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    done = ended([sys.executable, "-c", program], seconds)
    if done is None:
        return f"{package} is installed, but did not answer within {seconds:g} seconds"
    if done.returncode:
        return f"{package} is installed, but does not work: {last_line(done.stderr) or f'exit code {done.returncode}'}"
    return f"{package} {first_line(done.stdout)}"


def ended(words: Sequence[str], seconds: float = PROBE_SECONDS) -> subprocess.CompletedProcess[str] | None:
    """A command, run to its end; None for one that did not end in time."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None


def visible_gpus() -> list[str]:
    """The GPUs that NVIDIA's driver lists, by name."""
    program = installed_program("nvidia-smi")
    if program is None:
        return []
    try:
        done = ended([program, "--query-gpu=name", "--format=csv,noheader"])
    except OSError:
        return []
    return [] if done is None or done.returncode else done.stdout.split("\n")[:-1]


def first_line(text: str) -> str:
    """The first line with a letter or digit in it, with single spaces and nothing that cannot be printed."""
    printable = ("".join(character if character.isprintable() else " " for character in line)
                 for line in text.splitlines() if any(map(str.isalnum, line)))
    return next((" ".join(line.split()) for line in printable), "")


def last_line(text: str) -> str:
    """The last line that is not empty: of a traceback, the error."""
    return first_line("\n".join(reversed(text.splitlines())))


def blas_text(library: Blas) -> str:
    """``openblas 0.3.30 for Haswell, 2 threads``."""
    version = f" {library.version}" if library.version else ""
    architecture = f" for {library.architecture}" if library.architecture else ""
    threads = "threads unknown" if library.threads is None else f"threads: {library.threads}"
    return f"{library.name}{version}{architecture}, {threads}"
