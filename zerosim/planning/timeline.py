"""A replayed recording: what happened when on every rank and stream, and what that comes to.

A run is made once, on a laptop, and recorded; then it is priced anywhere:

>>> import numpy as np, zerosim as zs
>>> from zerosim.planning.hardware import Network, device, link
>>> from zerosim.planning.recording import record
>>> cluster = zs.Cluster(4)
>>> vectors = cluster.run(lambda rank: rank.all_reduce(np.zeros(10**6, np.float32)))
>>> recording = record(cluster.trace)
>>> for name in ("nvlink4", "infiniband-ndr"):
...     found = replay(recording, Machine(device("h100-80"), Network(link(name))))
...     print(f"{name}: {found.step_seconds * 1e6:.1f} µs, of which {found.exposed_seconds * 1e6:.1f} exposed")
nvlink4: 33.7 µs, of which 33.7 exposed
infiniband-ndr: 204.0 µs, of which 204.0 exposed

Legend: N ranks, R rows of a rank's program.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from zerosim.numerics.places import DIRECTIONS
from zerosim.planning.hardware import Machine, Slow
from zerosim.planning.recording import COMPUTE, HELD, Recording
from zerosim.planning.streams import COMMUNICATION, COMPUTATION, Lane, StreamPart, Streams
from zerosim.shown import SavedTimeline

__all__ = ["COMMUNICATION", "COMPUTATION", "Lane", "Machine", "MemoryCurve", "Slow", "Timeline",
           "TimelineEvent", "Usage", "critical_path", "memory", "replay"]

@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that a rank did on a stream, from when to when.

    ``nbytes`` are those read and written by arithmetic, or of the collective's whole vector, or sent in a message, or
    moved between device and host; ``purpose`` is that of a collective or a message (parameters, gradients, state,
    control, unspecified), or the kind of what is moved.
    ``waited_seconds`` went by until all others had come too: what a late rank costs this one. ``from_rank`` is of the
    `critical_path` alone.
    """

    rank: int
    stream: str
    name: str
    path: tuple[str, ...]
    start_seconds: float
    end_seconds: float
    flops: int = 0
    nbytes: int = 0
    waited_seconds: float = 0.0
    purpose: str = ""
    from_rank: int | None = None

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Usage:
    """One rank's use of the step.

    ``communication_seconds`` are those in which its communication stream was busy, of which ``exposed_seconds`` while
    its program stood still for it, and the others, hidden, beside arithmetic or transfers; ``waited_seconds``, of them
    too, until all that took part had come. ``offload_seconds`` are those of transfers to the host and back, both ways
    added up, ``exposed_offload_seconds`` those in which the program stood still for one.
    """

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    waited_seconds: float
    offload_seconds: float
    exposed_offload_seconds: float


def replay(recording: Recording, machine: Machine) -> "Timeline":
    """The times at which everything in the recording would happen on this machine.

    Raises ValueError for slow ranks and links that there are not, for transfers to a host to which the machine has no
    link, and for programs that wait for each other without end once each rank does its communication in the order of
    issue.
    """
    machine.check_ranks(recording.ranks)
    streams = Streams(recording, machine)
    streams.run()
    return Timeline(recording, machine, streams)


