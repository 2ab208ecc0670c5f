"""Whole tensors: updates by optimizers that need them, and a look at all the state of one parameter.

Where one rank owns a tensor it updates it alone, where several do all gather it and its state, and each keeps its own
elements. A look gathers in the same way.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from zerosim.numerics.checks import FP32, unknown_name, work_type
from zerosim.optim.base import UpdateContext, round_back, upcast
from zerosim.zero.layout import LayoutEntry, ParameterPiece
from zerosim.zero.param_group import GRADIENT, MASTER, ParamGroup, StepContext
from zerosim.zero.placements import SHARDED, Placement, Workplace

# -- updates of whole tensors ------------------------------------------------------------------------------------------


def update_tensor(group: ParamGroup, piece: ParameterPiece, context: StepContext) -> None:
    """One step on a tensor that lies whole on this rank."""
    entry, place = piece.entry, group.store.workplace
    at_rest = group.at_rest(piece)
    with group.store.arrays_at(at_rest, place, written=at_rest.keys() - {GRADIENT}) as arrays:
        shaped = {name: x.reshape(entry.shape) if name in (MASTER, GRADIENT) or group.is_flat(entry, name) else x
                  for name, x in arrays.items()}
        _step(group, entry, shaped, context, place)
        cast_nbytes = group.cast(piece, slice(0, piece.count), arrays[MASTER])
    group.note_update(at_rest, cast_nbytes)


def update_gathered(group: ParamGroup, entry: LayoutEntry, piece: ParameterPiece | None, context: StepContext) -> None:
    """One step on a tensor that lies on several ranks, of which this one has ``piece``, or none.

    Every rank takes part in the gathers; only those that own a piece compute, on the device.
    """
    reduced, cut, store = group.reduced_gradient, group.layout.cut(entry.low, entry.high), group.store
    flat = [name for name in group.slots_of(entry) if group.is_flat(entry, name)]
    own = {name: _own_slot(group, entry, name) for name in flat}
    own[MASTER] = group.master_elements(piece) if piece is not None else _own(
        group, entry, group.master, group.master_placement)
    whole = {name: _all_gather(group, entry, part) for name, part in own.items()}
    whole[GRADIENT] = _all_gather(group, entry, _own(group, entry, reduced.gradient, reduced.placement))
    if piece is None:
        return
    others = {name: group.own_slots[entry.name, name] for name in group.slots_of(entry) if name not in flat}
    here = slice(cut[group.rank.index], cut[group.rank.index + 1])
    with store.arrays_at(others, store.device) as arrays:
        _step(group, entry, whole | arrays, context, store.device)
    for name, part in own.items():
        store.move(whole[name].reshape(-1)[here], part)
    cast_nbytes = group.cast(piece, slice(0, piece.count), whole[MASTER].reshape(-1)[here], on_device=True)
    group.note_update(whole | others, cast_nbytes)


def _step(group: ParamGroup, entry: LayoutEntry, arrays: Mapping[str, np.ndarray], context: StepContext,
          place: Workplace) -> None:
    """One update of a whole tensor, of its parameter's shape, in fp32, with copies in workspace."""
    empty, kernels = partial(place.memory.alloc, dtype=FP32, kind="workspace", name=entry.name), place.kernels
    g = empty(entry.shape)
    kernels.gradient_block(arrays[GRADIENT], group.reduced_gradient.divisor, context.clip_factor, g)
    factors = tuple(group.store.read(factor, place) for factor in context.factors.get(entry.name, ()))
    ctx = UpdateContext(kernels, factors=factors or None, alloc=empty, note=place.note)
    at_rest = {name: x for name, x in arrays.items() if name != GRADIENT}
    wide = upcast(kernels, lambda _, shape: empty(shape), at_rest)
    group.optimizer(entry, context).apply(
        ctx, wide[MASTER], g, {name: x for name, x in wide.items() if name != MASTER}, context.step)
    round_back(kernels, wide, at_rest)


