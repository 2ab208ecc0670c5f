"""The targets of the puzzles: bytes and steps with pencil and paper, from the closed forms.

Legend: N ranks, n elements, cut by ⌈n/N⌉.
"""

from typing import NamedTuple

from zerosim.planning.collectives import sent
from zerosim.planning.cuts import ceil_cut


class Wire(NamedTuple):
    """What a collective sends: the bytes of the rank that sends most, of all ranks together, and the steps."""

    most_nbytes: int
    all_nbytes: int
    steps: int


def ring(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A ring's: "reduce_scatter", "all_gather" or "all_reduce" of n elements."""
    return _wire(collective, "ring", length, ranks, itemsize)


def tree(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A binomial tree's: "broadcast" or "reduce" of n elements, with root 0."""
    return _wire(collective, "tree", length, ranks, itemsize)


def _wire(collective: str, algorithm: str, length: int, ranks: int, itemsize: int) -> Wire:
    found = sent(collective, algorithm, ceil_cut(length, ranks), itemsize)
    return Wire(max(found.nbytes), sum(found.nbytes), found.steps)


def in_sequence(*wires: Wire) -> Wire:
    """Several collectives, one after another; the most is that of a rank that sends most in each."""
    return Wire(sum(wire.most_nbytes for wire in wires), sum(wire.all_nbytes for wire in wires),
                sum(wire.steps for wire in wires))
