"""Threads: a rank belongs to one, and BLAS gets one.

The number of BLAS threads changes the bits of larger products, and launchers bind cores.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from zerosim.numerics.checks import is_count
from zerosim.ranks.errors import RankUseError
from zerosim.ranks.interrupts import guarded


@guarded
def check_thread(thread: int, rank: int) -> None:
    """Raises RankUseError unless the caller is in ``thread``, the one that runs the rank's cluster."""
    if threading.get_ident() != thread:
        raise RankUseError(f"rank {rank} was used in another thread than the one that runs its cluster; "
                           "keep every call of a rank inside the program that it was handed to")


@guarded
@cache
def controller() -> Any:
    """The thread pools of the libraries that are loaded (found once; looking takes milliseconds)."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@guarded
class _Limits:
    """Who is inside ``blas_limited_to``, in any thread: BLAS has one number of threads for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[tuple[int, int]] = []  # the thread that entered, and its limit
        self._before: list[list[int]] = []  # what each found, by library

    def enter(self, blas_threads: int) -> None:
        """Raises RankUseError where another thread is inside with another limit."""
        with self._lock:
            here = threading.get_ident()
            others = {limit for thread, limit in self._inside if thread != here} - {blas_threads}
            if others:
                raise RankUseError(
                    f"a cluster with blas_threads={blas_threads} was asked to run while one with "
                    f"blas_threads={min(others)} runs in another thread, and BLAS has one limit for all threads, which "
                    "bits depend on; give both the same, or run one after the other")
            libraries = _blas_libraries()
            self._before.append([library.get_num_threads() for library in libraries])
            self._inside.append((here, blas_threads))
            _set_threads(libraries, [blas_threads] * len(libraries))

    def leave(self) -> None:
        """Sets what the caller found; or who came after it and is still inside does that later."""
        with self._lock:
            here = threading.get_ident()
            place = max(i for i, (thread, _) in enumerate(self._inside) if thread == here)
            del self._inside[place]
            before = self._before.pop(place)
            if place < len(self._before):
                self._before[place] = before
            else:
                _set_threads(_blas_libraries(), before)


@guarded
def _blas_libraries() -> list[Any]:
    return [library for library in controller().lib_controllers if library.user_api == "blas"]


@guarded
def _set_threads(libraries: list[Any], counts: list[int]) -> None:
    for library, count in zip(libraries, counts, strict=True):
        # From threadpoolctl 3.8 on, the thread that set OpenBLAS first is the only one that may, until it lets go.
        let_go = getattr(library, "clear_controlling_thread", lambda force: None)
        let_go(force=True)
        library.set_num_threads(count)
        let_go(force=True)


_limits = _Limits()


@guarded
@contextmanager
def blas_limited_to(blas_threads: int) -> Iterator[None]:
    """Limits BLAS to this many threads inside the ``with`` block, until the last of all threads has left it.

    Raises ValueError for fewer than one thread, RankUseError where another thread is inside with another limit.
    """
    if not is_count(blas_threads) or blas_threads < 1:
        raise ValueError(f"blas_threads={blas_threads!r}, but arithmetic needs a whole number of threads, at least one")
    _limits.enter(blas_threads)
    try:
        yield
    finally:
        _limits.leave()
