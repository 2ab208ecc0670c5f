"""An extension of griffe, which reads the docstrings for the reference: their prose becomes Markdown."""

from typing import Any

import griffe

from zerosim_site.prose import as_markdown


class PlainProse(griffe.Extension):
    """Turns each docstring into Markdown that says the same."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
