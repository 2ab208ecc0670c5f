"""Pictures and tables in one call: ``zs.draw.ring(4)``, ``zs.draw.table(...)``, and knobs to turn, ``zs.draw.turn``.

Every figure of `course.figures` has its name here. Called, it measures and draws; ``zs.draw.ring.data(4)`` measures
alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.course import figures
from zerosim.course.figures import FIGURES, is_list
from zerosim.course.measured import measured_row
from zerosim.display.drawing import DARK, LIGHT, Drawing
from zerosim.display.render_text import in_lines
from zerosim.display.views import RIGHT, Table, View
from zerosim.numerics.units import counted
from zerosim.planning.configuration import PlanConfig
from zerosim.planning.timeline import Machine
from zerosim.shown import Shown

activations, adam_states = FIGURES["activations"], FIGURES["adam-states"]
format_losses = FIGURES["format-losses"]
latency_wall, liveness = FIGURES["latency-wall"], FIGURES["liveness"]
loss_scale, lost_updates = FIGURES["loss-scale"], FIGURES["lost-updates"]
memory, memory_scaling = FIGURES["memory"], FIGURES["memory-scaling"]
mixed_precision, published = FIGURES["mixed-precision"], FIGURES["published"]
ring, spacing, stages = FIGURES["ring"], FIGURES["spacing"], FIGURES["stages"]
timeline, traffic = FIGURES["timeline"], FIGURES["traffic"]


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
    empty = [f"{name}={values!r}" for name, values in knobs.items() if not is_list(values)]
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
