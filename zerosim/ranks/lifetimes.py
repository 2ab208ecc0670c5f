"""When each array of a rank's ledger lived: from which row of the trace to which, and inside which spans."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerosim.ranks.memory import KINDS
from zerosim.ranks.trace import Held, Row, SpanBegin, SpanEnd


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One array in the ledger, as one kind.

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
        """Whether it is held right after this row of the trace."""
        return (self.born is None or self.born <= row) and (self.died is None or row < self.died)


def lifetimes(rows: Sequence[Row], kinds: str | Iterable[str] | None = None) -> list[Lifetime]:
    """When each array of these kinds (None: of all) lived, by the rows of one rank's trace, in the order of birth.

    Arrays that were held before the run come first, and only those that left the ledger in it: of the others a trace
    has no row. One that changes its kind (an activation that becomes a checkpointed input) has a life in either. Arrays
    without elements are left out.

    >>> import numpy as np, zerosim as zs
    >>> def program(rank):
    ...     kept = rank.memory.alloc(3, np.float32, "activation", "h")
    ...     rank.memory.free(rank.memory.alloc(2, np.float32, "gathered_parameter", "w"))
    ...     return kept
    >>> cluster = zs.Cluster(1)
    >>> h, = cluster.run(program)
    >>> for life in cluster.trace[0].lifetimes():
    ...     print(life.kind, life.name, life.nbytes, life.born, life.died)
    activation h 12 0 None
    gathered_parameter w 8 1 2

    Raises ValueError for a kind that there is not.
    """
    asked = frozenset([kinds] if isinstance(kinds, str) else KINDS if kinds is None else kinds)
    if unknown := sorted(asked.difference(KINDS)):
        raise ValueError(f"no kind of memory is called {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
    living, before, found = dict[tuple[int, str], int](), list[Lifetime](), list[Lifetime]()
    for place, row, path in _changes(rows):
        if row.kind not in asked:
            continue
        if row.nbytes > 0:
            living[row.number, row.kind] = len(found)
            found.append(Lifetime(row.kind, row.name, row.nbytes, place, born_in=path))
        elif (at := living.pop((row.number, row.kind), None)) is not None:
            found[at] = replace(found[at], died=place, died_in=path)
        else:
            before.append(Lifetime(row.kind, row.name, -row.nbytes, None, place, (), path))
    return before + found


def _changes(rows: Sequence[Row]) -> Iterator[tuple[int, Held, tuple[str, ...]]]:
    """The rows by which the ledger changes, each with its place and the spans that are open there."""
    path: tuple[str, ...] = ()
    for place, row in enumerate(rows):
        if isinstance(row, SpanBegin):
            path = row.path
        elif isinstance(row, SpanEnd):
            path = row.path[:-1]
        elif isinstance(row, Held) and row.nbytes:
            yield place, row, path
