"""The verdict of an answer's attempts, with what they waste and print; they must leave the package as it is."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout

import numpy as np

from zerosim.course.puzzles.integrity import Snapshot
from zerosim.course.puzzles.score import MEASURES, OPEN, PASSED, REFUSED, Hole, Measured, Refused, Score

PRINTED = 1_000  # characters that are kept of what an answer prints


def judged(name: str, attempts: Iterable[Measured], praise: Callable[[list[Measured]], str],
           reasons: Mapping[str, str] | None = None) -> Score:
    """The score of attempts that are made one after the other, until one raises Refused or Hole, or replaces a name.

    ``reasons`` are the words for a measure above its target. What is printed meanwhile goes into the score.
    """
    rows: list[Measured] = []
    names = Snapshot()
    with redirect_stdout(Beginning()) as printed:
        try:
            with np.errstate(all="ignore"):  # inf and NaN are part of some cases
                for row in attempts:
                    names.refuse_changes()
                    rows.append(row)
        except Hole as error:
            verdict, sentence = OPEN, ended(f"A hole is open: {error}")
        except Refused as error:
            verdict, sentence = REFUSED, ended(str(error))
        else:
            verdict, sentence = PASSED, praise(rows)
        finally:
            names.put_back()
    return Score(name, verdict, sentence, tuple(rows), _wasted(rows, reasons or {}) if verdict == PASSED else (),
                 printed.getvalue())


def ended(text: str) -> str:
    """The text as a sentence: with a full stop, unless a mark ends it already."""
    return text if text.endswith(("?", "!", ".")) else f"{text}."


def _wasted(rows: Sequence[Measured], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each measure that is above its target: of the case where it is furthest above."""
    found = []
    for measure in MEASURES:
        worst = max(rows, key=lambda row: getattr(row, measure) / max(1, getattr(row.target, measure)))
        if said := worst.excess(measure):
            why = reasons.get(measure, "")
            found.append(said + (f": {why}." if why else "."))
    return tuple(found)


class Beginning(io.StringIO):
    """Keeps the first characters that are written, and lets the others go."""

    def write(self, text: str) -> int:
        """Returns the number of characters that it was given."""
        super().write(text[:max(0, PRINTED - self.tell())])
        return len(text)
