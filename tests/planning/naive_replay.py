"""A replay by other means, in fractions: from the traces' own rows, and the messages of each collective, one by one.

Nothing is known here of levels, points, or parts. Each rank has a program, and a stream that does in the order of issue
what the program hands to it: coroutines that note instants by name, and wait for those that others note.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Sequence
from fractions import Fraction
from itertools import count
from typing import Any

import zerosim as zs
from zerosim.planning import Link, Machine, Network

Hop = tuple[int, int, Fraction, Hashable]  # from, to, bytes of a card, what tells it from others of these two ranks


def link_of(network: Network, source: int, destination: int) -> Link:
    """The link between two ranks."""
    return network.between if network.crosses(source, destination) else network.inside


def of_a_card(step: Sequence[tuple[int, int]], group: Sequence[int], ranks_per_node: int | None) -> list[Fraction]:
    """Of each message (from, to) of a collective's step, the part that a network card of its node carries."""
    node = {rank: 0 if ranks_per_node is None else rank // ranks_per_node for rank in group}
    crossing = [(node[source], node[to]) for source, to in step if node[source] != node[to]]
    cards = Counter(node.values())
    return [Fraction(1) if node[source] == node[to] else max(
        Fraction(sum(left == node[source] for left, _ in crossing), cards[node[source]]),
        Fraction(sum(entered == node[to] for _, entered in crossing), cards[node[to]])) for source, to in step]


class Naive:
    """When each rank ``ends``, and how long it ``waited`` for other ranks and for its host."""

    def __init__(self, traces: tuple[zs.ranks.Trace, ...], machine: Machine) -> None:
        self.machine, self.known = machine, dict[Hashable, Any]()
        self.ends, self.waited, self.waited_for_host = ([Fraction(0) for _ in traces] for _ in range(3))
        self._steps: dict[Hashable, dict[int, list[list[Hop]]]] = {}  # of each call, once
        running = [act(rank, trace) for rank, trace in enumerate(traces) for act in (self._program, self._stream)]
        while running:
            before = len(self.known), len(running)
            running = [one for one in running if next(one, "through") != "through"]
            assert (len(self.known), len(running)) != before, "they wait without end"

    def _noted(self, *name: Hashable) -> Generator[None, None, Any]:
        while name not in self.known:
            yield
        return self.known[name]

    def _program(self, rank: int, trace: zs.ranks.Trace) -> Generator[None]:
        clock, issued, unwaited, sent, received = Fraction(0), 0, {}, Counter(), Counter()
        arrivals, host_free = {}, defaultdict(Fraction)
        for row in trace.rows:
            wanted = None  # the number of what the program waits for
            match type(row).__name__:
                case "Compute":
                    clock = self._after(rank, clock, row)
                case "Collective":
                    issued += 1
                    self.known["issue", rank, issued] = clock, self._steps_of(row).get(rank, [])
                    wanted = None if row.asynchronous else issued
                case "Issue":
                    unwaited[id(row.call)] = issued
                case "Wait":
                    wanted = unwaited.pop(id(row.call))
                case "Message":
                    issued += 1
                    sent[row.destination] += 1
                    received[row.source] += 1
                    both = ((rank, row.destination, row.sent_nbytes, sent[row.destination]),
                            (row.source, rank, 0, received[row.source]))
                    self.known["issue", rank, issued] = clock, [[hop for hop in both if None not in hop]]
                    wanted = issued
                case "Transfer":
                    moved, link = row, self.machine.link_of(row.direction)
                    begun = max(clock, host_free[moved.direction])
                    host_free[moved.direction] = arrivals[moved] = begun + link.alpha + moved.nbytes / link.beta
                case "TransferWait":
                    end = max(clock, arrivals.pop(row.transfer))
                    self.waited_for_host[rank], clock = self.waited_for_host[rank] + end - clock, end
            if wanted is not None:
                end = max(clock, (yield from self._noted("end", rank, wanted)))
                self.waited[rank], clock = self.waited[rank] + end - clock, end
        self.known["issue", rank, issued + 1] = clock, None
        self.ends[rank] = clock

    def _stream(self, rank: int, trace: zs.ranks.Trace) -> Generator[None]:
        now = Fraction(0)
        for number in count(1):
            issued, steps = yield from self._noted("issue", rank, number)
            if steps is None:
                return
            now = max(now, issued)
            for hops in steps:
                ends = [now]
                for source, destination, nbytes, which in hops:
                    if rank == source:
                        self.known["sender", source, destination, which] = now, nbytes
                    if rank == destination:
                        self.known["receiver", source, destination, which] = now
                for source, destination, _, which in hops:
                    sender, nbytes = yield from self._noted("sender", source, destination, which)
                    receiver = yield from self._noted("receiver", source, destination, which)
                    ends.append(max(sender, receiver) + self._message(source, destination, nbytes))
                now = max(ends)
            self.known["end", rank, number] = now

    def _steps_of(self, row: Any) -> dict[int, list[list[Hop]]]:
        """What each rank sends and receives in a collective, step by step."""
        call = row.call
        key = call.group, call.communicator, call.number
        if key not in self._steps:
            steps: dict[int, dict[int, list[Hop]]] = defaultdict(lambda: defaultdict(list))
            by_step = defaultdict(list)
            for hop in row.hops():
                by_step[hop.step].append((call.group[hop.source], call.group[hop.destination], hop.nbytes))
            for step, hops in by_step.items():
                parts = of_a_card([hop[:2] for hop in hops], call.group, self.machine.network.ranks_per_node)
                for (source, destination, nbytes), part in zip(hops, parts, strict=True):
                    for rank in (source, destination):
                        steps[rank][step].append((source, destination, nbytes * part, (key, step)))
            self._steps[key] = {rank: [mine[step] for step in sorted(mine)] for rank, mine in steps.items()}
        return self._steps[key]

    def _message(self, source: int, destination: int, nbytes: int | Fraction) -> Fraction:
        if source == destination:
            return Fraction(0)
        link = link_of(self.machine.network, source, destination)
        seconds = link.alpha + nbytes / link.beta
        for slow in self.machine.slow:
            if (slow.rank, slow.to) == (source, destination):
                seconds *= Fraction(slow.factor)
        return seconds

    def _after(self, rank: int, clock: Fraction, row: Any) -> Fraction:
        """The clock after a row of arithmetic."""
        machine = self.machine
        work = max(row.flops / (Fraction(machine.peak_flops_per_second) * Fraction(machine.efficiency)),
                   row.nbytes / Fraction(machine.device.memory_bytes_per_second))
        for slow in machine.slow:
            if (slow.rank, slow.to) == (rank, None):
                return clock + Fraction(slow.factor) * work
        return clock + work
