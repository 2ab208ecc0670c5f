"""A replay: who starts what when, and who waits for whom, on the streams of all ranks.

Legend: N members of a collective, T_r the time at which member r is ready for its next message.

A rank has a program, a communication stream, and a stream to its host and one back. The program computes, row after
row; a collective or a message for which it stops, and a wait, hold it until that is done. Whatever it issues goes to
the end of a stream, which does one thing after the other, in the order of issue. A collective or a message begins when
it is first in the streams of those that take part; inside it ranks wait for each other message by message. A transfer
concerns no other rank: it begins when it is issued and the one before it, the same way, is through. A host link is
full duplex and a device copies both ways at once, so each way of offload is a stream of its own.

Only points matter, rows at which a rank may wait or hands something over: what lies between them is a sum.

Inside a collective a message is a rendezvous: it starts when both its ends are ready and takes α + n/β; a member sends
and receives at once (links are full duplex), and goes on when both are done. So on a ring, from step to step, with c_r
the seconds of the message from r to r+1:

    T_r ← max(max(T_r, T_(r+1)) + c_r, max(T_(r-1), T_r) + c_(r-1))

What follows of it, and is tested: where all arrive at once on equal links the ring ends after (N-1)(α + m/β), m the
bytes of the *longest* chunk, for that chunk goes once round, one hop after the other, and no hop takes longer; where
chunks are equal it ends so long after the last arrival, and for all members at once.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from zerosim.planning.collectives import Level, checked_vector, levels
from zerosim.planning.machine import Pace, Prices, Seconds
from zerosim.planning.recording import (
    COLLECTIVE,
    ISSUE,
    ISSUES_OF_WAITS,
    MESSAGE,
    OFFLOAD,
    POINTS,
    TRANSFER,
    Program,
    RecordedCall,
    RecordedMessage,
    Recording,
    Shape,
    Transfer,
    shown,
)

# -- inside a collective ----------------------------------------------------------------------------------------------


# Up to so many messages in a step, plain Python is faster than NumPy's calls.
FEW_MESSAGES = 24


@dataclass(frozen=True, slots=True)
class PricedLevel:
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
class TimedHop:
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


def steps_of(call: RecordedCall, prices: Prices) -> list[PricedLevel]:
    """The call's messages with their prices."""
    group, found = np.array(call.group, np.int64), []
    for level in schedule(call.shape):
        seconds = prices.messages(group[level.sources], group[level.destinations], level.nbytes)
        found.append(PricedLevel(level.sources.tolist(), level.destinations.tolist(), seconds, level.times))
    return found


def by_message(ready: Sequence[Seconds], steps: Sequence[PricedLevel]) -> list[Seconds]:
    """The times at which members are done, (N,), given when each is ready, (N,); one message after another."""
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


def by_step(ready: Sequence[float], steps: Sequence[PricedLevel]) -> list[float]:
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


def origins_by_message(ready: Sequence[Seconds], steps: Sequence[PricedLevel]) -> list[int]:
    """The place at which the longest chain of messages to each member begins, (N,)."""
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


def origins_by_step(ready: Sequence[float], steps: Sequence[PricedLevel]) -> list[int]:
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

    def __init__(self, prices: Prices, *, few_messages: float = FEW_MESSAGES) -> None:
        self.prices, self.few_messages = prices, few_messages
        self._steps = lru_cache(maxsize=256)(
            lambda shape, group: steps_of(RecordedCall(shape, group, (), 0, ""), prices))
        self._together: dict[tuple[Shape, tuple[int, ...]], list[Seconds]] = {}

    def steps(self, call: RecordedCall) -> list[PricedLevel]:
        """The call's messages with their prices."""
        found: list[PricedLevel] = self._steps(call.shape, call.group)
        return found

    def ends(self, call: RecordedCall, arrivals: Sequence[Seconds]) -> list[Seconds]:
        """The times at which members are done, (N,), in the group's order, given when each arrives, (N,).

        Times are counted from the last arrival, so that calls at which all arrive together cost the same each time.
        """
        last = max(arrivals)
        if all(arrival == last for arrival in arrivals):
            key = call.shape, call.group
            if key not in self._together:
                self._together[key] = self._run(call, [last - last] * len(arrivals))
            return [last + seconds for seconds in self._together[key]]
        return [last + seconds for seconds in self._run(call, [arrival - last for arrival in arrivals])]

    def _run(self, call: RecordedCall, ready: Sequence[Seconds]) -> list[Seconds]:
        steps = self.steps(call)
        if len(ready) <= self.few_messages:
            return by_message(ready, steps)
        return by_step(ready, steps)

    def origin(self, call: RecordedCall, arrivals: Sequence[Seconds], member: int) -> int:
        """The place whose arrival decided when this member was done: there its longest chain of messages begins."""
        last = max(arrivals)
        origins = origins_by_message if len(arrivals) <= self.few_messages else origins_by_step
        return origins([arrival - last for arrival in arrivals], self.steps(call))[member]

    def hops(self, call: RecordedCall, arrivals: Sequence[Seconds]) -> list[TimedHop]:
        """Every message of the call with its times, step by step."""
        last, hops = max(arrivals), []
        now: list[Seconds] = [arrival - last for arrival in arrivals]
        for step in self.steps(call):
            for _ in range(step.times):
                for source, destination, cost in step.messages:
                    start = max(now[source], now[destination])
                    ends = call.group[source], call.group[destination]
                    hops.append(TimedHop(*ends, last + start, last + (start + cost)))
                now = by_message(now, [PricedLevel(step.sources, step.destinations, step.seconds, 1)])
        return hops


