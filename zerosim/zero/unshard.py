"""Unshard and reshard: whole parameters out of shards, while a unit computes and after each update.

Where parameters rest sharded, `Unsharder.unshard` gathers a unit's on entry of a ``with`` block, or ahead of it while
the unit before computes (prefetch), and reshards them (frees them) on exit, or after backward (keep gathered). Where
they rest replicated and each rank has updated its own shard, `ParameterAllGather` is an unshard without a reshard: it
puts the other ranks' shards where this rank's old copy lies.

Legend: N ranks; u elements of one padded unit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from zerosim.models.units import Model, Unit, Weights
from zerosim.zero.layout import Bucket, Parts, Region
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import REPLICATED, SHARDED, Move


@dataclass(slots=True)
class UnshardedUnit:
    """One unit's whole parameters, and until when they stay."""

    whole: dict[ParamGroup, np.ndarray]  # (u,) each
    all_gathers: list[Move] = field(default_factory=list)  # under way
    users: int = 0  # open blocks outside forward and backward, whose own may be broken off
    kept: bool = False  # until the end of backward, when no block uses it

    def wait(self) -> None:
        """Waits for what is under way."""
        while self.all_gathers:
            self.all_gathers.pop(0).wait()


class UnitGather:
    """The all-gathers of one unit's parameters of one param group, a bucket each. Where other ranks write the same at
    the same time, and nobody but collectives writes it, ranks ``may_share`` it."""

    may_share = True

    def start(self, group: ParamGroup, name: str, whole: np.ndarray, *, async_op: bool) -> Iterator[Move]:
        """Begins to gather one unit (u,)."""
        span = group.layout.units[name]
        for bucket in group.buckets([span], whole.dtype):
            yield group.start_bucket(
                bucket, SHARDED, REPLICATED, source=bucket.own_in_shard(group.rank.index, group.parameter),
                target=self.target(bucket, span, whole), dtype=whole.dtype, purpose="parameters",
                agreement=f"weights of {name}", async_op=async_op)

    def own_parts(self, group: ParamGroup, name: str) -> Iterator[np.ndarray]:
        """The parts of this rank's shard that a gather of the unit begins with."""
        for bucket in group.buckets([group.layout.units[name]], group.parameter.dtype):
            yield from (part for _, part in bucket.own_in_shard(group.rank.index, group.parameter))

    @staticmethod
    def target(bucket: Bucket, span: slice, whole: np.ndarray) -> Parts:
        """The place of a bucket, one stretch, in the unit (u,) of this span."""
        (part,) = bucket.ranges
        return bucket.in_stretches([whole if part == span else whole[part.start - span.start:part.stop - span.start]])

    def weights_change(self) -> None:
        """Drops weights that were kept and are now old; here none are."""


