"""The cuts of vectors and units: who owns which elements.

Legend: N ranks, n elements of a vector. A cut is N+1 rising boundaries: chunk r, `cut[r]` to `cut[r+1]`, is
rank r's. The model is one flat vector of units, one after the other; a layout says how it is padded and who
owns what: `per_unit` pads every unit to a multiple of N, and rank r owns the r-th N-th of each; `contiguous`
pads only the end of the last unit, and rank r owns the r-th N-th of the whole vector.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zerosim.numerics.checks import checked_count, unknown_name
from zerosim.ranks import call

Cut = call.Cut

LAYOUTS = ("per_unit", "contiguous")


def ceil_cut(length: int, ranks: int) -> Cut:
    """Chunks of ceil(n/N) elements as far as they go; the last may be short or empty.

    >>> ceil_cut(5, 4)
    (0, 2, 4, 5, 5)

    Raises ValueError for fewer than one rank or a negative length.
    """
    return call.ceil_cut(checked_count("length", length, 0), checked_count("ranks", ranks, 1))


def clip(cut: Cut, low: int, high: int) -> Cut:
    """The part of a cut that lies in [low, high), counted from low: who owns what of that range.

    >>> clip((0, 2, 4), 1, 4)
    (0, 1, 3)
    """
    return tuple(min(max(boundary, low), high) - low for boundary in cut)


def padded_unit_lengths(unit_lengths: Sequence[int], ranks: int, layout: str = "per_unit") -> tuple[int, ...]:
    """Elements of each unit with its padding.

    >>> padded_unit_lengths((3, 2), 2, "per_unit"), padded_unit_lengths((3, 2), 2, "contiguous")
    ((4, 2), (3, 3))

    Raises ValueError for no units, negative lengths, fewer than one rank, an unknown layout.
    """
    ranks = checked_count("ranks", ranks, 1)
    lengths = checked_unit_lengths(unit_lengths)
    if checked_layout(layout) == "per_unit":
        return tuple(length + -length % ranks for length in lengths)
    return (*lengths[:-1], lengths[-1] + -sum(lengths) % ranks)


def unit_cuts(unit_lengths: Sequence[int], ranks: int, layout: str = "per_unit") -> list[Cut]:
    """For each unit, padding included, the cut of its elements among the ranks; counted from the unit's start.

    >>> unit_cuts((2, 2), 2, "per_unit"), unit_cuts((2, 2), 2, "contiguous")
    ([(0, 1, 2), (0, 1, 2)], [(0, 2, 2), (0, 0, 2)])

    Raises ValueError as `padded_unit_lengths` does.
    """
    padded = padded_unit_lengths(unit_lengths, ranks, layout)
    if layout == "per_unit":
        by_length = {length: ceil_cut(length, ranks) for length in set(padded)}  # most of a thousand units are equal
        return [by_length[length] for length in padded]
    whole = ceil_cut(sum(padded), ranks)
    return [clip(whole, low, high) for low, high in pairwise(accumulate(padded, initial=0))]


def checked_unit_lengths(unit_lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths as Python ints; raises ValueError for none, or for one that is negative or no int."""
    lengths = tuple(checked_count(f"unit_lengths[{i}]", length, 0) for i, length in enumerate(unit_lengths))
    if not lengths:
        raise ValueError("unit_lengths is empty; a model has at least one unit, e.g. unit_lengths=(1000,)")
    return lengths


def checked_layout(layout: str) -> str:
    """The layout's name; raises ValueError for an unknown one, and names those that exist."""
    if layout in LAYOUTS:
        return layout
    raise unknown_name(f"no layout is called {layout!r}", layout, LAYOUTS, "the layouts are")
