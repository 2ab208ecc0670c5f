"""An exhibit: a bug of a real implementation, its facts, and the ``with`` block inside which zerosim has it.

What is replaced looks at each call whether the block is open, and whether the call comes from the thread that opened
it: elsewhere, and afterwards, it does what the package's own does. One exhibit is open at a time in a process.
"""

import functools
import threading
import tomllib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Self

from zerosim.course.museum.bugs import BUGS
from zerosim.course.museum.runs import Setting
from zerosim.display.views import TextLine, View
from zerosim.shown import Shown

_OPEN = threading.Lock()


@dataclass
class Exhibit(Shown):
    """One bug. ``threads`` are links, ``seen`` what one saw there, ``here`` how zerosim shows it, ``invariant`` the
    name of the check that finds it, ``unread`` what of the threads could not be read, ``setting`` the run that shows
    it."""

    name: str
    title: str
    project: str
    threads: tuple[str, ...]
    date: str
    versions: str
    seen: str
    here: str
    invariant: str
    setting: Setting
    unread: str = ""
    _open: ExitStack | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> Self:
        """Raises ValueError while an exhibit is open, in this thread or another."""
        if not _OPEN.acquire(blocking=False):
            raise ValueError(f"asked for the exhibit {self.name!r} while one is open in this process; two bugs at once "
                             "would hide each other: leave its with block first")
        with ExitStack() as undo:
            undo.callback(_OPEN.release)
            thread = threading.get_ident()
            for owner, name, broken in BUGS[self.name]:
                undo.enter_context(_Replaced(owner, name, broken, thread))
            self._open = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        opened, self._open = self._open, None
        assert opened is not None, "__enter__ has set it"
        opened.close()

    @property
    def run(self) -> str:
        """The setting in words: what differs from the usual one, and the first of it in any case."""
        usual = vars(Setting())
        said = {name: vars(self.setting)[name] for name, value in usual.items()
                if name in ("ranks", "stage", "optimizer", "steps") or vars(self.setting)[name] != value}
        return ", ".join(f"{name} {value}" for name, value in said.items())

    def view(self) -> View:
        """What happened, where, and how zerosim shows it."""
        lines = [("Where", "; ".join(filter(None, (self.project, self.versions, self.date)))), ("Seen", self.seen),
                 ("Here", self.here), ("Not read", self.unread), ("Run", self.run),
                 *(("Thread", link) for link in self.threads)]
        return View(self.name, f": {self.title}", tuple(
            TextLine(f"[bold]{what}:[/] {in_one_line(said)}", 0) for what, said in lines if said))

    def as_json(self) -> dict[str, Any]:
        """The facts by name."""
        return {name: getattr(self, name) for name in (
            "name", "title", "project", "threads", "date", "versions", "seen", "here", "unread", "invariant", "run")}


def in_one_line(text: str | None) -> str:
    """A text in one line, in which brackets are brackets."""
    return " ".join((text or "").split()).replace("[", r"\[")


class _Replaced:
    """A name of a class or module that stands for something else inside a ``with`` block, in one thread."""

    def __init__(self, owner: Any, name: str, broken: Callable[..., Any], thread: int) -> None:
        self.owner, self.name, self.healthy, self.is_open = owner, name, vars(owner)[name], True
        healthy = self.healthy

        @functools.wraps(healthy)
        def chosen(*arguments: Any, **options: Any) -> Any:
            if self.is_open and threading.get_ident() == thread:
                return broken(healthy, *arguments, **options)
            return healthy(*arguments, **options)

        self.chosen = chosen

    def __enter__(self) -> None:
        setattr(self.owner, self.name, self.chosen)

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        setattr(self.owner, self.name, self.healthy)


@cache
def exhibits() -> Mapping[str, Exhibit]:
    """All of them by name, in the order of the museum."""
    rows = tomllib.loads(files(__package__).joinpath("exhibits.toml").read_text("utf-8"))
    return MappingProxyType({name: Exhibit(
        name, setting=Setting(**row.pop("run")), threads=tuple(row.pop("threads")),
        **{key: text.strip() for key, text in row.items()}) for name, row in rows.items()})
