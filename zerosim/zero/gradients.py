"""Gradients from a unit's backward to the optimizer: accumulated over micro-batches, and reduced over ranks.

A unit's backward writes its gradient into `Accumulator.grad_buffers`. `Accumulator.accumulate` completes it with the
parts of units that share a weight, and hands it to the `Reducer` of its param group, which adds it to what rests in
``param_group.gradient``. Kept PARTIAL, the addends of all micro-batches are summed first and reduced once: by `reduce`,
or with overlap in buckets as the last backward goes. Kept SHARDED or REPLICATED, each micro-batch's gradient is reduced
in buckets as its backward goes, then added. At k > 1 the two orders differ in bits. In the end ``param_group.reduced``
has the sum over ranks. With overlap, one bucket is under way while backward fills the next.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches; S loss
scale.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zerosim.models.units import Unit
from zerosim.numerics.arrays import is_same_memory, may_share_memory
from zerosim.zero.layout import Bucket, Parts
from zerosim.zero.param_group import ParamGroup, ReducedGradient
from zerosim.zero.placements import PARTIAL, SHARDED, Move, Placement

Agree = Callable[[int], str]  # from a micro-batch's number to the text that must be the same on all ranks


@dataclass(slots=True)
class StepCounts:
    """An engine's counts: of steps, skipped ones too, abandoned ones not, and in the step under way its loss scale S,
    its forwards, and the tokens and places of each micro-batch whose backward is done."""

    scale: float
    step: int = 0
    forwards: int = 0
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class Accumulator:
    """One step's gradients of one rank: micro-batch after micro-batch, unit after unit.

    A weight that units share (tied) is complete only after the backward of the unit that owns it, which comes last: the
    other units' part is added first, its own second, in the accumulate format, and the sum is reduced once.
    """

    def __init__(self, param_groups: Sequence[ParamGroup], reducers: Mapping[ParamGroup, "Reducer"]) -> None:
        self.param_groups, self.rank, self.reducers = param_groups, param_groups[0].rank, reducers
        # By unit: the vectors (u,) of its gradient, and the views of them by parameter that its backward was given.
        self._buffers: dict[str, tuple[dict[ParamGroup, np.ndarray], dict[str, np.ndarray]]] = {}
        self._group_of = {name: group for group in param_groups for name in group.layout.by_name}
        self._tied: dict[str, np.ndarray] = {}  # by parameter: what the units wrote that share it and do not own it
        self.is_last = False  # from the beginning of the step's last backward on, where that is known
        self._is_in_backward = False  # which stays so if it fails

    @property
    def micro_batch(self) -> int:
        """The number of the backward under way, from 0 on; between two, how many are done."""
        return next(iter(self.reducers.values())).micro_batch

    def begin_backward(self, *, last: bool) -> None:
        """Opens a micro-batch. After the step's ``last`` there is no other: its gradients are those of the step.

        Raises ValueError after one that was to be the last.
        """
        self.refuse_if_broken_off()
        if self.is_last:
            raise ValueError("backward(last=True) has been called in this step, whose gradients may have been reduced "
                             "since; call reduce() and update(), or abandon()")
        self.is_last, self._is_in_backward = last, True
        for reducer in self.reducers.values():
            reducer.begin_backward(last=last)

    def grad_buffers(self, unit: Unit) -> dict[str, np.ndarray]:
        """The arrays into which a unit writes its gradients, by name: views of one vector (u,) per param group; for a
        tied weight of another unit new memory. A frozen parameter has a place too, which nobody reads."""
        buffers = {group: self._grad_buffer(group, unit.name) for group in self.param_groups
                   if unit.name in group.layout.units}
        views = {name: view for group, gradient in buffers.items()
                 for name, view in group.layout.unit_views(unit.name, gradient).items()}
        self._buffers[unit.name] = buffers, views.copy()
        for name in unit.tied_weights:
            group = self._group_of[name]
            views[name] = self.rank.memory.alloc(group.layout.by_name[name].shape, group.policy.compute_dtype,
                                                 "unit_gradient", f"{unit.name} {name}")
        return views

    def _grad_buffer(self, group: ParamGroup, unit: str) -> np.ndarray:
        if not group.frozen:
            return self.reducers[group].grad_buffer(unit)
        span = group.layout.units[unit]
        return self.rank.memory.alloc(span.stop - span.start, group.policy.compute_dtype, "unit_gradient", unit)

    def accumulate(self, unit: Unit, gradients: Mapping[str, np.ndarray | None]) -> None:
        """Takes the gradients that a unit's backward returned; None for a parameter that was not used, as zeros.

        Raises ValueError unless there is one of the right shape for each parameter, own or tied.
        """
        if unit.name not in self._buffers:
            self.grad_buffers(unit)
        buffers, own = self._buffers.pop(unit.name)
        if unit.tied_weights or len(gradients) != len(own) or any(
                gradients.get(name) is not view for name, view in own.items()):
            self._fill(unit, own, gradients)  # those that it returned are not just the buffers that it was given
        for group, buffer in buffers.items():
            if not group.frozen:
                self.reducers[group].accumulate(unit.name, self._with_tied(group, unit.name, buffer))
        for name in unit.tied_weights:
            self._accumulate_tied(name, gradients[name])

    def _fill(self, unit: Unit, own: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray | None]) -> None:
        """Checks what a backward returned, and puts it into the buffers of the unit's own parameters."""
        wanted = {name: view.shape for name, view in own.items()} | {
            name: self._group_of[name].layout.by_name[name].shape for name in unit.tied_weights}
        found = {name: wanted.get(name) if gradient is None else gradient.shape for name, gradient in gradients.items()}
        if found != wanted:
            raise ValueError(
                f"the backward of unit {unit.name!r} returned gradients of the shapes {found}; its parameters "
                f"have {wanted}, so return one of that shape for each, or None for one that was not used"
            )
        for name, view in own.items():
            gradient = gradients[name]
            if gradient is None:
                view[...] = 0
            elif gradient is not view and not is_same_memory(gradient, view):
                self.rank.kernels.cast_pack(gradient, view)

    def _accumulate_tied(self, name: str, gradient: np.ndarray | None) -> None:
        """Keeps the part of a unit that shares the weight until the backward of the unit that owns it."""
        group = self._group_of[name]
        if gradient is None or group.frozen:
            return
        part = self.rank.memory.alloc(gradient.size, group.policy.accumulate_dtype, "unit_gradient", name)
        self.rank.kernels.cast_pack(gradient.reshape(-1), part)
        if name in self._tied:
            self.rank.kernels.add_rounded(self._tied[name], part, part)
        self._tied[name] = part

    def _with_tied(self, group: ParamGroup, unit: str, gradient: np.ndarray) -> np.ndarray:
        """The unit's gradient (u,), completed with what other units wrote for the weights that it owns."""
        tied = [entry for entry in group.layout.by_unit[unit] if entry.name in self._tied]
        if tied and gradient.dtype != group.policy.accumulate_dtype:
            sums = self.rank.memory.alloc(len(gradient), group.policy.accumulate_dtype, "unit_gradient", unit)
            self.rank.kernels.cast_pack(gradient, sums)
            gradient = sums
        start = group.layout.units[unit].start
        for entry in tied:
            own = gradient[entry.low - start:entry.high - start]
            self.rank.kernels.add_rounded(self._tied.pop(entry.name), own, own)
        return gradient

    def end_of_backward(self) -> None:
        """Closes a micro-batch in every reducer."""
        for reducer in self.reducers.values():
            reducer.end_of_backward()
        self._is_in_backward = False

    def refuse_if_broken_off(self) -> None:
        """Raises ValueError after a backward that failed on this rank."""
        if self._is_in_backward:
            raise ValueError("a backward of this step was broken off, and the gradients of some units are there, "
                             "others not; drop them by abandon()")

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves the sum over ranks in every param group's ``reduced``."""
        self.refuse_if_broken_off()
        for reducer in self.reducers.values():
            reducer.reduce(scale, token_share)

    def abandon(self) -> None:
        """Drops this step's gradients: the next micro-batch is the first."""
        self._buffers.clear()
        self._tied.clear()
        self.is_last = self._is_in_backward = False
        under_way = [move for reducer in self.reducers.values() for move in reducer.abandon()]
        for move in under_way:  # when all is forgotten: waiting fails where a run has been stopped
            move.drop()


