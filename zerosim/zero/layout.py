"""Layouts: how the parameters of a model lie in one flat vector, which rank owns which elements, and its buckets.

Legend: N ranks; offsets and lengths count elements; a range [low, high) is written ``slice(low, high)``.
A *region* is a stretch of the vector that is cut once among all ranks: one unit in ``per_unit``, everything in
``contiguous``. A *shard* is what one rank owns, its chunks of all regions one after the other. A *bucket* is several
stretches of the vector, or a part of one, that move in one collective.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.arrays import Integers
from zerosim.numerics.checks import is_count, unknown_name
from zerosim.ranks.call import Cut, tensor_cut
from zerosim.shown import Shown

UnitShapes = Mapping[str, Mapping[str, tuple[int, ...]]]  # unit -> parameter -> shape


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One parameter in the vector."""

    name: str
    unit: str
    low: int
    shape: tuple[int, ...]
    high: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "high", self.low + math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Region:
    """[low, high) cut at ``bounds`` (N+1 absolute boundaries); from ``valid_high`` on it is padding.

    ``name`` is the unit's, or "all".
    """

    name: str
    low: int
    high: int
    valid_high: int
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive valid elements of one owner: where they lie in the vector, and where in the owner's shard."""

    vector: slice
    shard: slice

    @property
    def count(self) -> int:
        """Its elements."""
        return int(self.vector.stop - self.vector.start)


@dataclass(frozen=True, slots=True)
class ParameterPiece(Piece):
    """A piece of one parameter: its elements from ``start`` on."""

    entry: LayoutEntry
    start: int


