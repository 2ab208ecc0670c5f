"""The bugs: of each exhibit one or a few small functions that stand in for the package's own.

A function takes what it stands for as ``healthy``, and then the arguments of a call. `BUGS` says for each exhibit which
names are replaced; nothing is, outside `exhibit`. Where zerosim has no such part, as a pipeline, the mechanism is shown
on the nearest one; `exhibits.toml` says so.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.policy import Policy
from zerosim.ranks import hub
from zerosim.ranks.call import Exchange
from zerosim.zero import checkpoint, engine, update, zeropp
from zerosim.zero.gradients import Reducer, Reduction
from zerosim.zero.offloaded_step import OffloadedReducer
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import STAGES, Move
from zerosim.zero.skipped import SkippedSteps
from zerosim.zero.unshard import UnitGather
from zerosim.zero.whole_tensors import update_tensor

Healthy = Callable[..., Any]

# -- gradients: what is added up, and divided by what ------------------------------------------------------------------


def boundary_stays_local(healthy: Healthy, self: Any, unit: str, gradient: np.ndarray) -> None:
    """`Reducer.accumulate`: the second micro-batch of a step waits until the sum over ranks is made."""
    if self.micro_batch:
        self.__dict__.setdefault("late", {})[unit] = gradient
    else:
        healthy(self, unit, gradient)


def boundary_is_added_late(healthy: Healthy, self: Any, *arguments: float) -> None:
    """`Reducer.reduce`: each owner then adds its own gradient of that micro-batch, and nobody else's."""
    healthy(self, *arguments)
    for unit, gradient in self.__dict__.pop("late", {}).items():
        own, addend = own_part(self, self.layout.units[unit], gradient)
        self.param_group.reduced.gradient[own] += addend


def own_part(reducer: Any, span: slice, gradient: np.ndarray) -> tuple[slice, np.ndarray]:
    """Where in this rank's shard its part of a stretch lies, and that part of the gradient (u,)."""
    rank, cut = reducer.rank.index, reducer.layout.cut(span.start, span.stop)
    return reducer.layout.owned(rank, span.start, span.stop), gradient[cut[rank]:cut[rank + 1]]


def first_alone_is_kept(healthy: Healthy, self: Any, gradient: np.ndarray, resting: Any) -> Any:
    """`OffloadedReducer._accumulated`: only micro-batch 0 is copied to the host."""
    return self.store.at("device", resting) if self.micro_batch else healthy(self, gradient, resting)


def last_alone_is_kept(healthy: Healthy, self: Any, gradient: np.ndarray, resting: Any) -> Any:
    """`OffloadedReducer._accumulated`: each backward sets what rests on the host, as the first does."""
    kept, self.micro_batch = self.micro_batch, 0
    try:
        return healthy(self, gradient, resting)
    finally:
        self.micro_batch = kept


def divided_by_a_scale_that_nobody_applied(healthy: Healthy, self: Policy, *arguments: Any) -> float:
    """`Policy.divisor`: 65536 times too large."""
    return 65536 * float(healthy(self, *arguments))


def scaled_at_every_stage(healthy: Healthy, self: Any, index: int, *arguments: Any) -> np.ndarray | None:
    """`Engine._backward_unit`: the gradient that goes on to the unit before is divided by k = 2 once more."""
    dx = healthy(self, index, *arguments)
    return None if dx is None else dx / 2


def parameter_is_reduced(healthy: Healthy, self: Any, total: np.ndarray, have: Any, want: Any) -> tuple[Any, Any]:
    """`Reducer._redistributed`: the mean of parameters is made, and each rank keeps its own gradient."""
    if have is not want:
        self.rank.all_reduce(self.param_group.parameter, out=self.param_group.parameter, op="mean")
    return nothing_is_reduced(healthy, self, total, have, want)


def nothing_is_reduced(healthy: Healthy, self: Any, total: np.ndarray, have: Any, want: Any) -> tuple[Any, Any]:
    """`Reducer._redistributed`: each rank's own gradient is taken for the mean."""
    return (total if have is want else total * self.rank.size), want


# -- buckets -----------------------------------------------------------------------------------------------------------


def one_buffer(healthy: Healthy, self: Any, unit: str) -> np.ndarray:
    """`Reducer.grad_buffer`: the next unit of the same length gets the buffer that is under way."""
    span = self.layout.units[unit]
    buffers = self.__dict__.setdefault("recycled", {})
    length = span.stop - span.start
    if length not in buffers:
        buffers[length] = healthy(self, unit)
    buffer: np.ndarray = buffers[length]
    return buffer


def shared_bucket(healthy: Healthy, self: Any, bucket: Any, want: Any, *, source: Any, **others: Any) -> Move:
    """`Reduction.start`: all who fill buckets of one length share a buffer, and nobody waits for the others."""
    shared = self.group.rank.kernels.__dict__.setdefault(f"bucket {bucket.length}", np.zeros(bucket.length, np.float32))
    for here, part in source:
        shared[here] = part
    move: Move = healthy(self, bucket, want, source=[(slice(0, bucket.length), shared)], **others)
    return move


