"""A Matplotlib figure that shows itself in a notebook, whatever its backend, with a text alternative.

Only what draws imports this module, since it imports Matplotlib.
"""

import html
from base64 import b64encode
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from zerosim.lessons.figures.drawing import Drawing


class Picture(Figure):
    """A figure; ``drawing``, once it is finished, has its title and its words."""

    drawing: "Drawing | None" = None

    def _repr_html_(self) -> str | None:
        """What Jupyter shows: the picture as it is now, in an ``<img>`` of its own, whose ids meet no others."""
        if self.drawing is None:
            return None
        image = b64encode(self.drawing.svg().encode()).decode()
        words = html.escape(f"{self.drawing.title}. {self.drawing.description}", quote=True)
        return f'<img style="max-width:100%" alt="{words}" src="data:image/svg+xml;base64,{image}">'
