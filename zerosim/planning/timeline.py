"""The machine on which a recording is replayed: a device, a network, a link to the host, and what of them is slow."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zerosim.planning.collectives import Level, checked_vector, levels
from zerosim.planning.cuts import checked_count
from zerosim.planning.hardware import Device, Link, Network, positive
from zerosim.planning.recording import (
    BEGIN,
    COLLECTIVE,
    COMPUTE,
    END,
    HELD,
    ISSUE,
    ISSUES_OF_WAITS,
    MESSAGE,
    OFFLOAD,
    POINTS,
    TRANSFER,
    Call,
    Message,
    Program,
    Recording,
    Shape,
    Transfer,
    shown,
)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A straggler: from an instant on, all that the rank computes takes ``factor`` times as long."""

    rank: int
    factor: float
    from_seconds: float = 0.0

    def __post_init__(self) -> None:
        checked_count("rank", self.rank, 0)
        where = f"the slow rank {self.rank}"
        positive(where, "factor", self.factor)
        positive(where, "from_seconds", self.from_seconds, or_zero=True)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link, one way, on which every message takes ``factor`` times as long."""

    source: int
    destination: int
    factor: float

    def __post_init__(self) -> None:
        for key in ("source", "destination"):
            checked_count(key, getattr(self, key), 0)
        positive(f"the slow link from {self.source} to {self.destination}", "factor", self.factor)


@dataclass(frozen=True, slots=True)
class Machine:
    """N equal devices on a network.

    Arithmetic runs at ``efficiency`` times the device's dense peak in ``format``, or as fast as memory brings its
    operands, whichever is slower (Williams, Waterman & Patterson 2009, the roofline). An efficiency of 1 gives a bound:
    no program is faster. Each device has a ``host_link`` of its own, full duplex, as pcie5: what other devices move,
    and what the host's memory allows, is not in it. Raises ValueError for a format that the device lacks, an efficiency
    outside (0, 1], and a rank or a link that is slow twice.
    """

    device: Device
    network: Network
    format: str = "bf16"
    efficiency: float = 1.0
    slow_ranks: Sequence[SlowRank] = ()
    slow_links: Sequence[SlowLink] = ()
    host_link: Link | None = None

    def __post_init__(self) -> None:
        self.device.flops_per_second_in(self.format)
        if positive("the machine", "efficiency", self.efficiency) > 1:
            raise ValueError(f"the machine: efficiency must be a share of the peak, above 0 and at most 1, got "
                             f"{self.efficiency!r}")
        for kind in ("slow_ranks", "slow_links"):
            object.__setattr__(self, kind, tuple(getattr(self, kind)))
        _check_once("rank", [slow.rank for slow in self.slow_ranks])
        _check_once("link", [(slow.source, slow.destination) for slow in self.slow_links])

    @property
    def peak_flops_per_second(self) -> float:
        """The dense peak of one device in the machine's format."""
        return self.device.flops_per_second_in(self.format)

    @property
    def link_to_host(self) -> Link:
        """The host link; raises ValueError where the machine has none."""
        if self.host_link is None:
            raise ValueError("something is moved to a host or back, and the machine has no link to one; name it, as "
                             "host_link=link(\"pcie5\")")
        return self.host_link

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for slow ranks and links that a run of N ranks does not have."""
        for slow in self.slow_ranks:
            if slow.rank >= ranks:
                raise ValueError(f"rank {slow.rank} is to be slow, but the run has {ranks} ranks, numbered from 0")
        for link in self.slow_links:
            if max(link.source, link.destination) >= ranks:
                raise ValueError(f"the link from {link.source} to {link.destination} is to be slow, but the run has "
                                 f"{ranks} ranks, numbered from 0")


def _check_once(what: str, found: list[Any]) -> None:
    for one in found:
        if found.count(one) > 1:
            raise ValueError(f"the {what} {one} is slow twice; give it one factor")


# -- What rows and messages cost on a machine, in seconds: as float64, or exactly, as fractions ----------------------
# Legend: R rows, α seconds of latency, β bytes per second.
# A device computes for max(flops / flops per second, nbytes / memory bytes per second); a message takes α + n/β, and so
# does a transfer between a device and its host, on the link between the two.
# Sources: Williams, Waterman & Patterson 2009 (the roofline); Hockney 1994 (the message).


Seconds = Any  # float, or Fraction in an exact replay
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one rank works off what would take nominal seconds: ``factor`` times slower from an instant on."""

    factor: Seconds
    from_seconds: Seconds

    def after(self, clock: Any, work: Any) -> Any:
        """The clock when so much work is done that is begun at ``clock``; scalars, or arrays, elementwise."""
        if self.factor == 1:
            return clock + work
        if isinstance(work, np.ndarray):
            fast = np.clip(self.from_seconds - clock, 0.0, work)
            return (clock + fast) + self.factor * (work - fast)
        fast = min(max(self.from_seconds - clock, 0), work)
        return (clock + fast) + self.factor * (work - fast)


class Prices(Protocol):
    """A machine's prices in one kind of number."""

    def work(self, program: Program) -> Any:
        """Nominal seconds of arithmetic before each row and after the last, (R + 1,), rising from 0."""

    def message(self, source: int, destination: int, nbytes: int) -> Seconds:
        """Seconds of one message; 0 from a rank to itself, which leaves no device."""

    def messages(self, sources: Array, destinations: Array, nbytes: Array) -> Any:
        """Seconds of each message, (messages,)."""

    def transfer(self, nbytes: int) -> Seconds:
        """Seconds of one transfer between a device and its host, either way."""

    def pace(self, rank: int) -> Pace:
        """How fast a rank computes."""


