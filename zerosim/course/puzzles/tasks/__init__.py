"""The puzzles: of each a TOML file with its statement, a function with holes and hints, and the cases that judge it."""

from collections.abc import Mapping
from types import MappingProxyType

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

# In the order in which one does them.
PUZZLES: Mapping[str, Puzzle] = MappingProxyType({module.PUZZLE.name: module.PUZZLE for module in (
    mean, broadcast, ring, gather, all_reduce, average, ddp, zero1, zero2, zero3, overlap, lamb, overflow, repair)})
