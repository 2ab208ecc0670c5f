"""Numbers that papers, documentation and lessons print, each with its source, and what the formulas make of them.

`published` has all rows, `Published.computed` what the planner's own formulas come to. The numbers stand in TOML files
beside this one, by subject; a number that does not close says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from zerosim.planning.facts import facts

SUBJECTS = ("states", "activations", "shapes", "flops", "collectives")


@dataclass(frozen=True, slots=True)
class Published:
    """One printed number.

    ``expected`` is what the formulas come to, within the absolute ``tolerance``, which is the last printed place;
    where something else was ``printed``, ``why`` says what is wrong with it; ``label`` and ``brief`` are its name and
    its why in the few words that a picture has room for, or empty. ``inputs`` name a quantity and what it is taken of.
    ``unit`` is empty for a ratio and for what the name says.
    """

    subject: str
    name: str
    source: str
    inputs: Mapping[str, Any]
    expected: float
    tolerance: float
    unit: str = ""
    printed: float | None = None
    why: str = ""
    label: str = ""
    brief: str = ""

    @property
    def closes(self) -> bool:
        """True where the printed number is the one that the formulas come to."""
        return self.printed is None

    @property
    def stated(self) -> float:
        """The printed number, right or wrong."""
        return self.expected if self.printed is None else self.printed

    @property
    def quantity(self) -> str:
        """The quantity that is computed, by its name in QUANTITIES."""
        return str(self.inputs["quantity"])

    def computed(self) -> float:
        """The number that the planner's formulas come to."""
        from zerosim.course.published.quantities import QUANTITIES

        taken_of = {name: value for name, value in self.inputs.items() if name != "quantity"}
        return float(QUANTITIES[self.quantity](**taken_of))


def published(*subjects: str) -> tuple[Published, ...]:
    """The rows of the subjects, or of all of them; ValueError for a subject that there is not.

    >>> row = published("states")[0]
    >>> row.name, row.stated, row.computed()
    ('figure 1: 7.5e9 parameters on 64 ranks, stage 0', 120, 120.0)
    """
    for subject in subjects:
        if subject not in SUBJECTS:
            raise ValueError(f"nothing published about {subject!r} is kept; the subjects are {', '.join(SUBJECTS)}")
    return tuple(row for subject in subjects or SUBJECTS for row in _rows_of(subject))


@cache
def _rows_of(subject: str) -> tuple[Published, ...]:
    return tuple(Published(subject=subject, **{**row, "inputs": MappingProxyType(row["inputs"])})
                 for row in facts(subject, __package__)["row"])
