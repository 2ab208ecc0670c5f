"""Pictures and tables in one call: ``zs.draw.ring(4)``, ``zs.draw.table(...)``, and knobs to turn, ``zs.draw.turn``.

Every figure of `course.figures` has its name here. Called, it measures and draws; ``zs.draw.ring.data(4)`` measures
alone.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.course import figures
from zerosim.course.measured import measured_row
from zerosim.display.drawing import DARK, LIGHT, Drawing
from zerosim.display.render_text import in_lines
from zerosim.display.views import RIGHT, Table, View
from zerosim.numerics.checks import is_count, is_finite_number
from zerosim.numerics.formats import Format
from zerosim.numerics.units import counted
from zerosim.planning.configuration import PlanConfig
from zerosim.planning.timeline import Machine
from zerosim.shown import Shown
from zerosim.zero.placements import Stage

MAY_BE_ZERO = ("stage", "length", "most_run")


class NamedFigure:
    """A figure of `figures.FIGURES`: called with the arguments of its data, and ``dark=True`` for the dark variant, it
    returns the Drawing. ``data`` returns the data alone."""

    def __init__(self, name: str) -> None:
        self.name, made = name, figures.FIGURES[name].data
        self.__doc__ = f"Draws the figure {name!r}, in the dark variant if asked. Its data:\n\n{inspect.getdoc(made)}"
        dark = inspect.Parameter("dark", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        of_data = inspect.signature(made)
        self.__signature__ = of_data.replace(parameters=[*of_data.parameters.values(), dark],
                                             return_annotation=Drawing)

    def data(self, *args: Any, **options: Any) -> Any:
        """The data that the picture shows, measured. Raises ValueError for a value of another kind than the default's,
        and as the figure itself does; TypeError, by the figure's name, for an argument that it does not have."""
        made = figures.FIGURES[self.name].data
        signature = inspect.signature(made)
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{self._called}: {error}; it has {', '.join(signature.parameters)}") from None
        for name, value in given.items():
            self._check(name, value, signature.parameters[name].default)
        return made(*args, **options)

    @property
    def _called(self) -> str:
        """The name that a program calls it by."""
        return f"zs.draw.{self.name.replace('-', '_')}"

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
            fits, what = _is_list(value), "a list with something in it"
        else:
            fits = isinstance(value, Mapping if isinstance(usual, Mapping) else type(usual))
            what = "a mapping of names" if isinstance(usual, Mapping) else f"a {type(usual).__name__}"
        if not fits:
            example = f", as {usual!r}" if isinstance(usual, int | float | str) else ""
            raise ValueError(f"{self._called} was given {name}={value!r}; {name} is {what}{example}")

    def __call__(self, *args: Any, dark: bool = False, **options: Any) -> Drawing:
        return figures.FIGURES[self.name].draw(self.data(*args, **options), DARK if dark else LIGHT)


def _is_list(value: Any) -> bool:
    """True for a list, a tuple or an array, with something in it, and no text."""
    return isinstance(value, Collection) and not isinstance(value, str) and len(value) > 0


activations, adam_states = NamedFigure("activations"), NamedFigure("adam-states")
format_losses = NamedFigure("format-losses")
latency_wall, liveness = NamedFigure("latency-wall"), NamedFigure("liveness")
loss_scale, lost_updates = NamedFigure("loss-scale"), NamedFigure("lost-updates")
memory, memory_scaling = NamedFigure("memory"), NamedFigure("memory-scaling")
mixed_precision, published = NamedFigure("mixed-precision"), NamedFigure("published")
ring, spacing, stages = NamedFigure("ring"), NamedFigure("spacing"), NamedFigure("stages")
timeline, traffic = NamedFigure("timeline"), NamedFigure("traffic")


def timeline_of(what: str, runs: Mapping[str, Any], machine: Machine, *, dark: bool = False) -> Drawing:
    """Draws the timelines of any runs, by title, from their traces; see `figures.timeline_of` for what these need."""
    return figures.timeline(figures.timeline_of(what, runs, machine), DARK if dark else LIGHT)


