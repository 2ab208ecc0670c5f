"""Who sends how many bytes to whom in a collective, with pencil and paper: one algorithm in one small function.

Legend: N ranks, r a rank, n bytes of the whole vector, 2^m the largest power of two up to N, v = (r - root) mod N.

An algorithm is written down level by level, in the order of every rank's own program. A level is a step of the
collective where all ranks go at one pace; where some have more to do than others (trees, folds), `steps` says in which
step each message really goes.

Sources: Thakur, Rabenseifner & Gropp 2005, sections 3 and 4; Patarasuk & Yuan 2009 (the ring).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.planning.collectives import ALGORITHMS, Ask, Sent, among_active, asked
from zerosim.planning.cuts import Cut, ceil_cut, checked_count
from zerosim.planning.hardware import Link, Network

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


# -- Algorithm bandwidth and bus bandwidth, as nccl-tests define them ------------------------------------------------
# Legend: N ranks, n bytes of the whole vector (for all_gather and reduce_scatter too), t seconds.
# Source: nccl-tests, doc/PERFORMANCE.md; for gather, src/gather.cu.


# How many vectors every link must carry at the least: with it the bus bandwidth of a perfect algorithm is the link's
# bytes per second, whatever N is. A barrier carries nothing and has none.
BUS_FACTORS: Mapping[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda ranks: Fraction(2 * (ranks - 1), ranks),
    "reduce_scatter": lambda ranks: Fraction(ranks - 1, ranks),
    "all_gather": lambda ranks: Fraction(ranks - 1, ranks),
    "all_to_all": lambda ranks: Fraction(ranks - 1, ranks),
    "gather": lambda ranks: Fraction(ranks - 1, ranks),
    "broadcast": lambda ranks: Fraction(1),
    "reduce": lambda ranks: Fraction(1),
}


def algorithm_bytes_per_second(nbytes: int, seconds: float) -> float | None:
    """n/t; None where it takes no time."""
    return nbytes / seconds if seconds else None


def bus_bytes_per_second(collective: str, ranks: int, nbytes: int, seconds: float) -> float | None:
    """n/t times the collective's factor; None where it takes no time, and for a collective that has no factor.

    >>> bus_bytes_per_second("all_reduce", 8, 8_000, 1.0)
    14000.0
    """
    if not seconds or collective not in BUS_FACTORS:
        return None
    return float(BUS_FACTORS[collective](ranks) * nbytes) / seconds


# -- In which step of a collective each message goes, and the longest message of every step on every kind of link ----
# Legend: N ranks. A message goes when both its ends are ready for it: each end has done all that its own program has
# before. All messages that can go at once make one step, which ends with the slowest of them.


# Bytes of a step's longest message inside nodes, and of its longest between nodes; None where there is no message.
Longest = tuple[int | None, int | None]


def placed(levels: Iterable[Level], ranks: int) -> Iterator[tuple[Ints, Level]]:
    """Each level with the step, counted from 0, in which each of its messages goes, (messages,).

    A level that goes several times takes that many steps from there on; its ranks, all of them, go at one pace.
    """
    ready = np.zeros(ranks, np.int64)
    for level in levels:
        step = np.maximum(ready[level.sources], ready[level.destinations])
        assert level.times == 1 or (step == step[0]).all(), "ranks at different paces cannot repeat a level"
        yield step, level
        for ends in (level.sources, level.destinations):
            np.maximum.at(ready, ends, step + level.times)


def longest_by_step(levels: Iterable[Level], ranks: int, network: Network) -> Counter[Longest]:
    """How many steps have which longest messages."""
    steps: dict[int, Longest] = {}
    repeated: Counter[Longest] = Counter()
    for step, level in placed(levels, ranks):
        crosses = network.crosses(level.sources, level.destinations)
        for number in {int(step[0])} if (step == step[0]).all() else set(step.tolist()):
            here = step == number
            found = _longest(level.nbytes[here & ~crosses]), _longest(level.nbytes[here & crosses])
            if level.times > 1:
                repeated[found] += level.times
            else:
                inside, between = steps.get(number, (None, None))
                steps[number] = _longer(inside, found[0]), _longer(between, found[1])
    return repeated + Counter(steps.values())


def _longest(nbytes: Ints) -> int | None:
    return int(nbytes.max()) if len(nbytes) else None


def _longer(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


# -- What a collective costs on a network: steps, bytes, and seconds by the α-β model --------------------------------
# Legend: N ranks, n bytes of the whole vector, α seconds of latency for each message, β bytes per second one way.
#
# The model: a message of n bytes takes α + n/β; links are full duplex; a rank sends one message and receives one at a
# time; a step ends with its slowest message, and then the next begins. For a ring on one kind of link that is what it
# takes however ranks run ahead, since its longest chunk goes at every step, one hop after the other. Elsewhere, with
# uneven chunks or two kinds of link, a rank that does not wait for the end of a step may end sooner, never later.
#
# The model knows nothing of pipelines inside a message, nor of links that messages share, by which rings win in practice:
# in it Rabenseifner's algorithm is never slower than the ring where N is a power of two.
#
# Sources: Hockney 1994 (α + n/β); Thakur, Rabenseifner & Gropp 2005, section 3 (the model, and the algorithms' costs).


LARGEST_NBYTES = 1 << 62  # beyond, bytes no longer fit the arrays in which a schedule is written
# Here every step has messages of the same lengths, on other links: all chunks, or as many whole vectors.
STEPS_ALIKE = frozenset({("reduce_scatter", "ring"), ("reduce_scatter", "pairwise"), ("all_gather", "ring"),
                         ("all_reduce", "ring"), ("all_reduce", "everyone"), ("all_to_all", "pairwise")})


@dataclass(frozen=True, slots=True)
class Cost:
    """One collective's price: what each rank sends, and the seconds, of which so much is latency.

    `nbytes` is the whole vector, n; for all_gather and reduce_scatter too.
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    sent: Sent
    seconds: float
    latency_seconds: float
    transfer_seconds: float

    @property
    def steps(self) -> int:
        """Steps of the longest chain."""
        return self.sent.steps

    @property
    def algorithm_bytes_per_second(self) -> float | None:
        """The algorithm bandwidth of nccl-tests; None where it takes no time."""
        return algorithm_bytes_per_second(self.nbytes, self.seconds)

    @property
    def bus_bytes_per_second(self) -> float | None:
        """The bus bandwidth of nccl-tests; None where it takes no time, and for a barrier."""
        return bus_bytes_per_second(self.collective, self.ranks, self.nbytes, self.seconds)


