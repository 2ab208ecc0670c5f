"""The lesson on lost updates as a view: six short sections, each with a table of what was run, and what it shows.

Legend: w a weight, δ an update, lr the learning rate, g a gradient, m and v Adam's averages of g and g².
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from zerosim.course.lost_updates import (
    EPSILON,
    MOMENT_GRADIENT,
    POPULAR_GRADIENT,
    POPULAR_LR,
    POPULAR_UPDATE,
    Addition,
    LostUpdates,
    Method,
    Outcome,
    Why,
)
from zerosim.display.style import fitted, percent, rough, short, sum_text
from zerosim.display.views import Heading, Part, View, marked_table, parts
from zerosim.optim import Adam

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


def lesson(found: LostUpdates) -> View:
    """All six sections."""
    return View("Lost updates", ": a small number is added to a larger one, and nothing changes.\n"
                "A format has only so many numbers. A sum that falls between two of them becomes\n"
                "the nearer one; halfway, the one whose last bit is 0 (the even one).",
                parts(_addition(found), _cures(found), _popular(found), _sizes(found), _moments(found),
                      _formats(found)))


# -- 1: one addition --------------------------------------------------------------------------------------------------


def _addition(found: LostUpdates) -> Iterator[Part | str]:
    """w + δ: a picture of it in the format asked for, and a table of it in all formats."""
    question, here = found.question, found.addition(found.question.format)
    yield Heading(1, f"One addition: {sum_text(question.weight, question.update)} in {question.format}")
    if here.weight != question.weight:
        yield f"{here.format} has no {short(question.weight)}; the nearest number is {short(here.weight)}."
        yield ""
    yield from _picture(here)
    yield from _explanation(here)
    yield ""
    yield marked_table("format", ">w", ">δ", ">half gap", ">w + δ", "w moves by",
                       rows=map(_addition_row, found.additions))
    yield "w and δ as each format stores them. The half gap is that on δ's side of w."


def _picture(a: Addition) -> Iterator[str]:
    """The gap between w and its neighbor as a line: its middle, and x for the exact sum; nothing where the sum is
    not inside."""
    way = _way(a)
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


def _explanation(a: Addition) -> Iterator[str]:
    """The reason why the update is lost or kept, in words."""
    if a.why == "update_rounds_to_zero":
        yield f"{a.format} has no number so small: δ itself becomes 0. [bold]The update is lost.[/]"
    elif a.why == "overflows":
        yield f"The sum is larger than every number of {a.format}: it becomes {short(a.result)}."
    elif a.why == "tie_to_even":
        yield "The exact sum x is halfway to the next number: a tie. w's last bit is 0,"
        yield "so it becomes w again. [bold]The update is lost.[/]"
    elif a.lost:
        yield f"The exact sum x is {rough(100 * _way(a))} % of the way to the next number: not halfway."
        yield f"It becomes {short(a.result)} again. [bold]The update is lost.[/]"
    else:
        inside = f"The exact sum x is {rough(100 * _way(a))} % of the way to the next number."
        yield inside if _way(a) < 1 else f"δ is {rough(_way(a))} times as large as the gap."
        yield f"The sum becomes {short(a.result)}. The update is kept; w moves by {rough(a.moved, 6)}."


def _way(a: Addition) -> float:
    """The place of the exact sum between w (0) and its neighbor (1)."""
    return abs(a.update) / (2 * a.half_gap)


def _addition_row(a: Addition) -> tuple[str, ...]:
    if a.why == "weight_too_large":
        return a.format, "-", "-", "-", "-", VERDICTS[a.why]
    verdict = f"kept: {rough(a.moved, 5)}" if a.why == "kept" else VERDICTS[a.why]
    return a.format, fitted(a.weight), rough(a.update + 0.0, 4), rough(a.half_gap), fitted(a.result), verdict


# -- 2: the cures -----------------------------------------------------------------------------------------------------


def _cures(found: LostUpdates) -> Iterator[Part | str]:
    """The ends of w after all steps, by every method in every format."""
    question = found.question
    yield Heading(2, f"The cures: w = {short(question.weight)}, and δ is added {question.steps:,} times")
    columns = [name for update in found.updates for name in (f">δ = {fitted(update, 7)}", ">arrived")]
    exact = [cell for value in found.exact for cell in (fitted(value), "100 %")]
    rows, last = [("exact", "", *exact)], None
    for method, fmt in dict.fromkeys((outcome.method, outcome.format) for outcome in found.outcomes):
        cells = [cell for update in found.updates for cell in _outcome_cells(found, method, fmt, update)]
        rows.append((METHODS[method] if method != last else "", fmt, *cells))
        last = method
    yield marked_table("", "", *columns, rows=rows)
    yield ""
    yield from _cure_notes(found)


def _outcome_cells(found: LostUpdates, method: Method, fmt: str, update: float) -> tuple[str, str]:
    outcome = found.outcome(method, fmt, update)
    if outcome.share == 0:
        return fitted(outcome.result), "0 %" + "*" * _waits(outcome)
    if not math.isfinite(outcome.share):
        return rough(outcome.result), "-"
    if outcome.standard_error is None:
        return fitted(outcome.result), percent(outcome.share)
    error = outcome.standard_error / abs(update * found.question.steps)
    share = f"{100 * outcome.share:.0f}±{100 * error:.0f} %" if error < 9.5 else "noise"
    return fitted(round(outcome.result, 7), 9), share


def _waits(outcome: Outcome) -> bool:
    """True when w has not moved only because Kahan's remainder is not yet half a gap: nothing is lost."""
    return outcome.share == 0 and bool(outcome.remainder) and not _is_stuck(outcome)


