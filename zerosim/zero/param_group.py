"""Parameter groups: which parameters differ from the others, and what a rank holds of each group between steps.

A `Group`, which a user writes, names parameters by patterns and says what is different for them; the first that matches
decides. From them the engine makes a `ParamGroup` for parameters that rest in one way: under one policy, all trained or
all frozen.

Legend: n elements of a param group's padded vector, s of this rank's shard; an array at rest is (n,) or (s,) by its
placement.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.models.initializers import Initializer
from zerosim.models.units import Model
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.policy import Policy
from zerosim.numerics.rounding import round_to
from zerosim.optim.base import Optimizer, Slot
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Bucket, Layout, LayoutEntry, ParameterPiece, Parts, Piece, Region, UnitShapes, buckets
from zerosim.zero.placements import REPLICATED, SHARDED, BucketOptions, Move, Placement, Stage, Store, redistribute

# -- what a user asks for ---------------------------------------------------------------------------------------------


class Group:
    """Parameters whose names match one of the patterns, and what is different for them.

    ``frozen``: not trained, no gradient, no optimizer state. ``compute``: the format of its weights at rest, instead of
    the policy's. ``optimizer``: instead of the engine's. Hyperparameters replace those of the optimizer, as in
    ``Group("*.bias", weight_decay=0.0)``. Patterns are a shell's: ``*``, ``?``, ``[abc]``.
    """

    def __init__(self, *patterns: str, frozen: bool = False, compute: str | None = None,
                 optimizer: Optimizer | None = None, **hyperparameters: Any) -> None:
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"a group needs patterns of parameter names, found {patterns!r}; "
                             "write Group('*.bias', ...)")
        if frozen and (optimizer is not None or hyperparameters):
            raise ValueError(f"the group {patterns} is frozen, and was given an optimizer or hyperparameters, which "
                             "nothing would read; leave them out, or leave frozen out")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(f"the group {patterns} was given optimizer={optimizer!r}; write zs.optim.Adam(lr=...)")
        self.patterns, self.frozen, self.compute = patterns, bool(frozen), compute
        self.optimizer, self.hyperparameters = optimizer, hyperparameters

    def matches(self, name: str) -> bool:
        """True where one of the patterns matches the parameter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __repr__(self) -> str:
        options = {"frozen": self.frozen or None, "compute": self.compute, "optimizer": self.optimizer,
                   **self.hyperparameters}
        said = [repr(pattern) for pattern in self.patterns]
        return f"Group({', '.join(said + [f'{k}={v!r}' for k, v in options.items() if v is not None])})"


@dataclass(frozen=True, slots=True)
class Settings:
    """The optimizer of one parameter (None: frozen), and the precision policy it lives under."""

    optimizer: Optimizer | None
    policy: Policy


def settings_of(model: Model, optimizer: Optimizer, policy: Policy, groups: Sequence[Group]) -> dict[str, Settings]:
    """By parameter name, what the groups leave and change.

    Raises ValueError for what is no group, for one that matches no parameter, for hyperparameters that the optimizer
    does not have, and for a format in which a layer cannot read its parameter.
    """
    _check(model, groups)
    found, fixed = {}, frozenset[str]().union(*(unit.in_compute_format for unit in model.units))
    for name in model.shapes:
        group = next((group for group in groups if group.matches(name)), None)
        found[name] = Settings(optimizer, policy) if group is None else _settings(group, optimizer, policy)
        if found[name].policy.compute != policy.compute and name in fixed:
            others = [other for other in model.shapes if other not in fixed]
            raise ValueError(f"{group!r}: the layer of {name} reads it in the compute format, {policy.compute}; leave "
                             f"compute= out (the master is {policy.master} anyway), or name parameters that may rest "
                             f"in another format: {', '.join(others[:4]) or 'this model has none'}")
    return found


def _settings(group: Group, optimizer: Optimizer, policy: Policy) -> Settings:
    policy = policy if group.compute is None else replace(policy, compute=group.compute)
    if group.frozen:
        return Settings(None, policy)
    return Settings((group.optimizer or optimizer).for_group(group.hyperparameters), policy)


def _check(model: Model, groups: Sequence[Group]) -> None:
    if not isinstance(groups, list | tuple):
        raise ValueError(f"groups takes a list of Group, found {groups!r}; write [Group('*.bias', weight_decay=0.0)]")
    for group in groups:
        if not isinstance(group, Group):
            raise ValueError(f"groups takes a list of Group, found {group!r}; write Group('*.bias', weight_decay=0.0)")
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in model.shapes):
                near = get_close_matches(pattern, model.shapes, 3) or list(model.shapes)[:5]
                raise ValueError(f"{group!r}: no parameter matches {pattern!r}; there are {', '.join(near)}")


# -- what a step hands to its update ----------------------------------------------------------------------------------

