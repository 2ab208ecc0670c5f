"""The command that measures zerosim beside its peers and floors: the rows are those of benchmarks/speed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import AsJson, answer, busy, command

if TYPE_CHECKING:
    from zerosim.display.views import View


@command("bench", "zerosim bench gpt ring-4")
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Rows, or the beginning of their names, as "
                                                                           "ring; without names, all.")] = None,
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both sides take turns.")] = 3,
    list_rows: Annotated[bool, typer.Option("--list", help="Measure nothing; print what there is.")] = False,
) -> None:
    """Times zerosim beside its peers, or the least that the machine can do; takes minutes, on a quiet machine."""
    runner = _runner()
    chosen = runner.chosen(names or ())
    if list_rows:
        answer(as_json, lambda: {"rows": [row.as_json() for row in chosen]}, lambda: _listed(chosen))
        return
    measured = []
    for row in chosen:
        with busy(f"{row.name}: {row.what}"):
            measured.append(runner.measure(row, rounds))
    machine = runner.machine()
    answer(as_json, lambda: {"machine": machine, "rows": [one.as_json() for one in measured]},
           lambda: _view(measured, machine))


def _runner() -> Any:
    """The rows of this checkout, or those that were installed with the package."""
    if find_spec("zerosim.speed_rows") is not None:
        return import_module("zerosim.speed_rows.runner")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    return import_module("benchmarks.speed.runner")


def _listed(chosen: Any) -> View:
    from zerosim.display.views import Table, View

    return View("", "", (Table("", ("name", "what is timed", "against", ">goal"), tuple(
        (row.name, row.what, row.against, f"{row.goal:.2f}") for row in chosen)),))


def _view(measured: Any, machine: dict[str, Any]) -> View:
    """A row for each benchmark, and below them where it was run."""
    from zerosim.display.views import Table, TextLine, View

    columns = ("name", ">ratio", ">goal", ">zerosim, ms", ">other, ms", "other")
    table = Table("The ratio is zerosim's time beside the other's", columns, tuple(map(_cells, measured)))
    return View("", "", (table, TextLine(", ".join(f"{name} {value}" for name, value in machine.items()))))


def _cells(one: Any) -> tuple[str, ...]:
    goal = f"{one.row.goal:.2f}"
    if one.lacking:
        return one.row.name, "", goal, "", "", f"{one.row.against}: {one.lacking}"
    return (one.row.name, f"{one.ratio:.2f}", goal, f"{1e3 * one.seconds:.1f}", f"{1e3 * one.seconds_against:.1f}",
            one.row.against)
