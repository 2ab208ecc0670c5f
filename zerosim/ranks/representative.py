"""One rank that stands for all: the others would do the same, and so need not be there.

Legend: N ranks. It can stand for them where every rank brings, keeps and sends as much as it does, which is checked at
each collective. That the program does the same on each of them cannot be checked, and is the caller's word.
"""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from zerosim.numerics.arrays import has_data
from zerosim.ranks.call import Call, Group
from zerosim.ranks.cuts import chunk_lengths
from zerosim.ranks.entry import CollectiveEntry, Entry, ExchangeEntry
from zerosim.ranks.errors import AsymmetryError
from zerosim.ranks.frames import clear_frames
from zerosim.ranks.lockstep import Event, anywhere, sent_by


class Representative:
    """The transport of a rank without partners: what it sends is counted, and what arrives has no data."""

    knows_the_others = False
    library = None

    def __init__(self) -> None:
        self.results: list[Any] = []

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Generator[Event, None, None]:
        """Runs the only program to its end; there is no event to watch."""
        self.results = [program() for program in programs]
        yield from ()

    def let_go(self, error: BaseException) -> None:
        """After a failure: clears what the error's frames would keep in the ledger."""
        clear_frames(error, chain=False)

    def progress(self) -> bool:
        """Whatever was issued is done."""
        return False

    def check_use(self, rank: int) -> None:
        """There is one program, and no other that could use its rank."""

    def issue(self, rank: int, entry: Entry) -> None:
        """Carries the collective out at once; AsymmetryError where not every rank would do the same."""
        if isinstance(entry, ExchangeEntry):
            _refuse(rank, entry, "a message has one sender and one receiver, who do different things")
        sent = sent_by_each(anywhere(entry.call))
        if sent is None:
            _refuse(rank, entry, "its ranks do not all bring, or not all send, the same number of bytes")
        if has_data(entry.x):
            self._answer(rank, entry)
        entry.finish(sent)

    def join(self, parent: Group, key: Group) -> None:
        """Never called: a rank without partners is not split."""

    def wait(self, rank: int, entry: Entry) -> None:
        """All is done when it is issued."""

    @staticmethod
    def _answer(rank: int, entry: CollectiveEntry) -> None:
        """What the others say where the program brings numbers of its own: the same as this rank."""
        if entry.call.operation == "all_gather":
            entry.out[...] = np.tile(entry.x, entry.call.ranks)
        elif entry.call.operation != "barrier":
            _refuse(rank, entry, "its array has data, and that of the other ranks is not there")


@lru_cache(maxsize=1024)
def sent_by_each(call: Call) -> int | None:
    """The bytes that every rank sends in a call; None where they differ, or where the ranks' chunks do."""
    if len(set(chunk_lengths(call.cut).tolist())) > 1:
        return None
    sent = {sent_by(call, index) for index in range(call.ranks)}
    return sent.pop() if len(sent) == 1 else None


def _refuse(rank: int, entry: Entry, why: str) -> NoReturn:
    raise AsymmetryError(f"rank {rank} stands for all ranks and was asked for {entry.describe()}, but {why}; run all "
                         "of them, with NullCluster(ranks) without representative=, or do what is the same on each")