# -- one rank: its program from point to point, its other streams part by part ----------------------------------------


COMPUTATION, COMMUNICATION = ("compute", "communication")
STREAMS = (COMPUTATION, COMMUNICATION, *OFFLOAD)
Point = tuple[int, int, int]  # row, code, and the number of a call, a message or a transfer


@dataclass(slots=True, eq=False)
class StreamPart:
    """One rank's part in a collective (``call``) or in a message, or a transfer of its own, on one of its streams.

    ``issued`` is when its program came to it, at its point number ``point``; ``begun`` when it was first in the stream;
    ``joined`` when the last of those that take part had come too, or this rank was done, if that was sooner; ``ended``
    when this rank was done. Of a message, ``send_end`` and ``receive_end`` say when each half was through, ``receiver``
    and ``sender`` are the other ends. ``number`` counts the parts of the stream.
    """

    rank: int
    point: int
    call: int | None
    message: RecordedMessage | None
    issued: Seconds
    number: int
    place: int = 0
    begun: Seconds = None
    joined: Seconds = None
    ended: Seconds = None
    send_end: Seconds = None
    receive_end: Seconds = None
    receiver: "StreamPart | None" = None
    sender: "StreamPart | None" = None
    transfer: Transfer | None = None

    @property
    def stream(self) -> str:
        """Its stream: a way of offload, or communication."""
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
    part_at: list[StreamPart] = field(default_factory=list)
    parts: list[StreamPart] = field(default_factory=list)
    transfers: dict[str, list[StreamPart]] = field(default_factory=lambda: {way: [] for way in OFFLOAD})
    queue: deque[StreamPart] = field(default_factory=deque)
    unwaited: dict[tuple[int, int], StreamPart] = field(default_factory=dict)
    free: Seconds = 0
    end: Seconds = 0

    @property
    def all_parts(self) -> list[StreamPart]:
        """The parts of all streams, stream by stream."""
        return [*self.parts, *(part for way in OFFLOAD for part in self.transfers[way])]

    def part_before(self, part: StreamPart) -> StreamPart:
        """The part that was issued before it to the same stream; there must be one."""
        return (self.parts if part.transfer is None else self.transfers[part.stream])[part.number - 1]

    @property
    def is_done(self) -> bool:
        """True when the program has passed its last point."""
        return len(self.resumed) == len(self.points)

    @property
    def waits_for(self) -> StreamPart | None:
        """The part that holds the program."""
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


# -- all ranks --------------------------------------------------------------------------------------------------------


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
        self._arrived: dict[int, list[StreamPart]] = {}
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

    def _part_at(self, lane: Lane, code: int, index: int) -> StreamPart:
        """The part for which the program waits at a point, or which it issues there."""
        if code in ISSUES_OF_WAITS:
            return lane.unwaited.pop((ISSUES_OF_WAITS[code], index))
        part = self._transferred(lane, index) if code == TRANSFER else self._issued(lane, code, index)
        if code in ISSUES_OF_WAITS.values():
            lane.unwaited[code, index] = part
        return part

    def _transferred(self, lane: Lane, index: int) -> StreamPart:
        """Carries a transfer out, after those that go the same way."""
        transfer, issued = self.recording.transfers[index], lane.reached[-1]
        stream = lane.transfers[transfer.direction]
        part = StreamPart(lane.rank, len(lane.resumed), None, None, issued, len(stream), transfer=transfer)
        part.begun = part.joined = max(issued, stream[-1].ended) if stream else issued
        part.ended = part.begun + self.prices.transfer(transfer.nbytes)
        stream.append(part)
        return part

    def _issued(self, lane: Lane, code: int, index: int) -> StreamPart:
        """Puts a collective or a message at the end of the communication stream."""
        call, message = (None, self.recording.messages[index]) if code == MESSAGE else (index, None)
        place = 0 if call is None else self._places[call][lane.rank]
        part = StreamPart(lane.rank, len(lane.resumed), call, message, lane.reached[-1], len(lane.parts), place)
        lane.parts.append(part)
        lane.queue.append(part)
        return part

    # -- the communication streams ------------------------------------------------------------------------------------

    def _arrive(self, part: StreamPart) -> None:
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

    def _collect(self, part: StreamPart, call: int) -> list[StreamPart]:
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

    def _match(self, part: StreamPart) -> list[StreamPart]:
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
        """The first of a rank's stream, if that is a message."""
        queue = self.lanes[rank].queue if rank is not None and rank < len(self.lanes) else ()
        return queue[0] if queue and queue[0].message is not None and queue[0].begun is not None else None

    @staticmethod
    def _is_through(part: StreamPart) -> bool:
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

    def _named(self, part: StreamPart) -> str:
        if part.call is not None:
            call = self.recording.calls[part.call]
            there = sorted(one.rank for one in self._arrived.get(part.call, []))
            return (f"{call.shape.operation} (call {call.number} of ranks {shown(call.group)}; there: "
                    f"{shown(tuple(there)) or 'none'})")
        assert part.message is not None
        ends = (("to", part.message.destination), ("from", part.message.source))
        return f"a message {' and '.join(f'{way} rank {rank}' for way, rank in ends if rank is not None)}"
