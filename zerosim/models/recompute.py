"""How much of the forward pass is kept for backward, and what is computed a second time: a value, not a mode.

Chen et al. 2016 (arXiv:1604.06174), section 3: keep the inputs of some units only, run the others again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zerosim.models.checks import require_positive

SEGMENT = re.compile(r"segment\(\s*(\d+)\s*\)")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Keep the input of every ``units_per_segment``-th unit and run the rest again; None keeps everything.

    Made by `segment`, or taken from `NONE` and `BLOCK`.

    >>> segment(2).segments(5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """

    units_per_segment: int | None = None
    inside: str = "all"

    def __post_init__(self) -> None:
        """Raises ValueError for a segment of less than one unit."""
        if self.units_per_segment is not None:
            require_positive("segment(k)", k=self.units_per_segment)

    @classmethod
    def parse(cls, text: Any) -> Recompute:
        """The policy that a text names: "none", "block" or "segment(k)"; a policy itself; ValueError for any other."""
        if isinstance(text, Recompute):
            return text
        words = str(text).strip()
        if words in NAMED:
            return NAMED[words]
        match = SEGMENT.fullmatch(words)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"recompute={text!r} names no policy; write 'none', 'block' or 'segment(k)' "
                             "with k of at least 1, as in 'segment(2)'")
        return segment(int(match[1]))

    def segments(self, unit_count: int) -> list[range]:
        """The runs of units that are run again together, the last maybe shorter; none when all is kept."""
        if self.units_per_segment is None:
            return []
        return [range(start, min(start + self.units_per_segment, unit_count))
                for start in range(0, unit_count, self.units_per_segment)]

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        if self.units_per_segment is None:
            return "none"
        return "block" if self.units_per_segment == 1 else f"segment({self.units_per_segment})"


def segment(k: int) -> Recompute:
    """Keep the input of every k-th unit; ValueError unless k is a whole number of at least 1."""
    require_positive("segment(k)", k=k)
    return Recompute(k)


NONE = Recompute()
BLOCK = Recompute(1)
NAMED = {"none": NONE, "block": BLOCK}
