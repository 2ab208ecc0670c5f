"""Prints what the lesson on lost updates says of sizes: of updates, of averages, and of the formats' smallest steps.

Legend: w a weight, lr the learning rate, g a gradient, m and v Adam's averages of g and g².
"""

from __future__ import annotations

from rich.console import Console

from zerosim.course.lost_updates.lesson import (
    MOMENT_GRADIENT,
    POPULAR_GRADIENT,
    POPULAR_LR,
    POPULAR_UPDATE,
    LostUpdates,
)
from zerosim.course.lost_updates.sizes import EPSILON
from zerosim.display.tables import fitted, heading, note, percent, plain_table, rough, short, verdict
from zerosim.optim import Adam


def print_popular(console: Console, found: LostUpdates) -> None:
    """The sentence that fp32 keeps what fp16 loses, for several weights."""
    update = short(POPULAR_UPDATE)
    heading(console, 3, f'"In fp32 the value will change"? (lr·g = {POPULAR_LR:g} · {POPULAR_GRADIENT:g} = {update})')
    rows = ((short(s.weight), rough(s.gap_below), verdict(s.down_lost), rough(s.gap_above), verdict(s.up_lost))
            for s in found.survivors)  # fmt: skip
    console.print(plain_table(">w", ">gap below", f"w - {update}", ">gap above", f"w + {update}", rows=rows))
    note(console, f"All in fp32. The largest w at which + {update} changes anything: {short(found.popular_limit)}.")


def print_sizes(console: Console, found: LostUpdates) -> None:
    """SGD's update beside Adam's, and the learning rates below which Adam's is lost."""
    fmt, weight = found.question.format, rough(found.question.weight, 6)
    heading(console, 4, f"SGD's update depends on g. Adam's does not. (lr = {POPULAR_LR:g}, w = {weight})")
    rows = ((rough(s.gradient), rough(s.sgd_update), verdict(s.sgd_lost, fitted(s.sgd_result)), rough(s.adam_update),
             verdict(s.adam_lost, fitted(s.adam_result))) for s in found.first_steps)  # fmt: skip
    console.print(plain_table(">g", ">SGD: lr·g", f"w in {fmt}", ">Adam", f"w in {fmt}", rows=rows))
    note(console, "What is lost in 3 is SGD's update. Adam's first is about lr, whatever g is:")
    note(console, f"lr·g/(|g| + ε), with ε = {EPSILON:g}.")
    console.print()
    note(console, f"So it is lr that can be too small. Adam's first update is lost at w = {weight} up to")
    formats = list(dict.fromkeys(threshold.format for threshold in found.thresholds))
    limits = {(t.format, t.direction): rough(t.lost_up_to) for t in found.thresholds}
    rows_of_limits = ((name, limits[name, "down"], limits[name, "up"]) for name in formats)
    console.print(plain_table("format", ">lr, downwards", ">lr, upwards", rows=rows_of_limits))
    note(console, "Found by bisection, each question a real step of Adam.")


def print_moments(console: Console, found: LostUpdates) -> None:
    """Adam's averages in few bits, for a gradient that never changes."""
    heading(console, 5, f"Adam's m and v in few bits, with g = {MOMENT_GRADIENT:g} in every step")
    formats = list(dict.fromkeys(row.format for row in found.moments))
    by_place = {(row.format, row.step): row for row in found.moments}
    steps = list(dict.fromkeys(row.step for row in found.moments))
    columns = [name for fmt in formats for name in (f">{fmt}: v", ">update")]
    rows = [(f"{step:,}", *(cell for fmt in formats for cell in (percent(by_place[fmt, step].v_share),
                                                                  rough(by_place[fmt, step].update) + " lr")))
            for step in steps]  # fmt: skip
    console.print(plain_table(">step", *columns, rows=rows))
    note(console, "v beside what it would be without rounding. The update should always be 1 lr.")
    for fmt in formats:
        first, before, last = (by_place[fmt, step] for step in (steps[0], *steps[-2:]))
        if first.v == 0:
            smallest = (1 - Adam().beta2) * MOMENT_GRADIENT**2
            note(console, f"{fmt}: the first (1 - β2)·g², {rough(smallest)}, becomes 0; Adam then divides by ε alone.")
        elif last.v == before.v:
            note(console, f"{fmt}: v is stuck at {rough(last.v)}: what a step adds is below half a gap of that.")
    arrived = ", ".join(f"{fmt} {percent(by_place[fmt, steps[-1]].m_share)}" for fmt in formats if fmt != "fp32")
    note(console, f"m forgets faster: a step adds more, and it arrives ({arrived}).")


def print_formats(console: Console, found: LostUpdates) -> None:
    """The formats' smallest steps and numbers, and two popular sentences about them."""
    heading(console, 6, "The formats")
    rows = ((f.format, str(f.mantissa_bits), rough(f.gap_at_one), rough(f.smallest_normal), rough(f.smallest_subnormal),
             rough(f.zero_up_to), rough(f.largest, 5)) for f in found.format_facts)  # fmt: skip
    console.print(plain_table("format", ">mantissa", ">gap at 1", ">normal from", ">smallest", ">0 up to", ">largest",
                              rows=rows))  # fmt: skip
    note(console, "Below 'normal from' the gaps stay the same: numbers there have fewer bits.")
    console.print()
    facts = {f.format: f for f in found.format_facts}
    ratio = facts["bf16"].gap_at_one / facts["fp16"].gap_at_one
    note(console, f'"bf16\'s mantissa is similar to fp16\'s": its gaps are {ratio:g} times as large.')
    note(console, f'"Gradients below 6e-05 underflow to 0 in fp16": only up to {rough(facts["fp16"].zero_up_to)}.')
    note(console, "   ".join(f"{u.value:g} → {rough(u.stored, 5)}" for u in found.underflows))
