"""Figures drawn from runs: each a pure function of data, in one style, with its text alternative.

``ring_data``, ``memory_data`` and their like run something and return a frozen dataclass; ``ring``, ``memory`` and
their like turn it into a Drawing, and nothing else goes into the picture. ``draw`` writes figures by name, as
``zerosim figures`` does; `Figure` says how to add one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zerosim.course.figures.activations import Activations, activations, activations_data
from zerosim.course.figures.adam_states import AdamStates, adam_states, adam_states_data
from zerosim.course.figures.comparison import ComparisonData, stages, stages_data
from zerosim.course.figures.format_losses import FormatLosses, format_losses, format_losses_data
from zerosim.course.figures.latency_wall import LatencyWall, latency_wall, latency_wall_data
from zerosim.course.figures.liveness import Liveness, liveness, liveness_data
from zerosim.course.figures.loss_scale import LossScaleData, loss_scale, loss_scale_data
from zerosim.course.figures.lost_updates import LostUpdatesData, lost_updates, lost_updates_data
from zerosim.course.figures.memory import MemoryData, memory, memory_data
from zerosim.course.figures.memory_scaling import MemoryScaling, memory_scaling, memory_scaling_data
from zerosim.course.figures.mixed_precision import ObservedStep, Passed, mixed_precision, mixed_precision_data
from zerosim.course.figures.published import PublishedData, published, published_data
from zerosim.course.figures.ring import RingData, ring, ring_animation, ring_data
from zerosim.course.figures.spacing import SpacingData, spacing, spacing_data
from zerosim.course.figures.timeline import TimelineData, timeline, timeline_data, timeline_of
from zerosim.course.figures.traffic import Traffic, traffic, traffic_data
from zerosim.display.animation import Animation
from zerosim.display.drawing import DARK, FORMATS, LIGHT, Drawing, Style
from zerosim.numerics.checks import unknown_name

__all__ = ["DARK", "FIGURES", "FORMATS", "LIGHT", "Activations", "AdamStates", "Animation", "ComparisonData", "Drawing",
           "Figure", "FormatLosses", "LatencyWall", "Liveness", "LossScaleData", "LostUpdatesData", "MemoryData",
           "MemoryScaling", "ObservedStep", "Passed", "PublishedData", "RingData", "SpacingData", "Style",
           "TimelineData", "Traffic", "activations", "activations_data", "adam_states", "adam_states_data", "draw",
           "format_losses", "format_losses_data", "latency_wall", "latency_wall_data", "liveness", "liveness_data",
           "loss_scale", "loss_scale_data", "lost_updates", "lost_updates_data", "memory", "memory_data",
           "memory_scaling", "memory_scaling_data", "mixed_precision", "mixed_precision_data", "published",
           "published_data", "ring", "ring_animation", "ring_data", "spacing", "spacing_data", "stages", "stages_data",
           "timeline", "timeline_data", "timeline_of", "traffic", "traffic_data"]

@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table of figures: ``data()`` is what the committed figure shows, ``draw`` makes the picture; a
    figure that moves has ``animate`` too.

    To add a figure, write a file of its name with two functions, ``NAME_data()`` that runs something and returns a
    frozen dataclass, and ``NAME(data, style)`` that returns a Drawing; then add one row to FIGURES. The tests ask every
    row the same questions.
    """

    data: Callable[[], Any]
    draw: Callable[[Any, Style], Drawing]
    animate: Callable[[Any, Style], Animation] | None = None


FIGURES: Mapping[str, Figure] = MappingProxyType({
    "activations": Figure(activations_data, activations),
    "adam-states": Figure(adam_states_data, adam_states),
    "format-losses": Figure(format_losses_data, format_losses),
    "latency-wall": Figure(latency_wall_data, latency_wall),
    "liveness": Figure(liveness_data, liveness),
    "loss-scale": Figure(loss_scale_data, loss_scale),
    "lost-updates": Figure(lost_updates_data, lost_updates),
    "memory": Figure(memory_data, memory),
    "memory-scaling": Figure(memory_scaling_data, memory_scaling),
    "mixed-precision": Figure(mixed_precision_data, mixed_precision),
    "published": Figure(published_data, published),
    "ring": Figure(ring_data, ring, ring_animation),
    "spacing": Figure(spacing_data, spacing),
    "stages": Figure(stages_data, stages),
    "timeline": Figure(timeline_data, timeline),
    "traffic": Figure(traffic_data, traffic),
})
GIF = "gif"  # of those that move


def draw(names: Iterable[str] = (), out: Path | str = "figures", format: str = "svg", dark: bool = False) -> list[Path]:
    """Draws the named figures, or all, into the folder ``out``: ``ring.svg``, or ``ring-dark.svg`` in the dark variant.

    As gif it animates those that move; without names, all of them. Returns the files' paths. Raises ValueError
    for a name or format that does not exist, and for one that does not move, before anything is drawn, and for an
    ``out`` that is no folder or cannot be written.
    """
    moves = format == GIF
    chosen = list(names) or [name for name, figure in FIGURES.items() if not moves or figure.animate]
    for name in chosen:
        _check(name, format)
    if format not in FORMATS and not moves:
        known = ", ".join((*FORMATS, GIF))
        raise ValueError(f"no figure can be saved as {format!r}; choose one of {known}")
    folder, style = Path(out), DARK if dark else LIGHT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_drawn(FIGURES[name], style, moves).save(folder / f"{name}{'-dark' * dark}.{format}")
                for name in chosen]
    except OSError as error:
        raise ValueError(f"asked to draw into {str(folder)!r}, but: {error.strerror} ({error.filename}); "
                         "name a folder that can be made and written") from error


def _check(name: str, format: str) -> None:
    if name not in FIGURES:
        raise unknown_name(f"no figure is called {name!r}", name, FIGURES, "the figures are")
    if format == GIF and FIGURES[name].animate is None:
        moving = ", ".join(other for other, figure in FIGURES.items() if figure.animate)
        raise ValueError(f"the figure {name!r} does not move, so there is no {format} of it; those that do: {moving}")


def _drawn(figure: Figure, style: Style, moves: bool) -> Drawing | Animation:
    draw = figure.animate if moves and figure.animate else figure.draw
    return draw(figure.data(), style)
