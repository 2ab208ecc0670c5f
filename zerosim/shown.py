"""Mixins of what displays itself: as HTML in a notebook, as text in a terminal, as a figure or a file when asked.

A class says here only that it can be displayed; `zerosim.display` knows how, and is imported only when something is
displayed, so that who only computes never loads Matplotlib. This file is the one door: all others import downwards,
inside functions too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Shown:
    """A thing that Jupyter shows as HTML and rich as text; the view is chosen by class."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from zerosim import display

        return display.html(self)

    def __rich__(self) -> Any:
        from zerosim import display

        return display.text(self)


class Answer(Shown):
    """The answer of a command, which ``print`` shows as the command does, with its lines unbroken."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data; what is no finite number is the text "inf", "-inf" or "nan"."""
        from zerosim.display.views import plain_record

        return plain_record(self)

    def __str__(self) -> str:
        from zerosim import display
        from zerosim.display.render_text import in_lines

        return in_lines(display.view(self))


class Plotted(Shown):
    """A thing that can be drawn, too."""

    __slots__ = ()

    def plot(self, *, dark: bool = False) -> "Figure":
        """A Matplotlib figure in the project's style, with its title and its words; Jupyter shows it.

        Raises ValueError where there is nothing to draw.
        """
        from zerosim.display.plots import plot

        return plot(self, dark=dark)


class ShownPlan(Plotted):
    """A plan, which ``print`` shows as a table of plain text, too."""

    __slots__ = ()

    def __str__(self: Any) -> str:
        from zerosim.display.plan_table import text_of

        return text_of(self)


class ShownRuns(Shown):
    """Runs of programs, of which the last can be drawn, and saved."""

    def show_ring(self: Any, *, dark: bool = False) -> "Figure":
        """A Matplotlib figure of who sent how many bytes to whom in the last run, the ranks on a ring.

        Raises ValueError before the first run, and for more ranks than a page holds.
        """
        from zerosim.display.plots import show_ring

        return show_ring(self, dark=dark)

    def save(self: Any, path: "str | Path") -> "Path":
        """Writes what the last run did as a recording, a JSON file that ``zerosim report`` and planning.timeline read.

        Raises ValueError before the first run, after one that failed, and for a path that cannot be written.
        """
        from zerosim.display.saving import save

        return save(self, path)


class SavedTimeline:
    """A replay, which can be saved for a viewer."""

    def save_chrome_trace(self: Any, path: "str | Path") -> "Path":
        """Writes it as a JSON file of the Trace Event Format, which Perfetto and Chrome open: all of it, or nothing.

        Raises ValueError for a path that cannot be written.
        """
        from zerosim.display.chrome_trace import save_chrome_trace

        return save_chrome_trace(self, path)


class ShownStep(Shown):
    """One step of a run, which can be drawn."""

    __slots__ = ()

    def draw(self: Any, *, dark: bool = False) -> "Axes":
        """Matplotlib axes: the vectors of all ranks, chunk by chunk, and the messages of this step as arrows."""
        from zerosim.display.plots import draw_step

        return draw_step(self, dark=dark)


class ShownSteps(Shown):
    """The steps of a run, which can be looked at one by one."""

    def slider(self: Any) -> Any:
        """An ipywidgets slider over the steps; what has not been taken yet is taken now.

        Steps that were taken before are not in it. Raises ModuleNotFoundError where ipywidgets is not installed.
        """
        from zerosim.display.step_plots import slider

        return slider(self)
