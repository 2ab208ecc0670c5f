"""`import zerosim` brings NumPy and ml_dtypes, and nothing else that was not there before."""

import subprocess
import sys

from tests.architecture.source import ROOT


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, run with these arguments in the repository."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules outside the standard library that a fresh interpreter has after one statement."""
    program = (f"import sys; {statement}; tops = {{name.partition('.')[0] for name in sys.modules}}; "
               "print(*sorted(tops - set(sys.stdlib_module_names)))")
    return set(fresh("-c", program).stdout.split())


def test_importing_zerosim_loads_numpy_and_ml_dtypes_only() -> None:
    assert loaded_by("import zerosim") - loaded_by("import numpy, ml_dtypes") == {"zerosim"}


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"rich", "zerosim"} <= loaded_by("import zerosim, rich")


def test_importing_zerosim_is_silent() -> None:
    done = fresh("-W", "error", "-c", "import zerosim")
    assert (done.stdout, done.stderr) == ("", "")
