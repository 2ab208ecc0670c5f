"""The puzzles in the order in which one does them."""

from zerosim.course.puzzles.puzzle import Puzzle
from zerosim.course.puzzles.tasks import (
    all_reduce,
    average,
    broadcast,
    ddp,
    gather,
    lamb,
    mean,
    overflow,
    overlap,
    repair,
    ring,
    zero1,
    zero2,
    zero3,
)
from zerosim.numerics.checks import did_you_mean

PUZZLES: dict[str, Puzzle] = {module.PUZZLE.name: module.PUZZLE for module in (
    mean, broadcast, ring, gather, all_reduce, average, ddp, zero1, zero2, zero3, overlap, lamb, overflow, repair)}


def puzzle_named(name: str) -> Puzzle:
    """The puzzle of this name; ValueError for a name that there is not."""
    if name in PUZZLES:
        return PUZZLES[name]
    raise ValueError(f"no puzzle is called {name!r}; there are {', '.join(PUZZLES)}"
                     f"{did_you_mean(name, PUZZLES)}")
