"""An exhibit: a bug of a real implementation, its facts, and the ``with`` block inside which zerosim has it.

One exhibit is open at a time in a process, and only the thread that has opened it meets the bug.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Self

from zerosim.course.museum.runs import Setting
from zerosim.course.patches import Patch
from zerosim.planning.facts import facts

_OPEN = threading.Lock()


@dataclass(frozen=True)
class Exhibit:
    """One bug. ``threads`` are links, ``seen`` what one saw there, ``here`` how zerosim shows it, ``invariant`` the
    name of the check that finds it, ``run`` the settings of the run that shows it, ``patches`` the lines of zerosim
    that it changes, ``draws`` what its picture shows of that run, ``unread`` what of the threads could not be read."""

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
    patches: Sequence[Patch]
    draws: str = "changes of weights"
    unread: str = ""

    @property
    def setting(self) -> Setting:
        """The training that shows it."""
        return Setting(**self.run)

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


@cache
def exhibits() -> Mapping[str, Exhibit]:
    """All of them by name, in the order of the museum."""
    return MappingProxyType({name: Exhibit(name, patches=[Patch(**lines) for lines in row.pop("patch")], **row)
                             for name, row in facts("exhibits", __package__).items()})