# -- a look at one parameter -------------------------------------------------------------------------------------------


def whole_state(group: ParamGroup, entry: LayoutEntry, only: Collection[str] | None = None
                ) -> dict[str, np.ndarray | None]:
    """The whole parameter, mean gradient, master and optimizer slots of one parameter, each of its shape; or some.

    Slots of another shape (a matrix's factors) are not among them: ``own_slots`` has them, on the ranks that keep them.
    """
    found: dict[str, Callable[[], np.ndarray | None]] = {
        "parameter": lambda: _whole(group, entry, group.parameter, group.stage.parameters),
        "gradient": lambda: _mean_gradient(group, entry),
        "master": lambda: _whole(group, entry, group.master, group.master_placement)}
    for slot in [] if group.frozen else group.slots_of(entry):
        if group.is_flat(entry, slot):
            found[slot] = partial(_whole_slot, group, entry, slot)
    asked = [*found] if only is None else [only] if isinstance(only, str) else [*only]
    for kind in asked:
        if kind not in found:
            raise unknown_name(f"{entry.name} has no {kind!r}", kind, found, "it has")
    return {kind: look() for kind, look in found.items() if kind in asked}


def _mean_gradient(group: ParamGroup, entry: LayoutEntry) -> np.ndarray | None:
    """fp32(sum) / (S * N * k) between reduce() and update(), all float64 under fp64; None otherwise."""
    if group.reduced is None:
        return None
    total = _whole(group, entry, group.reduced.gradient, group.reduced.placement)
    mean: np.ndarray = group.rank.kernels.empty(total.size, work_type(total))
    group.rank.kernels.gradient_block(total.reshape(-1), group.reduced.divisor, 1.0, mean)
    return mean.reshape(entry.shape)


# -- one tensor's elements: this rank's, and all -----------------------------------------------------------------------


def _whole(group: ParamGroup, entry: LayoutEntry, array: np.ndarray, placement: Placement) -> np.ndarray:
    """The whole tensor of an array that rests under a placement."""
    if placement is SHARDED:
        return _all_gather(group, entry, _own(group, entry, array, SHARDED))
    return _copy(group, entry, array[entry.low:entry.high])


def _all_gather(group: ParamGroup, entry: LayoutEntry, own: np.ndarray) -> np.ndarray:
    """The whole tensor, of which each rank has ``own``, in its shape; a parameter lies in one region."""
    found: np.ndarray = group.rank.all_gather(
        group.store.read(own), splits=group.layout.cut(entry.low, entry.high), purpose="state")
    return found.reshape(entry.shape)


def _copy(group: ParamGroup, entry: LayoutEntry, whole: np.ndarray) -> np.ndarray:
    found: np.ndarray = group.store.read(whole).reshape(entry.shape).copy()
    return found


def _own(group: ParamGroup, entry: LayoutEntry, array: np.ndarray, placement: Placement) -> np.ndarray:
    """The elements of a tensor that this rank owns, in an array at rest."""
    if placement is SHARDED:
        return array[group.layout.owned(group.rank.index, entry.low, entry.high)]
    cut = group.layout.cut(entry.low, entry.high)
    return array[entry.low + cut[group.rank.index]:entry.low + cut[group.rank.index + 1]]


def _whole_slot(group: ParamGroup, entry: LayoutEntry, name: str) -> np.ndarray:
    """The whole of a flat slot."""
    gather = _all_gather if group.stage.optimizer is SHARDED else _copy
    return gather(group, entry, _own_slot(group, entry, name))


def _own_slot(group: ParamGroup, entry: LayoutEntry, name: str) -> np.ndarray:
    """The elements of a flat slot that this rank keeps; none where it updates none of the tensor."""
    nothing: np.ndarray = group.rank.kernels.empty(0, group.slot_dtype(group.slots_of(entry)[name]))
    return group.own_slots.get((entry.name, name), nothing)