class FloatPrices:
    """Prices in float64."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._slow_links = {(slow.source, slow.destination): slow.factor for slow in machine.slow_links}
        self._paces = {slow.rank: Pace(slow.factor, slow.from_seconds) for slow in machine.slow_ranks}

    def work(self, program: Program) -> Array:
        """Nominal seconds of arithmetic before each row and after the last, (R + 1,) float64."""
        machine, seconds = self.machine, np.zeros(len(program) + 1)
        rows = program.where(COMPUTE)
        np.maximum(program.first[rows] / (machine.peak_flops_per_second * machine.efficiency),
                   program.second[rows] / machine.device.memory_bytes_per_second, out=(cost := np.empty(len(rows))))
        seconds[rows + 1] = cost
        return np.cumsum(seconds, out=seconds)

    def message(self, source: int, destination: int, nbytes: int) -> float:
        """Seconds of one message."""
        if source == destination:
            return 0.0
        link = self.machine.network.link(source, destination)
        seconds = link.latency_seconds + nbytes / link.bytes_per_second
        return seconds * self._slow_links.get((source, destination), 1.0)

    def messages(self, sources: Array, destinations: Array, nbytes: Array) -> Array:
        """Seconds of each message, (messages,) float64."""
        network = self.machine.network
        seconds: Array = network.inside.latency_seconds + nbytes / network.inside.bytes_per_second
        if network.between is not None:
            slow = network.between.latency_seconds + nbytes / network.between.bytes_per_second
            seconds = np.where(network.crosses(sources, destinations), slow, seconds)
        for (source, destination), factor in self._slow_links.items():
            seconds[(sources == source) & (destinations == destination)] *= factor
        return seconds

    def transfer(self, nbytes: int) -> float:
        """Seconds of one transfer between a device and its host, either way."""
        return self.machine.link_to_host.seconds(nbytes)

    def pace(self, rank: int) -> Pace:
        """How fast a rank computes."""
        return self._paces.get(rank, Pace(1, 0))


class ExactPrices:
    """Prices as fractions: links as their decimals are written, devices as their floats are."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._slow_links = {(slow.source, slow.destination): Fraction(slow.factor) for slow in machine.slow_links}
        self._paces = {slow.rank: Pace(Fraction(slow.factor), Fraction(slow.from_seconds))
                       for slow in machine.slow_ranks}

    def work(self, program: Program) -> list[Fraction]:
        """Nominal seconds of arithmetic before each row and after the last, (R + 1,)."""
        flops_rate = Fraction(self.machine.peak_flops_per_second) * Fraction(self.machine.efficiency)
        memory_rate = Fraction(self.machine.device.memory_bytes_per_second)
        work = [Fraction(0)]
        for code, flops, nbytes in zip(program.codes.tolist(), program.first.tolist(), program.second.tolist(),
                                       strict=True):
            work.append(work[-1] + max(flops / flops_rate, nbytes / memory_rate) if code == COMPUTE else work[-1])
        return work

    def message(self, source: int, destination: int, nbytes: int) -> Fraction:
        """Seconds of one message."""
        if source == destination:
            return Fraction(0)
        link = self.machine.network.link(source, destination)
        return (link.alpha + nbytes / link.beta) * self._slow_links.get((source, destination), 1)

    def messages(self, sources: Array, destinations: Array, nbytes: Array) -> list[Fraction]:
        """Seconds of each message, (messages,)."""
        ends: Sequence[list[int]] = (sources.tolist(), destinations.tolist(), nbytes.tolist())
        return [self.message(*one) for one in zip(*ends, strict=True)]

    def transfer(self, nbytes: int) -> Fraction:
        """Seconds of one transfer between a device and its host, either way."""
        link = self.machine.link_to_host
        return link.alpha + nbytes / link.beta

    def pace(self, rank: int) -> Pace:
        """How fast a rank computes."""
        return self._paces.get(rank, Pace(1, 0))


# -- When each member of a collective is done with it, message by message, given when each arrives -------------------
# Legend: N members, T_r the time at which member r is ready for its next message.
#
# A message is a rendezvous: it starts when both its ends are ready and takes α + n/β; a member sends and receives at once
# (links are full duplex), and goes on when both are done. So on a ring, from step to step, with c_r the seconds of the
# message from r to r+1:
#
#     T_r ← max(max(T_r, T_(r+1)) + c_r, max(T_(r-1), T_r) + c_(r-1))
#
# What follows of it, and is tested: where all arrive at once on equal links the ring ends after (N-1)(α + m/β), m the
# bytes of the *longest* chunk, for that chunk goes once round, one hop after the other, and no hop takes longer; where
# chunks are equal it ends so long after the last arrival, and for all members at once.


# Up to so many messages in a step, plain Python is faster than NumPy's calls.
FEW_MESSAGES = 24


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that go at once, so often: places of both ends in the group, and seconds, (messages,) each."""

    sources: Sequence[int]
    destinations: Sequence[int]
    seconds: Any
    times: int

    @property
    def messages(self) -> Iterator[tuple[int, int, Seconds]]:
        """(source, destination, seconds) of each message."""
        seconds = self.seconds.tolist() if isinstance(self.seconds, np.ndarray) else self.seconds
        return zip(self.sources, self.destinations, seconds, strict=True)


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of a collective: from when to when, between which ranks."""

    source: int
    destination: int
    start_seconds: Seconds
    end_seconds: Seconds


def schedule(shape: Shape) -> Iterator[Level]:
    """The messages of a collective, level by level.

    A ring's partial sums may travel in a format of their own; what its all-reduce passes on afterwards does not.
    """
    if shape.operation == "all_reduce" and shape.wire_itemsize != shape.itemsize:
        for half, itemsize in (("reduce_scatter", shape.wire_itemsize), ("all_gather", shape.itemsize)):
            yield from levels(half, "ring", checked_vector(half, "ring", shape.cut, itemsize))
        return
    vector = checked_vector(shape.operation, shape.algorithm, shape.cut, shape.wire_itemsize, root=shape.root)
    yield from levels(shape.operation, shape.algorithm, vector)


def steps_of(call: Call, prices: Prices) -> list[Step]:
    """The call's messages with their prices."""
    group, found = np.array(call.group, np.int64), []
    for level in schedule(call.shape):
        seconds = prices.messages(group[level.sources], group[level.destinations], level.nbytes)
        found.append(Step(level.sources.tolist(), level.destinations.tolist(), seconds, level.times))
    return found


