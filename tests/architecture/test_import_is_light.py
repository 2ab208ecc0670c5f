"""`import zerosim` brings NumPy and ml_dtypes, and nothing else that was not there before."""

import pytest

from tests.architecture import imports
from tests.architecture.source import package_sources
from tests.support import fresh

# Imported inside functions alone, so that all of it can be read and imported where there is none;
# Matplotlib also at the top of what draws, which nothing imports before somebody looks.
HEAVY = {"cupy": (), "mpi4py": (), "matplotlib": ("zerosim/display/", "zerosim/course/")}


def modules_of(statement: str) -> set[str]:
    """The package's modules that a fresh interpreter has after one statement."""
    program = f"import sys; {statement}; print(*(name for name in sys.modules if name.startswith('zerosim')))"
    return set(fresh("-c", program).split())


def loaded_by(statement: str) -> set[str]:
    """Top-level modules outside the standard library that a fresh interpreter has after one statement."""
    program = (f"import sys; {statement}; tops = {{name.partition('.')[0] for name in sys.modules}}; "
               "print(*sorted(tops - set(sys.stdlib_module_names)))")
    return set(fresh("-c", program).split())


def test_importing_zerosim_loads_numpy_and_ml_dtypes_only() -> None:
    assert loaded_by("import zerosim") - loaded_by("import numpy, ml_dtypes") == {"zerosim"}


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"rich", "zerosim"} <= loaded_by("import zerosim, rich")


@pytest.mark.parametrize("heavy", HEAVY)
def test_what_is_heavy_is_imported_inside_functions_alone(heavy: str) -> None:
    assert [source.at(node, f"imports {name}") for source in package_sources()
            for node, name in imports.imported_modules(source, source.run_at_import)
            if name.partition(".")[0] == heavy and node.col_offset == 0
            and not source.path.startswith(HEAVY[heavy] or ("-",))] == []


def test_importing_zerosim_is_silent_and_loads_no_floor() -> None:
    assert fresh("-c", "import zerosim") == ""
    assert modules_of("import zerosim") == {"zerosim", "zerosim.backends", "zerosim.connect"}


def test_every_public_name_is_loaded_when_it_is_asked_for_and_kept() -> None:
    names = "import zerosim; from zerosim import *; print(*(n for n in zerosim.__all__ if globals()[n] is not "
    assert fresh("-c", f"{names}zerosim.__dict__[n]))") == "\n"
    assert fresh("-c", "import zerosim; import zerosim.connect; print(zerosim.connect.__name__)") == "connect\n"


def test_public_names_may_be_asked_for_first_in_many_threads_at_once() -> None:
    assert fresh("-c", """if True:
        import threading, zerosim
        from concurrent.futures import ThreadPoolExecutor
        begin = threading.Barrier(8)
        def ask(number):
            begin.wait()
            return [getattr(zerosim, name) for name in zerosim.__all__[::1 - number % 2 * 2]]
        with ThreadPoolExecutor(8) as threads:
            print(*{len(found) == len(zerosim.__all__) for found in threads.map(ask, range(8))})""") == "True\n"


def test_every_package_has_the_names_that_it_offers() -> None:
    packages = [source.path.removesuffix("/__init__.py").replace("/", ".") for source in package_sources()
                if source.path.endswith("/__init__.py")]
    assert len(packages) > 8
    assert fresh("-c", "; ".join(f"from {name} import *" for name in packages)) == ""


def test_training_and_planning_load_no_backend_no_display_and_no_lesson() -> None:
    above = ("zerosim.backends.", "zerosim.display", "zerosim.course", "zerosim.cli")
    asked = "import zerosim as zs; zs.Engine, zs.Cluster, zs.optim.Adam, zs.models.GPT, zs.plan"
    assert [name for name in modules_of(asked) if name.startswith(above)] == []


def test_asking_for_the_puzzles_loads_them_and_not_their_solutions() -> None:
    found = modules_of("import zerosim as zs; zs.puzzles.list()")
    assert "zerosim.course.puzzles" in found
    assert "zerosim.course.puzzles.solutions" not in found


def test_the_puzzles_are_offered_by_name_and_what_there_is_not_is_said() -> None:
    assert fresh("-c", "import zerosim as zs; print('puzzles' in dir(zs), zs.puzzles is zs.puzzles)") == "True True\n"
    said = fresh("-c", "import zerosim as zs\ntry:\n    zs.puzzle\nexcept AttributeError as e: print(e)")
    assert said == "module 'zerosim' has no attribute 'puzzle'\n"


def test_puzzles_are_asked_checked_and_shown_without_anything_heavy() -> None:
    asked = "import zerosim as zs; zs.puzzles.show('ring'); zs.puzzles.check('mean', lambda rank, x: x)"
    assert not loaded_by(asked) & {"rich", "typer", "matplotlib", "hypothesis", "IPython"}
