"""How much of the forward pass is kept for backward, and what is computed a second time: a value, not a mode.

Between units: the inputs of some units are kept and the others run again (Chen et al. 2016, arXiv:1604.06174, section
3). Inside them: a block drops what is cheap to compute again (Korthikanti et al. 2022, arXiv:2205.05198, section 5), or
never makes it whole (Dao et al. 2022, arXiv:2205.14135, section 3.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zerosim.models.checks import require_positive

SEGMENT = re.compile(r"segment\(\s*(\d+)\s*\)")
ALL, SUB_BLOCK, SELECTIVE, TILED = INSIDE = ("all", "sub_block", "selective", "tiled")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Keep the input of every ``units_per_segment``-th unit and run the rest again; None keeps everything.

    ``inside`` is what a unit keeps where it has a choice: "all"; "sub_block": the inputs of attention and of the
    feed-forward network; "selective": all but the attention probabilities; "tiled": all but the probabilities, which
    exist tile by tile only, and one log-sum-exp for each of their rows.
    Made by `segment`, or taken from `NAMED`: `NONE`, `BLOCK` and the three finer ones.

    >>> segment(2).segments(5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """

    units_per_segment: int | None = None
    inside: str = ALL

    def __post_init__(self) -> None:
        """Raises ValueError for a segment of less than one unit, and for an inside that there is not."""
        if self.units_per_segment is not None:
            require_positive("segment(k)", k=self.units_per_segment)
        require_inside("Recompute", self.inside)

    @classmethod
    def parse(cls, text: Any) -> Recompute:
        """The policy that a text names; a policy itself.

        >>> Recompute.parse("segment(2)+tiled")
        Recompute(units_per_segment=2, inside='tiled')

        Raises ValueError unless the text is "none", "block", "segment(k)", "sub_block", "selective" or "tiled", or
        joins one of the second and third with one of the last three by a "+".
        """
        if isinstance(text, Recompute):
            return text
        words = str(text).strip()
        between, plus, inside = (part.strip() for part in words.partition("+"))
        match = SEGMENT.fullmatch(between)
        if words in NAMED:
            return NAMED[words]
        if (between != "block" and (match is None or int(match[1]) < 1)) or (plus and inside not in INSIDE[1:]):
            raise ValueError(f"recompute={text!r} names no policy; write 'none', 'block' or 'segment(k)' with k of at "
                             f"least 1, as in 'segment(2)', or {', '.join(map(repr, INSIDE[1:]))}, or "
                             "two of them, as in 'segment(2)+tiled'")
        return cls(1 if match is None else int(match[1]), inside or ALL)

    def segments(self, unit_count: int) -> list[range]:
        """The runs of units that are run again together, the last maybe shorter; none when all is kept."""
        if self.units_per_segment is None:
            return []
        return [range(start, min(start + self.units_per_segment, unit_count))
                for start in range(0, unit_count, self.units_per_segment)]

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        inside = [] if self.inside == ALL else [self.inside]
        if self.units_per_segment is None:
            return "+".join(inside) or "none"
        between = "block" if self.units_per_segment == 1 else f"segment({self.units_per_segment})"
        return "+".join([between, *inside])


def segment(k: int) -> Recompute:
    """Keep the input of every k-th unit; ValueError unless k is a whole number of at least 1."""
    require_positive("segment(k)", k=k)
    return Recompute(k)


def require_inside(where: str, inside: Any) -> None:
    """Raises ValueError unless a unit can keep this of its inside."""
    if inside not in INSIDE:
        raise ValueError(f"{where} was asked to keep {inside!r} of the inside of a unit; it keeps one of "
                         f"{', '.join(map(repr, INSIDE))}")


NONE = Recompute()
BLOCK = Recompute(1)
NAMED = {"none": NONE, "block": BLOCK} | {inside: Recompute(None, inside) for inside in INSIDE[1:]}
