"""A reader's own program on processes of their own, started from a notebook or a script as one would from a shell."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerosim.course.running.program import RanPart
from zerosim.ranks.errors import BackendError

LAUNCHERS = ("mpiexec", "mpirun")
OPEN_MPI = ("Open MPI", "OpenRTE")  # asks to be told of more processes than cores, and of root, as in a container
ASKED_FOR = ("--oversubscribe", "--allow-run-as-root")
SECONDS = 300.0  # a job takes a few; on a busy machine, where its processes share a core, ten times as many


def launched(place: str, ranks: int, settings: Mapping[str, Any] | None = None, *,
             seconds: float = SECONDS) -> list[RanPart]:
    """Runs ``FILE.py:FUNCTION`` on N processes over MPI; the parts of all ranks, in rank order.

    It is ``mpiexec -n N zerosim run FILE.py:FUNCTION --json``, with the settings as ``--with NAME=VALUE``. What ranks
    return comes back as text, and as a SHA-256 to compare with `zerosim.numerics.arrays.sha256` of a result here.
    Raises BackendError where MPI is not installed, ValueError for no ranks, and RuntimeError, with what the job said,
    where it fails or does not end in time.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} processes were asked for; take one at least")
    words = [*_launcher(), "-n", str(ranks), sys.executable, "-m", "zerosim", "run", place, "--json"]
    for name, value in (settings or {}).items():
        words += ["--with", f"{name}={value}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{ranks} processes of {place} did not end within {seconds:g} seconds; give them more, or "
                           "look for ranks that wait for each other") from None
    if done.returncode:
        raise RuntimeError(f"{ranks} processes of {place} ended with exit code {done.returncode} and said: "
                           f"{done.stderr.strip() or done.stdout.strip() or 'nothing'}")
    return [RanPart(**row) for row in json.loads(done.stdout)["rows"]]


def _launcher() -> list[str]:
    """The launcher beside this interpreter or on the PATH, and its flags; BackendError where one or mpi4py is not."""
    beside = str(Path(sys.executable).parent)
    found = next((path for name in LAUNCHERS for path in (shutil.which(name, path=beside), shutil.which(name)) if path),
                 None)
    if found is None or find_spec("mpi4py") is None:
        missing = "mpi4py is not installed" if found else f"there is no {' or '.join(LAUNCHERS)} here"
        raise BackendError("mpi", f"processes over MPI cannot be had: {missing}; pip install 'zerosim[mpi]'")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    return [found, *(ASKED_FOR if any(name in said for name in OPEN_MPI) else ())]