def by_message(ready: Sequence[Seconds], steps: Sequence[Step]) -> list[Seconds]:
    """When each member is done, (N,), given when each is ready, (N,). One message after another, in any numbers."""
    now = list(ready)
    for step in steps:
        messages = list(step.messages)
        for _ in range(step.times):
            before = now.copy()
            for source, destination, cost in messages:
                a, b = before[source], before[destination]
                end = (a if a > b else b) + cost
                if end > now[source]:
                    now[source] = end
                if end > now[destination]:
                    now[destination] = end
    return now


def by_step(ready: Sequence[float], steps: Sequence[Step]) -> list[float]:
    """The same in float64, all messages of a step at once; bit-equal to `by_message`."""
    now = np.array(ready, np.float64)
    for step in steps:
        sources, destinations = np.array(step.sources), np.array(step.destinations)
        for _ in range(step.times):
            ends = np.maximum(now[sources], now[destinations]) + step.seconds
            # In one step no member sends twice, or receives twice: each index stands once.
            now[sources] = np.maximum(now[sources], ends)
            now[destinations] = np.maximum(now[destinations], ends)
    found: list[float] = now.tolist()
    return found


def origins_by_message(ready: Sequence[Seconds], steps: Sequence[Step]) -> list[int]:
    """At whose place the longest chain of messages to each member begins, (N,)."""
    now, places = list(ready), list(range(len(ready)))
    for step in steps:
        messages = list(step.messages)
        for _ in range(step.times):
            before, origins = now.copy(), places.copy()
            for source, destination, cost in messages:
                later = source if before[source] >= before[destination] else destination
                for place in (source, destination):
                    if before[later] + cost > now[place]:
                        now[place], places[place] = before[later] + cost, origins[later]
    return places


def origins_by_step(ready: Sequence[float], steps: Sequence[Step]) -> list[int]:
    """The same, all messages of a step at once; of chains that are equally long it may take another."""
    now, places = np.array(ready, np.float64), np.arange(len(ready))
    for step in steps:
        sources, destinations = np.array(step.sources), np.array(step.destinations)
        for _ in range(step.times):
            a, b = now[sources], now[destinations]
            ends, origins = np.maximum(a, b) + step.seconds, np.where(a >= b, places[sources], places[destinations])
            for ranks in (sources, destinations):
                is_later = ends > now[ranks]
                now[ranks[is_later]], places[ranks[is_later]] = ends[is_later], origins[is_later]
    found: list[int] = places.tolist()
    return found


class Collectives:
    """The collectives of one replay; what is the same for many calls is worked out once."""

    def __init__(self, prices: Prices, *, message_by_message: bool) -> None:
        self.prices, self.message_by_message = prices, message_by_message
        self._steps = lru_cache(maxsize=256)(lambda shape, group: steps_of(Call(shape, group, (), 0, ""), prices))
        self._together: dict[tuple[Shape, tuple[int, ...]], list[Seconds]] = {}

    def steps(self, call: Call) -> list[Step]:
        """The call's messages with their prices."""
        found: list[Step] = self._steps(call.shape, call.group)
        return found

    def ends(self, call: Call, arrivals: Sequence[Seconds]) -> list[Seconds]:
        """When each member is done, (N,), in the group's order, given when each arrives, (N,).

        Times are reckoned from the last arrival, so that calls at which all arrive together cost the same each time.
        """
        last = max(arrivals)
        if all(arrival == last for arrival in arrivals):
            key = call.shape, call.group
            if key not in self._together:
                self._together[key] = self._run(call, [last - last] * len(arrivals))
            return [last + seconds for seconds in self._together[key]]
        return [last + seconds for seconds in self._run(call, [arrival - last for arrival in arrivals])]

    def _run(self, call: Call, ready: Sequence[Seconds]) -> list[Seconds]:
        steps = self.steps(call)
        if self.message_by_message or len(ready) <= FEW_MESSAGES:
            return by_message(ready, steps)
        return by_step(ready, steps)

    def origin(self, call: Call, arrivals: Sequence[Seconds], member: int) -> int:
        """Whose arrival decided when this member was done: the place where its longest chain of messages begins."""
        last = max(arrivals)
        one_by_one = self.message_by_message or len(arrivals) <= FEW_MESSAGES
        found = (origins_by_message if one_by_one else origins_by_step)([arrival - last for arrival in arrivals],
                                                                        self.steps(call))
        return found[member]

    def hops(self, call: Call, arrivals: Sequence[Seconds]) -> list[Hop]:
        """Every message of the call with its times, step by step."""
        last, hops = max(arrivals), []
        now: list[Seconds] = [arrival - last for arrival in arrivals]
        for step in self.steps(call):
            for _ in range(step.times):
                for source, destination, cost in step.messages:
                    start = max(now[source], now[destination])
                    hops.append(Hop(call.group[source], call.group[destination], last + start, last + (start + cost)))
                now = by_message(now, [Step(step.sources, step.destinations, step.seconds, 1)])
        return hops


# -- One rank in a replay: its program from point to point, and its other streams part by part -----------------------
# A host link is full duplex and a device copies both ways at once, so each way of offload is a stream of its own.


COMPUTATION, COMMUNICATION = ("compute", "communication")
STREAMS = (COMPUTATION, COMMUNICATION, *OFFLOAD)
Point = tuple[int, int, int]  # row, code, and the number of a call, a message or a transfer


@dataclass(slots=True, eq=False)
class Part:
    """One rank's part in a collective (``call``) or in a message, or a transfer of its own, on one of its streams.

    ``issued`` is when its program came to it, at its point number ``point``; ``begun`` when it was first in the stream;
    ``joined`` when the last of those that take part had come too, or this rank was done, if that was sooner; ``ended``
    when this rank was done. Of a message, ``send_end`` and ``receive_end`` say when each half was through, ``receiver``
    and ``sender`` are the other ends. ``number`` counts the parts of the stream.
    """

    rank: int
    point: int
    call: int | None
    message: Message | None
    issued: Seconds
    number: int
    place: int = 0
    begun: Seconds = None
    joined: Seconds = None
    ended: Seconds = None
    send_end: Seconds = None
    receive_end: Seconds = None
    receiver: "Part | None" = None
    sender: "Part | None" = None
    transfer: Transfer | None = None

    @property
    def stream(self) -> str:
        """Where it goes: a way of offload, or communication."""
        return COMMUNICATION if self.transfer is None else self.transfer.direction