class Unsharder:
    """Gives out one rank's weights, unit by unit.

    ``keep`` names the units that stay unsharded from forward to the end of backward, ``prefetch`` how many units ahead
    are gathered, ``gather`` how; None where parameters are whole at rest, and are given out as they are.
    """

    def __init__(self, model: Model, param_groups: Sequence[ParamGroup], gather: UnitGather | None, *,
                 keep: frozenset[str], prefetch: int) -> None:
        # By unit, of whose parameters it needs the weights, and their names; and the param groups that have parameters
        # of it, with their place in the groups' vectors.
        self._needs = {unit.name: ([unit.name, *dict.fromkeys(unit.tied_weights.values())],
                                   [*unit.shapes, *unit.tied_weights]) for unit in model.units}
        self._groups_of = {unit.name: [(group, group.layout.units[unit.name]) for group in param_groups
                                       if unit.name in group.layout.units] for unit in model.units}
        self.model, self.param_groups, self.rank = model, param_groups, param_groups[0].rank
        self.keep, self.prefetch, self.gather = keep, prefetch, gather
        self._unsharded: dict[str, UnshardedUnit] = {}
        self.open_blocks = 0
        self._ahead: list[str] = []  # the units that will be asked for, in order

    # -- weights in a with block --------------------------------------------------------------------------------------

    @contextmanager
    def unshard(self, unit: Unit, *, in_pass: bool = False) -> Iterator[Weights]:
        """The unit's parameters by name, read-only, in the format at rest: gathered where sharded, freed on exit.

        ``in_pass``: on the way forward or backward, where units are kept and prefetched. Raises ValueError for a unit
        of another model.
        """
        if unit not in self.model.units:
            raise ValueError(f"weights() was asked for {unit!r}, which is no unit of this engine's model; pass one, "
                             f"not its name, of engine.model.units: {', '.join(one.name for one in self.model.units)}")
        needed, names = self._needs[unit.name]
        wholes: dict[str, dict[ParamGroup, np.ndarray]] = {}
        self.open_blocks += not in_pass
        try:
            for name in needed:
                wholes[name] = self._unshard(name, users=not in_pass)
            if in_pass:
                self._prefetch(unit.name)
            views: dict[str, np.ndarray] = {}
            for name, whole in wholes.items():
                for group, vector in whole.items():
                    views |= group.layout.unit_views(name, vector)
            for view in views.values():
                view.flags.writeable = False  # a write would be lost where weights are gathered, and drift elsewhere
            yield {name: views[name] for name in names}
        finally:
            self.open_blocks -= not in_pass
            for name in wholes:
                self._reshard(name, users=not in_pass, keep=in_pass and name in self.keep)

    def set_prefetch_order(self, order: Sequence[int]) -> None:
        """Sets the order in which the units will be asked for, so that the next ones can be gathered ahead."""
        self._ahead = [self.model.units[index].name for index in order]

    def reshard_all(self) -> None:
        """Frees what was kept or prefetched: after backward, and of an abandoned step.

        Units are forgotten before they are waited for: waiting fails where a run has been stopped, and nothing of that
        run may stay here.
        """
        self._ahead = []
        unused = [self._unsharded.pop(name) for name, unit in list(self._unsharded.items()) if not unit.users]
        for unsharded in unused:
            unsharded.wait()
            self._free(unsharded)

    def abandon(self) -> None:
        """Frees gathered weights, and those that a `UnitGather` has kept: they change now."""
        try:
            self.reshard_all()
        finally:
            if self.gather is not None:
                self.gather.weights_change()

    def _unshard(self, name: str, *, users: int) -> dict[ParamGroup, np.ndarray]:
        if self.gather is None:
            return {group: group.parameter[span] for group, span in self._groups_of[name]}
        unsharded = self._unsharded.get(name) or self._start_unshard(self.gather, name, async_op=False)
        unsharded.wait()
        unsharded.users += users
        return unsharded.whole

    def _start_unshard(self, gather: UnitGather, name: str, *, async_op: bool) -> UnshardedUnit:
        unsharded = self._unsharded[name] = UnshardedUnit({})
        for group, span in self._groups_of[name]:
            alloc = group.rank.alloc_in_common if gather.may_share and not async_op else self.rank.memory.alloc
            whole = alloc(span.stop - span.start, group.parameter.dtype, "gathered_parameter", name)
            unsharded.whole[group] = whole
            unsharded.all_gathers += gather.start(group, name, whole, async_op=async_op)
        return unsharded

    def _prefetch(self, name: str) -> None:
        """Begins to gather the units that are asked for after this one."""
        if name in self._ahead:
            del self._ahead[:self._ahead.index(name) + 1]
        if self.gather is not None:
            for next_name in self._ahead[:self.prefetch]:
                if next_name not in self._unsharded:
                    self._start_unshard(self.gather, next_name, async_op=True)

    def _reshard(self, name: str, *, users: int, keep: bool) -> None:
        unsharded = self._unsharded.get(name)
        if unsharded is not None:
            unsharded.users -= users
            unsharded.kept = unsharded.kept or keep
            if not unsharded.users and not unsharded.kept:
                self._free(self._unsharded.pop(name))

    def _free(self, unsharded: UnshardedUnit) -> None:
        for whole in unsharded.whole.values():
            self.rank.memory.free(whole)


class ParameterAllGather:
    """Makes the replicated parameters of one param group equal again, after each rank has updated its own shard.

    With overlap, a bucket leaves as soon as its regions are updated, while the optimizer still works on the others.
    """

    def __init__(self, param_group: ParamGroup) -> None:
        self.param_group, stage = param_group, param_group.stage
        self.is_needed = stage.parameters is REPLICATED and stage.optimizer is SHARDED and not param_group.frozen
        ranges = [slice(region.low, region.high) for region in param_group.layout.regions]
        self._buckets = param_group.buckets(ranges, param_group.parameter.dtype)
        self._waiting: list[Bucket] = []
        self._under_way: list[Move] = []

    @property
    def is_out_of_date(self) -> bool:
        """True while other ranks have newer shards than this rank's copy."""
        return bool(self._waiting or self._under_way)

    def shard_updated(self, region: Region) -> None:
        """Marks this rank's shard of a region as updated; to be called in the order of regions."""
        if not self.is_needed:
            return
        if region is self.param_group.layout.regions[0]:
            self._waiting = list(self._buckets)
        while self.param_group.options.overlap and self._waiting and self._waiting[0].ranges[-1].stop <= region.high:
            self._under_way.append(self._start(self._waiting.pop(0), async_op=True))

    def finish(self) -> None:
        """Waits for what is under way, and gathers the rest; if that fails, all of it is still to be gathered."""
        try:
            self._finish()
        except BaseException:
            self._under_way, self._waiting = [], list(self._buckets)
            raise
        self._waiting = []

    def _finish(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()
        for bucket in self._waiting:
            with self.param_group.rank.trace.span(bucket.region_name):
                self._start(bucket, async_op=False).wait()

    def weights_change(self) -> None:
        """Marks all parameters as equal on all ranks, which a load makes them."""
        self._waiting = []

    def abandon(self) -> None:
        """Drops what is under way when an update fails; all of it is still to be gathered."""
        if self.is_out_of_date:
            under_way, self._under_way, self._waiting = self._under_way, [], list(self._buckets)
            for move in under_way:
                move.drop()

    def _start(self, bucket: Bucket, *, async_op: bool) -> Move:
        group = self.param_group
        return group.start_bucket(
            bucket, SHARDED, REPLICATED, source=bucket.own_in_vector(group.rank.index, group.parameter),
            target=bucket.in_vector(group.parameter), dtype=group.parameter.dtype, purpose="parameters",
            agreement="all-gather of parameters", async_op=async_op)
