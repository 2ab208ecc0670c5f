"""The messages of every collective algorithm, level by level; bytes, messages and steps follow from them.

Legend: N ranks, r a rank, n bytes of the whole vector, 2^m the largest power of two up to N, v = (r - root) mod N.

An algorithm is one small generator of levels, in the order of every rank's own program. A level is a step of the
collective where all ranks go at one pace; where some have more to do than others (trees, folds), `in_steps` finds the
step in which each message goes. An empty message is a message. A rank sends and receives one message at a time.

Rings and rotations make N² messages, so their sums have closed forms too, which tests hold equal to the levels.

Sources: Thakur, Rabenseifner & Gropp 2005, sections 3 and 4 (the algorithms, and 4.5 for the fold of N - 2^m ranks);
Patarasuk & Yuan 2009 (the ring, and 2(N-1)/N n as the least that any all-reduce can send).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.planning.cuts import Cut, ceil_cut, checked_count

Ints = np.ndarray[Any, np.dtype[np.int64]]
INT64_NBYTES = 1 << 62  # vectors of fewer bytes are counted in int64, larger ones in Python's integers


@dataclass(frozen=True, slots=True)
class Sent:
    """The sums over one collective: `nbytes` and `messages` by rank, and the `steps` that it takes."""

    nbytes: tuple[int, ...]
    messages: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Vector:
    """The vector of one collective: who owns what (N+1 boundaries), bytes of an element, the root if there is one."""

    cut: Cut
    itemsize: int
    root: int = 0

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.cut) - 1

    @property
    def nbytes(self) -> int:
        """n, the bytes of the whole vector."""
        return self.cut[-1] * self.itemsize

    def chunks_nbytes(self, first: Ints, count: int = 1) -> Ints:
        """Bytes of `count` chunks, N at most, from each of these on, counted round the ring; the shape of `first`."""
        ends: Ints = np.array(self.cut, self._dtype) * self.itemsize
        turns, last = np.divmod(first + count, self.ranks)
        return np.asarray(ends[last] + turns.astype(self._dtype) * self.nbytes - ends[first])

    def whole_nbytes(self, messages: int) -> Ints:
        """n for each of so many messages, (messages,)."""
        return np.full(messages, self.nbytes, self._dtype)

    @property
    def _dtype(self) -> type:
        return np.int64 if self.nbytes < INT64_NBYTES else object


@dataclass(frozen=True, slots=True)
class Level:
    """Messages that do not wait for each other: source, destination and bytes of each, (messages,); so often.

    In one level no rank sends twice, or receives twice.
    """

    sources: Ints
    destinations: Ints
    nbytes: Ints
    times: int = 1


Levels = Iterator[Level]


def sent(collective: str, algorithm: str, cut: Cut, itemsize: int, *, root: int = 0) -> Sent:
    """The bytes and messages that each rank sends in one collective of a vector that is cut among the ranks like this.

    >>> sent("all_gather", "ring", (0, 2, 4, 5, 5), 2)
    Sent(nbytes=(6, 8, 10, 6), messages=(3, 3, 3, 3), steps=3)

    Raises ValueError for an algorithm that the collective does not have or that this N does not allow, for
    boundaries that do not rise from 0, and for a root that is no rank.
    """
    return sent_of(collective, algorithm, checked_vector(collective, algorithm, cut, itemsize, root=root))


def checked_vector(collective: str, algorithm: str, cut: Cut, itemsize: int, *, root: int = 0) -> Vector:
    """The vector of a collective that makes sense; raises ValueError as `sent` does."""
    vector = Vector(tuple(cut), checked_count("itemsize", itemsize, 1), root)
    if vector.ranks < 1 or vector.cut[0] != 0 or any(low > high for low, high in pairwise(vector.cut)):
        raise ValueError("cut must hold N+1 rising boundaries from 0 on, "
                         f"got {vector.cut}; e.g. {ceil_cut(8, 2)}")
    if not 0 <= root < vector.ranks:
        raise ValueError(f"root={root} is no rank; the ranks are 0 to {vector.ranks - 1}")
    if (collective, algorithm) not in ALGORITHMS:
        known = ", ".join(" ".join(pair) for pair in ALGORITHMS)
        raise ValueError(f"no algorithm {algorithm!r} for {collective!r}; there are {known}")
    if (collective, algorithm) in POWERS_OF_TWO and vector.ranks & (vector.ranks - 1):
        raise ValueError(f"{collective} {algorithm} swaps with partners at distances 1, 2, 4, ... and needs "
                         f"a power of two, got {vector.ranks} ranks; take ring")
    return vector


def levels(collective: str, algorithm: str, vector: Vector) -> Levels:
    """The levels of one collective; the vector is one that `checked_vector` has let through."""
    return ALGORITHMS[collective, algorithm](vector) if vector.ranks > 1 else iter(())


def in_steps(levels: Iterable[Level], ranks: int) -> Iterator[tuple[Ints, Level]]:
    """Each level with the step, counted from 0, in which each of its messages goes, (messages,).

    A message goes when each of its ends has done all that its own program has before. All messages that can go at once
    make one step. A level that goes several times takes that many steps; its ranks, all of them, go at one pace.
    """
    ready = np.zeros(ranks, np.int64)
    for level in levels:
        step = np.maximum(ready[level.sources], ready[level.destinations])
        assert level.times == 1 or (step == step[0]).all(), "ranks at different paces cannot repeat a level"
        yield step, level
        after = step + level.times
        ready[level.sources] = after
        ready[level.destinations] = np.maximum(ready[level.destinations], after)


def sent_of(collective: str, algorithm: str, vector: Vector) -> Sent:
    """The sums over a collective's messages, by the closed form where there is one."""
    rounds, ranks = ROUNDS.get((collective, algorithm)), vector.ranks
    if rounds is not None:
        steps = len(rounds) * (ranks - 1)
        nbytes = np.sum([of(vector) for of in rounds], axis=0)
        return Sent(tuple(nbytes.tolist()), (steps,) * ranks, steps)
    nbytes, messages, steps = np.zeros(ranks, object), np.zeros(ranks, np.int64), 0
    for level in levels(collective, algorithm, vector):
        nbytes[level.sources] += level.times * level.nbytes
        messages[level.sources] += level.times
        steps += level.times  # in every algorithm here some chain goes through all levels
    return Sent(tuple(nbytes.tolist()), tuple(messages.tolist()), steps)


