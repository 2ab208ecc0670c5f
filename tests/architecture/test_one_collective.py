"""The way of one collective through the package: as few files as a reader can follow."""

import sys
from pathlib import Path

import numpy as np

import zerosim as zs

PACKAGE = Path(zs.__file__).parent
FILES, FUNCTIONS = 9, 70


def passed_by_a_reduce_scatter() -> set[tuple[str, str]]:
    """(file, function) of the package that run from rank 0's call of it until rank 0 has its result."""
    passed = set()

    def note(frame, event, argument) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            passed.add((str(path.relative_to(PACKAGE)), frame.f_code.co_qualname))

    def program(rank: zs.Rank) -> None:
        x = np.arange(8, dtype=np.float32)
        rank.reduce_scatter(x)  # what the first call alone does is not the way
        before = sys.getprofile()
        if rank.index == 0:
            sys.setprofile(note)
        rank.reduce_scatter(x)
        if rank.index == 0:
            sys.setprofile(before)

    zs.Cluster(2).run(program)
    return passed


def test_a_reduce_scatter_of_one_of_two_ranks_passes_few_files_and_functions() -> None:
    passed = passed_by_a_reduce_scatter()
    assert len({file for file, _ in passed}) <= FILES, sorted(passed)
    assert len(passed) <= FUNCTIONS, sorted(passed)
