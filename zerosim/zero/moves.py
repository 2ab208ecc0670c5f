"""One bucket from one placement to another: packed where it is in pieces, asynchronous where it is asked for.

Legend: n elements of the bucket's vector; a rank's chunk of it is what it owns of each stretch, one after the other.
Collectives on parameters and gradients are called from here alone, but for whole tensors: see `tensors`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from zerosim.zero.buckets import Bucket
from zerosim.zero.placements import SHARDED, Placement, redistribute
from zerosim.zero.states import States

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
