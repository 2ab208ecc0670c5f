"""One collective by one algorithm: what it sends, how long it takes, and beside which sizes others are faster.

Legend: N ranks, n bytes of the whole vector, α seconds of latency for each message, β bytes per second one way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from rich.markup import escape

from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, Table, TextLine, View, marked_table, parts, plain_record
from zerosim.numerics.checks import checked_count, unknown_name
from zerosim.numerics.units import bytes_text, counted, rate_text, seconds_text
from zerosim.planning.collectives import ALGORITHMS, POWERS_OF_TWO
from zerosim.planning.cost import (
    BreakEven,
    Cost,
    break_even,
    cost,
    curve,
    faster_at,
    latency_wall_nbytes,
    ring_wall_ranks,
)
from zerosim.planning.cuts import ceil_cut
from zerosim.planning.hardware import Link, Network, read
from zerosim.ranks.collectives import HIERARCHICAL
from zerosim.shown import Answer

LARGEST_RANKS = 8192  # every step of every rank is looked at, which takes seconds from here on


@dataclass(frozen=True, slots=True)
class CostQuestion:
    """A collective, an algorithm, a vector of `nbytes` in elements of `itemsize`, ranks on nodes, and links by name.

    `between` None is InfiniBand NDR where there are several nodes. `hardware` is the path of a file with links of one's
    own. `algorithm` None is the first that the collective has.
    """

    nbytes: int
    ranks: int
    link: str
    collective: str = "all_reduce"
    algorithm: str | None = None
    nodes: int = 1
    between: str | None = None
    itemsize: int = 1
    hardware: str | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """Another algorithm beside the one that was asked about: its cost and where the two break even, or why not.

    Whoever is faster is 0 for the one asked about, 1 for the other, None for neither; `faster_at_first` is for the
    smallest vectors, and for all where the two never break even.
    """

    algorithm: str
    cost: Cost | None = None
    faster_at_first: int | None = None
    points: tuple[BreakEven, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCost(Answer):
    """The cost, the network that it is for, the other algorithms, and the latency wall.

    `wall_nbytes` is the size below which latency takes more of the time than transfer. `wall_ranks` is the same wall
    seen from the vector: the most ranks whose ring spends no more on latency; None for other algorithms, and where
    neither of two kinds of link is the slower one for all sizes.
    """

    question: CostQuestion
    network: Network
    cost: Cost
    others: tuple[Other, ...]
    wall_nbytes: float
    wall_ranks: float | None

    def view(self) -> View:
        """The cost, the other algorithms with their break-even sizes, the latency wall, and where α and β are from."""
        asked = self.cost
        return View(asked.collective, f" by {asked.algorithm}, {asked.nbytes:,} bytes, {counted(asked.ranks, 'rank')}",
                    parts(_parts(self)))

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data; an infinite wall is the text "inf"."""
        cost, network = self.cost, self.network
        return plain_record({
            "collective": cost.collective, "ranks": cost.ranks, "nodes": self.question.nodes, "nbytes": cost.nbytes,
            "itemsize": self.question.itemsize, "link": network.inside, "between": network.between,
            **_cost_as_json(cost), "sent_nbytes_by_rank": cost.sent.nbytes, "messages_by_rank": cost.sent.messages,
            "latency_wall_nbytes": self.wall_nbytes, "latency_wall_ranks": self.wall_ranks,
            "others": [_other_as_json(cost.algorithm, other) for other in self.others]})


