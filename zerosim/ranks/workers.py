"""Threads on which the ranks of one process compute side by side.

A round of the hub has no messages in it: each rank goes on from one wait to its next. So all that ranks could see of
each other is the order in which their programs run, and that stays the hub's: one program at a time, and those that
compute go on in the order in which they began to. How long a thread takes decides nothing.

NumPy lets other threads run while it adds, casts and multiplies; a thread is worth it for whole arrays alone.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from zerosim.ranks.process import guarded

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@guarded
class Workers:
    """So many threads, and the ranks that compute on them, in the order in which they go on."""

    def __init__(self, count: int) -> None:
        self.count, self._pool = count, ThreadPoolExecutor(count, "zerosim worker")
        self.computing: deque[tuple[int, Future[Any]]] = deque()

    def begin(self, rank: int, work: Callable[[], Any]) -> list[Callable[[], Any]]:
        """Hands the rank's work to a thread; the box in which lies, when it has ended, what gives its result or raises
        its error. The thread has no part in that any more: how soon it goes on decides nothing."""
        box: list[Callable[[], Any]] = [partial(copy_context().run, work)]
        self.computing.append((rank, self._pool.submit(_run, [box])))
        return box

    def next_rank(self) -> int:
        """Waits for the rank that began first of them, which goes on now."""
        rank, future = self.computing.popleft()
        future.result()
        return rank

    def each(self, function: Callable[[Item], object], items: Iterable[Item]) -> None:
        """Calls the function with each item, in any order: what it writes for one, it does not touch for another.

        Raises what the function raises; of several errors, any.
        """
        left = deque(items)

        def work_off() -> None:
            while True:
                try:
                    item = left.popleft()
                except IndexError:  # another thread has taken the last
                    return
                function(item)

        others = [self._pool.submit(copy_context().run, work_off) for _ in range(min(self.count, len(left)) - 1)]
        try:
            work_off()
        finally:
            left.clear()  # where this thread has been stopped, the others take no more
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """Waits for what is being computed, drops what has not begun, and ends the threads."""
        self._pool.shutdown(cancel_futures=True)
        self.computing.clear()


def _run(boxes: list[list[Callable[[], Any]]]) -> None:
    """Takes a box, calls the function in it, and leaves one there that ends as it did."""
    box = boxes.pop()
    try:
        box.append(partial(_end, box.pop()(), None))
    except BaseException as error:
        box.append(partial(_end, None, error))
    finally:
        del box  # it may hold an error, whose traceback has this frame


def _end(result: Result, error: BaseException | None) -> Result:
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # whose traceback has this frame
