"""A view: all that is shown of a thing, before it is HTML or text; and records as data that JSON can hold.

It has a title and parts: headings, notes, tables, bars of bytes, and the cut of a vector. Every view is made once and
rendered twice, so that a notebook and a terminal say the same.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from zerosim.display.style import KIND_COLORS

RIGHT = ">"  # stands before the name of a column of numbers
MOST_ROWS = 24  # of a table, or lines of a strip: what follows is counted, and not shown


@dataclass(frozen=True, slots=True)
class Heading:
    """A section's number and title, between free lines."""

    number: int
    title: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across, with a title in it."""

    title: str


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text under the tables, in rich's markup; an empty text is a free line."""

    text: str
    indent: int = 2


@dataclass(frozen=True, slots=True)
class Table:
    """Columns whose name begins with ``>`` are numbers, set to the right.

    Of a ``marked`` table, as lessons have, cells are in rich's markup and all rows are shown; in others brackets are
    brackets, and of many rows the first are shown.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: bool = False
    indent: int = 2


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars on one scale: of each label, bytes by kind; ``colors`` by kind, in the order of the stack."""

    caption: str
    bars: tuple[tuple[str, Mapping[str, int]], ...]
    colors: Mapping[str, str]
    limit_nbytes: int | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of which anything is there, in the order of the stack."""
        return [kind for kind in self.colors if any(held.get(kind) for _, held in self.bars)]

    @property
    def scale_nbytes(self) -> int:
        """The bytes that a full bar stands for."""
        return max([sum(held.values()) for _, held in self.bars] + [self.limit_nbytes or 0])


@dataclass(frozen=True, slots=True)
class Line:
    """One stretch of a vector, cut among ranks: N+1 ``bounds`` from 0 on; from ``valid`` on it is padding."""

    name: str
    bounds: tuple[int, ...]
    valid: int


@dataclass(frozen=True, slots=True)
class Strip:
    """The cut of a vector, line by line, all lines on one scale of elements."""

    caption: str
    lines: tuple[Line, ...]


Part = Heading | Rule | TextLine | Table | Bars | Strip


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown of a thing: its name, the rest of the sentence (neither where there is no title), and parts."""

    title: str
    rest: str
    parts: tuple[Part, ...] = ()


def parts(*sections: Iterable[Part | str]) -> tuple[Part, ...]:
    """The parts of a lesson's sections, in order: a text alone is a line under the tables, an empty one a free line."""
    return tuple(TextLine(part) if isinstance(part, str) else part for section in sections for part in section)


def marked_table(*columns: str, rows: Iterable[Sequence[str]], caption: str = "", indent: int = 2) -> Table:
    """A table of a lesson: no caption, cells in rich's markup."""
    return Table(caption, columns, tuple(map(tuple, rows)), marked=True, indent=indent)


def memory_bars(caption: str, bars: Mapping[str, Mapping[str, int]], limit_nbytes: int | None = None) -> Bars:
    """Bars of kinds of memory."""
    return Bars(caption, tuple(bars.items()), KIND_COLORS, limit_nbytes)


def shortened(rows: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """The first rows, and one that counts the others."""
    if len(rows) <= MOST_ROWS:
        return rows
    return (*rows[:MOST_ROWS - 1], (f"and {len(rows) - MOST_ROWS + 1:,} more rows", *[""] * (len(rows[0]) - 1)))


def words(kind: str) -> str:
    """``optimizer_state`` as one reads it."""
    return kind.replace("_", " ")


# -- as data -----------------------------------------------------------------------------------------------------------

def plain_record(value: Any) -> dict[str, Any]:
    """A record, or a mapping of names, as `plain` has it."""
    found: dict[str, Any] = plain(value)
    return found


def plain(value: Any) -> Any:
    """The same value of dicts, lists and numbers alone: records by their fields, and the texts "inf", "-inf" and "nan"
    for what is no finite number, since JSON has none of these."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
