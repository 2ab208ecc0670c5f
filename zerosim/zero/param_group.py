"""Parameter groups: which parameters differ from the others, and in what.

A group names parameters by patterns and says what is different for them; the first group that matches decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.arrays import poison
from zerosim.numerics.formats import format_of
from zerosim.numerics.policy import Policy
from zerosim.numerics.rounding import round_to
from zerosim.optim.base import Optimizer, Slot
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Entry, Layout, ParameterPiece, Piece, Region, UnitShapes, lay_out
from zerosim.zero.placements import REPLICATED, SHARDED, Placement, Stage


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
    """What holds for one parameter: who updates it (None: frozen), and the precision policy it lives under."""

    optimizer: Optimizer | None
    policy: Policy


@dataclass(frozen=True, slots=True)
class Kin:
    """Parameters that rest alike: under one policy, all trained or all frozen. Units that have none are left out."""

    policy: Policy
    frozen: bool
    shapes: UnitShapes
    optimizers: dict[str, Optimizer]


def settings_of(model: Model, optimizer: Optimizer, policy: Policy, groups: Sequence[Group]) -> dict[str, Settings]:
    """By parameter name, what the groups leave and change.

    Raises ValueError for what is no group, for one that matches no parameter and for hyperparameters that the
    optimizer does not have.
    """
    _check(model, groups)
    found = {}
    for name in model.shapes:
        group = next((group for group in groups if group.matches(name)), None)
        found[name] = Settings(optimizer, policy) if group is None else _settings(group, optimizer, policy)
    return found


def kin_of(model: Model, settings: dict[str, Settings]) -> list[Kin]:
    """The parameters by what they have in common, in the order in which the model first names one of each."""
    keys = dict.fromkeys(_key(one) for one in settings.values())
    return [Kin(policy, frozen, dict(_shapes(model, settings, (policy, frozen))),
                {name: one.optimizer for name, one in settings.items()
                 if _key(one) == (policy, frozen) and one.optimizer is not None})
            for policy, frozen in keys]


def _key(one: Settings) -> tuple[Policy, bool]:
    return one.policy, one.optimizer is None


def _shapes(model: Model, settings: dict[str, Settings],
            key: tuple[Policy, bool]) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    for unit in model.units:
        shapes = {name: shape for name, shape in unit.shapes.items() if _key(settings[name]) == key}
        if shapes:
            yield unit.name, shapes


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


# -- What a rank holds of parameters of one kin between steps: weights, gradients, master weights, optimizer state ---
# Legend: n elements of the padded vector, s of this rank's shard; at rest an array is (n,) or (s,) by its placement.


@dataclass(slots=True)
class Reduced:
    """The gradient's sum over ranks, how it rests, and by what it is divided to be the mean."""

    array: np.ndarray
    placement: Placement
    divisor: float


