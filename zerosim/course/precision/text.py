"""Prints the lesson on mixed precision: four short sections, each with a table of what was run, and what it shows.

Legend: g a gradient, S the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from zerosim.course.precision.lesson import LR, Precision
from zerosim.course.precision.runs_text import print_overflows, print_rested
from zerosim.course.precision.scaler_traces import INITIAL, WINDOW
from zerosim.course.precision.underflow import Fates
from zerosim.display.tables import heading, note, percent, plain_table, short
from zerosim.numerics.formats import Format, format_of

BAR_COLUMNS = 28
GROUP = 4  # binades in a line of the histogram
QUERIES_AND_KEYS = 2 / 3  # of a fused weight of queries, keys and values


def print_lesson(console: Console, found: Precision) -> None:
    """All four sections."""
    console.print("[bold]Mixed precision[/]: what goes wrong in 16 bits, and what helps.")
    for section in (print_underflows, print_traces, print_overflows, print_rested):
        console.print()
        section(console, found)


# --- 1: gradients too small for the format -------------------------------------------------------------------


def print_underflows(console: Console, found: Precision) -> None:
    """Where the gradients lie, and what the format makes of them at several loss scales."""
    question, seen = found.question, found.underflows
    row = format_of(question.format)
    heading(console, 1, f"Small gradients in {question.format}")
    note(console, f"{question.model} on {seen.text}, after AdamW (lr {LR:g}) in fp32, steps: {question.steps:,}.")
    note(console, f"The next batch of {seen.tokens:,} tokens: where its gradients lie in fp32, and what they")
    note(console, f"become in {row.name}.")
    console.print()
    console.print(plain_table(">from", "to", ">gradients", "", "", rows=histogram(found, row)))
    console.print()
    console.print(plain_table(
        ">S", ">rounded: 0", ">subnormal", ">inf", ">computed: 0", ">subnormal", ">inf", ">logits: 0",
        rows=map(_scale_cells, seen.rounded, seen.computed, seen.at_output)))
    note(console, "Rounded: S times the gradients above. Computed: a backward all in the format,")
    note(console, "from S times the loss; logits: where it begins. Subnormal: with fewer bits.")
    for line in underflow_notes(found, row):
        note(console, line)


def histogram(found: Precision, row: Format) -> Iterator[tuple[str, ...]]:
    """Lines of at most GROUP binades, the largest gradients first, each with what the format makes of them at S = 1."""
    counts: dict[int, int] = {}
    for binade in found.underflows.binades:
        low = max(_group(binade.exponent, row)[0], found.underflows.binades[0].exponent)
        counts[low] = counts.get(low, 0) + binade.elements
    most = max(counts.values(), default=1)
    for low, count in sorted(counts.items(), reverse=True):
        _, high, fate = _group(low, row)
        yield (f"2^{low}", f"2^{high}", f"{count:,}", "#" * math.ceil(count / most * BAR_COLUMNS), fate)


def _group(exponent: int, row: Format) -> tuple[int, int, str]:
    """The binades that share a line with this one, from and to, and their fate; counted from the borders of fates."""
    smallest = row.min_exponent - row.mantissa_bits - 1  # below 2^smallest all becomes 0
    for border, fate in ((row.min_exponent, ""), (smallest, "subnormal")):
        if exponent >= border:
            low = border + (exponent - border) // GROUP * GROUP
            return low, min(low + GROUP, row.min_exponent) if fate else low + GROUP, fate
    high = smallest - (smallest - 1 - exponent) // GROUP * GROUP
    return high - GROUP, high, "[red]becomes 0[/]"


def _scale_cells(rounded: Fates, computed: Fates, at_output: Fates) -> tuple[str, ...]:
    counts = [rounded.lost, rounded.subnormal, rounded.not_finite, computed.lost, computed.subnormal,
              computed.not_finite, at_output.lost]
    return scale_text(rounded.scale), *(f"{count:,}" for count in counts)


def scale_text(scale: float) -> str:
    """``2^16`` for powers of two that are not short themselves."""
    mantissa, exponent = math.frexp(scale)
    return short(scale) if mantissa != 0.5 or 1 <= scale < 1000 else f"2^{exponent - 1}"


def underflow_notes(found: Precision, row: Format) -> Iterator[str]:
    """What the tables show, as far as they do for these numbers."""
    seen = found.underflows
    first, best = seen.computed[0], min(seen.computed, key=lambda fates: (fates.not_finite, fates.lost))
    if first.lost and not seen.rounded[0].lost:
        yield f"{first.lost:,} come out as 0 with every S: sums that cancel, and no underflow."
    elif first.lost:
        yield f"Without scaling {first.lost:,} of {first.elements:,} gradients ({percent(first.lost_share)}) become 0:"
        for tensor in seen.worst:
            yield f"  {tensor.name}: {tensor.lost:,} of {tensor.elements:,}"
        if any("qkv.weight" in t.name and t.lost >= 0.99 * QUERIES_AND_KEYS * t.elements for t in seen.worst):
            yield "  Two thirds of a qkv weight are queries and keys: there, nothing is learned."
    else:
        yield f"Nothing becomes 0 without scaling: {row.name} reaches down far enough for these."
    if best.scale > 1 and best.lost < first.lost:
        yield f"With S = {scale_text(best.scale)}, {best.lost:,} do, and none overflows."
    if seen.computed[-1].not_finite:
        too_much = seen.computed[-1]
        yield (f"S = {scale_text(too_much.scale)} is too much: {too_much.not_finite:,} are inf or NaN, and the step is "
               "skipped.")


# --- 2: dynamic loss scaling ---------------------------------------------------------------------------------


def print_traces(console: Console, found: Precision) -> None:
    """The scale after each step by each of the machines in use."""
    heading(console, 2, f"Dynamic loss scaling: four machines (from {INITIAL:g}, window {WINDOW})")
    names = [f">{trace.dialect}" + (f" ({trace.hysteresis})" if trace.dialect != "torch" else "")
             for trace in found.traces]
    rows = ((str(step), "overflow" if overflow else "", *(short(trace.scales[step - 1]) for trace in found.traces))
            for step, overflow in enumerate(found.pattern, start=1))
    console.print(plain_table(">step", "", *names, rows=rows))
    note(console, "An overflow skips the step and halves S. DeepSpeed's hysteresis, in brackets,")
    note(console, "is how many that takes, until S grows again. S doubles on the last good step")
    note(console, "of a window (torch, deepspeed-legacy), or on the next one (deepspeed).")
