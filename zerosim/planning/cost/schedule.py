"""Who sends how many bytes to whom in a collective, with pencil and paper: one algorithm in one small function.

Legend: N ranks, r a rank, n bytes of the whole vector, 2^m the largest power of two up to N, v = (r - root) mod N.

An algorithm is written down level by level, in the order of every rank's own program. A level is a step of the
collective where all ranks go at one pace; where some have more to do than others (trees, folds), `steps` says in which
step each message really goes.

Sources: Thakur, Rabenseifner & Gropp 2005, sections 3 and 4; Patarasuk & Yuan 2009 (the ring).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.planning.collectives import Ask, among_active

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Level:
    """Messages that do not wait for each other: source, destination and bytes of each, (messages,); so often."""

    sources: Ints
    destinations: Ints
    nbytes: Ints
    times: int = 1


Levels = Iterator[Level]


def levels(collective: str, algorithm: str, ask: Ask) -> Levels:
    """The levels of one collective; `ask` is one that `collectives.asked` has let through."""
    return LEVELS[collective, algorithm](ask) if ask.ranks > 1 else iter(())


def _ranks(ask: Ask) -> Ints:
    return np.arange(ask.ranks)


def _chunks(ask: Ask) -> Ints:
    """Bytes of every rank's chunk, (N,)."""
    return _of_chunks(ask, _ranks(ask), 1)


def _of_chunks(ask: Ask, first: Ints, count: int) -> Ints:
    """Bytes of so many chunks, N at most, from each of these on, counted round the ring."""
    ends = np.array(ask.cut, np.int64) * ask.itemsize
    turns, last = np.divmod(first + count, ask.ranks)
    return np.asarray(ends[last] + turns * ask.whole - ends[first])


# -- rings and rotations ----------------------------------------------------------------------------------------------


def _ring(ask: Ask, first: int) -> Levels:
    """N-1 steps to the right; in the first, rank r sends chunk r + first, and then always what came last."""
    chunks, ranks = _chunks(ask), _ranks(ask)
    if (chunks == chunks[0]).all():
        yield Level(ranks, (ranks + 1) % ask.ranks, chunks, ask.ranks - 1)
        return
    for step in range(ask.ranks - 1):
        yield Level(ranks, (ranks + 1) % ask.ranks, np.roll(chunks, step - first))


def _ring_reduce_scatter(ask: Ask) -> Levels:
    return _ring(ask, -1)


def _ring_all_gather(ask: Ask) -> Levels:
    return _ring(ask, 0)


def _ring_all_reduce(ask: Ask) -> Levels:
    yield from _ring_reduce_scatter(ask)
    yield from _ring_all_gather(ask)


def _pairwise(direction: int) -> Callable[[Ask], Levels]:
    """At step s a rank sends the owner s places on, in this direction, that one's chunk."""

    def rotate(ask: Ask) -> Levels:
        chunks, ranks = _chunks(ask), _ranks(ask)
        for step in range(1, ask.ranks):
            owners = (ranks + direction * step) % ask.ranks
            yield Level(ranks, owners, chunks[owners])

    return rotate


def _everyone(ask: Ask) -> Levels:
    ranks = _ranks(ask)
    for step in range(1, ask.ranks):
        yield Level(ranks, (ranks + step) % ask.ranks, np.full(ask.ranks, ask.whole))


def _bruck(ask: Ask) -> Levels:
    """At distance d a rank sends its first d chunks, or as many as are missing, to the rank d places before."""
    ranks, have = _ranks(ask), 1
    while have < ask.ranks:
        count = min(have, ask.ranks - have)
        yield Level(ranks, (ranks - have) % ask.ranks, _of_chunks(ask, ranks, count))
        have += count


def _barrier(ask: Ask) -> Levels:
    ranks, distance = _ranks(ask), 1
    while distance < ask.ranks:
        yield Level(ranks, (ranks + distance) % ask.ranks, np.zeros(ask.ranks, np.int64))
        distance *= 2


# -- halving, doubling, and the fold of N ranks to 2^m ----------------------------------------------------------------


def _halving(ask: Ask) -> Levels:
    """Partners N/2, N/4, ... apart: each sends the half of its range that the other keeps."""
    ranks, count = _ranks(ask), ask.ranks // 2
    while count:
        partners = ranks ^ count
        yield Level(ranks, partners, _of_chunks(ask, partners & ~(count - 1), count))
        count //= 2


