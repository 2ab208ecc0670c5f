"""A view as HTML: escaped, without scripts or anything from elsewhere, in the page's own ink, light or dark.

Legend: lengths of the drawings are CSS pixels.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise, zip_longest
from types import MappingProxyType

from rich.text import Text

from zerosim.display.style import ink_on, rank_color
from zerosim.display.views import (
    MOST_ROWS,
    RIGHT,
    Bars,
    Heading,
    Line,
    Part,
    Rule,
    Strip,
    Table,
    TextLine,
    View,
    shortened,
    words,
)
from zerosim.numerics.units import bytes_text

STYLE = """<style>
.zs { color: inherit; font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.zs table { border-collapse: collapse; margin: 4px 0 10px; }
.zs caption { caption-side: top; text-align: left; font-weight: 600; padding: 4px 0; color: inherit; }
.zs th, .zs td { padding: 2px 12px 2px 0; text-align: left; border: 0; vertical-align: top; background: none; }
.zs thead th { border-bottom: 1px solid rgba(127, 127, 127, 0.6); }
.zs .n { text-align: right; font-variant-numeric: tabular-nums; }
.zs svg { display: block; max-width: 100%; height: auto; margin: 2px 0 10px; }
.zs svg text { fill: currentColor; font: 13px system-ui, sans-serif; }
.zs p { margin: 2px 0 6px; }
</style>"""
FORBIDS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
STRONG = ("bold", "red")  # of rich's styles, those that lessons use
WIDTH, LABEL, VALUE, ROW, BAR = 720, 120, 100, 24, 16
HATCH = ('<pattern id="{id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
         '<rect width="6" height="6" fill="rgba(127,127,127,0.15)"/>'
         '<line x1="0" y1="0" x2="0" y2="6" stroke="currentColor" stroke-opacity="0.6" stroke-width="2"/></pattern>')


def as_html(view: View) -> str:
    """The view as one ``<div>`` with its own style."""
    body = "".join(part_html(part) for part in view.parts)
    title = f"<p><strong>{escape(view.title)}</strong>{escape(view.rest)}</p>" if view.title else ""
    return f'{STYLE}<div class="zs">{title}{body}</div>'


def page_html(title: str, name: str, body: str, colors: Mapping[str, str] = MappingProxyType({})) -> str:
    """A whole page: its title above the body, and the style and script of this name, which stand beside this module.

    It forbids its browser to ask for anything. ``colors`` are custom properties for the style, as the ink.
    """
    css, script = (files("zerosim.display").joinpath(f"{name}.{kind}").read_text(encoding="utf-8")
                   for kind in ("css", "js"))
    root, title = ";".join(f"--{name}:{color}" for name, color in colors.items()), escape(title)
    root = root and f' style="{root}"'
    return (f'<!doctype html>\n<html lang="en"{root}>\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{FORBIDS}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}"
            f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n")


def part_html(part: Part) -> str:
    """A line of text, a table or a drawing with its caption."""
    match part:
        case Heading():
            return f"<p><strong>{part.number}. {marked_html(part.title)}</strong></p>"
        case Rule():
            return f"<hr><p>{marked_html(part.title)}</p>"
        case TextLine():
            return f"<p>{marked_html(part.text)}</p>" if part.text else ""
        case Table():
            return table_html(part)
        case Bars():
            return bars_html(part)
        case Strip():
            return strip_html(part)


def marked_html(text: str) -> str:
    """Rich's markup as HTML: what is bold or red in a terminal is strong here."""
    found = Text.from_markup(text)
    edges = sorted({0, len(found), *(edge for span in found.spans for edge in (span.start, span.end))})
    pieces = []
    for low, high in pairwise(edges):
        piece = escape(found.plain[low:high])
        strong = any(span.start <= low < span.end and str(span.style) in STRONG for span in found.spans)
        pieces.append(f"<strong>{piece}</strong>" if strong else piece)
    return "".join(pieces)


def table_html(table: Table, *, attributes: Sequence[str] = (), all_rows: bool = False) -> str:
    """A table whose first column heads its rows. ``attributes``, one for each row, stand in its ``<tr>``."""
    def cell(tag: str, number: int, text: str, scope: str = "") -> str:
        right = ' class="n"' if table.columns[number].startswith(RIGHT) else ""
        content = marked_html(text) if table.marked else escape(text)
        return f"<{tag}{right}{scope}>{content}</{tag}>"

    head = "".join(cell("th", at, name.removeprefix(RIGHT), ' scope="col"') for at, name in enumerate(table.columns))
    shown = table.rows if all_rows or table.marked else shortened(table.rows, "rows")
    rows = "".join(f"<tr{mark}>" + "".join(cell("th" if at == 0 else "td", at, text, ' scope="row"' if at == 0 else "")
                                           for at, text in enumerate(row)) + "</tr>"
                   for mark, row in zip_longest(attributes, shown,
                                                fillvalue=""))
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return (f"<table>{caption}<thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>")


def image_html(image: bytes, kind: str, words: str, style: str = ' style="max-width:100%"') -> str:
    """A picture, with a text alternative, in an ``<img>`` of its own, whose ids meet no others."""
    data = b64encode(image).decode()
    return f'<img{style} alt="{escape(words, quote=True)}" src="data:image/{kind};base64,{data}">'


# -- drawings ---------------------------------------------------------------------------------------------------------

def bars_html(bars: Bars) -> str:
    """Stacked bars, their sums beside them, and what the colors mean."""
    shown = bars.bars[:MOST_ROWS]
    scale, width = max(1, bars.scale_nbytes), WIDTH - LABEL - VALUE
    parts, said, caption = [], [], bars.caption
    for row, (label, held) in enumerate(shown):
        y, x, total = row * ROW, float(LABEL), sum(held.values())
        parts.append(f'<text x="0" y="{y + 14}">{escape(label)}</text>')
        for kind in bars.kinds:
            if held.get(kind):
                long = width * held[kind] / scale
                parts.append(f'<rect x="{x:.2f}" y="{y}" width="{long:.2f}" height="{BAR}" fill="{bars.colors[kind]}">'
                             f"<title>{escape(f'{label}: {words(kind)} {held[kind]:,} bytes')}</title></rect>")
                x += long
        parts.append(f'<text x="{WIDTH}" y="{y + 13}" text-anchor="end">{bytes_text(total)}</text>')
        said.append(f"{label} {total:,} bytes")
    height = len(shown) * ROW
    if bars.limit_nbytes:
        at = LABEL + width * bars.limit_nbytes / scale
        parts.append(f'<line x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="{height - 4}" stroke="currentColor" '
                     'stroke-dasharray="4 3" stroke-width="2"/>')
        caption = f"{bars.caption} (dashed: the capacity, {bytes_text(bars.limit_nbytes)})"
        said.append(f"the dashed line is the capacity, {bars.limit_nbytes:,} bytes")
    parts += _legend({words(kind): bars.colors[kind] for kind in bars.kinds}, height + 6)
    rows = -(-len(bars.kinds) // IN_A_ROW)
    return _svg(caption, "; ".join(said), "".join(parts), height + 10 + 20 * rows)


IN_A_ROW = 4  # entries of a legend
MANY, FEW_LINES = 65, 4  # ranks of which so many make a page heavy, and the lines that are drawn of them


def _legend(colors: dict[str, str], top: float) -> Iterator[str]:
    for number, (name, color) in enumerate(colors.items()):
        row, column = divmod(number, IN_A_ROW)
        x, y = column * WIDTH / IN_A_ROW, top + 20 * row
        yield f'<rect x="{x:.0f}" y="{y:.0f}" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{x + 17:.0f}" y="{y + 11:.0f}">{escape(name)}</text>'


def strip_html(strip: Strip) -> str:
    """One line for each stretch of the vector, a cell for each owner, padding hatched."""
    many = any(len(line.bounds) > MANY for line in strip.lines)
    lines = strip.lines[:FEW_LINES if many else MOST_ROWS]
    longest = max((line.bounds[-1] for line in lines), default=1) or 1
    parts: list[str] = []
    hatch = "zs-padding"
    for row, line in enumerate(lines):
        parts += _line(line, row * ROW, (WIDTH - LABEL - VALUE) / longest, hatch)
    said = "; ".join(f"{line.name}: " + (f"cut among {len(line.bounds) - 1} ranks" if many else ", ".join(
        f"rank {rank} has {high - low}" for rank, (low, high) in enumerate(pairwise(line.bounds))))
        + f", {line.bounds[-1] - line.valid} are padding" for line in lines)
    defs = f"<defs>{HATCH.format(id=hatch)}</defs>"
    more = len(strip.lines) - len(lines)
    caption = strip.caption + (f" (and {more} more)" if more else "")
    return _svg(caption, said, defs + "".join(parts), len(lines) * ROW)


def _line(line: Line, y: int, scale: float, hatch: str) -> Iterator[str]:
    yield f'<text x="0" y="{y + 14}">{escape(line.name)}</text>'
    for rank, (low, high) in enumerate(pairwise(line.bounds)):
        x, width, color = LABEL + low * scale, (high - low) * scale, rank_color(rank)
        if high > low:
            yield (f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR + 2}" fill="{color}" '
                   f'stroke="rgba(127,127,127,0.9)" stroke-width="0.5"><title>rank {rank}: elements {low} to {high}'
                   "</title></rect>")
        if width > 14 + 7 * len(str(rank)):
            yield (f'<text x="{x + width / 2:.2f}" y="{y + 14}" text-anchor="middle" style="fill:{ink_on(color)}">'
                   f"{rank}</text>")
    if line.valid < line.bounds[-1]:
        yield (f'<rect x="{LABEL + line.valid * scale:.2f}" y="{y}" fill="url(#{hatch})" height="{BAR + 2}" '
               f'width="{(line.bounds[-1] - line.valid) * scale:.2f}"/>')
    yield f'<text x="{LABEL + line.bounds[-1] * scale + 6:.2f}" y="{y + 14}">{line.bounds[-1]:,}</text>'


def _svg(caption: str, said: str, content: str, height: float) -> str:
    words = escape(f"{caption}. {said}.", quote=True)
    return (f"<p><strong>{escape(caption)}</strong></p><svg role=\"img\" aria-label=\"{words}\" width=\"{WIDTH}\" "
            f'height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}">{content}</svg>')
