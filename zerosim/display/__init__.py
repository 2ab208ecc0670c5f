"""The display of anything, by its class: HTML in a notebook, text in a terminal, figures.

A `View` says what is shown: a title and its parts, each a table, bars of bytes, the cut of a vector, a heading or a
note. It is made once and rendered by ``render_html.as_html`` and ``render_text.as_text``, so that both say the same.
``objects`` has the views of the library's classes, ``plots`` their figures, ``explore_page`` the page that moves,
``report`` that of a recorded run. What draws, and what is drawn, is imported only when something is displayed.
"""

from typing import TYPE_CHECKING, Any

from zerosim.display.views import View

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["View", "html", "text", "view"]


def view(thing: Any) -> View:
    """The view of a thing: its own, as the course's answers have, or that of the nearest of its classes; of a view,
    itself."""
    if isinstance(thing, View):
        return thing
    if hasattr(thing, "view"):  # what stands above this floor need not be known here
        own: View = thing.view()
        return own
    from zerosim.display.objects import VIEWS

    return next(VIEWS[kind] for kind in type(thing).__mro__ if kind in VIEWS)(thing)


def html(thing: Any) -> str:
    """The thing as HTML: tables, bars of memory, the cut of a vector; escaped, without scripts."""
    from zerosim.display.render_html import as_html

    return as_html(view(thing))


def text(thing: Any) -> "Group":
    """The thing as rich prints it in a terminal."""
    from zerosim.display.render_text import as_text

    return as_text(view(thing))
