"""Threads on which the ranks of one process compute side by side.

A round of the hub has no messages in it: each rank goes on from one wait to its next. So the only thing that ranks can
see of each other is the order in which their programs run, and that stays the hub's: one program at a time, and those
that compute go on in the order in which they began to. How long a thread takes decides nothing.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

WORTH_A_THREAD = 2_000_000  # operations: handing work over and taking it back costs as much as some 200,000


class Workers:
    """So many threads, and the ranks that have handed them work, in the order in which they go on."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "zerosim worker")
        self._computing: deque[tuple[int, Future[Any]]] = deque()

    def __bool__(self) -> bool:
        """True where a rank has work that it has not gone on from."""
        return bool(self._computing)

    def begin(self, rank: int, work: Callable[[], Any]) -> Future[Any]:
        """Hands the rank's work to a thread."""
        future = self._pool.submit(_run, copy_context(), [work])
        self._computing.append((rank, future))
        return future

    def next_rank(self) -> int:
        """Waits for the rank that began first, which goes on now."""
        rank, future = self._computing.popleft()
        future.exception()
        return rank

    def close(self) -> None:
        """Waits for what is computed, and ends the threads."""
        self._pool.shutdown()
        self._computing.clear()


def _run(context: Context, box: list[Callable[[], Any]]) -> Any:
    """Calls the function in the box; when its result is there, the thread refers to nothing of the rank's."""
    return context.run(box.pop())
