"""Looking at one parameter's whole state, wherever its pieces rest.

Legend: N ranks; a parameter of shape (..., ).
"""

from collections.abc import Sequence

import numpy as np

from zerosim.numerics.names import did_you_mean
from zerosim.zero.layout import Entry
from zerosim.zero.placements import SHARDED, Placement
from zerosim.zero.states import States


def state(families: Sequence[States], name: str) -> dict[str, np.ndarray | None]:
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
