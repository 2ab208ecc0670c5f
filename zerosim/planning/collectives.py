"""The messages of a collective, step by step, from the algorithms' own generators; bytes, messages and steps of them.

Legend: N ranks, r a rank, n bytes of the whole vector.

`ranks.collectives` has the algorithms, each once, as the generator that one rank runs. Here they run without data. In
most algorithms all ranks do the same, each from its own place, so rank 0's generator stands for all; in the others
every rank's runs. A level is a step: a message goes when both its ends have come to it, and all messages that can go at
once make one step. An empty message is a message. A rank sends and receives one message at a time.

Sources: Thakur, Rabenseifner & Gropp 2005, sections 3 and 4 (the algorithms); Patarasuk & Yuan 2009 (the ring, and
2(N-1)/N n as the least that any all-reduce can send).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from zerosim.numerics.checks import checked_count
from zerosim.numerics.kernels import NullKernels
from zerosim.planning.cuts import Cut, ceil_cut
from zerosim.ranks import collectives
from zerosim.ranks.call import Call
from zerosim.ranks.collectives import lockstep_without_data, steps_of, without_data
from zerosim.ranks.hierarchical import node_size
from zerosim.ranks.logarithmic import Fold

Ints = np.ndarray[Any, np.dtype[np.int64]]
INT64_NBYTES = 1 << 62  # vectors of fewer bytes are counted in int64, larger ones in Python's integers

# By operation and name; the usual algorithm of each operation stands first.
ALGORITHMS: Mapping[tuple[str, str], collectives.Algorithm] = {
    (operation, name): row for operation, rows in collectives.ALGORITHMS.items() for name, row in rows.items()}
POWERS_OF_TWO = frozenset(key for key, row in ALGORITHMS.items() if row.power_of_two)
# In these all ranks do the same at the same time. What rank 0 does with rank or chunk i, rank r does with the one r
# places further on; or, where partners swap, with i ^ r, unless some ranks sit out.
ROTATED = frozenset({("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_gather", "ring"),
                     ("all_gather", "bruck"), ("all_reduce", "ring"), ("all_reduce", "everyone"),
                     ("all_to_all", "pairwise"), ("barrier", "dissemination")})
SWAPPED = frozenset({("reduce_scatter", "halving"), ("all_gather", "doubling"), ("all_reduce", "doubling"),
                     ("all_reduce", "rabenseifner")})


@dataclass(frozen=True, slots=True)
class Sent:
    """The sums over one collective: `nbytes` and `messages` by rank, and the `steps` that it takes."""

    nbytes: tuple[int, ...]
    messages: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class CollectiveShape:
    """The messages that a collective makes: its algorithm, the N+1 boundaries of its vector, and bytes of an element.

    ``itemsize`` is that of the vector, ``wire_itemsize`` that in which partial sums travel.
    """

    operation: str
    algorithm: str
    cut: Cut
    itemsize: int
    wire_itemsize: int
    root: int = 0

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.cut) - 1

    @property
    def nbytes(self) -> int:
        """n, the bytes of the whole vector."""
        return self.cut[-1] * self.itemsize

    def array(self, nbytes: Any) -> Ints:
        """Bytes of messages as an array that can hold n of them."""
        return np.array(nbytes, np.int64 if self.cut[-1] * max(self.itemsize, self.wire_itemsize) < INT64_NBYTES
                        else object)


@dataclass(frozen=True, slots=True)
class Level:
    """The messages of one step: source, destination and bytes of each, (messages,); for so many steps.

    No rank sends twice, or receives twice.
    """

    sources: Ints
    destinations: Ints
    nbytes: Ints
    times: int = 1


def sent(collective: str, algorithm: str, cut: Cut, itemsize: int, *, root: int = 0) -> Sent:
    """The bytes and messages that each rank sends in one collective of a vector that is cut among the ranks like this.

    >>> sent("all_gather", "ring", (0, 2, 4, 5, 5), 2)
    Sent(nbytes=(6, 8, 10, 6), messages=(3, 3, 3, 3), steps=3)

    Raises ValueError for an algorithm that the collective does not have or that this N does not allow, for
    boundaries that do not rise from 0, and for a root that is no rank.
    """
    return sent_of(checked_shape(CollectiveShape(collective, algorithm, tuple(cut), itemsize, itemsize, root)))


def checked_shape(shape: CollectiveShape) -> CollectiveShape:
    """The shape, if a collective can have it; raises ValueError as `sent` does."""
    ranks = shape.ranks
    itemsize = checked_count("itemsize", shape.itemsize, 1)
    if ranks < 1 or shape.cut[0] != 0 or any(low > high for low, high in pairwise(shape.cut)):
        raise ValueError("cut must hold N+1 rising boundaries from 0 on, "
                         f"got {shape.cut}; e.g. {ceil_cut(8, 2)}")
    if not 0 <= shape.root < ranks:
        raise ValueError(f"root={shape.root} is no rank; the ranks are 0 to {ranks - 1}")
    if (shape.operation, shape.algorithm) not in ALGORITHMS and not shape.algorithm.startswith("hierarchical"):
        known = ", ".join(" ".join(pair) for pair in ALGORITHMS)
        raise ValueError(f"no algorithm {shape.algorithm!r} for {shape.operation!r}; there are {known}")
    collectives.algorithm_of(shape.operation, shape.algorithm, ranks)  # refuses an N that it does not serve
    return replace(shape, itemsize=itemsize)


def sent_of(shape: CollectiveShape) -> Sent:
    """The sums over the messages of a checked shape."""
    most = 2 * shape.ranks * shape.cut[-1] * max(shape.itemsize, shape.wire_itemsize)
    nbytes = np.zeros(shape.ranks, np.int64 if most < INT64_NBYTES else object)
    messages, steps = np.zeros(shape.ranks, np.int64), 0
    for level in levels(shape):
        steps += level.times
        nbytes[level.sources] += level.times * level.nbytes.astype(nbytes.dtype)
        messages[level.sources] += level.times
    return Sent(tuple(nbytes.tolist()), tuple(messages.tolist()), steps)


# -- step by step -----------------------------------------------------------------------------------------------------


def levels(shape: CollectiveShape) -> Iterable[Level]:
    """The messages of a checked shape, step by step."""
    key, ranks = (shape.operation, shape.algorithm), shape.ranks
    everyone = np.arange(ranks)
    if shape.algorithm.startswith("hierarchical"):
        return _hierarchical(shape)
    if key in ROTATED:
        return _as_rank_0(shape, lambda index, _: (everyone + index) % ranks)
    if key in SWAPPED:
        active = Fold.of(ranks).active
        if active == ranks:
            return _as_rank_0(shape, lambda index, count: (everyone ^ index) & -count)
        cut = ceil_cut(shape.cut[-1], active)
        return _rank_by_rank(replace(shape, cut=(*cut, *cut[-1:] * (ranks - active))))
    return _rank_by_rank(shape)


def _as_rank_0(shape: CollectiveShape, placed: Callable[[int, int], Ints],
               rank_placed: Callable[[int], Ints] | None = None) -> Iterator[Level]:
    """The exchanges of rank 0 and, at the same time, those of all ranks; those of equal chunks that go the same way, as
    all of a ring do, make one level.

    ``placed(i, k)`` is for each rank, (N,), what rank i, or the first of k chunks from i on, is for rank 0;
    ``rank_placed(i)`` is what rank i is, where that is another.
    """
    everyone, unequal = np.arange(shape.ranks), len({high - low for low, high in pairwise(shape.cut)}) > 1
    ends = _ends(shape, shape.itemsize), _ends(shape, shape.wire_itemsize)
    exchanges = _exchanges_of_rank_0(shape.operation, shape.algorithm, shape.ranks)
    for (to, _, count, partial), same in groupby(exchanges, lambda one: (one[0], unequal * one[1], *one[2:])):
        (_, first, *_), *others = same
        chunks = placed(first, count)
        ranks = placed(to, 1) if rank_placed is None else rank_placed(to)
        yield Level(everyone, ranks, ends[partial][chunks + count] - ends[partial][chunks], 1 + len(others))


def _hierarchical(shape: CollectiveShape) -> Iterator[Level]:
    """The rings of all nodes at once, over slices, and those across nodes, over the chunks of each slice.

    Chunks stand slice by slice here: then a slice is as many of them, one after the other, as there are nodes.
    """
    each = node_size(shape.operation, shape.algorithm, shape.ranks)
    nodes, lengths = shape.ranks // each, np.diff(shape.array(shape.cut)).reshape(-1, each)
    node, place = np.divmod(np.arange(shape.ranks), each)

    def chunks(first: int, count: int) -> Ints:
        found: Ints = (place + first) % each * nodes + (node + first // each) % nodes * (count < nodes)
        return found

    return _as_rank_0(replace(shape, cut=(0, *accumulate(lengths.T.ravel().tolist()))), chunks,
                      lambda to: (node + to // each) % nodes * each + (place + to) % each)


def _rank_by_rank(shape: CollectiveShape) -> Iterator[Level]:
    steps, sources, destinations, first, count = _messages(shape.operation, shape.algorithm, shape.ranks, shape.root)
    ends, (_, starts) = _ends(shape, shape.itemsize), np.unique(steps, return_index=True)
    nbytes = ends[first + count] - ends[first]
    for start, stop in pairwise([*starts.tolist(), len(steps)]):
        yield Level(sources[start:stop], destinations[start:stop], nbytes[start:stop])


# What the generators yield is the same for vectors of all lengths, and is kept: a run of them all takes longest.

@lru_cache(maxsize=64)
def _exchanges_of_rank_0(operation: str, algorithm: str, ranks: int) -> list[tuple[int, int, int, bool]]:
    """Of every exchange of rank 0, in which it sends and receives: to whom, what, as `_carried` says it, and whether
    these are partial sums of a ring, which the wire's format is for."""
    call = _call(operation, algorithm, ranks)
    steps: Iterator[Any] = steps_of(without_data(call, 0, NullKernels()))
    return [(one.to, *_carried(call, one.chunks), one.send.dtype != call.dtype) for one in steps]


