"""A replay: who starts what when, and who waits for whom, on the streams of all ranks.

Legend: N members of a collective, T_r the time at which member r is ready for its next message; R rows of a program,
α seconds of latency, β bytes per second.

A rank has a program, a communication stream, and a stream to its host and one back. The program computes, row after
row; a collective or a message for which it stops, and a wait, hold it until that is done. Whatever it issues goes to
the end of a stream, which does one thing after the other, in the order of issue. A collective or a message begins when
it is first in the streams of those that take part; inside it ranks wait for each other message by message. A transfer
concerns no other rank: it begins when it is issued and the one before it, the same way, is through. A host link is
full duplex and a device copies both ways at once, so each way of offload is a stream of its own.

Only points matter, rows at which a rank may wait or hands something over: what lies between them is a sum.

A device computes for max(flops / flops per second, nbytes / memory bytes per second); a message takes α + n/β, and so
does a transfer, on the link between device and host. What a collective sends from node to node goes by the cards of all
its ranks there. Inside a collective a message is a rendezvous: it starts when both its ends are ready; a member sends
and receives at once (links are full duplex), and goes on when both are done. So on a ring, from step to step, with c_r
the seconds of the message from r to r+1:

    T_r ← max(max(T_r, T_(r+1)) + c_r, max(T_(r-1), T_r) + c_(r-1))

What follows of it, and is tested: where all arrive at once on equal links the ring ends after (N-1)(α + m/β), m the
bytes of the *longest* chunk, for that chunk goes once round, one hop after the other, and no hop takes longer; where
chunks are equal it ends so long after the last arrival, and for all members at once.

Sources: Williams, Waterman & Patterson 2009 (the roofline); Hockney 1994 (the message).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from zerosim.numerics.places import DIRECTIONS
from zerosim.planning.collectives import CollectiveShape, checked_shape, levels
from zerosim.planning.hardware import Machine
from zerosim.planning.recording import (
    COLLECTIVE,
    COMPUTE,
    ISSUE,
    ISSUES_OF_WAITS,
    MESSAGE,
    POINTS,
    TRANSFER,
    RecordedCall,
    RecordedMessage,
    RecordedTransfer,
    Recording,
    shown,
)

# -- inside a collective ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PricedLevel:
    """Messages that go at once, so often: the places of both ends in the group, and the seconds, (messages,) each."""

    sources: np.ndarray
    destinations: np.ndarray
    seconds: np.ndarray
    times: int

    @cached_property
    def messages(self) -> list[tuple[int, int, float]]:
        """(source, destination, seconds) of each message."""
        return [*zip(self.sources.tolist(), self.destinations.tolist(), self.seconds.tolist(), strict=True)]


Steps = list[tuple[list[float], PricedLevel]]  # when members were ready for a step, (N,); its messages


def meet(ready: Sequence[float], priced: Sequence[PricedLevel], steps: Steps | None = None) -> list[float]:
    """The times at which members are done, (N,), given when each is ready, (N,); ``steps``, if given, get each step."""
    now = np.array(ready, np.float64)
    for level in priced:
        sources, destinations = level.sources, level.destinations  # each member stands once in either, at the most
        for _ in range(level.times):
            if steps is not None:
                steps.append((now.tolist(), level))
            ends = np.maximum(now[sources], now[destinations]) + level.seconds
            now[sources] = ends  # no sooner than any was ready
            now[destinations] = np.maximum(now[destinations], ends)
    found: list[float] = now.tolist()
    return found


class Collectives:
    """The collectives of one replay; what is the same for many calls is worked out once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._priced: dict[tuple[CollectiveShape, tuple[int, ...]], list[PricedLevel]] = {}
        self._together: dict[tuple[CollectiveShape, tuple[int, ...]], list[float]] = {}

    def priced(self, call: RecordedCall) -> list[PricedLevel]:
        """The call's messages with their prices."""
        key = call.shape, call.group
        if key not in self._priced:
            group = np.array(call.group, np.int64)
            self._priced[key] = [PricedLevel(level.sources, level.destinations, self.machine.message_seconds(
                group[level.sources], group[level.destinations], level.nbytes, group), level.times)
                for level in levels(checked_shape(call.shape))]
        return self._priced[key]

    def ends(self, call: RecordedCall, arrivals: Sequence[float]) -> list[float]:
        """The times at which members are done, (N,), in the group's order, given when each arrives, (N,).

        Times are counted from the last arrival, so that calls at which all arrive together cost the same each time.
        """
        last, key = max(arrivals), (call.shape, call.group)
        together = all(arrival == last for arrival in arrivals)
        found = self._together.get(key) if together else None
        if found is None:
            found = self._meet(call, arrivals)
        if together:
            self._together[key] = found
        return [last + seconds for seconds in found]

    def origin(self, call: RecordedCall, arrivals: Sequence[float], member: int) -> int:
        """The place whose arrival decided when this member was done: there its longest chain of messages begins."""
        steps, place = Steps(), member
        self._meet(call, arrivals, steps)
        for before, level in reversed(steps):
            ends = [(max(before[source], before[destination]) + seconds, source, destination)
                    for source, destination, seconds in level.messages if place in (source, destination)]
            end, *places = max(ends, key=itemgetter(0), default=(before[place], place))
            if end > before[place]:
                place = max(places, key=before.__getitem__)
        return place

    def _meet(self, call: RecordedCall, arrivals: Sequence[float], steps: Steps | None = None) -> list[float]:
        """The times at which members are done, counted from the last arrival."""
        last = max(arrivals)
        return meet([arrival - last for arrival in arrivals], self.priced(call), steps)