@dataclass(slots=True, eq=False)
class Lane:
    """One rank: its points, when its program reached each and went on from each, and its parts in the order of issue.

    ``work`` are the nominal seconds of arithmetic before each point, ``part_at`` the part that it issues or waits for,
    ``parts`` those of communication, ``transfers`` those of each way of offload. ``unwaited`` are by code and number.
    """

    rank: int
    points: Sequence[Point]
    work: Sequence[Seconds]
    pace: Pace
    reached: list[Seconds] = field(default_factory=list)
    resumed: list[Seconds] = field(default_factory=list)
    part_at: list[Part] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    transfers: dict[str, list[Part]] = field(default_factory=lambda: {way: [] for way in OFFLOAD})
    queue: deque[Part] = field(default_factory=deque)
    unwaited: dict[tuple[int, int], Part] = field(default_factory=dict)
    free: Seconds = 0
    end: Seconds = 0

    @property
    def all_parts(self) -> list[Part]:
        """The parts of all streams, stream by stream."""
        return [*self.parts, *(part for way in OFFLOAD for part in self.transfers[way])]

    def part_before(self, part: Part) -> Part:
        """The part that was issued before it to the same stream; there must be one."""
        return (self.parts if part.transfer is None else self.transfers[part.stream])[part.number - 1]

    @property
    def is_done(self) -> bool:
        """True when the program has passed its last point."""
        return len(self.resumed) == len(self.points)

    @property
    def waits_for(self) -> Part | None:
        """What holds the program."""
        return None if self.is_done or len(self.reached) == len(self.resumed) else self.part_at[-1]

    def clock_at(self, work: Seconds) -> Seconds:
        """The program's clock after so much nominal arithmetic, with no point left before it."""
        passed = len(self.resumed)
        if not passed:
            return self.pace.after(0, work)
        return self.pace.after(self.resumed[-1], work - self.work[passed - 1])


def points_of(program: Program) -> list[Point]:
    """Every point of a program, in order."""
    rows = program.where(*POINTS)
    return list(zip(rows.tolist(), program.codes[rows].tolist(), program.first[rows].tolist(), strict=True))


# -- Replays the programs of all ranks: who starts what when, and who waits for whom ---------------------------------
# A rank has a program, a communication stream, and a stream to its host and one back. The program computes, row after
# row; a collective or a message for which it stops, and a wait, hold it until that is done. Whatever it issues goes to
# the end of a stream, which does one thing after the other, in the order of issue. A collective or a message begins when
# it is first in the streams of those that take part; inside it ranks wait for each other message by message. A transfer
# concerns no other rank: it begins when it is issued and the one before it, the same way, is through.
#
# Only points matter here, rows at which a rank may wait or hands something over: what lies between them is a sum.


COMMUNICATES = (COLLECTIVE, ISSUE, MESSAGE)


