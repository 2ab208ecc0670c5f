"""A replay by other means: the traces' own rows, and the exchanges of each collective, one by one, in fractions.

Nothing is known here of levels, points, or parts. Each rank has a program and a stream of what it issued; whatever can
go on goes on, in any order that ``chance`` picks.
"""

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import zerosim as zs
from zerosim.planning import Machine, SlowRank

Exchange = tuple[int | None, int | None, int]  # to, from, bytes sent; ranks of the whole cluster


@dataclass
class Task:
    """What a rank issued: the exchanges that it still has to make, one open at a time."""

    key: Any
    issued: Fraction
    exchanges: Iterator[Exchange]
    to: int | None = None
    source: int | None = None
    nbytes: int = 0
    ready: Fraction | None = None  # when the open exchange could begin
    latest: Fraction = Fraction(0)
    end: Fraction | None = None

    def go_on(self, clock: Fraction) -> None:
        """Opens the next exchange, or ends."""
        self.ready = self.latest = clock
        self.to, self.source, self.nbytes = next(self.exchanges, (None, None, 0))
        if self.to is None and self.source is None:
            self.end = clock


@dataclass
class Row:
    """One rank: how far its program is, and its stream."""

    rows: deque
    clock: Fraction = Fraction(0)
    free: Fraction = Fraction(0)
    stream: deque = field(default_factory=deque)
    unwaited: dict = field(default_factory=dict)
    blocked: Task | None = None
    collective: Any = None  # the latest
    waited: Fraction = Fraction(0)
    host_free: dict = field(default_factory=lambda: defaultdict(Fraction))
    arrivals: dict = field(default_factory=dict)
    waited_for_host: Fraction = Fraction(0)


def exchanges_of(row: Any) -> dict[int, list[Exchange]]:
    """What each rank exchanges in a collective, step by step."""
    steps: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(lambda: [None, None, 0]))
    for hop in row.hops():
        source, destination = (row.call.group[place] for place in (hop.source, hop.destination))
        steps[source][hop.step][0::2] = destination, hop.nbytes
        steps[destination][hop.step][1] = source
    return {rank: [tuple(mine[step]) for step in sorted(mine)] for rank, mine in steps.items()}


class Naive:
    """The state of the replay; ``run`` returns when each rank ends."""

    def __init__(self, traces: tuple[zs.ranks.Trace, ...], machine: Machine, seed: int = 0) -> None:
        self.machine, self.chance = machine, random.Random(seed)
        self.ranks = [Row(deque(trace.rows)) for trace in traces]
        self.exchanges: dict[Any, dict[int, list[Exchange]]] = {}  # of each call, once

    def run(self) -> list[Fraction]:
        """The ends of all ranks."""
        while any(self._turn(rank) for rank in self.chance.sample(range(len(self.ranks)), len(self.ranks))):
            pass
        assert not any(row.rows or row.stream or row.blocked for row in self.ranks), "they wait without end"
        return [row.clock for row in self.ranks]

    def _turn(self, rank: int) -> bool:
        return self._program(rank) or self._stream(rank)

    def _program(self, rank: int) -> bool:
        me = self.ranks[rank]
        if me.blocked is not None:
            if me.blocked.end is None:
                return False
            me.waited += max(me.blocked.end - me.clock, 0)
            me.clock, me.blocked = max(me.clock, me.blocked.end), None
            return True
        if not me.rows:
            return False
        self._read(rank, me, me.rows.popleft())
        return True

    def _read(self, rank: int, me: Row, row: Any) -> None:
        match type(row).__name__:
            case "Compute":
                me.clock = self._after(rank, me.clock, self._seconds(row))
            case "Collective":
                me.collective = row
                if not row.asynchronous:
                    me.blocked = self._collective(rank, me)
            case "Issue":
                me.unwaited[id(row.call)] = self._collective(rank, me)
            case "Wait":
                me.blocked = me.unwaited.pop(id(row.call))
            case "Message":
                me.blocked = self._issue(me, None, [(row.destination, row.source, row.sent_nbytes)])
            case "Transfer":
                moved, link = row.transfer, self.machine.link_to_host
                begun = max(me.clock, me.host_free[moved.direction])
                me.host_free[moved.direction] = me.arrivals[moved] = begun + link.alpha + moved.nbytes / link.beta
            case "TransferWait":
                end = max(me.clock, me.arrivals.pop(row.transfer))
                me.waited_for_host, me.clock = me.waited_for_host + end - me.clock, end

    def _collective(self, rank: int, me: Row) -> Task:
        call = me.collective.call
        key = call.group, call.communicator, call.number
        if key not in self.exchanges:
            self.exchanges[key] = exchanges_of(me.collective)
        return self._issue(me, key, self.exchanges[key].get(rank, []))

    def _issue(self, me: Row, key: Any, exchanges: list[Exchange]) -> Task:
        me.stream.append(task := Task(key, me.clock, iter(exchanges)))
        return task

    def _stream(self, rank: int) -> bool:
        me = self.ranks[rank]
        if not me.stream:
            return False
        task = me.stream[0]
        opened = task.ready is None
        if opened:
            task.go_on(max(task.issued, me.free))
        moved = self._move(rank, task) or opened
        if task.end is not None:
            me.free = task.end
            me.stream.popleft()
            return True
        return moved

    def _move(self, rank: int, task: Task) -> bool:
        """Moves this rank's open send, if its receiver is at that place too."""
        if task.end is not None or task.to is None:
            return False
        other = self.ranks[task.to].stream[0] if self.ranks[task.to].stream else None
        if other is None or other.key != task.key or other.ready is None or other.source != rank:
            return False
        link = self.machine.network.link(rank, task.to) if task.to != rank else None
        seconds = link.alpha + task.nbytes / link.beta if link else Fraction(0)
        for slow in self.machine.slow_links:
            if (slow.source, slow.destination) == (rank, task.to):
                seconds *= Fraction(slow.factor)
        end = max(task.ready, other.ready) + seconds
        task.to = other.source = None
        for one in {id(task): task, id(other): other}.values():
            one.latest = max(one.latest, end)
            if one.to is None and one.source is None:
                one.go_on(one.latest)
        return True

    def _seconds(self, row: Any) -> Fraction:
        machine = self.machine
        return max(row.flops / (Fraction(machine.peak_flops_per_second) * Fraction(machine.efficiency)),
                   row.nbytes / Fraction(machine.device.memory_bytes_per_second))

    def _after(self, rank: int, clock: Fraction, work: Fraction) -> Fraction:
        """The clock after so much work: at full pace until the instant from which the rank is slow, then slower."""
        for slow in self.machine.slow_ranks:
            if slow.rank == rank:
                return after(slow, clock, work)
        return clock + work


def after(slow: SlowRank, clock: Fraction, work: Fraction) -> Fraction:
    """When a straggler has done so much work."""
    instant, factor = Fraction(slow.from_seconds), Fraction(slow.factor)
    if clock + work <= instant:
        return clock + work
    begun = max(instant - clock, Fraction(0))
    return max(clock, instant) + (work - begun) * factor
