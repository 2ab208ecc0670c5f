"""The lesson on mixed precision as a view: four short sections, each with a table of what was run, and what it shows.

Legend: g a gradient, S the loss scale, lr the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zerosim.course.precision import INITIAL, LR, WINDOW, Fates, Precision
from zerosim.course.precision_runs import HIGHEST, LOWEST, RESTING_LR, Rested, Trial, has_wide_range
from zerosim.display.style import percent, rough, short
from zerosim.display.views import Heading, Part, View, marked_table, parts
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.rounding import spacing

BAR_COLUMNS = 28
GROUP = 4  # binades in a line of the histogram
QUERIES_AND_KEYS = 2 / 3  # of a fused weight of queries, keys and values


def lesson(found: Precision) -> View:
    """All four sections."""
    return View("Mixed precision", ": what goes wrong in 16 bits, and what helps.",
                parts(_underflows(found), _scaler_traces(found), _overflows(found), _resting(found)))


# -- 1: gradients too small for the format ----------------------------------------------------------------------------


def _underflows(found: Precision) -> Iterator[Part | str]:
    """The places of the gradients, and what the format makes of them at several loss scales."""
    question, seen = found.question, found.underflows
    row = format_of(question.format)
    yield Heading(1, f"Small gradients in {question.format}")
    yield f"{question.model} on {seen.text}, after AdamW (lr {LR:g}) in fp32, steps: {question.steps:,}."
    yield f"The next batch of {seen.tokens:,} tokens: where its gradients lie in fp32, and what they"
    yield f"become in {row.name}."
    yield ""
    yield marked_table(">from", "to", ">gradients", "", "", rows=histogram(found, row))
    yield ""
    yield marked_table(
        ">S", ">rounded: 0", ">subnormal", ">inf", ">computed: 0", ">subnormal", ">inf", ">logits: 0",
        rows=map(_scale_cells, seen.rounded, seen.computed, seen.at_output))
    yield "Rounded: S times the gradients above. Computed: a backward all in the format,"
    yield "from S times the loss; logits: where it begins. Subnormal: with fewer bits."
    yield from _underflow_notes(found, row)


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


def _underflow_notes(found: Precision, row: Format) -> Iterator[str]:
    """Words for what the tables show of these numbers."""
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


# -- 2: dynamic loss scaling ------------------------------------------------------------------------------------------


def _scaler_traces(found: Precision) -> Iterator[Part | str]:
    """The scale after each step by each of the machines in use."""
    yield Heading(2, f"Dynamic loss scaling: four machines (from {INITIAL:g}, window {WINDOW})")
    names = [f">{trace.kind}" + (f" ({trace.hysteresis})" if trace.kind != "torch" else "")
             for trace in found.traces]
    yield marked_table(">step", "", *names, rows=(
        (str(step), "overflow" if overflow else "", *(short(trace.scales[step - 1]) for trace in found.traces))
        for step, overflow in enumerate(found.pattern, start=1)))
    yield "An overflow skips the step and halves S. DeepSpeed's hysteresis, in brackets,"
    yield "is how many that takes, until S grows again. S doubles on the last good step"
    yield "of a window (torch, deepspeed-legacy), or on the next one (deepspeed)."


# -- 3: overflow ------------------------------------------------------------------------------------------------------


def _overflows(found: Precision) -> Iterator[Part | str]:
    """The same training in two units, with every loss scaling."""
    fmt, unit = found.question.format, found.trials[-1].unit
    yield Heading(3, "Overflow in backward, and in forward")
    yield f"A small network with inputs from {LOWEST:g} to {HIGHEST:g}; and again in another unit, where"
    yield f"inputs and targets are {short(unit)} times as large. Losses are in the first unit."
    yield ""
    small = [trial for trial in found.trials if trial.unit == 1]
    large = [trial for trial in found.trials if trial.unit != 1]
    yield marked_table(
        "format", "loss scale", ">skipped", ">loss, last", f">x {short(unit)}: skipped", ">loss, last",
        rows=((a.format, a.scaling, *_trial_cells(a), *_trial_cells(b)) for a, b in zip(small, large, strict=True)))
    yield ""
    columns = list(dict.fromkeys((value.unit, value.format) for value in found.largest))
    layers = {value.layer: [""] * len(columns) for value in found.largest}
    for value in found.largest:
        layers[value.layer][columns.index((value.unit, value.format))] = _value(value.value)
    yield marked_table("largest output", *(f">{fmt}, x {short(unit)}" for unit, fmt in columns),
                       rows=((layer, *cells) for layer, cells in layers.items()))
    yield from _overflow_notes(fmt, small, large)


def _trial_cells(trial: Trial) -> tuple[str, str]:
    gave_up = "" if trial.gave_up is None else ", gave up"
    return f"{trial.skipped} of {trial.gave_up or trial.steps}{gave_up}", _value(trial.last_loss)


def _value(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"[red]{value}[/]"
    return rough(value, digits if value < 1000 else digits - 1)


def _overflow_notes(fmt: str, small: list[Trial], large: list[Trial]) -> Iterator[str]:
    """Words for what the tables show of these numbers."""
    for trial in (trial for trial in small if trial.scaling == "torch" and trial.skipped):
        yield f"First unit, S = 2^16: overflow in backward; skipped until S is {short(trial.scale)}."
    if not has_wide_range(fmt) and all(trial.skipped == (trial.gave_up or trial.steps + 1) - 1 for trial in large
                                       if trial.format == fmt):
        yield f"Other unit: the first layer adds up to more than {rough(format_of(fmt).largest, 5)}, long before S."
        yield "  Every step is skipped; torch halves on and on, deepspeed gives up at S = 1."
    wide = {trial.format: trial.last_loss for trial in small if has_wide_range(trial.format)}
    if all(wide[trial.format] == trial.last_loss for trial in large if trial.format in wide):
        yield "What helps is inputs of a sensible size, or a format of fp32's range:"
        yield f"  {' and '.join(wide)} come to the same losses in both units, to the bit."


# -- 4: what rests ----------------------------------------------------------------------------------------------------


def _resting(found: Precision) -> Iterator[Part | str]:
    """The same training with masters, state and products in other formats."""
    yield Heading(4, f"What rests between steps: {found.rested[0].steps} steps of Adam, lr = {RESTING_LR:g}")
    yield marked_table(
        "compute", "master", "m and v", "matmul", ">loss", ">middle", ">end", ">moved", ">skips",
        rows=((run.compute, run.master if run.master != run.compute or run.compute == "fp32" else "none", run.state,
               run.matmul or "", *(_value(loss, 3) for loss in (run.first_loss, run.middle_loss, run.last_loss)),
               percent(run.moved_share), str(run.skipped)) for run in found.rested))
    yield "Losses are means over all data. Moved: weights that the last step changed."
    yield from _rested_notes(found.rested)


def _rested_notes(runs: tuple[Rested, ...]) -> Iterator[str]:
    """Words for what the table shows of these numbers."""
    with_master = {run.compute: run for run in runs if run.master == run.state == "fp32" and run.matmul is None}
    for run in runs:
        exact = with_master[run.compute]
        if run.matmul is None and run.master != exact.master and run.moved_share < exact.moved_share / 2:
            half_gap = float(spacing(0.25, run.compute)) / 2
            yield f"{run.compute} without a master: most weights stand still. From 0.25 on, to grow"
            yield f"  takes an update of more than {rough(half_gap)}; Adam's is about lr, {RESTING_LR:g}."
        if run.state != "fp32" and not run.last_loss <= 2 * exact.last_loss:
            yield f"m and v in {run.state}: where g² is too small v is 0, and Adam divides by ε."
    if any(run.matmul for run in runs):
        yield "Matrix products in fp8 are an experiment: values in e4m3, gradients in e5m2."
    yield "One average and one weight in few bits, step by step: zerosim lost-updates."