def cost(collective: str, algorithm: str, cut: Cut, itemsize: int, network: Network, *, root: int = 0) -> Cost:
    """What one collective of a vector costs that is cut among the ranks like this.

    >>> from zerosim.planning import ceil_cut
    >>> from zerosim.planning.hardware import link
    >>> ring = cost("all_reduce", "ring", ceil_cut(7_000_000_000, 8), 2, Network(link("nvlink4")))
    >>> ring.steps, set(ring.sent.nbytes), round(ring.transfer_seconds, 4), round(ring.latency_seconds * 1e6, 1)
    (14, {24500000000}, 0.0544, 47.6)

    Raises ValueError as `collectives.sent` does, and for vectors of 2^62 bytes or more.
    """
    ask = asked(collective, algorithm, cut, itemsize, root=root)
    if ask.whole >= LARGEST_NBYTES:
        raise ValueError(f"a vector of {ask.whole} bytes was asked about; this reckons with fewer than 2^62 bytes")
    latency, transfer = Fraction(0), Fraction(0)
    for longest, times in longest_messages(collective, algorithm, ask, network).items():
        alpha, seconds = slowest(longest, network)
        latency, transfer = latency + times * alpha, transfer + times * seconds
    return Cost(collective, algorithm, ask.ranks, ask.whole, ALGORITHMS[collective, algorithm](ask),
                float(latency + transfer), float(latency), float(transfer))


