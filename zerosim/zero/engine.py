"""The engine: one rank's training step under any placement of parameters, gradients and optimizer state.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches;
B batch, I inputs, O outputs; S loss scale.
Source: Rajbhandari et al. 2020 (ZeRO), section 5; Micikevicius et al. 2018 (mixed precision), section 3.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from zerosim.models.context import Context, Note
from zerosim.models.recompute import Recompute
from zerosim.models.units import Model, Unit, Weights
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.ranks.rank import Rank
from zerosim.shown import Shown
from zerosim.zero import inspection
from zerosim.zero.accumulator import Accumulator
from zerosim.zero.checks import check_levers, check_optimizers, check_parts, checked_batches
from zerosim.zero.factors import Factors, Observer
from zerosim.zero.groups import Group, kin_of, settings_of
from zerosim.zero.layout import Layout
from zerosim.zero.lending import Lender
from zerosim.zero.micro_batches import MicroBatches
from zerosim.zero.passes import Passes, Tape
from zerosim.zero.placements import Stage, stage_of
from zerosim.zero.reduction import Agreement, digest_of
from zerosim.zero.refresh import Refresh
from zerosim.zero.states import States
from zerosim.zero.update import Schedule, StepResult, Update

Batch = tuple[np.ndarray, np.ndarray]


class Engine(Shown):
    """Trains ``model`` with ``optimizer`` on this rank; every rank of the group makes one and takes the same steps.

    ``stage`` is a ZeRO stage's number or a Stage of placements, ``layout`` "per_unit", "contiguous" or
    "whole_matrices", ``recompute`` a policy or its text, ``clip_norm`` the most that the global gradient norm may be
    (None: no limit), ``groups`` what differs for some parameters, ``schedule`` the factor of every lr by step
    (counted from 1, skipped ones not), ``seed`` that of dropout. ``gather`` lets optimizers that need whole matrices
    gather what lies in pieces.

    Levers, which change no bit: ``bucket_nbytes`` is the most that one collective moves (None: a unit); ``overlap``
    lets reductions and the refresh run beside other work; ``prefetch`` gathers so many units ahead; ``keep_gathered``
    ("all", or units' names) keeps units from forward to backward (None: those that others borrow from).

    ``step`` does all; ``forward``, ``backward``, ``reduce``, ``update``, ``refresh`` are its parts, for who writes the
    loop by hand.
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
        groups: Sequence[Group] = (),
        schedule: Schedule | None = None,
        bucket_nbytes: int | None = None,
        overlap: bool = False,
        prefetch: int = 0,
        keep_gathered: str | Sequence[str] | None = None,
        gather: bool = False,
        seed: int = 0,
    ) -> None:
        check_parts(rank, model, optimizer, policy)
        keep = check_levers(model, bucket_nbytes, prefetch, keep_gathered, seed, overlap=overlap, gather=gather)
        self.rank, self.model, self.optimizer = rank, model, optimizer
        self.stage, self.policy, self.recompute = stage_of(stage), policy or Policy(), Recompute.parse(recompute)
        self.loss_scale = self.policy.start_scaling()
        settings = settings_of(model, optimizer, self.policy, groups)
        self.families = [States(rank, model, kin, layout, self.stage) for kin in kin_of(model, settings)]
        self._factors: dict[str, Factors] = {}
        self._scale = self.loss_scale.scale  # of the step under way
        self._weights = object()  # another one after each update
        self._observer = Observer(rank, check_optimizers(model, self.families, schedule, gather=gather),
                                  self.loss_scale)
        self._refresh = {one: Refresh(one, bucket_nbytes=bucket_nbytes, overlap=overlap) for one in self.families}
        self._update = Update(self._refresh, self.loss_scale, clip_norm, schedule)
        agreement = Agreement(optimizer, self.loss_scale, self._update, digest_of(model, settings, (clip_norm, seed)))
        self.gradients = Accumulator(self.families, bucket_nbytes=bucket_nbytes, overlap=overlap, agreement=agreement)
        self._lender = Lender(model, self.families, keep=keep, prefetch=prefetch, bucket_nbytes=bucket_nbytes)
        self._micro_batches = MicroBatches(rank, model, self.policy, self.context(), seed)
        self._passes = Passes(model, self.recompute, self._lender, self.gradients.absorb, rank)

    def context(self) -> Context:
        """What the model's layers are called with on this rank: for a forward of one's own, outside a step."""
        rank = self.rank
        return Context(rank.xp, self.policy, rank.kernels, rank.memory, _noted_by(rank), self.gradients.views,
                       keep=self.recompute.inside, observe=self._observer.observe)

    # -- a step and its parts -----------------------------------------------------------------------------------------

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
        self._observer.forget()
        self._update.forget()
        self._lender.let_go()
        self._micro_batches.next_step()

    def forward(self, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> a tape with the loss, for one backward.

        Values are rounded to the compute format, targets to fp32; indices stay as they are. Every forward is the next
        micro-batch of the step, and dropout draws for it by its number, whether a backward follows or not.
        """
        if any(refresh.is_stale for refresh in self._refresh.values()):
            raise ValueError("forward() was called after an update whose shards the other ranks have not yet; "
                             "call refresh() first")
        x, target = self._micro_batches.charged(x, target)
        tape = self._passes.forward(self._micro_batches.context(), x, target)
        tape.weights = self._weights
        return tape

    def backward(self, tape: Tape) -> None:
        """Adds the gradients of S times the tape's loss to this step's, reduced as it goes where they rest sharded."""
        if not isinstance(tape, Tape):
            raise ValueError(f"backward() takes the tape that forward() returns, found {tape!r}")
        if self._update.is_ready:
            raise ValueError(
                "backward() was called between reduce() and update(), and would overwrite the reduced gradient; "
                "call update() first, or abandon()"
            )
        if tape.weights is not self._weights:
            raise ValueError("this tape was made with other weights: before an update, or by another engine; its "
                             "gradients are not those of the weights that are here now, so make a new one by forward()")
        self._observer.share = 1.0 if self.model.loss.is_global else tape.tokens / tape.places
        self._passes.backward(tape, self._scale_of_step())
        self.gradients.end_of_backward()
        self._lender.let_go()
        self._micro_batches.count(tape)

    def reduce(self) -> None:
        """Gives the optimizer the gradient's sum over ranks, where that has not happened during backward."""
        if self.gradients.micro_batch == 0:
            raise ValueError("reduce() was called without a gradient; call backward(forward(x, target)) first")
        with self.rank.trace.span("reduce"):
            self.gradients.reduce(self._scale_of_step(), self._micro_batches.token_share())
            self._factors = self._observer.averaged()
        self.gradients.reset()

    def _scale_of_step(self) -> float:
        """S, which is that of the step's first backward until its update."""
        scale = self.loss_scale.scale
        if self.gradients.micro_batch == 0:
            self._scale = scale
        if scale != self._scale:
            raise ValueError(f"the loss scale went from {self._scale:g} to {scale:g} within a step, whose gradients "
                             "are of one S times the loss; change it between steps, or abandon() this one first")
        return scale

    def update(self, losses: Sequence[float] = ()) -> StepResult:
        """One optimizer step on what this rank updates, and its cast to the compute format; or none on overflow.

        ``losses`` are handed on in the result, and nothing else is done with them.
        """
        self._lender.let_go()  # a forward without a backward may have left units gathered
        with self.rank.trace.span("update"):
            counted = self._micro_batches
            result = self._update.step(tuple(losses), self._factors, tuple(counted.tokens), tuple(counted.places))
        self._factors, self._weights = {}, object()
        self._micro_batches.next_step()
        return result

    def refresh(self) -> None:
        """Makes replicated parameters equal again after an update of each rank's own shard: an all-gather."""
        if any(refresh.is_stale for refresh in self._refresh.values()):
            with self.rank.trace.span("refresh"):
                for refresh in self._refresh.values():
                    refresh.finish()

    @property
    def steps_taken(self) -> int:
        """Steps that changed the weights: skipped ones are not counted. The same on every rank."""
        return self._update.steps_taken

    # -- weights and state --------------------------------------------------------------------------------------------

    def weights(self, unit: Unit) -> AbstractContextManager[Weights]:
        """The unit's parameters by name, as they rest: gathered on entry where sharded, freed on exit."""
        return self._lender.weights(unit)

    def state(self, name: str) -> dict[str, np.ndarray | None]:
        """The whole "parameter", "gradient" (the mean, fp32; None unless reduced), "master" and slots of one parameter.

        For inspection, on every rank at once: what is sharded is gathered, under the purpose "state". Raises
        ValueError for a name that the model does not have.
        """
        return inspection.state(self.families, name)

    @property
    def layout(self) -> Layout:
        """How the vector is cut; ValueError where groups make several vectors, each with a layout of its own."""
        return self.states.layout

    @property
    def states(self) -> States:
        """The arrays at rest; ValueError where groups make several kin of them (see ``families``)."""
        if len(self.families) > 1:
            raise ValueError(f"this engine has {len(self.families)} kin of parameters, each with states and a layout "
                             "of its own; look at engine.families")
        return self.families[0]

    def __repr__(self) -> str:
        return (f"<Engine of rank {self.rank.index} of {self.rank.size}: {type(self.optimizer).__name__}, "
                f"{self.stage}, {self.steps_taken} steps taken>")


def _noted_by(rank: Rank) -> Note:
    """Hears what was computed, for the trace of the run under way: an engine may live through several runs."""

    def note(*, flops: int = 0, nbytes: int = 0) -> None:
        rank.trace.compute(flops=flops, nbytes=nbytes)

    return note
