"""How a step of a run looks: what moved, and every rank as it is then.

Legend: n elements of the collective's whole vector, N ranks of its group.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.lessons.displays.views import Table, View, memory_bars
from zerosim.lessons.tables import short
from zerosim.numerics.arrays import has_data, is_poisoned
from zerosim.numerics.units import counted
from zerosim.ranks.call import Call
from zerosim.ranks.stepping import Step, Steps
from zerosim.ranks.trace import Hop

MOST_VALUES = 12  # of an array in a table


def step_view(step: Step) -> View:
    """The message or the collective, the arrays of every rank, and what each holds."""
    what = "a message that the program sent itself" if step.call is None else str(step.call)
    arrays = Table("Every rank, as it is now", ("rank", "brought", "result so far", ">sent by calls that ended (bytes)",
                                                ">bytes held", "its program waits at"),
                   tuple((str(now.rank), values_text(now.x), values_text(now.out), f"{now.sent_nbytes:,}",
                          f"{now.now_nbytes:,}", now.where) for now in step.ranks))
    held = {f"rank {now.rank}": now.nbytes_by_kind for now in step.ranks}
    bars = (memory_bars("Held now, by kind", held),) if any(held.values()) else ()
    return View(f"Step {step.number}", f": {what}", (_moved(step), arrays, *bars))


def _moved(step: Step) -> Table:
    rows: tuple[tuple[str, ...], ...] = tuple((
                  str(hop.step), str(group_rank(step.call, hop.source)), str(group_rank(step.call, hop.destination)),
                  chunks_text(hop), f"{hop.nbytes:,}") for hop in step.hops)
    if step.hop is not None:
        rows = tuple((*row, values_text(step.values)) for row in rows)
    columns = (">hop", ">from rank", ">to rank", "chunks", ">bytes", "values that arrived")
    return Table("What moved", columns[:len(rows[0]) if rows else 5], rows)


def group_rank(call: Call | None, index: int) -> int:
    """The rank in the whole cluster of a member of the call's group."""
    return index if call is None else call.group[index]


def chunks_text(hop: Hop) -> str:
    """``c0, c1``, or that it carries the whole vector."""
    return ", ".join(f"c{chunk}" for chunk in hop.chunks) or "all of it"


def values_text(array: np.ndarray | None) -> str:
    """The first values of an array, without brackets; a word for none, for an empty one and for one without data."""
    if array is None:
        return "takes no part"
    if not has_data(array):
        return f"{array.size:,} values without data"
    if not array.size:
        return "nothing"
    if is_poisoned(array):
        return "not written yet"
    shown = " ".join(short(value) for value in array.reshape(-1)[:MOST_VALUES].astype(object).tolist())
    return shown + (f" … ({array.size:,})" if array.size > MOST_VALUES else "")


def steps_view(steps: Steps) -> View:
    """The latest step, after how far the walk has come."""
    rest = f" by {steps.by} through a run of {counted(len(steps.cluster.ranks), 'rank')}: {steps.taken:,} taken"
    return View("Steps", rest, () if steps.last is None else step_view(steps.last).parts)


VIEWS: Mapping[type, Callable[[Any], View]] = MappingProxyType({Step: step_view, Steps: steps_view})