def _is_stuck(outcome: Outcome) -> bool:
    """True when Kahan's remainder has grown until the update is lost in it, as it was in w."""
    return outcome.share == 0 and (outcome.remainder_half_gap or 0.0) > abs(outcome.update) and bool(outcome.remainder)


def _cure_notes(found: LostUpdates) -> Iterator[str]:
    """Words for the methods, and for what the table shows of these numbers."""
    first = found.addition("fp32")
    gaps = abs(first.moved) / (2 * first.half_gap)
    yield "Arrived: how far w has moved, beside how far it should have moved."
    yield "[bold]fp32 master[/]: w is kept in fp32, and the format gets a rounded copy of it."
    if 0 < gaps < 1000:
        yield f"  fp32 has gaps too: the first step moves {gaps:g} of them, that is {rough(first.moved, 6)}."
    yield "[bold]Kahan[/]: what an addition loses is kept in a remainder, and added the next time."
    if any(map(_waits, found.outcomes)):
        yield "  * Nothing is lost: w moves as soon as the remainder reaches half a gap."
    for outcome in filter(_is_stuck, found.outcomes):
        yield (f"  {outcome.format}, δ = {rough(outcome.update, 5)}: stuck, when the remainder is "
               f"{rough(outcome.remainder or 0)} (half gap {rough(outcome.remainder_half_gap or 0)}).")
    yield "[bold]Stochastic rounding[/]: up or down by chance, to the nearer number more often."
    yield "  Right on average, if δ is in fp32. This is the mean (and its uncertainty) of"
    yield f"  {len(found.seeds)} runs, with the seeds {found.seeds[0]} to {found.seeds[-1]}."
    for update in found.updates:
        outcome = found.outcome("stochastic", found.question.format, update)
        yield (f"  {outcome.format}, δ = {fitted(update, 9)}: {rough(outcome.moves)} jumps in a run; "
               f"results from {rough(outcome.lowest or 0.0, 7)} to {rough(outcome.highest or 0.0, 7)}.")
    if _is_stuck(found.outcome("kahan", "bf16", found.question.update)):
        ratio = rough(_gap_ratio(found))
        yield f"[bold]bf16 is no cure[/]: it reaches further than fp16, with gaps {ratio} times as large."


def _gap_ratio(found: LostUpdates) -> float:
    """bf16's gaps beside fp16's."""
    gaps = {row.format: row.gap_at_one for row in found.format_facts}
    return gaps["bf16"] / gaps["fp16"]


# -- 3 to 6: the sizes of updates, of averages, and of the formats' smallest steps ------------------------------------


def _verdict(lost: bool, otherwise: str = "kept") -> str:
    """``lost`` in red, or what is so otherwise."""
    return "[red]lost[/]" if lost else otherwise


