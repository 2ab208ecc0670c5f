"""The story of an exhibit: what happened, the run healthy and with the bug, the check that finds it, and a picture."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from zerosim.course.museum.exhibit import Exhibit, exhibits, unmarked
from zerosim.course.museum.invariants import INVARIANTS, padding_is_never_read
from zerosim.course.museum.runs import Observed, observe
from zerosim.display.drawing import DARK, LIGHT
from zerosim.display.style import BLUE, VERMILLION, rough
from zerosim.display.views import RIGHT, Table, TextLine, View
from zerosim.shown import Shown

ROWS = 8  # of a table of numbers, at most
PANELS = 3  # of a picture, at most: that many ranks are drawn
SHORT = re.compile(r";|(?<=Error):")  # ends what an invariant says first
CHANGE = "what training added to each element"


@dataclass(frozen=True, slots=True)
class Panel:
    """Numbers of one rank, or of all: what they are, by what they are numbered, healthy and with the bug."""

    title: str
    by: str
    healthy: Sequence[float]
    bug: Sequence[float]


@dataclass(frozen=True)
class Story(Shown):
    """One exhibit, and what was seen of its runs. ``message`` is what the invariant says with the bug."""

    exhibit: Exhibit
    healthy: Observed
    bug: Observed
    message: str

    @property
    def panels(self) -> list[Panel]:
        """What the picture shows: the first numbers of the run in which the bug is seen."""
        right, wrong = self.healthy, self.bug
        if np.isnan(wrong.weights[0][0]).any():
            return [Panel("weights before the first step, rank 0", "element", right.weights[0][0].tolist(),
                          wrong.weights[0][0].tolist())]
        if right.resting != wrong.resting and wrong.resting:
            return [Panel("bytes at rest", "rank", right.resting, wrong.resting)]
        if right.saved and right.loaded:
            return [Panel("masters and moments that rank 0 loads", "element", right.loaded[0].tolist(),
                          wrong.loaded[0].tolist())]
        if self.exhibit.invariant == "sends_what_is_planned":
            return [Panel(name, "rank", one, other) for name, one, other in (
                ("bytes of gradients sent", right.gradient_nbytes, wrong.gradient_nbytes),
                ("collectives of gradients", right.collectives, wrong.collectives)) if one != other][:1]
        if right.warned and not wrong.warned and not wrong.error:
            return [Panel("warnings", "run", [len(right.warned)], [0])] if _same(right, wrong) else [
                *_changes(right, wrong)][:1]
        if self.exhibit.invariant == "all_skip_or_none":
            return [Panel(f"step taken (1) or skipped (0), rank {rank}", "step", *(
                [float(not result.skipped) for result in run.results[rank]] for run in (right, wrong)))
                for rank in range(right.setting.ranks)]
        return [*_changes(right, wrong)][:PANELS]

    def view(self) -> View:
        """The facts, the numbers side by side, and what the invariant says."""
        facts, check = self.exhibit.view(), INVARIANTS[self.exhibit.invariant]
        panel = self.panels[-1]
        rows = [(str(at), rough(one, 6), rough(other, 6)) for at, (one, other) in enumerate(
            zip(panel.healthy, panel.bug, strict=True)) if one != other]
        table = Table(f"{panel.title}, where it differs", (panel.by, RIGHT + "healthy", RIGHT + "with the bug"),
                      tuple(rows[:ROWS]))
        return View(facts.title, facts.rest, (
            *facts.parts, table, TextLine(""), TextLine(f"The invariant {check.__name__}:", 0),
            TextLine(unmarked(' '.join((check.__doc__ or '').split())), 2), TextLine("with the bug it says:", 0),
            TextLine(unmarked(self.message), 2)))

    def svg(self) -> str:
        """The picture: a pair of bars for each number, in a light and a dark page's colors."""
        return drawn(self.exhibit, self.panels)

    def _repr_svg_(self) -> str:
        return self.svg()

    def as_json(self) -> dict[str, Any]:
        """The facts, the message and the numbers of the picture; texts for what is no finite number."""
        return self.exhibit.as_json() | {"message": self.message, "panels": [
            {"title": panel.title, "by": panel.by, "healthy": list(map(_number, panel.healthy)),
             "bug": list(map(_number, panel.bug))} for panel in self.panels]}


