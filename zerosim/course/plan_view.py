"""A plan as the command shows it: the verdict on top, a row for each stage and policy, formulas and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape

from zerosim.course.measured import Compared
from zerosim.display.plan_table import KEPT_HERE, PARTS, PYTORCH_KEEPS, UNITS, cells, names_for, places_text, subject
from zerosim.display.style import percent
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts
from zerosim.models.units import TILED, Recompute
from zerosim.numerics.units import bytes_text, counted
from zerosim.planning.conventions import is_cut_anywhere
from zerosim.planning.explanation import explained, options_text
from zerosim.planning.plan_config import Plan
from zerosim.planning.plan_row import PlanRow

INDENT = 4  # columns of a terminal beside those of a table
Measured = Mapping[PlanRow, Sequence[Compared]]


def plan_view(found: Plan, columns: int, *, explain: bool = False, measured: Measured | None = None,
              notes: Iterable[str] = ()) -> View:
    """The plan for a terminal of so many columns; notes on what was asked, below the remarks; each number's formula,
    and what runs measure, where asked for."""
    explanations = [_explanation(found, row) for row in found.rows] if explain else []
    measurements = [_measurement(row, lines) for row, lines in (measured or {}).items()]
    return View(found.verdict, "", parts(_rows(found, columns), _remarks(found, columns), map(escape, notes),
                                         *explanations, *measurements))


def _rows(found: Plan, columns: int) -> Iterator[Part | str]:
    """The subject of the plan, and the rows in gigabytes and seconds."""
    model, rest = map(escape, subject(found.config, found.rows[0].convention))
    yield from ("", TextLine(f"[bold]{model}[/]{rest}", indent=0), "")
    names = names_for(found, columns - INDENT)
    spare = names.index("spare") + 1
    lines = [[*line[:spare], f"[{'green' if row.fits else 'red'}]{line[spare]}[/]", *line[spare + 1:]]
             for row, line in zip(found.rows, cells(found, names), strict=True)]
    yield marked_table("", *(RIGHT + name for name in names), rows=lines)
    yield ""


def _remarks(found: Plan, columns: int) -> Iterator[str]:
    """The units, what the numbers rest on, what is left out of them, and the answers to the inverse questions."""
    config = found.config
    units = f"{UNITS} {PARTS}" if "gathered" in names_for(found, columns - INDENT) else UNITS
    yield (f"{units} Seconds take arithmetic to reach {percent(config.utilization)} of the dense peak, which is "
           f"assumed, or what memory allows; bytes and seconds are those of the engine with {options_text(config)}.")
    if config.decoder is not None:
        yield (f"Activations are those of zerosim's own layers, which make norms and gates again in backward. PyTorch "
               f"keeps {PYTORCH_KEEPS / KEPT_HERE:.1f} times as much of a Llama-3-8B block: {PYTORCH_KEEPS:g} hidden "
               f"states of each token, measured, against {KEPT_HERE:g}. Of a block made again it keeps the input.")
        yield ("Attention is fused, as FlashAttention is, but in rows that say otherwise."
               if any(Recompute.parse(policy).inside == TILED for policy in config.policies) else
               "Attention holds its probabilities, as a fused one does not.")
    else:
        yield "Activations are not in the total: their sizes are not known of this model."
    if not config.has_units:
        yield "What is gathered or on its way is not in the total: name the largest layer, and it will be."
    if not is_cut_anywhere(config.optimizer):
        yield (f"What {type(config.optimizer).__name__} works in while it updates whole tensors is not in the total: "
               "--measure shows it, where the engine runs it.")
    if config.host_link:
        yield (f"Offload: {config.options.offload}; {escape(places_text(config))}. What is moved counts as beside "
               "nothing.")
    if config.decoder is not None:
        batch = config.largest_batch()
        yield (f"Largest micro-batch that fits: {counted(batch, 'sequence')}." if batch
               else "Not even one sequence fits.")
    ranks, least = config.fewest_ranks(), found.least_sent
    yield ("No number of ranks makes it fit." if ranks is None
           else f"Fewest ranks on which it fits, of powers of two: {ranks:,}.")
    if least is not None:
        yield f"Least traffic of what fits: {found.name_of(least)}, {bytes_text(least.sent_nbytes_per_step)} per step."
    if is_cut_anywhere(config.optimizer):  # of others no number of parameters says what they keep
        largest = [f"{config.largest_model(stage) / 1e9:,.4g}" for stage in config.stages]
        yield f"Largest models whose states alone fit, by stage, in 10⁹ parameters: {'; '.join(largest)}."


def _explanation(found: Plan, row: PlanRow) -> tuple[Part | str, ...]:
    """Every number of a row with its formula."""
    return ("", TextLine(f"[bold cyan]{row.title}[/]", indent=0), "",
            marked_table("", "", RIGHT, rows=[tuple(map(escape, line)) for line in explained(found.config, row)]))


def _measurement(row: PlanRow, lines: Sequence[Compared]) -> tuple[Part | str, ...]:
    """The estimate beside the measurement in a run without data, and the difference by name."""
    heading = f"[bold cyan]{row.title}[/], estimated, and measured on rank 0 of a run without data, in bytes"
    return ("", TextLine(heading, indent=0),
            marked_table("", RIGHT + "estimated", RIGHT + "measured", RIGHT + "difference", rows=[
                (line.name, f"{line.estimated_nbytes:,}", f"{line.measured_nbytes:,}",
                 f"{line.difference_nbytes:+,}" if line.difference_nbytes else "0") for line in lines]))


def as_json(found: Plan, measured: Measured | None = None) -> dict[str, Any]:
    """The plan as plain data, its explanation with it, and the measurements where they were asked for."""
    data = found.as_dict()
    for row, line in zip(found.rows, data["rows"], strict=True):
        line["explained"] = [{"what": what, "formula": formula, "value": value}
                             for what, formula, value in explained(found.config, row)]
        if measured:
            line["measured"] = [{"what": one.name, "estimated_nbytes": one.estimated_nbytes,
                                 "measured_nbytes": one.measured_nbytes, "difference_nbytes": one.difference_nbytes}
                                for one in measured[row]]
    return data
