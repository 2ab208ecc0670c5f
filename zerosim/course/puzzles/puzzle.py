"""A puzzle: a statement, a stub with holes, hints, and cases on which an answer is run.

Legend: N ranks, n elements. Every byte is that of one rank, and of the rank that has most; steps are hops one after the
other, on the longest chain.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array
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
    """Memory at its fullest, bytes sent and steps of a good answer: from the closed forms."""

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
    """Measurements of one case, beside its target."""

    ranks: int
    title: str
    peak_nbytes: int
    sent_nbytes: int
    steps: int
    target: Target


# -- The outcome of a check, as it is shown: in a terminal, in a notebook, as data -----------------------------------

PASSED, REFUSED, OPEN = "passed", "refused", "open"
WIDTH = 80  # columns
HEADS = ("N", "case", "peak bytes", "target", "bytes sent", "target", "steps", "target")


def filled(text: str) -> str:
    """Paragraphs filled to the width of a terminal; lines that are indented stay as they are."""
    lines: list[str] = []
    for indented, group in groupby(text.strip("\n").splitlines(), key=lambda line: line[:1] in ("", " ")):
        run = tuple(group)
        lines += run if indented else textwrap.wrap(" ".join(run), WIDTH, break_on_hyphens=False)
    return "\n".join(lines)


class Page(str):
    """A text that a terminal shows as it is, and a notebook in its own type face."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of a check: ``verdict`` is "passed", "refused" or "open", ``sentence`` says it.

    ``rows`` has a line for each case that was right, with the peak bytes, bytes sent and steps that were measured (of
    the rank that has most) beside their targets.
    """

    puzzle: str
    verdict: str
    sentence: str
    rows: tuple[Measured, ...] = ()

    @property
    def passed(self) -> bool:
        """True when every case is right and no limit was exceeded."""
        return self.verdict == PASSED

    @property
    def targets_met(self) -> tuple[str, ...]:
        """The measures that stay within their target in every case; none for an answer that did not pass."""
        return tuple(measure for measure in MEASURES if self.passed and all(
            getattr(row, measure) <= getattr(row.target, measure) for row in self.rows))

    @property
    def stars(self) -> str:
        """``★★☆``: a star for each target that is met."""
        return "★" * len(self.targets_met) + "☆" * (len(MEASURES) - len(self.targets_met))

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"puzzle": self.puzzle, "verdict": self.verdict, "sentence": self.sentence,
                "targets_met": list(self.targets_met), "rows": [asdict(row) for row in self.rows]}

    def _cells(self) -> list[tuple[str, ...]]:
        return [(str(row.ranks), row.title, *(f"{value:,}" for measure in MEASURES
                                              for value in (getattr(row, measure), getattr(row.target, measure))))
                for row in self.rows]

    def __repr__(self) -> str:
        mark = {PASSED: f"passed {self.stars}", REFUSED: "not yet", OPEN: "still open"}[self.verdict]
        text = f"{self.puzzle}: {mark}\n  {self.sentence}"
        if not self.passed:
            return text
        table = [HEADS, *self._cells()]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
        lines = ["  ".join(cell.ljust(width) if column == 1 else cell.rjust(width)
                           for column, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in table]
        return "\n".join([text, "", *("  " + line for line in lines)])

    def _repr_html_(self) -> str:
        mark = {PASSED: f"passed {self.stars}", REFUSED: "not yet", OPEN: "still open"}[self.verdict]
        head = f"<p><b>{escape(self.puzzle)}: {mark}</b><br>{escape(self.sentence)}</p>"
        if not self.passed:
            return head
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self._cells())
        return f"{head}<table><tr>{''.join(f'<th>{name}</th>' for name in HEADS)}</tr>{rows}</table>"


# -- What a case hands to a rank: fresh copies, charged to its ledger ------------------------------------------------

def held_copy(rank: Rank, x: Array, kind: str = "input", name: str = "") -> Array:
    """A copy of ``x`` in the rank's memory."""
    copy = rank.memory.alloc(x.shape, x.dtype, kind, name)
    copy[...] = x
    return copy


def vector_of(vectors: Sequence[Array], kind: str = "input") -> Callable[[Rank], tuple[Array]]:
    """The arguments of a puzzle that hands each rank one vector of its own."""
    return lambda rank: (held_copy(rank, vectors[rank.index], kind),)


class Backward:
    """A backward pass to be called layer by layer: ``gradient_of(layer)`` computes and charges a layer's gradient.

    It goes from the last layer to the first, each once; ValueError otherwise. ``gradients[layer]`` are (n_l,).
    """

    def __init__(self, rank: Rank, gradients: Sequence[Array]) -> None:
        self._rank, self._gradients, self._next = rank, gradients, len(gradients) - 1

    def __call__(self, layer: int) -> Array:
        """The gradient of a layer's weights, (n_l,)."""
        if layer != self._next:
            raise ValueError(f"backward was asked for layer {layer} where layer {self._next} is next: it goes from the "
                             "last layer to the first, each once")
        self._next -= 1
        gradient = self._gradients[layer]
        self._rank.trace.compute(flops=4 * gradient.size, nbytes=3 * gradient.nbytes)
        return held_copy(self._rank, gradient, "unit_gradient", f"layer {layer}")


class Scaling:
    """A layer of the simplest kind, y = w·x by element; what it makes is charged. Arrays are (n,)."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def forward(self, w: Array, x: Array) -> Array:
        """y = w·x."""
        return self._product(w, x, "activation")

    def backward(self, w: Array, x: Array, dy: Array) -> tuple[Array, Array]:
        """(dx, dw) = (w·dy, x·dy)."""
        return self._product(w, dy, "activation_gradient"), self._product(x, dy, "unit_gradient")

    def _product(self, a: Array, b: Array, kind: str) -> Array:
        out = self._rank.memory.alloc(a.shape, a.dtype, kind)
        self._rank.trace.compute(flops=a.size, nbytes=3 * a.nbytes)
        np.multiply(a, b, out=out)
        return out
