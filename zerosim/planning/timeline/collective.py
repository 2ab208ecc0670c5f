"""When each member of a collective is done with it, message by message, given when each arrives.

Legend: N members, T_r the time at which member r is ready for its next message.

A message is a rendezvous: it starts when both its ends are ready and takes α + n/β; a member sends and receives at once
(links are full duplex), and goes on when both are done. So on a ring, from step to step, with c_r the seconds of the
message from r to r+1:

    T_r ← max(max(T_r, T_(r+1)) + c_r, max(T_(r-1), T_r) + c_(r-1))

What follows of it, and is tested: where all arrive at once on equal links the ring ends after (N-1)(α + m/β), m the
bytes of the *longest* chunk, for that chunk goes once round, one hop after the other, and no hop takes longer; where
chunks are equal it ends so long after the last arrival, and for all members at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from zerosim.planning.collectives import asked
from zerosim.planning.cost.schedule import Level, levels
from zerosim.planning.recording.tables import Call, Shape
from zerosim.planning.timeline.prices import Prices, Seconds

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
            yield from levels(half, "ring", asked(half, "ring", shape.cut, itemsize))
        return
    ask = asked(shape.operation, shape.algorithm, shape.cut, shape.wire_itemsize, root=shape.root)
    yield from levels(shape.operation, shape.algorithm, ask)


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
