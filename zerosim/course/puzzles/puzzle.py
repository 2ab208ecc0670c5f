"""What a puzzle is: a statement, a stub with holes, hints, and cases on which an answer is run.

Legend: N ranks, n elements. Every byte is that of one rank, and of the rank that has most; steps are hops one after the
other, on the longest chain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Traces

Answer = Callable[..., Any]
MEASURES = ("peak_nbytes", "sent_nbytes", "steps")


class Hole(NotImplementedError):
    """A hole of a stub that is still open."""


def hole(what: str) -> Any:
    """Stands where the reader is to write; raises Hole, which a check reports and does not mind.

    >>> hole("add your own copy")
    Traceback (most recent call last):
    zerosim.course.puzzles.puzzle.Hole: add your own copy
    """
    raise Hole(what)


class Refused(Exception):
    """An answer that is wrong; the text is the one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a good answer holds at its fullest and sends, in bytes, and its steps: from the closed forms."""

    peak_nbytes: int
    sent_nbytes: int
    steps: int


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that an answer may measure, and what it must have done who measures more.

    ``measure`` is one of MEASURES; ``why`` follows a colon.
    """

    measure: str
    most: int
    why: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """A known wrong answer: what each rank returns that makes it, and the words for it.

    ``what`` follows "rank r", as in "returned the sum, and not the mean".
    """

    what: str
    results: Sequence[Any]


@dataclass(frozen=True)
class Case:
    """One run: N, each rank's arguments (fresh, charged to its ledger), and what every rank must return.

    ``bounds`` has the shape of ``expected`` and holds the largest difference allowed by element; None: equal bits.
    ``least_sent_nbytes`` is what all ranks together must send, however clever they are. ``look`` sees the traces and
    returns words that follow "On N=3 (n=7)", or None. ``shard_nbytes`` is the size of what a rank owns, by which the
    audit judges what is a forgotten array, and ``scratch_shards`` how many of them an expression may take for a moment.
    """

    ranks: int
    title: str
    arguments: Callable[[Rank], tuple[Any, ...]]
    expected: Sequence[Any]
    target: Target
    least_sent_nbytes: int
    mistakes: Sequence[Mistake] = ()
    limits: Sequence[Limit] = ()
    bounds: Sequence[Any] | None = None
    look: Callable[[Traces], str | None] = lambda traces: None
    shard_nbytes: int = 0
    scratch_shards: float = 3.25

    @property
    def where(self) -> str:
        """``N=3 (n=7)``."""
        return f"N={self.ranks} ({self.title})"


@dataclass(frozen=True)
class Puzzle:
    """One exercise.

    ``allowed`` names the collectives that an answer may call ("exchange" goes without saying), ``changes`` the
    arguments, by name, that it may write into; ``returns`` names what it returns, where that is several things.
    ``case(N, n)`` makes one case; ``sizes`` are the n of each N; ``audit_length`` the n of the run that is audited.
    """

    name: str
    title: str
    statement: str
    stub: str
    hints: tuple[str, ...]
    case: Callable[[int, int], Case]
    sizes: Mapping[int, tuple[int, ...]]
    audit_length: int
    allowed: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    score: str = ""

    def cases(self) -> list[Case]:
        """Every case, in the order in which they are run: few ranks first."""
        return [self.case(ranks, length) for ranks, lengths in self.sizes.items() for length in lengths]


# Worlds of every kind; lengths below N, of N's multiples, and of neither.
SIZES: Mapping[int, tuple[int, ...]] = {1: (5,), 2: (1, 6), 3: (2, 7), 4: (3, 8, 9), 5: (4, 13), 8: (5, 19)}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one case came to, beside its target."""

    ranks: int
    title: str
    peak_nbytes: int
    sent_nbytes: int
    steps: int
    target: Target
