"""Prints what the lesson on mixed precision says of training runs: overflow in forward, and what rests in 16 bits.

Legend: S the loss scale, lr the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from zerosim.course.precision.forward_overflow import HIGHEST, LOWEST, Trial, has_wide_range
from zerosim.course.precision.lesson import Precision
from zerosim.course.precision.resting_formats import LR, Rested
from zerosim.display.tables import heading, note, percent, plain_table, rough, short
from zerosim.numerics.formats import format_of
from zerosim.numerics.rounding import spacing

# --- 3: overflow ---------------------------------------------------------------------------------------------


def print_overflows(console: Console, found: Precision) -> None:
    """The same training in two units, with every loss scaling."""
    fmt, unit = found.question.format, found.trials[-1].unit
    heading(console, 3, "Overflow in backward, and in forward")
    note(console, f"A small network with inputs from {LOWEST:g} to {HIGHEST:g}; and again in another unit, where")
    note(console, f"inputs and targets are {short(unit)} times as large. Losses are in the first unit.")
    console.print()
    small = [trial for trial in found.trials if trial.unit == 1]
    large = [trial for trial in found.trials if trial.unit != 1]
    rows = ((a.format, a.scaling, *_trial_cells(a), *_trial_cells(b)) for a, b in zip(small, large, strict=True))
    console.print(plain_table("format", "loss scale", ">skipped", ">loss, last", f">x {short(unit)}: skipped",
                              ">loss, last", rows=rows))
    console.print()
    columns = list(dict.fromkeys((value.unit, value.format) for value in found.largest))
    layers = {value.layer: [""] * len(columns) for value in found.largest}
    for value in found.largest:
        layers[value.layer][columns.index((value.unit, value.format))] = _value(value.value)
    console.print(plain_table("largest output", *(f">{fmt}, x {short(unit)}" for unit, fmt in columns),
                              rows=((layer, *cells) for layer, cells in layers.items())))
    for line in overflow_notes(found, fmt, small, large):
        note(console, line)


def _trial_cells(trial: Trial) -> tuple[str, str]:
    gave_up = "" if trial.gave_up is None else ", gave up"
    return f"{trial.skipped} of {trial.gave_up or trial.steps}{gave_up}", _value(trial.last_loss)


def _value(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"[red]{value}[/]"
    return rough(value, digits if value < 1000 else digits - 1)


def overflow_notes(found: Precision, fmt: str, small: list[Trial], large: list[Trial]) -> Iterator[str]:
    """What the tables show, as far as they do for these numbers."""
    largest = format_of(fmt).largest
    dynamic = [trial for trial in small if trial.scaling == "torch" and trial.skipped]
    for trial in dynamic:
        yield f"First unit, S = 2^16: overflow in backward; skipped until S is {short(trial.scale)}."
    if not has_wide_range(fmt) and all(trial.skipped == (trial.gave_up or trial.steps + 1) - 1 for trial in large
                                       if trial.format == fmt):
        yield f"Other unit: the first layer adds up to more than {rough(largest, 5)}, long before S."
        yield "  Every step is skipped; torch halves on and on, deepspeed gives up at S = 1."
    wide = {trial.format: trial.last_loss for trial in small if has_wide_range(trial.format)}
    if all(wide[trial.format] == trial.last_loss for trial in large if trial.format in wide):
        names = " and ".join(wide)
        yield "What helps is inputs of a sensible size, or a format of fp32's range:"
        yield f"  {names} come to the same losses in both units, to the bit."


# --- 4: what rests -------------------------------------------------------------------------------------------


def print_rested(console: Console, found: Precision) -> None:
    """The same training with masters, state and products in other formats."""
    first = found.rested[0]
    heading(console, 4, f"What rests between steps: {first.steps} steps of Adam, lr = {LR:g}")
    rows = ((run.compute, run.master if run.master != run.compute or run.compute == "fp32" else "none", run.state,
             run.matmul or "", *(_value(loss, 3) for loss in (run.first_loss, run.middle_loss, run.last_loss)),
             percent(run.moved_share), str(run.skipped)) for run in found.rested)
    console.print(plain_table("compute", "master", "m and v", "matmul", ">loss", ">middle", ">end", ">moved",
                              ">skips", rows=rows))
    note(console, "Losses are means over all data. Moved: weights that the last step changed.")
    for line in rested_notes(found.rested):
        note(console, line)


def rested_notes(runs: tuple[Rested, ...]) -> Iterator[str]:
    """What the table shows, as far as it does for these numbers."""
    with_master = {run.compute: run for run in runs if run.master == run.state == "fp32" and run.matmul is None}
    for run in runs:
        plain = with_master[run.compute]
        if run.matmul is None and run.master != plain.master and run.moved_share < plain.moved_share / 2:
            half_gap = float(spacing(0.25, run.compute)) / 2
            yield f"{run.compute} without a master: most weights stand still. From 0.25 on, to grow"
            yield f"  takes an update of more than {rough(half_gap)}; Adam's is about lr, {LR:g}."
        if run.state != "fp32" and not run.last_loss <= 2 * plain.last_loss:
            yield f"m and v in {run.state}: where g² is too small v is 0, and Adam divides by ε."
    if any(run.matmul for run in runs):
        yield "Matrix products in fp8 are an experiment: values in e4m3, gradients in e5m2."
    yield "One average and one weight in few bits, step by step: zerosim lost-updates."