class Reduction:
    """The way from the addends of all ranks to their sum, for one param group: a ring.

    ``agreement`` is the text that must be the same on all ranks. Subclasses take another way; one with
    ``bits_depend_on_buckets`` is handed the buckets that backward fills, whenever they leave.
    """

    bits_depend_on_buckets = False

    def __init__(self, group: ParamGroup) -> None:
        self.group = group

    @property
    def ranks(self) -> int:
        """N, whose addends are summed."""
        return self.group.rank.size

    def start(self, bucket: Bucket, want: Placement, *, source: Parts, target: Parts, dtype: np.dtype[Any],
              agreement: str, add: bool = False, async_op: bool = False) -> Move:
        """Begins to sum a bucket of addends; the sum is put into ``target``, with ``add`` onto what is there."""
        return self.group.start_bucket(bucket, PARTIAL, want, source=source, target=target, dtype=dtype,
                                       purpose="gradients", agreement=agreement, add=add, async_op=async_op)

    def first_placement(self, want: Placement) -> Placement:
        """The placement of the sums that `start` makes, where ``want`` is that of the whole reduction."""
        return want

    def bucket_summed(self, sums: np.ndarray, bucket: Bucket, agreement: str) -> None:
        """Sends a bucket whose sum is final further, where a reduction has a second step; a ring has none."""

    def finish(self, sums: np.ndarray, agreement: str) -> None:
        """Sends further what `bucket_summed` was not given."""

    def abandon(self) -> list[Move]:
        """Forgets the step; returns what is under way, for the caller to drop."""
        return []


