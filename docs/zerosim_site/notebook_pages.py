"""Executed notebooks as pages: what they say, their code and what it showed, none of it executed again."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from zerosim_site.page import ROOT, Page, fenced, lists_apart
from zerosim_site.readme_pages import heading

FOLDER = "notebooks"
SECTION = "Notebooks"
IDEA = re.compile(r"\*\*The idea\.\*\*\s+(.*?)(?:\n\s*\n|\Z)", re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
PICTURE = "image/png"
Draw = Callable[[str], str]


def notebooks() -> list[Path]:
    """The executed copies: those with a number in their order, then the others."""
    found = (ROOT / FOLDER).glob("*.ipynb")
    return sorted(found, key=lambda path: (not path.name[0].isdigit(), path.name))


def text_of(path: Path) -> Path:
    """The text of which an executed copy was made."""
    return path.parent / "texts" / f"{path.stem}.py"


def notebook_pages(draw: Draw) -> list[Page]:
    """The list of notebooks, and a page for each; ``draw`` turns the formulas of a text into what a browser shows."""
    pages = [notebook_page(path, draw) for path in notebooks()]
    return [_contents(pages, draw), *pages]


def notebook_page(path: Path, draw: Draw) -> Page:
    """One executed notebook. Raises ValueError for one that was not executed or that failed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = heading("".join(cells[0]["source"]), path.name)
    parts = [part for number, cell in enumerate(cells) for part in _cell(path.stem, number, cell, draw)]
    parts.insert(1, f"[Executed notebook]({path.name}){{ download }} · [its text](texts/{path.stem}.py){{ download }}")
    return Page(f"{FOLDER}/{path.stem}.md", title, "\n\n".join(parts) + "\n", f"{FOLDER}/{path.name}", SECTION)


def pictures(path: Path) -> dict[str, bytes]:
    """The pictures that a notebook shows, by their place in the site."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {f"{FOLDER}/{_picture_name(path.stem, number, at)}": base64.b64decode("".join(output["data"][PICTURE]))
            for number, cell in enumerate(cells) for at, output in enumerate(cell.get("outputs", ()))
            if _kind(output) == PICTURE}


def _contents(pages: list[Page], draw: Draw) -> Page:
    """The list, each with its idea's first sentences."""
    lines = ["# Notebooks", "Each has one idea, a prediction that you make first, code, a picture, and a proof: what "
             "was done by hand equals what the package does, bit for bit. They build on each other; begin with the "
             "first. Each page is the executed copy of a text that `make notebooks` runs."]
    for page in pages:
        lines += [f"## [{page.title}]({Path(page.uri).name})", _idea(page.text)]
    return Page(f"{FOLDER}/index.md", SECTION, "\n\n".join(lines) + "\n", f"{FOLDER}/index.md", SECTION)


def _idea(text: str) -> str:
    found = IDEA.search(text)
    if found:
        return found[1]
    return next(part for part in text.split("\n\n")[2:] if part.strip() and not part.startswith(("#", "```")))


def _cell(stem: str, number: int, cell: dict[str, Any], draw: Draw) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        first, newline, rest = source.partition("\n")
        if number == 0 and first.startswith("# "):
            yield first
            source = rest if newline else ""
        yield lists_apart(draw(source.replace("<details>", '<details markdown="1">')))
        return
    if source.strip() and cell["execution_count"] is None:
        raise ValueError(f"cell {number} of {stem} was not executed; run notebooks/execute.py")
    yield fenced(source, "python")
    for at, output in enumerate(cell["outputs"]):
        yield _output(stem, number, at, output)


def _output(stem: str, number: int, at: int, output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        raise ValueError(f"cell {number} of {stem} failed with {output['ename']}: {output['evalue']}")
    if output["output_type"] == "stream":
        return _printed("".join(output["text"]))
    data, kind = output["data"], _kind(output)
    if kind == "text/html":
        return f'<div class="shown" markdown="0">\n{"".join(data[kind])}\n</div>'
    if kind == PICTURE:
        words = " ".join("".join(data["text/plain"]).translate(str.maketrans("[]\"\n", "()' ")).split())
        return f"![{words}]({_picture_name(stem, number, at)}){{ .drawn }}"
    return _printed("".join(data["text/plain"]))


def _printed(text: str) -> str:
    return f'<pre class="printed">{escape(ESCAPES.sub("", text).rstrip(), quote=False)}</pre>'


def _kind(output: dict[str, Any]) -> str:
    """The richest form of an output that a page can show."""
    data = output.get("data", {})
    return next((kind for kind in ("text/html", PICTURE) if kind in data), "text/plain")


def _picture_name(stem: str, number: int, at: int) -> str:
    return f"{stem}_files/cell-{number:02d}-{at}.png"


def described(svg: str) -> tuple[str, str]:
    """The title and the description of an SVG, for people who do not see it; raises ValueError where one is missing."""
    found = [re.search(rf"<{tag}\b[^>]*>(.*?)</{tag}>", svg, re.DOTALL) for tag in ("title", "desc")]
    if None in found:
        raise ValueError("an SVG without a title and a description")
    title, words = (" ".join(match[1].split()) for match in found if match)
    return title, words
