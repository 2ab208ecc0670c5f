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
@contextmanager
def blas_limited_to(blas_threads: int) -> Iterator[None]:
    """Limits BLAS to this many threads inside the ``with`` block.

    Raises ValueError for fewer than one thread.
    """
    if not is_count(blas_threads) or blas_threads < 1:
        raise ValueError(f"blas_threads={blas_threads!r}, but arithmetic needs a whole number of threads, at least one")
    with controller().limit(limits=blas_threads, user_api="blas"):
        yield
