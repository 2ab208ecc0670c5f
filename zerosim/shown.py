"""What shows itself: as HTML in a notebook, as text in a terminal, as a picture when asked.

A cluster, a ledger or a plan says here only *that* it can be looked at. How it looks is a lesson, and stands on the
floor of the lessons, above all of them. This is the one place where a floor reaches for a higher one: by name, at the
moment when somebody looks, so that who only computes never loads what draws.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = "zerosim.display"


def upstairs() -> Any:
    """The module that knows how things look."""
    return import_module(LOOKS)


class Shown:
    """What Jupyter shows as HTML and rich as text; the look is chosen by class."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """What Jupyter shows."""
        html: str = upstairs().html(self)
        return html

    def __rich__(self) -> Any:
        """What ``rich.print`` shows."""
        return upstairs().text(self)


class Plotted(Shown):
    """What can be drawn, too."""

    __slots__ = ()

    def plot(self, *, dark: bool = False) -> "Figure":
        """A Matplotlib figure in the project's style, with its title and its words; Jupyter shows it.

        Raises ValueError where there is nothing to draw.
        """
        figure: Figure = upstairs().plot(self, dark=dark)
        return figure
