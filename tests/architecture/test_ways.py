"""The ways of one collective and of one step through the package: as few files as a reader can follow."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import zerosim as zs
from zerosim.models import LinearUnit, Model

PACKAGE = Path(zs.__file__).parent


def passed(make: Callable[[zs.Rank], Callable[[], object]]) -> tuple[set[str], set[str]]:
    """The package's files and functions that run on rank 0 of 2 from a call until it returns, for the second time.

    What the first call alone does is not the way. ``make`` gives each rank what it calls.
    """
    files, functions = set(), set()

    def note(frame, event, argument) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))
            functions.add(f"{path.name}: {frame.f_code.co_qualname}")

    def program(rank: zs.Rank) -> None:
        call = make(rank)
        call()
        before = sys.getprofile()
        if rank.index == 0:
            sys.setprofile(note)
        call()
        if rank.index == 0:
            sys.setprofile(before)

    zs.Cluster(2).run(program)
    return files, functions


def test_a_reduce_scatter_passes_at_most_9_files_and_70_functions() -> None:
    x = np.arange(8, dtype=np.float32)
    files, functions = passed(lambda rank: lambda: rank.reduce_scatter(x))
    assert 5 < len(files) <= 9, sorted(files)
    assert len(functions) <= 70, sorted(functions)


def test_a_step_of_two_linear_layers_passes_at_most_25_files() -> None:
    model = Model([LinearUnit("a", 3, 5, first=True), LinearUnit("b", 5, 2)])
    batch = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)

    def make(rank: zs.Rank) -> Callable[[], object]:
        engine = zs.Engine(rank, model, zs.optim.Adam(), stage=2)
        return lambda: engine.step([batch])

    files, _ = passed(make)
    assert 15 < len(files) <= 25, sorted(files)