# -- rings and rotations ----------------------------------------------------------------------------------------------


def _ring(first: int) -> Callable[[Vector], Levels]:
    """N-1 steps to the right; in the first, rank r sends chunk r + first, and then always what came last."""

    def ring(vector: Vector) -> Levels:
        ranks = np.arange(vector.ranks)
        chunks = vector.chunks_nbytes(ranks)
        if (chunks == chunks[0]).all():
            yield Level(ranks, (ranks + 1) % vector.ranks, chunks, vector.ranks - 1)
            return
        for step in range(vector.ranks - 1):
            yield Level(ranks, (ranks + 1) % vector.ranks, np.roll(chunks, step - first))

    return ring


def _pairwise(direction: int) -> Callable[[Vector], Levels]:
    """At step s a rank sends the owner s places on, in this direction, that one's chunk."""

    def rotate(vector: Vector) -> Levels:
        ranks = np.arange(vector.ranks)
        chunks = vector.chunks_nbytes(ranks)
        for step in range(1, vector.ranks):
            owners = (ranks + direction * step) % vector.ranks
            yield Level(ranks, owners, chunks[owners])

    return rotate


def _everyone(vector: Vector) -> Levels:
    """At step s a rank sends n to the rank s places on."""
    ranks = np.arange(vector.ranks)
    for step in range(1, vector.ranks):
        yield Level(ranks, (ranks + step) % vector.ranks, vector.whole_nbytes(vector.ranks))


def _bruck(vector: Vector) -> Levels:
    """At distance d a rank sends its first d chunks, or as many as are missing, to the rank d places before."""
    ranks, have = np.arange(vector.ranks), 1
    while have < vector.ranks:
        count = min(have, vector.ranks - have)
        yield Level(ranks, (ranks - have) % vector.ranks, vector.chunks_nbytes(ranks, count))
        have += count


def _barrier(vector: Vector) -> Levels:
    """Empty messages to the ranks 1, 2, 4, ... further on (Hensgen, Finkel & Manber 1988)."""
    ranks, distance = np.arange(vector.ranks), 1
    while distance < vector.ranks:
        yield Level(ranks, (ranks + distance) % vector.ranks, np.zeros(vector.ranks, np.int64))
        distance *= 2


# -- halving, doubling, and the fold of N ranks to 2^m ----------------------------------------------------------------


def _halving(vector: Vector) -> Levels:
    """Partners N/2, N/4, ... apart: each sends the half of its range that the other keeps."""
    ranks, count = np.arange(vector.ranks), vector.ranks // 2
    while count:
        partners = ranks ^ count
        yield Level(ranks, partners, vector.chunks_nbytes(partners & ~(count - 1), count))
        count //= 2


def _doubling(vector: Vector) -> Levels:
    """Partners 1, 2, 4, ... apart: each sends all chunks of its block."""
    ranks, count = np.arange(vector.ranks), 1
    while count < vector.ranks:
        yield Level(ranks, ranks ^ count, vector.chunks_nbytes(ranks & ~(count - 1), count))
        count *= 2


def _doubling_of_whole_vectors(vector: Vector) -> Levels:
    """Partners 1, 2, 4, ... apart swap whole vectors."""
    ranks, distance = np.arange(vector.ranks), 1
    while distance < vector.ranks:
        yield Level(ranks, ranks ^ distance, vector.whole_nbytes(vector.ranks))
        distance *= 2


