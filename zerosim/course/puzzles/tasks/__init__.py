"""The puzzles: of each a TOML file with its statement, a function with holes and hints, and the cases that judge it."""

from collections.abc import Mapping
from types import MappingProxyType

from zerosim.course.puzzles.puzzle import Puzzle, read_puzzle
from zerosim.course.puzzles.tasks import collectives, layered, steps

# In the order in which one does them.
PUZZLES: Mapping[str, Puzzle] = MappingProxyType({puzzle.name: puzzle for puzzle in (
    read_puzzle("mean", collectives.mean, dict.fromkeys((4, 1, 2, 3, 5, 8), (1,)), audit_length=0),
    read_puzzle("broadcast", collectives.broadcast),
    read_puzzle("ring", collectives.ring),
    read_puzzle("gather", collectives.gather),
    read_puzzle("all_reduce", collectives.all_reduce),
    read_puzzle("average", steps.average),
    read_puzzle("ddp", steps.ddp, audit_length=1 << 16),
    read_puzzle("zero1", steps.zero1),
    read_puzzle("zero2", layered.zero2),
    read_puzzle("zero3", layered.zero3),
    read_puzzle("overlap", layered.overlap),
    read_puzzle("lamb", steps.lamb),
    read_puzzle("overflow", steps.overflow, steps.OVERFLOW_SIZES),
    read_puzzle("repair", layered.repair),
    read_puzzle("find_batch", steps.average),  # bugs of the museum, judged as the puzzles are that they spoil
    read_puzzle("find_ring", collectives.gather),
    read_puzzle("find_skip", steps.overflow, steps.OVERFLOW_SIZES))})
