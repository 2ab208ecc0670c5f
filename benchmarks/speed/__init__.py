"""What zerosim takes beside a peer, or beside the least that the machine can do: the rows of ``zerosim bench``.

A row has two sides. Each is a function that prepares, and returns what is timed, an action; what actions return is
compared where both compute the same, by a test, at a small size. Sides take turns in processes of their own (`runner`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Action = Callable[[], Any]
Side = Callable[[bool], Action]  # of a small size, for a test, or of the row's own


@dataclass(frozen=True)
class Row:
    """A ratio that is measured: ``what`` takes ``ours`` as many seconds as ``theirs`` take, times the ratio.

    ``goal`` is the most that the ratio should be, None where none is set; names of rows that draw a curve begin with
    "by-" and end with where they stand on it. ``needs`` are modules of the peer. ``processes`` are, by side, 1, or
    how many of ``launcher`` run it together: "gloo" (torch.distributed) or "mpi"; the first of them is timed.
    ``threads`` are those of BLAS and torch, ``repetitions`` of each action in each process.
    ``tolerance`` is the most by which results may differ, as a part of the largest; 0: equal bits, None: not compared.
    Without ``theirs`` the figure and its goal are seconds of ``clock``: such a row takes minutes, acts once in a
    process, and is run only where it is named.
    """

    name: str
    what: str
    against: str
    goal: float | None
    ours: Side
    theirs: Side | None
    needs: tuple[str, ...] = ()
    processes: tuple[int, int] = (1, 1)
    launcher: str = "gloo"
    threads: int = 1
    repetitions: int = 7
    tolerance: float | None = None
    clock: Callable[[], float] = time.perf_counter

    def as_json(self) -> dict[str, Any]:
        """What is compared, as plain data."""
        return {"name": self.name, "what": self.what, "against": self.against, "goal": self.goal}


def rows() -> Mapping[str, Row]:
    """All rows by name, in the order in which they are printed."""
    from . import checkpoints, collectives, makefile, models, optimizers, plans, steps

    themes = (steps.ROWS, models.ROWS, collectives.ROWS, optimizers.ROWS, checkpoints.ROWS, plans.ROWS, makefile.ROWS)
    return {row.name: row for theme in themes for row in theme}
