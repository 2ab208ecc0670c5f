"""A puzzle: a statement, a stub with holes, hints, and cases on which an answer is run.

Legend: N ranks, n elements. Every byte is that of one rank, and of the rank that has most; steps are hops one after the
other, on the longest chain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.course.puzzles.expected import Array, Wire
from zerosim.course.puzzles.score import Hole, Target
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Traces

Answer = Callable[..., Any]


def hole(what: str) -> Any:
    """Stands where the reader is to write; raises Hole, which a check reports and does not mind.

    >>> hole("add your own copy")
    Traceback (most recent call last):
    zerosim.course.puzzles.score.Hole: add your own copy
    """
    raise Hole(what)


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest accepted value of a measure, and the reason that an answer above it is given.

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

    ``peak_nbytes`` and ``wire`` are the target: the memory and the traffic of a good answer. ``bounds`` has the shape
    of ``expected`` and holds the largest difference allowed by element; None: equal bits. ``look`` sees the traces and
    returns words that follow "On N=3 (n=7)", or None. ``shard_nbytes`` is the size of what a rank owns, by which the
    audit judges what is a forgotten array, and ``scratch_shards`` how many of them an expression may take for a moment.
    ``least_sent_nbytes`` is what all ranks together must send, however clever they are; None: what the wire carries.
    """

    ranks: int
    title: str
    arguments: Callable[[Rank], tuple[Any, ...]]
    expected: Sequence[Any]
    peak_nbytes: int
    wire: Wire
    mistakes: Sequence[Mistake] = ()
    limits: Sequence[Limit] = ()
    bounds: Sequence[Any] | None = None
    look: Callable[[Traces], str | None] = lambda traces: None
    shard_nbytes: int = 0
    scratch_shards: float = 3.25
    least_sent_nbytes: int | None = None

    @property
    def target(self) -> Target:
        """The measures of a good answer."""
        return Target(self.peak_nbytes, self.wire.most_nbytes, self.wire.steps)

    @property
    def where(self) -> str:
        """``N=3 (n=7)``."""
        return f"N={self.ranks} ({self.title})"


# Worlds of every kind; lengths below N, of N's multiples, and of neither.
SIZES: Mapping[int, tuple[int, ...]] = {1: (5,), 2: (1, 6), 3: (2, 7), 4: (3, 8, 9), 5: (4, 13), 8: (5, 19)}


@dataclass(frozen=True)
class Puzzle:
    """One exercise.

    ``allowed`` names the collectives that an answer may call ("exchange" goes without saying), ``changes`` the
    arguments, by name, that it may write into; ``returns`` names what it returns, where that is several things.
    ``case(N, n)`` makes one case; ``sizes`` are the n of each N; ``audit_length`` the n of the run that is audited, 0
    where none is.
    """

    name: str
    title: str
    statement: str
    stub: str
    hints: tuple[str, ...]
    case: Callable[[int, int], Case]
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: SIZES)
    audit_length: int = 1 << 18
    allowed: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()
    returns: tuple[str, ...] = ()
    score: str = ""

    @property
    def parameters(self) -> list[str]:
        """The names of the arguments after the rank, as the stub has them."""
        signature = self.stub.partition(f"def {self.name}(rank, ")[2]
        return signature.partition(")")[0].split(", ")

    def cases(self) -> list[Case]:
        """Every case, in the order in which they are run: few ranks first."""
        return [self.case(ranks, length) for ranks, lengths in self.sizes.items() for length in lengths]


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


class ScalingLayer:
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