class Timeline(SavedTimeline):
    """The times that `replay` found. ``lanes`` are the ranks' programs and streams, in rank order;
    ``parts_of_call`` the parts of each call, by its number in the recording, in the order of its group."""

    def __init__(self, recording: Recording, machine: Machine, streams: Streams) -> None:
        self.recording, self.machine, self.lanes = recording, machine, tuple(streams.lanes)
        self.parts_of_call: Mapping[int, list[StreamPart]] = dict(sorted(streams.parts_of_call.items()))
        self._works, self._collectives = streams.works, streams.collectives
        self._by_rank: dict[int, tuple[list[float], Any]] = {}

    # -- totals -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.lanes)

    @cached_property
    def step_seconds(self) -> float:
        """From the common start until the last rank is done."""
        return max(lane.end for lane in self.lanes)

    @cached_property
    def usage(self) -> tuple[Usage, ...]:
        """Each rank's use of the step, in rank order."""
        return tuple(self._usage(lane) for lane in self.lanes)

    def _usage(self, lane: Lane) -> Usage:
        stood: dict[str, float] = dict.fromkeys(self.streams, 0.0)  # still, for what of each stream
        for part, before, after in zip(lane.part_at, lane.reached, lane.resumed, strict=True):
            stood[part.stream] += after - before
        busy: dict[str, float] = dict.fromkeys(self.streams, 0.0)
        for part in lane.all_parts:
            busy[part.stream] += part.ended - part.begun
        busy[COMPUTATION] = lane.end - sum(stood.values())
        waited = sum(part.joined - part.begun for part in lane.streams[COMMUNICATION])
        moved, stood_for_host = (sum(of.get(way, 0) for way in DIRECTIONS) for of in (busy, stood))
        return Usage(busy[COMPUTATION], busy[COMMUNICATION], stood[COMMUNICATION], waited, moved, stood_for_host)

    @property
    def exposed_seconds(self) -> float:
        """The most that any rank's program stood still for communication."""
        return max(usage.exposed_seconds for usage in self.usage)

    @property
    def streams(self) -> tuple[str, ...]:
        """Compute, communication, and where anything is offloaded both ways to the host, or to its disk, of that."""
        moved = {transfer.direction for transfer in self.recording.transfers}
        return (COMPUTATION, COMMUNICATION, *(way for both in (DIRECTIONS[:2], DIRECTIONS[2:]) if moved & {*both}
                                              for way in both))

    # -- events -------------------------------------------------------------------------------------------------------

    def clocks(self, rank: int) -> np.ndarray:
        """The times at which the rank's program came to each row, and to its end, (R + 1,)."""
        lane, work = self.lanes[rank], self._works[self.recording.program_of_rank[rank]]
        passed = np.searchsorted([row for row, _, _ in lane.points], np.arange(len(work)))  # points before each row
        since, base = (np.array([0, *seconds])[passed] for seconds in (lane.resumed, lane.work))
        clocks: np.ndarray = since + lane.pace * (work - base)
        return clocks

    def events(self, rank: int) -> list[TimelineEvent]:
        """The events of a rank on its streams: arithmetic row by row, then collectives and messages, then transfers to
        the host, then those back; each in order."""
        return [*self.computed(rank), *(self.part_event(part) for part in self.lanes[rank].all_parts)]

    def computed(self, rank: int, low: int = 0, high: int | None = None) -> list[TimelineEvent]:
        """The rank's arithmetic row by row; only the rows from ``low`` to before ``high`` if asked."""
        program = self.recording.program(rank)
        clocks, rows = self._clocks_and_computes(rank)
        rows = rows[slice(*np.searchsorted(rows, (low, len(program) if high is None else high)))]
        columns = (column[rows].tolist() for column in (program.first, program.second, program.third))
        paths = self.recording.paths
        return [TimelineEvent(rank, COMPUTATION, "compute", paths[path], clocks[row], clocks[row + 1], flops, nbytes)
                for row, flops, nbytes, path in zip(rows.tolist(), *columns, strict=True)]

    def _clocks_and_computes(self, rank: int) -> tuple[list[float], Any]:
        """The rank's clocks as a list, and its rows of arithmetic."""
        if rank not in self._by_rank:
            self._by_rank[rank] = self.clocks(rank).tolist(), self.recording.program(rank).where(COMPUTE)
        return self._by_rank[rank]

    def part_event(self, part: StreamPart) -> TimelineEvent:
        """A part of a collective, a message, or a transfer, as an event."""
        lane = self.lanes[part.rank]
        path = self.recording.paths[self.recording.program(part.rank).second[lane.points[part.point][0]]]
        if part.call is not None:
            call = self.recording.calls[part.call]
            name, nbytes, purpose = call.shape.operation, call.shape.nbytes, call.purpose
        elif part.transfer is not None:
            transfer = part.transfer
            name, nbytes, purpose = f"{transfer.kind} {transfer.direction}", transfer.nbytes, transfer.kind
        else:
            assert part.message is not None
            name, nbytes, purpose = "message", part.message.nbytes, part.message.purpose
        return TimelineEvent(part.rank, part.stream, name, path, part.begun, part.ended, 0, nbytes,
                             part.joined - part.begun, purpose)

    def origin(self, part: StreamPart) -> StreamPart:
        """The part whose arrival decided when this one ended: the same rank's, or that of one that it waited for."""
        if part.call is not None:
            parts = self.parts_of_call[part.call]
            arrivals = [one.begun for one in parts]
            return parts[self._collectives.origin(self.recording.calls[part.call], arrivals, part.place)]
        if part.transfer is not None:
            return part
        other = part.receiver if part.send_end == part.ended else part.sender
        return other if other is not None and other.begun > part.begun else part


