"""What each rank really holds, beside what its ledger says: an array that was made with NumPy alone is seen here.

Python's tracer counts the bytes of all; since exactly one rank runs at a time, what is made between two switches is the
running rank's.
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from zerosim.ranks.memory import Memory


@dataclass(slots=True)
class Watched:
    """One rank: its ledger, the bytes that it made, and the most that its ledger missed."""

    memory: Memory
    live_nbytes: int
    missed_at_rest_nbytes: int = 0
    missed_in_between_nbytes: int = 0


class Audit:
    """Watches the ranks that have entered, while the ``with`` block runs; ``ranks`` are in the order of their entry."""

    def __init__(self) -> None:
        self.ranks: dict[Any, Watched] = {}
        self._began = 0
        self._traced_before = False
        self._previous: Callable[..., None] | None = None

    def __enter__(self) -> "Audit":
        import greenlet

        self._traced_before = tracemalloc.is_tracing()
        if not self._traced_before:
            tracemalloc.start()
        self._previous = greenlet.settrace(self._switched)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        import greenlet

        greenlet.settrace(self._previous)
        self.ranks.clear()
        if not self._traced_before:
            tracemalloc.stop()

    def enter(self, memory: Memory) -> None:
        """Called by a rank's program before it makes anything."""
        from greenlet import getcurrent

        self.ranks[getcurrent()] = Watched(memory, memory.now_nbytes)
        self._begin(memory)

    def look(self) -> None:
        """Called by a rank's program at its end, when what it returns is all that it holds."""
        from greenlet import getcurrent

        self._end(self.ranks[getcurrent()])
        self._begin(self.ranks[getcurrent()].memory)

    def _switched(self, event: str, args: tuple[Any, Any]) -> None:
        origin, target = args
        if origin in self.ranks:
            self._end(self.ranks[origin])
        self._begin(self.ranks[target].memory if target in self.ranks else None)

    def _begin(self, memory: Memory | None) -> None:
        if memory is not None:
            memory.reset_peak()
        tracemalloc.reset_peak()
        self._began = tracemalloc.get_traced_memory()[0]

    def _end(self, rank: Watched) -> None:
        now, peak = tracemalloc.get_traced_memory()
        peak += rank.live_nbytes - self._began
        rank.live_nbytes += now - self._began
        at_rest = rank.live_nbytes - rank.memory.now_nbytes
        rank.missed_at_rest_nbytes = max(rank.missed_at_rest_nbytes, at_rest)
        rank.missed_in_between_nbytes = max(rank.missed_in_between_nbytes, peak - rank.memory.peak_nbytes)
