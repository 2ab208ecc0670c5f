"""Replays as pages and figures show them: the machine, and of a rank the bars of its streams, its waits, and what it
held over time.

Times are microseconds. Legend: H changes of a rank's memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zerosim.display.style import ARITHMETIC, phase_of
from zerosim.planning.hardware import Device, Link, Network, read
from zerosim.planning.timeline import COMMUNICATION, Machine, Timeline, TimelineEvent, memory

# A machine on which a small model's arithmetic and its communication take about as long as each other, as a large
# model's do on a large machine. Made up for the picture, as its source says.
MACHINE = Machine(
    Device("made up for a picture", 10**9, 10**9, 100e9, {"fp16": 1e12}, "made up for a picture", "2025-01-01"),
    Network(Link("made up for a picture", 5e9, 1e-6, "made up for a picture", "2025-01-01")), "fp16", efficiency=0.5,
    host_link=Link("made up for a picture", 2e9, 1e-6, "made up for a picture", "2025-01-01"),
    disk_link=Link("made up for a picture", 1e9, 1e-6, "made up for a picture", "2025-01-01"))


def machine_of(ranks: int, device: str | None = None, link: str | None = None, *, compute: str = "bf16",
               efficiency: float = 1.0, nodes: int = 1, between: str | None = None,
               hardware: str | None = None) -> Machine:
    """N devices by name, on links by name; without both, the made-up machine of the timeline's figure, on which a small
    model's arithmetic and its communication can both be seen. ValueError for a name that is not known.
    """
    known = read(hardware)
    if device is None and link is None:
        if nodes != 1 or between is not None or hardware is not None or compute != "bf16" or efficiency != 1.0:
            raise ValueError("nodes, a link between them, hardware of one's own, --compute and --efficiency go with "
                             "--device and --link; name both")
        return MACHINE
    if device is None or link is None:
        raise ValueError(f"a machine is a device and a link, and only {device or link} was named; name both, as in "
                         "--device h100-80 --link nvlink4")
    host = known.device(device).host_link or ""
    return Machine(known.device(device), known.network(ranks, link, nodes, between), compute, efficiency,
                   host_link=known.link(host) if host in known.links else None,
                   disk_link=known.links.get("nvme-pcie4"))


@dataclass(frozen=True, slots=True)
class RankBar:
    """Something on a stream. ``what`` is a phase, a purpose or "waiting"."""

    what: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ReplayedRank:
    """One rank: its two streams, its waits, and what it held, (H + 1,) bytes of each kind from each instant on.

    ``computed`` are stretches of arithmetic in one span, without those that take no time; ``communicated`` collectives
    and messages, with those that take none, since they were made.
    """

    computed: tuple[RankBar, ...]
    communicated: tuple[RankBar, ...]
    waits: tuple[RankBar, ...]
    microseconds: tuple[float, ...]
    nbytes: Mapping[str, tuple[int, ...]]
    communication_microseconds: float
    exposed_microseconds: float
    step_microseconds: float

    @property
    def totals(self) -> list[int]:
        """Bytes of all kinds together, (H + 1,)."""
        return list(map(sum, zip(*self.nbytes.values(), strict=True))) or [0] * len(self.microseconds)

    @property
    def peak_nbytes(self) -> int:
        """At its fullest instant."""
        return max(self.totals)

    def held(self, kinds: Sequence[str]) -> tuple[list[float], dict[str, list[int]]]:
        """The instants between which time goes by, to the step's end, and the bytes of each kind from each of them on.

        Of several changes at one instant it is the last. The end has the bytes of the instant before it.
        """
        lasting = [at for at, (now, after) in enumerate(pairwise((*self.microseconds, self.step_microseconds)))
                   if after > now]
        instants = [*(self.microseconds[at] for at in lasting), *[self.step_microseconds] * bool(lasting)]
        nothing = (0,) * len(self.microseconds)
        return instants, {kind: [self.nbytes.get(kind, nothing)[at] for at in (*lasting, *lasting[-1:])]
                          for kind in kinds}


def replayed_rank(timeline: Timeline, rank: int) -> ReplayedRank:
    """Reads one rank of a replay."""
    lane, usage, curve = timeline.lanes[rank], timeline.usage[rank], memory(timeline, rank)
    waits = tuple(RankBar("waiting", "waiting for communication", _micro(start), _micro(end))
                  for start, end in zip(lane.reached, lane.resumed, strict=True) if end > start)
    return ReplayedRank(
        tuple(_bar(event, phase_of(event.path), event.path[-1] if event.path else ARITHMETIC)
              for event in stretches(timeline.computed(rank)) if event.end_seconds > event.start_seconds),
        tuple(_bar(event, event.purpose, event.name) for event in map(
            timeline.part_event, lane.streams[COMMUNICATION])), waits, tuple(map(_micro, curve.seconds)),
        {kind: tuple(column.tolist()) for kind, column in curve.nbytes_by_kind.items()},
        *map(_micro, (usage.communication_seconds, usage.exposed_seconds, timeline.step_seconds)))


def _micro(seconds: float) -> float:
    return float(seconds) * 1e6


def _bar(event: TimelineEvent, what: str, name: str) -> RankBar:
    return RankBar(what, name, _micro(event.start_seconds), _micro(event.end_seconds))


def stretches(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    """Arithmetic, in which rows of one span that follow each other at once are one."""
    found: list[TimelineEvent] = []
    for event in events:
        if found and (found[-1].path, found[-1].end_seconds) == (event.path, event.start_seconds):
            before = found.pop()
            event = replace(event, start_seconds=before.start_seconds, flops=before.flops + event.flops,
                            nbytes=before.nbytes + event.nbytes)
        found.append(event)
    return found
