"""The engine: one rank's training step under any placement of parameters, gradients and optimizer state.

A step is: forward and backward of each micro-batch, unit by unit, each unit's weights unsharded as long as its ``with``
block; reduce; update; all-gather of parameters. `Engine` is where it happens; argument checks stand at the end. It is
the grown form of `tiny.DDP`, `tiny.ZeRO1`, `tiny.ZeRO2` and `tiny.ZeRO3`. `zero.plugs` chooses its parts by the
options asked for; without any they are those of `param_group`, `unshard`, `gradients` and `update`.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches;
B batch, I inputs, O outputs, T tokens of a sample; S loss scale.
Source: Rajbhandari et al. 2020 (ZeRO), section 5; Micikevicius et al. 2018 (mixed precision), section 3.
"""

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.models.initializers import Initializer
from zerosim.models.layers import Context, draw_first, draw_for
from zerosim.models.passes import initializer_of
from zerosim.models.units import TILED, Model, Recompute, Unit, Weights
from zerosim.numerics.arrays import contiguous
from zerosim.numerics.checks import FP32, is_count, is_number, unknown_name
from zerosim.numerics.loss_scale import LossScaler
from zerosim.numerics.places import Offload
from zerosim.numerics.policy import BY_RANK, Policy
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.optim.base import Optimizer
from zerosim.optim.promises import require_cut_and_needs, require_usable
from zerosim.options import StepOptions
from zerosim.ranks.mesh import Mesh
from zerosim.ranks.rank import Rank
from zerosim.ranks.workers import Result
from zerosim.shown import Shown
from zerosim.zero import checkpoint, hugging_face
from zerosim.zero.gradients import Accumulator, StepCounts
from zerosim.zero.layout import Layout
from zerosim.zero.param_group import Group, ParamGroup, Settings, settings_by_group, settings_of
from zerosim.zero.placements import BucketOptions, Stage, stage_of
from zerosim.zero.plugs import observer_of, plugs_of
from zerosim.zero.skipped import SkippedSteps
from zerosim.zero.update import Schedule, StepResult, Update
from zerosim.zero.whole_tensors import whole_state

Batch = tuple[np.ndarray, np.ndarray]
Draw = Callable[[str, slice], np.ndarray]  # of random words, by the name of what is drawn for


@dataclass(slots=True)
class Tape:
    """A micro-batch between forward and backward: its loss, and per unit what it saved, or a segment's input.

    ``ctx`` is that of this micro-batch: what was drawn forward is drawn again by it.
    """

    ctx: Context
    loss: float
    saved_by_loss: Any
    saved: list[Any]
    inputs: dict[int, np.ndarray]
    tokens: int
    places: int
    outputs: int  # of the last unit: elements
    weights_version: object = None  # of the weights that forward saw
    used: bool = False


