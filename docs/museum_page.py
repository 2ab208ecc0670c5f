"""Writes ``docs/museum.md`` and its pictures in ``docs/assets``: ``python docs/museum_page.py``."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from zerosim.course import museum
from zerosim.course.museum import INVARIANTS, Story
from zerosim.course.museum.story import Panel
from zerosim.display.drawing import DARK, LIGHT
from zerosim.display.style import BLUE, VERMILLION, rough

DOCS = Path(__file__).parent
SHORT = re.compile(r";|(?<=Error):")  # ends what an invariant says first
WIDTH, TALL, LEFT, TOP, STEP = 640, 78, 66, 54, 122  # pixels: the page; a panel's bars, left and above; from one on
COLORS = {"healthy": BLUE, "with the bug": VERMILLION}
LOOKS = [f".page{{fill:{look.background}}}text{{fill:{look.ink}}}line{{stroke:{look.muted}}}" for look in (LIGHT, DARK)]
STYLE = f".title{{font-weight:bold;font-size:15px}}{LOOKS[0]}@media (prefers-color-scheme: dark){{{LOOKS[1]}}}"
HEAD = """# A museum of bugs

Silent bugs of real implementations of ZeRO, each made again as a patch of a few lines on zerosim's own functions.
Nothing is patched outside a block like this one, and in it only what the thread calls that opened it:

```python
import zerosim as zs

with zs.museum.exhibit("boundary_micro_batch") as exhibit:
    seen = zs.museum.observe(exhibit.setting)  # two steps of a small MLP, watched
    try:
        zs.museum.INVARIANTS["equals_one_device"](seen)
    except AssertionError as error:
        print(str(error).partition(";")[0])
```

```text
weights of rank 0 after step 1: 18 of 23 elements differ
```

`zerosim museum` lists them, `zerosim museum boundary_micro_batch` tells one. The bars are of the run as it should be,
and with the bug. Here are the bugs, and a few checks that find all of them:

| invariant | what holds | bugs |
|---|---|---|
"""


def page(stories: Iterable[Story]) -> str:
    """The page of these stories."""
    stories = list(stories)
    found_by = [story.exhibit.invariant for story in stories]
    rows = [f"| `{name}` | {one_line(check.__doc__)} | {found_by.count(name)} |" for name, check in INVARIANTS.items()]
    return HEAD + "\n".join([*rows, *map(section, stories)]) + "\n"


def section(story: Story) -> str:
    """One exhibit: where it was, what one saw, the picture, the patch, and what finds it."""
    one = story.exhibit
    links = [f"[{label(link)}]({link})" for link in one.threads]
    where = "; ".join(filter(None, (one.project, one.versions, one.date, ", ".join(links))))
    parts = [f"## {one.title}", f"`{one.name}`: {where}.", f"{one_line(one.seen)} {one_line(one.unread)}".strip(),
             f"![{one.title}: healthy beside the bug.](assets/museum_{one.name}.svg)", f"Here: {one_line(one.here)}",
             "```diff\n" + "\n".join(line for patch in one.patches for line in (patch.of, *patch.lines)) + "\n```",
             f"Found by `{one.invariant}`: {one_line(SHORT.split(story.message)[0])}."]
    return "\n" + "\n\n".join(parts)


def one_line(text: str | None) -> str:
    """The text in one line."""
    return " ".join((text or "").split())


def label(link: str) -> str:
    """``#7807`` of an issue or a pull request, else the file's name."""
    kind, last = link.split("/")[-2:]
    return f"#{last}" if kind in ("issues", "pull") else last


# -- the pictures ------------------------------------------------------------------------------------------------------

def picture(story: Story) -> str:
    """The picture: a pair of bars for each number, the healthy one first, in the colors of a light and of a dark
    page. A number that is none is a cross."""
    panels, height = story.panels, TOP + len(story.panels) * STEP
    parts = [text(12, 22, story.exhibit.title, "title")]
    for at, (words, color) in enumerate(COLORS.items()):
        parts += [f'<rect x="{LEFT + 90 * at}" y="33" width="11" height="11" fill="{color}"/>',
                  text(LEFT + 16 + 90 * at, 43, words)]
    for number, panel in enumerate(panels):
        parts += bars(panel, TOP + number * STEP)
    said = f"{story.exhibit.seen} {story.exhibit.here} Bars: {'; '.join(what for what, _, _ in panels)}."
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12">'
            f"<title>{escape(story.exhibit.title)}</title><desc>{escape(said)}</desc><style>{STYLE}</style>"
            '<rect class="page" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n")


def bars(panel: Panel, top: float) -> Iterator[str]:
    """One row of numbers, healthy beside the bug, below this edge."""
    what, *series = panel
    finite = [0.0, *(value for numbers in series for value in numbers if math.isfinite(value))]
    high, low, count = max(finite), min(finite), len(series[0])
    unit, slot = TALL / ((high - low) or 1), min(60.0, (WIDTH - LEFT - 16) / count)
    zero = top + 18 + high * unit
    yield text(LEFT, top + 10, what)
    yield f'<line x1="{LEFT}" x2="{LEFT + slot * count:.1f}" y1="{zero:.1f}" y2="{zero:.1f}"/>'
    for value in sorted({high, low} - {0.0}):
        yield text(LEFT - 6, zero - value * unit + 4, rough(value, 2 if abs(value) < 10 else 4), anchor="end")
    for row, (numbers, color) in enumerate(zip(series, COLORS.values(), strict=True)):
        places = [(LEFT + slot * (at + 0.12 + 0.38 * row), value) for at, value in enumerate(numbers)]
        shapes = (f"M{x:.1f} {zero:.1f}v{-value * unit:.1f}h{0.38 * slot:.1f}V{zero:.1f}z"
                  for x, value in places if math.isfinite(value))
        yield f'<path fill="{color}" d="{"".join(shapes)}"/>'
        yield from (text(x + 0.19 * slot, zero - 4, "×", anchor="middle") for x, value in places
                    if not math.isfinite(value))
    for at in range(0, count, max(1, count // 12)):
        yield text(LEFT + slot * (at + 0.5), top + TALL + 34, str(at), anchor="middle")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a point."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    told = [museum.show(name) for name in museum.exhibits()]
    (DOCS / "museum.md").write_text(page(told), encoding="utf-8")
    for story in told:
        (DOCS / f"assets/museum_{story.exhibit.name}.svg").write_text(picture(story), encoding="utf-8")
