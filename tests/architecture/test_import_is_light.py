"""`import zerosim` brings NumPy and ml_dtypes, and nothing else that was not there before."""

import subprocess
import sys

import pytest

from tests.architecture import imports
from tests.architecture.source import ROOT, package_sources


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, run with these arguments in the repository."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


def modules_of(statement: str) -> set[str]:
    """The package's modules that a fresh interpreter has after one statement."""
    program = f"import sys; {statement}; print(*(name for name in sys.modules if name.startswith('zerosim')))"
    return set(fresh("-c", program).stdout.split())


def loaded_by(statement: str) -> set[str]:
    """Top-level modules outside the standard library that a fresh interpreter has after one statement."""
    program = (f"import sys; {statement}; tops = {{name.partition('.')[0] for name in sys.modules}}; "
               "print(*sorted(tops - set(sys.stdlib_module_names)))")
    return set(fresh("-c", program).stdout.split())


def test_importing_zerosim_loads_numpy_and_ml_dtypes_only() -> None:
    assert loaded_by("import zerosim") - loaded_by("import numpy, ml_dtypes") == {"zerosim"}


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"rich", "zerosim"} <= loaded_by("import zerosim, rich")


@pytest.mark.parametrize("heavy", ["cupy", "mpi4py", "matplotlib"])
def test_what_is_heavy_is_imported_inside_functions_alone(heavy: str) -> None:
    """So that it holds on machines too that do not have it."""
    inside = [f"{source.path}:{node.lineno}" for source in package_sources()
              for node, name in imports.imported_modules(source)
              if name.partition(".")[0] == heavy and node.col_offset == 0]
    assert not [place for place in inside if "figures/" not in place]


def test_the_kernels_of_a_gpu_can_be_read_without_cupy() -> None:
    assert "cupy" not in loaded_by("import zerosim.backends.cupy.kernels, zerosim.backends.cupy.cluster")


def test_importing_zerosim_is_silent() -> None:
    done = fresh("-W", "error", "-c", "import zerosim")
    assert (done.stdout, done.stderr) == ("", "")


def test_importing_zerosim_loads_no_lesson_and_asking_for_the_puzzles_loads_them() -> None:
    assert not [name for name in modules_of("import zerosim") if name.startswith("zerosim.course")]
    found = modules_of("import zerosim as zs; zs.puzzles.list()")
    assert "zerosim.course.puzzles.catalogue" in found
    assert "zerosim.course.puzzles.spoilers" not in found


def test_the_puzzles_are_offered_by_name_and_what_there_is_not_is_said() -> None:
    offered = fresh("-c", "import zerosim as zs; print('puzzles' in dir(zs), zs.puzzles is zs.puzzles)").stdout
    assert offered == "True True\n"
    said = fresh("-c", "import zerosim as zs\ntry:\n    zs.puzzle\nexcept AttributeError as e: print(e)").stdout
    assert said == "module 'zerosim' has no attribute 'puzzle'\n"


def test_puzzles_are_asked_checked_and_shown_without_anything_heavy() -> None:
    asked = "import zerosim as zs; zs.puzzles.show('ring'); zs.puzzles.check('mean', lambda rank, x: x)"
    assert not loaded_by(asked) & {"rich", "typer", "matplotlib", "hypothesis", "IPython"}
