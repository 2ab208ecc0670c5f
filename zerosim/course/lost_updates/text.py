"""Prints the lesson on lost updates: six short sections, each with a table of what was run, and what it shows.

Legend: w a weight, δ an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from zerosim.course.lost_updates.cures import Method, Outcome
from zerosim.course.lost_updates.lesson import LostUpdates
from zerosim.course.lost_updates.one_addition import Addition, Why
from zerosim.course.lost_updates.sizes_text import print_formats, print_moments, print_popular, print_sizes
from zerosim.display.tables import fitted, heading, note, percent, plain_table, rough, short, sum_text

LINE_COLUMNS = 57  # of the picture of one gap: odd, so that it has a middle

VERDICTS: dict[Why, str] = {
    "kept": "kept",
    "below_half_gap": "[red]lost[/]: below half gap",
    "tie_to_even": "[red]lost[/]: tie, w is even",
    "update_rounds_to_zero": "[red]lost[/]: δ becomes 0",
    "overflows": "overflows",
    "weight_too_large": "w is too large",
}
METHODS: dict[Method, str] = {
    "nothing": "no cure",
    "fp32_master": "fp32 master weight",
    "fp32_master_copy": "  its copy in the format",
    "kahan": "Kahan, all in the format",
    "kahan_fp32_remainder": "Kahan, remainder in fp32",
    "stochastic": "stochastic rounding",
    "stochastic_update_in_format": "  δ first in the format",
}


def print_lesson(console: Console, found: LostUpdates) -> None:
    """All six sections."""
    console.print("[bold]Lost updates[/]: a small number is added to a larger one, and nothing changes.")
    console.print("A format has only so many numbers. A sum that falls between two of them becomes")
    console.print("the nearer one; halfway, the one whose last bit is 0 (the even one).")
    for section in (print_addition, print_cures, print_popular, print_sizes, print_moments, print_formats):
        console.print()
        section(console, found)


# --- 1: one addition ----------------------------------------------------------------------------------------


def print_addition(console: Console, found: LostUpdates) -> None:
    """w + δ: a picture of it in the format asked for, and a table of it in all formats."""
    question, here = found.question, found.addition(found.question.format)
    heading(console, 1, f"One addition: {sum_text(question.weight, question.update)} in {question.format}")
    if here.weight != question.weight:
        note(console, f"{here.format} has no {short(question.weight)}; the nearest number is {short(here.weight)}.")
        note(console, "")
    for line in (*picture(here), *explanation(here)):
        note(console, line)
    rows = ((a.format, *_addition_cells(a)) for a in found.additions)
    console.print()
    console.print(plain_table("format", ">w", ">δ", ">half gap", ">w + δ", "w moves by", rows=rows))
    note(console, "w and δ as each format stores them. The half gap is that on δ's side of w.")


def picture(a: Addition) -> Iterator[str]:
    """The gap between w and its neighbor as a line: its middle, and x for the exact sum; nothing where the sum is
    not inside."""
    way = way_of(a)
    if not (0 < way < 1 and math.isfinite(a.neighbor)):
        return
    middle = LINE_COLUMNS // 2
    line = list("|" + "-" * (LINE_COLUMNS - 2) + "|")
    line[middle] = ":"
    line[min(max(round(way * (LINE_COLUMNS - 1)), 1), LINE_COLUMNS - 2)] = "x"
    left, right = short(a.weight), short(a.neighbor)
    if a.update < 0:
        line, left, right = line[::-1], right, left
    ends = left + right.rjust(LINE_COLUMNS - len(left))
    yield ends[: middle - 3] + "halfway" + ends[middle + 4 :]
    yield "".join(line)
    yield ""


def explanation(a: Addition) -> Iterator[str]:
    """Why the update is lost or kept, in words."""
    if a.why == "update_rounds_to_zero":
        yield f"{a.format} has no number so small: δ itself becomes 0. [bold]The update is lost.[/]"
    elif a.why == "overflows":
        yield f"The sum is larger than every number of {a.format}: it becomes {short(a.result)}."
    elif a.why == "tie_to_even":
        yield "The exact sum x is halfway to the next number: a tie. w's last bit is 0,"
        yield "so it becomes w again. [bold]The update is lost.[/]"
    elif a.lost:
        yield f"The exact sum x is {rough(100 * way_of(a))} % of the way to the next number: not halfway."
        yield f"It becomes {short(a.result)} again. [bold]The update is lost.[/]"
    else:
        inside = f"The exact sum x is {rough(100 * way_of(a))} % of the way to the next number."
        yield inside if way_of(a) < 1 else f"δ is {rough(way_of(a))} times as large as the gap."
        yield f"The sum becomes {short(a.result)}. The update is kept; w moves by {rough(a.moved, 6)}."


def way_of(a: Addition) -> float:
    """Where the exact sum lies between w (0) and its neighbor (1)."""
    return abs(a.update) / (2 * a.half_gap)


def _addition_cells(a: Addition) -> tuple[str, ...]:
    if a.why == "weight_too_large":
        return "-", "-", "-", "-", VERDICTS[a.why]
    verdict = f"kept: {rough(a.moved, 5)}" if a.why == "kept" else VERDICTS[a.why]
    return fitted(a.weight), rough(a.update + 0.0, 4), rough(a.half_gap), fitted(a.result), verdict


# --- 2: the cures -------------------------------------------------------------------------------------------


def print_cures(console: Console, found: LostUpdates) -> None:
    """Where w has come after all steps, by every method in every format."""
    question = found.question
    heading(console, 2, f"The cures: w = {short(question.weight)}, and δ is added {question.steps:,} times")
    columns = [name for update in found.updates for name in (f">δ = {fitted(update, 7)}", ">arrived")]
    exact = [cell for value in found.exact for cell in (fitted(value), "100 %")]
    table = plain_table("", "", *columns, rows=[("exact", "", *exact)])
    told = None
    for method, fmt in dict.fromkeys((outcome.method, outcome.format) for outcome in found.outcomes):
        cells = [cell for update in found.updates for cell in _outcome_cells(found, method, fmt, update)]
        table.add_row("", METHODS[method] if method != told else "", fmt, *cells)
        told = method
    console.print(table)
    console.print()
    for line in cure_notes(found):
        note(console, line)


def _outcome_cells(found: LostUpdates, method: Method, fmt: str, update: float) -> tuple[str, str]:
    outcome = found.outcome(method, fmt, update)
    if outcome.share == 0:
        return fitted(outcome.result), "0 %" + "*" * waits(outcome)
    if not math.isfinite(outcome.share):
        return rough(outcome.result), "-"
    if outcome.standard_error is None:
        return fitted(outcome.result), percent(outcome.share)
    error = outcome.standard_error / abs(update * found.question.steps)
    share = f"{100 * outcome.share:.0f}±{100 * error:.0f} %" if error < 9.5 else "noise"
    return fitted(round(outcome.result, 7), 9), share


def waits(outcome: Outcome) -> bool:
    """Whether w has not moved only because Kahan's remainder is not yet half a gap: nothing is lost."""
    return outcome.share == 0 and bool(outcome.remainder) and not is_stuck(outcome)


