"""Work that succeeds on every rank or on none: one rank's error is every rank's."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import numpy as np

from zerosim.ranks.rank import Rank

T = TypeVar("T")


def all_or_none(rank: Rank, work: Callable[[], T], *, error: type[Exception], only: int | None = None) -> T:
    """The result of ``work`` on this rank, or on the ``only`` one, None elsewhere, when it has succeeded everywhere.

    Raises ``error`` on all ranks where OSError or ValueError was raised on one, with the first one's text.
    """
    text, found = "", None
    try:
        if only in (None, rank.index):
            found = work()
    except OSError as failed:
        text = f"{failed.filename}: {failed.strerror}" if failed.filename else str(failed)
    except ValueError as failed:
        text = str(failed)
    mine = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)  # of a name that is no text
    lengths = rank.all_gather(np.array([len(mine)], np.int64), purpose="control")
    if lengths.any():
        splits = (0, *accumulate(int(length) for length in lengths))
        texts = rank.all_gather(mine, splits=splits, purpose="control")
        first = int(np.flatnonzero(lengths)[0])
        said = texts[splits[first]:splits[first + 1]].tobytes().decode()
        raise error(f"rank {first}: {said}")
    return found  # type: ignore[return-value]  # None only where this rank had nothing to do
