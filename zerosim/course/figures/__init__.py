"""Figures drawn from runs: each a pure function of data, in one style, with its text alternative.

``ring_data``, ``memory_data`` and their like run something and return a frozen dataclass; ``ring``, ``memory`` and
their like turn it into a Drawing, and nothing else goes into the picture. ``draw`` writes figures by name, as
``zerosim figures`` does; `Figure` says how to add one.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

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
from zerosim.numerics.checks import is_count, is_finite_number, unknown_name
from zerosim.numerics.formats import Format
from zerosim.zero.placements import Stage

__all__ = ["DARK", "FIGURES", "FORMATS", "LIGHT", "Activations", "AdamStates", "Animation", "ComparisonData", "Drawing",
           "Figure", "FormatLosses", "LatencyWall", "Liveness", "LossScaleData", "LostUpdatesData", "MemoryData",
           "MemoryScaling", "ObservedStep", "Passed", "PublishedData", "RingData", "SpacingData", "Style",
           "TimelineData", "Traffic", "activations", "activations_data", "adam_states", "adam_states_data", "draw",
           "format_losses", "format_losses_data", "latency_wall", "latency_wall_data", "liveness", "liveness_data",
           "loss_scale", "loss_scale_data", "lost_updates", "lost_updates_data", "memory", "memory_data",
           "memory_scaling", "memory_scaling_data", "mixed_precision", "mixed_precision_data", "published",
           "published_data", "ring", "ring_animation", "ring_data", "spacing", "spacing_data", "stages", "stages_data",
           "timeline", "timeline_data", "timeline_of", "traffic", "traffic_data"]

MAY_BE_ZERO = ("stage", "length", "most_run")


class Figure:
    """A figure by its name: called with the arguments of its data, and ``dark=True`` for the dark variant, it returns
    the Drawing. ``data`` returns the data alone, ``draw`` makes the picture of them, and of a figure that moves
    ``animate`` the animation.

    To add a figure, write a file of its name with two functions, ``NAME_data()`` that runs something and returns a
    frozen dataclass, and ``NAME(data, style)`` that returns a Drawing; then add one row to FIGURES, and its name to
    `course.draw`. The tests ask every row the same questions.
    """

    def __init__(self, make_data: Callable[..., Any], draw: Callable[[Any, Style], Drawing],
                 animate: Callable[[Any, Style], Animation] | None = None) -> None:
        self.make_data, self.draw, self.animate = make_data, draw, animate
        self.name = draw.__name__.replace("_", "-")
        self.__doc__ = (f"Draws the figure {self.name!r}, in the dark variant if asked. Its data:\n\n"
                        f"{inspect.getdoc(make_data)}")
        dark = inspect.Parameter("dark", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        of_data = inspect.signature(make_data)
        self.__signature__ = of_data.replace(parameters=[*of_data.parameters.values(), dark],
                                             return_annotation=Drawing)

    def data(self, *args: Any, **options: Any) -> Any:
        """The data that the picture shows, measured. Raises ValueError for a value of another kind than the default's,
        and as the figure itself does; TypeError, by the figure's name, for an argument that it does not have."""
        signature = inspect.signature(self.make_data)
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{self._called}: {error}; it has {', '.join(signature.parameters)}") from None
        for name, value in given.items():
            self._check(name, value, signature.parameters[name].default)
        return self.make_data(*args, **options)

    @property
    def _called(self) -> str:
        """The name that a program calls it by."""
        return f"zs.draw.{self.draw.__name__}"

    def _check(self, name: str, value: Any, usual: Any) -> None:
        """Raises ValueError for a value that is not of the kind of the ``usual`` one, with that as an example."""
        if usual is None or (name == "stage" and isinstance(value, Stage)):
            return
        if isinstance(usual, int):
            least = 0 if name in MAY_BE_ZERO else 1
            fits, what = is_count(value) and value >= least, f"a whole number, {least} or more"
        elif isinstance(usual, float):
            fits, what = is_finite_number(value), "a finite number"
        elif isinstance(usual, str):
            fits, what = isinstance(value, str | Format | np.dtype | type), "a name"
        elif isinstance(usual, Sequence):
            fits, what = is_list(value), "a list with something in it"
        else:
            fits = isinstance(value, Mapping if isinstance(usual, Mapping) else type(usual))
            what = "a mapping of names" if isinstance(usual, Mapping) else f"a {type(usual).__name__}"
        if not fits:
            example = f", as {usual!r}" if isinstance(usual, int | float | str) else ""
            raise ValueError(f"{self._called} was given {name}={value!r}; {name} is {what}{example}")

    def __call__(self, *args: Any, dark: bool = False, **options: Any) -> Drawing:
        return self.draw(self.data(*args, **options), DARK if dark else LIGHT)


def is_list(value: Any) -> bool:
    """True for a list, a tuple or an array, with something in it, and no text."""
    return isinstance(value, Collection) and not isinstance(value, str) and len(value) > 0


FIGURES: Mapping[str, Figure] = MappingProxyType({figure.name: figure for figure in (
    Figure(activations_data, activations), Figure(adam_states_data, adam_states),
    Figure(format_losses_data, format_losses), Figure(latency_wall_data, latency_wall),
    Figure(liveness_data, liveness), Figure(loss_scale_data, loss_scale), Figure(lost_updates_data, lost_updates),
    Figure(memory_data, memory), Figure(memory_scaling_data, memory_scaling),
    Figure(mixed_precision_data, mixed_precision), Figure(published_data, published),
    Figure(ring_data, ring, ring_animation), Figure(spacing_data, spacing), Figure(stages_data, stages),
    Figure(timeline_data, timeline), Figure(traffic_data, traffic))})
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
