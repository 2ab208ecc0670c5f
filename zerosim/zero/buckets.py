"""Buckets: several stretches of the vector, or a part of one, that move in one collective.

Legend: N ranks; offsets and lengths count elements. A bucket's vector is packed owner by owner: first what rank 0 owns
of every stretch, then what rank 1 owns. So every element keeps its owner, and with it the order of its additions and
the bytes that it costs, whatever the bucket.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zerosim.ranks.cuts import Cut
from zerosim.zero.layout import Layout


@dataclass(frozen=True)
class Bucket:
    """Stretches of the vector, each inside one region of the layout, in rising order."""

    layout: Layout
    ranges: tuple[slice, ...]

    @property
    def length(self) -> int:
        """Elements of all stretches together."""
        return self.cut[-1]

    @cached_property
    def cuts(self) -> list[Cut]:
        """The owners' boundaries inside each stretch."""
        return [self.layout.cut(lies.start, lies.stop) for lies in self.ranges]

    @cached_property
    def cut(self) -> Cut:
        """The owners' boundaries inside the packed vector: N+1 of them."""
        if not self.is_packed:
            return self.cuts[0]
        counts = (sum(cut[c + 1] - cut[c] for cut in self.cuts) for c in range(self.layout.ranks))
        return (0, *accumulate(counts))

    @property
    def is_packed(self) -> bool:
        """False for a single stretch, whose vector is the stretch as it lies."""
        return len(self.ranges) > 1

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """(where in the packed vector, where in the whole one), owner by owner, empty ones left out."""
        at = 0
        for owner in range(self.layout.ranks):
            for low, high in self._owned_by(owner):
                yield slice(at, at + high - low), slice(low, high)
                at += high - low

    def own_parts(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """(where in the rank's chunk of the packed vector, where in its shard), empty ones left out."""
        at = 0
        for low, high in self._owned_by(rank):
            yield slice(at, at + high - low), self.layout.owned(rank, low, high)
            at += high - low

    def own_in_vector(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """(where in the rank's chunk of the packed vector, where in the whole vector), empty ones left out."""
        at = 0
        for low, high in self._owned_by(rank):
            yield slice(at, at + high - low), slice(low, high)
            at += high - low

    def _owned_by(self, owner: int) -> Iterator[tuple[int, int]]:
        for lies, cut in zip(self.ranges, self.cuts, strict=True):
            if cut[owner] < cut[owner + 1]:
                yield lies.start + cut[owner], lies.start + cut[owner + 1]


def buckets(layout: Layout, ranges: Iterable[slice], limit: int | None) -> list[Bucket]:
    """The stretches in buckets of at most ``limit`` elements, cut where one does not fit; None: a bucket for each."""
    if limit is None:
        return [Bucket(layout, (lies,)) for lies in ranges]
    found: list[Bucket] = []
    open_: list[slice] = []
    room = limit
    for lies in ranges:
        low = lies.start
        while low < lies.stop:
            high = min(lies.stop, low + room)
            open_.append(slice(low, high))
            low, room = high, room - (high - low)
            if room == 0:
                found.append(Bucket(layout, tuple(open_)))
                open_, room = [], limit
    return found + ([Bucket(layout, tuple(open_))] if open_ else [])


def limit_of(bucket_nbytes: int | None, itemsize: int) -> int | None:
    """How many elements a bucket of so many bytes takes: at least one."""
    return None if bucket_nbytes is None else max(1, bucket_nbytes // itemsize)


