"""A view as text for a terminal, by rich: tables, and bars of blocks in the colors of the figures."""

from bisect import bisect_right
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from zerosim.display.drawing import ink_on, rank_color
from zerosim.display.tables import plain_table
from zerosim.display.views import MOST_ROWS, Bars, Part, Strip, Table, View, shortened, words
from zerosim.numerics.units import bytes_text

COLUMNS = 40  # of a full bar
FULL, PADDING = "█", "░"


def as_text(view: View) -> Group:
    """The view as something that rich prints."""
    return Group(Text.assemble((view.title, "bold"), view.rest), *(line for part in view.parts for line in _part(part)))


def _part(part: Part) -> Iterator[RenderableType]:
    yield Text(f"\n{part.caption}", "bold")
    match part:
        case Table():
            yield plain_table(*part.columns, rows=[tuple(map(_literal, row)) for row in shortened(part.rows, "rows")])
        case Bars():
            yield from _bars(part)
        case Strip():
            yield from _strip(part)


def _literal(text: str) -> Text:
    """Brackets in a name are no markup."""
    return Text(text)


def _bars(bars: Bars) -> Iterator[RenderableType]:
    scale, rows = max(1, bars.scale_nbytes), []
    for label, held in bars.bars[:MOST_ROWS]:
        bar, done, shown = Text(), 0, 0
        for kind in bars.kinds:
            done += held.get(kind, 0)
            columns = round(COLUMNS * done / scale) - shown  # of the running sum, so that rounding never adds up
            bar.append(FULL * columns, bars.colors[kind])
            shown += columns
        rows.append((_literal(label), Text(bytes_text(sum(held.values()))), bar))
    yield plain_table("", ">held", "", rows=rows)
    legend = Text("  ")
    for kind in bars.kinds:
        legend.append(FULL, bars.colors[kind]).append(f" {words(kind)}  ")
    yield legend
    if bars.limit_nbytes:
        yield Text(f"  The capacity is {bars.limit_nbytes:,} bytes.")


def _strip(strip: Strip) -> Iterator[RenderableType]:
    longest, rows = max((line.bounds[-1] for line in strip.lines), default=1) or 1, []
    for line in strip.lines[:MOST_ROWS]:
        columns = max(1, round(COLUMNS * line.bounds[-1] / longest))
        cells = Text()
        for at in range(columns):
            element = at * line.bounds[-1] / columns
            owner = bisect_right(line.bounds, element, hi=len(line.bounds) - 1) - 1
            color = rank_color(owner)
            cells.append(PADDING if element >= line.valid else str(owner % 10), f"{ink_on(color)} on {color}")
        rows.append((_literal(line.name), Text(f"{line.bounds[-1]:,}"), cells))
    yield plain_table("", ">elements", "", rows=rows)
    if len(strip.lines) > MOST_ROWS:
        yield Text(f"  and {len(strip.lines) - MOST_ROWS} more")
