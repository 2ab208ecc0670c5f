"""The optimizer's work on whole tensors: where one rank owns all of it, or after its pieces have been gathered.

Legend: a tensor has its parameter's own shape. No optimizer ever updates part of a matrix.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from zerosim.optim.base import UpdateContext
from zerosim.zero.layout import Entry, ParameterPiece
from zerosim.zero.pieces import Moment, note_update
from zerosim.zero.placements import SHARDED, Placement
from zerosim.zero.states import States, at
from zerosim.zero.wide import FP32, wide


def is_torn(states: States, entry: Entry) -> bool:
    """True where more than one rank owns elements of a tensor whose optimizer state is sharded."""
    owners = sum(low < high for low, high in pairwise(states.layout.cut(entry.low, entry.high)))
    return states.stage.optimizer is SHARDED and owners > 1


def update_tensor(states: States, piece: ParameterPiece, moment: Moment) -> None:
    """One step on a tensor that lies whole on this rank."""
    entry, reduced = piece.entry, states.gradient_sum
    state = {name: slot.reshape(entry.shape) if states.is_flat(entry, name) else slot
             for name in states.slots_of(entry) for slot in [states.slot(piece, name)]}
    w = states.master[at(piece, states.master_placement)].reshape(entry.shape)
    _step(states, entry, w, reduced.array[at(piece, reduced.placement)].reshape(entry.shape), state, moment)


def update_gathered(states: States, entry: Entry, moment: Moment) -> None:
    """One step on a tensor that lies on several ranks: all gather it and its state, and each keeps its own piece.

    Every rank takes part in the gathers; only those that own a piece compute.
    """
    reduced, cut = states.gradient_sum, states.layout.cut(entry.low, entry.high)
    flat = [name for name in states.slots_of(entry) if states.is_flat(entry, name)]
    own = {name: _own_slot(states, entry, name) for name in flat}
    own[""] = _own(states, entry, states.master, states.master_placement)
    whole = {name: states.rank.all_gather(part, splits=cut, purpose="state").reshape(entry.shape)
             for name, part in own.items()}
    s = states.rank.all_gather(_own(states, entry, reduced.array, reduced.placement), splits=cut, purpose="state")
    here = slice(cut[states.rank.index], cut[states.rank.index + 1])
    if here.start == here.stop:
        return
    others = {name: states.own_slots[entry.name, name] for name in states.slots_of(entry) if name not in flat}
    _step(states, entry, whole[""], s.reshape(entry.shape), {name: whole[name] for name in flat} | others, moment)
    for name, part in own.items():
        part[...] = whole[name].reshape(-1)[here]


def _step(states: States, entry: Entry, w: np.ndarray, s: np.ndarray, state: dict[str, np.ndarray],
          moment: Moment) -> None:
    """One update of a whole tensor in fp32; the gradient and what rests in fewer bits are widened in workspace."""
    rank, optimizer = states.rank, states.optimizers[entry.name]
    empty = partial(rank.memory.alloc, dtype=FP32, kind="workspace", name=entry.name)
    g = empty(entry.shape)
    rank.kernels.gradient_block(s, states.gradient_sum.divisor, moment.clip_factor, g)
    ctx = UpdateContext(rank.kernels, factors=moment.factors.get(entry.name), alloc=empty,
                        note=rank.trace.compute)
    with wide(rank.kernels, lambda _, shape: empty(shape), {**state, "": w}) as arrays:
        optimizer.apply(ctx, arrays[""], g, {name: arrays[name] for name in state}, moment.step,
                        moment.group(optimizer))
    note_update(states, w, s, state)


def _own(states: States, entry: Entry, array: np.ndarray, placement: Placement) -> np.ndarray:
    """This rank's elements of a tensor, in an array at rest."""
    if placement is SHARDED:
        return array[states.layout.owned(states.rank.index, entry.low, entry.high)]
    cut = states.layout.cut(entry.low, entry.high)
    return array[entry.low + cut[states.rank.index]:entry.low + cut[states.rank.index + 1]]


def _own_slot(states: States, entry: Entry, name: str) -> np.ndarray:
    """This rank's elements of a flat slot; none where it owns none of the tensor."""
    if name in states.slots and (entry.name, name) not in states.own_slots:
        return _own(states, entry, states.slots[name], SHARDED)
    nothing: np.ndarray = states.rank.kernels.empty(0, states.slot_dtype(states.slots_of(entry)[name]))
    return states.own_slots.get((entry.name, name), nothing)
