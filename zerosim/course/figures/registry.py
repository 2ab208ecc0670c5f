"""A row of the table of figures: how its data are made, and what draws them.

To add a figure, write a module with two functions, ``NAME_data()`` that runs something and returns a frozen dataclass,
and ``NAME(data, style)`` that returns a Drawing; then add one row to FIGURES in ``figures/__init__.py``. The tests of
figures ask every row the same questions, on the same data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerosim.display.drawing import Animation, Drawing, Style


@dataclass(frozen=True, slots=True)
class Figure:
    """``data()`` is what the committed figure shows; ``small()`` the quickest there is, for tests. A figure that moves
    has ``animate`` too."""

    data: Callable[[], Any]
    draw: Callable[[Any, Style], Drawing]
    small: Callable[[], Any]
    animate: Callable[[Any, Style], Animation] | None = None

    def __call__(self, style: Style) -> Drawing:
        """The figure as it is committed."""
        return self.draw(self.data(), style)