class Streams:
    """The state of a replay; ``run`` carries it out.

    ``works`` are the nominal seconds of arithmetic before each row of each program, and after its last.
    """

    def __init__(self, recording: Recording, prices: Prices, collectives: Collectives) -> None:
        self.recording, self.prices, self.collectives = recording, prices, collectives
        self.works: list[Any] = [prices.work(program) for program in recording.programs]
        points = [points_of(program) for program in recording.programs]
        at_points = [[float(work[row]) if hasattr(work, "dtype") else work[row] for row, _, _ in rows]
                     for work, rows in zip(self.works, points, strict=True)]
        self.lanes = [Lane(rank, points[program], at_points[program], prices.pace(rank))
                      for rank, program in enumerate(recording.program_of_rank)]
        self._places = [{rank: place for place, rank in enumerate(call.group)} for call in recording.calls]
        self._arrived: dict[int, list[Part]] = {}
        self._ready = deque(self.lanes)

    def run(self) -> None:
        """Replays all programs to their ends; raises ValueError where they wait for each other without end."""
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = [lane for lane in self.lanes if not lane.is_done]
        if stuck:
            raise ValueError(self._explained(stuck))
        for lane in self.lanes:
            total = self.works[self.recording.program_of_rank[lane.rank]][-1]
            lane.end = lane.clock_at(float(total) if hasattr(total, "dtype") else total)

    def _advance(self, lane: Lane) -> None:
        """Runs one program until it waits for what is not done, or to its end."""
        points, reached, resumed, part_at = lane.points, lane.reached, lane.resumed, lane.part_at
        while len(resumed) < len(points):
            here = len(resumed)
            _, code, index = points[here]
            if len(reached) == here:
                reached.append(lane.clock_at(lane.work[here]))
                part_at.append(self._part_at(lane, code, index))
                if code in COMMUNICATES and len(lane.queue) == 1:
                    self._arrive(part_at[here])
            clock, part = reached[here], part_at[here]
            if code in (ISSUE, TRANSFER):
                resumed.append(clock)
            elif part.ended is None:
                return
            else:
                resumed.append(part.ended if part.ended > clock else clock)

    def _part_at(self, lane: Lane, code: int, index: int) -> Part:
        """What the program waits for at a point, or issues there."""
        if code in ISSUES_OF_WAITS:
            return lane.unwaited.pop((ISSUES_OF_WAITS[code], index))
        part = self._transferred(lane, index) if code == TRANSFER else self._issued(lane, code, index)
        if code in ISSUES_OF_WAITS.values():
            lane.unwaited[code, index] = part
        return part

    def _transferred(self, lane: Lane, index: int) -> Part:
        """Carries a transfer out, after those that go the same way."""
        transfer, issued = self.recording.transfers[index], lane.reached[-1]
        stream = lane.transfers[transfer.direction]
        part = Part(lane.rank, len(lane.resumed), None, None, issued, len(stream), transfer=transfer)
        part.begun = part.joined = max(issued, stream[-1].ended) if stream else issued
        part.ended = part.begun + self.prices.transfer(transfer.nbytes)
        stream.append(part)
        return part

    def _issued(self, lane: Lane, code: int, index: int) -> Part:
        """Puts a collective or a message at the end of the communication stream."""
        call, message = (None, self.recording.messages[index]) if code == MESSAGE else (index, None)
        place = 0 if call is None else self._places[call][lane.rank]
        part = Part(lane.rank, len(lane.resumed), call, message, lane.reached[-1], len(lane.parts), place)
        lane.parts.append(part)
        lane.queue.append(part)
        return part

    # -- the communication streams ------------------------------------------------------------------------------------

    def _arrive(self, part: Part) -> None:
        """Takes a part that is now first in its stream; carries out what has all its parts, and goes on from there."""
        first = [part]
        while first:
            part = first.pop()
            free = self.lanes[part.rank].free
            part.begun = part.issued if part.issued > free else free
            for done in self._match(part) if part.call is None else self._collect(part, part.call):
                lane = self.lanes[done.rank]
                lane.free = done.ended
                lane.queue.popleft()
                if lane.queue:
                    first.append(lane.queue[0])
                if lane.waits_for is done:
                    self._ready.append(lane)

    def _collect(self, part: Part, call: int) -> list[Part]:
        """Carries a collective out when all its members have come; returns the parts that are done."""
        arrived = self._arrived.setdefault(call, [])
        arrived.append(part)
        if len(arrived) < len(self._places[call]):
            return []
        del self._arrived[call]
        arrived.sort(key=lambda one: one.place)
        arrivals = [one.begun for one in arrived]
        last = max(arrivals)
        for one, end in zip(arrived, self.collectives.ends(self.recording.calls[call], arrivals), strict=True):
            one.ended, one.joined = end, last if last < end else end
        return arrived

    def _match(self, part: Part) -> list[Part]:
        """Moves the halves of messages that now have both ends there; returns the parts that are done."""
        message, rank = part.message, part.rank
        assert message is not None
        touched = [part]
        for source, destination in dict.fromkeys([(rank, message.destination), (message.source, rank)]):
            sender, receiver = self._first_message(source), self._first_message(destination)
            if source is None or destination is None:
                continue
            if (sender and receiver and sender.send_end is None and receiver.receive_end is None
                    and sender.message.destination == destination and receiver.message.source == source):
                start = max(sender.begun, receiver.begun)
                end = start + self.prices.message(source, destination, sender.message.nbytes)
                sender.send_end = receiver.receive_end = end
                sender.receiver, receiver.sender = receiver, sender
                sender.joined, receiver.joined = (max(start, one.joined or start) for one in (sender, receiver))
                touched += [sender, receiver]
        return [one for one in dict.fromkeys(touched) if self._is_through(one)]

    def _first_message(self, rank: int | None) -> Any:
        """What is first in a rank's stream, if that is a message."""
        queue = self.lanes[rank].queue if rank is not None and rank < len(self.lanes) else ()
        return queue[0] if queue and queue[0].message is not None and queue[0].begun is not None else None

    @staticmethod
    def _is_through(part: Part) -> bool:
        """Ends a message of which both halves have moved."""
        message = part.message
        assert message is not None
        halves = [end for other, end in ((message.destination, part.send_end), (message.source, part.receive_end))
                  if other is not None]
        if None in halves:
            return False
        part.ended = max(halves, default=part.begun)
        part.joined = part.begun if part.joined is None else part.joined
        return True

    # -- what never ends ----------------------------------------------------------------------------------------------

    def _explained(self, stuck: list[Lane]) -> str:
        lines = [f"rank {lane.rank}: {self._described(lane)}" for lane in stuck[:8]]
        more = [f"and {len(stuck) - 8} ranks more"] if len(stuck) > 8 else []
        return ("on one communication stream for each rank, in the order of issue, these wait for each other without "
                "end; issue in the same order on all ranks, and record again.\n" + "\n".join(lines + more))

    def _described(self, lane: Lane) -> str:
        waits, first = lane.waits_for, lane.queue[0] if lane.queue else None
        assert waits is not None
        ahead = "" if first is None or first is waits else f", behind {self._named(first)}"
        return f"waits for {self._named(waits)}{ahead}"

    def _named(self, part: Part) -> str:
        if part.call is not None:
            call = self.recording.calls[part.call]
            there = sorted(one.rank for one in self._arrived.get(part.call, []))
            return (f"{call.shape.operation} (call {call.number} of ranks {shown(call.group)}; there: "
                    f"{shown(tuple(there)) or 'none'})")
        assert part.message is not None
        ends = (("to", part.message.destination), ("from", part.message.source))
        return f"a message {' and '.join(f'{way} rank {rank}' for way, rank in ends if rank is not None)}"


# -- A replayed recording: what happened when on every rank and stream, and what that comes to -----------------------
# Legend: N ranks, R rows of a rank's program. In an exact replay all seconds are fractions, else floats.


AGAIN = "recompute"  # the name of spans in which forward is run a second time


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank did on a stream, from when to when.

    ``nbytes`` are those read and written by arithmetic, or of the collective's whole vector, or sent in a message, or
    moved between device and host; ``purpose`` is that of a collective or a message (parameters, gradients, state,
    control, unspecified), or the kind of what is moved.
    ``waited_seconds`` went by until all others had come too: what a late rank costs this one.
    """

    rank: int
    stream: str
    name: str
    path: tuple[str, ...]
    start_seconds: Seconds
    end_seconds: Seconds
    flops: int = 0
    nbytes: int = 0
    waited_seconds: Seconds = 0
    purpose: str = ""

    @property
    def seconds(self) -> Seconds:
        """From start to end."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Usage:
    """How one rank spent the step.

    ``communication_seconds`` are those in which its communication stream was busy, of which ``exposed_seconds`` while
    its program stood still for it, and the others, hidden, beside arithmetic or transfers; ``waited_seconds``, of them
    too, until all that took part had come. ``offload_seconds`` are those of transfers to the host and back, both ways
    added up, ``exposed_offload_seconds`` those in which the program stood still for one. ``idle_seconds`` are those of
    the whole step in which a stream did nothing.
    """

    compute_seconds: Seconds
    communication_seconds: Seconds
    exposed_seconds: Seconds
    waited_seconds: Seconds
    offload_seconds: Seconds
    exposed_offload_seconds: Seconds
    idle_seconds: Mapping[str, Seconds]

    @property
    def hidden_seconds(self) -> Seconds:
        """Communication for which the program did not stand still."""
        return self.communication_seconds - self.exposed_seconds


