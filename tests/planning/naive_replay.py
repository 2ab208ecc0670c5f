"""A replay by other means: the traces' own rows and the algorithms' own generators, exchange by exchange, in fractions.

Nothing is known here of levels, points, or parts. Each rank has a program and a stream of what it issued; whatever can
go on goes on, in any order that ``chance`` picks.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from zerosim.numerics.kernels import NullKernels
from zerosim.planning.timeline import Machine, SlowRank
from zerosim.ranks.hub import steps_of, without_data
from zerosim.ranks.trace import Collective, Compute, Issue, Message, Traces, Wait


@dataclass
class Task:
    """What a rank issued: the exchanges that it still has to make, one open at a time."""

    key: Any
    issued: Fraction
    exchanges: Any  # of (to, source, bytes sent), in ranks of the whole cluster
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
    waited: Fraction = Fraction(0)


def exchanges_of(call, rank):
    """What the rank's generator yields, as (to, source, bytes sent)."""
    for exchange in steps_of(without_data(call, call.group.index(rank), NullKernels())):
        yield (None if exchange.to is None else call.group[exchange.to],
               None if exchange.source is None else call.group[exchange.source],
               0 if exchange.send is None else exchange.send.nbytes)


class Naive:
    """The state of the replay; ``run`` returns when each rank ends."""

    def __init__(self, traces: Traces, machine: Machine, seed: int = 0) -> None:
        self.machine, self.chance = machine, random.Random(seed)
        self.ranks = [Row(deque(trace.rows)) for trace in traces]

    def run(self) -> list[Fraction]:
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
        match row:
            case Compute():
                me.clock = self._after(rank, me.clock, self._seconds(row))
            case Collective() if not row.asynchronous:
                me.blocked = self._issue(me, row.call, exchanges_of(row.call, rank))
            case Issue():
                me.unwaited[id(row.call)] = self._issue(me, row.call, exchanges_of(row.call, rank))
            case Wait():
                me.blocked = me.unwaited.pop(id(row.call))
            case Message():
                me.blocked = self._issue(me, None, iter([(row.destination, row.source, row.sent_nbytes)]))

    def _issue(self, me: Row, call: Any, exchanges: Any) -> Task:
        key = None if call is None else (call.group, call.communicator, call.number)
        me.stream.append(task := Task(key, me.clock, exchanges))
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

    def _seconds(self, row: Compute) -> Fraction:
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
