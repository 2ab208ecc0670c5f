"""The cost of a collective, as one reads it: its own numbers, the other algorithms beside it, and where they cross."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape

from zerosim.course.costs.collective import Answer, Other
from zerosim.display.numbers import percent
from zerosim.display.terminal import note, plain_table
from zerosim.display.views import RIGHT
from zerosim.numerics.units import bytes_text, rate_text, seconds_text
from zerosim.planning.cost import Cost
from zerosim.planning.hardware import Link

if TYPE_CHECKING:
    from rich.console import Console


def print_answer(console: Console, found: Answer) -> None:
    """The cost, then the other algorithms with their break-even sizes, the latency wall, and where α and β are from."""
    asked = found.cost
    ranks = f"{asked.ranks} rank{'s' * (asked.ranks > 1)}"
    console.print(f"[bold]{asked.collective}[/] by [bold]{asked.algorithm}[/], {asked.nbytes:,} bytes, {ranks}")
    for line in _links(found):
        console.print(line)
    console.print()
    table = plain_table("", RIGHT, rows=_rows(asked))
    table.show_header = False
    console.print(table)
    console.print()
    if asked.ranks == 1:
        note(console, "One rank sends nothing, by any algorithm.")
    else:
        if found.others:
            _print_others(console, found)
        _print_wall(console, found)
    _print_sources(console, found)


def _links(found: Answer) -> list[str]:
    if found.network.between is None:
        return [f"over {_link(found.network.inside)}"]
    return [f"inside each of {found.nodes} nodes over {_link(found.network.inside)}",
            f"between them over {_link(found.network.between)}"]


def _link(link: Link) -> str:
    rate, latency = rate_text(link.bytes_per_second), seconds_text(link.latency_seconds)
    return f"{escape(link.name)}: {rate} one way, {latency} a message"


def _rows(asked: Cost) -> list[tuple[str, str]]:
    least, most = min(asked.sent.nbytes), max(asked.sent.nbytes)
    sent = [("sent by each rank", f"{most:,} bytes")] if least == most else [
        ("sent by a rank, at least", f"{least:,} bytes"), ("sent by a rank, at most", f"{most:,} bytes")]
    latency = percent(asked.latency_seconds / asked.seconds) if asked.seconds else "0 %"
    return [("steps", f"{asked.steps:,}"), *sent, ("time", seconds_text(asked.seconds)),
            (f"  latency, {latency}", seconds_text(asked.latency_seconds)),
            ("  transfer", seconds_text(asked.transfer_seconds)),
            ("algorithm bandwidth", _rate(asked.algorithm_bytes_per_second)),
            ("bus bandwidth", _rate(asked.bus_bytes_per_second))]


def _rate(bytes_per_second: float | None) -> str:
    return "none" if bytes_per_second is None else rate_text(bytes_per_second)


def _print_others(console: Console, found: Answer) -> None:
    asked = found.cost
    priced = sorted([asked, *(other.cost for other in found.others if other.cost)], key=lambda cost: cost.seconds)
    console.print(plain_table("algorithm", RIGHT + "steps", RIGHT + "sent at most", RIGHT + "time",
                              RIGHT + "bus bandwidth", rows=[
        (f"[bold]{cost.algorithm}[/]" if cost is asked else cost.algorithm, f"{cost.steps:,}",
         bytes_text(max(cost.sent.nbytes)), seconds_text(cost.seconds), _rate(cost.bus_bytes_per_second))
        for cost in priced]))
    console.print()
    for other in found.others:
        note(console, _crossover(asked.algorithm, other))
    console.print()


def _crossover(asked: str, other: Other) -> str:
    """At which sizes which of two algorithms is faster, in a sentence."""
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


def _print_wall(console: Console, found: Answer) -> None:
    asked, wall = found.cost, found.wall_nbytes
    if math.isinf(wall):
        note(console, "It carries no bytes, so all of its time is latency.")
        return
    note(console, f"Below {bytes_text(wall)} latency takes more of its time than transfer.")
    if found.wall_ranks is not None and math.isfinite(found.wall_ranks):
        slow = found.network.between or found.network.inside
        note(console, f"That wall is N·α·β of {escape(slow.name)}: {bytes_text(asked.nbytes)} meet it on "
                      f"{math.floor(found.wall_ranks):,} ranks.")
    if found.others:
        note(console, "Sizes at which algorithms cross, and the wall, are for equal chunks.")


def _print_sources(console: Console, found: Answer) -> None:
    console.print()
    for link in (found.network.inside, found.network.between):
        if link is not None:
            note(console, escape(f"{link.name} ({link.date}): {link.source}."))