# -- tables -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, repr=False)
class ShownTable(Shown):
    """A table that a notebook shows as HTML and a terminal as text."""

    table: Table

    def view(self) -> View:
        """The table alone, without a title."""
        return View("", "", (self.table,))

    def __repr__(self) -> str:
        return in_lines(self.view()).lstrip("\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> ShownTable:
    """A table of texts and numbers, by rows. Columns of numbers, and those whose name begins with ``>``, are set to the
    right; whole numbers have commas.

    Raises ValueError for columns that are no names, for rows that are no list of them, and for a row that is no list of
    cells, or has another length than the columns.
    """
    asked: Any = columns
    if isinstance(asked, str) or not isinstance(asked, Iterable) or not all(isinstance(name, str) for name in asked):
        raise ValueError(f"a table was given the columns {asked!r}; give it a list of their names")
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise ValueError(f"a table was given the rows {rows!r}; give it a list of them, each a list of cells")
    given: list[Any] = list(rows)
    for number, row in enumerate(given):
        if isinstance(row, str) or not isinstance(row, Iterable):
            raise ValueError(f"row {number} of a table is {row!r}; give it a list of cells, one for each of "
                             f"{', '.join(columns)}")
    cells = [tuple(row) for row in given]
    for number, row in enumerate(cells):
        if len(row) != len(columns):
            raise ValueError(f"row {number} of a table has {len(row)} cells, and there are {len(columns)} columns "
                             f"({', '.join(columns)}); give it one cell for each")
    numbers = [bool(cells) and all(isinstance(row[at], int | float) for row in cells) for at in range(len(columns))]
    named = tuple(f"{RIGHT}{name.removeprefix(RIGHT)}" if number else name
                  for name, number in zip(columns, numbers, strict=True))
    texts = tuple(tuple(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) for row in cells)
    return ShownTable(Table(caption, named, texts))


def measured(config: PlanConfig, stage: int, recompute: str = "none") -> ShownTable:
    """A plan's estimate of one step beside the step itself, run without data: bytes, line by line.

    Raises what `measured_row` of `zerosim.course.measured` raises.
    """
    lines = measured_row(config, stage, recompute)
    return table(("", "estimate", "measured", "difference"),
                 [(line.name, line.estimated_nbytes, line.measured_nbytes, line.difference_nbytes) for line in lines],
                 f"{config.model.name} at stage {stage} on {counted(config.ranks, 'rank')}: bytes of one rank")


# -- knobs ------------------------------------------------------------------------------------------------------------

WIDGET = "application/vnd.jupyter.widget-view+json"


def turn(drawn: Callable[..., Drawing], /, **knobs: Sequence[Any]) -> "Knobs":
    """A picture with a knob for each keyword of ``drawn``: ``zs.draw.turn(zs.draw.ring, ranks=(4, 2, 3, 5))``.

    The first value of each knob is shown at the beginning; one that has no other is only passed on. Without a
    kernel, or without ipywidgets, that picture is what one sees. Raises ValueError for a knob without values, and for
    no knob.
    """
    empty = [f"{name}={values!r}" for name, values in knobs.items() if not _is_list(values)]
    if empty or not knobs:
        what = "nothing" if not knobs else ", ".join(empty)
        raise ValueError(f"asked to turn {what}; give each knob a list of its values, the one to begin with first, "
                         "as in turn(zs.draw.ring, ranks=(4, 2, 3, 5))")
    values = {name: tuple(of) for name, of in knobs.items()}
    return Knobs(drawn, values, drawn(**{name: of[0] for name, of in values.items()}))


@dataclass(frozen=True, slots=True, repr=False)
class Knobs:
    """A function that draws, the values that a reader may choose for each of its keywords, and the first picture."""

    drawn: Callable[..., Drawing]
    values: Mapping[str, tuple[Any, ...]]
    first: Drawing

    def widget(self) -> Any:
        """The picture under its knobs; ModuleNotFoundError where ipywidgets is not installed."""
        import ipywidgets

        image, said = ipywidgets.Image(value=self.first.on_screen(), layout={"max_width": "100%"}), ipywidgets.Label()
        knobs = {name: ipywidgets.ToggleButtons(
            options=[(str(value), value) for value in values], description=name, style={"button_width": "initial"})
            for name, values in self.values.items() if len(values) > 1}

        def turned(_: Any) -> None:
            chosen = {name: knobs[name].value if name in knobs else values[0] for name, values in self.values.items()}
            try:
                image.value = self.drawn(**chosen).on_screen()
                said.value = ""
            except ValueError as error:  # of settings that do not go together; the picture stays as it was
                said.value = str(error)

        for knob in knobs.values():
            knob.observe(turned, names="value")
        return ipywidgets.VBox([*knobs.values(), said, image])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget, where ipywidgets is installed; beside it goes the first picture, for who has no kernel."""
        try:
            shown: dict[str, Any] = self.widget()._repr_mimebundle_()
        except ModuleNotFoundError:
            return {}
        return {WIDGET: shown[WIDGET]}

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.first._repr_png_()

    def __repr__(self) -> str:
        return repr(self.first)
