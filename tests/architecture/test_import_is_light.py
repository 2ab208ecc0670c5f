"""`import zerosim` brings NumPy and ml_dtypes, and nothing else that was not there before."""

import py_compile
import sys
from functools import cache
from pathlib import Path

import pytest

import zerosim as zs
from tests.architecture import imports
from tests.architecture.source import package_sources
from tests.support import fresh

# Imported inside functions alone, so that all of it can be read and imported where there is none;
# Matplotlib also at the top of what draws, which nothing imports before somebody looks.
HEAVY = {"cupy": (), "mpi4py": (), "matplotlib": ("zerosim/display/", "zerosim/course/")}


def loaded_by(*statements: str) -> list[set[str]]:
    """The package's modules, and others' top-level ones, that a fresh interpreter has after each of the statements."""
    lines = fresh("-c", "import sys\n" + "".join(f"{each}; print(*sys.modules)\n" for each in statements)).splitlines()
    return [{name if name.startswith("zerosim") else name.partition(".")[0] for name in line.split()} for line in lines]


@cache
def loaded_in_use() -> list[set[str]]:
    """What training and planning load, and then puzzles."""
    return loaded_by("import zerosim as zs; zs.Engine, zs.Cluster, zs.optim.Adam, zs.models.GPT, zs.plan",
                     "assert 'puzzles' in dir(zs); zs.puzzles.show('ring'); zs.puzzles.check('mean', lambda _, x: x)")


def test_importing_zerosim_loads_numpy_ml_dtypes_and_no_floor() -> None:
    without, found = loaded_by("import numpy, ml_dtypes", "import zerosim")
    added = found - without - sys.stdlib_module_names
    assert added == {"zerosim", "zerosim.backends", "zerosim.connect", "zerosim.face"}


def test_what_is_heavy_is_imported_inside_functions_alone() -> None:
    assert [source.at(node, f"imports {name}") for source in package_sources()
            for node, name in imports.imported_modules(source, source.run_at_import)
            if (heavy := name.partition(".")[0]) in HEAVY and node.col_offset == 0
            and not source.path.startswith(HEAVY[heavy])] == []


def test_every_public_name_is_loaded_when_it_is_asked_for_and_kept_and_every_package_has_those_that_it_offers() -> None:
    packages = [source.path.removesuffix("/__init__.py").replace("/", ".") for source in package_sources()
                if source.path.endswith("/__init__.py")]
    assert len(packages) > 8
    names = "import zerosim; from zerosim import *; print(*(n for n in zerosim.__all__ if globals()[n] is not "
    shown = "[n for n in dir(zerosim) if n[:2] != '__'] == zerosim.__all__"
    offered = "; ".join(f"from {name} import *" for name in packages)
    assert fresh("-c", f"{names}zerosim.__dict__[n]), {shown}); {offered}; Engine, connect, SGD, hardware; "
                       "print('face' in globals())") == "True\nFalse\n"


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


def test_a_thread_may_ask_for_a_name_while_another_imports_its_module() -> None:
    assert fresh("-c", """if True:
        import faulthandler, sys, threading, zerosim
        faulthandler.dump_traceback_later(600, exit=True)
        face, asked = sys.modules["zerosim.face"], threading.Event()
        load, other = face.import_module, threading.Thread(target=lambda: zerosim.plan, daemon=True)
        def import_module(name):
            if name == "zerosim.planning.plan":
                asked.set()
            return load(name)
        face.import_module = import_module
        class Finder:
            def find_spec(name, *_):  # Python's lock of the module is held
                if name == "zerosim.planning.plan":
                    other.start(), asked.wait()
        sys.meta_path.insert(0, Finder)
        import zerosim.planning.plan
        print("imported")""") == "imported\n"


def test_a_face_needs_no_source(tmp_path: Path) -> None:
    source = tmp_path / "__init__.py"
    source.write_text("from typing import TYPE_CHECKING\nfrom zerosim.face import face\nif TYPE_CHECKING:\n"
                      "    from zerosim.numerics.units import counted\n__getattr__, _ = face(__name__)\n")
    py_compile.compile(str(source), str(tmp_path / "compiled" / "__init__.pyc"))
    source.unlink()
    asked = f"import sys; sys.path.append({str(tmp_path)!r}); import compiled; print(compiled.counted(2, 'rank'))"
    assert fresh("-c", asked) == "2 ranks\n"


def test_a_package_has_its_own_modules_when_they_are_asked_for() -> None:
    """But for the one whose name is that of a function."""
    asked = ("import zerosim as zs; import zerosim.connect; print(zs.connect.__name__, zs.models.layers.__name__, "
             "zs.planning.plan.__name__, hasattr(zs.zero, 'a.b'))")
    assert fresh("-c", asked) == "connect zerosim.models.layers zerosim.planning.plan False\n"


def test_training_and_planning_load_no_backend_no_display_and_no_lesson() -> None:
    above = ("zerosim.backends.", "zerosim.display", "zerosim.course", "zerosim.cli")
    assert [name for name in loaded_in_use()[0] if name.startswith(above)] == []


def test_puzzles_are_asked_checked_and_shown_without_anything_heavy_and_without_their_solutions() -> None:
    loaded = loaded_in_use()[1]
    assert "zerosim.course.puzzles" in loaded
    assert not loaded & {"rich", "typer", "matplotlib", "hypothesis", "IPython", "zerosim.course.puzzles.solutions"}


def test_a_name_that_there_is_not_is_said() -> None:
    with pytest.raises(AttributeError, match=r"^module 'zerosim' has no attribute 'puzzle'$"):
        zs.puzzle  # noqa: B018
