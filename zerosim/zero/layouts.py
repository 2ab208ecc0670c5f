"""The named layouts: where each begins a new region, pads, and cuts.

Legend: N ranks; offsets and lengths count elements.
"""


from zerosim.models.units import Model
from zerosim.numerics.checks import is_count
from zerosim.numerics.names import did_you_mean
from zerosim.zero.layout import Entry, Layout, Region, UnitShapes


def padded(length: int, ranks: int) -> int:
    """The next multiple of N."""
    return -(-length // ranks) * ranks


def region(name: str, low: int, valid: int, ranks: int) -> Region:
    """``valid`` elements from ``low`` on, padded to a multiple of N and cut in N equal chunks."""
    chunk = padded(valid, ranks) // ranks
    return Region(name, low, low + chunk * ranks, low + valid, tuple(low + i * chunk for i in range(ranks + 1)))


def per_unit(shapes: UnitShapes, ranks: int) -> Layout:
    """Every unit is padded to a multiple of N, and each rank owns 1/N of it."""
    entries: list[Entry] = []
    regions, units, low = [], {}, 0
    for unit, parameters in shapes.items():
        at = low
        for name, shape in parameters.items():
            entries.append(Entry(name, unit, at, tuple(shape)))
            at = entries[-1].high
        regions.append(region(unit, low, at - low, ranks))
        units[unit] = slice(low, regions[-1].high)
        low = regions[-1].high
    return Layout("per_unit", ranks, tuple(entries), units, tuple(regions))


def contiguous(shapes: UnitShapes, ranks: int) -> Layout:
    """The whole vector is padded to a multiple of N (in its last unit), and each rank owns one slice of it."""
    entries: list[Entry] = []
    units, at = {}, 0
    for unit, parameters in shapes.items():
        low = at
        for name, shape in parameters.items():
            entries.append(Entry(name, unit, at, tuple(shape)))
            at = entries[-1].high
        units[unit] = slice(low, at)
    whole = region("all", 0, at, ranks)
    last = next(reversed(units))
    units[last] = slice(units[last].start, whole.high)
    return Layout("contiguous", ranks, tuple(entries), units, (whole,))


def whole_matrices(shapes: UnitShapes, ranks: int) -> Layout:
    """Slices of the whole vector that begin and end on borders of parameters: no rank owns part of a matrix.

    Nothing is padded, and the shards differ by up to the largest parameter: each border is the parameter's nearest to
    an equal share. Where there are more ranks than parameters, some own nothing.
    """
    flat = contiguous(shapes, 1)
    borders = sorted({0, *(entry.high for entry in flat.entries)})
    length = borders[-1]
    bounds = [min(borders, key=lambda border: (abs(border * ranks - rank * length), border)) for rank in range(ranks)]
    whole = Region("all", 0, length, length, (*bounds, length))
    return Layout("whole_matrices", ranks, flat.entries, flat.units, (whole,))


LAYOUTS = {"per_unit": per_unit, "contiguous": contiguous, "whole_matrices": whole_matrices}


def lay_out(name: str, shapes: UnitShapes, ranks: int) -> Layout:
    """The named layout of these units' parameters on N ranks.

    Raises ValueError for an unknown name, for no units, and for fewer than one rank.
    """
    if str(name) not in LAYOUTS:
        raise ValueError(f"no layout is called {name!r}; choose one of {', '.join(LAYOUTS)}"
                         f"{did_you_mean(name, LAYOUTS)}")
    if not is_count(ranks) or ranks < 1 or not shapes:
        raise ValueError(f"a layout needs at least one unit and one rank, found {len(shapes)} units and {ranks!r} "
                         "ranks")
    return LAYOUTS[name](shapes, ranks)


def layout_of(model: Model, ranks: int, name: str = "per_unit") -> Layout:
    """How the engine lays out a model on N ranks when it is asked for no groups; ``name`` is one of LAYOUTS.

    Raises ValueError as `lay_out` does.
    """
    return lay_out(name, {unit.name: unit.shapes for unit in model.units}, ranks)
