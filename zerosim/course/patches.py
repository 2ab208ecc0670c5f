"""A planted bug as a patch, as one reads them: lines of one function of the package, and what stands in their place.

Inside `Patch.applied` the function so changed is called, by the thread that opened the block alone; elsewhere, and
afterwards, the package's own is.
"""

import __future__

import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import ndiff
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Patch:
    """The function ``of``, by its full name, in which the lines ``old`` stand once, and are ``new`` instead."""

    of: str
    old: str
    new: str

    def changed(self, function: Callable[..., Any], owner: Any) -> Any:
        """The function with its lines changed, which finds all other names where the function does.

        Raises ValueError where the old lines do not stand in it once, or its source is not there.
        """
        try:
            text = inspect.getsource(function)
        except OSError as error:
            raise ValueError(f"the patch of {self.of} changes lines of its source, and zerosim was installed without; "
                             "install it with its .py files") from error
        if text.count(self.old) != 1:
            raise ValueError(f"the patch of {self.of} replaces lines that stand there {text.count(self.old)} times, "
                             f"and not once: {self.old.strip()!r}; write it anew for the function as it is now")
        text = textwrap.dedent(text.replace(self.old, self.new)).replace(f"def {function.__name__}(", "def changed(", 1)
        around = f"def around(__class__):\n{textwrap.indent(text, '    ')}\n    return changed"  # for super()
        names: dict[str, Any] = {}
        exec(compile(around, f"<{self.of}>", "exec", __future__.annotations.compiler_flag), function.__globals__, names)
        return names["around"](owner)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block this thread calls the changed function."""
        owner_name, _, name = self.of.rpartition(".")
        owner, thread = resolve_name(owner_name), threading.get_ident()
        healthy, is_open = vars(owner)[name], True
        changed = self.changed(healthy, owner)

        @functools.wraps(healthy)
        def chosen(*arguments: Any, **options: Any) -> Any:
            here = is_open and threading.get_ident() == thread
            return (changed if here else healthy)(*arguments, **options)

        setattr(owner, name, chosen)
        try:
            yield
        finally:
            is_open = False
            setattr(owner, name, healthy)

    @property
    def lines(self) -> list[str]:
        """The patch as one reads it, each line after its sign and a space."""
        old, new = (textwrap.dedent(text).splitlines() for text in (self.old, self.new))
        return [line for line in ndiff(old, new) if not line.startswith("?")]