def longest_messages(collective: str, algorithm: str, ask: Ask, network: Network) -> Counter[Longest]:
    """How many steps of a collective have which longest messages, inside nodes and between them."""
    if network.between is None and (collective, algorithm) in STEPS_ALIKE and ask.ranks > 1:
        first = next(levels(collective, algorithm, ask))  # one step tells all: N-1 of N messages each need not be made
        return Counter({(int(first.nbytes.max()), None): ALGORITHMS[collective, algorithm](ask).steps})
    return longest_by_step(levels(collective, algorithm, ask), ask.ranks, network)


def slowest(longest: Longest, network: Network) -> tuple[Fraction, Fraction]:
    """(α, n/β) of the slowest message of a step."""
    messages = [(link.alpha, nbytes / link.beta) for nbytes, link in by_link(longest, network)]
    return max(messages, key=lambda message: message[0] + message[1])


def by_link(longest: Longest, network: Network) -> list[tuple[int, Link]]:
    """The longest messages of a step, each with its link."""
    pairs = zip(longest, (network.inside, network.between), strict=True)
    return [(nbytes, link) for nbytes, link in pairs if nbytes is not None and link is not None]


# ----------------------------------------------------------------------------------------------------
# How the seconds of a collective grow with its vector, exactly; where two algorithms break even; where latency rules
# Legend: N ranks, n bytes of the whole vector, cut into chunks of n/N; α seconds, β bytes per second.
#
# On one kind of link the seconds are a line, Aα + Bn/β. Where a message inside a node and one between nodes go in the
# same step, the slower decides, and which one that is may depend on n: then it is a few lines, each steeper than the one
# before. Everything here is solved, in rational numbers; nothing is searched for.


@dataclass(frozen=True, slots=True)
class Line:
    """From so many bytes on: seconds of latency, and seconds for each byte of the vector."""

    from_nbytes: Fraction
    latency_seconds: Fraction
    seconds_per_byte: Fraction

    def seconds(self, nbytes: Fraction) -> Fraction:
        """Seconds for n bytes, exactly."""
        return self.latency_seconds + self.seconds_per_byte * nbytes


