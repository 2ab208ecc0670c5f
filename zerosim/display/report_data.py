"""The report of a run, as data: a recording replayed on a machine, in microseconds and bytes.

Legend: N ranks, H changes of a ledger.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerosim.display.colors import KIND_COLORS, PHASE_COLORS
from zerosim.planning.recording import ISSUE, MESSAGE, Recording
from zerosim.planning.streams import schedule
from zerosim.planning.timeline import COMMUNICATION, Lane, Machine, Timeline, memory, replay

MOST_MARKS = 150_000  # bars and corners that a page can hold and a browser can draw
ARITHMETIC = "arithmetic"  # outside the spans that have a color


@dataclass(frozen=True, slots=True)
class RankBar:
    """Something on a stream, in microseconds. ``what`` is a phase, a purpose or "waiting"; ``call`` a collective's
    number in the recording, None for arithmetic and messages."""

    what: str
    name: str
    span: str
    start: float
    end: float
    nbytes: int = 0
    flops: int = 0
    call: int | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank: its two streams, its waits, and what it held, (H + 1,) bytes of each kind from each instant on."""

    rank: int
    computed: tuple[RankBar, ...]
    communicated: tuple[RankBar, ...]
    waits: tuple[RankBar, ...]
    microseconds: tuple[float, ...]
    nbytes: Mapping[str, tuple[int, ...]]
    sent_nbytes: Mapping[str, int]
    compute_microseconds: float
    communication_microseconds: float
    exposed_microseconds: float

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds together, (H + 1,)."""
        return list(map(sum, zip(*self.nbytes.values(), strict=True))) or [0] * len(self.microseconds)

    @property
    def peak_nbytes(self) -> int:
        """At its fullest instant."""
        return max(self.totals)

    @property
    def peak_nbytes_by_kind(self) -> dict[str, int]:
        """The breakdown of the first fullest instant; kinds of which nothing is held then are left out."""
        at = self.totals.index(self.peak_nbytes)
        return {kind: column[at] for kind, column in self.nbytes.items() if column[at]}


@dataclass(frozen=True, slots=True)
class CallReport:
    """One collective: ``nbytes`` are those of its whole vector, ``sent_nbytes`` all that its ranks sent."""

    number: int
    operation: str
    algorithm: str
    purpose: str
    span: str
    group: tuple[int, ...]
    nbytes: int
    sent_nbytes: int
    start: float
    end: float
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class ReportData:
    """A run: what it was replayed on, how long it took, its ranks, its collectives, and bytes from rank to rank."""

    title: str
    machine: str
    step_microseconds: float
    ranks: tuple[RankReport, ...]
    calls: tuple[CallReport, ...]
    links: Mapping[tuple[int, int], int]
    message_count: int
    row_count: int

    @property
    def kinds(self) -> list[str]:
        """The kinds of which any rank held anything, in the order of the stack."""
        held = {kind for rank in self.ranks for kind, column in rank.nbytes.items() if any(column)}
        return [*(kind for kind in KIND_COLORS if kind in held), *sorted(held - set(KIND_COLORS))]

    @property
    def sent_nbytes(self) -> int:
        """By all ranks together."""
        return sum(self.links.values())


def report_data(recording: Recording, machine: Machine, title: str) -> ReportData:
    """Replays the recording; ValueError for one that cannot be replayed, and for one too long to be a page."""
    marks = recording.row_count
    if marks > MOST_MARKS:
        raise ValueError(f"{marks:,} rows were recorded, and a page holds {MOST_MARKS:,}; take one stretch of the "
                         f"program with --span NAME: {_spans(recording)}")
    timeline = replay(recording, machine)
    sent = [Counter[str]() for _ in range(recording.ranks)]
    links = Counter[tuple[int, int]]()
    calls = tuple(_call(timeline, number, links, sent) for number in sorted(timeline.parts_of_call))
    messages = _messages(recording, links, sent)
    return ReportData(title, _words(machine), float(timeline.step_seconds) * 1e6,
                      tuple(_rank(timeline, lane, sent[lane.rank]) for lane in timeline.lanes), calls, links, messages,
                      recording.row_count)


def _spans(recording: Recording) -> str:
    names = dict.fromkeys(path[-1] for path in recording.paths if path)
    return ", ".join([*names][:8]) or "it has none, so record a shorter run"


def _words(machine: Machine) -> str:
    device, link = machine.device, machine.network.inside
    rate = machine.peak_flops_per_second * machine.efficiency / 1e12
    return (f"on devices {device.name} ({rate:g} TFLOP/s in {machine.format}, memory at "
            f"{device.memory_bytes_per_second / 1e9:g} GB/s), links {link.name} "
            f"({link.bytes_per_second / 1e9:g} GB/s, {link.latency_seconds * 1e6:g} µs)")


def _call(timeline: Timeline, number: int, links: Counter[tuple[int, int]], sent: Sequence[Counter[str]]) -> CallReport:
    """One call, whose messages are added to the links."""
    recording, parts = timeline.recording, timeline.parts_of_call[number]
    call, total = recording.calls[number], 0
    for level in schedule(call.shape):
        for source, destination, nbytes in zip(level.sources.tolist(), level.destinations.tolist(),
                                               level.nbytes.tolist(), strict=True):
            links[call.group[source], call.group[destination]] += nbytes * level.times
            sent[call.group[source]][call.purpose] += nbytes * level.times
            total += nbytes * level.times
    lane = timeline.lanes[parts[0].rank]
    event = timeline.part_event(parts[0])
    start, end = min(float(part.begun) for part in parts), max(float(part.ended) for part in parts)
    return CallReport(number, call.shape.operation, call.shape.algorithm, call.purpose, "/".join(event.path),
                      call.group, call.shape.nbytes, total, start * 1e6, end * 1e6,
                      lane.points[parts[0].point][1] == ISSUE)


def _messages(recording: Recording, links: Counter[tuple[int, int]], sent: Sequence[Counter[str]]) -> int:
    """The program's own messages; returns how many were sent."""
    count = 0
    for rank in range(recording.ranks):
        program = recording.program(rank)
        for index in program.first[program.where(MESSAGE)].tolist():
            message = recording.messages[index]
            if message.destination is not None:
                links[rank, message.destination] += message.nbytes
                sent[rank][message.purpose] += message.nbytes
                count += 1
    return count


