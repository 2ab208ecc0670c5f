"""One BLAS thread, because the number of threads changes the bits of larger products, and launchers bind cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from zerosim.numerics.checks import is_count


@cache
def controller() -> Any:
    """The thread pools of the libraries that are loaded (found once; looking takes milliseconds)."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def blas_limited_to(blas_threads: int) -> Iterator[None]:
    """Limits BLAS to this many threads inside the ``with`` block.

    Raises ValueError for fewer than one thread.
    """
    if not is_count(blas_threads) or blas_threads < 1:
        raise ValueError(f"blas_threads={blas_threads!r}, but arithmetic needs a whole number of threads, at least one")
    with controller().limit(limits=blas_threads, user_api="blas"):
        yield
