"""How things look: HTML for a notebook, text for a terminal, figures; each thing by its class.

A view says what is shown; it is rendered as HTML by ``as_html`` and for a terminal by ``as_text``. Figures are in the
one style of ``lessons/figures``. What is shown is loaded only when somebody looks (see ``zerosim/shown.py``).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zerosim.display.html import as_html
from zerosim.display.objects import CLUSTER_VIEWS, ENGINE_VIEWS, PLAN_VIEWS, STEP_VIEWS, slider
from zerosim.display.plots import draw_step, plot, show_ring
from zerosim.display.saving import save
from zerosim.display.text import as_text
from zerosim.display.views import View

if TYPE_CHECKING:
    from rich.console import Group


__all__ = ["VIEWS", "View", "draw_step", "html", "plot", "save", "show_ring", "slider", "text", "view"]

VIEWS: Mapping[type, Callable[[Any], View]] = MappingProxyType({
    **CLUSTER_VIEWS, **ENGINE_VIEWS, **PLAN_VIEWS, **STEP_VIEWS})


def view(thing: Any) -> View:
    """What is shown of a thing, by the nearest of its classes that has a look."""
    return next(VIEWS[kind] for kind in type(thing).__mro__ if kind in VIEWS)(thing)


def html(thing: Any) -> str:
    """The thing as HTML: tables, bars of memory, the cut of a vector; escaped, without scripts."""
    return as_html(view(thing))


def text(thing: Any) -> "Group":
    """The thing as rich prints it in a terminal."""
    return as_text(view(thing))