def _folded(inner_levels: Callable[[Vector], Levels]) -> Callable[[Vector], Levels]:
    """Of the first 2(N - 2^m) ranks each even one hands n to the next, and is handed n at the end.

    Between the two the 2^m active ranks work, which take the ceil cut where some sit out.
    """

    def fold(vector: Vector) -> Levels:
        active = 1 << (vector.ranks.bit_length() - 1)
        pairs = vector.ranks - active
        inner = Vector(ceil_cut(vector.cut[-1], active), vector.itemsize) if pairs else vector
        place, even = np.arange(active), 2 * np.arange(pairs)
        acting = np.where(place < pairs, 2 * place + 1, place + pairs)
        if pairs:
            yield Level(even, even + 1, vector.whole_nbytes(pairs))
        for level in inner_levels(inner):
            yield Level(acting[level.sources], acting[level.destinations], level.nbytes)
        if pairs:
            yield Level(even + 1, even, vector.whole_nbytes(pairs))

    return fold


# -- roots ------------------------------------------------------------------------------------------------------------


def _between_places(vector: Vector, sources: Ints, destinations: Ints) -> Level:
    """Whole vectors between places; place v is rank (root + v) mod N."""
    return Level((sources + vector.root) % vector.ranks, (destinations + vector.root) % vector.ranks,
                 vector.whole_nbytes(len(sources)))


def _tree_reduce(vector: Vector) -> Levels:
    """Places whose lowest bit is 1, 2, 4, ... send so far down."""
    reach = 1
    while reach < vector.ranks:
        children = np.arange(reach, vector.ranks, 2 * reach)
        yield _between_places(vector, children, children - reach)
        reach *= 2


def _tree_broadcast(vector: Vector) -> Levels:
    """The same tree, from its root."""
    for level in reversed(list(_tree_reduce(vector))):
        yield Level(level.destinations, level.sources, level.nbytes)


def _naive_reduce(vector: Vector) -> Levels:
    """The root takes one vector after another."""
    for place in range(1, vector.ranks):
        yield _between_places(vector, np.array([place]), np.array([0]))


def _naive_broadcast(vector: Vector) -> Levels:
    for place in range(1, vector.ranks):
        yield _between_places(vector, np.array([0]), np.array([place]))


def _gather(vector: Vector) -> Levels:
    """The root takes one chunk after another."""
    for level in _naive_reduce(vector):
        yield Level(level.sources, level.destinations, vector.chunks_nbytes(level.sources))


def _in_turn(*parts: Callable[[Vector], Levels]) -> Callable[[Vector], Levels]:
    """One collective after another."""
    return lambda vector: (level for part in parts for level in part(vector))


# The usual algorithm of each collective stands first.
ALGORITHMS: Mapping[tuple[str, str], Callable[[Vector], Levels]] = {
    ("reduce_scatter", "ring"): _ring(-1),
    ("reduce_scatter", "pairwise"): _pairwise(-1),
    ("reduce_scatter", "halving"): _halving,
    ("all_gather", "ring"): _ring(0),
    ("all_gather", "doubling"): _doubling,
    ("all_gather", "bruck"): _bruck,
    ("all_reduce", "ring"): _in_turn(_ring(-1), _ring(0)),
    ("all_reduce", "doubling"): _folded(_doubling_of_whole_vectors),
    ("all_reduce", "rabenseifner"): _folded(_in_turn(_halving, _doubling)),
    ("all_reduce", "tree"): _in_turn(_tree_reduce, _tree_broadcast),
    ("all_reduce", "naive"): _in_turn(_naive_reduce, _naive_broadcast),
    ("all_reduce", "everyone"): _everyone,
    ("broadcast", "tree"): _tree_broadcast,
    ("broadcast", "naive"): _naive_broadcast,
    ("reduce", "tree"): _tree_reduce,
    ("reduce", "naive"): _naive_reduce,
    ("gather", "pairwise"): _gather,
    ("all_to_all", "pairwise"): _pairwise(1),
    ("barrier", "dissemination"): _barrier,
}
# These swap halves with partners at distances 1, 2, 4, ... and have no fold.
POWERS_OF_TWO = frozenset({("reduce_scatter", "halving"), ("all_gather", "doubling")})


def _all_but_own(vector: Vector) -> Ints:
    """Every chunk leaves once, but for the one that stays."""
    return vector.nbytes - vector.chunks_nbytes(np.arange(vector.ranks))


def _all_but_the_last_to_arrive(vector: Vector) -> Ints:
    """A rank passes on every chunk but its right neighbor's."""
    return np.roll(_all_but_own(vector), -1)


# Bytes that each rank sends, (N,), in each round, N-1 messages, of what sends N² messages in all: the closed forms.
# Every step of these has messages of the same lengths, on other links: all chunks, or as many whole vectors.
ROUNDS: Mapping[tuple[str, str], tuple[Callable[[Vector], Ints], ...]] = {
    ("reduce_scatter", "ring"): (_all_but_own,),
    ("reduce_scatter", "pairwise"): (_all_but_own,),
    ("all_gather", "ring"): (_all_but_the_last_to_arrive,),
    ("all_reduce", "ring"): (_all_but_own, _all_but_the_last_to_arrive),
    ("all_reduce", "everyone"): (lambda vector: (vector.ranks - 1) * vector.whole_nbytes(vector.ranks).astype(object),),
    ("all_to_all", "pairwise"): (_all_but_own,),
}
