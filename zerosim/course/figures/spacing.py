"""The gaps between a format's numbers: how large an update of a weight must be not to be lost.

Legend: w a weight. The gap is that from w to the next larger number of the format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.display.drawing import LIGHT, Drawing, Style
from zerosim.display.style import FORMAT_COLORS
from zerosim.numerics.checks import is_count
from zerosim.numerics.formats import format_of
from zerosim.numerics.rounding import round_to
from zerosim.numerics.rounding import spacing as gap_above

TITLE = "An update smaller than half the gap is lost"

@dataclass(frozen=True, slots=True)
class SpacingData:
    """Half the gap above each of ``weights`` (powers of two), by format; NaN for weights that the format lacks."""

    weights: tuple[float, ...]
    formats: tuple[str, ...]
    half_gaps: tuple[tuple[float, ...], ...]
    update: float

    def half_gap(self, name: str, weight: float) -> float:
        """Half the gap above one of the weights in one of the formats."""
        return self.half_gaps[self.formats.index(name)][self.weights.index(weight)]


def spacing_data(formats: Sequence[str] = ("fp8_e4m3", "bf16", "fp16", "fp32"), exponents: tuple[int, int] = (-30, 17),
                 update: float = 1e-5) -> SpacingData:
    """Half the gap above 2^e for every e from the first exponent to the last, in each format.

    Raises ValueError for exponents that are not two whole numbers in their order, for an update that is not above 0,
    and for a format that has none of the weights.
    """
    given: Sequence[int] = exponents
    low, high = given if len(given) == 2 else (0, -1)
    if not is_count(low) or not is_count(high) or low >= high or update <= 0:
        raise ValueError("spacing takes a first and a last exponent of weights, as (-30, 17), and an update above 0; "
                         f"found {exponents!r} and {update!r}")
    names = tuple(format_of(name).name for name in formats)
    weights = 2.0 ** np.arange(low, high + 1)
    halves = [np.where(round_to(weights, name) == weights, gap_above(weights, name) / 2, np.nan) for name in names]
    if none := [name for name, row in zip(names, halves, strict=True) if not np.isfinite(row).any()]:
        raise ValueError(f"asked for the gaps of {', '.join(none)}: none of the weights from 2^{low} to 2^{high} is a "
                         "number of that format; take other exponents")
    return SpacingData(tuple(weights.tolist()), names, tuple(tuple(row.tolist()) for row in halves), update)


def spacing(data: SpacingData, style: Style = LIGHT) -> Drawing:
    """A line for each format over the size of the weight, both logarithmic, and a level line at the update."""
    with style.figure(10.0, 6.4) as figure:
        axes = figure.add_axes((0.11, 0.115, 0.86, 0.7))
        for name, halves in zip(data.formats, data.half_gaps, strict=True):
            axes.step(data.weights, halves, where="post", color=FORMAT_COLORS[name], linewidth=2.4)
            first = next(at for at, half in enumerate(halves) if np.isfinite(half))
            axes.annotate(name, (data.weights[first], halves[first]), (5, 20), textcoords="offset points", fontsize=13,
                          fontweight="bold")
        axes.axhline(data.update, color=style.muted, linestyle="--", linewidth=1.4)
        axes.annotate(f"an update of {data.update:g}", (0, data.update), (5, 5), color=style.muted,
                      xycoords=axes.get_yaxis_transform(), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="weight", ylabel="half the gap above it")
        known = [half for halves in data.half_gaps for half in (*halves, data.update) if np.isfinite(half)]
        _decades(axes.xaxis, (data.weights[0], data.weights[-1] / 1.02), 2)
        _decades(axes.yaxis, (min(known) / 4, max(known) * 8), 3)
        axes.minorticks_off()
        axes.grid()
        figure.text(0.02, 0.95, TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.02, 0.882, "Added to a positive weight, an update under the format's line is rounded away; above "
                    "the line it is not.", va="center", color=style.muted)
    return Drawing("spacing", TITLE, _description(data), style, figure)


def _decades(axis: Any, limits: tuple[float, float], apart: int) -> None:
    """Ticks at powers of ten inside the limits, so many decades apart, or one where there are fewer."""
    low, high = limits
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    axis.set_ticks([10.0**e for e in range(first, last + 1, apart if last - first > 2 * apart else 1)])
    axis.axes.set(**{f"{axis.axis_name}lim": limits})


def _description(data: SpacingData) -> str:
    at = 1.0 if 1.0 in data.weights else data.weights[0]
    parts = [_words(name, data.half_gap(name, at), data.update) for name in data.formats]
    return (f"Half the gap between neighboring numbers, for weights from {data.weights[0]:.2g} to "
            f"{data.weights[-1]:g}, both axes logarithmic: stairs that double where the weight doubles, and are level "
            f"below the format's smallest normal number. Above a weight of {at:g} it is {'; '.join(parts)}. Toward 0 "
            "from a power of two the gap is half of that.")


def _words(name: str, half: float, update: float) -> str:
    if np.isnan(half):
        return f"no number in {name}, which does not reach so far"
    return f"{half:.3g} in {name}, so that {update:g} is {'kept' if update > half else 'lost'}"
