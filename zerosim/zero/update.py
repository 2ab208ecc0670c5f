"""From the reduced gradient to updated parameters: overflow check, norm, clipping, optimizer, cast.

Legend: n elements of the padded vector, s of this rank's shard; N ranks, k micro-batches; S loss scale.
The gradient's fp32 copy never exists as a whole: fp32(sum) / (S * N * k) is made block by block.
"""

import math
from dataclasses import dataclass

import numpy as np

from zerosim.numerics.blocks import BLOCK, spans
from zerosim.numerics.checks import is_number
from zerosim.optim.base import Optimizer
from zerosim.zero.layout import Piece
from zerosim.zero.placements import SHARDED, Placement
from zerosim.zero.states import States, at


@dataclass(frozen=True, slots=True)
class StepResult:
    """This rank's losses (one per micro-batch), whether all ranks skipped, the global gradient norm, the loss scale.

    On a skipped step, where some rank saw inf or NaN, ``norm`` is NaN and nothing was changed.
    """

    losses: tuple[float, ...]
    skipped: bool
    norm: float
    scale: float


@dataclass(slots=True)
class Reduced:
    """The gradient's sum over ranks, how it rests, and by what it is divided to be the mean."""

    array: np.ndarray
    placement: Placement
    divisor: float


class Update:
    """The optimizer's part of the step, on the pieces that this rank updates."""

    def __init__(self, states: States, optimizer: Optimizer, clip_norm: float | None) -> None:
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r} must be positive; pass None for no clipping")
        self.states, self.optimizer, self.clip_norm = states, optimizer, clip_norm
        self.rank, self.kernels = states.rank, states.rank.kernels
        self.steps_taken = 0
        self.reduced: Reduced | None = None

    @property
    def own_pieces(self) -> list[Piece]:
        """What this rank updates: its own pieces, or all where the optimizer's state is replicated."""
        return self.states.pieces(self.states.stage.optimizer)

    def take(self, array: np.ndarray, placement: Placement, micro_batches: int) -> None:
        """Receives the reduced gradient, (n,) or (s,)."""
        self.reduced = Reduced(array, placement, self.states.policy.divisor(self.rank.size, micro_batches))

    def step(self, losses: tuple[float, ...]) -> StepResult:
        """Updates, or skips on every rank when any saw inf or NaN. Raises ValueError before ``take``."""
        reduced = self.reduced
        if reduced is None:
            raise ValueError("update() was called without a reduced gradient; call reduce() first")
        scale = self.states.policy.loss_scale
        norm = math.nan if self._overflowed(reduced) else self._norm(reduced)
        if not math.isfinite(norm):  # inf: the sum is finite, and dividing it by a scale below 1 is not
            self.reduced = None
            return StepResult(losses, True, math.nan, scale)
        factor = self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0
        self.steps_taken += 1
        for piece in self.own_pieces:
            self._update_piece(piece, reduced, factor)
        self._cast_to_compute()
        self.reduced = None
        return StepResult(losses, False, norm, scale)

    @property
    def _sharded(self) -> bool:
        """True where no rank sees all of the reduced gradient, so that what it saw must be told."""
        return self.states.stage.optimizer is SHARDED

    def _overflowed(self, reduced: Reduced) -> bool:
        mine = not all(self.kernels.all_finite(reduced.array[at(p, reduced.placement)]) for p in self.own_pieces)
        return bool(self._told(np.array([mine], np.uint8)).any())

    def _norm(self, reduced: Reduced) -> float:
        """Each owner's sum of squares in float64, over its valid elements in fixed blocks; added in rank order."""
        owners = [self.rank.index] if self._sharded else range(self.rank.size)
        partials = [sum(self.kernels.sum_of_squares(reduced.array[at(piece, reduced.placement)], reduced.divisor)
                        for piece in self.states.layout.valid(owner)) for owner in owners]
        total = 0.0
        for partial in self._told(np.array(partials, np.float64)):
            total += float(partial)
        return math.sqrt(total)

    def _told(self, mine: np.ndarray) -> np.ndarray:
        """What every rank found, in rank order; nothing is sent where each knows all."""
        return self.rank.all_gather(mine, purpose="control") if self._sharded else mine

    def _update_piece(self, piece: Piece, reduced: Reduced, factor: float) -> None:
        states = self.states
        w = states.master[at(piece, states.master_placement)]
        s = reduced.array[at(piece, reduced.placement)]
        slots = {name: slot[at(piece, states.stage.optimizer)] for name, slot in states.slots.items()}
        g32 = self.kernels.empty(min(BLOCK, len(w)), np.float32)
        for here in spans(len(w)):
            g = g32[:here.stop - here.start]
            self.kernels.gradient_block(s[here], reduced.divisor, factor, g)
            self.optimizer.update(
                self.kernels, w[here], g, {name: slot[here] for name, slot in slots.items()}, self.steps_taken
            )

    def _cast_to_compute(self) -> None:
        """Rounds the updated master to the compute format, as far as this rank has both."""
        states = self.states
        if states.parameter_is_master:
            return
        for piece in states.pieces(SHARDED if SHARDED in (states.stage.parameters, states.stage.optimizer)
                                   else states.stage.parameters):
            self.kernels.cast_pack(states.master[at(piece, states.stage.optimizer)],
                                   states.parameter[at(piece, states.stage.parameters)])
