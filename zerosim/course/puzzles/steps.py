"""Steps: the hops that follow one another in a run, along the longest chain, read from the traces.

A message begins when both of its ranks are there, and takes one step; a collective begins when all of its group are
there, and takes as many as its own hops; computing takes none. What is asynchronous is over at the wait.
"""

from collections.abc import Iterator, Sequence

from zerosim.ranks.call import Call, Group
from zerosim.ranks.trace import Collective, Message, Trace, Wait

Row = Collective | Message | Wait
Key = tuple[Group, int]


def steps_in_sequence(traces: Sequence[Trace]) -> int:
    """The hops on the longest chain of a finished run.

    >>> from zerosim.ranks import Cluster
    >>> import numpy as np
    >>> cluster = Cluster(4)
    >>> _ = cluster.run(lambda rank: rank.all_reduce(np.ones(8)))
    >>> steps_in_sequence(cluster.trace)
    6
    """
    clock = _Clock(traces)
    while clock.advance():
        pass
    return max(clock.now)


class _Clock:
    """Goes through all ranks' rows together; ``now`` is each rank's step."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.rows: list[Iterator[Row]] = [
            iter([row for row in trace.rows if isinstance(row, Row)]) for trace in traces]
        self.now = [0] * len(traces)
        self.current: list[Row | None] = [next(rows, None) for rows in self.rows]
        self.halves: list[dict[str, int]] = [{} for _ in traces]
        self.there: dict[Key, dict[int, int]] = {}
        self.ends: dict[Key, int] = {}
        self.wire = [0] * len(traces)

    def advance(self) -> bool:
        """Lets every rank that can go on; False when none could."""
        return bool(sum(self._step(rank) for rank in range(len(self.now))))

    def _step(self, rank: int) -> bool:
        row = self.current[rank]
        match row:
            case None:
                return False
            case Message():
                end = self._message(rank, row)
            case Wait():
                end = self.ends.get(_key(row.call))
            case Collective():
                end = self._collective(rank, row)
        if end is None:
            return False
        self.now[rank] = max(self.now[rank], end)
        self.halves[rank] = {}
        self.current[rank] = next(self.rows[rank], None)
        return True

    def _message(self, rank: int, row: Message) -> int | None:
        """The step at which both halves of a message have moved; None while one has not."""
        halves = self.halves[rank]
        for mine, theirs, other in (("send", "recv", row.destination), ("recv", "send", row.source)):
            if other is None or mine in halves:
                continue
            partner = self.current[other]
            if not isinstance(partner, Message):
                continue
            meant = partner.source if theirs == "recv" else partner.destination
            if meant == rank and theirs not in self.halves[other]:
                halves[mine] = self.halves[other][theirs] = max(self.now[rank], self.now[other]) + 1
        open_halves = (row.destination is not None) + (row.source is not None) - len(halves)
        return None if open_halves else max(halves.values(), default=self.now[rank])

    def _collective(self, rank: int, row: Collective) -> int | None:
        """The step at which a collective is over; an asynchronous one lets its rank go on at once."""
        call, key = row.call, _key(row.call)
        there = self.there.setdefault(key, {})
        there[rank] = self.now[rank]
        if len(there) == call.ranks and key not in self.ends:
            begin = max(*there.values(), *(self.wire[member] for member in call.group))
            self.ends[key] = begin + max((hop.step + 1 for hop in row.hops()), default=0)
            for member in call.group:
                self.wire[member] = self.ends[key]
        return self.now[rank] if row.asynchronous else self.ends.get(key)


def _key(call: Call) -> Key:
    return call.key, call.number