@lru_cache(maxsize=64)
def _messages(operation: str, algorithm: str, ranks: int, root: int) -> Ints:
    """Of every message of all ranks, (5, messages): the step, source, destination, and what, as `_carried` says it."""
    call = _call(operation, algorithm, ranks, root)
    return np.array([(hop.step, hop.source, hop.destination, *_carried(call, hop.chunks))
                     for step in lockstep_without_data(call) for hop, _, _ in step], np.int64).reshape(-1, 5).T


def _call(operation: str, algorithm: str, ranks: int, root: int = 0) -> Call:
    """The call of such messages, of chunks of one byte: no array is as long as the longest vectors here, and which
    chunks a message carries does not depend on their lengths. Those of a barrier are empty, whatever the vector; where
    some ranks sit out there are as many as act."""
    chunks = 0 if operation == "barrier" else Fold.of(ranks).active if (operation, algorithm) in SWAPPED else ranks
    cut = tuple(min(border, chunks) for border in range(ranks + 1))
    wire = np.dtype("u2") if algorithm == "ring" or algorithm.startswith("hierarchical") else None
    return Call(0, (), tuple(range(ranks)), operation, algorithm, (cut[-1],), np.dtype("u1"), cut, root=root, wire=wire)


def _carried(call: Call, chunks: tuple[int, ...]) -> tuple[int, int]:
    """The first chunk that a message carries, and how many from there on, counted round: all where it names none."""
    return (chunks[0], len(chunks)) if chunks else (0, call.length)


def _ends(shape: CollectiveShape, itemsize: int) -> Ints:
    """The bytes before each chunk, twice round, (2N+1,): k chunks from i on have ends[i + k] - ends[i]."""
    ends = shape.array(shape.cut) * itemsize
    return np.append(ends, ends[1:] + ends[-1])