def _popular(found: LostUpdates) -> Iterator[Part | str]:
    """The sentence that fp32 keeps what fp16 loses, for several weights."""
    update = short(POPULAR_UPDATE)
    yield Heading(3, f'"In fp32 the value will change"? (lr·g = {POPULAR_LR:g} · {POPULAR_GRADIENT:g} = {update})')
    yield marked_table(">w", ">gap below", f"w - {update}", ">gap above", f"w + {update}", rows=(
        (short(s.weight), rough(s.gap_below), _verdict(s.down_lost), rough(s.gap_above), _verdict(s.up_lost))
        for s in found.survivors))
    yield f"All in fp32. The largest w at which + {update} changes anything: {short(found.popular_limit)}."


def _sizes(found: LostUpdates) -> Iterator[Part | str]:
    """SGD's update beside Adam's, and the learning rates below which Adam's is lost."""
    fmt, weight = found.question.format, rough(found.question.weight, 6)
    yield Heading(4, f"SGD's update depends on g. Adam's does not. (lr = {POPULAR_LR:g}, w = {weight})")
    yield marked_table(">g", ">SGD: lr·g", f"w in {fmt}", ">Adam", f"w in {fmt}", rows=(
        (rough(s.gradient), rough(s.sgd_update), _verdict(s.sgd_lost, fitted(s.sgd_result)), rough(s.adam_update),
         _verdict(s.adam_lost, fitted(s.adam_result))) for s in found.first_steps))
    yield "What is lost in 3 is SGD's update. Adam's first is about lr, whatever g is:"
    yield f"lr·g/(|g| + ε), with ε = {EPSILON:g}."
    yield ""
    yield f"So lr can be too small: Adam's first update is lost at w = {weight} up to"
    limits = {(t.format, t.direction): rough(t.lost_up_to) for t in found.thresholds}
    yield marked_table("format", ">lr, downwards", ">lr, upwards", rows=(
        (name, limits[name, "down"], limits[name, "up"]) for name in dict.fromkeys(name for name, _ in limits)))
    yield "Found by bisection, each question a real step of Adam."


def _moments(found: LostUpdates) -> Iterator[Part | str]:
    """Adam's averages in few bits, for a gradient that never changes."""
    yield Heading(5, f"Adam's m and v in few bits, with g = {MOMENT_GRADIENT:g} in every step")
    at = {(row.format, row.step): row for row in found.moments}
    formats, steps = list(dict.fromkeys(fmt for fmt, _ in at)), list(dict.fromkeys(step for _, step in at))
    columns = [name for fmt in formats for name in (f">{fmt}: v", ">update")]
    yield marked_table(">step", *columns, rows=[
        (f"{step:,}", *(cell for fmt in formats for cell in (percent(at[fmt, step].v_share),
                                                             rough(at[fmt, step].update) + " lr")))
        for step in steps])
    yield "v beside what it would be without rounding. The update should always be 1 lr."
    for fmt in formats:
        first, before, last = (at[fmt, step] for step in (steps[0], *steps[-2:]))
        if first.v == 0:
            smallest = (1 - Adam().beta2) * MOMENT_GRADIENT**2
            yield f"{fmt}: the first (1 - β2)·g², {rough(smallest)}, becomes 0; Adam then divides by ε alone."
        elif last.v == before.v:
            yield f"{fmt}: v is stuck at {rough(last.v)}: what a step adds is below half a gap of that."
    arrived = ", ".join(f"{fmt} {percent(at[fmt, steps[-1]].m_share)}" for fmt in formats if fmt != "fp32")
    yield f"m forgets faster: a step adds more, and it arrives ({arrived})."


def _formats(found: LostUpdates) -> Iterator[Part | str]:
    """The formats' smallest steps and numbers, and two popular sentences about them."""
    yield Heading(6, "The formats")
    yield marked_table("format", ">mantissa", ">gap at 1", ">normal from", ">smallest", ">0 up to", ">largest", rows=(
        (f.format, str(f.mantissa_bits), rough(f.gap_at_one), rough(f.smallest_normal), rough(f.smallest_subnormal),
         rough(f.zero_up_to), rough(f.largest, 5)) for f in found.format_facts))
    yield "Below 'normal from' the gaps stay the same: numbers there have fewer bits."
    yield ""
    yield f'"bf16\'s mantissa is similar to fp16\'s": its gaps are {_gap_ratio(found):g} times as large.'
    zero_up_to = {f.format: f.zero_up_to for f in found.format_facts}["fp16"]
    yield f'"Gradients below 6e-05 underflow to 0 in fp16": only up to {rough(zero_up_to)}.'
    yield "   ".join(f"{u.value:g} → {rough(u.stored, 5)}" for u in found.underflows)