def is_stuck(outcome: Outcome) -> bool:
    """Whether Kahan's remainder has grown until the update is lost in it, as it was in w."""
    return outcome.share == 0 and (outcome.remainder_half_gap or 0.0) > abs(outcome.update) and bool(outcome.remainder)


def cure_notes(found: LostUpdates) -> Iterator[str]:
    """How the methods work, and what the table shows, as far as it does for these numbers."""
    first = found.addition("fp32")
    gaps = abs(first.moved) / (2 * first.half_gap)
    yield "Arrived: how far w has moved, beside how far it should have moved."
    yield "[bold]fp32 master[/]: w is kept in fp32, and the format gets a rounded copy of it."
    if 0 < gaps < 1000:
        yield f"  fp32 has gaps too: the first step moves {gaps:g} of them, that is {rough(first.moved, 6)}."
    yield "[bold]Kahan[/]: what an addition loses is kept in a remainder, and added the next time."
    if any(map(waits, found.outcomes)):
        yield "  * Nothing is lost: w moves as soon as the remainder reaches half a gap."
    for outcome in filter(is_stuck, found.outcomes):
        yield (f"  {outcome.format}, δ = {rough(outcome.update, 5)}: stuck, when the remainder is "
               f"{rough(outcome.remainder or 0)} (half gap {rough(outcome.remainder_half_gap or 0)}).")  # fmt: skip
    yield "[bold]Stochastic rounding[/]: up or down by chance, to the nearer number more often."
    yield "  Right on average, if δ is in fp32. This is the mean (and its uncertainty) of"
    yield f"  {len(found.seeds)} runs, with the seeds {found.seeds[0]} to {found.seeds[-1]}."
    for update in found.updates:
        outcome = found.outcome("stochastic", found.question.format, update)
        yield (f"  {outcome.format}, δ = {fitted(update, 9)}: {rough(outcome.moves)} jumps in a run; "
               f"results from {rough(outcome.lowest or 0.0, 7)} to {rough(outcome.highest or 0.0, 7)}.")  # fmt: skip
    if is_stuck(found.outcome("kahan", "bf16", found.question.update)):
        gap = {row.format: row.gap_at_one for row in found.format_facts}
        ratio = rough(gap["bf16"] / gap["fp16"])
        yield f"[bold]bf16 is no cure[/]: it reaches further than fp16, with gaps {ratio} times as large."
