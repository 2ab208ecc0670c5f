"""Loss curves of the same small training in several formats, with and without what makes 16 bits work.

Legend: S loss scale, u the unit of the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.course.precision_runs import BATCHES, POLICIES, SMALL_UNIT, SmallRun, format_run
from zerosim.display.drawing import LIGHT, Drawing, Style, within_limits
from zerosim.display.style import FORMAT_COLORS, ORANGE, PURPLE

TITLE = "The same training in several formats"
DASHES = (0, (5, 1.5))
# The first three lie on each other, each narrower than the one below it. Dashed: something is left out.
LOOKS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "fp32": {"color": FORMAT_COLORS["fp32"], "linewidth": 9.0},
    "bf16 with a master": {"color": FORMAT_COLORS["bf16"], "linewidth": 5.0},
    "fp16 with a master and loss scaling": {"color": FORMAT_COLORS["fp16"], "linewidth": 1.8},
    "fp16 with a master, S = 1": {"color": ORANGE, "linewidth": 2.4, "linestyle": DASHES},
    "bf16 without a master": {"color": PURPLE, "linewidth": 2.4, "linestyle": DASHES},
})


@dataclass(frozen=True, slots=True)
class FormatLosses:
    """Each run by its name, all with the data in one unit."""

    unit: float
    window: int
    runs: Mapping[str, SmallRun]

    def curve(self, name: str) -> list[float]:
        """The mean loss of the last ``window`` steps, from the step on that has so many."""
        found: list[float] = np.convolve(self.runs[name].losses, np.ones(self.window) / self.window, "valid").tolist()
        return found


def format_losses_data(steps: int = 160, unit: float = SMALL_UNIT, names: Sequence[str] = tuple(POLICIES),
                       window: int = BATCHES) -> FormatLosses:
    """Trains with each of POLICIES that is named, ``window`` being 1 to ``steps`` steps; ValueError otherwise."""
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names or not 1 <= window <= steps:
        raise ValueError(f"losses of formats take names of {', '.join(POLICIES)}, and means of 1 to {steps} steps; "
                         f"found {', '.join(map(repr, unknown)) or len(names)} and {window}")
    if unit <= 0:
        raise ValueError(f"losses of formats are of data in a unit above 0, found {unit!r}; 1.0 is as it is")
    return FormatLosses(unit, window, MappingProxyType({name: format_run(POLICIES[name], steps, unit=unit)
                                                        for name in names}))


def format_losses(data: FormatLosses, style: Style = LIGHT) -> Drawing:
    """A line for each format, named at its end."""
    words = f"Adam on a small network. {_about(data.unit)}\nDashed: something is left out."
    with style.figure(11.6, 6.8, TITLE, words, below=0.88) as figure:
        axes = figure.panel(left=1.0, right=0.35, top=1.45, bottom=1.75)
        for name in data.runs:
            curve = data.curve(name)
            (line,) = axes.plot(range(data.window, data.window + len(curve)), curve, solid_capstyle="butt",
                                label=f"{name}: {curve[-1]:.4f} at the end", **LOOKS[name])
            # All points: which of them Matplotlib would leave out hangs on the last bits of a processor's BLAS.
            line.get_path().should_simplify = False
        axes.set(xlabel="step of the training (steps)", ylabel=f"loss, mean of {data.window} steps")
        within_limits(axes)
        axes.grid()
        figure.legend(ncols=2, handlelength=3.4)
    return Drawing("format-losses", TITLE, _description(data), style, figure)


def _about(unit: float) -> str:
    return "" if unit == 1 else (f"Its data are measured in a unit {1 / unit:,.0f} times as large, which makes "
                                 "gradients small.")


def _description(data: FormatLosses) -> str:
    said = [f"{name}: {data.curve(name)[0]:.3g} at first, {data.curve(name)[-1]:.3g} at the end, "
            f"{sum(run.skipped)} steps skipped" for name, run in data.runs.items()]
    return f"Loss curves of a small network trained with Adam. {_about(data.unit)} {'; '.join(said)}."
