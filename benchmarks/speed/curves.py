"""Measured rows along a curve as a picture: seconds of a step beside its floor, with the slopes of both."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zerosim.display.drawing import LIGHT, Drawing, Style, log_log

from .runner import Measured

AXES = {"by-ranks": "N (ranks)", "by-parameters": "parameters", "by-layers": "layers"}


def slope(values: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent by which seconds grow with the values, over the upper half of them."""
    upper = min(len(values) // 2, len(values) - 2)
    return float(np.polyfit(np.log(values[upper:]), np.log(seconds[upper:]), 1)[0])


def drawings(measured: Iterable[Measured], style: Style = LIGHT) -> Iterator[Drawing]:
    """Each curve of which at least two rows were measured."""
    found = defaultdict[str, list[Measured]](list)
    for one in measured:
        if one.row.name.startswith("by-"):
            found[one.row.name.rpartition("-")[0]].append(one)
    return (drawing(name, points, style) for name, points in found.items() if len(points) > 1)


def drawing(name: str, points: Sequence[Measured], style: Style = LIGHT) -> Drawing:
    """The points of one curve, at least two."""
    values = [int(point.row.name.rpartition("-")[2]) for point in points]
    lines = {"zerosim, accounts on": [1e3 * point.seconds for point in points],
             "the floor: products and memory traffic": [1e3 * point.seconds_against for point in points]}
    title = f"A ZeRO-3 step of an MLP by {name.removeprefix('by-')}"
    said = "; ".join(f"{what}: {seconds[0]:.3g} to {seconds[-1]:.3g} ms, slope {slope(values, seconds):.2f}"
                     for what, seconds in lines.items())
    with style.figure(9.0, 5.5, title, "Milliseconds a step, all ranks in one process", below=0.86) as figure:
        ((axes,),) = figure.panels(1, 1, left=0.95, right=0.3, top=1.4, bottom=1.35)
        for (what, seconds), color, mark in zip(lines.items(), ("#0072B2", "#D55E00"), "os", strict=True):
            axes.plot(values, seconds, color=color, marker=mark,
                      label=f"{what}, slope {slope(values, seconds):.2f}")
        log_log(axes, values, [f"{value:,}" for value in values])
        axes.set_xlabel(AXES[name])
        axes.grid(axis="y")
        figure.legend(*axes.get_legend_handles_labels(), ncols=1, bbox_to_anchor=(0.5, 0.02))
    return Drawing(name, title, said, style, figure)
