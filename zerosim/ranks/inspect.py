"""A rank between two hops, as one may look at it: what it holds, what it has done, where its program stands.

Legend: n elements of a collective's whole vector, N ranks. All of it is copied: a look keeps no array in any memory.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, get_args

import numpy as np

from zerosim.numerics.arrays import has_data, on_device, same_bytes, to_host
from zerosim.ranks.call import Call, Hop, PendingCall
from zerosim.ranks.cluster import Cluster, RankProgram
from zerosim.ranks.collectives import expand
from zerosim.ranks.errors import RankUseError
from zerosim.ranks.hub import Hub, RunEvent, Watch
from zerosim.ranks.process import Interrupts, patient_interrupts
from zerosim.ranks.rank import RankState
from zerosim.ranks.trace import Row, Trace
from zerosim.shown import ShownStep, ShownSteps


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
        """The rank's trace until this moment; what it drops later is gone here too."""
        return self._trace.rows[:max(0, self._row_count - self._trace.dropped)]


def look(hub: Hub, states: Sequence[RankState], before: Sequence[RankNow] = ()) -> tuple[RankNow, ...]:
    """All ranks of a hub that stands still, in rank order. What has not changed since the look ``before`` is not copied
    again: who keeps all steps of a run keeps what changed in it, not every rank's arrays at each of them."""
    parts = {me.call.group[me.index]: me for me in hub.under_way}
    earlier = {now.rank: now for now in before}
    hub.synchronize()
    return tuple(_now(hub, state, parts.get(state.index), earlier.get(state.index)) for state in states)


def _now(hub: Hub, state: RankState, me: PendingCall | None, before: RankNow | None) -> RankNow:
    hub.transport.resume(state.index)
    trace, memory, greenlet = state.trace, state.memory, hub.greenlets[state.index]
    where = "finished" if greenlet.dead else hub.place(state.index) if greenlet else "not begun"
    arrays: dict[str, Any] = {} if me is None else {
        "place": me.index, "x": _copy(me.x, before.x if before else None),
        "out": _copy(me.out, before.out if before else None)}
    return RankNow(state.index, where, memory.now_nbytes_by_kind, trace.sent_nbytes(), **arrays,
                   _trace=trace, _row_count=trace.dropped + len(trace.rows))


def _copy(array: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    if on_device(array):
        return to_host(array)
    if (before is not None and has_data(array) and before.shape == array.shape and before.dtype == array.dtype
            and same_bytes(before, array)):
        return before
    return array.copy()


# -- Stepping: a run that stops after every hop, or every collective, so that one can look at all ranks in between ---


@dataclass(frozen=True, slots=True, eq=False)
class Step(ShownStep):
    """The latest event, and every rank as it is now; it stays as it is when the run goes on.

    By hop, ``hop`` is the message that was made and ``values`` a copy of what arrived; by collective, ``hop`` is None
    and ``values`` are empty, but for a message that the program sent itself, of which ``call`` is None. ``number``
    counts from 1. A step unpacks as ``call, hop, values``.
    """

    number: int
    call: Call | None
    hop: Hop | None
    values: np.ndarray
    ranks: "tuple[RankNow, ...]"
    _by: Watch = field(default="hop", repr=False)

    @property
    def hops(self) -> list[Hop]:
        """The messages of this step: the one hop, or all of the collective, whose ranks are indices in its group."""
        if self.hop is not None:
            return [self.hop]
        assert self.call is not None
        return expand(self.call)

    def __iter__(self) -> Iterator[Any]:
        yield from (self.call, self.hop, self.values)

    def __repr__(self) -> str:
        if self.hop is None:
            return f"<Step {self.number}: {self.call}>"
        what = f"hop {self.hop.step} of {self.call}" if self.call else "a message"
        group = self.call.group if self.call else range(len(self.ranks))
        return (f"<Step {self.number}: {what}, rank {group[self.hop.source]} to rank {group[self.hop.destination]}, "
                f"{self.hop.nbytes} bytes>")


class Steps(Iterator[Step], ShownSteps):
    """An iterator over the steps of a run, and a context manager.

    Leaving it half-way stops all ranks and leaves nothing behind; so does Ctrl-C in the midst of a step. It belongs to
    the thread that takes the first step; any other raises RankUseError. ``taken`` counts the steps, ``last`` is the
    latest.
    """

    def __init__(self, cluster: Cluster, program: RankProgram, args: tuple[Any, ...], by: Watch) -> None:
        self.cluster, self.by, self.taken = cluster, by, 0
        self.last: Step | None = None
        self._interrupts = Interrupts()
        self._events = cluster.drive(program, args, hop_by_hop=by == "hop", watch=by, interrupts=self._interrupts)
        self._thread: int | None = None

    def __next__(self) -> Step:
        self._check_thread()
        try:
            with patient_interrupts(self._interrupts):  # which raises at its end what came in the last bookkeeping
                event = next(self._events, None)
                step = None if event is None else self._step(event)
        except KeyboardInterrupt:
            self._events.close()
            raise
        if step is None:
            raise StopIteration
        self.last = step
        return step

    def _step(self, event: RunEvent) -> Step:
        hub, cluster = self.cluster.backend, self.cluster
        assert isinstance(hub, Hub), "other backends yield no events"
        self.taken += 1
        with cluster.device_scope():
            ranks = look(hub, cluster.states, self.last.ranks if self.last else ())
        return Step(self.taken, *event, ranks, self.by)

    def close(self) -> None:
        """Stops the run; harmless when it has ended."""
        self._check_thread()
        self._events.close()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        if self._thread != here:
            raise RankUseError("this step_through was begun in another thread, where its ranks live; "
                               "go on and close it there")

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Steps by {self.by} of {len(self.cluster.ranks)} ranks, {self.taken} taken>"


def step_through(program: RankProgram, *args: Any, ranks: int | None = None, cluster: Cluster | None = None,
                 by: Watch = "hop") -> Steps:
    """Runs ``program(rank, *args)`` and stops after every message, and every hop of every collective.

    With ``by="collective"`` it stops after each collective instead, when its result is there and no rank has gone on.
    It takes a cluster of ``ranks`` ranks, 2 where nothing is said, or the one that it is given. Raises ValueError for
    another ``by``, and for a cluster of another number of ranks than ``ranks``.

    >>> import numpy as np
    >>> with step_through(lambda rank: rank.all_reduce(np.full(2, rank.index)), ranks=2) as steps:
    ...     for call, hop, values in steps:
    ...         print(call.operation, hop.step, hop.source, "->", hop.destination, hop.chunks, values)
    all_reduce 0 0 -> 1 (1,) [0]
    all_reduce 0 1 -> 0 (0,) [1]
    all_reduce 1 0 -> 1 (0,) [1]
    all_reduce 1 1 -> 0 (1,) [1]
    >>> for step in step_through(lambda rank: rank.all_reduce(np.full(2, rank.index)), ranks=3, by="collective"):
    ...     print(step.call.operation, [now.out.tolist() for now in step.ranks])
    all_reduce [[3, 3], [3, 3], [3, 3]]
    """
    if by not in get_args(Watch):
        raise ValueError(f"step_through walks by={by!r}? It stops after each {' or each '.join(get_args(Watch))}; "
                         "pass one of them")
    if cluster is not None and ranks not in (None, cluster.ranks[0].size):
        raise ValueError(f"step_through was asked for ranks={ranks!r} on a cluster of {cluster.ranks[0].size}; leave "
                         "one of the two out")
    return Steps(cluster or Cluster(2 if ranks is None else ranks), program, args, by)
