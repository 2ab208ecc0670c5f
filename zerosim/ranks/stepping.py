"""Stepping: a run that stops after every hop, so that one can look at all ranks in between."""

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from zerosim.ranks.cluster import Cluster, Program
from zerosim.ranks.errors import RankUseError
from zerosim.ranks.lockstep import Event


class Steps(Iterator[Event]):
    """An iterator over the hops made, as Events whose values are copies, and a context manager.

    Leaving it half-way stops all ranks and leaves nothing behind. It belongs to the thread that takes the first step;
    any other raises RankUseError.
    """

    def __init__(self, cluster: Cluster, program: Program, args: tuple[Any, ...]) -> None:
        self.cluster = cluster
        self._events = cluster.events(program, *args, hop_by_hop=True)
        self._thread: int | None = None

    def __next__(self) -> Event:
        self._check_thread()
        return next(self._events)

    def close(self) -> None:
        """Stops the run; harmless when it has ended."""
        self._check_thread()
        self._events.close()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        self._thread = self._thread or here
        if self._thread != here:
            raise RankUseError("this step_through was begun in another thread, where its ranks live; "
                               "go on and close it there")

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def step_through(program: Program, *args: Any, ranks: int = 2, cluster: Cluster | None = None) -> Steps:
    """Runs ``program(rank, *args)`` and stops after every message, and every hop of every collective.

    >>> import numpy as np
    >>> with step_through(lambda rank: rank.all_reduce(np.full(2, rank.index)), ranks=2) as steps:
    ...     for call, hop, values in steps:
    ...         print(call.operation, hop.step, hop.source, "->", hop.destination, hop.chunks, values)
    all_reduce 0 0 -> 1 (1,) [0]
    all_reduce 0 1 -> 0 (0,) [1]
    all_reduce 1 0 -> 1 (0,) [1]
    all_reduce 1 1 -> 0 (1,) [1]
    """
    return Steps(cluster or Cluster(ranks), program, args)
