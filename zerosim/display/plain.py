"""A view, or a record of the course, as data that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from zerosim.display.views import RIGHT, Bars, Heading, Part, Rule, Strip, Table, TextLine, View


def as_data(view: View) -> dict[str, Any]:
    """The view's title and its parts in order; texts without markup, numbers of tables as they are printed."""
    return {"title": view.title + view.rest,
            "parts": [_part(part) for part in view.parts if not isinstance(part, TextLine) or part.text]}


def _part(part: Part) -> dict[str, Any]:
    match part:
        case Heading() | Rule():
            return {"heading": _unmarked(part.title)}
        case TextLine():
            return {"text": _unmarked(part.text)}
        case Table():
            read = _unmarked if part.marked else str
            return {"table": part.caption, "columns": [name.removeprefix(RIGHT) for name in part.columns],
                    "rows": [[read(cell) for cell in row] for row in part.rows]}
        case Bars():
            return {"bars": part.caption, "nbytes": {label: dict(held) for label, held in part.bars},
                    "limit_nbytes": part.limit_nbytes}
        case Strip():
            return {"strip": part.caption, "lines": [plain(line) for line in part.lines]}


def _unmarked(text: str) -> str:
    return Text.from_markup(text).plain


def plain(value: Any) -> Any:
    """The same value of dicts, lists and numbers alone: records by their fields, and the texts "inf", "-inf" and "nan"
    for what is no finite number, since JSON has none of these."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
