"""From the reduced gradient to updated parameters: overflow check, norm, clipping, optimizer on the own shard, cast.

`Update.step` is the story. Beside what a rank owns, it needs a few numbers of all ranks: whether one of them saw an
overflow, the gradient's norm, and for some optimizers the norms of tensors or whole tensors. A sum of squares is one
float64 per owner, over what it owns, parameter by parameter and in fixed blocks; the owners' sums are added in rank
order. So the result depends on the layout and on nothing else: ranks that hold everything add the same partial sums as
ranks that hold a shard each. Arithmetic is in fp32, on copies of what rests in fewer bits; the gradient's fp32 copy
never exists as a whole: fp32(sum) / divisor is made per block.

Legend: n elements of a piece of a parameter; N ranks, k micro-batches; S loss scale. In the code w are master weights,
gradient the sum over ranks as it rests, g its mean in fp32.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.checks import FP32, is_number
from zerosim.optim.base import UpdateContext, round_back, upcast
from zerosim.ranks.workers import Result
from zerosim.zero.layout import LayoutEntry, ParameterPiece, Region
from zerosim.zero.param_group import GRADIENT, MASTER, ParamGroup, StepContext
from zerosim.zero.placements import SHARDED
from zerosim.zero.skipped import SkippedSteps
from zerosim.zero.unshard import ParameterAllGather
from zerosim.zero.whole_tensors import update_gathered, update_tensor

Schedule = Callable[[int], float]
Norms = tuple[float, float]  # of a tensor's weights, and of the direction of its update
Updates = Sequence[tuple[LayoutEntry, ParameterPiece | None]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """This rank's losses (one per micro-batch), whether all ranks skipped, the global gradient norm, the loss scale.

    The norm is that of the mean gradient, before clipping; the scale is the S of this step. On a skipped step, where
    some rank saw inf or NaN, ``norm`` is NaN and nothing was changed but a dynamic loss scale; see `SkippedSteps`.

    A loss is what the model's loss gives for the micro-batch. With ``normalization="own"`` that is the mean over its
    valid targets. With "global" it is the sum over them divided by all places, valid or not: the mean over the tokens
    of several micro-batches, or ranks, is then Σ loss·places / Σ tokens. ``tokens`` and ``places`` count each
    micro-batch's valid targets and all its targets.
    """

    losses: tuple[float, ...]
    skipped: bool
    norm: float
    scale: float
    tokens: tuple[int, ...]
    places: tuple[int, ...]


class Squares:
    """Sums of squares over all ranks: float64, each owner's by itself in fixed blocks, then added in rank order."""

    def of(self, kernels: Any, x: np.ndarray, divisor: float = 1.0) -> float:
        """The sum of (x/divisor)² over what one owner has of one parameter, or a block of it."""
        found: float = kernels.sum_of_squares(x, divisor)
        return found

    def roots(self, group: ParamGroup, mine: Sequence[Sequence[float]]) -> list[float]:
        """The root of each sum over owners; ``mine`` has a row for each owner whose sums this rank computes."""
        table = group.all_gather_scalars(np.array(mine, np.float64).reshape(-1)).reshape(-1, len(mine[0]))
        return [math.sqrt(total) for total in np.add.accumulate(table)[-1]]  # in rank order; np.sum promises none


