"""Gradients reduced unit by unit as backward goes: collected into buckets, and added up over micro-batches.

Legend: n elements of a bucket; N ranks, k micro-batches. A bucket is cut by owner, so that neither bits nor bytes
depend on it. Asynchronous, one bucket is under way while backward fills the next.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.loss_scale import LossScaler
from zerosim.optim.base import Optimizer
from zerosim.zero.buckets import Bucket, limit_of
from zerosim.zero.groups import Settings
from zerosim.zero.moves import Move, Parts, of_shard, of_whole
from zerosim.zero.placements import PARTIAL, SHARDED
from zerosim.zero.states import States
from zerosim.zero.update import Update


@dataclass(frozen=True, slots=True)
class Source:
    """A stretch of the vector, and this rank's addends of it (stop - start,)."""

    lies: slice
    elements: np.ndarray


@dataclass(frozen=True, slots=True)
class Agreement:
    """What would make replicas drift apart unseen, were it not the same on all ranks."""

    optimizer: Optimizer
    loss_scale: LossScaler
    update: Update
    settings: str

    def at(self, micro_batch: int) -> str:
        """The text that is compared when a gradient is reduced."""
        factor = self.update.lr_factor(self.update.steps_taken + 1)
        scheduled = "" if factor is None else f", lr times {factor:g}"
        return (f"micro-batch {micro_batch}, loss scale {self.loss_scale.scale:g}, {self.optimizer}{scheduled}, "
                f"{self.settings}")


def digest_of(model: Model, settings: Mapping[str, Settings], others: object) -> str:
    """What else must be the same, as a checksum: the policy and the optimizer of each parameter, the first 16 of its
    first values, and ``others``."""
    first = [unit.initial(name, 0, min(16, math.prod(shape))).tobytes()
             for unit in model.units for name, shape in unit.shapes.items()]
    told = repr((sorted(settings.items()), others)).encode()
    return f"settings {zlib.crc32(b''.join([told, *first])):08x} (policy, groups, clip_norm, seed, first values)"


class Reduction:
    """The gradients of one kin of parameters, where they do not rest partial."""

    def __init__(self, states: States, *, bucket_nbytes: int | None, overlap: bool, agreement: Agreement) -> None:
        self.states, self.overlap, self.agreement = states, overlap, agreement
        self.limit = limit_of(bucket_nbytes, states.policy.reduce_dtype.itemsize)
        self._sources: list[Source] = []
        self._under_way: list[Move] = []

    def add(self, lies: slice, whole: np.ndarray, micro_batch: int) -> None:
        """Takes a stretch of a micro-batch's gradient; reduces it at once, or when its bucket is full.

        Backward comes from the end of the vector, and so buckets are filled from there. The first micro-batch of a
        step, number 0, sets what rests; later ones add to it.
        """
        high = lies.stop
        while self.limit is not None and high > lies.start:
            room = self.limit - sum(len(source.elements) for source in self._sources)
            low = max(lies.start, high - room)
            self._sources.append(Source(slice(low, high), whole[low - lies.start:high - lies.start]))
            if high - low == room:
                self.flush(micro_batch)
            high = low
        if self.limit is None:
            self._sources.append(Source(lies, whole))
            self.flush(micro_batch)

    def flush(self, micro_batch: int) -> None:
        """Reduces what has been collected."""
        if not self._sources:
            return
        sources = sorted(self._sources, key=lambda source: source.lies.start)
        self._sources = []
        self.finish()
        states, bucket = self.states, Bucket(self.states.layout, tuple(source.lies for source in sources))
        resting = (of_shard(bucket, states.rank.index, states.gradient) if states.stage.gradients is SHARDED
                   else of_whole(bucket, states.gradient))
        self._under_way.append(Move(
            states, bucket, PARTIAL, states.stage.gradients, source=_parts(bucket, sources), target=resting,
            dtype=states.policy.reduce_dtype, purpose="gradients", agreement=self.agreement.at(micro_batch),
            async_op=self.overlap, store=partial(_add, states.rank.kernels) if micro_batch else None))
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        """Waits for the bucket that is under way, and adds it to what rests."""
        while self._under_way:
            self._under_way.pop().finish()

    def forget(self) -> None:
        """Drops what was collected and what is under way."""
        self._sources = []
        while self._under_way:
            self._under_way.pop().drop()


def _add(kernels: Any, resting: np.ndarray, arrived: np.ndarray) -> None:
    """An addition of a later micro-batch, rounded to the resting format."""
    kernels.add_rounded(resting, arrived, resting)


def _parts(bucket: Bucket, sources: list[Source]) -> Parts:
    """The parts of the bucket's vector in the sources, which are in rising order."""
    if not bucket.is_packed:
        return [(slice(0, bucket.length), sources[0].elements)]
    starts, parts = [source.lies.start for source in sources], []
    for here, lies in bucket.parts():
        source = sources[int(np.searchsorted(starts, lies.start, "right")) - 1]
        parts.append((here, source.elements[lies.start - source.lies.start:lies.stop - source.lies.start]))
    return parts
