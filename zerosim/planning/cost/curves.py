"""How the seconds of a collective grow with its vector, exactly; where two algorithms break even; where latency rules.

Legend: N ranks, n bytes of the whole vector, cut into chunks of n/N; α seconds, β bytes per second.

On one kind of link the seconds are a line, Aα + Bn/β. Where a message inside a node and one between nodes go in the
same step, the slower decides, and which one that is may depend on n: then it is a few lines, each steeper than the one
before. Everything here is solved, in rational numbers; nothing is searched for.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from zerosim.planning.collectives import Ask, asked
from zerosim.planning.cost.seconds import by_link, longest_messages
from zerosim.planning.cuts import ceil_cut, checked_count
from zerosim.planning.hardware import Link, Network


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
