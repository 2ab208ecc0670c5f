"""A Matplotlib figure that shows itself in a notebook, whatever its backend, with a text alternative.

Only what draws imports this module, when it draws, since it imports Matplotlib.
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch


class Picture(Figure):
    """A page to draw on; ``drawing``, once it is finished, is the Drawing with its title and its words."""

    drawing: Any = None

    def panel(self, *, left: float, right: float, top: float, bottom: float) -> Axes:
        """Axes inside margins in inches."""
        width, height = self.get_size_inches()
        return self.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))

    def panels(self, rows: int, columns: int, *, left: float, right: float, top: float, bottom: float,
               sharex: bool = False, sharey: bool = False, **grid: Any) -> Any:
        """Axes in rows and columns, (rows, columns), inside margins in inches; ``grid`` are options of a GridSpec."""
        width, height = self.get_size_inches()
        margins = {"left": left / width, "right": 1 - right / width, "top": 1 - top / height, "bottom": bottom / height}
        return self.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False, gridspec_kw=margins | grid)

    def key(self, looks: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        """A legend at the lower edge: patches of these looks, by their words."""
        self.legend([Patch(**look) for look in looks.values()], list(looks), columnspacing=1.6, **options)

    def in_inches(self) -> Axes:
        """Axes over the whole page, in inches from its lower left corner, without a frame."""
        width, height = self.get_size_inches()
        axes: Axes = self.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        return axes

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]] | None:
        """The picture as Jupyter shows it, as it is now."""
        shown: tuple[bytes, dict[str, Any]] | None = self.drawing and self.drawing._repr_png_()
        return shown

    def __repr__(self) -> str:
        return super().__repr__() if self.drawing is None else repr(self.drawing)