@dataclass(frozen=True, repr=False)
class Layout(Shown):
    """The cut of a model's flat vector among N ranks: every element has exactly one owner."""

    name: str
    ranks: int
    entries: tuple[LayoutEntry, ...]
    units: Mapping[str, slice]
    regions: tuple[Region, ...]
    # What has been asked for, of ranks and of stretches: the same, step after step.
    _pieces: dict[int, list[ParameterPiece]] = field(default_factory=dict, init=False, compare=False)
    _buckets: "dict[tuple[tuple[int, int], ...], Bucket]" = field(default_factory=dict, init=False, compare=False)

    @property
    def length(self) -> int:
        """Elements of the vector, padding included."""
        return self.regions[-1].high if self.regions else 0

    @property
    def valid_length(self) -> int:
        """Elements that are parameters."""
        return sum(entry.high - entry.low for entry in self.entries)

    @cached_property
    def by_name(self) -> dict[str, LayoutEntry]:
        """The entries by their parameter's name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def by_unit(self) -> dict[str, list[LayoutEntry]]:
        """The entries of each unit, in order."""
        found: dict[str, list[LayoutEntry]] = {unit: [] for unit in self.units}
        for entry in self.entries:
            found[entry.unit].append(entry)
        return found

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, slice, tuple[int, ...]]]]:
        """By unit, of each parameter its name, its place in the unit's vector, and its shape."""
        starts = {unit: span.start for unit, span in self.units.items()}
        return {unit: [(one.name, slice(one.low - starts[unit], one.high - starts[unit]), one.shape) for one in entries]
                for unit, entries in self.by_unit.items()}

    def unit_views(self, unit: str, whole: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters of one unit by name, as views of its padded vector (u,)."""
        return {name: whole[place].reshape(shape) for name, place, shape in self._places[unit]}

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters by name, as views of the flat vector (n,). Raises ValueError for another shape."""
        self._check_whole(vector)
        return {name: view for unit, span in self.units.items()
                for name, view in self.unit_views(unit, vector[span]).items()}

    def flattened(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The flat vector (n,), fp32, of values by parameter's name, each in its own shape; padding is 0.

        Raises ValueError where a parameter is missing, or there is another, and for values of another shape.
        """
        if values.keys() != self.by_name.keys():
            wrong = sorted(values.keys() ^ self.by_name.keys())
            raise ValueError(f"values of {len(self.by_name)} parameters are asked for, by name, and nothing else; "
                             f"missing or not of this layout: {', '.join(wrong[:5])}")
        vector = np.zeros(self.length, np.float32)
        for name, view in self.views(vector).items():
            if np.shape(values[name]) != view.shape:
                raise ValueError(f"{name} has the shape {view.shape}, found values of shape {np.shape(values[name])}; "
                                 "nothing is broadcast")
            view[...] = values[name]
        return vector

    def shard(self, rank: int, vector: np.ndarray) -> np.ndarray:
        """The rank's shard of the flat vector (n,): a copy (s,), its chunks of all regions one after the other.

        Raises ValueError for a rank that there is not, and for a vector of another shape.
        """
        if not is_count(rank) or not 0 <= rank < self.ranks:
            raise ValueError(f"this layout has the ranks 0 to {self.ranks - 1}, found {rank!r}")
        self._check_whole(vector)
        return np.concatenate([vector[region.bounds[rank]:region.bounds[rank + 1]] for region in self.regions])

    def _check_whole(self, vector: np.ndarray) -> None:
        if np.shape(vector) != (self.length,):
            raise ValueError(f"the layout's vector has {self.length} elements, padding included, found shape "
                             f"{np.shape(vector)}; layout.flattened(values) makes one")

    def cut(self, low: int, high: int) -> Cut:
        """The owners' boundaries inside [low, high), counted from ``low``: N+1 of them.

        Raises ValueError for a range that is not inside one region, whose owners do not follow each other once.
        """
        return self.bucket(slice(low, high)).cut

    def owned(self, rank: int, low: int, high: int) -> slice:
        """The place of the rank's part of [low, high), a range inside one region, in its shard."""
        region, start = self.region_of(low, high), 0
        for earlier in self.regions[:self.regions.index(region)]:
            start += earlier.bounds[rank + 1] - earlier.bounds[rank]
        first, last = region.bounds[rank], region.bounds[rank + 1]
        return slice(start + min(max(low, first), last) - first, start + min(max(high, first), last) - first)

    def shard_length(self, rank: int) -> int:
        """Elements that the rank owns, padding included."""
        return sum(region.bounds[rank + 1] - region.bounds[rank] for region in self.regions)

    def valid(self, rank: int) -> list[Piece]:
        """The rank's elements without padding, region by region; every scan of a shard goes through here."""
        pieces, start = [], 0
        for region in self.regions:
            low, high = region.bounds[rank], region.bounds[rank + 1]
            valid_high = max(low, min(high, region.valid_high))
            pieces.append(Piece(slice(low, valid_high), slice(start, start + valid_high - low)))
            start += high - low
        return pieces

    def valid_regions(self) -> list[Piece]:
        """The whole vector without padding, region by region: as `valid`, for who holds all of it as one shard."""
        return [Piece(here, here) for here in (slice(region.low, region.valid_high) for region in self.regions)]

    def parameter_pieces(self, rank: int) -> list[ParameterPiece]:
        """The rank's elements, parameter by parameter in the order of the vector; empty pieces are left out."""
        if rank not in self._pieces:
            self._pieces[rank] = self.by_parameter(self.valid(rank))
        return self._pieces[rank]

    def by_parameter(self, pieces: Iterable[Piece]) -> list[ParameterPiece]:
        """These pieces cut at the borders of parameters; empty ones are left out."""
        return [ParameterPiece(slice(low, high), slice(at, at + high - low), entry, low - entry.low)
                for piece in pieces
                for entry, low, high in self.entries_in(piece.vector.start, piece.vector.stop)
                for at in [piece.shard.start + low - piece.vector.start]]

    def entries_in(self, low: int, high: int) -> Iterator[tuple[LayoutEntry, int, int]]:
        """The parameters that overlap [low, high), each with the overlap."""
        first = max(0, bisect_right(self._lows, low) - 1)
        for entry in self.entries[first:]:
            if entry.low >= high:
                return
            start, stop = max(low, entry.low), min(high, entry.high)
            if start < stop:
                yield entry, start, stop

    def bucket(self, *ranges: slice) -> "Bucket":
        """The bucket of these stretches."""
        key = tuple([(span.start, span.stop) for span in ranges])
        if key not in self._buckets:
            self._buckets[key] = Bucket(self, ranges)
        return self._buckets[key]

    @cached_property
    def _lows(self) -> list[int]:
        return [entry.low for entry in self.entries]

    def padding(self, low: int, high: int) -> slice:
        """The padding inside [low, high), a range that ends with its region or before its padding."""
        valid_high = self.region_of(low, high).valid_high
        return slice(min(max(valid_high, low), high), high)

    def region_of(self, low: int, high: int) -> Region:
        """The region that the range is inside; ValueError where it crosses regions."""
        for region in self.regions:
            if region.low <= low <= high <= region.high:
                return region
        raise ValueError(
            f"the range [{low}, {high}) crosses regions of the {self.name} layout, inside which alone owners "
            f"follow each other once; the regions are {[(r.low, r.high) for r in self.regions]}"
        )

    def __repr__(self) -> str:
        return f"<Layout {self.name}: {self.valid_length:,} parameters on {self.ranks} ranks>"

    def __str__(self) -> str:
        """One line per owner."""
        lines = [f"  rank {rank}: {self.owned_text(rank)}" for rank in range(self.ranks)]
        return "\n".join([f"{self.name}: {self.valid_length} parameters, {self.length - self.valid_length} padding, "
                          f"{self.ranks} ranks", *lines])

    def owned_text(self, rank: int) -> str:
        """``name[a:b]`` of every parameter of which the rank owns a part, and its padding; or "nothing"."""
        parts = []
        for region in self.regions:
            low, high = region.bounds[rank], region.bounds[rank + 1]
            inside = list(self.entries_in(low, high))
            parts += [f"{entry.name}[{start - entry.low}:{stop - entry.low}]" for entry, start, stop in inside]
            valid = sum(stop - start for _, start, stop in inside)
            parts += [f"{high - low - valid} padding"] * (high - low > valid)
        return ", ".join(parts) or "nothing"


# -- the named layouts: where each begins a new region, pads, and cuts ------------------------------------------------


def region(name: str, low: int, valid: int, ranks: int) -> Region:
    """``valid`` elements from ``low`` on, padded to a multiple of N and cut in N equal chunks."""
    chunk = -(-valid // ranks)
    return Region(name, low, low + chunk * ranks, low + valid, tuple(low + i * chunk for i in range(ranks + 1)))


def per_unit(shapes: UnitShapes, ranks: int) -> Layout:
    """Every unit is padded to a multiple of N, and each rank owns 1/N of it."""
    entries: list[LayoutEntry] = []
    regions, units, low = [], {}, 0
    for unit, parameters in shapes.items():
        at = low
        for name, shape in parameters.items():
            entries.append(LayoutEntry(name, unit, at, tuple(shape)))
            at = entries[-1].high
        regions.append(region(unit, low, at - low, ranks))
        units[unit] = slice(low, regions[-1].high)
        low = regions[-1].high
    return Layout("per_unit", ranks, tuple(entries), units, tuple(regions))


def contiguous(shapes: UnitShapes, ranks: int) -> Layout:
    """The whole vector is padded to a multiple of N (in its last unit), and each rank owns one slice of it."""
    flat = per_unit(shapes, 1)  # of one rank: nothing is padded
    whole, last = region("all", 0, flat.length, ranks), list(shapes)[-1]
    units = {**flat.units, last: slice(flat.units[last].start, whole.high)}
    return Layout("contiguous", ranks, flat.entries, units, (whole,))


def whole_matrices(shapes: UnitShapes, ranks: int) -> Layout:
    """Slices of the whole vector that begin and end on borders of parameters: no rank owns part of a matrix.

    Nothing is padded, and the shards differ by up to the largest parameter: each border is the parameter's nearest to
    an equal share. Where there are more ranks than parameters, some own nothing.
    """
    flat = per_unit(shapes, 1)
    cut = tensor_cut((entry.high - entry.low for entry in flat.entries), ranks)
    whole = Region("all", 0, flat.length, flat.length, cut)
    return Layout("whole_matrices", ranks, flat.entries, flat.units, (whole,))


LAYOUTS = {"per_unit": per_unit, "contiguous": contiguous, "whole_matrices": whole_matrices}


def lay_out(name: str, shapes: UnitShapes, ranks: int) -> Layout:
    """The named layout of these units' parameters on N ranks.

    Raises ValueError for an unknown name, for no units, and for fewer than one rank.
    """
    if str(name) not in LAYOUTS:
        raise unknown_name(f"no layout is called {name!r}", name, LAYOUTS)
    if not is_count(ranks) or ranks < 1 or not shapes:
        raise ValueError(f"a layout needs at least one unit and one rank, found {len(shapes)} units and {ranks!r} "
                         "ranks")
    return _laid_out(str(name), tuple((unit, tuple((its, tuple(shape)) for its, shape in parameters.items()))
                                      for unit, parameters in shapes.items()), ranks)


@lru_cache(maxsize=16)  # the ranks of one process share it: N boundaries of each cut, and not N² in all
def _laid_out(name: str, shapes: tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...],
              ranks: int) -> Layout:
    return LAYOUTS[name]({unit: dict(parameters) for unit, parameters in shapes}, ranks)


def layout_of(model: Model, ranks: int, name: str = "per_unit") -> Layout:
    """The layout of a model on N ranks, as the engine makes it without groups; ``name`` is one of LAYOUTS.

    Raises ValueError as `lay_out` does.
    """
    return lay_out(name, {unit.name: unit.shapes for unit in model.units}, ranks)


# -- buckets ----------------------------------------------------------------------------------------------------------

Parts = list[tuple[slice, np.ndarray]]  # where in a bucket's vector, or in one rank's chunk of it; and the elements


@dataclass(frozen=True)
class Bucket:
    """Stretches of the vector, each inside one region of the layout, in rising order.

    Its own vector is packed owner by owner: first what rank 0 owns of every stretch, then what rank 1 owns. So every
    element keeps its owner, and with it the order of its additions and the bytes that it costs, whatever the bucket.
    """

    layout: Layout
    ranges: tuple[slice, ...]
    _owned: dict[int, list[slice]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by rank

    @property
    def region_name(self) -> str:
        """The name of the region in which it begins."""
        low = self.ranges[0].start
        return next(one.name for one in self.layout.regions if one.low <= low < one.high or one.low == low)

    @property
    def length(self) -> int:
        """Elements of all stretches together."""
        return self.cut[-1]

    @property
    def is_packed(self) -> bool:
        """False for a single stretch, whose vector is the stretch itself."""
        return len(self.ranges) > 1

    @cached_property
    def cuts(self) -> list[Cut]:
        """The owners' boundaries inside each stretch."""
        return [self.layout.cut(span.start, span.stop) for span in self.ranges]

    @cached_property
    def cut(self) -> Cut:
        """The owners' boundaries inside the packed vector: N+1 of them."""
        if not self.is_packed:
            low, high = self.ranges[0].start, self.ranges[0].stop
            return Integers(min(max(at, low), high) - low for at in self.layout.region_of(low, high).bounds)
        counts = (sum(cut[c + 1] - cut[c] for cut in self.cuts) for c in range(self.layout.ranks))
        return Integers((0, *accumulate(counts)))

    def in_stretches(self, stretches: Sequence[np.ndarray]) -> Parts:
        """The parts of the bucket's vector in one array for each stretch; empty ones are left out of a packed one."""
        if not self.is_packed:
            return [(slice(0, self.length), stretches[0])]
        return _joined(stretch[cut[owner]:cut[owner + 1]] for owner in range(self.layout.ranks)
                       for stretch, cut in zip(stretches, self.cuts, strict=True))

    def in_vector(self, vector: np.ndarray) -> Parts:
        """The parts of the bucket's vector in the layout's vector (n,)."""
        return self.in_stretches([vector[span] for span in self.ranges])

    def own_in_vector(self, rank: int, vector: np.ndarray) -> Parts:
        """The parts of the rank's chunk in the layout's vector (n,)."""
        return _joined(vector[span.start + cut[rank]:span.start + cut[rank + 1]]
                       for span, cut in zip(self.ranges, self.cuts, strict=True))

    def own_in_shard(self, rank: int, shard: np.ndarray) -> Parts:
        """The parts of the rank's chunk in its shard (s,)."""
        if rank not in self._owned:
            self._owned[rank] = [self.layout.owned(rank, span.start, span.stop) for span in self.ranges]
        own = [shard[span] for span in self._owned[rank]]
        return _joined(own) if self.is_packed else [(slice(0, len(own[0])), own[0])]


def _joined(pieces: Iterable[np.ndarray]) -> Parts:
    """Pieces one after the other, without the empty ones."""
    parts, at = [], 0
    for piece in pieces:
        if len(piece):
            parts.append((slice(at, at + len(piece)), piece))
        at += len(piece)
    return parts


def buckets(layout: Layout, ranges: Iterable[slice], limit: int | None) -> list[Bucket]:
    """The stretches in buckets of at most ``limit`` elements, cut where one does not fit; None: a bucket for each."""
    if limit is None:
        return [layout.bucket(span) for span in ranges]
    found: list[Bucket] = []
    open_: list[slice] = []
    room = limit
    for span in ranges:
        low = span.start
        while low < span.stop:
            high = min(span.stop, low + room)
            open_.append(slice(low, high))
            low, room = high, room - (high - low)
            if room == 0:
                found.append(layout.bucket(*open_))
                open_, room = [], limit
    return found + ([layout.bucket(*open_)] if open_ else [])
