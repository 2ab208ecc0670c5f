"""A rank to which every message arrives as NaN: who is right all the same has not learnt it from messages."""

from typing import Any

import numpy as np

from zerosim.numerics.arrays import poison
from zerosim.ranks.rank import Rank, Work


class DeafWork:
    """A Work whose result is poisoned when it is waited for."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> Any:
        """Blocks as the Work does, and returns NaN."""
        return _poisoned(self._work.wait())

    @property
    def result(self) -> Any:
        """Raises PendingWorkError before ``wait()``, as the Work does."""
        return self._work.result


def _poisoned(found: Any) -> Any:
    if isinstance(found, Work):
        return DeafWork(found)
    if isinstance(found, np.ndarray):
        poison(found)
    return found


class DeafRank(Rank):
    """The same rank, which takes part in everything, sends what it has, and hears nothing."""

    @classmethod
    def of(cls, rank: Rank) -> "DeafRank":
        """A deaf handle of a rank."""
        return cls(rank._state, rank.group, rank.communicator)

    def exchange(self, *args: Any, **options: Any) -> Any:
        """As a rank's; ``out`` is NaN."""
        return _poisoned(super().exchange(*args, **options))

    def reduce_scatter(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().reduce_scatter(*args, **options))

    def all_gather(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_gather(*args, **options))

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_reduce(*args, **options))

    def all_to_all(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().all_to_all(*args, **options))

    def broadcast(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().broadcast(*args, **options))

    def reduce(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().reduce(*args, **options))

    def gather(self, *args: Any, **options: Any) -> Any:
        """As a rank's; the result is NaN."""
        return _poisoned(super().gather(*args, **options))
