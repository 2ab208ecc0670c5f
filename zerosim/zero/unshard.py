"""Lending a unit's weights: for as long as a ``with`` block lasts, and no longer.

Legend: u elements of one padded unit. Where parameters rest sharded they are gathered for it: on entry, or ahead of it
while the unit before computes (prefetch), and freed on exit, or after backward (keep gathered).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from zerosim.models.units import Model, Unit, Weights
from zerosim.zero.buckets import Bucket, Move, buckets, limit_of, of_own, of_shard, of_whole
from zerosim.zero.layout import Region
from zerosim.zero.param_group import States
from zerosim.zero.placements import REPLICATED, SHARDED


@dataclass(slots=True)
class Gathered:
    """One unit's whole parameters, (u,) for each kin, how many blocks use them, and the gathers still under way."""

    whole: dict[int, np.ndarray]
    moves: list[Move] = field(default_factory=list)
    users: int = 0
    kept: bool = False

    def arrive(self) -> None:
        """Waits for what is under way."""
        while self.moves:
            self.moves.pop(0).finish()


class Lender:
    """Gives out one rank's weights, unit by unit, from wherever they rest.

    ``keep`` names the units that stay gathered from forward to the end of backward, ``prefetch`` how many units ahead
    are gathered, ``bucket_nbytes`` the most that one gather brings.
    """

    def __init__(self, model: Model, families: Sequence[States], *, keep: frozenset[str], prefetch: int,
                 bucket_nbytes: int | None) -> None:
        self.model, self.families, self.rank = model, families, families[0].rank
        self.keep, self.prefetch, self.bucket_nbytes = keep, prefetch, bucket_nbytes
        self._units = {unit.name: unit for unit in model.units}
        self._gathered: dict[str, Gathered] = {}
        self._ahead: list[str] = []

    # -- weights in a with block --------------------------------------------------------------------------------------

    @contextmanager
    def weights(self, unit: Unit, *, in_pass: bool = False) -> Iterator[Weights]:
        """The unit's parameters by name, read-only, at rest's format: gathered where sharded, freed on exit.

        ``in_pass``: on the way forward or backward, where units are kept and gathered ahead. Raises ValueError for a
        unit of another model.
        """
        if unit not in self.model.units:
            raise ValueError(f"weights() was asked for {unit!r}, which is no unit of this engine's model; take one of "
                             f"engine.model.units: {', '.join(self._units)}")
        needed = [unit.name, *dict.fromkeys(unit.tied_weights.values())]
        taken = [self._acquire(name) for name in needed]
        if in_pass:
            self._look_ahead(unit.name)
        try:
            views = {name: view for source, whole in zip(needed, taken, strict=True)
                     for name, view in self._views(source, whole).items()}
            yield {name: views[name] for name in (*unit.shapes, *unit.tied_weights)}
        finally:
            for name in needed:
                self._release(name, keep=in_pass and name in self.keep)

    def follow(self, order: Sequence[int]) -> None:
        """Says in which order the units will be asked for, so that the next ones can be gathered ahead."""
        self._ahead = [self.model.units[index].name for index in order]

    def let_go(self) -> None:
        """Frees what was kept gathered or gathered ahead: after backward, and before the weights change."""
        self._ahead = []
        for name in list(self._gathered):
            self._gathered[name].arrive()
            if not self._gathered[name].users:
                self._free(name)

    def _views(self, name: str, whole: dict[int, np.ndarray]) -> Weights:
        views = {}
        for index, states in enumerate(self.families):
            if name in states.layout.units:
                views.update(states.layout.unit_views(name, whole[index]))
        for view in views.values():
            view.flags.writeable = False  # a write would be lost where weights are gathered, and drift elsewhere
        return views

    # -- gathering and freeing ----------------------------------------------------------------------------------------

    @property
    def _is_sharded(self) -> bool:
        return self.families[0].stage.parameters is SHARDED

    def _acquire(self, name: str) -> dict[int, np.ndarray]:
        if not self._is_sharded:
            return {index: states.parameter[states.layout.units[name]]
                    for index, states in enumerate(self.families) if name in states.layout.units}
        gathered = self._gathered.get(name) or self._gather(name, async_op=False)
        gathered.arrive()
        gathered.users += 1
        return gathered.whole

    def _release(self, name: str, *, keep: bool) -> None:
        gathered = self._gathered.get(name)
        if gathered is not None:
            gathered.users -= 1
            gathered.kept = gathered.kept or keep
            if not gathered.users and not gathered.kept:
                self._free(name)

    def _free(self, name: str) -> None:
        for whole in self._gathered.pop(name).whole.values():
            self.rank.memory.free(whole)

    def _look_ahead(self, name: str) -> None:
        """Begins to gather the units that are asked for after this one."""
        if name in self._ahead:
            del self._ahead[:self._ahead.index(name) + 1]
        if self._is_sharded:
            for next_name in self._ahead[:self.prefetch]:
                if next_name not in self._gathered:
                    self._gather(next_name, async_op=True)

    def _gather(self, name: str, *, async_op: bool) -> Gathered:
        gathered = self._gathered[name] = Gathered({})
        for index, states in enumerate(self.families):
            lies = states.layout.units.get(name)
            if lies is None:
                continue
            dtype = states.parameter.dtype
            whole = self.rank.memory.alloc(lies.stop - lies.start, dtype, "gathered_parameter", name)
            gathered.whole[index] = whole
            for bucket in buckets(states.layout, [lies], limit_of(self.bucket_nbytes, dtype.itemsize)):
                (part,) = bucket.ranges
                here = whole[part.start - lies.start:part.stop - lies.start]
                gathered.moves.append(Move(
                    states, bucket, SHARDED, REPLICATED, source=of_shard(bucket, self.rank.index, states.parameter),
                    target=[(slice(0, len(here)), here)], dtype=dtype, purpose="parameters",
                    agreement=f"weights of {name}", async_op=async_op))
        return gathered


# -- Replicated parameters made equal again after each rank has updated its own shard: an all-gather of every bucket ---
# Legend: N ranks. Asynchronous, a bucket leaves as soon as its regions are updated, while the optimizer still works on
# the others.


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
