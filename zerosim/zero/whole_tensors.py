"""Updates by optimizers that need whole tensors: one rank owns a tensor, or all gather it, and no part alone."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from zerosim.numerics.checks import FP32
from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.places import DEVICE
from zerosim.optim.base import UpdateContext, upcast
from zerosim.zero.layout import LayoutEntry, ParameterPiece
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.pieces import GRADIENT, MASTER, StepContext, arrays_at_rest, note_update


def update_tensor(group: ParamGroup, piece: ParameterPiece, context: StepContext) -> None:
    """One step on a tensor that lies whole on this rank."""
    entry, transfers = piece.entry, group.transfers
    at_rest = arrays_at_rest(group, piece, context)
    with transfers.staged(at_rest, transfers.update_place, written=at_rest.keys() - {GRADIENT}) as arrays:
        shaped = {name: x.reshape(entry.shape) if name in (MASTER, GRADIENT) or group.is_flat(entry, name) else x
                  for name, x in arrays.items()}
        _step(group, entry, shaped, context, transfers.update_place)
        cast_nbytes = context.updated.cast(group, piece, slice(0, piece.count), arrays[MASTER], transfers.update_place)
    note_update(group, at_rest, cast_nbytes)


def update_gathered(group: ParamGroup, entry: LayoutEntry, piece: ParameterPiece | None, context: StepContext) -> None:
    """One step on a tensor that lies on several ranks: all gather it and its state, and each keeps its own piece.

    Every rank takes part in the gathers; only those that own a piece compute, on the device.
    """
    reduced, cut, transfers = group.reduced_gradient, group.layout.cut(entry.low, entry.high), group.transfers
    flat = [name for name in group.slots_of(entry) if group.is_flat(entry, name)]
    own = {name: group.own_slot(entry, name) for name in flat}
    own[MASTER] = group.own(entry, group.master, group.master_placement)
    if piece is not None:
        own[MASTER] = context.updated.master(group, piece)
    whole = {name: group.all_gather_tensor(entry, part) for name, part in own.items()}
    whole[GRADIENT] = group.all_gather_tensor(entry, group.own(entry, reduced.gradient, reduced.placement))
    if piece is None:
        return
    others = {name: group.own_slots[entry.name, name] for name in group.slots_of(entry) if name not in flat}
    here = slice(cut[group.rank.index], cut[group.rank.index + 1])
    with transfers.staged(others, DEVICE) as arrays:
        _step(group, entry, whole | arrays, context, DEVICE)
    for name, part in own.items():
        transfers.move(whole[name].reshape(-1)[here], part)
    cast_nbytes = context.updated.cast(group, piece, slice(0, piece.count), whole[MASTER].reshape(-1)[here], DEVICE)
    note_update(group, whole | others, cast_nbytes)


def _step(group: ParamGroup, entry: LayoutEntry, arrays: Mapping[str, np.ndarray], context: StepContext,
          place: str) -> None:
    """One update of a whole tensor, of its parameter's shape, in fp32, with copies in workspace."""
    rank = group.rank
    memory, note = (rank.memory, rank.trace.compute) if place == DEVICE else (rank.memory.host, do_nothing)
    empty = partial(memory.alloc, dtype=FP32, kind="workspace", name=entry.name)
    g = empty(entry.shape)
    kernels = group.transfers.kernels_at(place)
    kernels.gradient_block(arrays[GRADIENT], group.reduced_gradient.divisor, context.clip_factor, g)
    factors = tuple(group.transfers.at(place, factor) for factor in context.factors.get(entry.name, ()))
    ctx = UpdateContext(kernels, factors=factors or None, alloc=empty, note=note)
    with upcast(kernels, lambda _, shape: empty(shape),
                {name: x for name, x in arrays.items() if name != GRADIENT}) as wide:
        context.optimizer(group, entry.name).apply(
            ctx, wide[MASTER], g, {name: x for name, x in wide.items() if name != MASTER}, context.step)