def story_of(exhibit: Exhibit) -> Story:
    """Runs the exhibit's setting with the package as it is, and with the bug, and asks its invariant.

    Raises AssertionError where the healthy run does not pass it, and ValueError where the bug does.
    """
    check = INVARIANTS[exhibit.invariant]
    healthy = observe(exhibit.setting)
    check(healthy)
    with exhibit:
        bug = observe(exhibit.setting)
        try:
            check(bug)
        except AssertionError as error:
            if check is padding_is_never_read:  # the padding is shown that the check has filled
                bug = observe(exhibit.setting, debug=True)
            return Story(exhibit, healthy, bug, str(error))
    raise ValueError(f"the bug {exhibit.name!r} passes its invariant {exhibit.invariant!r}; the run shows nothing of "
                     "it, so give it another setting")


def _same(right: Observed, wrong: Observed) -> bool:
    return all((a == b).all() for a, b in zip(right.changes, wrong.changes, strict=False))


def _changes(right: Observed, wrong: Observed) -> Iterator[Panel]:
    """Of the ranks whose numbers are other than those of the ranks before."""
    shown: list[bytes] = []
    for rank, (healthy, bug) in enumerate(zip(right.changes, wrong.changes, strict=False)):
        if bug.tobytes() not in shown:
            yield Panel(f"{CHANGE}, rank {rank}", "element", healthy.tolist(), bug.tolist())
            shown.append(bug.tobytes())


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, TALL, LEFT, TOP = 640, 78, 66, 54  # pixels: of the page, of a panel's bars, beside them, above the first
COLORS = {"healthy": BLUE, "with the bug": VERMILLION}


def drawn(exhibit: Exhibit, panels: Sequence[Panel]) -> str:
    """A pair of bars for each number of each panel, the healthy one first; a number that is none is a cross."""
    height = TOP + len(panels) * (TALL + 44)
    parts = [_text(12, 22, exhibit.title, "title")]
    for at, (words, color) in enumerate(COLORS.items()):
        x = LEFT + 90 * at
        parts += [f'<rect x="{x}" y="33" width="11" height="11" fill="{color}"/>', _text(x + 16, 43, words)]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (TALL + 44))
    said = f"{exhibit.seen} {exhibit.here} Bars of {'; '.join(panel.title for panel in panels)}."
    style = "".join(f"{'@media (prefers-color-scheme: dark){' * dark}.page{{fill:{look.background}}}text{{fill:"
                    f"{look.ink}}}line{{stroke:{look.muted}}}{'}' * dark}" for dark, look in enumerate((LIGHT, DARK)))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12"><title>'
            f"{escape(exhibit.title)}</title><desc>{escape(said)}</desc><style>.title{{font-weight:bold;font-size:15px}}"
            f'{style}</style><rect class="page" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n")


