"""The right answers, in plain NumPy on all ranks' data at once: no rank, no message, no ledger.

Legend: N ranks, n elements, k = ⌈n/N⌉; chunk c is elements min(n, c·k) to min(n, (c+1)·k).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerosim.planning.collectives import sent
from zerosim.planning.cuts import ceil_cut
from zerosim.ranks.call import Call, Group
from zerosim.ranks.trace import Collective, Message, Trace, Wait

Array = np.ndarray


def data(seed: str, ranks: int, length: int) -> list[Array]:
    """A vector (n,) fp32 for every rank, all different, of magnitudes from 0.01 to 100."""
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng([*seed.encode(), length, rank])
        found.append((rng.standard_normal(length) * 10.0 ** rng.integers(-2, 3, length)).astype(np.float32))
    return found


def chunk_slices(length: int, ranks: int) -> list[slice]:
    """Every rank's chunk of a vector (n,)."""
    chunk = -(-length // ranks)
    return [slice(min(length, rank * chunk), min(length, (rank + 1) * chunk)) for rank in range(ranks)]


def ring_sum(vectors: Sequence[Array]) -> Array:
    """The sum (n,) whose chunk c is x[c+1] + x[c+2] + ... + x[c], as a ring adds it."""
    ranks, total = len(vectors), np.empty_like(vectors[0])
    for c, own in enumerate(chunk_slices(len(total), ranks)):
        total[own] = ordered_sum([vectors[(c + 1 + step) % ranks][own] for step in range(ranks)])
    return total


def ordered_sum(vectors: Sequence[Array]) -> Array:
    """x[0] + x[1] + ..., from left to right, rounded after every addition."""
    total = vectors[0].copy()
    for x in vectors[1:]:
        total += x
    return total


def chunks(vector: Array, ranks: int) -> list[Array]:
    """The vector's chunk of each rank."""
    return [vector[own].copy() for own in chunk_slices(len(vector), ranks)]


# -- The targets of the puzzles: bytes and steps from the closed forms ------------------------
# Legend: N ranks, n elements, cut by ⌈n/N⌉.


class Wire(NamedTuple):
    """The traffic of a collective: the bytes of the rank that sends most, of all ranks together, and the steps."""

    most_nbytes: int
    all_nbytes: int
    steps: int


def ring_wire(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A ring's: "reduce_scatter", "all_gather" or "all_reduce" of n elements."""
    return _wire(collective, "ring", length, ranks, itemsize)


def tree_wire(collective: str, length: int, ranks: int, itemsize: int = 4) -> Wire:
    """A binomial tree's: "broadcast" or "reduce" of n elements, with root 0."""
    return _wire(collective, "tree", length, ranks, itemsize)


def _wire(collective: str, algorithm: str, length: int, ranks: int, itemsize: int) -> Wire:
    found = sent(collective, algorithm, ceil_cut(length, ranks), itemsize)
    return Wire(max(found.nbytes), sum(found.nbytes), found.steps)


def in_sequence(*wires: Wire) -> Wire:
    """Several collectives, one after another; the most is that of a rank that sends most in each."""
    return Wire(sum(wire.most_nbytes for wire in wires), sum(wire.all_nbytes for wire in wires),
                sum(wire.steps for wire in wires))


# -- How many hops follow one another in a run: the longest chain, read from the traces ------------------------------
# A message begins when both of its ranks are there, and takes one step; a collective begins when all of its group are
# there, and takes as many as its own hops; computing takes none. What is asynchronous is over at the wait.


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
