"""What the engine refuses, and in which words: what was asked, what was found, what to do."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

import numpy as np

from zerosim.models.layers import Context, Gradients, Note, draw_for
from zerosim.models.units import Model, Recompute, Unit, Weights
from zerosim.numerics.arrays import contiguous
from zerosim.numerics.checks import did_you_mean, is_count, is_number
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Cut, Optimizer, Slot
from zerosim.ranks.rank import Rank
from zerosim.shown import Shown
from zerosim.zero.gradients import Accumulator, Agreement, digest_of
from zerosim.zero.layout import Entry, Layout
from zerosim.zero.param_group import Group, States, kin_of, settings_of
from zerosim.zero.placements import SHARDED, Placement, Stage, stage_of
from zerosim.zero.unshard import Lender, Refresh
from zerosim.zero.update import Factors, Observer, Schedule, StepResult, Update, is_torn

CUTS = get_args(Cut)
Batch = tuple[np.ndarray, np.ndarray]


def check_parts(rank: Rank, model: Model, optimizer: Optimizer, policy: Policy | None) -> None:
    """Raises ValueError for what is no rank, no model, no policy or no optimizer."""
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
    check_optimizer(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optimizer, and for one that does not say how it may be cut."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be an optimizer with its settings, found {optimizer!r}; write zs.optim.Adam(lr=...)"
        )
    if getattr(optimizer, "cut", None) not in CUTS:
        raise ValueError(f"{type(optimizer).__name__} does not say where its state may be cut; write cut = one of "
                         f"{', '.join(map(repr, CUTS))} into its class, as check_shardable finds it")


def check_levers(model: Model, bucket_nbytes: Any, prefetch: Any, keep_gathered: Any, seed: Any, *,
                 overlap: Any, gather: Any) -> frozenset[str]:
    """The units that stay gathered; ValueError for levers that are no count, and for units that there are not."""
    if bucket_nbytes is not None and (not is_count(bucket_nbytes) or bucket_nbytes < 1):
        raise ValueError(f"bucket_nbytes={bucket_nbytes!r} must be a number of bytes, 1 or more; pass None for one "
                         "collective per unit")
    if not is_count(prefetch) or prefetch < 0:
        raise ValueError(f"prefetch={prefetch!r} must be a number of units, 0 or more")
    if not is_count(seed):
        raise ValueError(f"seed={seed!r} must be a whole number")
    for name, switch in (("overlap", overlap), ("gather", gather)):
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


def check_optimizers(model: Model, families: Sequence[States], schedule: Any, *, gather: bool) -> frozenset[str]:
    """The weights whose factors are to be observed.

    Raises ValueError for an optimizer that would update part of a tensor that it needs whole, for one without the lr
    that a schedule changes, and for a layer that hands over no factors.
    """
    _check_schedule(schedule)
    if all(states.frozen for states in families):
        raise ValueError("all parameters are frozen, and a step would train nothing; leave some to the optimizer")
    factored = {name for unit in model.units for name in unit.factored}
    observed = set()
    for states in families:
        for entry in states.layout.entries if not states.frozen else ():
            optimizer: Any = states.optimizers[entry.name]
            kind = type(optimizer).__name__
            if schedule is not None and not hasattr(optimizer, "lr"):
                raise ValueError(f"schedule changes lr, and {kind}, which updates {entry.name}, has none")
            if schedule is not None:
                optimizer.with_lr(optimizer.lr)  # refuses one whose lr cannot be replaced
            _check_slots(optimizer, entry)
            if optimizer.cut_of(entry.shape) != "anywhere" and not gather and is_torn(states, entry):
                raise ValueError(
                    f"{kind} needs all of {entry.name} {entry.shape}, which the layout {states.layout.name!r} lays on "
                    "several ranks; take layout='whole_matrices', or gather=True, which gathers it for each update "
                    "and pays in the ledger, or give this parameter an elementwise optimizer by a Group")
            if "tensor_norm" in optimizer.needs and not callable(getattr(optimizer, "direction", None)):
                raise ValueError(f"{kind} needs norms of whole tensors, and has no direction() that says of what; "
                                 "write advance() and direction() as LAMB has them")
            if "input_factors" in optimizer.needs:
                if entry.name not in factored:
                    raise ValueError(
                        f"{kind} needs the factors of inputs and output gradients, which the layer of {entry.name} "
                        f"does not hand over; the weights that have them are {', '.join(sorted(factored)) or 'none'}. "
                        "Give the others another optimizer by a Group")
                observed.add(entry.name)
    return frozenset(observed)


def _check_slots(optimizer: Optimizer, entry: Entry) -> None:
    """Raises ValueError for state that the engine could not keep as the optimizer means it."""
    kind, slots = type(optimizer).__name__, cast(Any, optimizer.slots(entry.shape))  # a user's may return anything
    if not isinstance(slots, dict) or not all(isinstance(slot, Slot) for slot in slots.values()):
        raise ValueError(f"{kind}.slots({entry.shape}) returns {slots!r}; return a dict of names and Slot(shape)")
    other = next((name for name, slot in slots.items() if slot.shape != entry.shape), None)
    if other is not None and optimizer.cut_of(entry.shape) == "anywhere":
        raise ValueError(f"{kind} says cut='anywhere', but its state {other!r} for {entry.name} {entry.shape} is of "
                         f"shape {slots[other].shape}, and cannot be cut with it; say cut='tensor'")


def checked_batches(batches: Any) -> list[Batch]:
    """The micro-batches as a list; ValueError unless there is at least one, and each is a pair."""
    listed = list(batches) if isinstance(batches, Iterable) else []
    pairs = sum(isinstance(batch, tuple | list) and len(batch) == 2 for batch in listed)
    if not listed or pairs != len(listed):
        raise ValueError(f"a step takes micro-batches (x, target), at least one; found {len(listed)} items, {pairs} of "
                         "them pairs. Pass [(x, target), ...]")
    return listed


# -- Looking at one parameter's whole state, wherever its pieces rest ------------------------------------------------
# Legend: N ranks; a parameter of shape (..., ).


def whole_state(families: Sequence[States], name: str) -> dict[str, np.ndarray | None]:
    """The whole parameter, mean gradient, master and optimizer slots of one parameter, each of its shape.

    Slots of another shape (a matrix's factors) are not among them: `States.own_slots` has them, on the ranks that keep
    them.
    """
    known = {entry.name: states for states in families for entry in states.layout.entries}
    states = known.get(str(name))
    if states is None:
        raise ValueError(f"the model has no parameter {name!r}; it has {', '.join(known)}"
                         f"{did_you_mean(name, known)}")
    entry = states.layout.by_name[str(name)]
    found: dict[str, np.ndarray | None] = {
        "parameter": whole(states, states.parameter, states.stage.parameters, entry),
        "gradient": mean_gradient(states, entry),
        "master": whole(states, states.master, states.master_placement, entry)}
    return found | {slot: whole_slot(states, entry, slot) for slot in states.flat_slots_of(entry)}


def whole(states: States, array: np.ndarray, placement: Placement, entry: Entry) -> np.ndarray:
    """One parameter's elements of an array at rest, gathered where it is sharded: a copy, of the parameter's shape."""
    if placement is not SHARDED:
        return array[entry.low:entry.high].reshape(entry.shape).copy()
    return _gathered(states, entry, array[states.layout.owned(states.rank.index, entry.low, entry.high)])


def whole_slot(states: States, entry: Entry, name: str) -> np.ndarray:
    """One slot of one parameter, gathered where it is sharded: a copy, of the parameter's shape."""
    if name in states.slots and (entry.name, name) not in states.own_slots:
        return whole(states, states.slots[name], states.stage.optimizer, entry)
    nothing = states.rank.kernels.empty(0, states.slot_dtype(states.slots_of(entry)[name]))
    own = states.own_slots.get((entry.name, name), nothing)
    return _gathered(states, entry, own) if states.stage.optimizer is SHARDED else own.reshape(entry.shape).copy()


def _gathered(states: States, entry: Entry, own: np.ndarray) -> np.ndarray:
    """The tensor of which every rank has ``own``; a parameter lies in one region."""
    found: np.ndarray = states.rank.all_gather(own, splits=states.layout.cut(entry.low, entry.high), purpose="state")
    return found.reshape(entry.shape)


def mean_gradient(states: States, entry: Entry) -> np.ndarray | None:
    """fp32(sum) / (S * N * k) between reduce() and update(); None otherwise."""
    if states.reduced is None:
        return None
    total = whole(states, states.reduced.array, states.reduced.placement, entry)
    mean: np.ndarray = states.rank.kernels.empty(total.size, np.float32)
    states.rank.kernels.gradient_block(total.reshape(-1), states.reduced.divisor, 1.0, mean)
    return mean.reshape(entry.shape)


# -- Forward and backward over the units, with the recomputation policy between them ---------------------------------
# Legend: B batch, I inputs, O outputs. Each unit's weights live as long as its ``with`` block.


@dataclass(slots=True)
class Tape:
    """What forward leaves for backward: the loss, and per unit what it kept, or at a segment's start its input.

    ``ctx`` is that of this micro-batch: what was drawn forward is drawn again by it.
    """

    ctx: Context
    loss: float
    kept_by_loss: Any
    kept: list[Any]
    inputs: dict[int, np.ndarray]
    tokens: int
    places: int
    weights: object = None  # stands for the weights that it was made with
    used: bool = False


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs a model's units on one rank, their weights lent by ``lender`` inside ``with`` blocks."""

    model: Model
    recompute: Recompute
    lender: Lender
    absorb: Callable[[Unit, Gradients], None]
    rank: Rank

    def forward(self, ctx: Context, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> the tape, with the mean loss, as the model's loss takes it."""
        units = self.model.units
        starts = {segment.start for segment in self.recompute.segments(len(units))}
        kept: list[Any] = []
        inputs: dict[int, np.ndarray] = {}
        self.lender.follow(range(len(units)))
        for index, unit in enumerate(units):
            if index in starts:
                inputs[index] = self._checkpoint(x)
            x, kept_here = self._forward(ctx, unit, x, "forward")
            kept.append(None if starts else kept_here)
            del kept_here
        with self.rank.trace.span("loss"):
            loss, kept_by_loss = self.model.loss.forward(ctx, x, target)
        return Tape(ctx, loss, kept_by_loss, kept, inputs, self.model.loss.tokens(ctx, target), target.size)

    def backward(self, tape: Tape, scale: float) -> None:
        """Goes back unit by unit, handing each one's gradients to ``absorb``; uses the tape up. ``scale`` is S."""
        if tape.used:
            raise ValueError(
                "this tape has been taken back already, and what it kept is freed; make a new one by forward()"
            )
        tape.used = True
        segments = self.recompute.segments(len(self.model.units)) or [range(len(self.model.units))]
        self.lender.follow([index for segment in reversed(segments) for index in self._order(segment, tape)])
        with self.rank.trace.span("loss"):
            dy: np.ndarray | None = self.model.loss.backward(tape.ctx, tape.kept_by_loss, scale)
        tape.kept_by_loss = None
        for segment in reversed(segments):
            if segment.start in tape.inputs:
                dy = self._backward(segment[-1], tape, dy, self._run_again(segment[:-1], tape))
                segment = segment[:-1]
            for index in reversed(segment):
                dy = self._backward(index, tape, dy, None)

    @staticmethod
    def _order(segment: range, tape: Tape) -> list[int]:
        """In which order a segment's units are lent in backward: those that are run again first."""
        again = segment[:-1] if segment.start in tape.inputs else range(0)
        return [*again, *reversed(segment)]

    def _checkpoint(self, x: np.ndarray) -> np.ndarray:
        """Keeps a unit's input for the second forward; the batch itself is kept as the input that it is."""
        if self.rank.memory.kind_of(x) == "activation":
            self.rank.memory.reclassify(x, "checkpointed_input")
        return x

    def _run_again(self, units: range, tape: Tape) -> np.ndarray:
        """Recomputes what ``units`` kept from the segment's input; returns the input of the segment's last unit."""
        x = tape.inputs.pop(units.start)
        for index in units:
            x, tape.kept[index] = self._forward(tape.ctx, self.model.units[index], x, "recompute")
        return x

    def _forward(self, ctx: Context, unit: Unit, x: np.ndarray, span: str) -> tuple[np.ndarray, Any]:
        with self.rank.trace.span(span), self.rank.trace.span(unit.name), self.lender.weights(unit, in_pass=True) as w:
            return unit.forward(ctx, w, x)

    def _backward(self, index: int, tape: Tape, dy: np.ndarray | None, x: np.ndarray | None) -> np.ndarray | None:
        """One unit back; given its input ``x``, it first runs forward again under the same weights."""
        unit = self.model.units[index]
        if dy is None:
            after = self.model.units[index + 1].name
            raise ValueError(f"unit {after!r} gave back no gradient of its input, which unit {unit.name!r} needs; only "
                             "the model's first unit may leave it out (of linear units, first=True says so)")
        kept, tape.kept[index] = tape.kept[index], None
        with (self.rank.trace.span("backward"), self.rank.trace.span(unit.name),
              self.lender.weights(unit, in_pass=True) as w):
            if x is not None:
                with self.rank.trace.span("recompute"):
                    kept = unit.forward(tape.ctx, w, x)[1]
            dx, gradients = unit.backward(tape.ctx, w, kept, dy)
            del kept, x, dy
            self.absorb(unit, gradients)
        return dx


# -- The micro-batches of a step: what is charged for them, what is drawn for them, and how many tokens they have ----
# Legend: B batch, T tokens of a sample; N ranks, k micro-batches. Micro-batch j of rank r has the number j·N + r in its
# step: whatever is drawn for it depends on that number, and on no layout and no length.


FP32 = np.dtype(np.float32)


class MicroBatches:
    """One rank's micro-batches of the step under way."""

    def __init__(self, rank: Rank, model: Model, policy: Policy, ctx: Context, seed: int) -> None:
        self.rank, self.model, self.policy, self.ctx, self.seed = rank, model, policy, ctx, seed
        self.step = 0
        self.tokens: list[int] = []  # of each micro-batch that has gone back in this step
        self.places: list[int] = []
        self._forwards = 0

    def next_step(self) -> None:
        """Begins to count anew."""
        self.step += 1
        self._forwards = 0
        self.tokens, self.places = [], []

    def context(self) -> Context:
        """The context of the next forward: what it draws, its backward draws again."""
        number = self._forwards * self.rank.size + self.rank.index
        self._forwards += 1
        return replace(self.ctx, draw=partial(self._draw, self.step, number))

    def _draw(self, step: int, number: int, name: str, count: int, span: slice) -> np.ndarray:
        return draw_for(self.seed, step, number, name, span)

    # -- memory -------------------------------------------------------------------------------------------------------

    def charged(self, x: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a micro-batch, charged as input: x in the compute format, targets in fp32, indices as they are."""
        first, loss = self.model.units[0], self.model.loss
        return (self._charged(x, self.policy.compute_dtype, "x", indices=first.integer_inputs),
                self._charged(target, FP32, "target", indices=loss.integer_targets))

    def _charged(self, values: np.ndarray, dtype: np.dtype[Any], name: str, *, indices: bool) -> np.ndarray:
        values = contiguous(values)
        if indices:
            dtype = values.dtype
        else:
            self._refuse_nan(values, name)
        if not indices and (values.dtype.kind in "iu" or not values.dtype.isnative):
            values = values.astype(np.float64)
        charged = self.rank.memory.alloc(values.shape, dtype, "input", name)
        self.rank.kernels.cast_pack(values, charged)
        return charged

    def _refuse_nan(self, values: np.ndarray, name: str) -> None:
        """Raises ValueError for a NaN: it would make every gradient NaN, and every step a skipped one."""
        if count := self.rank.kernels.count_nan(values):
            raise ValueError(f"{name} has NaN in {count} of {values.size} values, and with it every gradient; "
                             "look at where the data come from")

    # -- tokens -------------------------------------------------------------------------------------------------------

    def count(self, tape: Tape) -> None:
        """Counts the tokens of a micro-batch that has gone back.

        Raises ValueError where a loss is normalized by all tokens and micro-batches have not the same places: each
        mean is over its own, and a mean of those would weigh tokens differently.
        """
        if self.model.loss.is_global and self.places and tape.places != self.places[0]:
            raise ValueError("normalization='global' weighs every token the same only where micro-batches have equally "
                             f"many places, found {self.places[0]} and {tape.places}; fill shorter ones up with "
                             "targets of -1")
        self.tokens.append(tape.tokens)
        self.places.append(tape.places)

    def token_share(self) -> float:
        """1, or where the loss is normalized by all ranks' tokens, the share of places that have one: tokens/(N·k·B·T).

        A loss that divides by its B·T places, and a mean gradient divided by this, weigh every token the same.
        """
        if not self.model.loss.is_global:
            return 1.0
        places = sum(self.places)
        found = self.rank.all_gather(np.array([sum(self.tokens)], np.int64), purpose="control",
                                     agreement=f"{places} places in all micro-batches of the step")
        tokens = int(found.sum())
        if not tokens:
            raise ValueError("no rank has a valid target in this step, and a mean over none does not exist; "
                             "leave the step out")
        return tokens / (self.rank.size * places)


# -- The engine: one rank's training step under any placement of parameters, gradients and optimizer state -----------
# Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches;
# B batch, I inputs, O outputs; S loss scale.
# Source: Rajbhandari et al. 2020 (ZeRO), section 5; Micikevicius et al. 2018 (mixed precision), section 3.


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
        return whole_state(self.families, name)

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
