"""A rank between two hops, as one may look at it: what it holds, what it has done, where its program stands.

Legend: n elements of a collective's whole vector, N ranks. All of it is copied: a look keeps nothing in any ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.numerics.arrays import has_data, on_device, same_bytes, to_host
from zerosim.ranks import explain
from zerosim.ranks.entry import CollectiveEntry
from zerosim.ranks.hub import Hub
from zerosim.ranks.state import RankState
from zerosim.ranks.trace import Row, Trace

FINISHED, NOT_BEGUN = "finished", "not begun"


@dataclass(frozen=True, slots=True, eq=False)
class RankNow:
    """One rank of the cluster at one moment.

    ``x`` and ``out`` are copies of what it brought to the collective under way (of an asynchronous one or a mean, of
    what was captured), flat, and of where the result appears: between two hops, what is not written yet is NaN (0xA5 in
    integers). ``place`` is its index in the collective's group. All three are None for a rank that takes no part.
    ``sent_nbytes`` is of the calls that have ended: what the one under way has sent is not in it yet.
    ``where`` says in which line of which file its program waits.
    """

    rank: int
    where: str
    nbytes_by_kind: Mapping[str, int]
    sent_nbytes: int
    place: int | None = None
    x: np.ndarray | None = None
    out: np.ndarray | None = None
    _trace: Trace = field(default_factory=Trace, repr=False)
    _row_count: int = 0

    @property
    def now_nbytes(self) -> int:
        """Bytes held, of all kinds."""
        return sum(self.nbytes_by_kind.values())

    @property
    def rows(self) -> Sequence[Row]:
        """The rank's trace until this moment."""
        return self._trace.rows[:self._row_count]


def look(hub: Hub, states: Sequence[RankState], before: Sequence[RankNow] = ()) -> tuple[RankNow, ...]:
    """All ranks of a hub that stands still, in rank order. What has not changed since the look ``before`` is not copied
    again: who keeps all steps of a run keeps what changed in it, not every rank's arrays at each of them."""
    entries = {entry.call.group[entry.index]: entry for entry in hub.under_way}
    earlier = {now.rank: now for now in before}
    hub.carriage.settle()
    return tuple(_now(hub, state, entries.get(state.index), earlier.get(state.index)) for state in states)


def _now(hub: Hub, state: RankState, entry: CollectiveEntry | None, before: RankNow | None) -> RankNow:
    hub.carriage.resume(state.index)
    trace, memory = state.trace, state.memory
    arrays: dict[str, Any] = {} if entry is None else {
        "place": entry.index, "x": _copy(entry.x, before.x if before else None),
        "out": _copy(entry.out, before.out if before else None)}
    return RankNow(state.index, _where(hub, state.index), memory.now_nbytes_by_kind, trace.sent_nbytes(), **arrays,
                   _trace=trace, _row_count=len(trace.rows))


def _copy(array: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    if on_device(array):
        return to_host(array)
    if (before is not None and has_data(array) and before.shape == array.shape and before.dtype == array.dtype
            and same_bytes(before, array)):
        return before
    return array.copy()


def _where(hub: Hub, rank: int) -> str:
    greenlet = hub.greenlets[rank]
    if greenlet.dead:
        return FINISHED
    return explain.where(greenlet.gr_frame) if greenlet else NOT_BEGUN
