"""Costs of a collective on a network: steps, bytes, and seconds by the α-β model; where two algorithms break even.

Legend: N ranks, n bytes of the whole vector, t seconds, α seconds of latency for each message, β bytes per second one
way.

The model: a message of n bytes takes α + n/β; links are full duplex; a rank sends one message and receives one at a
time; a step ends with its slowest message, and then the next begins. For a ring on one kind of link that is what it
takes however ranks run ahead, since its longest chunk goes at every step, one hop after the other. Elsewhere, with
uneven chunks or two kinds of link, a rank that does not wait for the end of a step may end sooner, never later.

The model knows nothing of pipelines inside a message, nor of links that messages share, by which rings win in practice:
in it Rabenseifner's algorithm is never slower than the ring where N is a power of two.

Sources: Hockney 1994 (α + n/β); Thakur, Rabenseifner & Gropp 2005, section 3 (the model, and the algorithms' costs);
nccl-tests, doc/PERFORMANCE.md, and for gather src/gather.cu (the bandwidths).
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np

from zerosim.numerics.checks import checked_count
from zerosim.planning.collectives import INT64_NBYTES, CollectiveShape, Sent, checked_shape, levels, sent_of
from zerosim.planning.cuts import Cut, ceil_cut
from zerosim.planning.hardware import Link, Network

# How many vectors every link must carry at the least: with it the bus bandwidth of a perfect algorithm is the link's
# bytes per second, whatever N is. A barrier carries nothing and has none.
BUS_FACTORS: Mapping[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda ranks: Fraction(2 * (ranks - 1), ranks),
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "gather"), lambda ranks: Fraction(ranks - 1, ranks)),
    **dict.fromkeys(("broadcast", "reduce"), lambda ranks: Fraction(1)),
}


def bus_bytes_per_second(collective: str, ranks: int, nbytes: int, seconds: float) -> float | None:
    """n/t times the collective's factor; None where it takes no time, and for a collective that has no factor.

    >>> bus_bytes_per_second("all_reduce", 8, 8_000, 1.0)
    14000.0
    """
    if not seconds or collective not in BUS_FACTORS:
        return None
    return float(BUS_FACTORS[collective](ranks) * nbytes) / seconds


# -- the seconds of one collective ------------------------------------------------------------------------------------


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
    def algorithm_bytes_per_second(self) -> float | None:
        """n/t, the algorithm bandwidth of nccl-tests; None where it takes no time."""
        return self.nbytes / self.seconds if self.seconds else None

    @property
    def bus_bytes_per_second(self) -> float | None:
        """The bus bandwidth of nccl-tests; None where it takes no time, and for a barrier."""
        return bus_bytes_per_second(self.collective, self.ranks, self.nbytes, self.seconds)


def cost(collective: str, algorithm: str, cut: Cut, itemsize: int, network: Network, *, root: int = 0) -> Cost:
    """The cost of one collective of a vector that is cut among the ranks like this.

    >>> from zerosim.planning import ceil_cut
    >>> from zerosim.planning.hardware import link
    >>> ring = cost("all_reduce", "ring", ceil_cut(7_000_000_000, 8), 2, Network(link("nvlink4")))
    >>> ring.sent.steps, set(ring.sent.nbytes), round(ring.transfer_seconds, 4), round(ring.latency_seconds * 1e6, 1)
    (14, {24500000000}, 0.0544, 47.6)

    Raises ValueError as `collectives.sent` does, and for vectors of 2^62 bytes or more.
    """
    shape = checked_shape(CollectiveShape(collective, algorithm, tuple(cut), itemsize, itemsize, root))
    if shape.nbytes >= INT64_NBYTES:
        raise ValueError(f"a vector of {shape.nbytes} bytes was asked about; this computes with fewer than 2^62 bytes")
    latency, transfer = Fraction(0), Fraction(0)
    for longest, times in longest_messages(shape, network).items():
        alpha, seconds = max(((link.alpha, nbytes / link.beta) for link, nbytes in longest), key=sum)
        latency, transfer = latency + times * alpha, transfer + times * seconds
    return Cost(collective, algorithm, shape.ranks, shape.nbytes, sent_of(shape), float(latency + transfer),
                float(latency), float(transfer))


# Of one step the bytes of its longest message on each kind of link; between nodes those that the busiest card carries.
Longest = tuple[tuple[Link, int | Fraction], ...]


def longest_messages(shape: CollectiveShape, network: Network) -> Counter[Longest]:
    """Number of steps of a collective by their longest messages, inside nodes and between them."""
    found = Counter[Longest]()
    for level in levels(shape):
        if network.between is None:
            found[((network.inside, int(level.nbytes.max())),)] += level.times
            continue
        crosses = network.crosses(level.sources, level.destinations)
        cards, messages = network.sharing(level.sources, level.destinations, np.arange(shape.ranks))
        loads = {*zip((level.nbytes * messages)[crosses].tolist(), cards[crosses].tolist(), strict=True)}
        of_links = ((network.inside, {*level.nbytes[~crosses].tolist()}),
                    (network.between, {Fraction(*load) for load in loads}))
        found[tuple((link, max(nbytes)) for link, nbytes in of_links if nbytes)] += level.times
    return found


# -- the seconds by size, exactly; where two algorithms break even; where latency rules -------------------------------
# Chunks are n/N bytes here.
#
# On one kind of link the seconds are a line, Aα + Bn/β. Where a message inside a node and one between nodes go in the
# same step, the slower decides, and which one that is may depend on n: then it is a few lines, each steeper than the
# one before. Everything here is solved, in rational numbers; nothing is searched for.


@dataclass(frozen=True, slots=True)
class CostLine:
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

    lines: tuple[CostLine, ...]

    def at(self, nbytes: int | float | Fraction) -> CostLine:
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
    cut = ceil_cut(ranks << (ranks.bit_length() - 1), ranks)
    unit = checked_shape(CollectiveShape(collective, algorithm, cut, 1, 1))
    steps = [(times, [CostLine(Fraction(0), link.alpha, Fraction(nbytes, unit.nbytes) / link.beta)
                      for link, nbytes in longest])
             for longest, times in longest_messages(unit, network).items()]
    turns = [_crossing(*pair) for _, choices in steps for pair in combinations(choices, 2)]
    lines = []
    for start, within in _intervals(turns):
        slowest = [(times, max(choices, key=lambda line: line.seconds(within))) for times, choices in steps]
        lines.append(CostLine(start, sum((times * line.latency_seconds for times, line in slowest), Fraction(0)),
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
    bends = [{line.from_nbytes for line in both.lines} for both in (one, other)]
    meetings = [_crossing(one.at(start), other.at(start)) for start, _ in _intervals(bends)]
    faster = [(start, faster_at(one, other, within)) for start, within in _intervals([*bends, *meetings])]
    return tuple(BreakEven(start, below, above) for (_, below), (start, above) in pairwise(faster) if below != above)


def faster_at(one: Curve, other: Curve, nbytes: int | Fraction) -> int | None:
    """The lower of two curves at n bytes: 0 for the first, 1 for the second, None for neither."""
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


def _crossing(one: CostLine, other: CostLine) -> set[Fraction]:
    """The size above 0 at which two lines cross, if there is one."""
    steeper = one.seconds_per_byte - other.seconds_per_byte
    nbytes = (other.latency_seconds - one.latency_seconds) / steeper if steeper else 0
    return {Fraction(nbytes)} if nbytes > 0 else set()


def _intervals(borders: Iterable[Iterable[Fraction]]) -> list[tuple[Fraction, Fraction]]:
    """The beginnings of the stretches from 0 to infinity between these borders, and a size inside each."""
    starts = sorted({Fraction(0)}.union(*borders))
    return [(start, start + 1 if end is None else (start + end) / 2)
            for start, end in zip(starts, [*starts[1:], None], strict=True)]