def replay(recording: Recording, machine: Machine, *, exact: bool = False) -> "Timeline":
    """When everything in the recording would happen on this machine.

    ``exact`` reckons in fractions, message by message: the reference, for small runs. Otherwise in float64, and many
    messages at once. Raises ValueError for slow ranks and links that there are not, for transfers to a host to which
    the machine has no link, and for programs that wait for each other without end once each rank does its communication
    in the order of issue.
    """
    machine.check_ranks(recording.ranks)
    prices = ExactPrices(machine) if exact else FloatPrices(machine)
    streams = Streams(recording, prices, Collectives(prices, message_by_message=exact))
    streams.run()
    return Timeline(recording, machine, streams)


class Timeline:
    """What `replay` found. ``lanes`` are the ranks' programs and streams, in rank order."""

    def __init__(self, recording: Recording, machine: Machine, streams: Streams) -> None:
        self.recording, self.machine, self.lanes = recording, machine, tuple(streams.lanes)
        self._works, self._collectives = streams.works, streams.collectives
        self._ranks_seen: dict[int, tuple[list[Seconds], Any]] = {}

    # -- totals -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.lanes)

    @cached_property
    def step_seconds(self) -> Seconds:
        """From the common start until the last rank is done."""
        return max(lane.end for lane in self.lanes)

    @cached_property
    def usage(self) -> tuple[Usage, ...]:
        """How each rank spent the step, in rank order."""
        return tuple(self._usage(lane) for lane in self.lanes)

    def _usage(self, lane: Lane) -> Usage:
        stood: dict[str, Seconds] = dict.fromkeys(self.streams, 0)  # still, for what of each stream
        for part, before, after in zip(lane.part_at, lane.reached, lane.resumed, strict=True):
            stood[part.stream] += after - before
        busy: dict[str, Seconds] = dict.fromkeys(self.streams, 0)
        for part in lane.all_parts:
            busy[part.stream] += part.ended - part.begun
        busy[COMPUTATION] = lane.end - sum(stood.values())
        waited = sum(part.joined - part.begun for part in lane.parts)
        moved, stood_for_host = (sum(of.get(way, 0) for way in OFFLOAD) for of in (busy, stood))
        return Usage(busy[COMPUTATION], busy[COMMUNICATION], stood[COMMUNICATION], waited, moved, stood_for_host,
                     {stream: self.step_seconds - seconds for stream, seconds in busy.items()})

    @property
    def exposed_seconds(self) -> Seconds:
        """The most that any rank's program stood still for communication."""
        return max(usage.exposed_seconds for usage in self.usage)

    @property
    def exposed_offload_seconds(self) -> Seconds:
        """The most that any rank's program stood still for transfers to its host and back."""
        return max(usage.exposed_offload_seconds for usage in self.usage)

    @property
    def streams(self) -> tuple[str, ...]:
        """Compute, communication, and both ways of offload where anything is offloaded."""
        return (COMPUTATION, COMMUNICATION, *(OFFLOAD if self.recording.transfers else ()))

    def flops(self, *, recomputed: bool = True) -> int:
        """Floating-point operations of all ranks; without ``recomputed``, those in spans called "recompute" are not in.
        """
        again = np.array([AGAIN in path for path in self.recording.paths] or [False])
        total = 0
        for lane in self.lanes:
            program = self.recording.program(lane.rank)
            rows = program.where(COMPUTE)
            flops = program.first[rows]
            total += sum((flops if recomputed else flops[~again[program.third[rows]]]).tolist())
        return total

    def model_flops_utilization(self, model_flops: int | None = None) -> float:
        """The share of all devices' peak that the model's own arithmetic takes; 0 where the step takes no time.

        ``model_flops`` are those of all ranks; None takes the recording's, without spans called "recompute". What units
        recompute inside themselves stands in no span: with such a policy, say the number.
        Source: Chowdhery et al. 2022 (PaLM), appendix B.
        """
        flops = self.flops(recomputed=False) if model_flops is None else model_flops
        return self._utilization(flops)

    def hardware_flops_utilization(self) -> float:
        """The share of all devices' peak that all arithmetic takes, the recomputed too."""
        return self._utilization(self.flops())

    def _utilization(self, flops: int) -> float:
        peak = self.machine.peak_flops_per_second * self.ranks
        return float(flops / (peak * float(self.step_seconds))) if self.step_seconds else 0.0

    # -- events -------------------------------------------------------------------------------------------------------

    def clocks(self, rank: int) -> Any:
        """When the rank's program came to each row, and to its end: (R + 1,) float64, or a list of fractions."""
        lane, work = self.lanes[rank], self._works[self.recording.program_of_rank[rank]]
        rows = [row for row, _, _ in lane.points]
        passed = np.searchsorted(rows, np.arange(len(work)))  # points before each row
        since, base = [0, *lane.resumed], [0, *lane.work]
        if not isinstance(work, np.ndarray):
            return [lane.pace.after(since[k], work[row] - base[k]) for row, k in enumerate(passed.tolist())]
        return lane.pace.after(np.array(since, np.float64)[passed], work - np.array(base, np.float64)[passed])

    def events(self, rank: int) -> list[Event]:
        """What a rank did on its streams: arithmetic row by row, then collectives and messages, then transfers to the
        host, then those back; each in order."""
        return [*self.computed(rank), *(self.part_event(part) for part in self.lanes[rank].all_parts)]

    def computed(self, rank: int, low: int = 0, high: int | None = None) -> list[Event]:
        """The rank's arithmetic row by row; only the rows from ``low`` to before ``high`` if asked."""
        program = self.recording.program(rank)
        clocks, rows = self._of_rank(rank)
        rows = rows[slice(*np.searchsorted(rows, (low, len(program) if high is None else high)))]
        columns = (column[rows].tolist() for column in (program.first, program.second, program.third))
        paths = self.recording.paths
        return [Event(rank, COMPUTATION, "compute", paths[path], clocks[row], clocks[row + 1], flops, nbytes)
                for row, flops, nbytes, path in zip(rows.tolist(), *columns, strict=True)]

    def _of_rank(self, rank: int) -> tuple[list[Seconds], Any]:
        """The rank's clocks as a list, and its rows of arithmetic."""
        if rank not in self._ranks_seen:
            clocks = self.clocks(rank)
            self._ranks_seen[rank] = (clocks.tolist() if isinstance(clocks, np.ndarray) else clocks,
                                      self.recording.program(rank).where(COMPUTE))
        return self._ranks_seen[rank]

    def part_event(self, part: Part) -> Event:
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
        return Event(part.rank, part.stream, name, path, part.begun, part.ended, 0, nbytes, part.joined - part.begun,
                     purpose)

    # -- inside a collective ------------------------------------------------------------------------------------------

    @cached_property
    def parts_of_call(self) -> Mapping[int, list[Part]]:
        """The parts of each call, in the order of its group."""
        found: dict[int, list[Part]] = {}
        for lane in self.lanes:
            for part in lane.parts:
                if part.call is not None:
                    found.setdefault(part.call, []).append(part)
        for parts in found.values():
            parts.sort(key=lambda part: part.place)
        return found

    def hops(self, call: int) -> list[Hop]:
        """Every message of a call, by its number in the recording, with its times."""
        arrivals = [part.begun for part in self.parts_of_call[call]]
        return self._collectives.hops(self.recording.calls[call], arrivals)

    def origin(self, part: Part) -> Part:
        """The part whose arrival decided when this one ended: the same rank's, or that of one that it waited for."""
        if part.call is not None:
            parts = self.parts_of_call[part.call]
            arrivals = [one.begun for one in parts]
            return parts[self._collectives.origin(self.recording.calls[part.call], arrivals, part.place)]
        if part.transfer is not None:
            return part
        other = part.receiver if part.send_end == part.ended else part.sender
        return other if other is not None and other.begun > part.begun else part


