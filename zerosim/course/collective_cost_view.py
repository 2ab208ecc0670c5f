"""The cost of a collective as a view: its own numbers, the other algorithms beside it, and where they cross."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.markup import escape

from zerosim.course.collective_cost import CollectiveCost, Other
from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, Table, TextLine, View, marked_table, parts
from zerosim.numerics.units import bytes_text, counted, rate_text, seconds_text
from zerosim.planning.cost import Cost
from zerosim.planning.hardware import Link


def lesson(found: CollectiveCost) -> View:
    """The cost, the other algorithms with their break-even sizes, the latency wall, and where α and β are from."""
    asked = found.cost
    return View(asked.collective, f" by {asked.algorithm}, {asked.nbytes:,} bytes, {counted(asked.ranks, 'rank')}",
                parts(_parts(found)))


def _parts(found: CollectiveCost) -> Iterator[Part | str]:
    for line in _links(found):
        yield TextLine(line, indent=0)
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


def _links(found: CollectiveCost) -> list[str]:
    if found.network.between is None:
        return [f"over {_link(found.network.inside)}"]
    return [f"inside each of {found.question.nodes} nodes over {_link(found.network.inside)}",
            f"between them over {_link(found.network.between)}"]


def _link(link: Link) -> str:
    rate, latency = rate_text(link.bytes_per_second), seconds_text(link.latency_seconds)
    return f"{escape(link.name)}: {rate} one way, {latency} a message"


def _own_numbers(asked: Cost) -> Table:
    least, most = min(asked.sent.nbytes), max(asked.sent.nbytes)
    sent = [("sent by each rank", f"{most:,} bytes")] if least == most else [
        ("sent by a rank, at least", f"{least:,} bytes"), ("sent by a rank, at most", f"{most:,} bytes")]
    latency = percent(asked.latency_seconds / asked.seconds) if asked.seconds else "0 %"
    return marked_table("", RIGHT, rows=[
        ("steps", f"{asked.steps:,}"), *sent, ("time", seconds_text(asked.seconds)),
        (f"  latency, {latency}", seconds_text(asked.latency_seconds)),
        ("  transfer", seconds_text(asked.transfer_seconds)),
        ("algorithm bandwidth", _rate(asked.algorithm_bytes_per_second)),
        ("bus bandwidth", _rate(asked.bus_bytes_per_second))])


def _rate(bytes_per_second: float | None) -> str:
    return "none" if bytes_per_second is None else rate_text(bytes_per_second)


def _others(found: CollectiveCost) -> Iterator[Part | str]:
    """All algorithms from the fastest on, and where each crosses the one that was asked about."""
    asked = found.cost
    priced = sorted([asked, *(other.cost for other in found.others if other.cost)], key=lambda cost: cost.seconds)
    yield marked_table("algorithm", ">steps", ">sent at most", ">time", ">bus bandwidth", rows=[
        (f"[bold]{cost.algorithm}[/]" if cost is asked else cost.algorithm, f"{cost.steps:,}",
         bytes_text(max(cost.sent.nbytes)), seconds_text(cost.seconds), _rate(cost.bus_bytes_per_second))
        for cost in priced])
    yield ""
    for other in found.others:
        yield _crossover(asked.algorithm, other)
    yield ""


def _crossover(asked: str, other: Other) -> str:
    """The sizes at which one of two algorithms is faster than the other, in a sentence."""
    name = other.algorithm
    if other.cost is None:
        return f"{name} {other.refused}."
    first = other.faster_at_first
    if not other.points:
        slower, faster = (name, asked) if first == 0 else (asked, name)
        return (f"{asked} and {name} take as long as each other at every size." if first is None else
                f"{faster} is faster than {slower} at every size.")
    names = {0: asked, 1: name, None: "neither"}
    above = [f"{names[point.faster_above]} above {bytes_text(float(point.nbytes))}" for point in other.points]
    return ", ".join([f"{names[first]} is faster below {bytes_text(float(other.points[0].nbytes))}", *above]) + "."


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
