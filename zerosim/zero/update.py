"""Wide stand-ins: arithmetic in fp32 on arrays that rest in fewer bits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.checks import is_number
from zerosim.numerics.loss_scale import LossScaler
from zerosim.optim.base import UpdateContext
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Entry, ParameterPiece, Region
from zerosim.zero.param_group import States, at
from zerosim.zero.placements import SHARDED, Placement
from zerosim.zero.unshard import Refresh

FP32 = np.dtype(np.float32)


@contextmanager
def wide(kernels: Any, empty: Callable[[str, tuple[int, ...]], np.ndarray],
         at_rest: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The arrays in fp32: those that are so already themselves, the others as copies, in ``empty(name, shape)``.

    On exit what was written to a copy is rounded to its array's format, to nearest even, once.
    """
    copies = {name: array if array.dtype == FP32 else empty(name, array.shape) for name, array in at_rest.items()}
    narrow = [name for name, copy in copies.items() if copy is not at_rest[name]]
    for name in narrow:
        kernels.cast_pack(at_rest[name], copies[name])
    yield copies
    for name in narrow:
        kernels.cast_pack(copies[name], at_rest[name])


# -- What no rank sees alone: whether a gradient overflowed, its norm, and the norms of single tensors ---------------
# Legend: N ranks, E tensors. A sum of squares is one float64 per owner, over what it owns, parameter by parameter and in
# fixed blocks; the owners' sums are added in rank order. So the result depends on the layout and on nothing else: ranks
# that hold everything add the same partial sums as ranks that hold a shard each.


def overflowed(families: Sequence[States]) -> bool:
    """True on every rank when any rank saw inf or NaN in what it updates."""
    rank, scanned = families[0].rank, _scanned(families)
    mine = not all(map(rank.kernels.all_finite, scanned))
    rank.trace.compute(nbytes=sum(sums.nbytes for sums in scanned))
    return bool(told(families[0], np.array([mine], np.uint8)).any())


def _scanned(families: Sequence[States]) -> list[np.ndarray]:
    """The sums of gradients that this rank updates with, without padding."""
    return [states.gradient_sum.array[at(piece, states.gradient_sum.placement)]
            for states in families for piece in states.regions_held(states.stage.optimizer)]


def gradient_norm(families: Sequence[States]) -> float:
    """The global norm of the mean gradient: every element of every parameter of the families counted once."""
    mine = []
    for owner in owners(families[0]):
        partial = 0.0  # plain additions: from CPython 3.12 on sum() compensates, which gives other bits
        for states in families:
            for piece in states.layout.parameter_pieces(owner):
                partial += _squares_of_chunk(states, piece)
        mine.append(partial)
    families[0].rank.trace.compute(nbytes=sum(sums.nbytes for sums in _scanned(families)))
    return rooted(told(families[0], np.array(mine, np.float64)))


def _squares_of_chunk(states: States, piece: ParameterPiece) -> float:
    reduced = states.gradient_sum
    squares: float = states.rank.kernels.sum_of_squares(reduced.array[at(piece, reduced.placement)], reduced.divisor)
    return squares


