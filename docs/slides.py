"""Makes slides of each lecture of ``docs/lectures.md``, in reveal.js through nbconvert: pictures inside, answers apart.

Usage: ``python docs/slides.py FOLDER``. The pages load reveal.js, and require.js for it, from the network; ``--reveal
URL`` and ``--require URL`` name other places, as folders beside the pages, of a lecture hall without a network. Where
neither is there, a page says so, and each answer is shown by a click.
"""

import argparse
import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import nbformat
from nbformat import v4

DOCS = Path(__file__).parent
LECTURE = re.compile(r"^## (Lecture \d: .+)$", re.M)
PICTURE = re.compile(r"!\[([^]]+)\]\(([^)]+\.svg)\)")
LINK = re.compile(r"\[([^]]+)\]\((?!http)[^)]+\)")
PART = re.compile(r"^### (.+) \((\d+) min\)$", re.M)

# Until reveal.js is ready no answer shows. If it cannot be loaded, each answer is folded under a line to click on.
WITHOUT_REVEAL = """
<style>
.reveal:not(.ready) .notes, .reveal:not(.ready, .alone) .fragment { display: none }
.reveal.alone { max-width: 60em; margin: auto; font-size: 20px }
.reveal.alone .missing { padding: 1em; border: 2px solid #d55e00 }
</style>
<script>
function withoutReveal() {
  const page = document.querySelector(".reveal:not(.alone)"), said = document.createElement("p");
  if (!page) return;
  page.classList.add("alone");
  said.className = "missing";
  said.textContent = "reveal.js, which makes slides of this page, could not be loaded. Open the page with a network, "
    + "or put reveal.js and require.js beside it, and name them: docs/slides.py FOLDER --reveal URL --require URL. "
    + "Until then, click on an answer to show it.";
  page.prepend(said);
  for (const answer of page.querySelectorAll(".fragment")) {
    const folded = document.createElement("details"), line = document.createElement("summary");
    line.textContent = "Answer";
    folded.append(line, ...answer.childNodes);
    answer.append(folded);
  }
}
addEventListener("load", () => window.require || withoutReveal());
addEventListener("error", event => event.target.dataset?.requiremodule && withoutReveal(), true);
</script>
"""


@dataclass(frozen=True)
class Part:
    """One slide: its title, its minutes, what it shows, and the answer, which comes with the next key."""

    title: str
    minutes: int
    shown: str
    answer: str


@dataclass(frozen=True)
class Lecture:
    """A lecture: its title, what a student learns, and its parts in order."""

    title: str
    aim: str
    parts: tuple[Part, ...]


def lectures(text: str) -> Iterator[Lecture]:
    """The lectures of the text. Raises ValueError for a part without a question or an answer."""
    titles = list(LECTURE.finditer(text))
    for here in titles:
        body = text[here.end():].partition("\n## ")[0]
        headings = list(PART.finditer(body))
        ends = [*(heading.start() for heading in headings[1:]), len(body)]
        yield Lecture(here[1], body[:headings[0].start()].strip(), tuple(
            _part(heading[1], int(heading[2]), body[heading.end():end])
            for heading, end in zip(headings, ends, strict=True)))


def _part(title: str, minutes: int, body: str) -> Part:
    quoted = [line for line in body.splitlines() if line.startswith("> ")]
    if "**Ask:**" not in body or not quoted:
        raise ValueError(f"the part {title!r} needs a question, '**Ask:** ...', and its answer, '> ...'")
    shown = "\n".join(line for line in body.splitlines() if not line.startswith("> "))
    return Part(title, minutes, shown.strip(), " ".join(line.removeprefix("> ") for line in quoted))


def with_pictures(text: str) -> str:
    """The text with its pictures inside, and without links to files: a page of slides stands alone."""
    def picture(match: re.Match[str]) -> str:
        data = b64encode((DOCS / match[2]).read_bytes()).decode()
        return f'<img alt="{escape(match[1])}" src="data:image/svg+xml;base64,{data}" style="max-height: 50vh">'

    return LINK.sub(r"*\1*", PICTURE.sub(picture, text))


def slides(lecture: Lecture) -> nbformat.NotebookNode:
    """A notebook whose cells are slides, without code; pictures are those of the light figures."""
    def cell(kind: str, text: str) -> nbformat.NotebookNode:
        return v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": kind}})

    cells = [cell("slide", f"# {lecture.title}\n\n{lecture.aim}")]
    for part in lecture.parts:
        cells += [cell("slide", f"## {part.title}\n\n{with_pictures(part.shown)}"),
                  cell("fragment", f"**{part.answer}**"), cell("notes", f"{part.minutes} minutes")]
    return v4.new_notebook(cells=cells, metadata={"title": lecture.title})


def guarded(page: str) -> str:
    """The page, with what it does where reveal.js cannot be loaded."""
    return page.replace("</head>", f"{WITHOUT_REVEAL}</head>", 1)


def main() -> None:
    """Writes ``lecture_1.html`` and so on into the folder."""
    from nbconvert import SlidesExporter

    parser = argparse.ArgumentParser(description="Slides of docs/lectures.md, through nbconvert.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reveal", help="where reveal.js lies, if not where nbconvert says")
    parser.add_argument("--require", help="the address of require.js, if not where nbconvert says")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    named = {"reveal_url_prefix": asked.reveal, "require_js_url": asked.require}
    options = {name: place for name, place in named.items() if place}
    exporter = SlidesExporter(reveal_number="c/t", **options)
    for number, lecture in enumerate(lectures((DOCS / "lectures.md").read_text(encoding="utf-8")), 1):
        page, _ = exporter.from_notebook_node(slides(lecture))
        file = asked.folder / f"lecture_{number}.html"
        file.write_text(guarded(page), encoding="utf-8")
        print(f"{file}: {len(lecture.parts)} parts, {sum(part.minutes for part in lecture.parts)} minutes")


if __name__ == "__main__":
    main()