def _rank(timeline: Timeline, lane: Lane, sent: Mapping[str, int]) -> RankReport:
    usage, curve = timeline.usage[lane.rank], memory(timeline, lane.rank)
    waits = tuple(RankBar("waiting", "waiting for communication", "", float(start) * 1e6, float(end) * 1e6)
                  for start, end in zip(lane.reached, lane.resumed, strict=True) if end > start)
    return RankReport(
        lane.rank, _computed(timeline, lane.rank), _communicated(timeline, lane), waits,
        tuple((curve.seconds * 1e6).tolist()),
        {kind: tuple(column.tolist()) for kind, column in curve.nbytes_by_kind.items()}, dict(sent),
        *(float(seconds) * 1e6 for seconds in (usage.compute_seconds, usage.communication_seconds,
                                               usage.exposed_seconds)))


def _computed(timeline: Timeline, rank: int) -> tuple[RankBar, ...]:
    """Arithmetic; rows of one span that follow each other at once are one bar."""
    bars: list[RankBar] = []
    for event in timeline.computed(rank):
        span, last = "/".join(event.path), bars[-1] if bars else None
        what = next((name for name in event.path if name in PHASE_COLORS), ARITHMETIC)
        bar = RankBar(what, event.path[-1] if event.path else ARITHMETIC, span, float(event.start_seconds) * 1e6,
                  float(event.end_seconds) * 1e6, event.nbytes, event.flops)
        if last is not None and last.span == span and last.end == bar.start:
            bars[-1] = RankBar(what, bar.name, span, last.start, bar.end, last.nbytes + bar.nbytes,
                               last.flops + bar.flops)
        else:
            bars.append(bar)
    return tuple(bar for bar in bars if bar.end > bar.start)


def _communicated(timeline: Timeline, lane: Lane) -> tuple[RankBar, ...]:
    """Collectives and messages, each a bar; those that take no time too, since they were made."""
    found = []
    for part in lane.parts:
        event = timeline.part_event(part)
        assert event.stream == COMMUNICATION
        found.append(RankBar(event.purpose, event.name, "/".join(event.path), float(event.start_seconds) * 1e6,
                         float(event.end_seconds) * 1e6, event.nbytes, call=part.call))
    return tuple(found)