def tensor_norms_over_ranks(states: States, names: Sequence[str],
                 squares: Callable[[ParameterPiece], tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """For each named tensor two norms, of which ``squares`` gives the sums of squares piece by piece."""
    if not names:
        return {}
    mine = []
    for owner in owners(states):
        pieces = {piece.entry.name: piece for piece in states.layout.parameter_pieces(owner)}
        mine.append([squares(pieces[name]) if name in pieces else (0.0, 0.0) for name in names])
    table = told(states, np.array(mine, np.float64).reshape(-1)).reshape(-1, len(names), 2)
    return {name: (rooted(table[:, at, 0]), rooted(table[:, at, 1])) for at, name in enumerate(names)}


def owners(states: States) -> Sequence[int]:
    """Whose partial sums this rank computes: its own where state is sharded, else everybody's."""
    return [states.rank.index] if states.stage.optimizer is SHARDED else range(states.rank.size)


def told(states: States, mine: np.ndarray) -> np.ndarray:
    """What every rank found, in rank order; nothing is sent where each knows all."""
    if states.stage.optimizer is not SHARDED:
        return mine
    found: np.ndarray = states.rank.all_gather(mine, purpose="control")
    return found


def rooted(partials: np.ndarray) -> float:
    """The root of (N,) sums of squares, added from rank 0 on; NaN where there is one among them."""
    total = 0.0
    for squares in partials:
        total += float(squares)
    return math.sqrt(total)


# -- The optimizer's work on pieces of parameters, block by block ----------------------------------------------------
# Legend: n elements of a piece. The gradient's fp32 copy never exists as a whole: fp32(sum) / divisor is made per block.


Norms = tuple[float, float]  # of a tensor's weights, and of the direction of its update


@dataclass(frozen=True, slots=True)
class Moment:
    """What all updates of one step share: its number, the factor of clipping, the schedule's factor of lr, and the
    factors of activations and output gradients by weight."""

    step: int
    clip_factor: float = 1.0
    lr_factor: float | None = None
    factors: Mapping[str, Any] = field(default_factory=dict)

    def optimizer(self, optimizer: Any) -> Any:
        """The optimizer with the lr of this step, where a schedule changes it."""
        return optimizer if self.lr_factor is None else optimizer.with_lr(optimizer.lr * self.lr_factor)


def blocks(states: States, piece: ParameterPiece,
           moment: Moment) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """(w, g, state) of a piece in blocks, all fp32 (n,): the arrays at rest, or wide copies that are rounded back."""
    kernels, divisor = states.rank.kernels, states.gradient_sum.divisor
    w, s, slots = _at_rest(states, piece)
    g32 = kernels.scratch("gradient", min(kernels.BLOCK, len(w)), FP32)
    for here in spans(len(w), kernels.BLOCK):
        g = g32[:here.stop - here.start]
        kernels.gradient_block(s[here], divisor, moment.clip_factor, g)
        at_rest = {name: slot[here] for name, slot in slots.items()} | {"": w[here]}
        with wide(kernels, partial(_scratch, kernels), at_rest) as arrays:
            yield arrays[""], g, {name: arrays[name] for name in slots}


def _at_rest(states: States, piece: ParameterPiece) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The piece of the master, of the reduced gradient and of each slot."""
    reduced = states.gradient_sum
    return (states.master[at(piece, states.master_placement)], reduced.array[at(piece, reduced.placement)],
            {name: states.slot(piece, name) for name in states.slots_of(piece.entry)})


def _scratch(kernels: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Memory of the kernels' for the wide copy of one block of a slot, or of the weights."""
    found: np.ndarray = kernels.scratch(f"wide {name}", shape[0], FP32)
    return found


def update_piece(states: States, piece: ParameterPiece, moment: Moment, norms_of_tensor: Norms | None) -> None:
    """One step on a piece of a parameter whose state may be cut anywhere."""
    optimizer = moment.optimizer(states.optimizers[piece.entry.name])
    ctx = UpdateContext(states.rank.kernels, norms=norms_of_tensor)
    for w, g, state in blocks(states, piece, moment):
        optimizer.apply(ctx, w, g, state, moment.step)
    note_update(states, *_at_rest(states, piece))


def note_update(states: States, w: np.ndarray, s: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
    """What an update moves, which is what it costs on any hardware: the gradient is read, the rest read and written.

    The operations per element differ from one optimizer to the next, and none takes longer than its memory traffic.
    """
    states.rank.trace.compute(nbytes=s.nbytes + 2 * (w.nbytes + sum(slot.nbytes for slot in slots.values())))


def tensor_norms(states: States, moment: Moment) -> dict[str, Norms]:
    """The first half of the step of optimizers that need norms of whole tensors: moves the moments, and measures."""
    names = [name for name, optimizer in states.optimizers.items() if "tensor_norm" in optimizer.needs]
    return tensor_norms_over_ranks(states, names, partial(_squares, states, moment))


def _squares(states: States, moment: Moment, piece: ParameterPiece) -> Norms:
    """The sums of squares of a piece's weights and of the direction in which its moments, moved now, point.

    The direction is that of the moments as they rest, rounded to their format: `update_piece` finds the same.
    """
    optimizer, kernels = moment.optimizer(states.optimizers[piece.entry.name]), states.rank.kernels
    ctx, direction = UpdateContext(kernels), kernels.scratch("direction", min(kernels.BLOCK, piece.count), FP32)
    weights = directions = 0.0
    for w, g, state in blocks(states, piece, moment):
        optimizer.advance(ctx, w, g, state, moment.step)
    for w, g, state in blocks(states, piece, moment):
        optimizer.direction(ctx, w, g, state, moment.step, direction[:len(w)])
        weights += kernels.sum_of_squares(w)
        directions += kernels.sum_of_squares(direction[:len(w)])
    return weights, directions


# -- The optimizer's work on whole tensors: where one rank owns all of it, or after its pieces have been gathered ----
# Legend: a tensor has its parameter's own shape. No optimizer ever updates part of a matrix.


def is_torn(states: States, entry: Entry) -> bool:
    """True where more than one rank owns elements of a tensor whose optimizer state is sharded."""
    owners = sum(low < high for low, high in pairwise(states.layout.cut(entry.low, entry.high)))
    return states.stage.optimizer is SHARDED and owners > 1


def update_tensor(states: States, piece: ParameterPiece, moment: Moment) -> None:
    """One step on a tensor that lies whole on this rank."""
    entry, reduced = piece.entry, states.gradient_sum
    state = {name: slot.reshape(entry.shape) if states.is_flat(entry, name) else slot
             for name in states.slots_of(entry) for slot in [states.slot(piece, name)]}
    w = states.master[at(piece, states.master_placement)].reshape(entry.shape)
    _step(states, entry, w, reduced.array[at(piece, reduced.placement)].reshape(entry.shape), state, moment)


def update_gathered(states: States, entry: Entry, moment: Moment) -> None:
    """One step on a tensor that lies on several ranks: all gather it and its state, and each keeps its own piece.

    Every rank takes part in the gathers; only those that own a piece compute.
    """
    reduced, cut = states.gradient_sum, states.layout.cut(entry.low, entry.high)
    flat = [name for name in states.slots_of(entry) if states.is_flat(entry, name)]
    own = {name: _own_slot(states, entry, name) for name in flat}
    own[""] = _own(states, entry, states.master, states.master_placement)
    whole = {name: states.rank.all_gather(part, splits=cut, purpose="state").reshape(entry.shape)
             for name, part in own.items()}
    s = states.rank.all_gather(_own(states, entry, reduced.array, reduced.placement), splits=cut, purpose="state")
    here = slice(cut[states.rank.index], cut[states.rank.index + 1])
    if here.start == here.stop:
        return
    others = {name: states.own_slots[entry.name, name] for name in states.slots_of(entry) if name not in flat}
    _step(states, entry, whole[""], s.reshape(entry.shape), {name: whole[name] for name in flat} | others, moment)
    for name, part in own.items():
        part[...] = whole[name].reshape(-1)[here]


def _step(states: States, entry: Entry, w: np.ndarray, s: np.ndarray, state: dict[str, np.ndarray],
          moment: Moment) -> None:
    """One update of a whole tensor in fp32; the gradient and what rests in fewer bits are widened in workspace."""
    rank, optimizer = states.rank, moment.optimizer(states.optimizers[entry.name])
    empty = partial(rank.memory.alloc, dtype=FP32, kind="workspace", name=entry.name)
    g = empty(entry.shape)
    rank.kernels.gradient_block(s, states.gradient_sum.divisor, moment.clip_factor, g)
    ctx = UpdateContext(rank.kernels, factors=moment.factors.get(entry.name), alloc=empty,
                        note=rank.trace.compute)
    with wide(rank.kernels, lambda _, shape: empty(shape), {**state, "": w}) as arrays:
        optimizer.apply(ctx, arrays[""], g, {name: arrays[name] for name in state}, moment.step)
    note_update(states, w, s, state)


def _own(states: States, entry: Entry, array: np.ndarray, placement: Placement) -> np.ndarray:
    """This rank's elements of a tensor, in an array at rest."""
    if placement is SHARDED:
        return array[states.layout.owned(states.rank.index, entry.low, entry.high)]
    cut = states.layout.cut(entry.low, entry.high)
    return array[entry.low + cut[states.rank.index]:entry.low + cut[states.rank.index + 1]]


def _own_slot(states: States, entry: Entry, name: str) -> np.ndarray:
    """This rank's elements of a flat slot; none where it owns none of the tensor."""
    if name in states.slots and (entry.name, name) not in states.own_slots:
        return _own(states, entry, states.slots[name], SHARDED)
    nothing: np.ndarray = states.rank.kernels.empty(0, states.slot_dtype(states.slots_of(entry)[name]))
    return states.own_slots.get((entry.name, name), nothing)


# -- Factors of inputs and output gradients (K-FAC): observed layer by layer, averaged over ranks --------------------
# Legend: M rows (samples, or tokens) of a micro-batch, I inputs, O outputs; N ranks, k micro-batches; S loss scale.
# A = mean over rows of x xᵀ (I, I); G = mean over rows of g gᵀ (O, O), g the gradient of a row's own loss with respect to
# the layer's output: backward hands over dy = S·g/M, or S·g/(M·f) where the loss is the mean over the share f of places
# that have a target; g is 0 in the others. Source: Martens & Grosse 2015 (arXiv:1503.05671), section 3.


Factors = tuple[np.ndarray, np.ndarray]
_LARGEST_POWER = 32  # of S, whose square fp32's products still hold with room for gradients


class Observer:
    """The factors of one rank's layers; ``wanted`` names the weights that are updated with them."""

    def __init__(self, rank: Rank, wanted: frozenset[str], loss_scale: LossScaler) -> None:
        self.rank, self.wanted, self.loss_scale = rank, wanted, loss_scale
        self.share = 1.0  # f, of the micro-batch that goes back
        self._sums: dict[str, Factors] = {}
        self._rows: dict[str, int] = {}

    def observe(self, weight: str, x: np.ndarray, dy: np.ndarray) -> None:
        """Adds the products of one micro-batch: x (M, I), dy (M, O)."""
        if weight not in self.wanted:
            return
        rows = x.shape[0]
        dy, scale = self._within_range(dy)
        products = (self._product(x, weight), self._product(dy, weight))
        self.rank.kernels.multiply_rounded(products[0], 1 / rows, products[0])
        self.rank.kernels.multiply_rounded(products[1], _over(rows * self.share**2, scale**2), products[1])
        for total, product in zip(self._sums.get(weight, ()), products, strict=False):
            self.rank.kernels.add_rounded(total, product, product)
        self._sums[weight] = products
        self._rows[weight] = self._rows.get(weight, 0) + 1

    def _within_range(self, dy: np.ndarray) -> tuple[np.ndarray, float]:
        """dy and its scale S; both divided by a power of two where S² would come near the ends of fp32's range."""
        scale = self.loss_scale.scale
        power = math.frexp(scale)[1] - 1
        if abs(power) <= _LARGEST_POWER:
            return dy, scale
        out = self.rank.kernels.scratch("scaled output gradients", dy.size, np.float32).reshape(dy.shape)
        self.rank.kernels.divide_rounded(dy, math.ldexp(1.0, power), out)
        return out, math.ldexp(scale, -power)

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        out = self.rank.memory.alloc((x.shape[1], x.shape[1]), np.float32, "workspace", f"factor of {name}")
        self.rank.kernels.matmul(x.T, x, out=out)
        return out

    def averaged(self) -> dict[str, Factors]:
        """The means over ranks and micro-batches, by weight: two all-reduces each, under the purpose "state"."""
        found = {}
        for weight, factors in self._sums.items():
            for factor in factors:
                self.rank.all_reduce(factor, out=factor, purpose="state")
                self.rank.kernels.divide_rounded(factor, self.rank.size * self._rows[weight], factor)
            found[weight] = factors
        self.forget()
        return found

    def forget(self) -> None:
        """Drops what was observed."""
        self._sums, self._rows = {}, {}


def _over(rows: float, square: float) -> float:
    """rows/S²; inf where S has come to 0: the step is skipped, as its gradients are no numbers."""
    return rows / square if square else math.inf


# -- From the reduced gradient to updated parameters: overflow check, norm, clipping, optimizer, cast ----------------
# Legend: n elements of the padded vector, s of this rank's shard; N ranks, k micro-batches; S loss scale.


Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """This rank's losses (one per micro-batch), whether all ranks skipped, the global gradient norm, the loss scale.

    The norm is that of the mean gradient, before clipping; the scale is the S of this step. On a skipped step, where
    some rank saw inf or NaN, ``norm`` is NaN and nothing was changed but a dynamic loss scale.

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


class Update:
    """The optimizer's part of the step, on the pieces that this rank updates."""

    def __init__(self, refresh: Mapping[States, Refresh], loss_scale: LossScaler, clip_norm: float | None,
                 schedule: Schedule | None) -> None:
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r} must be positive; pass None for no clipping")
        self.refresh, self.families = refresh, [states for states in refresh if not states.frozen]
        self.loss_scale, self.clip_norm, self.schedule = loss_scale, clip_norm, schedule
        self.steps_taken = 0

    @property
    def is_ready(self) -> bool:
        """True between reduce() and update()."""
        return any(states.reduced is not None for states in self.families)

    def forget(self) -> None:
        """Drops the reduced gradients."""
        for states in self.families:
            states.reduced = None

    def step(self, losses: tuple[float, ...], factors: Mapping[str, Any], tokens: tuple[int, ...],
             places: tuple[int, ...]) -> StepResult:
        """Updates, or skips on every rank when any saw inf or NaN. Raises ValueError before reduce()."""
        if not self.is_ready:
            raise ValueError("update() was called without a reduced gradient; call reduce() first")
        scale = self.loss_scale.scale
        norm = math.nan if overflowed(self.families) else gradient_norm(self.families)
        skipped = not math.isfinite(norm)  # inf: the sum is finite, and dividing it by a scale below 1 is not
        if not skipped:
            step = self.steps_taken + 1
            moment = Moment(step, self._clip_factor(norm), self.lr_factor(step), factors)
            for states in self.families:
                self._update(states, moment)
            self.steps_taken = step
        self.loss_scale.update(skipped)
        self.forget()
        return StepResult(losses, skipped, math.nan if skipped else norm, scale, tokens, places)

    def _clip_factor(self, norm: float) -> float:
        return self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0

    def lr_factor(self, step: int) -> float | None:
        """The schedule's factor of every lr in a step, counted from 1; None without a schedule."""
        return None if self.schedule is None else float(self.schedule(step))

    def _update(self, states: States, moment: Moment) -> None:
        measured = tensor_norms(states, moment)
        for index, region in enumerate(states.layout.regions):
            _update_region(states, region, moment, measured)
            _cast_to_compute(states, index)
            self.refresh[states].updated(region)


def _update_region(states: States, region: Region, moment: Moment, measured: Mapping[str, Norms]) -> None:
    """Updates what this rank updates of one region, tensor by tensor in the order of the vector."""
    own = {piece.entry.name: piece for piece in states.pieces_in(region)}
    for entry, _, _ in states.layout.entries_in(region.low, region.high):
        piece = own.get(entry.name)
        anywhere = states.optimizers[entry.name].cut_of(entry.shape) == "anywhere"
        if not anywhere and is_torn(states, entry):
            update_gathered(states, entry, moment)
        elif piece is not None:
            if anywhere:
                update_piece(states, piece, moment, measured.get(entry.name))
            else:
                update_tensor(states, piece, moment)


def _cast_to_compute(states: States, region: int) -> None:
    """Rounds the updated master of one region to the compute format, as far as this rank has both."""
    if states.parameter_is_master:
        return
    stage = states.stage
    narrower = SHARDED if SHARDED in (stage.parameters, stage.optimizer) else stage.optimizer
    piece = states.regions_held(narrower)[region]
    master, parameter = states.master[at(piece, stage.optimizer)], states.parameter[at(piece, stage.parameters)]
    states.rank.kernels.cast_pack(master, parameter)
    states.rank.trace.compute(nbytes=master.nbytes + parameter.nbytes)