def _doubling_all_gather(ask: Ask) -> Levels:
    """Partners 1, 2, 4, ... apart: each sends all chunks of its block."""
    ranks, count = _ranks(ask), 1
    while count < ask.ranks:
        yield Level(ranks, ranks ^ count, _of_chunks(ask, ranks & ~(count - 1), count))
        count *= 2


def _swaps_of_all(ask: Ask) -> Levels:
    """Partners 1, 2, 4, ... apart swap whole vectors; `ask` is of 2^m ranks."""
    ranks, distance = _ranks(ask), 1
    while distance < ask.ranks:
        yield Level(ranks, ranks ^ distance, np.full(ask.ranks, ask.whole))
        distance *= 2


def _folded(inner_levels: Callable[[Ask], Levels]) -> Callable[[Ask], Levels]:
    """Of the first 2(N - 2^m) ranks each even one hands n to the next, and is handed n at the end."""

    def fold(ask: Ask) -> Levels:
        inner = among_active(ask)
        pairs = ask.ranks - inner.ranks
        active = np.arange(inner.ranks)
        acting = np.where(active < pairs, 2 * active + 1, active + pairs)
        even, whole = 2 * np.arange(pairs), np.full(pairs, ask.whole)
        yield from [Level(even, even + 1, whole)] if pairs else []
        for level in inner_levels(inner):
            yield Level(acting[level.sources], acting[level.destinations], level.nbytes)
        yield from [Level(even + 1, even, whole)] if pairs else []

    return fold


def _halving_and_doubling(ask: Ask) -> Levels:
    yield from _halving(ask)
    yield from _doubling_all_gather(ask)


# -- roots ------------------------------------------------------------------------------------------------------------


def _from_places(ask: Ask, sources: Ints, destinations: Ints) -> Level:
    """Whole vectors between places; place v is rank (root + v) mod N."""
    return Level((sources + ask.root) % ask.ranks, (destinations + ask.root) % ask.ranks,
                 np.full(len(sources), ask.whole))


def _tree_reduce(ask: Ask) -> Levels:
    """Places whose lowest bit is 1, 2, 4, ... send so far down."""
    reach = 1
    while reach < ask.ranks:
        children = np.arange(reach, ask.ranks, 2 * reach)
        yield _from_places(ask, children, children - reach)
        reach *= 2


def _tree_broadcast(ask: Ask) -> Levels:
    """The same tree, from its root."""
    for level in reversed(list(_tree_reduce(ask))):
        yield Level(level.destinations, level.sources, level.nbytes)


def _tree_all_reduce(ask: Ask) -> Levels:
    yield from _tree_reduce(ask)
    yield from _tree_broadcast(ask)


def _naive_reduce(ask: Ask) -> Levels:
    """The root takes one vector after another."""
    for place in range(1, ask.ranks):
        yield _from_places(ask, np.array([place]), np.array([0]))


def _naive_broadcast(ask: Ask) -> Levels:
    for place in range(1, ask.ranks):
        yield _from_places(ask, np.array([0]), np.array([place]))


def _naive_all_reduce(ask: Ask) -> Levels:
    yield from _naive_reduce(ask)
    yield from _naive_broadcast(ask)


def _gather(ask: Ask) -> Levels:
    """The root takes one chunk after another."""
    chunks = _chunks(ask)
    for level in _naive_reduce(ask):
        yield Level(level.sources, level.destinations, chunks[level.sources])


LEVELS: Mapping[tuple[str, str], Callable[[Ask], Levels]] = {
    ("reduce_scatter", "ring"): _ring_reduce_scatter,
    ("reduce_scatter", "pairwise"): _pairwise(-1),
    ("reduce_scatter", "halving"): _halving,
    ("all_gather", "ring"): _ring_all_gather,
    ("all_gather", "doubling"): _doubling_all_gather,
    ("all_gather", "bruck"): _bruck,
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "doubling"): _folded(_swaps_of_all),
    ("all_reduce", "rabenseifner"): _folded(_halving_and_doubling),
    ("all_reduce", "tree"): _tree_all_reduce,
    ("all_reduce", "naive"): _naive_all_reduce,
    ("all_reduce", "everyone"): _everyone,
    ("broadcast", "tree"): _tree_broadcast,
    ("broadcast", "naive"): _naive_broadcast,
    ("reduce", "tree"): _tree_reduce,
    ("reduce", "naive"): _naive_reduce,
    ("gather", "pairwise"): _gather,
    ("all_to_all", "pairwise"): _pairwise(1),
    ("barrier", "dissemination"): _barrier,
}
