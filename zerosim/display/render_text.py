"""A view as text for a terminal, by rich: tables without frames, and bars of blocks in the colors of the figures."""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import rich.rule
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from zerosim.display import views
from zerosim.display.style import ink_on, rank_color
from zerosim.numerics.units import bytes_text

COLUMNS = 40  # of a full bar
UNBROKEN = 10_000  # columns
FULL, PADDING = "█", "░"


def as_text(view: views.View) -> Group:
    """The view as something that rich prints."""
    title = [Text.assemble((view.title, "bold"), view.rest)] if view.title else []
    return Group(*title, *(line for part in view.parts for line in _part(part)))


def in_lines(view: views.View) -> str:
    """The view as plain text, whose lines are never broken."""
    file = io.StringIO()
    console = Console(file=file, width=UNBROKEN, color_system=None, highlight=False, emoji=False, force_jupyter=False)
    console.print(as_text(view))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _part(part: views.Part) -> Iterator[RenderableType]:
    if isinstance(part, views.Table | views.Bars | views.Strip) and part.caption:
        yield Text(f"\n{part.caption}", "bold")
    match part:
        case views.Heading():
            yield Text.from_markup(f"\n[bold cyan]{part.number}. {part.title}[/]\n")
        case views.Rule():
            yield Text()
            yield rich.rule.Rule(Text.from_markup(part.title))
        case views.TextLine():
            yield indented(part)
        case views.Table():
            rows = part.rows if part.marked else views.shortened(part.rows)
            read = Text.from_markup if part.marked else Text
            yield plain_table(*part.columns, rows=[tuple(map(read, row)) for row in rows], indented=part.indent > 0)
        case views.Bars():
            yield from _bars(part)
        case views.Strip():
            yield from _strip(part)


def plain_table(*columns: str, rows: Iterable[tuple[RenderableType, ...]] = (), indented: bool = True) -> RichTable:
    """A table without frames, indented by two; a column whose name begins with ``>`` is set to the right. Where no
    column has a name there is no line for them."""
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold",
                      show_header=any(column.removeprefix(views.RIGHT) for column in columns))
    first = ("",) if indented else ()
    if indented:
        table.add_column("", width=0)
    for column in columns:
        right = column.startswith(views.RIGHT)
        table.add_column(column.removeprefix(views.RIGHT), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*first, *row)
    return table


def indented(line: views.TextLine) -> RenderableType:
    """The note, with its own leading blanks in front of every line where the terminal is so narrow that it breaks."""
    text = line.text.lstrip()
    indent = line.indent + len(line.text) - len(text)
    return Padding(_Note(Text.from_markup(text)), (0, 0, 0, indent), expand=False) if text else Text()


CHARACTER = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)|.")  # or the escape of one, as `text.readable` writes it


@dataclass(frozen=True, slots=True)
class _Note:
    """A text in which a word that is broken, since it is longer than a line, is broken beside escapes, never in one."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        breaks = list[int]()
        for word in re.finditer(r"\S+", self.text.plain):
            columns = 0
            for one in CHARACTER.finditer(self.text.plain, *word.span()) if len(word[0]) > options.max_width else ():
                columns += cell_len(one[0])
                if columns > options.max_width:
                    breaks.append(one.start())
                    columns = cell_len(one[0])
        yield Text("\n").join(self.text.divide(breaks))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)


def _bars(bars: views.Bars) -> Iterator[RenderableType]:
    scale, rows = max(1, bars.scale_nbytes), []
    for label, held in bars.bars[:views.MOST_ROWS]:
        bar, done, shown = Text(), 0, 0
        for kind in bars.kinds:
            done += held.get(kind, 0)
            columns = round(COLUMNS * done / scale) - shown  # of the running sum, so that rounding never adds up
            bar.append(FULL * columns, bars.colors[kind])
            shown += columns
        rows.append((Text(label), Text(bytes_text(sum(held.values()))), bar))
    yield plain_table("", ">held", "", rows=rows)
    legend = Text("  ")
    for kind in bars.kinds:
        legend.append(FULL, bars.colors[kind]).append(f" {views.words(kind)}  ")
    yield legend
    if bars.limit_nbytes:
        yield Text(f"  The capacity is {bars.limit_nbytes:,} bytes.")


def _strip(strip: views.Strip) -> Iterator[RenderableType]:
    longest, rows = max((line.bounds[-1] for line in strip.lines), default=1) or 1, []
    for line in strip.lines[:views.MOST_ROWS]:
        columns = max(1, round(COLUMNS * line.bounds[-1] / longest))
        cells = Text()
        for at in range(columns):
            element = at * line.bounds[-1] / columns
            owner = bisect_right(line.bounds, element, hi=len(line.bounds) - 1) - 1
            color = rank_color(owner)
            cells.append(PADDING if element >= line.valid else str(owner % 10), f"{ink_on(color)} on {color}")
        rows.append((Text(line.name), Text(f"{line.bounds[-1]:,}"), cells))
    yield plain_table("", ">elements", "", rows=rows)
    if len(strip.lines) > views.MOST_ROWS:
        yield Text(f"  and {len(strip.lines) - views.MOST_ROWS} more")
