"""Cuts: how a vector of n elements is divided into N consecutive chunks, one for each rank.

Legend: n elements, N ranks. A cut is a tuple of N+1 boundaries; chunk i is ``vector[cut[i]:cut[i + 1]]``.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from zerosim.numerics.checks import did_you_mean, is_count
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to
from zerosim.ranks.trace import Collective, Message, Trace

Cut = tuple[int, ...]


@lru_cache(maxsize=4096)
def ceil_cut(length: int, ranks: int) -> Cut:
    """Boundaries min(n, i * ceil(n/N)): equal chunks, of which the last ones may be short or empty.

    >>> ceil_cut(9, 4)
    (0, 3, 6, 9, 9)
    """
    chunk = -(-length // ranks)
    return tuple(min(length, i * chunk) for i in range(ranks + 1))


def checked_cut(splits: Iterable[int] | None, length: int, ranks: int) -> Cut:
    """The boundaries asked for by ``splits``, or the ceil cut when it is None.

    Raises ValueError unless ``splits`` is N+1 rising integers from 0 to n.
    """
    if splits is None:
        return ceil_cut(length, ranks)
    return _checked(whole_numbers(splits, length, ranks), length, ranks)


@lru_cache(maxsize=256)  # a model of many equal units asks for few cuts again and again, each of N+1 boundaries
def _checked(cut: Cut, length: int, ranks: int) -> Cut:
    if len(cut) != ranks + 1 or cut[0] != 0 or cut[-1] != length or any(a > b for a, b in pairwise(cut)):
        raise ValueError(f"splits={cut} does not cut {length} elements among {ranks} ranks; pass {ranks + 1} rising "
                         f"boundaries from 0 to {length}, e.g. {ceil_cut(length, ranks)}")
    return cut


def gathered_cut(splits: Iterable[int] | None, length: int | None, own: int, ranks: int) -> Cut:
    """The cut of a gather: by its splits, of a given length, or of N chunks as long as the own one.

    Raises ValueError for a length that is no count, and like ``checked_cut``.
    """
    if length is not None and (not is_count(length) or length < 0):
        raise ValueError(f"length={length!r} must be the number of elements of the whole vector, 0 or more")
    whole = own * ranks if length is None else int(length)
    if splits is None:
        return ceil_cut(whole, ranks)
    boundaries = whole_numbers(splits, whole, ranks)
    return checked_cut(boundaries, max(boundaries, default=0) if length is None else whole, ranks)


def whole_numbers(splits: Iterable[int], length: int, ranks: int) -> Cut:
    """The boundaries as integers; raises ValueError where they are none."""
    if type(splits) is tuple and set(map(type, splits)) == {int}:
        return splits
    try:
        return tuple(operator.index(boundary) for boundary in splits)
    except TypeError as error:
        raise ValueError(f"splits= must hold integers, found {splits!r}; pass N+1 boundaries, e.g. "
                         f"{ceil_cut(length, ranks)}") from error


@lru_cache(maxsize=4096)
def chunk_lengths(cut: Cut) -> np.ndarray:
    """(N,): the elements of each chunk; read-only."""
    lengths = np.diff(cut)
    lengths.flags.writeable = False
    return lengths


def largest_chunk(cut: Cut) -> int:
    """Elements of the longest chunk."""
    return int(chunk_lengths(cut).max())


# -- A call: everything about a collective on which the ranks of its group must agree --------------------------------
# Legend: n elements, N ranks.


OPS = ("sum", "mean", "max", "min")
Group = tuple[tuple[int, ...], tuple[int, ...]]  # the members' indices, and what tells groups of equal members apart


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one group: its number there, what it does and to what.

    ``group`` holds the members' indices in the whole cluster and ``communicator`` tells groups of equal members
    apart; ``cut`` has the N+1 boundaries of the whole vector; ``shape`` is that of the whole vector.
    """

    number: int
    communicator: tuple[int, ...]
    group: tuple[int, ...]
    operation: str
    algorithm: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    cut: Cut
    op: str = "sum"
    average: str | None = None
    wire: np.dtype[Any] | None = None
    accumulate: np.dtype[Any] | None = None
    root: int = 0
    purpose: str = "unspecified"
    agreement: str = ""

    @property
    def ranks(self) -> int:
        """N, the number of ranks that take part."""
        return len(self.group)

    @property
    def key(self) -> Group:
        """What identifies the group."""
        return self.group, self.communicator

    @property
    def length(self) -> int:
        """n, the elements of the whole vector."""
        return self.cut[-1]

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The dtype in which values travel."""
        return self.dtype if self.wire is None else self.wire

    def __str__(self) -> str:
        details = [f"call {self.number}", str(self.shape), str(self.dtype)]
        details += [f"op={self.op}"] * (self.op != "sum")
        details += [f"algorithm={self.algorithm}"] * (self.algorithm != "ring")
        details += [f"wire={self.wire}"] * (self.wire is not None)
        details += [f"root={self.root}"] * (self.root != 0)
        details += [self.agreement] * bool(self.agreement)
        return f"{self.operation}({', '.join(details)})"

    def in_full(self) -> str:
        """Like ``str``, with everything that ranks must agree on, for when the short form shows no difference."""
        return (f"{self.operation}(call {self.number}, {self.shape}, {self.dtype}, op={self.op}, "
                f"average={self.average}, algorithm={self.algorithm}, wire={self.wire}, accumulate={self.accumulate}, "
                f"root={self.root}, splits={self.cut}, purpose={self.purpose}, "
                f"agreement={self.agreement!r}, group={self.group})")


# -- The averaging rules by name: where a mean over N ranks divides, which decides what overflows or underflows ------
# Legend: N ranks. Every multiplication and division is computed in fp32 and rounded once to the array's format.


def split_factors(ranks: int) -> tuple[int, float]:
    """(before, after): a power of two near sqrt(N) that divides before the sum, and the rest that divides after it.

    Keeps fp16 sums of many ranks in range at both ends; the rule of fairscale's and PyTorch's FSDP.

    >>> split_factors(6), split_factors(64)
    ((4, 1.5), (8, 8.0))
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return before, ranks / before


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a rule does with each contribution before the sum, and with the sum: divide, or multiply by a factor."""

    divide_before: float = 1.0
    multiply_before: float = 1.0
    divide_after: float = 1.0

    @property
    def changes_input(self) -> bool:
        return (self.divide_before, self.multiply_before) != (1.0, 1.0)

    def before(self, kernels: NumpyKernels, x: np.ndarray, out: np.ndarray) -> None:
        """Writes the scaled contribution, (n,), to ``out``."""
        if self.multiply_before != 1.0:
            kernels.multiply_rounded(x, self.multiply_before, out)
        else:
            kernels.divide_rounded(x, self.divide_before, out)

    def after(self, kernels: NumpyKernels, total: np.ndarray) -> None:
        """Scales the sum, (n,), in place."""
        if self.divide_after != 1.0:
            kernels.divide_rounded(total, self.divide_after, total)


AVERAGES = ("sum_then_divide", "divide_then_sum", "split", "premultiply")


def scaling(rule: str, ranks: int, dtype: np.dtype) -> Scaling:
    """The factors of a rule for N ranks.

    ``sum_then_divide`` can overflow, ``divide_then_sum`` underflow; ``split`` divides by a power of two before and by
    the rest after; ``premultiply`` multiplies by 1/N rounded to the format, which biases bf16 by +0.195 % at N = 3.
    Raises ValueError for an unknown rule.
    """
    match rule:
        case "sum_then_divide":
            return Scaling(divide_after=ranks)
        case "divide_then_sum":
            return Scaling(divide_before=ranks)
        case "split":
            before, after = split_factors(ranks)
            return Scaling(divide_before=before, divide_after=after)
        case "premultiply":
            inverse = 1 / ranks if dtype == np.float64 else float(round_to(np.float32(1 / ranks), format_of(dtype)))
            return Scaling(multiply_before=inverse)
    raise ValueError(f"no averaging rule {rule!r}; choose one of {', '.join(AVERAGES)}"
                     f"{did_you_mean(rule, AVERAGES)}")


# -- What one rank hands to the transport: its part in a collective, or an exchange of its own -----------------------
# A transport (the in-process hub, MPI, NCCL) offers ``issue(rank, entry)``, which returns at once, and
# ``wait(rank, entry)``, which returns when ``entry.done``.


@dataclass(slots=True, eq=False)
class CollectiveEntry:
    """A rank's part in one call: its arrays, its charged buffers, and the trace's row that counts its bytes."""

    call: Call
    index: int
    x: np.ndarray
    out: np.ndarray
    buffers: list[np.ndarray]
    in_place: bool
    row: Collective
    trace: Trace
    done: bool = False

    def finish(self, nbytes: int) -> None:
        """The transport has carried the call out, and this rank sent ``nbytes`` in it."""
        self.trace.sent(self.row, nbytes)
        self.done = True

    def let_go(self) -> None:
        """The rank has fetched its result: nothing is held through this entry any more."""
        self.x = self.out = np.empty(0, self.x.dtype)
        self.buffers = []

    def describe(self) -> str:
        """The call as an error text shows it."""
        return str(self.call)


@dataclass(slots=True, eq=False)
class ExchangeEntry:
    """The one primitive as a program uses it; indices are those of the whole cluster, None for an absent half."""

    me: int
    send: np.ndarray | None
    to: int | None
    out: np.ndarray | None
    source: int | None
    key: Group
    row: Message
    trace: Trace
    to_send: bool = field(init=False)
    to_receive: bool = field(init=False)

    def __post_init__(self) -> None:
        self.to_send, self.to_receive = self.to is not None, self.source is not None

    def count(self, nbytes: int) -> None:
        """The transport has moved the sent half."""
        self.trace.sent(self.row, nbytes)

    @property
    def done(self) -> bool:
        """True when both halves have moved."""
        return not (self.to_send or self.to_receive)

    def describe(self) -> str:
        """The halves that are still open, as an error text shows them."""
        halves = []
        if self.to_send and self.send is not None:
            halves.append(f"send({self.send.shape}, {self.send.dtype}) to rank {self.to}")
        if self.to_receive and self.out is not None:
            halves.append(f"recv({self.out.shape}, {self.out.dtype}) from rank {self.source}")
        return " and ".join(halves)


Entry = CollectiveEntry | ExchangeEntry


class Transport(Protocol):
    """What carries entries between ranks."""

    @property
    def knows_the_others(self) -> bool:
        """False where one rank stands for all."""

    @property
    def library(self) -> str | None:
        """Whose collectives ``algorithm="native"`` asks for: ``MPI``, ``NCCL``; None where there is no library."""

    def issue(self, rank: int, entry: Entry) -> None:
        """Takes the entry and returns at once."""

    def wait(self, rank: int, entry: Entry) -> None:
        """Returns when the entry is done."""

    def join(self, parent: Group, key: Group) -> None:
        """The ranks of ``key``, all of the group ``parent``, have agreed to be a group of their own."""

    def progress(self) -> bool:
        """Lets what is under way go on; True if anything moved. Asked after each piece of a program's arithmetic."""

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is the rank's own running program."""
