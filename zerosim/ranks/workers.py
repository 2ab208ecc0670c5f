"""Threads on which the ranks of one process compute side by side.

A round of the hub has no messages in it: each rank goes on from one wait to its next. So all that ranks could see of
each other is the order in which their programs run, and that stays the hub's: one program at a time, and those that
compute go on in the order in which they began to. How long a thread takes decides nothing.

NumPy lets other threads run while it adds, casts and multiplies; a thread is worth it for whole arrays alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

WORTH_A_THREAD = 2_000_000  # operations: handing work over and taking it back costs as much as some 200,000
Item = TypeVar("Item")


class Workers:
    """So many threads, the hub's own where it is one; and the ranks that compute, in the order in which they go on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._computing: deque[tuple[int, Future[Any]]] = deque()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor  # not while zerosim is imported: most runs need none

        return ThreadPoolExecutor(self.count, "zerosim worker")

    def serve(self, operations: int) -> bool:
        """True where work of so many operations is worth a thread."""
        return self.count > 1 and operations >= WORTH_A_THREAD

    def begin(self, rank: int, work: Callable[[], Any]) -> Future[Any]:
        """Hands the rank's work to a thread."""
        future = self._pool.submit(_run, copy_context(), [work])
        self._computing.append((rank, future))
        return future

    def __bool__(self) -> bool:
        """True where a rank has not gone on from its work."""
        return bool(self._computing)

    def next_rank(self) -> int:
        """Waits for the rank that began first of them, which goes on now."""
        rank, future = self._computing.popleft()
        future.exception()
        return rank

    def each(self, function: Callable[[Item], object], items: Iterable[Item], operations: int) -> None:
        """Calls the function with each item, in any order: what it writes for one, it does not touch for another."""
        left = deque(items)

        def work_off() -> None:
            while True:
                try:
                    item = left.popleft()
                except IndexError:  # another thread has taken the last
                    return
                function(item)

        others = [self._pool.submit(work_off) for _ in range(self.count - 1)] if self.serve(operations) else []
        work_off()
        for other in others:
            other.result()

    def close(self) -> None:
        """Waits for what is computed, and ends the threads."""
        if "_pool" in self.__dict__:
            self._pool.shutdown()
        self._computing.clear()


def _run(context: Context, box: list[Callable[[], Any]]) -> Any:
    """Calls the function in the box; when its result is there, the thread refers to nothing of the rank's."""
    return context.run(box.pop())