# -- one rank: its program from point to point, its other streams part by part ----------------------------------------


COMPUTATION, COMMUNICATION = ("compute", "communication")
STREAMS = (COMPUTATION, COMMUNICATION, *DIRECTIONS)
Point = tuple[int, int, int]  # row, code, and the number of a call, a message or a transfer


@dataclass(slots=True, eq=False)
class StreamPart:
    """One rank's part in a collective (``call``) or in a message, or a transfer of its own, on one of its streams.

    ``issued`` is when its program came to it, at its point number ``point``; ``begun`` when it was first in the stream,
    the part ``before`` it being through; ``joined`` when the last of those that take part had come too, or this rank
    was done, if that was sooner; ``ended`` when this rank was done. Of a message, ``send_end`` and ``receive_end`` say
    when each half was through, ``receiver`` and ``sender`` are the other ends. What is not known yet is None.
    """

    rank: int
    point: int
    issued: float
    before: "StreamPart | None"
    call: int | None = None
    message: RecordedMessage | None = None
    transfer: RecordedTransfer | None = None
    place: int = 0
    begun: Any = None
    joined: Any = None
    ended: Any = None
    send_end: Any = None
    receive_end: Any = None
    receiver: "StreamPart | None" = None
    sender: "StreamPart | None" = None

    @property
    def stream(self) -> str:
        """Its stream: a way of offload, or communication."""
        return COMMUNICATION if self.transfer is None else self.transfer.direction


@dataclass(slots=True, eq=False)
class Lane:
    """One rank: its points, when its program reached each and went on from each, and the parts of its other streams.

    ``work`` are the nominal seconds of arithmetic before each point and in all, ``part_at`` the part that it issues or
    waits for at each, ``streams`` all parts by stream, in the order of issue. ``unwaited`` are by code and number.
    """

    rank: int
    points: Sequence[Point]
    work: Sequence[float]
    pace: float
    reached: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    part_at: list[StreamPart] = field(default_factory=list)
    streams: dict[str, list[StreamPart]] = field(default_factory=lambda: {name: [] for name in STREAMS[1:]})
    queue: deque[StreamPart] = field(default_factory=deque)
    unwaited: dict[tuple[int, int], StreamPart] = field(default_factory=dict)
    free: float = 0.0
    end: float = 0.0

    @property
    def all_parts(self) -> list[StreamPart]:
        """The parts of all streams, stream by stream."""
        return [part for parts in self.streams.values() for part in parts]

    def issue(self, stream: str, **of: Any) -> StreamPart:
        """A new part at the end of a stream, for the point that the program has just reached."""
        parts = self.streams[stream]
        parts.append(StreamPart(self.rank, len(self.resumed), self.reached[-1], parts[-1] if parts else None, **of))
        return parts[-1]

    @property
    def is_done(self) -> bool:
        """True when the program has passed its last point."""
        return len(self.resumed) == len(self.points)

    @property
    def waits_for(self) -> StreamPart | None:
        """The part that holds the program."""
        return None if self.is_done or len(self.reached) == len(self.resumed) else self.part_at[-1]

    def clock_at(self, work: float) -> float:
        """The program's clock after so much nominal arithmetic, with no point left before it."""
        passed = len(self.resumed)
        since, left = (self.resumed[-1], work - self.work[passed - 1]) if passed else (0.0, work)
        return since + self.pace * left