def _panel(panel: Panel, top: float) -> Iterator[str]:
    values = [value for row in (panel.healthy, panel.bug) for value in row if math.isfinite(value)]
    high, low = max([0.0, *values]), min([0.0, *values])
    unit = TALL / ((high - low) or 1)
    zero = top + 18 + high * unit
    slot = min(60.0, (WIDTH - LEFT - 16) / len(panel.healthy))
    yield _text(LEFT, top + 10, f"{panel.title}, by {panel.by}")
    yield f'<line x1="{LEFT}" x2="{LEFT + slot * len(panel.healthy):.1f}" y1="{zero:.1f}" y2="{zero:.1f}"/>'
    for value in sorted({high, low} - {0.0}):
        yield _text(LEFT - 6, zero - value * unit + 4, rough(value, 2 if abs(value) < 10 else 4), anchor="end")
    for row, (numbers, color) in enumerate(zip((panel.healthy, panel.bug), COLORS.values(), strict=True)):
        xs = [LEFT + slot * (at + 0.12 + 0.38 * row) for at in range(len(numbers))]
        bars = (f"M{x:.1f} {zero:.1f}v{-value * unit:.1f}h{0.38 * slot:.1f}V{zero:.1f}z"
                for x, value in zip(xs, numbers, strict=True) if math.isfinite(value))
        yield f'<path fill="{color}" d="{"".join(bars)}"/>'
        for x, value in zip(xs, numbers, strict=True):
            if not math.isfinite(value):
                yield _text(x + 0.19 * slot, zero - 4, "×", anchor="middle")
    for at in range(0, len(panel.healthy), max(1, len(panel.healthy) // 12)):
        yield _text(LEFT + slot * (at + 0.5), top + TALL + 34, str(at), anchor="middle")


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


# -- the museum, and its page ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Museum(Shown):
    """All exhibits."""

    exhibits: Mapping[str, Exhibit]

    def view(self) -> View:
        """A table: name, project, invariant."""
        rows = tuple((one.name, one.project, one.invariant) for one in self.exhibits.values())
        return View("The museum", f": {len(rows)} bugs of real implementations", (
            Table("", ("exhibit", "where", "found by"), rows, marked=True), TextLine(""),
            TextLine("zerosim museum muon_partial_matrix           tells one, and shows it")))

    def as_json(self) -> dict[str, Any]:
        """The facts of each."""
        return {"exhibits": [one.as_json() for one in self.exhibits.values()]}


HEAD = """# A museum of bugs

Silent bugs of real implementations of ZeRO, each made again as a small patch on zerosim's own parts. Nothing is patched
outside a block like this one, and in it only what the thread calls that opened it:

```python
import zerosim as zs

with zs.museum.exhibit("boundary_micro_batch") as exhibit:
    seen = zs.museum.observe(exhibit.setting)  # two steps of a small MLP, watched
    try:
        zs.museum.equals_one_device(seen)
    except AssertionError as error:
        print(str(error).partition(";")[0])
```

```text
weights of rank 0 after step 1: 18 of 23 elements differ
```

`zerosim museum` lists them, `zerosim museum boundary_micro_batch` tells one. The bars are of the run as it should be,
and with the bug. A few checks find all of them:

"""


def page(stories: Sequence[Story]) -> str:
    """docs/museum.md; `python -m zerosim.course.museum docs` writes it, and its pictures."""
    found_by = {name: [one.exhibit.name for one in stories if one.exhibit.invariant == name] for name in INVARIANTS}
    lines = [HEAD + "| invariant | what holds | bugs |\n|---|---|---|"]
    lines += [f"| `{name}` | {_line(INVARIANTS[name].__doc__)} | {len(names)} |" for name, names in found_by.items()]
    for story in stories:
        one = story.exhibit
        links = ", ".join(f"[{_label(link)}]({link})" for link in one.threads)
        where = "; ".join(filter(None, (one.project, one.versions, one.date, links)))
        lines.append(f"\n## {one.title}\n\n`{one.name}`: {where}.\n\n{_line(one.seen)}\n\n"
                     f"![{one.title}: healthy beside the bug.](assets/museum_{one.name}.svg)\n\n"
                     f"Here: {_line(one.here)} Found by `{one.invariant}`: {_line(SHORT.split(story.message)[0])}."
                     + (f"\n\n{_line(one.unread)}" if one.unread else ""))
    return "\n".join(lines) + "\n"


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", r"\|")


def _label(link: str) -> str:
    """``#7807`` of an issue or a pull request, else the file's name."""
    kind, last = link.split("/")[-2:]
    return f"#{last}" if kind in ("issues", "pull") else last


def all_stories() -> list[Story]:
    """The story of every exhibit."""
    return [story_of(one) for one in exhibits().values()]
