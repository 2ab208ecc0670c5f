"""A puzzle: a statement, a stub with holes, hints, and cases on which an answer is run.

Legend: N ranks, n elements. Every byte is that of one rank, and of the rank that has most; steps are hops one after the
other, on the longest chain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerosim.course.puzzles.expected import Array
from zerosim.course.puzzles.score import Hole, Measures
from zerosim.planning.collectives import Sent
from zerosim.planning.facts import facts
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


# Known wrong answers: the words for each, which follow "rank r", as in "returned the sum, and not the mean", and what
# each rank returns that makes the mistake.
Mistakes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """One run: N, each rank's arguments (fresh, charged to its memory), and what every rank must return.

    ``peak_nbytes`` and ``collectives`` are the target: the memory of a good answer, and its traffic, one collective
    after another. ``bounds`` has the shape of ``expected`` and holds the largest difference allowed by element; None:
    equal bits. ``reasons`` are the words for a measure above its target, which costs a star; they follow a colon.
    ``look`` sees the traces and returns words that follow "On N=3 (n=7)" and refuse, or None. ``shard_nbytes`` is the
    size of what a rank owns, by which the audit judges what is a forgotten array, and ``scratch_shards`` how many of
    them an expression may take for a moment. ``least_sent_nbytes`` is what all ranks together must send, however clever
    they are; None: what the collectives send.
    """

    ranks: int
    title: str
    arguments: Callable[[Rank], tuple[Any, ...]]
    expected: Sequence[Any]
    peak_nbytes: int
    collectives: Sequence[Sent]
    mistakes: Mistakes = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    bounds: Sequence[Any] | None = None
    look: Callable[[Traces], str | None] = lambda traces: None
    shard_nbytes: int = 0
    scratch_shards: float = 3.25
    least_sent_nbytes: int | None = None

    @property
    def target(self) -> Measures:
        """The measures of a good answer."""
        return Measures.of(self.peak_nbytes, self.collectives)

    @property
    def where(self) -> str:
        """``N=3 (n=7)``."""
        return f"N={self.ranks} ({self.title})"


# How the calls are written that an answer may make. Each returns its result in a new array, unless it is given out=.
CALLS = {
    "exchange": """
    rank.exchange(send, to, out, source)  array send goes to rank `to`, while
                                          array out gets what `source` sends
    rank.send(x, to)                      the first half of an exchange
    rank.recv(out, source)                the second half""",
    "reduce_scatter": """
    rank.reduce_scatter(x)                x (n,) -> chunk r of the sum""",
    "all_gather": """
    rank.all_gather(x, length=n)          x, chunk r of n elements -> (n,), all""",
    "all_reduce": """
    rank.all_reduce(x)                    x -> the sum, of x's shape"""}
OUT = """
    out=array, of a collective            its result there, not in a new array"""
MEMORY = """
    rank.memory.alloc(shape, dtype, kind) a new array of the rank's memory, as
                                          ((n,), np.float32, "workspace")

A rank's memory does not count what NumPy makes, as a / b: an answer that keeps
that is refused, though its values are right. Write into arrays: /=, out=."""
IMPORTS = "import numpy as np\n\nimport zerosim as zs"
# Worlds of every kind, with the one first that has most to see; lengths of N's multiples, below N, and of neither.
SIZES: Mapping[int, tuple[int, ...]] = {4: (4, 3, 8, 9), 1: (5,), 2: (1, 6), 3: (2, 7), 5: (4, 13), 8: (5, 19)}


@dataclass(frozen=True)
class Puzzle:
    """One exercise. ``function`` is the text of the function, with holes.

    ``allowed`` names the collectives that an answer may call ("exchange" goes without saying), ``changes`` the
    arguments, by name, that it may write into; ``returns`` names what it returns, where that is several things.
    ``score`` are the targets in words. ``case(N, n)`` makes one case; ``sizes`` are the n of each N; ``audit_length``
    the n of the run that is audited, 0 where none is.
    """

    name: str
    case: Callable[[int, int], Case]
    sizes: Mapping[int, tuple[int, ...]]
    audit_length: int
    title: str
    statement: str
    function: str
    hints: Sequence[str]
    score: str
    allowed: Sequence[str] = ()
    changes: Sequence[str] = ()
    returns: Sequence[str] = ()

    @property
    def stub(self) -> str:
        """The code from which to begin."""
        return f"{IMPORTS}\n\n\n{self.function.strip()}\n"

    @property
    def calls(self) -> str:
        """The calls that an answer may make, as they are written, with what each does."""
        calls = [text for name, text in CALLS.items() if name == "exchange" or name in self.allowed]
        return "Allowed:" + "".join([*calls, OUT * (len(calls) > 1), MEMORY * bool(self.audit_length)])

    @property
    def parameters(self) -> list[str]:
        """The names of the arguments after the rank, as the function has them."""
        signature = self.function.partition(f"def {self.name}(rank, ")[2]
        return signature.partition(")")[0].split(", ")

    def cases(self) -> Iterator[Case]:
        """Every case, in the order in which they are run."""
        return (self.case(ranks, length) for ranks, lengths in self.sizes.items() for length in lengths)


def read_puzzle(name: str, case: Callable[[int, int], Case], sizes: Mapping[int, tuple[int, ...]] = SIZES,
                audit_length: int = 1 << 18) -> Puzzle:
    """The puzzle that these cases judge; its words stand beside them in ``tasks/NAME.toml``."""
    return Puzzle(name, case, sizes, audit_length, **facts(name, "zerosim.course.puzzles.tasks"))


def held_copy(rank: Rank, x: Array, kind: str = "input", name: str = "") -> Array:
    """A copy of ``x`` in the rank's memory."""
    copy = rank.memory.alloc(x.shape, x.dtype, kind, name)
    copy[...] = x
    return copy


def vector_of(vectors: Sequence[Array]) -> Callable[[Rank], tuple[Array]]:
    """The arguments of a puzzle that hands each rank one vector of its own."""
    return lambda rank: (held_copy(rank, vectors[rank.index]),)
