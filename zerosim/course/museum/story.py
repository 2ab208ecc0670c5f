"""The story of an exhibit: what happened, the run healthy and with the bug, and the check that finds it."""

from dataclasses import dataclass
from typing import Any

from zerosim.course.museum.exhibit import Exhibit
from zerosim.course.museum.invariants import INVARIANTS
from zerosim.course.museum.runs import Observed, observe
from zerosim.display.style import rough
from zerosim.display.views import RIGHT, Table, TextLine, View, plain
from zerosim.shown import Answer

ROWS = 8  # of a table of numbers, at most
INDENT = "\N{NO-BREAK SPACE}" * 4  # which pages keep
Panel = tuple[str, list[float], list[float]]  # what the numbers are, healthy and with the bug


@dataclass(frozen=True)
class Story(Answer):
    """One exhibit, and what was seen of its runs. ``message`` is what the invariant says with the bug."""

    exhibit: Exhibit
    healthy: Observed
    bug: Observed
    message: str

    @property
    def panels(self) -> list[Panel]:
        """The panels of a picture, rank by rank; equal ranks are shown once."""
        healthy, found = self.healthy.drawn(self.exhibit.draws), dict[str, Panel]()
        for what, bug in self.bug.drawn(self.exhibit.draws).items():
            found.setdefault(str(bug), (what, healthy[what], bug))
        return [*found.values()]

    def view(self) -> View:
        """The facts, the patch, the numbers side by side, and what the invariant says."""
        one, (what, healthy, bug) = self.exhibit, self.panels[-1]
        facts = [("Where", "; ".join(filter(None, (one.project, one.versions, one.date)))), ("Seen", one.seen),
                 ("Here", one.here), ("Not read", one.unread),
                 ("Run", ", ".join(f"{name} {value}" for name, value in one.run.items())),
                 *(("Thread", link) for link in one.threads)]
        patches = (Table(patch.of, ("", "patch"), tuple((line[0], line[2:].replace("    ", INDENT))
                                                        for line in patch.lines)) for patch in one.patches)
        rows = [(str(at), *(rough(value, 6) for value in pair))
                for at, pair in enumerate(zip(healthy, bug, strict=True)) if pair[0] != pair[1]]
        found = [(one.invariant, INVARIANTS[one.invariant].__doc__ or ""), ("It says", self.message)]
        return View(one.name, f": {one.title}", (
            *_lines(facts), *patches,
            Table(f"{what}, where they differ", ("", RIGHT + "healthy", RIGHT + "with the bug"), tuple(rows[:ROWS])),
            TextLine(""), *_lines(found)))

    def as_json(self) -> dict[str, Any]:
        """The facts, the message and the numbers of the picture."""
        return {**plain(self.exhibit), "message": self.message, "panels": [
            {"what": what, "healthy": plain(healthy), "bug": plain(bug)} for what, healthy, bug in self.panels]}


def _lines(said: list[tuple[str, str]]) -> list[TextLine]:
    """Lines of markup from texts in which brackets are brackets, but for those that are empty."""
    return [TextLine(f"[bold]{what}:[/] " + text.replace("[", r"\["), 0) for what, text in said if text]


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
            return Story(exhibit, healthy, bug, str(error))
    raise ValueError(f"the bug {exhibit.name!r} passes its invariant {exhibit.invariant!r}; the run shows nothing of "
                     "it, so give it another setting")
