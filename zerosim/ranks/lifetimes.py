"""Lifetimes of arrays, read from the rows of a trace: from which row to which each was held, as which kind."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One array in the memory, as one kind.

    ``born`` and ``died`` are places in ``trace.rows``, ``born_in`` and ``died_in`` the spans that were open there.
    None, and no spans: it was held before the run, or still is after it.
    """

    kind: str
    name: str
    nbytes: int
    born: int | None
    died: int | None = None
    born_in: tuple[str, ...] = ()
    died_in: tuple[str, ...] = ()

    def lives_at(self, row: int) -> bool:
        """True where it is held right after this row of the trace."""
        return (self.born is None or self.born <= row) and (self.died is None or row < self.died)


def lifetimes(rows: Sequence[Any], asked: Collection[str]) -> list[Lifetime]:
    """The lifetimes of the arrays of the kinds that are asked for, as `Trace.lifetimes` has them."""
    from zerosim.ranks.trace import Held, SpanBegin, SpanEnd  # which are a trace's

    living, before, found = dict[tuple[int, str], int](), list[Lifetime](), list[Lifetime]()
    path: tuple[str, ...] = ()  # the spans that are open at the row
    for place, row in enumerate(rows):
        if isinstance(row, SpanBegin | SpanEnd):
            path = row.path if isinstance(row, SpanBegin) else row.path[:-1]
        elif isinstance(row, Held) and row.nbytes and row.kind in asked:
            at = living.pop((row.number, row.kind), None)
            if row.nbytes > 0:
                living[row.number, row.kind] = len(found)
                found.append(Lifetime(row.kind, row.name, row.nbytes, place, born_in=path))
            elif at is not None:
                found[at] = replace(found[at], died=place, died_in=path)
            else:
                before.append(Lifetime(row.kind, row.name, -row.nbytes, None, place, (), path))
    return before + found