class Engine(Shown):
    """Trains ``model`` with ``optimizer`` on this rank; every rank of the group makes one and takes the same steps.

    ``stage`` is a ZeRO stage's number or a Stage of placements, ``policy`` a Policy or the format to compute in,
    ``layout`` "per_unit", "contiguous" or "whole_matrices", ``recompute`` a policy or its text, ``clip_norm`` the most
    that the global gradient norm may be (None: no limit), ``groups`` what differs for some parameters, ``schedule`` the
    factor of every lr by step (counted from 1, skipped ones not), ``seed`` that of dropout. ``gather`` lets optimizers
    that need whole matrices gather what lies in pieces. ``mesh``, nodes and ranks of a node as (2, 4) or "2x4", shards
    states inside each node and replicates them across (hybrid sharding): a sum of nodes' sums has other bits than one
    ring. With ``zeropp``, a ZeroPlusPlus or its text "hpz+qwz+qgz", states lie in shards on all ranks, and less crosses
    nodes. ``reduction`` is the order in which gradients are added: by "rank", or by "micro_batch", which makes all bits
    independent of the number of ranks; see `zerosim.zero.micro_batch_order`. ``weights`` are the first values of all
    parameters by name, the same on every rank, in place of the model's own; `state` gives them out again.

    Options that change no bit, except that buckets cut what ZeRO++ quantizes: ``bucket_nbytes`` is the most that one
    collective moves (None: a unit); ``overlap`` lets reductions and the all-gather of parameters run beside other work,
    and ``copy_in_flight`` lets buckets under way arrive in a second copy, hidden until they are waited for;
    ``prefetch`` is the number of units gathered ahead; ``keep_gathered`` ("all", or units' names) keeps units from
    forward to backward (None: those whose weights others share). ``offload`` places state on the host or on disk:
    "host", "disk" or an `Offload`, of which ``delayed_update`` alone changes bits.

    ``step`` does all; ``forward``, ``backward``, ``reduce``, ``update``, ``all_gather_parameters`` are its parts, for
    who writes the loop by hand. Raises ValueError for options that cannot be or would change nothing, OffloadError for
    a directory in which no file can be made.
    """

    def __init__(
        self,
        rank: Rank,
        model: Model,
        optimizer: Optimizer,
        *,
        stage: int | Stage = 0,
        policy: Policy | str | None = None,
        layout: str = "per_unit",
        recompute: Recompute | str = "none",
        clip_norm: float | None = None,
        groups: Sequence[Group] = (),
        schedule: Schedule | None = None,
        bucket_nbytes: int | None = None,
        overlap: bool = False,
        copy_in_flight: bool = False,
        prefetch: int = 0,
        keep_gathered: str | Sequence[str] | None = None,
        gather: bool = False,
        reduction: str = BY_RANK,
        offload: str | Offload | None = None,
        seed: int = 0,
        mesh: Mesh | Sequence[int] | str | None = None,
        zeropp: ZeroPlusPlus | str | None = None,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        _check_parts(rank, model, optimizer)
        keep = _check_options(model, keep_gathered, seed, gather=gather, copy_in_flight=copy_in_flight)
        self.options = StepOptions.of(rank.size, bucket_nbytes=bucket_nbytes, overlap=overlap, prefetch=prefetch,
                                      offload=offload, mesh=mesh, zeropp=zeropp, reduction=reduction)
        self.rank, self.model, self.optimizer, self.seed = rank, model, optimizer, seed
        self.stage, self.policy, self.recompute = stage_of(stage), Policy.of(policy), Recompute.parse(recompute)
        self.loss_scale = self.policy.start_scaling()
        settings = settings_of(model, optimizer, self.policy, groups)
        plugs = plugs_of(rank, self.stage, self.policy, self.options)
        initializer, self.store = initializer_of(model, weights), plugs.store
        lay_out = partial(plugs.lay_out, layout, ranks=plugs.shards.size)
        buckets = BucketOptions(self.options.bucket_nbytes, self.options.overlap, {"copy_in_flight": copy_in_flight})
        self.param_groups = [
            plugs.param_group(plugs.shards, model, of_group, initializer, lay_out, self.stage, self.store, buckets)
            for of_group in settings_by_group(settings)]
        self.store.finish()
        self._observer = observer_of(rank, _check_optimizers(model, self.param_groups, schedule, gather=gather),
                                     self.loss_scale)
        plugs.check(self.param_groups)
        self._all_gathers = {group: plugs.all_gather(group) for group in self.param_groups}
        self._update = plugs.update(self._all_gathers, SkippedSteps(rank, self.loss_scale), clip_norm, schedule,
                                    plugs.squares)
        agree = partial(_agreement, optimizer, self.loss_scale, self._update,
                        _digest(model, settings, initializer, None if weights else 16, (clip_norm, seed)))
        self.gradients = Accumulator(self.param_groups, {
            group: plugs.reducer(group, agree, plugs.reduction) for group in self.param_groups if not group.frozen})
        self._unsharder = plugs.unsharder(model, self.param_groups, plugs.gather, keep=keep, prefetch=prefetch)
        self._weights_version = object()  # a new one after each update
        self._factors: dict[str, Any] = {}
        self._counts = StepCounts(self.loss_scale.scale)

    # -- a step and its parts -----------------------------------------------------------------------------------------

    def step(self, batches: Iterable[Batch] | np.ndarray, target: np.ndarray | None = None) -> StepResult:
        """One training step on k micro-batches (x (B, I), target (B, O)) of this rank; k is the same on all ranks.

        ``step(x, target)`` is a step on one. A step that raises leaves no gradients behind: the next one begins anew.
        """
        batches = _checked_batches(batches if target is None else [(batches, target)])
        if self.gradients.micro_batch:
            raise ValueError(f"step() was called after backward() by hand for {self.gradients.micro_batch} of this "
                             "step's micro-batches; finish it by reduce() and update(), or abandon()")
        losses = []
        try:
            for number, (x, target) in enumerate(batches, 1):
                tape = self.forward(x, target)
                losses.append(tape.loss)
                self.backward(tape, last=number == len(batches))
            self.reduce()
            result = self.update(losses)
        except BaseException:
            self.abandon()
            raise
        self.all_gather_parameters()
        return result

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be finished; taken again, it draws the same random numbers.

        Where the run has been stopped, what is under way cannot be waited for: each part forgets it first. The other
        parts are abandoned whichever of them fails.
        """
        self._counts = StepCounts(self._counts.scale, self._counts.step)
        parts: list[Any] = [self._observer, self._update, self.gradients, self.store, self._unsharder]
        with ExitStack() as each:
            for part in (*parts, *self._all_gathers.values()):
                each.callback(part.abandon)

    def forward(self, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> a tape with the loss, for one backward.

        Values are rounded to the compute format, targets to fp32; indices stay as they are. Every forward is the next
        micro-batch of the step, and dropout draws for it by its number, whether a backward follows or not.
        """
        self._update.refuse_if_broken_off()
        self._update.refuse_if_out_of_date("forward")
        if self._counts.forwards == 0:
            self.rank.trace.begin_step(self.rank.memory.now_nbytes_by_kind)
        x = self._charged(x, self.policy.compute_dtype, "x", indices=self.model.units[0].integer_inputs)
        target = self._charged(target, FP32, "target", indices=self.model.loss.integer_targets)
        tape = self._forward_units(self._micro_batch_context(), x, target)
        tape.weights_version = self._weights_version
        return tape

    def backward(self, tape: Tape, *, last: bool = False) -> None:
        """Adds the gradients of S times the tape's loss to this step's, reduced as it goes where they rest sharded.

        ``last`` says that no other micro-batch follows in this step: with overlap gradients that rest partial are then
        reduced as it goes too, and by reduce() otherwise; the bits are the same. Raises ValueError after the last.
        """
        if not isinstance(tape, Tape):
            raise ValueError(f"backward() takes the tape that forward() returns, found {tape!r}")
        if self._update.is_ready:
            raise ValueError(
                "backward() was called between reduce() and update(), and would overwrite the reduced gradient; "
                "call update() first, or abandon()"
            )
        if tape.weights_version is not self._weights_version:
            raise ValueError("this tape was made with other weights: before an update, or by another engine; its "
                             "gradients are not those of the weights that are here now, so make a new one by forward()")
        if tape.used:
            raise ValueError(
                "this tape has been taken back already, and what it saved is freed; make a new one by forward()"
            )
        self._observer.share = 1.0 if self.model.loss.is_global else tape.tokens / tape.places
        self.gradients.begin_backward(last=last)
        self._backward_units(tape, self._scale_of_step())
        self.gradients.end_of_backward()
        self._unsharder.reshard_all()
        self._count_tokens(tape)

    def reduce(self) -> None:
        """Gives the optimizer the gradient's sum over ranks, where that has not happened during backward."""
        if self.gradients.micro_batch == 0:
            raise ValueError("reduce() was called without a gradient; call backward(forward(x, target)) first")
        with self.rank.trace.span("reduce"):
            self.gradients.reduce(self._scale_of_step(), self._token_share())
            self._factors = self._observer.averaged()
        self.gradients.abandon()  # the sums are the optimizer's

    def update(self, losses: Sequence[float] = ()) -> StepResult:
        """One optimizer step on what this rank updates, and its cast to the compute format; or none on overflow.

        ``losses`` are handed on in the result, and nothing else is done with them.
        """
        if self._unsharder.open_blocks:  # whole weights that were gathered would stay as they are
            raise ValueError("update() was called inside a block `with engine.weights(unit)`, whose weights would then "
                             "be those of before; end the block first")
        self._unsharder.abandon()  # a forward without a backward may have left units gathered
        with self.rank.trace.span("update"):
            result = self._update.step(tuple(losses), self._factors, tuple(self._counts.tokens),
                                       tuple(self._counts.places))
            if result.skipped:
                with self.rank.trace.span("skipped"):
                    pass
        self._factors, self._weights_version = {}, object()
        self._counts = StepCounts(self._counts.scale, self._counts.step + 1)
        return result

    def all_gather_parameters(self) -> None:
        """Makes replicated parameters equal again after an update of each rank's own shard."""
        self._update.refuse_if_broken_off()
        if self._update.is_out_of_date:
            with self.rank.trace.span("all-gather"):
                for all_gather in self._all_gathers.values():
                    all_gather.finish()

    # -- forward and backward over the units, with the recomputation policy between them ------------------------------

    def _forward_units(self, ctx: Context, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> the tape, with the mean loss, as the model's loss takes it."""
        units = self.model.units
        starts = {segment.start for segment in self.recompute.segments(len(units))}
        saved: list[Any] = []
        inputs: dict[int, np.ndarray] = {}
        self._unsharder.set_prefetch_order(range(len(units)))
        for index, unit in enumerate(units):
            if index in starts:
                if self.rank.memory.kind_of(x) == "activation":  # the batch itself stays charged as input
                    self.rank.memory.reclassify(x, "checkpointed_input")
                inputs[index] = x
            x, saved_here = self._forward_unit(ctx, unit, x, "forward")
            saved.append(None if starts else saved_here)
            del saved_here
        with self.rank.trace.span("loss"):
            loss, saved_by_loss = self.rank.compute(partial(self.model.loss.forward, ctx, x, target), operations=x.size)
        return Tape(ctx, loss, saved_by_loss, saved, inputs, self.model.loss.tokens(ctx, target), target.size, x.size)

    def _backward_units(self, tape: Tape, scale: float) -> None:
        """Goes back unit by unit, handing each one's gradients to be accumulated; uses the tape up. ``scale`` is S."""
        tape.used = True
        segments = self.recompute.segments(len(self.model.units)) or [range(len(self.model.units))]
        self._unsharder.set_prefetch_order(
            [index for segment in reversed(segments) for index in self._backward_order(segment, tape)])
        with self.rank.trace.span("loss"):
            dy: np.ndarray | None = self.rank.compute(
                partial(self.model.loss.backward, tape.ctx, tape.saved_by_loss, scale), operations=tape.outputs)
        tape.saved_by_loss = None
        for segment in reversed(segments):
            if segment.start in tape.inputs:
                dy = self._backward_unit(segment[-1], tape, dy, self._run_again(segment[:-1], tape))
                segment = segment[:-1]
            for index in reversed(segment):
                dy = self._backward_unit(index, tape, dy, None)

    @staticmethod
    def _backward_order(segment: range, tape: Tape) -> list[int]:
        """The order in which backward asks for a segment's units: those that are run again first."""
        again = segment[:-1] if segment.start in tape.inputs else range(0)
        return [*again, *reversed(segment)]

    def _run_again(self, units: range, tape: Tape) -> np.ndarray:
        """Recomputes what ``units`` saved from the segment's input; returns the input of the segment's last unit."""
        x = tape.inputs.pop(units.start)
        for index in units:
            x, tape.saved[index] = self._forward_unit(tape.ctx, self.model.units[index], x, "recompute")
        return x

    def _forward_unit(self, ctx: Context, unit: Unit, x: np.ndarray, span: str) -> tuple[np.ndarray, Any]:
        with (self.rank.trace.span(span), self.rank.trace.span(unit.name),
              self._unsharder.unshard(unit, in_pass=True) as w):
            return self._compute(unit, w, x, partial(unit.forward, ctx, w, x))

    def _backward_unit(self, index: int, tape: Tape, dy: np.ndarray | None, x: np.ndarray | None) -> np.ndarray | None:
        """One unit back; given its input ``x``, it first runs forward again under the same weights."""
        unit = self.model.units[index]
        if dy is None:
            after = self.model.units[index + 1].name
            raise ValueError(f"unit {after!r} gave back no gradient of its input, which unit {unit.name!r} needs; only "
                             "the model's first unit may leave it out (of linear units, first=True says so)")
        saved, tape.saved[index] = tape.saved[index], None
        with (self.rank.trace.span("backward"), self.rank.trace.span(unit.name),
              self._unsharder.unshard(unit, in_pass=True) as w):
            if x is not None:
                with self.rank.trace.span("recompute"):
                    saved = self._compute(unit, w, x, partial(unit.forward, tape.ctx, w, x))[1]
            dx, gradients = self._compute(unit, w, dy, partial(unit.backward, tape.ctx, w, saved, dy))
            del saved, x, dy
            self.gradients.accumulate(unit, gradients)
        return dx

    def _compute(self, unit: Unit, w: Weights, x: np.ndarray, work: Callable[[], Result]) -> Result:
        """The result of the work: a unit's forward or backward for x (..., I), or for indices of any shape, with the
        weights w, its own and those of others."""
        rows = x.size if unit.integer_inputs else math.prod(x.shape[:-1])
        return self.rank.compute(work, operations=2 * rows * sum(weight.size for weight in w.values()))

    # -- micro-batches: their loss scale, what is drawn and charged for them, how many tokens they have ----------------

    def _scale_of_step(self) -> float:
        """S, which is that of the step's first backward until its update."""
        scale, counts = self.loss_scale.scale, self._counts
        if self.gradients.micro_batch == 0:
            counts.scale = scale
        if scale != counts.scale:
            raise ValueError(f"the loss scale went from {counts.scale:g} to {scale:g} within a step, whose gradients "
                             "are of one S times the loss; change it between steps, or abandon() this one first")
        return scale

    def _micro_batch_context(self) -> Context:
        """The context of the next forward: what it draws, its backward draws again.

        Micro-batch j of rank r has the number j·N + r in its step: what is drawn for it depends on that number, and on
        no layout and no length.
        """
        number = self._counts.forwards * self.rank.size + self.rank.index
        self._counts.forwards += 1
        return self.context(partial(draw_for, self.seed, self._counts.step, number))

    def _charged(self, values: np.ndarray, dtype: np.dtype[Any], name: str, *, indices: bool) -> np.ndarray:
        """A copy of x or of targets, charged as input: rounded to ``dtype``, indices as they are.

        Raises ValueError for a NaN: it would make every gradient NaN, and every step a skipped one.
        """
        values = contiguous(values)
        if indices:
            dtype = values.dtype
        elif count := self.rank.kernels.count_nan(values):
            raise ValueError(f"{name} has NaN in {count} of {values.size} values, and with it every gradient; "
                             "look at where the data come from")
        elif values.dtype.kind in "iu" or not values.dtype.isnative:
            values = values.astype(np.float64)
        charged = self.rank.memory.alloc(values.shape, dtype, "input", name)
        self.rank.kernels.cast_pack(values, charged)
        return charged

    def _count_tokens(self, tape: Tape) -> None:
        """Counts the tokens of a micro-batch after its backward.

        Raises ValueError where a loss is normalized by all tokens and micro-batches have not the same places: each
        mean is over its own, and a mean of those would weigh tokens differently.
        """
        counts = self._counts
        if self.model.loss.is_global and counts.places and tape.places != counts.places[0]:
            raise ValueError("normalization='global' weighs every token the same only where micro-batches have equally "
                             f"many places, found {counts.places[0]} and {tape.places}; fill shorter ones up with "
                             "targets of -1")
        counts.tokens.append(tape.tokens)
        counts.places.append(tape.places)

    def _token_share(self) -> float:
        """1, or where the loss is normalized by all ranks' tokens, the share of places that have one: tokens/(N·k·B·T).

        A loss that divides by its B·T places, and a mean gradient divided by this, weigh every token the same.
        """
        if not self.model.loss.is_global:
            return 1.0
        places = sum(self._counts.places)
        rank = self.rank.agreeing(f"{places} places in all micro-batches of the step")
        found = rank.all_gather(np.array([sum(self._counts.tokens)], np.int64), purpose="control")
        tokens = int(found.sum())
        if not tokens:
            raise ValueError("no rank has a valid target in this step, and a mean over none does not exist; "
                             "leave the step out")
        return tokens / (self.rank.size * places)

    # -- weights and state --------------------------------------------------------------------------------------------

    def context(self, draw: Draw = draw_first) -> Context:
        """The context of the model's layers on this rank: for a forward of one's own, outside a step."""
        rank, note = self.rank, self.store.device.note
        return Context(rank.xp, self.policy, rank.kernels, rank.memory, note, self.gradients.grad_buffers, draw,
                       self._observer.observe, self.recompute.inside)

    def weights(self, unit: Unit) -> AbstractContextManager[Weights]:
        """The unit's parameters by name, as they rest: gathered on entry where sharded, freed on exit."""
        return self._unsharder.unshard(unit)

    def state(self, name: str, only: Collection[str] | None = None) -> dict[str, np.ndarray | None]:
        """The whole "parameter", "gradient" (the mean, fp32; None unless reduced), "master" and slots of one parameter,
        or ``only`` these of them.

        For inspection, on every rank at once: what is sharded is gathered, under the purpose "state". Raises
        ValueError for a name that the model does not have, and for what the parameter has not.
        """
        known = {entry.name: group for group in self.param_groups for entry in group.layout.entries}
        group = known.get(str(name))
        if group is None:
            raise unknown_name(f"the model has no parameter {name!r}", name, known, "it has")
        return whole_state(group, group.layout.by_name[str(name)], only)

    @property
    def layout(self) -> Layout:
        """The cut of the vector; ValueError where there are several param groups, each with a layout of its own."""
        return self.param_group.layout

    @property
    def param_group(self) -> ParamGroup:
        """The arrays at rest; ValueError where there are several param groups."""
        if len(self.param_groups) > 1:
            raise ValueError(f"this engine has {len(self.param_groups)} param groups, each with arrays and a layout "
                             "of its own; look at engine.param_groups")
        return self.param_groups[0]

    @property
    def steps_taken(self) -> int:
        """Steps that changed the weights: skipped ones are not counted. The same on every rank."""
        return self._update.steps_taken

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, progress: Any = None) -> None:
        """Writes a checkpoint into the folder ``path``, a file from each rank; see `zerosim.zero.checkpoint`.

        Between steps, and between the micro-batches of one. ``progress``, the same on every rank, is a JSON value that
        load() gives back, as the place in the data. Raises CheckpointError on every rank where one cannot write.
        """
        checkpoint.save(path, self._training_state(), progress)

    def load(self, path: str | Path) -> checkpoint.Restored:
        """Goes on from a checkpoint, of any number of ranks, stage and layout; the report says what is different here.

        Raises CheckpointError on every rank where one cannot read it.
        """
        return checkpoint.load(path, self._training_state(), self._drop_for_load)

    def load_weights(self, path: str | Path) -> None:
        """Takes all weights from a safetensors file, or a folder in Hugging Face's manner; see `hugging_face`.

        Optimizer state and steps taken stay, a step under way is dropped. Raises CheckpointError as load() does, and
        where a folder's config.json is of another model: of other rotary positions, for instance, or with windows.
        """
        hugging_face.load_weights(path, self._training_state(), self._drop_for_load)

    def _drop_for_load(self) -> StepCounts:
        """Drops what is under way; returns the counts of the step that begins."""
        if self._unsharder.open_blocks:
            raise ValueError("weights were to be loaded inside a block `with engine.weights(unit)`, where they would "
                             "be those of before; end the block first")
        self.abandon()
        self._weights_version = object()
        for all_gather in self._all_gathers.values():
            all_gather.weights_change()
        return self._counts

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything of which this rank is the owner, by kind and parameter, as views of what rests: what save()
        writes, flat (n,) where others have the rest."""
        return checkpoint.state_dict(self._training_state())

    def _training_state(self) -> checkpoint.TrainingState:
        settings = {"stage": " ".join([str(self.stage), *self.options.said_of_ranks()]), "seed": str(self.seed),
                    "model": checkpoint.model_text(self.model), "reduction": self.options.reduction,
                    "attention": "tiled" if self.recompute.inside == TILED else "by whole rows"}
        return checkpoint.TrainingState(self.rank, self.model, self.param_groups, self._update, self.gradients,
                                        self._observer, self._counts, settings)

    def __repr__(self) -> str:
        return (f"<Engine of rank {self.rank.index} of {self.rank.size}: {type(self.optimizer).__name__}, "
                f"{self.stage}, {self.steps_taken} steps taken>")


# -- what must be the same on all ranks -------------------------------------------------------------------------------


def _agreement(optimizer: Optimizer, loss_scale: LossScaler, update: Update, settings: str, micro_batch: int) -> str:
    """The text that is compared when a gradient is reduced: what would make ranks drift apart unseen."""
    step = update.steps_taken + 1  # a run that was broken off may have updated some ranks and not others
    return _agreement_text(step, micro_batch, loss_scale.scale, str(optimizer), update.lr_factor(step), settings)


@lru_cache(maxsize=16)  # the ranks of one process agree on one text
def _agreement_text(step: int, micro_batch: int, scale: float, optimizer: str, factor: float | None,
                    settings: str) -> str:
    scheduled = "" if factor is None else f", lr times {factor:g}"
    return f"step {step}, micro-batch {micro_batch}, loss scale {scale:g}, {optimizer}{scheduled}, {settings}"


def _digest(model: Model, settings: Mapping[str, Settings], initializer: Initializer, most: int | None,
            others: object) -> str:
    """A checksum of what else must be the same: the policy and the optimizer of each parameter, of its first values at
    most so many (None: all), and ``others``."""
    found = zlib.crc32(repr((sorted(settings.items()), others)).encode())
    for name, shape in model.shapes.items():
        count = math.prod(shape)
        found = zlib.crc32(initializer(name, 0, count if most is None else min(most, count)).tobytes(), found)
    return f"settings {found:08x} (policy, groups, clip_norm, seed, first values)"


# -- argument checks --------------------------------------------------------------------------------------------------


def _check_parts(rank: Rank, model: Model, optimizer: Optimizer) -> None:
    """Raises ValueError for what is no rank, no model or no optimizer."""
    if not isinstance(rank, Rank):
        raise ValueError(f"an engine is made by a rank program, found rank={rank!r}; write Engine(rank, model, ...) in "
                         "a program that a cluster runs")
    if not isinstance(model, Model):
        raise ValueError(
            f"model must be a zerosim model, found {type(model).__name__}; build one from units with Model([...])"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be an optimizer with its settings, found {optimizer!r}; write zs.optim.Adam(lr=...)"
        )
    require_cut_and_needs(optimizer)


def _check_options(model: Model, keep_gathered: Any, seed: Any, **switches: Any) -> frozenset[str]:
    """The units that stay gathered; ValueError for what is no count or switch, and for units that there are not."""
    if not is_count(seed):
        raise ValueError(f"seed={seed!r} must be a whole number")
    for name, switch in switches.items():
        if not isinstance(switch, bool | np.bool):
            raise ValueError(f"{name}={switch!r} must be True or False")
    names = [unit.name for unit in model.units]
    if keep_gathered is None:
        return frozenset(source for unit in model.units for source in unit.tied_weights.values())
    kept = names if keep_gathered == "all" else [keep_gathered] if isinstance(keep_gathered, str) else keep_gathered
    if not isinstance(kept, list | tuple | set | frozenset) or not all(name in names for name in kept):
        raise ValueError(f"keep_gathered={keep_gathered!r} must be 'all', or names of units: {', '.join(names)}")
    return frozenset(kept)


def _check_schedule(schedule: Any) -> None:
    """Raises ValueError for what gives no factor of the learning rate for a step."""
    if schedule is None:
        return
    factor = schedule(1) if callable(schedule) else None
    if not is_number(factor):
        raise ValueError(f"schedule={schedule!r} must be a function from the step's number, counted from 1, to the "
                         "factor of every lr, as zs.optim.WarmupCosine(20, 200) is")


def _check_optimizers(model: Model, groups: Sequence[ParamGroup], schedule: Any, *, gather: bool) -> frozenset[str]:
    """The weights whose factors are to be observed.

    Raises ValueError for an optimizer that would update part of a tensor that it needs whole, and for a layer that
    hands over no factors.
    """
    _check_schedule(schedule)
    if all(group.frozen for group in groups):
        raise ValueError("all parameters are frozen, and a step would train nothing; leave some to the optimizer")
    factored = {name for unit in model.units for name in unit.factored}
    observed = set()
    for group in groups:
        for name, optimizer in group.optimizers.items():
            entry, kind = group.layout.by_name[name], type(optimizer).__name__
            require_usable(optimizer, name, entry.shape, scheduled=schedule is not None)
            if name in group.gathered and not gather:
                raise ValueError(
                    f"{kind} needs all of {name} {entry.shape}, which the layout {group.layout.name!r} lays on "
                    "several ranks; take layout='whole_matrices', or gather=True, which gathers it for each update "
                    "and pays in bytes sent, or give this parameter an elementwise optimizer by a Group")
            if "input_factors" in optimizer.needs:
                if name not in factored:
                    raise ValueError(
                        f"{kind} needs the factors of inputs and output gradients, which the layer of {name} does "
                        f"not hand over; the weights that have them are {', '.join(sorted(factored)) or 'none'}. "
                        "Give the others another optimizer by a Group")
                observed.add(name)
    return frozenset(observed)


def _checked_batches(batches: Any) -> list[Batch]:
    """The micro-batches as a list; ValueError unless there is at least one, and each is a pair."""
    listed = list(batches) if isinstance(batches, Iterable) else []
    pairs = sum(isinstance(batch, tuple | list) and len(batch) == 2 and not any(
        isinstance(part, tuple | list) and any(isinstance(one, np.ndarray) for one in part) for part in batch)
        for batch in listed)
    if not listed or pairs != len(listed):
        raise ValueError(f"a step takes micro-batches (x, target), at least one; found {len(listed)} items, {pairs} of "
                         "them pairs. Write step(x, target), or step([(x, target), ...]) for several micro-batches")
    return listed
