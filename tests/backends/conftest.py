"""``world``: every world of the suite in turn. What cannot be had here is skipped from one place, with its reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends import compiled_kernels, doubles
from tests.backends.worlds import DOUBLES, GPUS, HERE, JOBS, MPI, World, lacking_gpus
from zerosim.backends.cupy.kernels import CupyKernels

ALL = [world for world in (HERE, *MPI, *DOUBLES, *GPUS)
       if os.environ.get("ZEROSIM_TEST_WORLD", world.name) == world.name]  # gpu-check asks for one at a time
MISSING = {world: reason for world in ALL if (reason := world.missing()) is not None}
# A test that takes one of these runs in each of its worlds, or, where its module says which matter, in those.
WORLDS: dict[str, Callable[[World], Any]] = {
    "world": lambda world: True,
    "library": lambda world: world.library,    # which carries the messages
    "mpi": lambda world: world in MPI}
NOWHERE, NO_CASE = "nowhere", SimpleNamespace(params={})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each world that the test wants and that is there; NOWHERE, and so left out, where there is none."""
    matters, alone = getattr(metafunc.module, "matters", WORLDS["world"]), "partners" not in metafunc.fixturenames
    for name in WORLDS.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, [
            pytest.param(world, id=world.name, marks=[pytest.mark.gpu] * (world in GPUS))
            for world in ALL if world not in MISSING and WORLDS[name](world) and matters(world)
            and (alone or world.ranks > 1)] or [NOWHERE])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of a card, of CuPy or of a world, where there is none: ``lack`` says so in one line for all.
    """
    lacking = {"card": lacking_gpus(1), "cupy": importlib.util.find_spec("cupy") is None}
    there = [item for item in items if not any(lacking.get(name) for name in getattr(item, "fixturenames", ()))
             and NOWHERE not in map(getattr(item, "callspec", NO_CASE).params.get, WORLDS)]
    kept = set(there)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = there


@pytest.fixture
def partners() -> None:
    """Asked for by a test of what a rank that is alone cannot do: it runs where there are others."""


@pytest.fixture
def compiler() -> None:
    """What runs the kernels' text on the CPU."""
    if compiled_kernels.COMPILER is None:
        pytest.skip(compiled_kernels.MISSING)


@pytest.fixture
def stand_in(compiler: None) -> Iterator[CupyKernels]:
    """CuPy's kernels, their arithmetic on the CPU."""
    with doubles.installed(1):
        yield CupyKernels()


@pytest.fixture
def card() -> Iterator[CupyKernels]:
    """CuPy's kernels on the first GPU."""
    with np.errstate(all="ignore"):  # the tests' own arithmetic on chance bits
        yield CupyKernels()


@pytest.fixture
def cupy() -> Any:
    """The real CuPy; without a GPU it knows arrays, and compiles."""
    found = importlib.import_module("cupy")
    if not hasattr(found.cuda, "UnownedMemory"):
        pytest.skip("a double stands in the place of CuPy")
    return found


@pytest.fixture(params=["stand_in", *([] if lacking_gpus(1) else [pytest.param("card", marks=pytest.mark.gpu)])])
def kernels(request: pytest.FixtureRequest) -> CupyKernels:
    """Both, where there is a GPU."""
    found: CupyKernels = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def gpus(compiler: None) -> Iterator[Callable[[int], doubles.Doubles]]:
    """Makes doubles of so many GPUs."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(doubles.installed(count))


@pytest.fixture(scope="session", autouse=True)
def end_of_the_jobs() -> Iterator[None]:
    """Ends the processes when all tests are over."""
    yield
    for job in JOBS:
        job.end()


@pytest.fixture(params=[pytest.param(reason, marks=pytest.mark.gpu)
                        for reason in dict.fromkeys(MISSING.values())] or [None])
def lack(request: pytest.FixtureRequest) -> None:
    """Each reason for which some worlds are not here."""
    if request.param is not None:
        pytest.skip(request.param)
