"""Drawings in the one style of all figures: sizes for print and projector.

Matplotlib's settings are in force only while something is drawn, and always on Figure objects: no figure touches
pyplot's state, and no setting of the reader's changes a picture. Matplotlib is imported when something is drawn.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from zerosim.display.style import KIND_COLORS
from zerosim.numerics.files import write_whole
from zerosim.numerics.units import BYTES
from zerosim.ranks.memory import RESTING_KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes

    from zerosim.display.picture import Picture
else:
    Axes = Any

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Style:
    """The differences of the light and the dark variant: the page, the ink on it, and two weaker inks."""

    name: str
    background: str
    ink: str
    muted: str  # words of second rank
    faint: str  # grids and frames

    @property
    def settings(self) -> dict[str, Any]:
        """Matplotlib's settings, over its own defaults."""
        page, ink = self.background, self.ink
        return {
            # Text stays text in an SVG; where the first font is missing the next ones, no wider, take its place.
            "svg.hashsalt": "zerosim", "svg.fonttype": "none", "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
            "font.size": 12, "axes.titlesize": 12, "axes.labelsize": 12, "xtick.labelsize": 11, "ytick.labelsize": 11,
            "legend.fontsize": 11, "legend.frameon": False, "legend.loc": "lower center",
            "hatch.linewidth": 0.7, "grid.color": self.faint,
            "figure.facecolor": page, "savefig.facecolor": page, "axes.facecolor": page,
            "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "axes.edgecolor": ink,
            "xtick.color": ink, "ytick.color": ink,
            "axes.titlelocation": "left", "axes.titleweight": "bold",
            "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
        }

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the ``with`` block Matplotlib draws and saves in this style; afterwards its settings are as before."""
        import matplotlib.style

        with matplotlib.style.context(["default", self.settings]):
            yield

    @contextmanager
    def figure(self, width: float, height: float, title: str = "", words: str = "", *,
               below: float = 0.74) -> "Iterator[Picture]":
        """A page of so many inches, to be drawn inside the ``with`` block, while the style is in force.

        Above is its title, and words of second rank, whose middle lies ``below`` so many inches under the upper edge.
        """
        from zerosim.display.picture import Picture

        with self.in_force():
            figure = Picture(figsize=(width, height))
            if title:
                figure.text(0.2 / width, 1 - 0.34 / height, title, va="center", fontsize=17, fontweight="bold")
                # Where there is no second line, it would only move the first.
                air: dict[str, Any] = {"linespacing": 1.45} if "\n" in words else {}
                figure.text(0.2 / width, 1 - below / height, words, va="center", color=self.muted, **air)
            yield figure


LIGHT = Style("light", background="#FFFFFF", ink="#1A1A1A", muted="#595959", faint="#D4D4D4")
DARK = Style("dark", background="#16181D", ink="#F2F2F2", muted="#B8BDC6", faint="#464B54")


FORMATS = ("svg", "png")
CSS_DPI = 96  # of a browser's page. Source: CSS Values and Units 3, "absolute lengths"
SCREEN_DPI, SCREEN_COLORS = 120, 64  # of a picture in a notebook


def drawn_with() -> str:
    """The versions that decide each byte of a picture in a notebook, as its file has them."""
    import matplotlib
    import PIL

    return f"Matplotlib {matplotlib.__version__}, Pillow {PIL.__version__}"


def save_as(path: Path | str, what: str, contents: Mapping[str, Callable[[], bytes]]) -> Path:
    """Writes a file in the format that its suffix names: all of it, or nothing; ValueError for another suffix."""
    path = Path(path)
    if path.suffix not in contents:
        raise ValueError(f"asked to save {what} as {path.name!r}; end the name in {' or '.join(contents)}")
    return write_whole(path, contents[path.suffix]())


@dataclass(frozen=True, slots=True)
class Drawing:
    """A finished picture. ``description`` says in words what it shows, for those who cannot see it."""

    name: str
    title: str
    description: str
    style: Style
    figure: "Picture"

    def shown(self) -> "Picture":
        """The Matplotlib figure, which now has this drawing, and in a notebook shows itself, whatever the backend."""
        self.figure.drawing = self
        return self.figure

    def svg(self) -> str:
        """The picture as SVG, with ``<title>`` and ``<desc>``; no date and no random ids in it."""
        text = self._saved("svg").decode()
        start = text.index("<svg")
        opening, rest = text[start:].split(">", 1)
        ids = [f"{self.name}-title", f"{self.name}-desc"]
        words = (f'\n <title id="{ids[0]}">{escape(self.title)}</title>'
                 f'\n <desc id="{ids[1]}">{escape(self.description)}</desc>')
        return f'{opening} role="img" aria-labelledby="{" ".join(ids)}">{words}{rest}'

    def png(self, dots_per_inch: int = 160) -> bytes:
        """The picture as PNG."""
        return self._saved("png", dots_per_inch)

    def save(self, path: Path | str) -> Path:
        """Writes a .svg or .png file: all of it, or nothing. Raises ValueError for another suffix."""
        return save_as(path, "a figure", {".svg": lambda: self.svg().encode(), ".png": self.png})

    def _saved(self, format: str, dots_per_inch: int = 160) -> bytes:
        file = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else {"Title": self.title, "Description": self.description}
        with self.style.in_force():
            self.figure.savefig(file, format=format, dpi=dots_per_inch, metadata=metadata)
        return file.getvalue()

    def on_screen(self) -> bytes:
        """The picture as a PNG of a screen's sharpness in few colors: about as many bytes as the SVG has."""
        from PIL import Image, PngImagePlugin

        dots, file, width, height = io.BytesIO(), io.BytesIO(), *self.figure.get_size_inches()
        with self.style.in_force():
            self.figure.savefig(dots, format="rgba", dpi=SCREEN_DPI)
        size = (int(width * SCREEN_DPI), int(height * SCREEN_DPI))
        few = Image.frombytes("RGBA", size, dots.getvalue()).convert("RGB").quantize(
            SCREEN_COLORS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        words = PngImagePlugin.PngInfo()
        for key, text in (("Software", drawn_with()), ("Title", self.title)):
            words.add_text(key, text)
        few.save(file, format="PNG", pnginfo=words)
        return file.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """The picture as Jupyter shows it, as wide as its inches or as the page; JupyterLab draws no SVG of a notebook
        that nobody has trusted. Its words are the text beside it, `repr`."""
        return self.on_screen(), {"width": round(CSS_DPI * self.figure.get_size_inches()[0]), "alt": self.title}

    def __repr__(self) -> str:
        return f"{self.title}. {self.description}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A page without axes, on which everything stands in inches from its lower left corner.

    ``words`` are options of all texts; by default these are in the middle of a line's height.
    """

    axes: Axes
    style: Style
    words: Mapping[str, Any] = field(default_factory=dict)

    def text(self, x: float, y: float, words: str, **options: Any) -> None:
        """Words at a point."""
        self.axes.text(x, y, words, **({"va": "center"} | dict(self.words) | options))

    def box(self, x: float, y: float, width: float, height: float, **options: Any) -> None:
        """A rectangle by its lower left corner."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((x, y), width, height, **options))

    def arrow(self, start: Point, end: Point, zorder: float = 3, **options: Any) -> None:
        """A line from point to point, with a head where the options name no other style."""
        look = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0} | options
        self.axes.annotate("", xy=end, xytext=start, zorder=zorder, arrowprops=look)