def collective_cost(question: CostQuestion) -> CollectiveCost:
    """The cost of a collective, beside that of the other algorithms.

    Raises ValueError for names that are not known, with the nearest ones, for numbers that cannot be, and for ranks
    that the algorithm or the nodes do not allow.
    """
    ranks, collective = checked_count("ranks", question.ranks, 1), question.collective
    if ranks > LARGEST_RANKS:
        raise ValueError(f"{ranks} ranks were asked for; every step of every rank is looked at, so take "
                         f"{LARGEST_RANKS} at most")
    algorithm = _checked_algorithm(collective, question.algorithm)
    hardware = read(question.hardware)
    network = hardware.network(ranks, question.link, question.nodes, question.between)
    cut = ceil_cut(_elements(question), ranks)
    asked = cost(collective, algorithm, cut, question.itemsize, network)
    own = curve(collective, algorithm, ranks, network)

    def beside(name: str) -> Other:
        if (collective, name) in POWERS_OF_TWO and ranks & (ranks - 1):
            return Other(name, refused=f"needs a power of two of ranks, which {ranks} is not")
        theirs = curve(collective, name, ranks, network)
        points = break_even(own, theirs)
        first = faster_at(own, theirs, min((point.nbytes / 2 for point in points), default=Fraction(1)))
        return Other(name, cost(collective, name, cut, question.itemsize, network), first, points)

    names = _algorithms(collective)
    if network.ranks_per_node and collective in HIERARCHICAL:
        names.append(f"hierarchical({network.ranks_per_node})")
    others = [beside(name) for name in names if name != algorithm]
    return CollectiveCost(question, network, asked, tuple(others), latency_wall_nbytes(own),
                          _wall_ranks(asked, network))


def _cost_as_json(of: Cost) -> dict[str, Any]:
    return {"algorithm": of.algorithm, "steps": of.sent.steps, "largest_sent_nbytes": max(of.sent.nbytes),
            "total_sent_nbytes": sum(of.sent.nbytes), "seconds": of.seconds, "latency_seconds": of.latency_seconds,
            "transfer_seconds": of.transfer_seconds, "algorithm_bytes_per_second": of.algorithm_bytes_per_second,
            "bus_bytes_per_second": of.bus_bytes_per_second}


def _other_as_json(asked: str, other: Other) -> dict[str, Any]:
    if other.cost is None:
        return {"algorithm": other.algorithm, "refused": other.refused}
    names = {0: asked, 1: other.algorithm, None: None}
    points = [{"nbytes": float(point.nbytes), "faster_below": names[point.faster_below],
               "faster_above": names[point.faster_above]} for point in other.points]
    return _cost_as_json(other.cost) | {"refused": None, "faster_at_first": names[other.faster_at_first],
                                        "break_even": points}


def _algorithms(collective: str) -> list[str]:
    return [name for of, name in ALGORITHMS if of == collective]


def _checked_algorithm(collective: str, algorithm: str | None) -> str:
    collectives = dict.fromkeys(of for of, _ in ALGORITHMS)
    if collective not in collectives:
        raise unknown_name(f"no collective is called {collective!r}", _as_written_here(collective), collectives,
                           "there are")
    names = _algorithms(collective)
    if algorithm is None:
        return names[0]
    if algorithm not in names and not algorithm.startswith("hierarchical"):  # of which N and R decide
        raise unknown_name(f"{collective} has no algorithm {algorithm!r}", _as_written_here(algorithm), names,
                           "there are")
    return algorithm


def _as_written_here(name: str) -> str:
    return name.lower().replace("-", "_")


def _elements(question: CostQuestion) -> int:
    itemsize = checked_count("itemsize", question.itemsize, 1)
    if question.collective == "barrier" and question.nbytes:
        raise ValueError(f"a barrier carries no bytes, and {question.nbytes} were asked for; take 0")
    if question.nbytes % itemsize:
        raise ValueError(f"{question.nbytes} bytes are no whole number of elements of {itemsize} bytes; "
                         f"take {question.nbytes - question.nbytes % itemsize}, or itemsize=1")
    return checked_count("nbytes", question.nbytes, 0) // itemsize


def _wall_ranks(asked: Cost, network: Network) -> float | None:
    """Over the slower kind of link, which every step of a ring crosses somewhere."""
    inside, slow = network.inside, network.between or network.inside
    if asked.algorithm != "ring" or slow.alpha < inside.alpha or slow.beta > inside.beta:
        return None
    return ring_wall_ranks(asked.nbytes, slow)


# -- as it is shown ----------------------------------------------------------------------------------------------------


