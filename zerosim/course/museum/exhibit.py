"""An exhibit: a bug of a real implementation, its facts, and the ``with`` block inside which zerosim has it.

One exhibit is open at a time in a process, and only the thread that has opened it meets the bug.
"""

import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Self

from zerosim.course.museum.runs import Setting
from zerosim.course.patches import Patch
from zerosim.display.views import Table, TextLine, View, plain
from zerosim.shown import Shown

_OPEN = threading.Lock()
INDENT = "\N{NO-BREAK SPACE}" * 4  # which pages keep


@dataclass(frozen=True)
class Exhibit(Shown):
    """One bug. ``threads`` are links, ``seen`` what one saw there, ``here`` how zerosim shows it, ``invariant`` the
    name of the check that finds it, ``setting`` the run that shows it, ``draws`` what its picture shows of it,
    ``unread`` what of the threads could not be read."""

    name: str
    title: str
    project: str
    threads: Sequence[str]
    date: str
    versions: str
    seen: str
    here: str
    invariant: str
    run: Mapping[str, Any]
    patch: Sequence[Mapping[str, str]]
    draws: str = "changes of weights"
    unread: str = ""

    @property
    def setting(self) -> Setting:
        """The training that shows it."""
        return Setting(**self.run)

    @property
    def patches(self) -> list[Patch]:
        """The changes of functions that it is made of."""
        return [Patch(**row) for row in self.patch]

    @contextmanager
    def open(self) -> Iterator[Self]:
        """The block inside which zerosim has the bug, as far as this thread calls it.

        Raises ValueError on entry while another is open, in this thread or another.
        """
        if not _OPEN.acquire(blocking=False):
            raise ValueError(f"asked for the exhibit {self.name!r} while one is open in this process; two bugs at once "
                             "would hide each other: leave its with block first")
        with ExitStack() as undo:
            undo.callback(_OPEN.release)
            for patch in self.patches:
                undo.enter_context(patch.applied())
            yield self

    def view(self) -> View:
        """What happened, where, how zerosim shows it, and the patch."""
        run = ", ".join(f"{name} {value}" for name, value in vars(self.setting).items() if name in self.run)
        lines = [("Where", "; ".join(filter(None, (self.project, self.versions, self.date)))), ("Seen", self.seen),
                 ("Here", self.here), ("Not read", self.unread), ("Run", run),
                 *(("Thread", link) for link in self.threads)]
        return View(self.name, f": {self.title}", (
            *(TextLine(f"[bold]{what}:[/] {unmarked(said)}", 0) for what, said in lines if said),
            *(Table(patch.of, ("", "patch"), tuple((line[0], line[2:].replace("    ", INDENT)) for line in patch.lines))
              for patch in self.patches)))

    def as_json(self) -> dict[str, Any]:
        """The facts by name."""
        found: dict[str, Any] = plain(self)
        return found


def unmarked(text: str | None) -> str:
    """A text in which brackets are brackets."""
    return (text or "").replace("[", r"\[")


@cache
def exhibits() -> Mapping[str, Exhibit]:
    """All of them by name, in the order of the museum."""
    rows = tomllib.loads(files(__package__).joinpath("exhibits.toml").read_text("utf-8"))
    return MappingProxyType({name: Exhibit(name, **row) for name, row in rows.items()})
