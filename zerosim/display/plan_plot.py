"""The figure of a plan: what one rank would hold under each row, beside what its device has.

A plan is an estimate: it is read here as data, and nothing is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.display.drawing import LIGHT, Drawing, Style, heading
from zerosim.display.objects import PARTS, parts_of, row_name
from zerosim.numerics.units import counted
from zerosim.planning.plan import Plan

# The parts of what a device must hold, by the names of a row's fields, in the order of the stack; hatched: in a step.
NAMES: Mapping[str, str] = MappingProxyType({"optimizer": "optimizer and masters", "overhead": "the runtime's own",
                                             "transient": "what comes and goes, at the step's fullest moment"})
HATCHED = ("transient",)


@dataclass(frozen=True, slots=True)
class PlanBars:
    """Bytes by part of each row, by its name, what the device has, and the verdict."""

    model: str
    verdict: str
    bars: Mapping[str, Mapping[str, int]]
    capacity_nbytes: int

    @property
    def parts(self) -> list[str]:
        """The parts of which any row has anything."""
        return [part for part in PARTS if any(held[part] for held in self.bars.values())]


def plan_bars_data(plan: Plan) -> PlanBars:
    """Reads a plan's rows."""
    config = plan.config
    what = f"{config.model.name} on {counted(config.ranks, 'rank')} of {config.device.name}"
    return PlanBars(what, plan.verdict, {row_name(row): parts_of(row) for row in plan.rows},
                    plan.rows[0].capacity_nbytes)


def plan_bars(data: PlanBars, style: Style = LIGHT) -> Drawing:
    """One stacked bar for each row, and a line where the device is full."""
    title = f"What one rank would hold: {data.model}"
    width, height = 11.0, 3.15 + 0.42 * len(data.bars)
    with style.figure(width, height) as figure:
        axes = figure.add_axes((1.85 / width, 1.6 / height, 1 - 3.55 / width, 1 - 2.85 / height))
        widest = max(data.capacity_nbytes, *(sum(held.values()) for held in data.bars.values())) / 1e9
        for place, held in enumerate(data.bars.values()):
            low = 0.0
            for part in data.parts:
                axes.barh(place, held[part] / 1e9, 0.72, low, **_look(part, style))
                low += held[part] / 1e9
            fits = sum(held.values()) <= data.capacity_nbytes
            axes.annotate(f"{low:,.1f}{'' if fits else ' (misses)'}", (low, place), (5, 0), textcoords="offset points",
                          va="center", fontweight="normal" if fits else "bold", annotation_clip=False,
                          bbox={"facecolor": style.background, "edgecolor": "none", "pad": 0.6})
        axes.axvline(data.capacity_nbytes / 1e9, color=style.ink, linestyle="--", linewidth=1.4)
        axes.annotate(f"the device has {data.capacity_nbytes / 1e9:,.1f}", (data.capacity_nbytes / 1e9, 1), (0, 4),
                      xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="center", va="bottom")
        axes.set_yticks(range(len(data.bars)), list(data.bars))
        axes.set_ylim(len(data.bars) - 0.45, -0.55)
        axes.set_xlim(0, widest * 1.02)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel("held by one rank (GB)")
        heading(figure, title, data.verdict, style)
        figure.legend(*_legend(data, style), loc="lower center", ncols=4, columnspacing=1.6)
    said = "; ".join(f"{name} {sum(held.values()) / 1e9:,.2f} GB" for name, held in data.bars.items())
    return Drawing("plan", title, f"{data.verdict} Stacked bars: {said}. The device has "
                   f"{data.capacity_nbytes / 1e9:,.2f} GB.", style, figure)


def _look(part: str, style: Style) -> dict[str, Any]:
    hatch = "////" if part in HATCHED else ""
    return {"facecolor": PARTS[part], "edgecolor": style.background, "linewidth": 0.0, "hatch": hatch}


def _legend(data: PlanBars, style: Style) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    return [Patch(**_look(part, style)) for part in data.parts], [NAMES.get(part, part) for part in data.parts]