class Update:
    """The optimizer's part of the step, on the pieces that this rank updates."""

    def __init__(self, all_gathers: Mapping[ParamGroup, ParameterAllGather], skipped_steps: SkippedSteps,
                 clip_norm: float | None, schedule: Schedule | None, squares: Squares) -> None:
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r} must be positive; pass None for no clipping")
        self.all_gathers = all_gathers
        self.trained: Sequence[ParamGroup] = [group for group in all_gathers if not group.frozen]
        self.store = self.trained[0].store
        self._updates = {group: [(region, group.updates_in(region)) for region in group.layout.regions]
                         for group in self.trained}
        self.skipped_steps, self.loss_scale = skipped_steps, skipped_steps.loss_scale
        self.clip_norm, self.schedule, self.squares = clip_norm, schedule, squares
        self.steps_taken = 0
        self._changing: str | None = None  # an update or a load that has begun, which stays so if it fails

    def step(self, losses: tuple[float, ...], factors: Mapping[str, Any], tokens: tuple[int, ...],
             places: tuple[int, ...]) -> StepResult:
        """Updates, or skips on every rank when any saw inf or NaN. Raises ValueError before reduce(), and
        NonFiniteGradients for too many skipped steps."""
        if not self.is_ready:
            raise ValueError("update() was called without a reduced gradient; call reduce() first")
        scale = self.loss_scale.scale
        norm = math.nan if _overflowed(self.trained) else _gradient_norm(self.trained, self.squares)
        skipped = not math.isfinite(norm)  # inf: the sum is finite, and dividing it by a scale below 1 is not
        if not skipped:
            step = self.steps_taken + 1
            clip_factor = self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0
            self._take(StepContext(step, clip_factor, self.lr_factor(step), factors))
        self.loss_scale.update(skipped)
        if skipped:
            self.skipped_steps.report(self.trained, self.steps_taken)
        self.abandon()
        return StepResult(losses, skipped, math.nan if skipped else norm, scale, tokens, places)

    def _take(self, context: StepContext) -> None:
        """Updates this rank's pieces of all param groups."""
        with self.changing_state(f"update of step {context.step}"):
            for group in self.trained:
                self._update_group(group, context)
            self.steps_taken = context.step

    def _update_group(self, group: ParamGroup, context: StepContext) -> None:
        tensor_norms = _tensor_norms(group, context, self.squares)
        for region, updates in self._updates[group]:
            update = partial(self._update_region, group, updates, context, tensor_norms)
            # As in norms and losses an element counts as one operation: in many short calls threads wait for Python's
            # lock (2026-11-25: steps of 4 ranks on 1e6 parameters took 19 ms, with a count of 64 they took 26).
            if any(entry.name in group.gathered for entry, _ in updates):
                update()
            else:
                group.rank.compute(update, operations=sum(piece.count for _, piece in updates if piece))
            self._region_updated(group, region)

    def _region_updated(self, group: ParamGroup, region: Region) -> None:
        """Hands a region that this rank has updated to the all-gather of parameters."""
        self.all_gathers[group].shard_updated(region)

    def _update_region(self, group: ParamGroup, updates: Updates, context: StepContext,
                       tensor_norms: Mapping[str, Norms]) -> None:
        """Updates what this rank updates of one region, tensor by tensor in the order of the vector, and casts it."""
        for entry, piece in updates:
            if piece is None or entry.name in group.gathered:
                update_gathered(group, entry, piece, context)
            elif group.is_elementwise(entry):
                self._update_piece(group, piece, context, tensor_norms.get(entry.name))
            else:
                update_tensor(group, piece, context)

    def _update_piece(self, group: ParamGroup, piece: ParameterPiece, context: StepContext,
                      norms: Norms | None) -> None:
        """One step on a piece of a parameter whose state may be cut anywhere, block by block."""
        optimizer, store, at_rest = group.optimizer(piece.entry, context), group.store, group.at_rest(piece)
        ctx, cast_nbytes = UpdateContext(store.workplace.kernels, norms=norms), 0
        for here, arrays in store.updating(at_rest, piece.count, unchanged=(GRADIENT,)):
            for w, g, state in _blocks(group, arrays, context):
                optimizer.apply(ctx, w, g, state, context.step)
            cast_nbytes += group.cast(piece, here, arrays[MASTER])
        group.note_update(at_rest, cast_nbytes)

    def lr_factor(self, step: int) -> float | None:
        """The schedule's factor of every lr in a step, counted from 1; None without a schedule."""
        return None if self.schedule is None else float(self.schedule(step))

    @contextmanager
    def changing_state(self, what: str) -> Iterator[None]:
        """The block goes from one whole state to the next. If it fails no step may follow."""
        self._changing = what
        yield
        self._changing = None

    def after_load(self, *, masters: bool = True) -> None:
        """Makes anew, of ``masters`` if they were loaded too, what an option keeps beside state; here nothing."""

    def settings(self) -> dict[str, str]:
        """The settings by name, as text, on which the bits of later steps depend, beside the schedule."""
        return {"clip_norm": str(self.clip_norm)}

    def abandon(self) -> None:
        """Drops the reduced gradients."""
        for group in self.trained:
            group.reduced = None

    @property
    def is_ready(self) -> bool:
        """True between reduce() and update()."""
        return any(group.reduced is not None for group in self.trained)

    def refuse_if_broken_off(self) -> None:
        """Raises ValueError after an update, or a load, that failed on this rank."""
        if self._changing is not None:
            raise ValueError(f"the {self._changing} was broken off, and some weights are those from before, others "
                             "those from after it; make a new engine, or load a checkpoint")

    @property
    def is_out_of_date(self) -> bool:
        """True while other ranks have newer shards than this rank's copy."""
        return any(all_gather.is_out_of_date for all_gather in self.all_gathers.values())

    def refuse_if_out_of_date(self, call: str) -> None:
        """Raises ValueError before the all-gather of parameters."""
        if self.is_out_of_date:
            raise ValueError(f"{call}() was called after an update whose shards the other ranks have not yet; call "
                             "all_gather_parameters() first")


# -- overflow and norm ------------------------------------------------------------------------------------------------


def _overflowed(groups: Sequence[ParamGroup]) -> bool:
    """True on every rank when any rank saw inf or NaN in what it updates."""
    mine = np.array([_read_gradients(groups, partial(_has_overflowed, groups))], np.uint8)
    return bool(groups[0].all_gather_scalars(mine).any())


def _has_overflowed(groups: Sequence[ParamGroup]) -> bool:
    return not all(group.rank.kernels.all_finite(x) for group in groups for piece in group.held
                   for x in group.store.read_stretches(group.gradient_sum(piece)))


