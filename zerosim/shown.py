"""Mixins of what displays itself: as HTML in a notebook, as text in a terminal, as a figure when asked.

A class says here only that it can be displayed; `zerosim.display` knows how, and is imported only when something is
displayed, so that who only computes never loads Matplotlib.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Shown:
    """A thing that Jupyter shows as HTML and rich as text; the view is chosen by class."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from zerosim import display

        return display.html(self)

    def __rich__(self) -> Any:
        from zerosim import display

        return display.text(self)


class Plotted(Shown):
    """A thing that can be drawn, too."""

    __slots__ = ()

    def plot(self, *, dark: bool = False) -> "Figure":
        """A Matplotlib figure in the project's style, with its title and its words; Jupyter shows it.

        Raises ValueError where there is nothing to draw.
        """
        from zerosim.display.plots import plot

        return plot(self, dark=dark)
