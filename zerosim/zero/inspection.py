"""Looking at one parameter's whole state, wherever its pieces rest.

Legend: N ranks; a parameter of shape (..., ).
"""

from difflib import get_close_matches

import numpy as np

from zerosim.zero.layout import Entry
from zerosim.zero.placements import SHARDED, Placement
from zerosim.zero.states import States
from zerosim.zero.update import Update


def state(states: States, name: str, update: Update) -> dict[str, np.ndarray | None]:
    """The whole parameter, mean gradient, master and optimizer slots of one parameter, each of its shape."""
    entry = states.layout.by_name.get(str(name))
    if entry is None:
        known = list(states.layout.by_name)
        near = get_close_matches(str(name), known, 1)
        raise ValueError(f"the model has no parameter {name!r}; it has {', '.join(known)}"
                         + (f"; did you mean {near[0]!r}?" if near else ""))
    found: dict[str, np.ndarray | None] = {
        "parameter": whole(states, states.parameter, states.stage.parameters, entry),
        "gradient": mean_gradient(states, update, entry),
        "master": whole(states, states.master, states.master_placement, entry)}
    return found | {slot: whole(states, array, states.stage.optimizer, entry) for slot, array in states.slots.items()}


def whole(states: States, array: np.ndarray, placement: Placement, entry: Entry) -> np.ndarray:
    """One parameter's elements of an array at rest, gathered where it is sharded: a copy, of the parameter's shape."""
    if placement is not SHARDED:
        return array[entry.low:entry.high].reshape(entry.shape).copy()
    rank, pieces = states.rank, []
    for region in states.layout.regions:
        low, high = max(entry.low, region.low), min(entry.high, region.high)
        if low < high:
            own = array[states.layout.owned(rank.index, low, high)]
            pieces.append(rank.all_gather(own, splits=states.layout.cut(low, high), purpose="state"))
    return np.concatenate([np.empty(0, array.dtype), *pieces]).reshape(entry.shape)


def mean_gradient(states: States, update: Update, entry: Entry) -> np.ndarray | None:
    """fp32(sum) / (S * N * k) between reduce() and update(); None otherwise."""
    reduced = update.reduced
    if reduced is None:
        return None
    total = whole(states, reduced.array, reduced.placement, entry)
    mean = np.empty(total.size, np.float32)
    states.rank.kernels.gradient_block(total.reshape(-1), reduced.divisor, 1.0, mean)
    return mean.reshape(entry.shape)
