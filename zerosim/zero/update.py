"""From the reduced gradient to updated parameters: overflow check, norm, clipping, optimizer, cast.

Legend: n elements of the padded vector, s of this rank's shard; N ranks, k micro-batches; S loss scale.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.numerics.checks import is_number
from zerosim.numerics.loss_scale import LossScaler
from zerosim.zero import norms
from zerosim.zero.layout import Region
from zerosim.zero.pieces import Moment, Norms, tensor_norms, update_piece
from zerosim.zero.placements import SHARDED
from zerosim.zero.refresh import Refresh
from zerosim.zero.states import States, at
from zerosim.zero.tensors import is_torn, update_gathered, update_tensor

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
        norm = math.nan if norms.overflowed(self.families) else norms.gradient_norm(self.families)
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
