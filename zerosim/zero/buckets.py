"""Buckets: several stretches of the vector, or a part of one, that move in one collective.

Legend: N ranks; offsets and lengths count elements. A bucket's vector is packed owner by owner: first what rank 0 owns
of every stretch, then what rank 1 owns. So every element keeps its owner, and with it the order of its additions and
the bytes that it costs, whatever the bucket.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from zerosim.ranks.call import Cut
from zerosim.zero.layout import Layout
from zerosim.zero.param_group import States
from zerosim.zero.placements import SHARDED, Placement, redistribute


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


# -- One bucket from one placement to another: packed where it is in pieces, asynchronous where it is asked for ------
# Legend: n elements of the bucket's vector; a rank's chunk of it is what it owns of each stretch, one after the other.
# Collectives on parameters and gradients are called from here alone, but for whole tensors: see `tensors`.


Parts = list[tuple[slice, np.ndarray]]  # where in the vector (or in the chunk), and the elements


def of_whole(bucket: Bucket, array: np.ndarray) -> Parts:
    """The parts of the bucket's vector in a whole array (the padded vector's length)."""
    if not bucket.is_packed:
        return [(slice(0, bucket.length), array[bucket.ranges[0]])]
    return [(here, array[lies]) for here, lies in bucket.parts()]


def of_shard(bucket: Bucket, rank: int, shard: np.ndarray) -> Parts:
    """The parts of the rank's chunk in its shard."""
    if not bucket.is_packed:
        (lies,) = bucket.ranges
        own = shard[bucket.layout.owned(rank, lies.start, lies.stop)]
        return [(slice(0, len(own)), own)]
    return [(here, shard[lies]) for here, lies in bucket.own_parts(rank)]


def of_own(bucket: Bucket, rank: int, array: np.ndarray) -> Parts:
    """The parts of the rank's chunk in a whole array."""
    return [(here, array[lies]) for here, lies in bucket.own_in_vector(rank)]


class Move:
    """A bucket on its way. ``finish`` waits for it and puts it where it belongs; nothing is there before.

    ``store(resting, arrived)`` writes what arrived into a part of the target; None: it is set.
    """

    def __init__(self, states: States, bucket: Bucket, have: Placement, want: Placement, *, source: Parts,
                 target: Parts, dtype: np.dtype[Any], purpose: str, agreement: str, async_op: bool = False,
                 store: Callable[[np.ndarray, np.ndarray], None] | None = None) -> None:
        self.states, self.rank, self.target, self.store, self.async_op = states, states.rank, target, store, async_op
        chunk = bucket.cut[self.rank.index + 1] - bucket.cut[self.rank.index]
        vector = self._joined(source, chunk if have is SHARDED else bucket.length, dtype)
        self._direct = store is None and len(target) == 1 and target[0][1].dtype == dtype
        self._found = redistribute(
            self.rank, vector, have, want, bucket.cut, policy=states.policy, out=target[0][1] if self._direct else None,
            async_op=async_op, purpose=purpose, agreement=agreement)

    def _joined(self, parts: Parts, length: int, dtype: np.dtype[Any]) -> np.ndarray:
        """The parts as one vector of this format: the only part itself, or a copy in a charged buffer."""
        if len(parts) == 1 and parts[0][1].dtype == dtype:
            return parts[0][1]
        vector = self.rank.memory.alloc(length, dtype, "communication_buffer", "bucket")
        for here, elements in parts:
            self.rank.kernels.cast_pack(elements, vector[here])
        return vector

    def finish(self) -> None:
        """Waits where there is something to wait for, and unpacks where the bucket did not arrive in place."""
        found = self._found.wait() if self.async_op else self._found
        self._found = None
        if self._direct:
            return
        store = self.store or (lambda resting, arrived: self.rank.kernels.cast_pack(arrived, resting))
        for here, resting in self.target:
            store(resting, found[here])

    def drop(self) -> None:
        """Waits, and lets what arrived go."""
        if self.async_op:
            self._found.wait()