# -- The chain of events, one waiting for the other, that makes a step as long as it is ------------------------------

@dataclass(frozen=True, slots=True)
class PathEvent:
    """A link of the chain: from when to when, on which stream, entered on one rank and left on another, or the same.

    A collective is entered on the rank for whose arrival the last one waited, and left on the rank that went on.
    """

    from_rank: int
    rank: int
    stream: str
    name: str
    path: tuple[str, ...]
    start_seconds: Seconds
    end_seconds: Seconds

    @property
    def seconds(self) -> Seconds:
        """From start to end."""
        return self.end_seconds - self.start_seconds


def critical_path(timeline: Timeline) -> list[PathEvent]:
    """The events from 0 to the end of the step, each starting when the one before it ends.

    Of several such chains it is the one that leads to the lowest rank, and that prefers a program to what it waits for.
    Arithmetic of one span that nothing interrupts is one event; what takes no time is left out.
    """
    found = list(_backwards(timeline))[::-1]
    return [event for event in found if event.end_seconds > event.start_seconds]


def _backwards(timeline: Timeline) -> Iterator[PathEvent]:
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
                event = timeline.part_event(part)
                yield PathEvent(origin.rank, part.rank, event.stream, event.name, event.path, origin.begun, part.ended)
            lane, passed, clock = timeline.lanes[origin.rank], origin.point, origin.issued


def _chain(timeline: Timeline, part: Part) -> Iterator[tuple[Part, Part]]:
    """Parts back to one that began as soon as its program issued it, each with the part that decided its end."""
    while True:
        origin = timeline.origin(part)
        yield part, origin
        if origin.begun == origin.issued:
            return
        part = timeline.lanes[origin.rank].part_before(origin)


def _arithmetic(timeline: Timeline, lane: Lane, passed: int, start: Seconds, end: Seconds) -> Iterator[PathEvent]:
    """What the program computed after so many points, latest first, span by span."""
    if end <= start:
        return
    low = lane.points[passed - 1][0] if passed else 0
    high = lane.points[passed][0] if passed < len(lane.points) else None
    latest: Event | None = None
    stretch_end = end
    for event in reversed(timeline.computed(lane.rank, low, high)):
        if latest is not None and event.path != latest.path:
            yield PathEvent(lane.rank, lane.rank, COMPUTATION, "compute", latest.path, event.end_seconds, stretch_end)
            stretch_end = event.end_seconds
        latest = event
    assert latest is not None, "a clock moves by arithmetic"
    yield PathEvent(lane.rank, lane.rank, COMPUTATION, "compute", latest.path, start, stretch_end)


# -- What a rank holds over time, by kind, in a replay ---------------------------------------------------------------
# Legend: H changes of the ledger.


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Bytes by kind from each instant to the next: ``seconds`` (H + 1,), rising from 0, and (H + 1,) of each kind.

    Several changes may stand at one instant; what holds on from there is the last.
    """

    seconds: Array
    nbytes_by_kind: Mapping[str, Array]

    @property
    def nbytes(self) -> Array:
        """Bytes of all kinds together, (H + 1,)."""
        total: Array = np.sum([*self.nbytes_by_kind.values(), np.zeros(len(self.seconds), np.int64)], axis=0)
        return total

    @property
    def peak_nbytes(self) -> int:
        """The most bytes held at any moment, between two changes at one instant too."""
        return int(self.nbytes.max())


def memory(timeline: Timeline, rank: int) -> MemoryCurve:
    """What the rank held over time, from what it held when the recording began on; kinds as they first come."""
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


# -- A timeline in the Trace Event Format, which Perfetto and Chrome's own viewer open -------------------------------
# A process is a rank, a thread a stream. Slices ("X") are spans and what happens in them; counters ("C") are bytes held
# by kind; arrows ("s" to "f") lead from the issue of an asynchronous collective or of a transfer to the thing itself, and
# from there to where the program waited for it. Times are whole nanoseconds, written as microseconds: what is nested
# stays nested.
# Source: "Trace Event Format", a document of Chrome's catapult project; Perfetto's documentation, "Chrome JSON".


Entry = dict[str, Any]
THREADS = {stream: number for number, stream in enumerate(STREAMS, 1)}
ISSUES = tuple(ISSUES_OF_WAITS.values())


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON object of the Trace Event Format."""
    entries = [entry for lane in timeline.lanes for entry in _of_rank(timeline, lane)]
    machine = timeline.machine
    links = {"link": machine.network.inside, "between": machine.network.between, "host_link": machine.host_link}
    return {"displayTimeUnit": "ms", "traceEvents": entries,
            "otherData": {"device": machine.device.name, "format": machine.format, "efficiency": machine.efficiency,
                          **{role: link.name for role, link in links.items() if link is not None},
                          "step_seconds": float(timeline.step_seconds)}}