class States:
    """The arrays at rest, each under its placement, and the pieces of them that a step works on."""

    def __init__(self, rank: Rank, model: Model, kin: Kin, layout: str, stage: Stage) -> None:
        self.rank, self.model, self.stage, self.policy = rank, model, stage, kin.policy
        self.frozen, self.optimizers = kin.frozen, kin.optimizers
        self.layout = lay_out(layout, kin.shapes, rank.size)
        self.parameter = self._alloc(stage.parameters, self.policy.compute_dtype, "parameter")
        self.gradient = rank.xp.empty(0, np.float32) if self.frozen else self._alloc(
            stage.gradients, self.policy.accumulate_dtype, "gradient")
        self.master = self.parameter if self.parameter_is_master else self._alloc(
            stage.optimizer, self.policy.master_dtype, "master")
        self.reduced: Reduced | None = None
        self.pieces = self._pieces()
        self.slots: dict[str, np.ndarray] = {}  # one vector beside the master: slots that every parameter has
        self.own_slots: dict[tuple[str, str], np.ndarray] = {}  # of one parameter: (its name, the slot's)
        self._make_slots()
        self._initialize()

    @property
    def parameter_is_master(self) -> bool:
        """True where no second copy is kept: it would have the same format, and the rank's parameters cover it."""
        covered = self.stage.parameters is REPLICATED or self.stage.optimizer is SHARDED
        return self.frozen or (self.policy.compute_dtype == self.policy.master_dtype and covered)

    @property
    def master_placement(self) -> Placement:
        """How ``master`` rests: as the optimizer's state, or as the parameter that it is."""
        return self.stage.parameters if self.parameter_is_master else self.stage.optimizer

    def length(self, placement: Placement) -> int:
        """Elements at rest under a placement."""
        return self.layout.shard_length(self.rank.index) if placement is SHARDED else self.layout.length

    def regions_held(self, placement: Placement) -> list[Piece]:
        """The valid stretches that this rank holds under a placement, region by region: its own, or all of each."""
        return self.layout.valid(self.rank.index) if placement is SHARDED else self.layout.valid_regions()

    def slot(self, piece: ParameterPiece, name: str) -> np.ndarray:
        """The elements of a slot that belong to a piece (n,), or the slot itself where it has another shape."""
        own = self.own_slots.get((piece.entry.name, name))
        if own is None:
            return self.slots[name][at(piece, self.stage.optimizer)]
        if self.stage.optimizer is SHARDED or not self.is_flat(piece.entry, name):
            return own
        return own[piece.start:piece.start + piece.count]

    @property
    def gradient_sum(self) -> Reduced:
        """The reduced gradient, between reduce() and update()."""
        assert self.reduced is not None, "update() checks that there is one"
        return self.reduced

    def pieces_in(self, region: Region) -> list[ParameterPiece]:
        """What this rank updates of one region."""
        return [piece for piece in self.pieces if region.low <= piece.vector.start < region.high]

    def slots_of(self, entry: Entry) -> dict[str, Slot]:
        """What the parameter's optimizer keeps for it, by name."""
        return self.optimizers[entry.name].slots(entry.shape)

    def flat_slots_of(self, entry: Entry) -> list[str]:
        """The names of its slots that have an element for each of the parameter's."""
        return [] if self.frozen else [name for name in self.slots_of(entry) if self.is_flat(entry, name)]

    def slot_dtype(self, slot: Slot) -> np.dtype:
        """fp32 slots rest in the policy's format of state; others as the optimizer says."""
        return self.policy.state_dtype if slot.format == "fp32" else format_of(slot.format).dtype

    def is_flat(self, entry: Entry, name: str) -> bool:
        """True for a slot with an element for each of the parameter's."""
        return self.slots_of(entry)[name].shape == entry.shape

    # -- what is made at the start ------------------------------------------------------------------------------------

    def _pieces(self) -> list[ParameterPiece]:
        """What this rank updates, parameter by parameter: what it owns, or all where the state is replicated."""
        if self.frozen:
            return []
        if self.stage.optimizer is SHARDED:
            return self.layout.parameter_pieces(self.rank.index)
        return self.layout.whole_parameters()

    def _alloc(self, placement: Placement, dtype: np.dtype, kind: str, name: str = "") -> np.ndarray:
        array = self.rank.memory.alloc(self.length(placement), dtype, kind, name or kind)
        clear_padding(array, self.layout, placement, self.rank)
        return array

    def _make_slots(self) -> None:
        """A slot that every parameter has lies in one vector beside the master; any other is an array of its own."""
        kept = {entry.name: self.slots_of(entry) for entry in self.layout.entries if not self.frozen}
        flat = [{(name, self.slot_dtype(slot)) for name, slot in slots.items() if self.is_flat(entry, name)}
                for entry in self.layout.entries if (slots := kept.get(entry.name)) is not None]
        shared = set.intersection(*flat) if flat else set()
        for name, dtype in sorted(shared, key=str):
            self.slots[name] = self._alloc(self.stage.optimizer, dtype, "optimizer_state", name)
            for piece in self.regions_held(self.stage.optimizer):
                self.slots[name][at(piece, self.stage.optimizer)] = 0
        for entry, count in self._held_entries():
            for name, slot in kept[entry.name].items():
                if (name, self.slot_dtype(slot)) not in shared or not self.is_flat(entry, name):
                    shape = count if self.is_flat(entry, name) else slot.shape
                    own = self.rank.memory.alloc(shape, self.slot_dtype(slot), "optimizer_state",
                                                 f"{entry.name} {name}")
                    own[...] = 0
                    self.own_slots[entry.name, name] = own

    def _held_entries(self) -> Iterator[tuple[Entry, int]]:
        """The parameters of which this rank updates elements, and how many of each."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.entry.name] = counts.get(piece.entry.name, 0) + piece.count
        yield from ((self.layout.by_name[name], count) for name, count in counts.items())

    def _initialize(self) -> None:
        """Draws the first values piece by piece: no rank holds more than it keeps, and no value depends on N."""
        kernels, stage = self.rank.kernels, self.stage
        copies = [(self.parameter, stage.parameters)]
        if not self.parameter_is_master:
            copies.append((self.master, stage.optimizer))
        for array, placement in copies:
            for piece in self.regions_held(placement):
                target, start = array[at(piece, placement)], piece.vector.start
                for entry, low, high in self.layout.entries_in(start, piece.vector.stop):
                    kernels.fill(target[low - start:high - start], partial(self._first_values, entry, low - entry.low))

    def _first_values(self, entry: Entry, start: int, span: slice) -> np.ndarray:
        """The first values of a stretch of a parameter, which itself begins at the parameter's element ``start``."""
        unit = next(unit for unit in self.model.units if unit.name == entry.unit)
        values = unit.initial(entry.name, start + span.start, span.stop - span.start)
        # Weights are cast from the master, whatever its format, from the start.
        return values if self.frozen else round_to(values, self.policy.master)


def at(piece: Piece, placement: Placement) -> slice:
    """Where a piece lies in an array that rests under a placement."""
    return piece.shard if placement is SHARDED else piece.vector


def clear_padding(array: np.ndarray, layout: Layout, placement: Placement, rank: Rank) -> None:
    """Sets padding to zero, so that no chance bits travel; in debug mode to NaN, so that a leak is seen."""
    for low, high in padding_of(layout, placement, rank.index):
        if rank.memory.debug:
            poison(array[low:high])
        else:
            array[low:high] = 0


def padding_of(layout: Layout, placement: Placement, rank: int) -> Iterator[tuple[int, int]]:
    """The stretches of padding in an array at rest."""
    if placement is not SHARDED:
        yield from ((region.valid_high, region.high) for region in layout.regions)
        return
    for piece, region in zip(layout.valid(rank), layout.regions, strict=True):
        yield piece.shard.stop, piece.shard.start + region.bounds[rank + 1] - region.bounds[rank]
