"""What many figures have: a heading, the look of a kind of memory, ticks that are in sight, a unit that suits."""

from typing import TYPE_CHECKING, Any

from zerosim.lessons.figures.style import KIND_COLORS, Style
from zerosim.numerics.units import BYTES
from zerosim.ranks.memory import RESTING_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from zerosim.lessons.figures.picture import Picture


def heading(figure: "Picture", title: str, words: str, style: Style, *, below: float = 0.74) -> None:
    """The title, and words of second rank, whose middle lies ``below`` so many inches under the upper edge."""
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - 0.34 / height, title, va="center", fontsize=17, fontweight="bold")
    # Where there is no second line, it would only move the first.
    air: dict[str, Any] = {"linespacing": 1.45} if "\n" in words else {}
    figure.text(0.2 / width, 1 - below / height, words, va="center", color=style.muted, **air)


def look(kind: str, style: Style, linewidth: float = 0.0) -> dict[str, Any]:
    """The color of a kind of memory, and hatching where it lives only during a step."""
    hatch = "" if kind in RESTING_KINDS else "////"
    return {"facecolor": KIND_COLORS[kind], "edgecolor": style.background, "linewidth": linewidth, "hatch": hatch}


def scale_of(nbytes: int) -> tuple[float, str]:
    """The unit that suits a largest value: (1e6, "MB")."""
    return next((unit, name) for unit, name in BYTES if nbytes >= unit or unit == 1)


def within_limits(axes: "Axes") -> None:
    """Keeps the ticks that the axes show; Matplotlib makes one more at each end, whose label lies on other words."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):  # those stand where they should
            axis.set_ticks([tick for tick in axis.get_ticklocs() if min(limits) <= tick <= max(limits)])
