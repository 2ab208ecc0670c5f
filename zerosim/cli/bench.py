"""The command that measures zerosim beside its peers and floors: the rows are those of benchmarks/speed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerosim.cli.shell import AsJson, busy, command, reply

if TYPE_CHECKING:
    from zerosim.display.views import View


@command("bench", "zerosim bench gpt ring-4")
def bench(
    names: Annotated[list[str] | None, typer.Argument(
        metavar="NAME", help="Rows, or how their names begin, as ring; without names, all with a goal but make's.",
    )] = None,
    as_json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both sides take turns.")] = 3,
    plots: Annotated[str, typer.Option(metavar="FOLDER", help="Draw by-ranks, by-parameters and by-layers into it, of "
                                                              "those that are named.")] = "",
    list_rows: Annotated[bool, typer.Option("--list", help="Measure nothing; print what there is.")] = False,
) -> None:
    """Times zerosim beside its peers, or the least that the machine can do; takes minutes, on a quiet machine."""
    runner, curves = _rows()
    chosen = runner.chosen(names or (), minutes=list_rows)
    if list_rows:
        reply(as_json, lambda: {"rows": [row.as_json() for row in chosen]}, lambda: _listed(chosen))
        return
    if plots:
        _require_curves(chosen, Path(plots))
    machine, measured = runner.machine(), []
    try:
        for row in chosen:
            with busy(f"{row.name}: {row.what}"):
                measured.append(runner.measure(row, rounds))
    finally:  # what ends it takes nothing away that has been measured
        reply(as_json, lambda: {"machine": machine, "rows": [one.as_json() for one in measured]},
              lambda: _view(measured, machine))
    for drawing in curves.drawings(measured) if plots else ():
        drawing.save(Path(plots) / f"{drawing.name}.svg")


def _rows() -> tuple[Any, Any]:
    """The modules that measure and that draw: of this checkout, or installed with the package."""
    if find_spec("zerosim.speed_rows") is not None:
        from zerosim.speed_rows import curves, runner  # type: ignore[import-untyped]  # in a wheel

        return runner, curves
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout's, before others of the name
    from benchmarks.speed import curves, runner

    return runner, curves


def _require_curves(chosen: Any, folder: Path) -> None:
    """Raises ValueError for rows without a curve, and for a folder that takes no files, before minutes are measured."""
    on_curves = [row.name.rpartition("-")[0] for row in chosen if row.name.startswith("by-")]
    if len(on_curves) == len({*on_curves}):
        raise ValueError("--plots draws curves, and at most one row of each was asked for; name by, by-ranks, "
                         "by-parameters or by-layers")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"asked to draw into {str(folder)!r}, but: {error.strerror}; name a folder to "
                         "which you may write") from error


def _listed(chosen: Any) -> View:
    from zerosim.display.views import Table, View

    return View("", "", (Table("", ("name", "what is timed", "against", ">goal"), tuple(
        (row.name, row.what, row.against, _goal(row)) for row in chosen)),))


def _view(measured: Any, machine: dict[str, Any]) -> View:
    """A row for each benchmark, and below them where it was run."""
    from zerosim.display.views import Table, TextLine, View

    columns = ("name", ">ratio", ">goal", ">zerosim, ms", ">other, ms", "other")
    table = Table("The ratio is zerosim's time beside the other's", columns, tuple(map(_cells, measured)))
    return View("", "", (table, TextLine(", ".join(f"{name} {value}" for name, value in machine.items()))))


def _cells(one: Any) -> tuple[str, ...]:
    goal = _goal(one.row)
    if one.lacking:
        return one.row.name, "", goal, "", "", f"{one.row.against}: {one.lacking}"
    against = f"{1e3 * one.seconds_against:.1f}" if one.theirs else ""
    return one.row.name, f"{one.ratio:.2f}", goal, f"{1e3 * one.seconds:.1f}", against, one.row.against


def _goal(row: Any) -> str:
    return "" if row.goal is None else f"{row.goal:.2f}"
