"""Replicated parameters made equal again after each rank has updated its own shard: an all-gather of every bucket.

Legend: N ranks. Asynchronous, a bucket leaves as soon as its regions are updated, while the optimizer still works on
the others.
"""

from zerosim.zero.buckets import Bucket, buckets, limit_of
from zerosim.zero.layout import Region
from zerosim.zero.moves import Move, of_own, of_whole
from zerosim.zero.placements import REPLICATED, SHARDED
from zerosim.zero.states import States


class Refresh:
    """The parameters of one kin, if they need it: replicated ones, of which each rank has updated a part."""

    def __init__(self, states: States, *, bucket_nbytes: int | None, overlap: bool) -> None:
        self.states, self.overlap = states, overlap
        ranges = [slice(region.low, region.high) for region in states.layout.regions]
        self._buckets = buckets(states.layout, ranges, limit_of(bucket_nbytes, states.parameter.dtype.itemsize))
        self._waiting: list[Bucket] = []
        self._under_way: list[Move] = []

    @property
    def is_needed(self) -> bool:
        """True where an update leaves the replicas different."""
        stage = self.states.stage
        return stage.parameters is REPLICATED and stage.optimizer is SHARDED and not self.states.frozen

    @property
    def is_stale(self) -> bool:
        """True while other ranks have newer shards than this rank's copy."""
        return bool(self._waiting or self._under_way)

    def updated(self, region: Region) -> None:
        """Hears that this rank's part of a region is new; regions come in order."""
        if not self.is_needed:
            return
        if region is self.states.layout.regions[0]:
            self._waiting = list(self._buckets)
        while self.overlap and self._waiting and self._waiting[0].ranges[-1].stop <= region.high:
            self._under_way.append(self._move(self._waiting.pop(0), overlap=True))

    def finish(self) -> None:
        """Gathers what is stale, and waits for what is under way already."""
        while self._under_way:
            self._under_way.pop(0).finish()
        while self._waiting:
            with self.states.rank.trace.span(self._name(self._waiting[0])):
                self._move(self._waiting.pop(0), overlap=False).finish()

    def _name(self, bucket: Bucket) -> str:
        return self.states.layout.region_at(bucket.ranges[0].start).name

    def _move(self, bucket: Bucket, *, overlap: bool) -> Move:
        states, rank = self.states, self.states.rank
        return Move(states, bucket, SHARDED, REPLICATED, source=of_own(bucket, rank.index, states.parameter),
                    target=of_whole(bucket, states.parameter), dtype=states.parameter.dtype, purpose="parameters",
                    agreement="refresh", async_op=overlap)