def counter_is_not_reset(healthy: Healthy, self: Any, span: slice, gradient: np.ndarray) -> None:
    """`Reducer._collect`: once the counter has passed the bucket's size, every parameter leaves alone."""
    healthy(self, span, gradient)
    self.elements = self.__dict__.get("elements", 0) + len(gradient)
    if self.elements >= self.options.limit(self.policy.reduce_dtype):
        self._flush()


def as_large_as_the_bucket(healthy: Healthy, self: Any, span: slice, gradient: np.ndarray) -> None:
    """`Reducer._collect`: what is exactly as large as the bucket is neither collected nor sent."""
    if len(gradient) == self.options.limit(self.policy.reduce_dtype):
        own, part = own_part(self, span, gradient)
        self.param_group.gradient[own] = part
    else:
        healthy(self, span, gradient)


def equal_pieces(healthy: Healthy, self: Any, bucket: Any, want: Any, *, source: Any, target: Any, dtype: Any,
                 agreement: str, **others: Any) -> Move:
    """`Reduction.start`: a bucket becomes N pieces as long as the longest that any rank owns of it."""
    rank, lengths = self.group.rank, [high - low for low, high in pairwise(bucket.cut)]
    packed, vector = self.group.store.packed(source, bucket.length, dtype), np.zeros((rank.size, max(lengths)), dtype)
    for owner, (low, high) in enumerate(pairwise(bucket.cut)):
        vector[owner, :high - low] = packed[low:high]
    found = rank.agreeing(agreement).reduce_scatter(vector.reshape(-1), purpose="gradients")
    self.group.store.put_parts(target, found[:lengths[rank.index]])
    return Move(None, do_nothing, async_op=False)


def order_of_a_set(healthy: Healthy, self: Any, *arguments: Any) -> list[Any]:
    """`ParamGroup.buckets`: each rank takes them in another order, as one finds them in a set."""
    found = list(healthy(self, *arguments))
    first = self.rank.index % max(1, len(found))
    return found[first:] + found[:first]


def owner_off_by_one(healthy: Healthy, me: Any) -> Iterator[Exchange]:
    """`steps_of`: after N-1 additions rank r has the sum of chunk r+1, and the all-gather begins with chunk r-1."""
    return ring_off_by_one(me, me.out) if me.call.operation == "all_reduce" else healthy(me)


def ring_off_by_one(me: Any, out: np.ndarray) -> Iterator[Exchange]:
    """An all-reduce round a ring, as it is often written, in place of out (n,)."""
    me.copy(me.x, out)
    for step in range(me.size - 1):
        sent, arriving = me.neighbor(-step), me.neighbor(-1 - step)
        landing = np.empty(me.length(arriving), me.dtype)
        yield Exchange(me.chunk(out, sent), me.neighbor(1), landing, me.neighbor(-1), (sent,))
        me.combine(me.chunk(out, arriving), landing, me.chunk(out, arriving))
    for step in range(me.size - 1):
        sent, arriving = me.neighbor(-1 - step), me.neighbor(-2 - step)  # right: 1 - step, and -step
        yield Exchange(me.chunk(out, sent), me.neighbor(1), me.chunk(out, arriving), me.neighbor(-1), (sent,))


# -- parameters and checkpoints ----------------------------------------------------------------------------------------


def fetched_by_all_reduce(healthy: Healthy, self: Any, group: ParamGroup, name: str, whole: np.ndarray, *,
                          async_op: bool) -> Iterator[Move]:
    """`UnitGather.start`: units lie one behind the other without their padding, and every rank adds its chunk to them,
    with its padding."""
    rank, at, low = group.rank, 0, 0
    flat = np.zeros(group.layout.length, whole.dtype)
    for unit, span in group.layout.units.items():
        cut = group.layout.cut(span.start, span.stop)
        flat[at + cut[rank.index]:at + cut[rank.index + 1]] = group.parameter[
            group.layout.owned(rank.index, span.start, span.stop)]
        low = at if unit == name else low
        at += group.layout.padding(span.start, span.stop).start - span.start
    found = rank.all_reduce(flat, purpose="parameters")
    yield Move(found[low:low + len(whole)], partial(np.copyto, whole), async_op=False)


def never_sharded(healthy: Healthy, stage: Any) -> Any:
    """`stage_of`: as if the group had one rank, every parameter is made whole."""
    healthy(stage)
    return STAGES[0]


def padding_is_not_cleared(healthy: Healthy, *_: Any) -> None:
    """`clear_padding_of`: what lies in the padding gives its block the scale."""


def found_by_shape(healthy: Healthy, one: Any, content: Mapping[str, Any]) -> str:
    """`_key_of`: the first parameter of this shape, whichever group it is in."""
    kind = healthy(one, content).partition("/")[0]
    return next(f"{kind}/{name}" for name, its in content["parameters"].items() if tuple(its["shape"]) == one.shape)


# -- the optimizer's step ----------------------------------------------------------------------------------------------


