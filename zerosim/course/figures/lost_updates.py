"""One weight to which the same small update is added again and again: without a master copy, and with one.

Legend: w the weight, δ the update.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerosim.course.lost_updates import Task, path_of
from zerosim.display.drawing import LIGHT, Axes, Drawing, Style, within_limits
from zerosim.display.style import COPY_COLORS, FORMAT_COLORS
from zerosim.numerics.formats import format_of
from zerosim.numerics.rounding import round_to

TITLE = "The same small update, added again and again"

@dataclass(frozen=True, slots=True)
class WeightPaths:
    """w before the first step and after each, (steps + 1,), while δ is added to it.

    ``master`` is w in fp32; ``copies`` are its roundings to each format, which the layers would compute with; ``alone``
    is w in the format itself, by format.
    """

    update: float
    steps: int
    master: tuple[float, ...]
    copies: tuple[tuple[float, ...], ...]
    alone: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LostUpdatesData:
    """A run for each update, all from one first weight."""

    weight: float
    formats: tuple[str, ...]
    runs: tuple[WeightPaths, ...]


def lost_updates_data(updates: Sequence[float] = (1e-5, 6e-4), steps: Sequence[int] = (3000, 60), weight: float = 1.0,
                      formats: Sequence[str] = ("bf16", "fp16")) -> LostUpdatesData:
    """Adds each update so many times, in fp32 and in every format by itself.

    Raises ValueError where there are not as many updates as numbers of steps.
    """
    if len(updates) != len(steps):
        raise ValueError(f"lost updates take a number of steps for each update, found {len(steps)} for "
                         f"{len(updates)} updates")
    names = tuple(format_of(name).name for name in formats)
    return LostUpdatesData(weight, names, tuple(_run(names, Task(weight, (update,), count))
                                                for update, count in zip(updates, steps, strict=True)))


def _run(names: Sequence[str], task: Task) -> WeightPaths:
    master, *alone = (path_of(task, name)[:, 0].astype(np.float32) for name in ("fp32", *names))
    return WeightPaths(task.updates[0], task.steps, tuple(master.tolist()),
                       tuple(tuple(round_to(master, name).tolist()) for name in names),
                       tuple(tuple(one.tolist()) for one in alone))


def lost_updates(data: LostUpdatesData, style: Style = LIGHT) -> Drawing:
    """A panel for each update: the weight over the steps."""
    width = max(10.6, 6.2 * len(data.runs))
    with style.figure(width, 6.2) as figure:
        panels = figure.subplots(1, len(data.runs), squeeze=False, gridspec_kw={
            "left": 1.05 / width, "right": 1 - 0.3 / width, "top": 0.745, "bottom": 0.235, "wspace": 0.26})[0]
        for axes, run in zip(panels, data.runs, strict=True):
            _panel(axes, data, run)
            axes.set_title(f"δ = {run.update:g}, {run.steps:,} times", fontsize=13)
        figure.legend(*panels[0].get_legend_handles_labels(), ncols=3, handlelength=3.2)
        figure.text(0.2 / width, 0.945, TITLE, va="center", fontsize=17, fontweight="bold")
        figure.text(0.2 / width, 0.875, "A 16-bit weight stands still, or moves by whole gaps. A master in fp32 "
                    "remembers what its 16-bit copy cannot show yet.", va="center", color=style.muted)
    return Drawing("lost-updates", TITLE, _description(data), style, figure)


def _panel(axes: Axes, data: LostUpdatesData, run: WeightPaths) -> None:
    """Copies of the master are thin stairs; a format alone is a thick line, so that two that lie on each other show."""
    numbers = range(run.steps + 1)
    axes.plot(numbers, run.master, color=FORMAT_COLORS["fp32"], linewidth=2.0, label="master in fp32", zorder=4)
    for name, copy in zip(data.formats, run.copies, strict=True):
        axes.step(numbers, copy, where="post", color=COPY_COLORS[name], linewidth=1.5, label=f"its copy in {name}")
    for name, width, alone in zip(data.formats, (9.0, 3.5, 2.0), run.alone, strict=False):
        axes.plot(numbers, alone, color=FORMAT_COLORS[name], linewidth=width, solid_capstyle="butt",
                  label=f"{name} without a master")
    axes.set(xlabel="updates added (steps)", ylabel="weight")
    axes.set_xlim(0, run.steps)
    within_limits(axes)
    axes.grid()


def _description(data: LostUpdatesData) -> str:
    said = []
    for run in data.runs:
        parts = [f"the fp32 master {run.master[-1]:.8g}"]
        parts += [f"its {name} copy {copy[-1]:.8g}" for name, copy in zip(data.formats, run.copies, strict=True)]
        parts += [f"{name} without a master {alone[-1]:.8g}" for name, alone in
                  zip(data.formats, run.alone, strict=True)]
        said.append(f"After {run.steps:,} times {run.update:g}: {', '.join(parts)}.")
    return f"Lines of one weight over the steps, from {data.weight:g} on. {' '.join(said)}"
