"""The one style of all figures, tables and pages: their colors, and numbers as they write them.

Colors are for ranks, kinds of memory, purposes, phases and formats, and color-blind readers tell them apart. Source of
the palette: Okabe & Ito 2002, "Color Universal Design", whose colors are named below, with a gray for their black; the
five more that kinds of memory need are chosen to stay apart from them for every kind of color vision. On the dark page
each contrasts 3 to 1 at least.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GRAY = "#0072B2", "#D55E00", "#CC79A7", "#5C686E"
LIGHT_GREEN, BROWN = "#A1DA81", "#8B5842"

# What rests between two steps comes first; what lives inside a step is hatched as well.
KIND_COLORS: Mapping[str, str] = MappingProxyType({
    "parameter": BLUE,
    "gradient": VERMILLION,
    "master": YELLOW,
    "optimizer_state": ORANGE,
    "gathered_parameter": SKY_BLUE,
    "secondary_parameter": "#8232FA",
    "unit_gradient": PURPLE,
    "activation": GREEN,
    "activation_gradient": LIGHT_GREEN,
    "checkpointed_input": "#BE64FA",
    "communication_buffer": GRAY,
    "workspace": "#C9C9C9",
    "input": BROWN,
})
RANK_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILLION, YELLOW, GRAY)

# What a collective is for, and what a program computes, by the names of purposes and spans.
PURPOSE_COLORS: Mapping[str, str] = MappingProxyType({
    "parameters": BLUE, "gradients": VERMILLION, "state": SKY_BLUE, "control": GRAY, "unspecified": YELLOW})
PHASE_COLORS: Mapping[str, str] = MappingProxyType({
    "forward": GREEN, "loss": BROWN, "backward": PURPLE, "update": ORANGE})
ARITHMETIC = "other arithmetic"  # outside the spans that are phases
EVENT_COLORS: Mapping[str, str] = MappingProxyType({**PHASE_COLORS, ARITHMETIC: LIGHT_GREEN, **PURPOSE_COLORS})

# ZeRO's stages 0 to 3, each with a mark of its own.
STAGE_COLORS, STAGE_MARKS = (ORANGE, BLUE, GREEN, VERMILLION), ("o", "s", "^", "D")

FORMAT_COLORS: Mapping[str, str] = MappingProxyType({
    "fp32": BLUE, "fp16": VERMILLION, "bf16": GREEN, "fp8_e4m3": PURPLE, "fp8_e5m2": ORANGE})
# Of a master's copy in a format, beside what is kept in that format alone.
COPY_COLORS: Mapping[str, str] = MappingProxyType({
    "fp32": SKY_BLUE, "fp16": BROWN, "bf16": LIGHT_GREEN, "fp8_e4m3": "#8232FA", "fp8_e5m2": GRAY})


def phase_of(path: Iterable[str]) -> str:
    """The phase of arithmetic in spans of these names, outermost first."""
    return next((name for name in path if name in PHASE_COLORS), ARITHMETIC)


def rank_color(rank: int) -> str:
    """The color of a rank in every figure; past eight ranks the colors come again, and the number tells them apart."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def luminance(color: str) -> float:
    """Relative luminance of ``#RRGGBB``, from 0 (black) to 1 (white). Source: WCAG 2.1, "relative luminance"."""
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(color: str) -> str:
    """Black or white, whichever contrasts more with the color."""
    white, black = 1.05 / (luminance(color) + 0.05), (luminance(color) + 0.05) / 0.05
    return "#FFFFFF" if white > black else "#000000"


# -- numbers as texts --------------------------------------------------------------------------------------------------

def short(value: float) -> str:
    """The shortest decimal of a number, without a useless ``.0``."""
    return str(value).removesuffix(".0")


def shortest(value: float | np.generic) -> float:
    """The float with the shortest decimals that give back the same fp32: 1.1001358, not 1.1001358032226562."""
    return float(str(np.float32(value)))


def rough(value: float, digits: int = 3) -> str:
    """The first few digits of a number."""
    return f"{value:.{digits}g}"


def fitted(value: float, columns: int = 10) -> str:
    """As many digits of a number as these columns hold, and no more than nine, which tell any two fp32 apart."""
    texts = (rough(value, digits) for digits in range(9, 2, -1))
    return next((text for text in texts if len(text) <= columns), rough(value))


def percent(share: float) -> str:
    """``100.1 %``; whole percents without a useless ``.0``."""
    return f"{100 * share + 0.0:.1f}".removesuffix(".0") + " %"
