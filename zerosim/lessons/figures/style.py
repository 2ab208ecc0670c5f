"""The one style of all figures: colors that color-blind readers tell apart, sizes for print and projector.

Matplotlib is imported when something is drawn, never by this module, and always as Figure objects: no figure touches
pyplot's state, and no setting of the reader's changes a picture.
Source of the palette: Okabe & Ito 2002, "Color Universal Design", whose colors are named below, with a gray for their
black; the five more that kinds of memory need are chosen to stay apart from them for every kind of color vision.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerosim.lessons.figures.picture import Picture

ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GRAY = "#0072B2", "#D55E00", "#CC79A7", "#505050"

# What rests between two steps comes first; what lives inside a step is hatched as well.
KIND_COLORS: Mapping[str, str] = MappingProxyType({
    "parameter": BLUE,
    "gradient": VERMILLION,
    "master": YELLOW,
    "optimizer_state": ORANGE,
    "gathered_parameter": SKY_BLUE,
    "unit_gradient": PURPLE,
    "activation": GREEN,
    "activation_gradient": "#A1DA81",
    "checkpointed_input": "#173C50",
    "communication_buffer": "#595959",
    "workspace": "#C9C9C9",
    "input": "#8B5842",
})
RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILLION, YELLOW, GRAY)

# What a collective is for, and what a program computes, by the names of purposes and spans.
PURPOSE_COLORS: Mapping[str, str] = MappingProxyType({
    "parameters": BLUE, "gradients": VERMILLION, "state": SKY_BLUE, "control": GRAY, "unspecified": YELLOW})
PHASE_COLORS: Mapping[str, str] = MappingProxyType({
    "forward": GREEN, "loss": GRAY, "backward": PURPLE, "update": ORANGE})

FORMAT_COLORS: Mapping[str, str] = MappingProxyType({
    "fp32": BLUE, "fp16": VERMILLION, "bf16": GREEN, "fp8_e4m3": PURPLE, "fp8_e5m2": ORANGE})


def rank_color(rank: int) -> str:
    """The color of a rank in every figure; past eight ranks the colors come again, and the number tells them apart."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


@dataclass(frozen=True, slots=True)
class Style:
    """What differs between the light and the dark variant: the page, the ink on it, and two weaker inks."""

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
            "font.size": 12, "axes.titlesize": 13, "axes.labelsize": 12, "xtick.labelsize": 11, "ytick.labelsize": 11,
            "legend.fontsize": 11, "legend.frameon": False, "hatch.linewidth": 0.7, "grid.color": self.faint,
            "figure.facecolor": page, "savefig.facecolor": page, "axes.facecolor": page,
            "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "axes.edgecolor": ink,
            "xtick.color": ink, "ytick.color": ink,
            "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
        }

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the ``with`` block Matplotlib draws and saves in this style; afterwards its settings are as before."""
        import matplotlib.style

        with matplotlib.style.context(["default", self.settings]):
            yield

    def figure(self, width_inches: float, height_inches: float) -> "Picture":
        """An empty figure; call it, and draw, while the style is in force."""
        from zerosim.lessons.figures.picture import Picture

        return Picture(figsize=(width_inches, height_inches))


LIGHT = Style("light", background="#FFFFFF", ink="#1A1A1A", muted="#595959", faint="#D4D4D4")
DARK = Style("dark", background="#16181D", ink="#F2F2F2", muted="#B8BDC6", faint="#464B54")


def luminance(color: str) -> float:
    """Relative luminance of ``#RRGGBB``, from 0 (black) to 1 (white). Source: WCAG 2.1, "relative luminance"."""
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(color: str) -> str:
    """Black or white, whichever contrasts more with the color."""
    white, black = 1.05 / (luminance(color) + 0.05), (luminance(color) + 0.05) / 0.05
    return "#FFFFFF" if white > black else "#000000"
