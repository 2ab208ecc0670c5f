"""Tables without frames, and short ways to write numbers: what the printed lessons have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

RIGHT = ">"  # stands before the name of a column of numbers


def plain_table(*columns: str, rows: Iterable[tuple[RenderableType, ...]] = ()) -> Table:
    """A table without frames, indented by two; a column whose name begins with ``>`` is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", width=0)
    for column in columns:
        right = column.startswith(RIGHT)
        table.add_column(column.removeprefix(RIGHT), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row("", *row)
    return table


def short(value: float) -> str:
    """The shortest decimal of a number, without a useless ``.0``."""
    return str(value).removesuffix(".0")


def rough(value: float, digits: int = 3) -> str:
    """The first few digits of a number."""
    return f"{value:.{digits}g}"


def fitted(value: float, columns: int = 10) -> str:
    """As many digits of a number as these columns hold, and no more than nine, which tell any two fp32 apart."""
    texts = (rough(value, digits) for digits in range(9, 2, -1))
    return next((text for text in texts if len(text) <= columns), rough(value))


def percent(share: float) -> str:
    """``100.1 %``; whole percents without a useless ``.0``."""
    return f"{100 * share + 0.0:.1f}".removesuffix(".0") + " %"


def sum_text(a: float, b: float) -> str:
    """``1 + 1e-05``, or ``1 - 0.0003``."""
    return f"{short(a)} {'-' if b < 0 else '+'} {short(abs(b))}"


def title(console: Console, name: str, rest: str) -> None:
    """A bold name and the rest of the sentence, brackets and line breaks of file names as they are; a free line."""
    console.print(Text.assemble((name, "bold"), " ".join(rest.splitlines())), "", sep="\n", highlight=False)


def heading(console: Console, number: int, title: str) -> None:
    """``1. One addition``, and a free line."""
    console.print(f"[bold cyan]{number}. {title}[/]\n")


def note(console: Console, text: str) -> None:
    """A line of text under the tables, indented as they are, wherever the terminal is so narrow that it breaks."""
    indent = 2 + len(text) - len(text.lstrip())
    console.print(Padding(text.lstrip(), (0, 0, 0, indent), expand=False) if text else "")


def verdict(lost: bool, otherwise: str = "kept") -> str:
    """``lost`` in red, or what is so otherwise."""
    return "[red]lost[/]" if lost else otherwise


# -- Data as JSON can hold it ----------------------------------------------------------------------------------------

def without_infinities(value: Any) -> Any:
    """The same dicts and lists, with the texts "inf", "-inf" and "nan" for what is no finite number."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