def _gradient_norm(groups: Sequence[ParamGroup], squares: Squares) -> float:
    """The global norm of the mean gradient: every element of every parameter of the groups counted once."""
    mine = _read_gradients(groups, partial(_squares_by_owner, groups, squares))
    return squares.roots(groups[0], mine)[0]


def _squares_by_owner(groups: Sequence[ParamGroup], squares: Squares) -> list[list[float]]:
    """For each owner whose sum this rank computes, that of the squares of all that it has, in a row of its own."""
    mine = []
    for owner in _owners(groups[0]):
        total: float = 0  # plain additions: from CPython 3.12 on sum() compensates, which gives other bits
        for group in groups:
            for piece in group.layout.parameter_pieces(owner):
                total += _sum_of_squares(group, group.gradient_sum(piece), squares)
        mine.append([total])
    return mine


def _sum_of_squares(group: ParamGroup, gradient: np.ndarray, squares: Squares) -> float:
    """The sum of a piece's squares, block by block, however it is cut in stretches."""
    divisor = group.reduced_gradient.divisor
    total: float = 0
    for x in group.store.read_stretches(gradient):
        kernels = group.rank.kernels.serving(x)
        for block in spans(len(x), kernels.BLOCK):
            total += squares.of(kernels, x[block], divisor)
    return total


def _read_gradients(groups: Sequence[ParamGroup], work: Callable[[], Result]) -> Result:
    """The result of work that reads once the sums of gradients that this rank updates with; notes that."""
    own = [group.gradient_sum(piece) for group in groups for piece in group.held]
    groups[0].store.note("gradient", sum(gradient.nbytes for gradient in own))
    return groups[0].rank.compute(work, operations=sum(gradient.size for gradient in own))


def _owners(group: ParamGroup) -> Sequence[int]:
    """The ranks whose partial sums this one computes: itself where state is sharded, else all."""
    return [group.rank.index] if group.stage.optimizer is SHARDED else range(group.rank.size)


# -- the optimizer on what this rank owns -----------------------------------------------------------------------------


def _blocks(group: ParamGroup, arrays: Mapping[str, np.ndarray],
            context: StepContext) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """(w, g, state) of a stretch in blocks, all fp32 (n,): the arrays themselves, or copies that are rounded back."""
    kernels, divisor = group.store.workplace.kernels, group.reduced_gradient.divisor
    gradient, state = arrays[GRADIENT], {name: x for name, x in arrays.items() if name != GRADIENT}
    g32 = kernels.scratch("gradient", min(kernels.BLOCK, len(gradient)), FP32)
    for here in spans(len(gradient), kernels.BLOCK):
        g = g32[:here.stop - here.start]
        kernels.gradient_block(gradient[here], divisor, context.clip_factor, g)
        at_rest = {name: x[here] for name, x in state.items()}
        wide = upcast(kernels, lambda name, shape: kernels.scratch(f"upcast {name}", shape[0], FP32), at_rest)
        yield wide[MASTER], g, {name: x for name, x in wide.items() if name != MASTER}
        round_back(kernels, wide, at_rest)


# -- optimizers that need norms of whole tensors ----------------------------------------------------------------------


def _tensor_norms(group: ParamGroup, context: StepContext, squares: Squares) -> dict[str, Norms]:
    """Takes the first half of these optimizers' step: moves the moments, and measures norms over all ranks."""
    names = [name for name, optimizer in group.optimizers.items() if "tensor_norm" in optimizer.needs]
    if not names:
        return {}
    mine = []
    for owner in _owners(group):
        pieces = {piece.entry.name: piece for piece in group.layout.parameter_pieces(owner)}
        mine.append([one for name in names for one in (
            _advance_and_measure(group, pieces[name], context, squares) if name in pieces else (0, 0))])
    roots = squares.roots(group, mine)
    return {name: (weights, direction) for name, weights, direction in zip(names, roots[::2], roots[1::2], strict=True)}


def _advance_and_measure(group: ParamGroup, piece: ParameterPiece, context: StepContext, squares: Squares) -> Norms:
    """Moves a piece's moments; returns the sums of squares of its weights, and of the direction that they give.

    The direction is that of the moments as they rest, rounded to their format: `_update_piece` finds the same.
    """
    optimizer, store, at_rest = group.optimizer(piece.entry, context), group.store, group.at_rest(piece)
    kernels = store.workplace.kernels
    ctx, direction = UpdateContext(kernels), kernels.scratch("direction", min(kernels.BLOCK, piece.count), FP32)
    weights: float = 0
    directions: float = 0
    for _, arrays in store.updating(at_rest, piece.count, unchanged=(GRADIENT, MASTER)):
        for w, g, state in _blocks(group, arrays, context):
            optimizer.advance(ctx, w, g, state, context.step)
    for _, arrays in store.updating(at_rest, piece.count, unchanged=at_rest.keys()):
        for w, g, state in _blocks(group, arrays, context):
            optimizer.direction(ctx, w, g, state, context.step, direction[:len(w)])
            weights += squares.of(kernels, w)
            directions += squares.of(kernels, direction[:len(w)])
    return weights, directions