def _parts(found: CollectiveCost) -> Iterator[Part | str]:
    if found.network.between is None:
        yield TextLine(f"over {_link(found.network.inside)}", indent=0)
    else:
        yield TextLine(f"inside each of {found.question.nodes} nodes over {_link(found.network.inside)}", indent=0)
        yield TextLine(f"between them over {_link(found.network.between)}", indent=0)
    yield from ("", _own_numbers(found.cost), "")
    if found.cost.ranks == 1:
        yield "One rank sends nothing, by any algorithm."
    else:
        if found.others:
            yield from _others(found)
        yield from _wall(found)
    yield ""
    for link in filter(None, (found.network.inside, found.network.between)):
        yield escape(f"{link.name} ({link.date}): {link.source}.")


def _link(link: Link) -> str:
    rate, latency = rate_text(link.bytes_per_second), seconds_text(link.latency_seconds)
    return f"{escape(link.name)}: {rate} one way, {latency} a message"


def _own_numbers(asked: Cost) -> Table:
    least, most = min(asked.sent.nbytes), max(asked.sent.nbytes)
    sent = [("sent by each rank", f"{most:,} bytes")] if least == most else [
        ("sent by a rank, at least", f"{least:,} bytes"), ("sent by a rank, at most", f"{most:,} bytes")]
    latency = percent(asked.latency_seconds / asked.seconds) if asked.seconds else "0 %"
    return marked_table("", RIGHT, rows=[
        ("steps", f"{asked.sent.steps:,}"), *sent, ("time", seconds_text(asked.seconds)),
        (f"  latency, {latency}", seconds_text(asked.latency_seconds)),
        ("  transfer", seconds_text(asked.transfer_seconds)),
        ("algorithm bandwidth", _rate(asked.algorithm_bytes_per_second)),
        ("bus bandwidth", _rate(asked.bus_bytes_per_second))])


def _rate(bytes_per_second: float | None) -> str:
    return "none" if bytes_per_second is None else rate_text(bytes_per_second)


def _others(found: CollectiveCost) -> Iterator[Part | str]:
    """All algorithms from the fastest on, and the sizes at which each is faster than the one that was asked about."""
    asked = found.cost
    priced = sorted([asked, *(other.cost for other in found.others if other.cost)], key=lambda cost: cost.seconds)
    faster = {other.algorithm: _faster(other) for other in found.others if other.cost} | {asked.algorithm: ""}
    yield marked_table("algorithm", ">steps", ">sent at most", ">time", f"faster than {asked.algorithm}", rows=[
        (f"[bold]{cost.algorithm}[/]" if cost is asked else cost.algorithm, f"{cost.sent.steps:,}",
         bytes_text(max(cost.sent.nbytes)), seconds_text(cost.seconds), faster[cost.algorithm]) for cost in priced])
    yield ""
    yield from (f"{other.algorithm} {other.refused}." for other in found.others if other.refused)


def _faster(other: Other) -> str:
    """The sizes at which it is faster than the algorithm that was asked about."""
    if not other.points:
        return {0: "never", 1: "always", None: "as fast"}[other.faster_at_first]
    bounds = [bytes_text(float(point.nbytes)) for point in other.points]
    ranges = [f"below {bounds[0]}", *(f"{low} to {high}" for low, high in pairwise(bounds)), f"above {bounds[-1]}"]
    fastest = (other.faster_at_first, *(point.faster_above for point in other.points))
    return ", ".join(sizes for sizes, who in zip(ranges, fastest, strict=True) if who == 1)


def _wall(found: CollectiveCost) -> Iterator[str]:
    """The size below which latency takes more of the time than transfer, and the ranks on which this vector is it."""
    if math.isinf(found.wall_nbytes):
        yield "It carries no bytes, so all of its time is latency."
        return
    yield f"Below {bytes_text(found.wall_nbytes)} latency takes more of its time than transfer."
    if found.wall_ranks is not None and math.isfinite(found.wall_ranks):
        slow = found.network.between or found.network.inside
        yield (f"That wall is N·α·β of {escape(slow.name)}: {bytes_text(found.cost.nbytes)} meet it on "
               f"{math.floor(found.wall_ranks):,} ranks.")
    if found.others:
        yield "Sizes at which algorithms cross, and the wall, are for equal chunks."
