"""The outcome of a check as it is shown: in a terminal, in a notebook, as data.

Every byte is that of the rank that has most; steps are hops one after the other, on the longest chain.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from zerosim.display.views import Table, TextLine, View
from zerosim.planning.collectives import Sent
from zerosim.shown import Answer

MEASURES = ("peak_nbytes", "sent_nbytes", "steps")
PASSED, REFUSED, OPEN = "passed", "refused", "open"
WIDTH = 80  # columns
HEADS = (">N", "case", ">peak bytes", ">target", ">bytes sent", ">target", ">steps", ">target")


class Hole(NotImplementedError):
    """A hole of a stub that is still open."""


class Refused(Exception):
    """An answer that is wrong; the text is the one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Memory at its fullest, bytes sent, and steps in sequence."""

    peak_nbytes: int
    sent_nbytes: int
    steps: int

    @classmethod
    def of(cls, peak_nbytes: int, collectives: Sequence[Sent]) -> "Measures":
        """Those of collectives one after another; the bytes are those of a rank that sends most in each."""
        return cls(peak_nbytes, sum(max(one.nbytes) for one in collectives), sum(one.steps for one in collectives))


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one case, beside its target; ``held`` are the bytes by kind at the peak, of the rank that has
    most."""

    ranks: int
    title: str
    peak_nbytes: int
    sent_nbytes: int
    steps: int
    target: Measures
    held: Mapping[str, int] = field(default_factory=dict)

    def excess(self, measure: str) -> str | None:
        """The words for a measure above its target; None for one that is not."""
        value, enough = getattr(self, measure), getattr(self.target, measure)
        held = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in sorted(self.held.items(), key=lambda one: -one[1]))
        words = {"peak_nbytes": f"a rank holds {value:,} bytes at its fullest where {enough:,} are enough ({held})",
                 "sent_nbytes": f"a rank sends {value:,} bytes where {enough:,} are enough",
                 "steps": f"there are {value:,} steps in sequence where {enough:,} are enough"}
        return f"On N={self.ranks} ({self.title}) {words[measure]}" if value > enough else None


@dataclass(frozen=True, slots=True)
class Score(Answer):
    """The outcome of a check: ``verdict`` is "passed", "refused" or "open", ``sentence`` says it.

    ``rows`` has a line for each case that was right, with the peak bytes, bytes sent and steps that were measured (of
    the rank that has most) beside their targets. ``wasted`` has a sentence for each star that an answer which passed
    has lost. ``printed`` is the beginning of what the answer printed, which stands nowhere else.
    """

    puzzle: str
    verdict: str
    sentence: str
    rows: tuple[Measured, ...] = ()
    wasted: tuple[str, ...] = ()
    printed: str = ""

    @property
    def passed(self) -> bool:
        """True when every case is right and no limit was exceeded."""
        return self.verdict == PASSED

    @property
    def targets_met(self) -> tuple[str, ...]:
        """The measures that stay within their target in every case; none for an answer that did not pass."""
        return tuple(measure for measure in MEASURES if self.passed and all(
            getattr(row, measure) <= getattr(row.target, measure) for row in self.rows))

    @property
    def stars(self) -> str:
        """``★★☆``: a star for each target that is met."""
        return "★" * len(self.targets_met) + "☆" * (len(MEASURES) - len(self.targets_met))

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"puzzle": self.puzzle, "verdict": self.verdict, "sentence": self.sentence,
                "targets_met": list(self.targets_met), "wasted": list(self.wasted), "printed": self.printed,
                "rows": [asdict(row) for row in self.rows]}

    def view(self) -> View:
        """The verdict, the sentence, and for an answer that passed a table of measures beside their targets."""
        from rich.markup import escape

        mark = {PASSED: f"passed {self.stars}", REFUSED: "not yet", OPEN: "still open"}[self.verdict]
        rows = sorted(self.rows, key=lambda row: row.ranks)
        cells = tuple((str(row.ranks), row.title, *(f"{value:,}" for measure in MEASURES for value in (
            getattr(row, measure), getattr(row.target, measure)))) for row in rows)
        table = (TextLine(""), Table("", HEADS, cells)) if self.passed else ()
        printed = ["", "It printed:", *(f"    {line}" for line in self.printed.splitlines())] if self.printed else []
        said = [self.sentence, *self.wasted, *printed]
        return View(f"{self.puzzle}: {mark}", "", (*[TextLine(escape(line)) for line in said], *table))

    __repr__ = Answer.__str__


class Page(str):
    """A text that a terminal shows as it is, and a notebook in its own type face."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="font-family: monospace">{escape(self)}</pre>'  # JupyterLab's own is proportional


def filled(text: str) -> str:
    """Paragraphs filled to the width of a terminal; lines that are indented stay as they are."""
    lines: list[str] = []
    for indented, group in groupby(text.strip("\n").splitlines(), key=lambda line: line[:1] in ("", " ")):
        run = tuple(group)
        lines += run if indented else textwrap.wrap(" ".join(run), WIDTH, break_on_hyphens=False)
    return "\n".join(lines)
