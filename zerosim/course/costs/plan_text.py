"""A plan as one reads it: the verdict on top, a row for each stage and policy, formulas and measurements if asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from zerosim.display.numbers import percent
from zerosim.display.terminal import note, plain_table, title
from zerosim.display.views import RIGHT
from zerosim.numerics.units import bytes_text, counted
from zerosim.planning.conventions import is_cut_anywhere
from zerosim.planning.plan import Plan, Row
from zerosim.planning.plan_table import UNITS, cells, explained, names_for, options_text, subject

if TYPE_CHECKING:
    from rich.console import Console

    from zerosim.course.measured import Compared


INDENT = 4  # columns of a terminal beside those of a table

def print_plan(console: Console, found: Plan) -> None:
    """The verdict, what it is a plan of, the rows in gigabytes and seconds, and the inverse questions."""
    config = found.config
    console.print(found.verdict, style="bold", highlight=False)
    console.print()
    title(console, *subject(config, found.rows[0].convention))
    names = names_for(found, console.width - INDENT)
    spare = names.index("spare") + 1
    lines = [[*line[:spare], f"[{'green' if row.fits else 'red'}]{line[spare]}[/]", *line[spare + 1:]]
             for row, line in zip(found.rows, cells(found, names), strict=True)]
    console.print(plain_table("", *(RIGHT + name for name in names), rows=map(tuple, lines)))
    console.print()
    note(console, f"{UNITS} Seconds take products to reach {percent(config.utilization)} of the dense peak, which is "
                  f"assumed; bytes and seconds are those of the engine with {options_text(config)}.")
    if not config.has_activations:
        note(console, "Activations are not in the total: their sizes are not known of this model.")
    if not config.has_units:
        note(console, "What is gathered or on its way is not in the total: name the largest layer, and it will be.")
    if not is_cut_anywhere(config.optimizer):
        note(console, f"What {type(config.optimizer).__name__} works in while it updates whole tensors is not in the "
                      "total: --measure shows it, where the engine runs it.")
    if config.offload and config.host_link:
        link = escape(config.host_link.name)
        note(console, f"Masters and the optimizer's state are on the host, over {link}, a link for each device. That "
                      "is an estimate alone: the engine has no offload yet, so --measure runs without it.")
    for line in inverses(found):
        note(console, line)


def inverses(found: Plan) -> list[str]:
    """The largest batch, the fewest ranks and the cheapest stage that fit, in sentences."""
    config = found.config
    lines, ranks = [], config.fewest_ranks()
    if config.has_activations:
        batch = config.largest_batch()
        lines.append(f"Largest micro-batch that fits: {counted(batch, 'sequence')}." if batch
                     else "Not even one sequence fits.")
    lines.append("No number of ranks makes it fit." if ranks is None
                 else f"Fewest ranks on which it fits, of powers of two: {ranks:,}.")
    cheapest = found.cheapest
    if cheapest is not None:
        lines.append(f"Cheapest in traffic of what fits: {cheapest.title}, "
                     f"{bytes_text(cheapest.sent_nbytes_per_step)} per step.")
    if is_cut_anywhere(config.optimizer):  # of others no number of parameters says what they keep
        largest = [f"{config.largest_model(stage) / 1e9:,.4g}" for stage in config.stages]
        lines.append(f"Largest models whose states alone fit, by stage, in 10⁹ parameters: {'; '.join(largest)}.")
    return lines


def print_explanation(console: Console, found: Plan) -> None:
    """Every number of every row with its formula."""
    for row in found.rows:
        console.print(f"\n[bold cyan]{row.title}[/]")
        lines = ((escape(what), escape(formula), value) for what, formula, value in explained(found.config, row))
        console.print(plain_table("", "", RIGHT, rows=lines))


def print_measured(console: Console, row: Row, lines: Sequence[Compared]) -> None:
    """The estimate beside the measurement in a run without data, and the difference by name."""
    console.print(f"\n[bold cyan]{row.title}[/], estimated, and measured on rank 0 of a run without data, in bytes")
    console.print(plain_table("", RIGHT + "estimated", RIGHT + "measured", RIGHT + "difference", rows=[
        (line.name, f"{line.estimated_nbytes:,}", f"{line.measured_nbytes:,}", f"{line.difference_nbytes:+,}"
         if line.difference_nbytes else "0") for line in lines]))


def as_json(found: Plan, measured: Sequence[tuple[Row, Sequence[Compared]]] = ()) -> dict[str, Any]:
    """The plan as plain data, its explanation with it, and the measurements where they were asked for."""
    data = found.as_dict()
    for row, line in zip(found.rows, data["rows"], strict=True):
        line["explained"] = [{"what": what, "formula": formula, "value": value}
                             for what, formula, value in explained(found.config, row)]
    for (_, lines), line in zip(measured, data["rows"], strict=False):
        line["measured"] = [{"what": one.name, "estimated_nbytes": one.estimated_nbytes,
                             "measured_nbytes": one.measured_nbytes, "difference_nbytes": one.difference_nbytes}
                            for one in lines]
    return data
