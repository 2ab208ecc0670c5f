"""The story of an exhibit: what happened, the run healthy and with the bug, the check that finds it, and a picture."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from zerosim.course.museum.exhibit import Exhibit, unmarked
from zerosim.course.museum.invariants import INVARIANTS, padding_is_never_read
from zerosim.course.museum.runs import Observed, observe
from zerosim.display.drawing import DARK, LIGHT
from zerosim.display.style import BLUE, VERMILLION, rough
from zerosim.display.views import RIGHT, Table, TextLine, View, plain
from zerosim.shown import Shown

ROWS = 8  # of a table of numbers, at most
Panel = tuple[str, list[float], list[float]]  # what the numbers are, healthy and with the bug


@dataclass(frozen=True)
class Story(Shown):
    """One exhibit, and what was seen of its runs. ``message`` is what the invariant says with the bug."""

    exhibit: Exhibit
    healthy: Observed
    bug: Observed
    message: str

    @property
    def panels(self) -> list[Panel]:
        """What the picture shows, rank by rank; ranks alike are shown once."""
        rows = [run.drawn(self.exhibit.draws) for run in (self.healthy, self.bug)]
        found = {str(bug): (title, healthy, bug) for title, healthy, bug in reversed(
            [(title, rows[0][title], rows[1][title]) for title in rows[0] if title in rows[1]])}
        return [*found.values()][::-1]

    def view(self) -> View:
        """The facts, the numbers side by side, and what the invariant says."""
        facts, (what, healthy, bug), check = self.exhibit.view(), self.panels[-1], INVARIANTS[self.exhibit.invariant]
        rows = [(str(at), rough(one, 6), rough(other, 6)) for at, (one, other) in enumerate(
            zip(healthy, bug, strict=True)) if one != other]
        return View(facts.title, facts.rest, (
            *facts.parts, Table(f"{what}, where they differ", ("", RIGHT + "healthy", RIGHT + "with the bug"),
                                tuple(rows[:ROWS])),
            TextLine(""), TextLine(f"[bold]{check.__name__}:[/] {unmarked(check.__doc__)}", 0),
            TextLine(f"[bold]It says:[/] {unmarked(self.message)}", 0)))

    def as_json(self) -> dict[str, Any]:
        """The facts, the message and the numbers of the picture."""
        return self.exhibit.as_json() | {"message": self.message, "panels": [
            {"what": what, "healthy": plain(healthy), "bug": plain(bug)} for what, healthy, bug in self.panels]}

    def svg(self) -> str:
        """The picture: a pair of bars for each number, the healthy one first, in the colors of a light and of a dark
        page. A number that is none is a cross."""
        panels, height = self.panels, TOP + len(self.panels) * STEP
        parts = [_text(12, 22, self.exhibit.title, "title")]
        for at, (words, color) in enumerate(COLORS.items()):
            parts += [f'<rect x="{LEFT + 90 * at}" y="33" width="11" height="11" fill="{color}"/>',
                      _text(LEFT + 16 + 90 * at, 43, words)]
        for number, panel in enumerate(panels):
            parts += _panel(panel, TOP + number * STEP)
        said = f"{self.exhibit.seen} {self.exhibit.here} Bars: {'; '.join(what for what, _, _ in panels)}."
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
                f'height="{height}" role="img" font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12">'
                f"<title>{escape(self.exhibit.title)}</title><desc>{escape(said)}</desc><style>{STYLE}</style>"
                '<rect class="page" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n")


def story_of(exhibit: Exhibit) -> Story:
    """Runs the exhibit's setting with the package as it is, and with the bug, and asks its invariant.

    Raises AssertionError where the healthy run does not pass it, and ValueError where the bug does.
    """
    check, healthy = INVARIANTS[exhibit.invariant], observe(exhibit.setting)
    check(healthy)
    with exhibit.open():
        bug = observe(exhibit.setting)
        try:
            check(bug)
        except AssertionError as error:
            if check is padding_is_never_read:  # the padding is shown that the check has filled
                bug = observe(exhibit.setting, debug=True)
            return Story(exhibit, healthy, bug, str(error))
    raise ValueError(f"the bug {exhibit.name!r} passes its invariant {exhibit.invariant!r}; the run shows nothing of "
                     "it, so give it another setting")


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, TALL, LEFT, TOP, STEP = 640, 78, 66, 54, 122  # pixels: the page; a panel's bars, left and above; from one on
COLORS = {"healthy": BLUE, "with the bug": VERMILLION}
LOOKS = [f".page{{fill:{look.background}}}text{{fill:{look.ink}}}line{{stroke:{look.muted}}}" for look in (LIGHT, DARK)]
STYLE = f".title{{font-weight:bold;font-size:15px}}{LOOKS[0]}@media (prefers-color-scheme: dark){{{LOOKS[1]}}}"


def _panel(panel: Panel, top: float) -> Iterator[str]:
    what, *series = panel
    finite = [0.0, *(value for numbers in series for value in numbers if math.isfinite(value))]
    high, low, count = max(finite), min(finite), len(series[0])
    unit, slot = TALL / ((high - low) or 1), min(60.0, (WIDTH - LEFT - 16) / count)
    zero = top + 18 + high * unit
    yield _text(LEFT, top + 10, what)
    yield f'<line x1="{LEFT}" x2="{LEFT + slot * count:.1f}" y1="{zero:.1f}" y2="{zero:.1f}"/>'
    for value in sorted({high, low} - {0.0}):
        yield _text(LEFT - 6, zero - value * unit + 4, rough(value, 2 if abs(value) < 10 else 4), anchor="end")
    for row, (numbers, color) in enumerate(zip(series, COLORS.values(), strict=True)):
        places = [(LEFT + slot * (at + 0.12 + 0.38 * row), value) for at, value in enumerate(numbers)]
        bars = (f"M{x:.1f} {zero:.1f}v{-value * unit:.1f}h{0.38 * slot:.1f}V{zero:.1f}z"
                for x, value in places if math.isfinite(value))
        yield f'<path fill="{color}" d="{"".join(bars)}"/>'
        yield from (_text(x + 0.19 * slot, zero - 4, "×", anchor="middle") for x, value in places
                    if not math.isfinite(value))
    for at in range(0, count, max(1, count // 12)):
        yield _text(LEFT + slot * (at + 0.5), top + TALL + 34, str(at), anchor="middle")


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
