"""A view as HTML: escaped, without scripts or anything from elsewhere, in the page's own ink, light or dark.

Legend: lengths of the drawings are CSS pixels.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise

from rich.text import Text

from zerosim.display import views
from zerosim.display.style import ink_on, rank_color
from zerosim.numerics.units import bytes_text

STYLE = """<style>
.zs { color: inherit; font: 14px/1.45 system-ui, sans-serif; overflow-x: auto; }
.zs table { border-collapse: collapse; margin: 4px 0 10px; }
.zs caption { caption-side: top; text-align: left; font-weight: 600; padding: 4px 0; color: inherit; }
.zs th, .zs td { padding: 2px 12px 2px 0; text-align: left; border: 0; vertical-align: top; background: none; }
.zs thead th { border-bottom: 1px solid rgba(127, 127, 127, 0.6); }
.zs .n { text-align: right; font-variant-numeric: tabular-nums; }
.zs p { margin: 2px 0 6px; }
</style>"""
FORBIDS = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
STRONG = ("bold", "red")  # of rich's styles, those that lessons use
WIDTH, LABEL, VALUE, ROW, BAR = 720, 120, 100, 24, 16
# Padding lies in its owner's color, under stripes of the page's ink.
HATCH = "opacity:0.5;background-image:repeating-linear-gradient(45deg,transparent 0 4px,currentColor 4px 6px)"


def as_html(view: views.View) -> str:
    """The view as one ``<div>`` with its own style."""
    body = "".join(part_html(part) for part in view.parts)
    title = f"<p><strong>{escape(view.title)}</strong>{escape(view.rest)}</p>" if view.title else ""
    return f'{STYLE}<div class="zs">{title}{body}</div>'


def page_html(title: str, scripts: Sequence[str], body: str) -> str:
    """A whole page: its title above the body, and the page's style, and scripts of these names, beside this module.

    It forbids its browser to ask for anything.
    """
    css, script, title = shipped("explore/page.css"), "\n".join(map(shipped, scripts)), escape(title)
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{FORBIDS}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}"
            f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n")


def shipped(name: str) -> str:
    """The text of a file that stands beside this module."""
    return files("zerosim.display").joinpath(name).read_text(encoding="utf-8")


def part_html(part: views.Part) -> str:
    """A line of text, a table or a drawing with its caption."""
    match part:
        case views.Heading():
            return f"<p><strong>{part.number}. {marked_html(part.title)}</strong></p>"
        case views.Rule():
            return f"<hr><p>{marked_html(part.title)}</p>"
        case views.TextLine():
            return f"<p>{marked_html(part.text)}</p>" if part.text else ""
        case views.Table():
            return table_html(part)
        case views.Bars():
            return bars_html(part)
        case views.Strip():
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


def table_html(table: views.Table, *, all_rows: bool = False) -> str:
    """A table whose first column heads its rows."""
    def cell(tag: str, number: int, text: str, scope: str = "") -> str:
        right = ' class="n"' if table.columns[number].startswith(views.RIGHT) else ""
        content = marked_html(text) if table.marked else escape(text)
        return f"<{tag}{right}{scope}>{content}</{tag}>"

    names = [name.removeprefix(views.RIGHT) for name in table.columns]
    head = "".join(cell("th", at, name, ' scope="col"') for at, name in enumerate(names))
    shown = table.rows if all_rows or table.marked else views.shortened(table.rows)
    rows = "".join("<tr>" + "".join(cell("th" if at == 0 else "td", at, text, ' scope="row"' if at == 0 else "")
                                    for at, text in enumerate(row)) + "</tr>" for row in shown)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return (f"<table>{caption}<thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table>")


# -- drawings ---------------------------------------------------------------------------------------------------------
# Of boxes, each with its own style and title: of a notebook that is not trusted JupyterLab shows neither an <svg> nor a
# <style>, and attributes of style it does.

def bars_html(bars: views.Bars) -> str:
    """Stacked bars, their sums beside them, and what the colors mean."""
    limit, scale, caption = bars.limit_nbytes, (WIDTH - LABEL - VALUE) / max(1, bars.scale_nbytes), bars.caption
    lines, said = [], []
    for label, held in bars.bars[:views.MOST_ROWS]:
        total = sum(held.values())
        boxes = [_box(scale * held[kind], bars.colors[kind], f"{label}: {views.words(kind)} {held[kind]:,} bytes")
                 for kind in bars.kinds if held.get(kind)]
        if limit:
            before = scale * (limit - total)
            boxes.append(f'<span style="display:inline-block;height:{ROW}px;margin-left:{before:.2f}px;'
                         'border-left:2px dashed;vertical-align:middle"></span>')
        after = 6 + max(0, scale * (total - limit)) if limit else 6
        boxes.append(f'<span style="margin-left:{after:.2f}px">{bytes_text(total)}</span>')
        lines.append(_name(label) + "".join(boxes))
        said.append(f"{label} {total:,} bytes")
    if limit:
        caption = f"{bars.caption} (dashed: the capacity, {bytes_text(limit)})"
        said.append(f"the dashed line is the capacity, {limit:,} bytes")
    legend = [f'{_box(BAR, bars.colors[kind])} {escape(views.words(kind))}' for kind in bars.kinds]
    rows = [" &#160; ".join(legend[at:at + IN_A_ROW]) for at in range(0, len(legend), IN_A_ROW)]
    return _drawn(caption, said, [*lines, *rows])


IN_A_ROW = 4  # entries of a legend
MANY, FEW_LINES = 65, 4  # ranks of which so many make a page heavy, and the lines that are drawn of them


def strip_html(strip: views.Strip) -> str:
    """One line for each stretch of the vector, a box for each owner, padding hatched."""
    many = any(len(line.bounds) > MANY for line in strip.lines)
    shown = strip.lines[:FEW_LINES if many else views.MOST_ROWS]
    longest = max((line.bounds[-1] for line in shown), default=1) or 1
    said = [f"{line.name}: " + (f"cut among {len(line.bounds) - 1} ranks" if many else ", ".join(
        f"rank {rank} has {high - low}" for rank, (low, high) in enumerate(pairwise(line.bounds))))
        + f", {line.bounds[-1] - line.valid} are padding" for line in shown]
    more = len(strip.lines) - len(shown)
    caption = strip.caption + (f" (and {more} more)" if more else "")
    return _drawn(caption, said, [_line(line, (WIDTH - LABEL - VALUE) / longest) for line in shown])


def _line(line: views.Line, scale: float) -> str:
    boxes = [_name(line.name)]
    for rank, (low, high) in enumerate(pairwise(line.bounds)):
        color, middle = rank_color(rank), min(max(low, line.valid), high)
        for start, stop, padding in ((low, middle, False), (middle, high, True)):
            if stop > start:
                width, title = (stop - start) * scale, f"rank {rank}: elements {start} to {stop}"
                text = str(rank) if start == low and width > 14 + 7 * len(str(rank)) else ""
                boxes.append(_box(width, color, title + ", padding" * padding, text, HATCH if padding else ""))
    return f'{"".join(boxes)} {line.bounds[-1]:,}'


def _name(text: str) -> str:
    return f'<span style="display:inline-block;width:{LABEL}px">{escape(text)}</span>'


def _box(width: float, color: str, title: str = "", text: str = "", more: str = "") -> str:
    """A box of this width in pixels and color, with words in a readable ink."""
    named = f' title="{escape(title, quote=True)}"' if title else ""
    ink = f";color:{ink_on(color)};text-align:center;line-height:{BAR}px" if text else ""
    return (f'<span{named} style="display:inline-block;width:{width:.2f}px;height:{BAR}px;vertical-align:middle;'
            f'background-color:{color}{ink}{";" * bool(more)}{more}">{text}</span>')


def _drawn(caption: str, said: Sequence[str], lines: Sequence[str]) -> str:
    """A drawing of lines, with its caption, and what it says in words for those who do not see it."""
    alternative = escape(f"{caption}. {'; '.join(said)}.", quote=True)
    body = "".join(f'<div style="height:{ROW}px;white-space:nowrap">{line}</div>' for line in lines)
    return f'<p><strong>{escape(caption)}</strong></p><div role="img" aria-label="{alternative}">{body}</div>'