# -- the critical path: the chain of events, one waiting for the other, that makes a step as long as it is ------------


def critical_path(timeline: Timeline) -> list[TimelineEvent]:
    """The events from 0 to the end of the step, each starting when the one before it ends.

    A collective is entered on the rank for whose arrival the last one waited, ``from_rank``, and left on the rank that
    went on. Of several such chains it is the one that leads to the lowest rank, and that prefers a program to what it
    waits for. Arithmetic of one span that nothing interrupts is one event, whose operations and bytes are not counted;
    what takes no time is left out.
    """
    found = list(_backwards(timeline))[::-1]
    return [event for event in found if event.end_seconds > event.start_seconds]


def _backwards(timeline: Timeline) -> Iterator[TimelineEvent]:
    lane = max(timeline.lanes, key=lambda one: (one.end, -one.rank))
    passed, clock = len(lane.points), lane.end
    while True:
        start = lane.resumed[passed - 1] if passed else 0
        yield from _arithmetic(timeline, lane, passed, start, clock)
        if not passed:
            return
        passed -= 1
        clock = lane.reached[passed]
        if start > clock:  # the program stood still here
            for part, origin in _chain(timeline, lane.part_at[passed]):
                yield replace(timeline.part_event(part), from_rank=origin.rank, start_seconds=origin.begun)
            lane, passed, clock = timeline.lanes[origin.rank], origin.point, origin.issued


def _chain(timeline: Timeline, part: StreamPart) -> Iterator[tuple[StreamPart, StreamPart]]:
    """Parts back to one that began as soon as its program issued it, each with the part that decided its end."""
    while True:
        origin = timeline.origin(part)
        yield part, origin
        if origin.begun == origin.issued:
            return
        assert origin.before is not None, "what waits in a stream has one before it"
        part = origin.before


def _arithmetic(timeline: Timeline, lane: Lane, passed: int, start: float, end: float) -> Iterator[TimelineEvent]:
    """The program's arithmetic after so many points, latest first, span by span."""
    if end <= start:
        return
    low = lane.points[passed - 1][0] if passed else 0
    high = lane.points[passed][0] if passed < len(lane.points) else None
    computed = timeline.computed(lane.rank, low, high)
    stretches = [(path, [*same]) for path, same in groupby(computed, attrgetter("path"))]
    for path, same in reversed(stretches):
        yield TimelineEvent(lane.rank, COMPUTATION, "compute", path, same[0].start_seconds, same[-1].end_seconds,
                            from_rank=lane.rank)


# -- memory: what a rank holds over time, by kind, in H changes -------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Bytes by kind from each instant to the next: ``seconds`` (H + 1,), rising from 0, and (H + 1,) of each kind.

    Several changes may stand at one instant; what holds on from there is the last.
    """

    seconds: np.ndarray
    nbytes_by_kind: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of all kinds together, (H + 1,)."""
        total: np.ndarray = np.sum([*self.nbytes_by_kind.values(), np.zeros(len(self.seconds), np.int64)], axis=0)
        return total

    @property
    def peak_nbytes(self) -> int:
        """The most bytes held at any moment, between two changes at one instant too."""
        return int(self.nbytes.max())

    @property
    def peak_nbytes_by_kind(self) -> dict[str, int]:
        """The breakdown of the first fullest instant; kinds of which nothing is held then are left out."""
        at = int(self.nbytes.argmax())
        return {kind: int(column[at]) for kind, column in self.nbytes_by_kind.items() if column[at]}


def memory(timeline: Timeline, rank: int) -> MemoryCurve:
    """The bytes that the rank held over time, from those at the recording's beginning on; kinds as they first come."""
    recording, program = timeline.recording, timeline.recording.program(rank)
    rows = program.where(HELD)
    clocks = timeline.clocks(rank)
    seconds = np.array([0.0, *(float(clocks[row]) for row in rows.tolist())])
    kinds, changes = program.second[rows], program.first[rows]
    words = [*program.held_at_start, *(recording.words[kind] for kind in dict.fromkeys(kinds.tolist()))]
    curves = {}
    for word in dict.fromkeys(words):
        own = np.array([recording.words[kind] == word for kind in range(len(recording.words))] or [False])[kinds]
        start = program.held_at_start.get(word, 0)
        curves[word] = start + np.concatenate([[0], np.cumsum(np.where(own, changes, 0))])
    return MemoryCurve(seconds, curves)
