"""A Matplotlib figure that shows itself in a notebook, whatever its backend, with a text alternative.

Only what draws imports this module, when it draws, since it imports Matplotlib.
"""

import html
from base64 import b64encode
from typing import Any

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure; ``drawing``, once it is finished, is the Drawing with its title and its words."""

    drawing: Any = None

    def _repr_html_(self) -> str | None:
        """The picture as Jupyter shows it: as it is now, in an ``<img>`` of its own, whose ids meet no others."""
        if self.drawing is None:
            return None
        image = b64encode(self.drawing.svg().encode()).decode()
        words = html.escape(f"{self.drawing.title}. {self.drawing.description}", quote=True)
        return f'<img style="max-width:100%" alt="{words}" src="data:image/svg+xml;base64,{image}">'
