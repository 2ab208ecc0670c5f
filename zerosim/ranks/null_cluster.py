"""A cluster without data: its ranks hold, send and compute everything but numbers, or one of them stands for all.

One rank can stand for all where every rank brings, keeps and sends as much as it does, which is checked at each
collective. That the program does the same on each of them cannot be checked, and is the caller's word.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, cast

import numpy as np

from zerosim.numerics.arrays import has_data
from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks.call import Backend, Call, Pending, PendingCall, PendingExchange, chunk_lengths
from zerosim.ranks.cluster import Cluster, Events, Processor
from zerosim.ranks.collectives import sent_by
from zerosim.ranks.errors import AsymmetryError
from zerosim.ranks.hub import RunOptions
from zerosim.ranks.process import clear_frames


class Representative(Backend):
    """The backend of a rank without partners: what it sends is counted, and what arrives has no data, but for an
    all-gather of numbers that the program itself brings: all ranks are taken to bring the same.

    All is done when it is issued, and there is no other program that could use its rank.
    """

    knows_the_others = False

    def __init__(self) -> None:
        self.results: list[Any] = []

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Events:
        """Runs the only program to its end; there is no event to watch."""
        self.results = [program() for program in programs]
        yield from ()

    def release(self, error: BaseException, handled: BaseException | None) -> None:
        clear_frames(error, until=handled)

    def issue(self, rank: int, me: Pending) -> None:
        """Carries the collective out at once; AsymmetryError where not every rank would do the same."""
        if isinstance(me, PendingExchange):
            _refuse(rank, me, "a message has one sender and one receiver, who do different things")
        sent = sent_by_each(me.call.normalized())
        if sent is None:
            _refuse(rank, me, "its ranks do not all bring, or not all send, the same number of bytes")
        if has_data(me.x):
            self._answer(rank, me)
        me.finish(sent)

    @staticmethod
    def _answer(rank: int, me: PendingCall) -> None:
        """The others say the same as this rank, where the program brings numbers of its own."""
        if me.call.operation == "all_gather":
            me.out[...] = np.tile(me.x, me.size)
        elif me.call.operation != "barrier":
            _refuse(rank, me, "its array has data, and that of the other ranks is not there")


@lru_cache(maxsize=1024)
def sent_by_each(call: Call) -> int | None:
    """The bytes that every rank sends in a call; None where they differ, or where the ranks' chunks do."""
    if len(set(chunk_lengths(call.cut).tolist())) > 1:
        return None
    sent = {sent_by(call, index) for index in range(call.ranks)}
    return sent.pop() if len(sent) == 1 else None


def _refuse(rank: int, me: Pending, why: str) -> NoReturn:
    raise AsymmetryError(f"rank {rank} stands for all ranks and was asked for {me.describe()}, but {why}; run all "
                         "of them, with NullCluster(ranks) without representative=, or do what is the same on each")


# -- Clusters whose arrays have shapes and no data: the real program, for any number of parameters, in no memory -----


class NoData(Processor):
    """Arrays that are a shape and a type alone."""

    def kernels(self, count: int) -> list[NumpyKernels]:
        return [cast(NumpyKernels, NullKernels())] * count  # a test compares the methods of the two


class NullCluster(Cluster):
    """N ranks that hold, send and compute everything but numbers: memory and trace are those of the same real run.

    Arrays of ``rank.memory`` and ``rank.xp`` have no data: they are finite and their sums are 0, by declaration, and to
    ask whether one is true raises. With ``representative=r`` only rank r runs and stands for all N: results, memory and
    trace have its entry alone, and AsymmetryError says where another rank would hold or send something else. Numbers
    that the program itself brings to an all-gather are taken to be the same on all ranks.

    >>> cluster = NullCluster(1024, representative=0)
    >>> shard = cluster.run(lambda rank: rank.reduce_scatter(rank.xp.empty(2**40, "float32")))[0]
    >>> shard.nbytes, cluster.trace[0].sent_nbytes()
    (4294967296, 4393751543808)
    """

    def __init__(self, ranks: int, *, representative: int | None = None, capacity_nbytes: int | None = None,
                 trace_rows: int | None = None) -> None:
        """Raises ValueError for less than one rank, and for a representative that is not one of them."""
        self.representative = representative
        self._where = ", all" if representative is None else f", rank {representative} for all"
        super().__init__(ranks, capacity_nbytes=capacity_nbytes, trace_rows=trace_rows, processor=NoData())

    def _present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        if self.representative is None:
            return group
        if not is_count(self.representative) or self.representative not in group:
            raise ValueError(f"representative={self.representative!r} is none of the ranks 0 to {len(group) - 1}; name "
                             "one of them, or pass None to run all")
        return (self.representative,)

    def _backend(self, options: RunOptions) -> Backend:
        return super()._backend(options) if self.representative is None else Representative()