MASTER, GRADIENT = "", "the gradient"  # among the names of slots


@dataclass(slots=True)
class ReducedGradient:
    """The gradient's sum over ranks, how it rests, and by what it is divided to be the mean."""

    gradient: np.ndarray
    placement: Placement
    divisor: float


@dataclass(frozen=True, slots=True)
class StepContext:
    """The numbers that all updates of one step share."""

    step: int  # counted from 1, skipped ones not
    clip_factor: float
    lr_factor: float | None  # the schedule's, of every lr
    factors: Mapping[str, Any]  # by weight: what the engine's observer of layers has averaged


# -- what a rank holds ------------------------------------------------------------------------------------------------


def settings_by_group(settings: Mapping[str, Settings]) -> list[dict[str, Settings]]:
    """One for each policy, of trained and of frozen parameters, in the order in which the model first names one."""
    found: dict[tuple[Policy, bool], dict[str, Settings]] = {}
    for name, one in settings.items():
        found.setdefault((one.policy, one.optimizer is None), {})[name] = one
    return list(found.values())


class ParamGroup:
    """Weights, gradients, master weights and optimizer state of some parameters, each under its placement, on one rank.

    ``rank`` is a handle among those that have a shard each, ``settings`` are those of its parameters, by name,
    ``initializer`` makes their first values. ``lay_out`` cuts its vector among the ranks, ``store`` keeps what rests,
    in buckets with these ``options`` it goes to other ranks. ``reduced`` is there between reduce() and update() alone.
    """

    def __init__(self, rank: Rank, model: Model, settings: Mapping[str, Settings], initializer: Initializer,
                 lay_out: Callable[[UnitShapes], Layout], stage: Stage, store: Store, options: BucketOptions) -> None:
        self.rank, self.model, self.stage, self.store, self.options = rank, model, stage, store, options
        self.policy = next(one.policy for one in settings.values())
        self.optimizers = {name: one.optimizer for name, one in settings.items() if one.optimizer is not None}
        self.frozen = not self.optimizers
        of_units = {unit.name: {name: shape for name, shape in unit.shapes.items() if name in settings}
                    for unit in model.units}
        shapes = {unit: shapes for unit, shapes in of_units.items() if shapes}
        self.layout = lay_out(shapes)
        self.parameter = self._alloc(stage.parameters, self.policy.compute_dtype, "parameter")
        self.gradient = rank.xp.empty(0, np.float32) if self.frozen else self._alloc(
            stage.gradients, self.policy.accumulate_dtype, "gradient")
        self.master = self.parameter if self.parameter_is_master else self._alloc(
            stage.optimizer, self.policy.master_dtype, "master")
        self.reduced: ReducedGradient | None = None
        # What this rank updates: region by region, and parameter by parameter.
        self.held = [] if self.frozen else self.regions_held(stage.optimizer)
        self.pieces = self.layout.by_parameter(self.held)
        self._slots = {name: optimizer.slots(self.layout.by_name[name].shape)
                       for name, optimizer in self.optimizers.items()}
        # Tensors that their optimizers need whole, and of which several ranks own elements.
        self.gathered = {entry.name for entry in self.layout.entries if stage.optimizer is SHARDED
                         and not self.frozen and not self.is_elementwise(entry)
                         and sum(low < high for low, high in pairwise(self.layout.cut(entry.low, entry.high))) > 1}
        self.slots: dict[str, np.ndarray] = {}  # one vector beside the master: slots that every parameter has
        self.own_slots: dict[tuple[str, str], np.ndarray] = {}  # what this rank keeps, by parameter and slot
        self._make_slots()
        self._initialize(initializer)

    @property
    def parameter_is_master(self) -> bool:
        """True where no second copy is kept: it would have the same format, and the rank's parameters cover it."""
        covered = self.stage.parameters is REPLICATED or self.stage.optimizer is SHARDED
        return self.frozen or (self.policy.compute_dtype == self.policy.master_dtype and covered)

    @property
    def master_placement(self) -> Placement:
        """The placement of ``master``: that of the optimizer's state, or of the parameter that it is."""
        return self.stage.parameters if self.parameter_is_master else self.stage.optimizer

    @property
    def reduced_gradient(self) -> ReducedGradient:
        """The gradient's sum, between reduce() and update()."""
        assert self.reduced is not None, "update() checks that there is one"
        return self.reduced

    def length(self, placement: Placement) -> int:
        """Elements at rest under a placement."""
        return self.layout.shard_length(self.rank.index) if placement is SHARDED else self.layout.length

    def regions_held(self, placement: Placement) -> list[Piece]:
        """The valid stretches that this rank holds under a placement, region by region: its own, or all of each."""
        return self.layout.valid(self.rank.index) if placement is SHARDED else self.layout.valid_regions()

    def all_gather_scalars(self, mine: np.ndarray) -> np.ndarray:
        """The values of all ranks, in rank order; where state is replicated ``mine`` are those, and nothing is sent."""
        if self.stage.optimizer is not SHARDED:
            return mine
        found: np.ndarray = self.rank.all_gather(mine, purpose="control")
        return found

    # -- on the way to other ranks ------------------------------------------------------------------------------------

    def buckets(self, ranges: Iterable[slice], dtype: np.dtype, layout: Layout | None = None) -> list[Bucket]:
        """These stretches of the vector, or of that of another ``layout``, in buckets of this format."""
        return buckets(layout or self.layout, ranges, self.options.limit(dtype))

    def start_bucket(self, bucket: Bucket, have: Placement, want: Placement, *, source: Parts, target: Parts,
                     dtype: np.dtype, purpose: str, agreement: str, rank: Rank | None = None, add: bool = False,
                     async_op: bool = False) -> Move:
        """Begins to bring a bucket from one placement to another; packs it where it is in pieces.

        What arrives is put into ``target``, with ``add`` onto what is there; before, nothing has to be there. ``rank``
        is a handle among other ranks than those that have a shard each. All parameters and gradients go this way, but
        for whole tensors and what an option sends in another form.
        """
        rank = rank or self.rank
        chunk = bucket.cut[rank.index + 1] - bucket.cut[rank.index]
        vector = self.store.packed(source, chunk if have is SHARDED else bucket.length, dtype)
        in_place = not add and len(target) == 1 and target[0][1].dtype == dtype and self.store.is_array(target[0][1])
        found = redistribute(rank.agreeing(agreement), vector, have, want, bucket.cut, policy=self.policy,
                             out=target[0][1] if in_place else None, purpose=purpose, async_op=async_op,
                             **self.options.of_collectives)
        put = do_nothing if in_place else partial(self.store.put_parts, target, add=add)
        return Move(found, put, async_op=async_op)

    # -- one parameter ------------------------------------------------------------------------------------------------

    def optimizer(self, entry: LayoutEntry, context: StepContext) -> Any:
        """The optimizer of a parameter, with the lr of this step where a schedule changes it."""
        optimizer: Any = self.optimizers[entry.name]
        return optimizer if context.lr_factor is None else optimizer.with_lr(optimizer.lr * context.lr_factor)

    def slots_of(self, entry: LayoutEntry) -> dict[str, Slot]:
        """The state that the parameter's optimizer keeps for it, by name."""
        return self._slots[entry.name]

    def is_flat(self, entry: LayoutEntry, name: str) -> bool:
        """True for a slot with an element for each of the parameter's."""
        return self.slots_of(entry)[name].shape == entry.shape

    def slot_dtype(self, slot: Slot) -> np.dtype:
        """fp32 slots rest in the policy's format of state; others as the optimizer says."""
        return self.policy.state_dtype if slot.format == "fp32" else format_of(slot.format).dtype

    def is_elementwise(self, entry: LayoutEntry) -> bool:
        """True where the parameter's optimizer takes any piece of it."""
        return self.optimizers[entry.name].cut_of(entry.shape) == "anywhere"

    def updates_in(self, region: Region) -> list[tuple[LayoutEntry, ParameterPiece | None]]:
        """The parameters of a region in whose update this rank takes part, in the order of the vector, with the piece
        that it has of each: None for one that is only gathered here."""
        own = {piece.entry.name: piece for piece in self.pieces if region.low <= piece.vector.start < region.high}
        return [(entry, own.get(entry.name)) for entry, _, _ in self.layout.entries_in(region.low, region.high)
                if entry.name in own or entry.name in self.gathered]

    # -- the update of one piece --------------------------------------------------------------------------------------

    def master_elements(self, piece: ParameterPiece) -> np.ndarray:
        """The piece of the master."""
        return elements_of(self.master, piece, self.master_placement)

    def gradient_sum(self, piece: Piece) -> np.ndarray:
        """The piece of the gradient's sum."""
        return elements_of(self.reduced_gradient.gradient, piece, self.reduced_gradient.placement)

    def slot(self, piece: ParameterPiece, name: str) -> np.ndarray:
        """The elements of a slot that belong to a piece (n,), or the slot itself where it has another shape."""
        own = self.own_slots[piece.entry.name, name]
        if self.stage.optimizer is SHARDED or not self.is_flat(piece.entry, name):
            return own
        return own[piece.start:piece.start + piece.count]

    def at_rest(self, piece: ParameterPiece) -> dict[str, np.ndarray]:
        """All that the update of a piece reads or writes, where it lies: master, gradient's sum and each slot."""
        return {MASTER: self.master_elements(piece), GRADIENT: self.gradient_sum(piece),
                **{name: self.slot(piece, name) for name in self.slots_of(piece.entry)}}

    def cast(self, piece: ParameterPiece, here: slice, master: np.ndarray, *, on_device: bool = False) -> int:
        """Rounds a stretch of an updated master (n,) to the parameter's format, as far as this rank has both, at the
        optimizer's workplace or on the device; returns the bytes that this reads and writes."""
        if self.parameter_is_master:
            return 0
        master, target = self.cast_target(piece, here, master)
        place = self.store.device if on_device else self.store.workplace
        with self.store.arrays_at({MASTER: target}, place, read=()) as arrays:
            place.kernels.cast_pack(master, arrays[MASTER])
        return int(master.nbytes + target.nbytes)

    def cast_target(self, piece: ParameterPiece, here: slice, master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The elements of the master, and of the parameter, that this rank has both of."""
        low = piece.vector.start + here.start
        high, rank = low + len(master), self.rank.index
        if self.stage.parameters is REPLICATED:
            return master, self.parameter[low:high]
        cut = self.layout.cut(low, high)
        return master[cut[rank]:cut[rank + 1]], self.parameter[self.layout.owned(rank, low, high)]

    def note_update(self, arrays: Mapping[str, np.ndarray], cast_nbytes: int) -> None:
        """Notes what an update costs: the gradient is read, the rest read and written, and what is cast.

        The operations per element differ from one optimizer to the next, and none takes longer than its memory traffic.
        """
        self.store.note("optimizer_state",
                        2 * sum(x.nbytes for x in arrays.values()) - arrays[GRADIENT].nbytes + cast_nbytes)

    # -- what is made at the start ------------------------------------------------------------------------------------

    def _alloc(self, placement: Placement, dtype: np.dtype, kind: str, name: str = "") -> np.ndarray:
        array: np.ndarray = self.store.alloc(self.length(placement), dtype, kind, name or kind)
        self.clear_padding(array, placement)
        return array

    def clear_padding(self, array: np.ndarray, placement: Placement) -> None:
        """Sets a new array's padding to zero, so that no chance bits travel; in debug mode it stays NaN: a leak is
        seen."""
        if not self.rank.memory.debug:
            held = self.regions_held(placement)
            for piece, high in zip(held, [*(after.shard.start for after in held[1:]), len(array)], strict=True):
                self.store.clear(array[piece.shard.stop:high])

    def _make_slots(self) -> None:
        """A slot that every parameter has lies in one vector beside the master; any other is an array of its own."""
        flat = [{(name, self.slot_dtype(slot)) for name, slot in self._slots[entry.name].items()
                 if self.is_flat(entry, name)} for entry in self.layout.entries if not self.frozen]
        shared = set.intersection(*flat) if flat else set()
        for name, dtype in sorted(shared, key=str):
            self.slots[name] = self._alloc(self.stage.optimizer, dtype, "optimizer_state", name)
            for piece in self.held:
                self.store.clear(elements_of(self.slots[name], piece, self.stage.optimizer))
        for piece in self.pieces:
            for name, slot in self._slots[piece.entry.name].items():
                dtype, is_flat = self.slot_dtype(slot), self.is_flat(piece.entry, name)
                if is_flat and (name, dtype) in shared:
                    own = elements_of(self.slots[name], piece, self.stage.optimizer)
                else:
                    own = self.store.alloc(piece.count if is_flat else slot.shape, dtype, "optimizer_state",
                                           f"{piece.entry.name} {name}")
                    self.store.clear(own)
                self.own_slots[piece.entry.name, name] = own

    def _initialize(self, initializer: Initializer) -> None:
        """Draws the first values piece by piece: no rank holds more than it keeps, and no value depends on N."""
        stage = self.stage
        copies = [(self.parameter, stage.parameters)]
        if not self.parameter_is_master:
            copies.append((self.master, stage.optimizer))
        for array, placement in copies:
            for piece in self.regions_held(placement):
                target, start = elements_of(array, piece, placement), piece.vector.start
                for entry, low, high in self.layout.entries_in(start, piece.vector.stop):
                    self.store.fill(target[low - start:high - start],
                                        partial(self._first_values, initializer, entry.name, low - entry.low))

    def _first_values(self, initializer: Initializer, name: str, start: int, span: slice) -> np.ndarray:
        """The first values of a stretch of a parameter, which itself begins at the parameter's element ``start``."""
        values = initializer(name, start + span.start, span.stop - span.start)
        # Weights are cast from the master, whatever its format, from the start.
        return values if self.frozen else round_to(values, self.policy.first_format)


def elements_of(array: np.ndarray, piece: Piece, placement: Placement) -> np.ndarray:
    """The elements of a piece (n,) in an array that rests under a placement."""
    return array[piece.shard if placement is SHARDED else piece.vector]