# -- all ranks --------------------------------------------------------------------------------------------------------


COMMUNICATES = (COLLECTIVE, ISSUE, MESSAGE)


class Streams:
    """The state of a replay; ``run`` carries it out.

    ``works`` are the nominal seconds of arithmetic before each row of each program, and after its last;
    ``parts_of_call`` the parts of each call that is done, in the order of its group.
    """

    def __init__(self, recording: Recording, machine: Machine) -> None:
        self.recording, self.machine, self.collectives = recording, machine, Collectives(machine)
        self.works, points, at_points = [], [], []
        for program in recording.programs:
            work, computed, rows = np.zeros(len(program) + 1), program.where(COMPUTE), program.where(*POINTS)
            work[computed + 1] = machine.compute_seconds(program.first[computed], program.second[computed])
            self.works.append(np.cumsum(work, out=work))
            points.append([*zip(rows.tolist(), program.codes[rows].tolist(), program.first[rows].tolist(),
                                strict=True)])
            at_points.append(work[[*rows, -1]].tolist())
        self.lanes = [Lane(rank, points[program], at_points[program], machine.pace(rank))
                      for rank, program in enumerate(recording.program_of_rank)]
        self._places = [{rank: place for place, rank in enumerate(call.group)} for call in recording.calls]
        self._arrived: dict[int, list[StreamPart]] = {}
        self.parts_of_call: dict[int, list[StreamPart]] = {}
        self._ready = deque(self.lanes)

    def run(self) -> None:
        """Replays all programs to their ends; raises ValueError where they wait for each other without end."""
        while self._ready:
            self._advance(self._ready.popleft())
        stuck = [lane for lane in self.lanes if not lane.is_done]
        if stuck:
            raise ValueError(self._explained(stuck))
        for lane in self.lanes:
            lane.end = lane.clock_at(lane.work[-1])

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
        if code == TRANSFER:
            part = self._transferred(lane, self.recording.transfers[index])
        elif code == MESSAGE:
            part = lane.issue(COMMUNICATION, message=self.recording.messages[index])
        else:
            part = lane.issue(COMMUNICATION, call=index, place=self._places[index][lane.rank])
        if code in COMMUNICATES:
            lane.queue.append(part)
        if code in ISSUES_OF_WAITS.values():
            lane.unwaited[code, index] = part
        return part

    def _transferred(self, lane: Lane, transfer: RecordedTransfer) -> StreamPart:
        """Carries a transfer out, after those that go the same way."""
        part = lane.issue(transfer.direction, transfer=transfer)
        part.begun = part.joined = max(part.issued, part.before.ended) if part.before else part.issued
        part.ended = part.begun + self.machine.link_of(transfer.direction).seconds(transfer.nbytes)
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
        self.parts_of_call[call] = self._arrived.pop(call)
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
        part.send_end = part.begun if message.destination is None else None  # a half that is absent is through
        part.receive_end = part.begun if message.source is None else None
        touched = [part]
        for source, destination in dict.fromkeys([(rank, message.destination), (message.source, rank)]):
            sender, receiver = self._first_message(source), self._first_message(destination)
            if source is None or destination is None:
                continue
            if (sender and receiver and sender.send_end is None and receiver.receive_end is None
                    and sender.message.destination == destination and receiver.message.source == source):
                start = max(sender.begun, receiver.begun)
                end = start + self._message_seconds(source, destination, sender.message.nbytes)
                sender.send_end = receiver.receive_end = end
                sender.receiver, receiver.sender = receiver, sender
                sender.joined, receiver.joined = (max(start, one.joined or start) for one in (sender, receiver))
                touched += [sender, receiver]
        through = [one for one in dict.fromkeys(touched) if None not in (one.send_end, one.receive_end)]
        for one in through:
            one.ended, one.joined = max(one.send_end, one.receive_end), one.joined or one.begun
        return through

    def _message_seconds(self, source: int, destination: int, nbytes: int) -> float:
        """Seconds of one message; 0 from a rank to itself, which leaves no device."""
        if source == destination:
            return 0.0
        return float(self.machine.message_seconds(np.array([source]), np.array([destination]), np.array([nbytes]))[0])

    def _first_message(self, rank: int | None) -> Any:
        """The first of a rank's stream, if that is a message."""
        queue = self.lanes[rank].queue if rank is not None and rank < len(self.lanes) else ()
        return queue[0] if queue and queue[0].message is not None and queue[0].begun is not None else None

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