class Reducer:
    """The gradients of one trained param group, added to what rests and reduced over ranks, in buckets."""

    def __init__(self, param_group: ParamGroup, agree: Agree,
                 reduction: Callable[[ParamGroup], Reduction] = Reduction) -> None:
        self.param_group, self.rank, self.policy = param_group, param_group.rank, param_group.policy
        self.layout, self.placement, self.store = param_group.layout, param_group.stage.gradients, param_group.store
        self.options, self.agree, self.reduction = param_group.options, agree, reduction(param_group)
        self.micro_batch = 0  # of the backward under way; between two, how many are done
        self._collected: list[tuple[slice, np.ndarray]] = []  # stretches of the vector, and this rank's addends of them
        self._under_way: tuple[Bucket, Move] | None = None
        self._reduces_now = self.placement is not PARTIAL  # in the backward under way, or only after it
        self._is_final = False  # a sum of the backward under way, known to be the step's last
        self._sum: np.ndarray | None = None  # of PARTIAL gradients, over ranks, from the first bucket on

    # -- during backward ----------------------------------------------------------------------------------------------

    def begin_backward(self, *, last: bool) -> None:
        """Opens a micro-batch. With overlap, addends that rest PARTIAL are reduced as a step's last backward goes."""
        self._is_final = last and self.options.overlap
        self._reduces_now = self.placement is not PARTIAL or self._is_final

    def grad_buffer(self, unit: str) -> np.ndarray:
        """The array into which a unit's backward writes (u,), in the compute dtype: that at rest, or new memory."""
        span = self.layout.units[unit]
        resting = self.param_group.gradient[span] if self.placement is PARTIAL and self.micro_batch == 0 else None
        if resting is not None and resting.dtype == self.policy.compute_dtype and self.store.is_array(resting):
            return resting
        gradient = self.rank.memory.alloc(span.stop - span.start, self.policy.compute_dtype, "unit_gradient", unit)
        padding = self.layout.padding(span.start, span.stop)
        if not self.rank.memory.debug:
            gradient[padding.start - span.start:] = 0
        return gradient

    def accumulate(self, unit: str, gradient: np.ndarray) -> None:
        """Adds a unit's gradient (u,) to what rests, reduced first where that is not PARTIAL.

        The first micro-batch of a step, number 0, sets what rests; later ones add to it.
        """
        span = self.layout.units[unit]
        if self.placement is PARTIAL:
            gradient = self._accumulated(gradient, self.param_group.gradient[span])
        if self._reduces_now:
            self._collect(span, gradient)

    def _accumulated(self, gradient: np.ndarray, resting: np.ndarray) -> np.ndarray:
        """The addends (u,) of all micro-batches up to this one, where they rest."""
        if self.micro_batch > 0:
            self.rank.kernels.add_rounded(resting, gradient, resting)
        elif not may_share_memory(gradient, resting):
            self.rank.kernels.cast_pack(gradient, resting)
        return resting

    def _collect(self, span: slice, gradient: np.ndarray) -> None:
        """Fills the bucket, and reduces it when it is full; without a limit a unit is a bucket.

        Backward comes from the end of the vector, and so buckets are filled from there.
        """
        limit = self.options.limit(self.policy.reduce_dtype) or span.stop - span.start
        high = span.stop
        while high > span.start:
            room = limit - sum(len(addends) for _, addends in self._collected)
            low = max(span.start, high - room)
            self._collected.append((slice(low, high), gradient[low - span.start:high - span.start]))
            if high - low == room:
                self._flush()
            high = low

    def _flush(self) -> None:
        """Reduces the bucket that has been collected, after the one that is under way."""
        if not self._collected:
            return
        collected = sorted(self._collected, key=lambda one: one[0].start)
        self._collected = []
        self._wait()
        bucket = self.layout.bucket(*(span for span, _ in collected))
        want, target = self.placement, self.param_group.gradient
        if self.placement is PARTIAL:  # all addends of the step are here
            want = self.reduction.first_placement(self.param_group.stage.optimizer)
            if self._sum is None:
                self._sum = self._target(want, self.policy.reduce_dtype)
            target = self._sum
        self._under_way = bucket, self.reduction.start(
            bucket, want, source=bucket.in_stretches([addends for _, addends in collected]),
            target=self._parts(bucket, target, want), dtype=self.policy.reduce_dtype,
            agreement=self.agree(self.micro_batch), async_op=self.options.overlap,
            add=self.micro_batch > 0 and self.placement is not PARTIAL)
        if not self.options.overlap:
            self._wait()

    def _wait(self) -> None:
        """Waits for the bucket that is under way, and adds it to what rests."""
        if self._under_way is None:
            return
        (bucket, move), self._under_way = self._under_way, None
        move.wait()
        if self._is_final:
            sums = self.param_group.gradient if self._sum is None else self._sum
            self.reduction.bucket_summed(sums, bucket, self.agree(self.micro_batch))

    def end_of_backward(self) -> None:
        """Closes a micro-batch: what waits in a bucket that is not full is reduced; no bucket has two in it."""
        self._flush()
        self._wait()
        self.micro_batch += 1

    def abandon(self) -> list[Move]:
        """Drops what was collected; returns the buckets that are under way, for the caller to drop."""
        self._collected, self.micro_batch, self._sum = [], 0, None
        under_way, self._under_way = self._under_way, None
        return [*([] if under_way is None else under_way[1:]), *self.reduction.abandon()]

    # -- after backward -----------------------------------------------------------------------------------------------

    def reduce(self, scale: float, token_share: float) -> None:
        """Leaves the sum over ranks, as the optimizer needs it, in ``param_group.reduced``: at rest, or a new array.

        It is to be divided by S·N·k, and by the share of places that have a token.
        """
        divisor = self.policy.divisor(self.reduction.ranks, self.micro_batch, scale) * token_share
        want = self.param_group.stage.optimizer
        total, have = self._redistributed(self.param_group.gradient, self.placement,
                                          self.reduction.first_placement(want))
        self.reduction.finish(total, self.agree(self.micro_batch))
        total, have = self._redistributed(total, have, want)
        self.param_group.reduced = ReducedGradient(total, have, divisor)

    def _redistributed(self, total: np.ndarray, have: Placement, want: Placement) -> tuple[np.ndarray, Placement]:
        """The sum over the ranks that have a shard each, and how it rests."""
        if have is want or (have is not PARTIAL and want is SHARDED):
            return total, have  # the same, or the optimizer reads its slices of the replicated sum
        if self.reduction.bits_depend_on_buckets and have is PARTIAL and self._sum is None:
            self._collect_all(total)
        found, self._sum = self._sum, None
        if found is None:  # no bucket has been reduced during backward
            # Addends travel in the reduce format, sums in that in which they rest.
            dtype = self.policy.reduce_dtype if have is PARTIAL else total.dtype
            found = self._target(want, dtype)
            ranges = [slice(region.low, region.high) for region in self.layout.regions]
            start = self.reduction.start if have is PARTIAL else partial(
                self.param_group.start_bucket, have=have, purpose="gradients")  # addends are summed, sums are gathered
            for bucket in self.param_group.buckets(ranges, dtype):
                with self.rank.trace.span(bucket.region_name):
                    start(bucket, want=want, source=self._parts(bucket, total, have), dtype=dtype,
                          target=self._parts(bucket, found, want), agreement=self.agree(self.micro_batch)).wait()
        return found, want

    def _collect_all(self, addends: np.ndarray) -> None:
        """Reduces all units in the buckets that backward would have filled: bits do not depend on when they leave."""
        for unit, span in reversed(list(self.layout.units.items())):
            with self.rank.trace.span(unit):
                self._collect(span, self.store.read(addends[span]))
        self._flush()
        self._wait()

    def _target(self, want: Placement, dtype: np.dtype) -> np.ndarray:
        """In place where an all-reduce can be; else a new array in the format that arrives."""
        if self.placement is PARTIAL and want is not SHARDED and dtype == self.param_group.gradient.dtype:
            return self.param_group.gradient
        gradient: np.ndarray = self.store.alloc(self.param_group.length(want), dtype, "gradient", "reduced gradient")
        self.param_group.clear_padding(gradient, want)
        return gradient

    def _parts(self, bucket: Bucket, array: np.ndarray, placement: Placement) -> Parts:
        return bucket.own_in_shard(self.rank.index, array) if placement is SHARDED else bucket.in_vector(array)


class Observer:
    """Takes what layers hand over for the optimizer beside gradients: nothing, unless one needs it (`zero.factors`)."""

    share = 1.0  # of the places that have a target, in the micro-batch of the backward under way

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.rows: dict[str, int] = {}

    def observe(self, weight: str, x: np.ndarray, dy: np.ndarray) -> None:
        """Adds what one micro-batch gives: x (M, I), dy (M, O)."""

    def averaged(self) -> dict[str, Any]:
        """The means over ranks and micro-batches, by weight."""
        return {}

    def abandon(self) -> None:
        """Drops what was observed."""