def around(rank: float, ranks: int, radius: float, middle: Point) -> tuple[float, float, str]:
    """The place of a rank on a circle, clockwise from the top, and how words outside of it are aligned there."""
    angle = 2 * math.pi * rank / ranks
    side = math.sin(angle)
    return (middle[0] + radius * side, middle[1] + radius * math.cos(angle),
            "left" if side > 0.1 else "right" if side < -0.1 else "center")


def look(kind: str, style: Style, linewidth: float = 0.0) -> dict[str, Any]:
    """The color of a kind of memory, and hatching where it lives only during a step."""
    return filled(KIND_COLORS[kind], style, hatched=kind not in RESTING_KINDS, linewidth=linewidth)


def filled(color: str, style: Style, *, hatched: bool, linewidth: float = 0.0) -> dict[str, Any]:
    """The look of an area or a bar: its color, with a line of the page's color around it, and in it where hatched."""
    return {"facecolor": color, "edgecolor": style.background, "linewidth": linewidth, "hatch": "////" * hatched}


def stack(axes: Axes, x: Sequence[float], columns: Mapping[str, Sequence[float]],
          looks: Callable[[str], dict[str, Any]], *, corners: bool = False, slanted: bool = False) -> list[float]:
    """Areas by kind, one on the other, each value from its x to the next; returns the upper edge.

    With ``corners`` an area has only the points at which it changes. ``slanted`` goes straight from value to value.
    """
    low = [0.0] * len(x)
    for kind, column in columns.items():
        high = [a + b for a, b in zip(low, column, strict=True)]
        points = list(zip(x, low, high, strict=True))
        if corners:
            points = [point for at, point in enumerate(points)
                      if at in (0, len(points) - 1) or point[1:] != points[at - 1][1:]]
        places, lower, upper = zip(*points, strict=True)
        axes.fill_between(places, lower, upper, step=None if slanted else "post", **looks(kind))
        low = high
    return low


def stack_bar(bar: Callable[..., Any], at: float, thickness: float, held: Mapping[str, float],
              looks: Callable[[str], dict[str, Any]]) -> float:
    """A bar of kinds, each from where the one before it ends; returns the last end. ``bar`` is of axes: bar or barh."""
    end = 0.0
    for kind, value in held.items():
        bar(at, value, thickness, end, **looks(kind))
        end += value
    return end


def scale_of(nbytes: float) -> tuple[float, str]:
    """The unit that suits a largest value: (1e6, "MB")."""
    return next((unit, name) for unit, name in BYTES if nbytes >= unit or unit == 1)


def log_log(axes: Axes, values: Sequence[float], names: Sequence[str], base: int = 10) -> None:
    """Logarithmic axes: ticks of x at the values, by their names; those of y in sight as plain numbers, not powers."""
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    axes.set_xticks(values, names)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_yticks([tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]])
    axes.minorticks_off()


def within_limits(axes: Axes) -> None:
    """Keeps the ticks that the axes show; Matplotlib makes one more at each end, whose label lies on other words."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):  # those stand where they should
            axis.set_ticks([tick for tick in axis.get_ticklocs() if min(limits) <= tick <= max(limits)])
