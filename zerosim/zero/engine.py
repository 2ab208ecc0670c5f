"""The engine: one rank's training step under any placement of parameters, gradients and optimizer state.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches;
B batch, I inputs, O outputs; S loss scale.
Source: Rajbhandari et al. 2020 (ZeRO), section 5; Micikevicius et al. 2018 (mixed precision), section 3.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from zerosim.models.context import Context
from zerosim.models.recompute import Recompute
from zerosim.models.units import Model, Unit, Weights
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.ranks.rank import Rank
from zerosim.zero import inspection
from zerosim.zero.gradients import Accumulator
from zerosim.zero.layout import layout_of, unit_shapes
from zerosim.zero.lending import Lender
from zerosim.zero.passes import Passes, Tape
from zerosim.zero.placements import REPLICATED, SHARDED, Stage, redistribute, stage_of
from zerosim.zero.states import FP32, States
from zerosim.zero.update import Reduced, StepResult, Update

Batch = tuple[np.ndarray, np.ndarray]


class Engine:
    """Trains ``model`` with ``optimizer`` on this rank; every rank of the group makes one and takes the same steps.

    ``stage`` is a ZeRO stage's number or a Stage of placements, ``layout`` "per_unit" or "contiguous", ``recompute`` a
    policy or its text, ``clip_norm`` the most that the global gradient norm may be (None: no limit). ``step`` does all;
    ``forward``, ``backward``, ``reduce``, ``update``, ``refresh`` are its parts, for who writes the loop by hand.
    """

    def __init__(
        self,
        rank: Rank,
        model: Model,
        optimizer: Optimizer,
        *,
        stage: int | Stage = 0,
        policy: Policy | None = None,
        layout: str = "per_unit",
        recompute: Recompute | str = "none",
        clip_norm: float | None = None,
    ) -> None:
        check_parts(rank, model, optimizer, policy)
        self.rank, self.model, self.optimizer = rank, model, optimizer
        self.stage, self.policy = stage_of(stage), policy or Policy()
        self.layout = layout_of(layout, unit_shapes(model.units), rank.size)
        self.states = States(rank, model, optimizer, self.layout, self.stage, self.policy)
        self.gradients = Accumulator(self.states, optimizer)
        self._update = Update(self.states, optimizer, clip_norm)
        self._lender = Lender(self.states)
        self._stale = False  # replicated parameters of which other ranks have newer shards
        ctx = Context(rank.xp, self.policy, rank.kernels, rank.memory, rank.trace.compute, self.gradients.views)
        self._passes = Passes(model, Recompute.parse(recompute), ctx, self._lender.weights, self.gradients.absorb, rank)

    # -- a step and its parts -------------------------------------------------------------------------------------

    def step(self, batches: Iterable[Batch]) -> StepResult:
        """One training step on k micro-batches (x (B, I), target (B, O)) of this rank; k is the same on all ranks.

        A step that raises leaves no gradients behind: the next one begins anew.
        """
        batches = checked_batches(batches)
        losses = []
        try:
            for x, target in batches:
                tape = self.forward(x, target)
                losses.append(tape.loss)
                self.backward(tape)
            self.reduce()
            result = self.update(losses)
        except BaseException:
            self.abandon()
            raise
        self.refresh()
        return result

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be finished."""
        self.gradients.reset()
        self._update.reduced = None

    def forward(self, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> a tape with the loss, for one backward.

        Values are rounded to the compute format, targets to fp32; indices stay as they are.
        """
        if self._stale:
            raise ValueError("forward() was called after an update whose shards the other ranks have not yet; "
                             "call refresh() first")
        first, loss = self.model.units[0], self.model.loss
        x = self._charged(x, self.policy.compute_dtype, "x", indices=first.integer_inputs)
        target = self._charged(target, FP32, "target", indices=loss.integer_targets)
        return self._passes.forward(x, target)

    def backward(self, tape: Tape) -> None:
        """Adds the gradients of S times the tape's loss to this step's, reduced as it goes where they rest sharded."""
        if not isinstance(tape, Tape):
            raise ValueError(f"backward() takes the tape that forward() returns, found {tape!r}")
        if self.reduced is not None:
            raise ValueError(
                "backward() was called between reduce() and update(), and would overwrite the reduced gradient; "
                "call update() first, or abandon()"
            )
        self._passes.backward(tape, self.policy.loss_scale)
        self.gradients.micro_batch += 1

    def reduce(self) -> None:
        """Gives the optimizer the gradient's sum over ranks, where that has not happened during backward."""
        if self.gradients.micro_batch == 0:
            raise ValueError("reduce() was called without a gradient; call backward(forward(x, target)) first")
        with self.rank.trace.span("reduce"):
            self._update.take(*self.gradients.reduce(), self.gradients.micro_batch)
        self.gradients.reset()

    def update(self, losses: Sequence[float] = ()) -> StepResult:
        """One optimizer step on what this rank updates, and its cast to the compute format; or none on overflow."""
        with self.rank.trace.span("update"):
            result = self._update.step(tuple(losses))
        self._stale = not result.skipped and self.stage.parameters is REPLICATED and self.stage.optimizer is SHARDED
        return result

    def refresh(self) -> None:
        """Makes replicated parameters equal again after an update of each rank's own shard: an all-gather."""
        if not self._stale:
            return
        self._stale = False
        with self.rank.trace.span("refresh"):
            for region in self.layout.regions:
                cut, whole = self.layout.cut(region.low, region.high), self.states.parameter[region.low:region.high]
                own = whole[cut[self.rank.index]:cut[self.rank.index + 1]]
                with self.rank.trace.span(region.name):
                    redistribute(self.rank, own, SHARDED, REPLICATED, cut, policy=self.policy, out=whole,
                                 purpose="parameters")

    # -- weights and state ----------------------------------------------------------------------------------------

    def weights(self, unit: Unit) -> AbstractContextManager[Weights]:
        """The unit's parameters by name, in the compute format: gathered on entry where sharded, freed on exit."""
        return self._lender.weights(unit)

    def state(self, name: str) -> dict[str, np.ndarray | None]:
        """The whole "parameter", "gradient" (the mean, fp32; None unless reduced), "master" and slots of one parameter.

        For inspection, on every rank at once: what is sharded is gathered, under the purpose "state". Raises
        ValueError for a name that the model does not have.
        """
        return inspection.state(self.states, name, self._update)

    @property
    def reduced(self) -> Reduced | None:
        """The gradient's sum over ranks, between reduce() and update()."""
        return self._update.reduced

    def _charged(self, values: np.ndarray, dtype: np.dtype[Any], name: str, *, indices: bool) -> np.ndarray:
        """A copy of one array of a micro-batch, charged as input: in this format, or as it is if it holds indices."""
        values = np.ascontiguousarray(values)
        if indices:
            dtype = values.dtype
        elif values.dtype.kind in "iu" or not values.dtype.isnative:
            values = values.astype(np.float64)
        charged = self.rank.memory.alloc(values.shape, dtype, "input", name)
        self.rank.kernels.cast_pack(values, charged)
        return charged



def check_parts(rank: Rank, model: Model, optimizer: Optimizer, policy: Policy | None) -> None:
    """Raises ValueError for what is no rank, no model, no policy, or no optimizer that may be cut anywhere."""
    if not isinstance(rank, Rank):
        raise ValueError(f"an engine is made by a rank program, found rank={rank!r}; write Engine(rank, model, ...) in "
                         "a program that a cluster runs")
    if not isinstance(model, Model):
        raise ValueError(
            f"model must be a zerosim model, found {type(model).__name__}; build one from units with Model([...])"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(
            f"policy must be a Policy, found {policy!r}; write zs.Policy({policy!r}) to compute in that format"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be an optimizer with its settings, found {optimizer!r}; write zs.optim.Adam(lr=...)"
        )
    if optimizer.cut != "anywhere" or optimizer.needs:
        raise ValueError(
            f"{type(optimizer).__name__} may be cut by {optimizer.cut} and needs "
            f"{', '.join(sorted(optimizer.needs)) or 'nothing'} beside its shard, but both layouts cut inside tensors; "
            "take an elementwise optimizer"
        )


def checked_batches(batches: Any) -> list[Batch]:
    """The micro-batches as a list; ValueError unless there is at least one, and each is a pair."""
    listed = list(batches) if isinstance(batches, Iterable) else []
    pairs = sum(isinstance(batch, tuple | list) and len(batch) == 2 for batch in listed)
    if not listed or pairs != len(listed):
        raise ValueError(f"a step takes micro-batches (x, target), at least one; found {len(listed)} items, {pairs} of "
                         "them pairs. Pass [(x, target), ...]")
    return listed