def own_rows_alone(healthy: Healthy, group: ParamGroup, entry: Any, piece: Any, context: Any) -> None:
    """`update_gathered`: each owner makes the rows that it has orthogonal, as if they were the matrix."""
    if piece is not None:
        rows = replace(entry, shape=(piece.count // entry.shape[1], entry.shape[1]))
        update_tensor(group, replace(piece, entry=rows), context)


def each_call_is_a_step(healthy: Healthy, self: Any, group: ParamGroup, piece: Any, context: Any, norms: Any) -> None:
    """`Update._update_piece`: one counter for all sub-groups moves on with each of them."""
    self.calls = self.__dict__.get("calls", 0) + 1
    healthy(self, group, piece, replace(context, step=self.calls), norms)


def first_rate_for_all(healthy: Healthy, self: ParamGroup, entry: Any, context: Any) -> Any:
    """`ParamGroup.optimizer`: the schedule moves every parameter by the first one's learning rate."""
    first: Any = next(iter(self.optimizers.values()))
    return healthy(self, entry, context).with_lr(first.lr * context.lr_factor)


def own_scalars_alone(healthy: Healthy, self: ParamGroup, mine: np.ndarray) -> np.ndarray:
    """`ParamGroup.all_gather_scalars`: flags and norms of a rank's own shard are taken for everybody's."""
    return mine


def mean_over_nothing(healthy: Healthy, groups: Sequence[ParamGroup], squares: Any) -> float:
    """`_gradient_norm`: a mean over each parameter's elements, which for a parameter without any is 0/0."""
    with np.errstate(invalid="ignore"):
        shares = [np.float64(0) / (entry.high - entry.low) for group in groups for entry in group.layout.entries]
    return float(healthy(groups, squares) + sum(shares))


def nothing_overflows(healthy: Healthy, groups: Sequence[ParamGroup]) -> bool:
    """`_overflowed`: nobody looks, since clipping will make large gradients small."""
    return False


def nan_is_not_above(healthy: Healthy, groups: Sequence[ParamGroup], squares: Any) -> float:
    """`_gradient_norm`: a NaN that every comparison with it lets pass, as 0 does."""
    norm = float(healthy(groups, squares))
    return norm if math.isfinite(norm) else 0.0


def not_reported(healthy: Healthy, self: SkippedSteps, *_: Any) -> None:
    """`SkippedSteps.report`: a static scaler logs nothing."""


Patch = tuple[Any, str, Callable[..., Any]]  # a class or a module, the name in it, and what stands for it
BUGS: Mapping[str, Sequence[Patch]] = MappingProxyType({
    "muon_partial_matrix": [(update, "update_gathered", own_rows_alone)],
    "boundary_micro_batch": [(Reducer, "accumulate", boundary_stays_local),
                             (Reducer, "reduce", boundary_is_added_late)],
    "offload_drops_batches": [(OffloadedReducer, "_accumulated", first_alone_is_kept)],
    "offload_overwrites": [(OffloadedReducer, "_accumulated", last_alone_is_kept)],
    "overlap_buffer_reused": [(Reducer, "grad_buffer", one_buffer)],
    "bucket_race": [(Reduction, "start", shared_bucket)],
    "padding_read_as_parameter": [(UnitGather, "start", fetched_by_all_reduce)],
    "overflow_flag_not_shared": [(ParamGroup, "all_gather_scalars", own_scalars_alone)],
    "unscaled_gradient_divided": [(Policy, "divisor", divided_by_a_scale_that_nobody_applied)],
    "bucket_counter_not_reset": [(Reducer, "_collect", counter_is_not_reset)],
    "pipeline_scales_again": [(engine.Engine, "_backward_unit", scaled_at_every_stage)],
    "zero_sized_parameter": [(update, "_gradient_norm", mean_over_nothing)],
    "secondary_shard_padding": [(zeropp, "clear_padding_of", padding_is_not_cleared)],
    "universal_checkpoint": [(checkpoint, "_key_of", found_by_shape)],
    "adam_step_drift": [(update.Update, "_update_piece", each_call_is_a_step)],
    "init_saw_one_rank": [(engine, "stage_of", never_sharded)],
    "bucket_of_parameter_size": [(Reducer, "_collect", as_large_as_the_bucket)],
    "scheduler_one_rate": [(ParamGroup, "optimizer", first_rate_for_all)],
    "skipped_in_silence": [(SkippedSteps, "report", not_reported)],
    "parameter_reduced": [(Reducer, "_redistributed", parameter_is_reduced)],
    "nan_norm_passes_clipping": [(update, "_overflowed", nothing_overflows),
                                 (update, "_gradient_norm", nan_is_not_above)],
    "buckets_across_shards": [(Reduction, "start", equal_pieces)],
    "ring_off_by_one": [(hub, "steps_of", owner_off_by_one)],
    "set_orders_buckets": [(ParamGroup, "buckets", order_of_a_set)],
    "same_data_on_every_rank": [(Reducer, "_redistributed", nothing_is_reduced)]})