def save_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Writes the timeline to a JSON file for the viewer; ValueError for a path that cannot be written."""
    path = Path(path)
    try:
        path.write_text(json.dumps(chrome_trace(timeline), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"asked to save a timeline as {str(path)!r}, but: {error.strerror}; name a file that can be "
                         "written") from None
    return path


def nanoseconds(seconds: Seconds) -> int:
    """To the nearest whole nanosecond."""
    whole: int = round(seconds * 1_000_000_000)
    return whole


def _of_rank(timeline: Timeline, lane: Lane) -> Iterator[Entry]:
    """All entries of a rank. A viewer takes those of one instant in the order of the file: what lies around something
    else comes before it, and an arrow's start before its end."""
    yield from _names(lane.rank, timeline.streams)
    program = [*_spans(timeline, lane.rank), *_computed(timeline, lane.rank), *_points(timeline, lane)]
    yield from (entry for _, entry in sorted(program, key=lambda one: one[0]))
    for part in lane.all_parts:
        event = timeline.part_event(part)
        yield _slice(lane.rank, event.stream, event.name, part.begun, part.ended, _details(event))
    yield from _arrows(lane)
    yield from _counters(timeline, lane.rank)


def _names(rank: int, streams: Sequence[str]) -> Iterator[Entry]:
    """What the viewer calls a rank and its streams, and in which order it shows them."""
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    for stream in streams:
        common = {"ph": "M", "pid": rank, "tid": THREADS[stream]}
        yield {**common, "name": "thread_name", "args": {"name": stream}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": THREADS[stream]}}


def _slice(rank: int, stream: str, name: str, start: Seconds, end: Seconds, details: Entry) -> Entry:
    began, ended = nanoseconds(start), nanoseconds(end)
    return {"ph": "X", "pid": rank, "tid": THREADS[stream], "name": name, "cat": stream, "ts": began / 1000,
            "dur": (ended - began) / 1000, "args": details}


def _details(event: Event) -> Entry:
    if event.stream == COMPUTATION:
        return {"span": "/".join(event.path), "flops": event.flops, "nbytes": event.nbytes}
    return {"span": "/".join(event.path), "purpose": event.purpose, "nbytes": event.nbytes,
            "waited for others (us)": nanoseconds(event.waited_seconds) / 1000}


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[int, Entry]]:
    """Named stretches of the program, each with the row where it begins; one that is open at the end ends there."""
    recording, program = timeline.recording, timeline.recording.program(rank)
    clocks, begun, found = timeline.clocks(rank), list[int](), list[tuple[int, int]]()
    for row in program.where(BEGIN, END).tolist():
        if program.codes[row] == BEGIN:
            begun.append(row)
        elif begun:
            found.append((begun.pop(), row))
    for start, end in [*found, *((row, len(program)) for row in begun)]:
        path = recording.paths[program.first[start]]
        yield start, _slice(rank, COMPUTATION, path[-1], clocks[start], clocks[end], {"span": "/".join(path)})


def _computed(timeline: Timeline, rank: int) -> Iterator[tuple[int, Entry]]:
    rows = timeline.recording.program(rank).where(COMPUTE).tolist()
    for row, event in zip(rows, timeline.computed(rank), strict=True):
        yield row, _slice(rank, COMPUTATION, event.name, event.start_seconds, event.end_seconds, _details(event))


def _points(timeline: Timeline, lane: Lane) -> Iterator[tuple[int, Entry]]:
    """What the program's points show on its own thread: issues, and waits that take time; each with its row."""
    for (row, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
        if code in ISSUES or end > start:
            what = "issue" if code in ISSUES else "wait for"
            yield row, _slice(lane.rank, COMPUTATION, f"{what} {timeline.part_event(part).name}", start, end, {})


def _arrows(lane: Lane) -> Iterator[Entry]:
    """From issues to what was issued, and from there to where the program waited for it."""
    for (_, code, _), part, start, end in zip(lane.points, lane.part_at, lane.reached, lane.resumed, strict=True):
        if code in ISSUES:
            yield from _arrow(part, 0, (COMPUTATION, start), (part.stream, part.begun))
        elif code in ISSUES_OF_WAITS and end > start:
            yield from _arrow(part, 1, (part.stream, part.begun), (COMPUTATION, max(start, part.begun)))


def _arrow(part: Part, which: int, source: tuple[str, Seconds], target: tuple[str, Seconds]) -> Iterator[Entry]:
    """An arrow from slice to slice, each a stream and an instant in it. Its id is a number, since Perfetto takes texts
    for hexadecimal; "bp": "e" binds its end to the slice around that instant, not to the next."""
    number = (part.rank << 32) + 2 * part.point + which
    for phase, (stream, seconds) in (("s", source), ("f", target)):
        yield {"ph": phase, "id": number, "pid": part.rank, "tid": THREADS[stream], "name": "asynchronous",
               "cat": "flow", "ts": nanoseconds(seconds) / 1000, **({"bp": "e"} if phase == "f" else {})}


def _counters(timeline: Timeline, rank: int) -> Iterator[Entry]:
    """Bytes held by kind whenever they change; of several changes at one nanosecond, the last."""
    curve = memory(timeline, rank)
    at = [nanoseconds(seconds) for seconds in curve.seconds.tolist()]
    last = [after != now for now, after in zip(at, [*at[1:], -1], strict=True)]
    for kind, column in curve.nbytes_by_kind.items():
        shown: int | None = None
        for now, nbytes, is_last in zip(at, column.tolist(), last, strict=True):
            if is_last and nbytes != shown:
                shown = nbytes
                yield {"ph": "C", "pid": rank, "tid": 0, "name": f"held: {kind}", "ts": now / 1000,
                       "args": {"bytes": nbytes}}