@dataclass(frozen=True, slots=True)
class Curve:
    """The seconds of one collective by the bytes of its vector: lines one after the other, the first from 0 on."""

    lines: tuple[Line, ...]

    def at(self, nbytes: int | float | Fraction) -> Line:
        """The line that holds for n bytes."""
        return self.lines[bisect_right(self.lines, nbytes, key=lambda line: line.from_nbytes) - 1]

    def seconds(self, nbytes: int | float | Fraction) -> float:
        """Seconds for n bytes."""
        return float(self.at(nbytes).seconds(Fraction(nbytes)))


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A size at which two algorithms take as long as each other, and which is faster below and above: 0 for the first,
    1 for the second, None where they take as long as each other there too."""

    nbytes: Fraction
    faster_below: int | None
    faster_above: int | None


def curve(collective: str, algorithm: str, ranks: int, network: Network) -> Curve:
    """The seconds of a collective for any size.

    >>> from zerosim.planning.hardware import link
    >>> line, = curve("all_reduce", "ring", 8, Network(link("nvlink4"))).lines
    >>> line.latency_seconds == 14 * link("nvlink4").alpha, line.seconds_per_byte * link("nvlink4").beta
    (True, Fraction(7, 4))

    Raises ValueError as `cost` does.
    """
    ranks = checked_count("ranks", ranks, 1)
    # The shortest vector that N ranks, and the 2^m that are left where some sit out, cut into equal chunks.
    unit = asked(collective, algorithm, ceil_cut(ranks << (ranks.bit_length() - 1), ranks), 1)
    steps = [(times, _choices(unit, by_link(longest, network)))
             for longest, times in longest_messages(collective, algorithm, unit, network).items()]
    lines = []
    for start, end in _intervals(_turns(choices) for _, choices in steps):
        within = start + 1 if end is None else (start + end) / 2
        slowest = [(times, max(choices, key=lambda line: line.seconds(within))) for times, choices in steps]
        lines.append(Line(start, sum((times * line.latency_seconds for times, line in slowest), Fraction(0)),
                          sum((times * line.seconds_per_byte for times, line in slowest), Fraction(0))))
    return Curve(tuple(lines))


def break_even(one: Curve, other: Curve) -> tuple[BreakEven, ...]:
    """Every size above 0 at which another curve becomes the lower one, in rising order; none for equal curves.

    For two lines it is αβ times the difference of their steps over that of their vectors sent.

    >>> from zerosim.planning.hardware import link
    >>> ring, doubling = (curve("all_reduce", name, 4, Network(link("nvlink4"))) for name in ("ring", "doubling"))
    >>> [(float(point.nbytes), point.faster_below) for point in break_even(ring, doubling)]
    [(12240000.0, 1)]
    """
    borders = [{line.from_nbytes for line in both.lines} for both in (one, other)]
    meetings = {nbytes for start, end in _intervals(borders) if (nbytes := _meeting(one, other, start, end))}
    faster = [(start, faster_at(one, other, start + 1 if end is None else (start + end) / 2))
              for start, end in _intervals([*borders, meetings])]
    return tuple(BreakEven(start, below, above) for (_, below), (start, above) in pairwise(faster) if below != above)


def faster_at(one: Curve, other: Curve, nbytes: int | Fraction) -> int | None:
    """Which of two curves is the lower one at n bytes: 0 for the first, 1 for the second, None for neither."""
    seconds = [of.at(nbytes).seconds(Fraction(nbytes)) for of in (one, other)]
    return None if seconds[0] == seconds[1] else seconds.index(min(seconds))


def latency_wall_nbytes(of: Curve) -> float:
    """The size below which latency takes more of the time than transfer; infinite where nothing is transferred.

    For a ring it is Nαβ, of all three collectives: it grows with N, since the latency of every step does not.

    >>> from zerosim.planning.hardware import link
    >>> [latency_wall_nbytes(curve("all_gather", "ring", ranks, Network(link("nvlink4")))) for ranks in (8, 512)]
    [12240000.0, 783360000.0]
    """
    for line, following in zip(of.lines, [*of.lines[1:], None], strict=True):
        if line.seconds_per_byte:
            even = line.latency_seconds / line.seconds_per_byte
            if following is None or even < following.from_nbytes:
                return float(max(even, line.from_nbytes))
    return math.inf


def ring_wall_ranks(nbytes: int, link: Link) -> float:
    """The most ranks whose ring takes no more of its time for latency than for transfer: n/(αβ), not rounded.

    Infinite where the link has no latency. It is the latency wall, seen from a vector of n bytes.
    """
    return float(nbytes / (link.alpha * link.beta)) if link.alpha else math.inf


def _choices(unit: Ask, longest: list[tuple[int, Link]]) -> list[Line]:
    """The longest message of a step on each kind of link, as a line."""
    return [Line(Fraction(0), link.alpha, Fraction(nbytes, unit.whole) / link.beta) for nbytes, link in longest]


def _turns(choices: list[Line]) -> Iterator[Fraction]:
    """The size above 0 at which another of two messages becomes the slower, if there is one."""
    if len(choices) == 2:
        nbytes = _crossing(*choices)
        if nbytes is not None and nbytes > 0:
            yield nbytes


def _crossing(one: Line, other: Line) -> Fraction | None:
    """The size at which two lines cross; None for parallel ones."""
    steeper = one.seconds_per_byte - other.seconds_per_byte
    return (other.latency_seconds - one.latency_seconds) / steeper if steeper else None


def _meeting(one: Curve, other: Curve, start: Fraction, end: Fraction | None) -> Fraction | None:
    """Where two curves cross inside an interval in which each is one line."""
    nbytes = _crossing(one.at(start), other.at(start))
    return nbytes if nbytes is not None and nbytes > start and (end is None or nbytes < end) else None


def _intervals(borders: Iterable[Iterable[Fraction]]) -> list[tuple[Fraction, Fraction | None]]:
    """The stretches from 0 to infinity, None, between these borders."""
    starts = sorted({Fraction(0)}.union(*borders))
    return list(zip(starts, [*starts[1:], None], strict=True))
