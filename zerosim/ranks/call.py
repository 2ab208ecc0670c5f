"""A collective call: what all ranks of a group must agree on, and one rank's pending part of it.

`Rank.reduce_scatter` and the others check what the program hands them, put all that the ranks must agree on into a
`Call`, and this rank's arrays into a `PendingCall`. The algorithms' generators get that one as ``me``, and so does the
backend that carries the call out.

Legend: n elements of the whole vector, N ranks. A cut is a tuple of N+1 boundaries; chunk i is
``vector[cut[i]:cut[i + 1]]``, and belongs to rank i.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from zerosim.numerics.arrays import Integers, is_array, is_same_memory, is_writable, may_share_memory, poison, spans
from zerosim.numerics.checks import FLOATING, unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NullKernels, NumpyKernels, do_nothing
from zerosim.numerics.policy import MEANS
from zerosim.numerics.rounding import round_to

Cut = tuple[int, ...]


@lru_cache(maxsize=4096)
def ceil_cut(length: int, ranks: int) -> Cut:
    """Boundaries min(n, i * ceil(n/N)): equal chunks, of which the last ones may be short or empty.

    >>> ceil_cut(9, 4)
    (0, 3, 6, 9, 9)
    """
    chunk = -(-length // ranks)
    return Integers(min(length, i * chunk) for i in range(ranks + 1))


def tensor_cut(lengths: Iterable[int], ranks: int) -> Cut:
    """Boundaries in a vector of tensors, each on the border of a tensor nearest to an equal share; nothing is padded.

    >>> tensor_cut((6, 1, 1, 4), 3)
    (0, 6, 8, 12)

    Of two borders as near as each other it is the first. Where there are more ranks than tensors, some own nothing.
    """
    borders = list(dict.fromkeys(accumulate(lengths, initial=0)))
    total = borders[-1]

    def nearest(rank: int) -> int:
        after = bisect_left(borders, -(-rank * total // ranks))
        return min(borders[max(0, after - 1):after + 1], key=lambda border: abs(border * ranks - rank * total))

    return (*map(nearest, range(ranks)), total)


def checked_cut(splits: Iterable[int] | None, length: int, ranks: int, *, any_length: bool = False) -> Cut:
    """The boundaries asked for by ``splits``, or the ceil cut when it is None.

    Raises ValueError unless ``splits`` is N+1 rising integers from 0 to n, where n is ``length``; with ``any_length``
    they say themselves where the vector ends.
    """
    if splits is None:
        return ceil_cut(length, ranks)
    try:
        cut = splits if isinstance(splits, Integers) else Integers(map(operator.index, splits))
    except TypeError as error:
        raise ValueError(f"splits= must hold integers, found {splits!r}; pass N+1 boundaries, e.g. "
                         f"{ceil_cut(length, ranks)}") from error
    return _checked(cut, None if any_length else length, ranks)


@lru_cache(maxsize=256)  # a model of many equal units asks for few cuts again and again, each of N+1 boundaries
def _checked(cut: Integers, length: int | None, ranks: int) -> Cut:
    length = max(cut, default=0) if length is None else length
    if len(cut) != ranks + 1 or cut[0] != 0 or cut[-1] != length or any(a > b for a, b in pairwise(cut)):
        raise ValueError(f"splits={cut} does not cut {length} elements among {ranks} ranks; pass {ranks + 1} rising "
                         f"boundaries from 0 to {length}, e.g. {ceil_cut(length, ranks)}")
    return cut


@lru_cache(maxsize=4096)
def chunk_lengths(cut: Cut) -> np.ndarray:
    """(N,): the elements of each chunk; read-only."""
    lengths = np.diff(cut)
    lengths.flags.writeable = False
    return lengths


def largest_chunk(cut: Cut) -> int:
    """Elements of the longest chunk."""
    return int(chunk_lengths(cut).max())


# -- What all ranks agree on -----------------------------------------------------------------------------------------

OPS = ("sum", "mean", "max", "min")
ONLY_ROOT_RECEIVES = ("reduce", "gather")
GATHERS = ("all_gather", "gather")  # of which each rank passes its chunk
GroupKey = tuple[tuple[int, ...], tuple[int, ...]]  # the members' indices, and what tells groups of equal members apart


class Call(NamedTuple):
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
    def key(self) -> GroupKey:
        """The group's identity among all groups."""
        return self.group, self.communicator

    @property
    def length(self) -> int:
        """n, the elements of the whole vector."""
        return self.cut[-1]

    @property
    def wire_dtype(self) -> np.dtype[Any]:
        """The dtype in which values travel."""
        return self.dtype if self.wire is None else self.wire

    def gets_result(self, index: int) -> bool:
        """True unless only the root receives a result, and the rank is another one."""
        return index == self.root or self.operation not in ONLY_ROOT_RECEIVES

    def normalized(self) -> "Call":
        """The call without what tells it apart from others of the same hops: the n-th of a loop makes the first's."""
        return self._replace(number=0, communicator=(), group=tuple(range(self.ranks)), purpose="unspecified",
                             agreement="")

    def checked_reduction(self) -> "Call":
        """The call of a reduction with its mean in full: "avg" is "mean", by the first of the averaging rules if none.

        Raises ValueError for an ``op`` or an ``average`` that there is not, or that the dtype cannot have.
        """
        op = "mean" if self.op == "avg" else self.op
        if op not in OPS:
            raise ValueError(f"no reduction op={op!r}; choose one of {', '.join(OPS)}")
        if op != "mean" and self.average is not None:
            raise ValueError(f"average={self.average!r} says how to take a mean, but op={op!r}; pass op='mean'")
        if self.dtype.kind not in "iu" and self.dtype not in FLOATING:
            raise ValueError(f"{self.dtype} cannot be reduced; cast to an integer or a float first")
        if op == "mean" and self.dtype not in FLOATING:
            raise ValueError(f"op='mean' of {self.dtype} would need rounding rules that integers do not have; "
                             "sum, or cast to a float")
        if op != "mean":
            return self
        return self._replace(op=op, average=MEANS[0] if self.average is None else self.average)

    @property
    def shapes(self) -> str:
        """The shape that each rank passed; where that is a chunk, with the shape of the whole vector behind it."""
        if self.operation not in GATHERS:
            return str(self.shape)
        longest = largest_chunk(self.cut)
        return f"{'up to ' * (longest * self.ranks > self.length)}({longest},) -> {self.shape}"

    def __str__(self) -> str:
        details = [f"call {self.number}", self.shapes, str(self.dtype)]
        details += [f"op={self.op}"] * (self.op != "sum")
        details += [f"algorithm={self.algorithm}"] * (self.algorithm != "ring")
        details += [f"wire={self.wire}"] * (self.wire is not None)
        details += [f"root={self.root}"] * (self.root != 0)
        details += [self.agreement] * bool(self.agreement)
        return f"{self.operation}({', '.join(details)})"

    def in_full(self) -> str:
        """Like ``str``, with everything that ranks must agree on, for when the short form shows no difference."""
        return (f"{self.operation}(call {self.number}, {self.shapes}, {self.dtype}, op={self.op}, "
                f"average={self.average}, algorithm={self.algorithm}, wire={self.wire}, accumulate={self.accumulate}, "
                f"root={self.root}, splits={self.cut}, purpose={self.purpose}, "
                f"agreement={self.agreement!r}, group={self.group})")


@dataclass(frozen=True, slots=True)
class Hop:
    """One message of a collective: at ``step``, rank ``source`` sends ``chunks`` (``nbytes``) to ``destination``.

    Ranks are indices inside the collective's group. ``chunks`` are the numbers of the cut's chunks that the
    message carries; empty when it carries the whole vector, or nothing.
    """

    step: int
    source: int
    destination: int
    chunks: tuple[int, ...]
    nbytes: int


Array = Any  # numpy's, cupy's, or an array without data when a call is only expanded

# -- Means: the averaging rules by name ------------------------------------------------------------------------------
# Where a mean over N ranks divides decides what overflows or underflows. Every multiplication and division is computed
# in fp32 and rounded once to the array's format.


Kernels = NumpyKernels | NullKernels
Scaling = Callable[[Kernels, Array, Array], None]


@dataclass(frozen=True, slots=True)
class MeanRule:
    """The work of a mean: ``before(kernels, x, out)`` scales each contribution x (n,) to out (n,), None where it stays
    as it is; the sum is divided by ``divide_after``."""

    before: Scaling | None = None
    divide_after: float = 1.0


NO_MEAN = MeanRule()


def _scaling(operation: str, number: float) -> Scaling | None:
    return None if number == 1 else lambda kernels, x, out: getattr(kernels, operation)(x, number, out)


def mean_rule(name: str, ranks: int, dtype: np.dtype) -> MeanRule:
    """The work of a rule for N ranks.

    ``sum_then_divide`` can overflow, ``divide_then_sum`` underflow; ``split`` divides by a power of two before and by
    the rest after; ``premultiply`` multiplies by 1/N rounded to the format, which biases bf16 by +0.195 % at N = 3.
    Raises ValueError for an unknown rule.
    """
    match name:
        case "sum_then_divide":
            return MeanRule(divide_after=ranks)
        case "divide_then_sum":
            return MeanRule(_scaling("divide_rounded", ranks))
        case "split":
            before, after = split_factors(ranks)
            return MeanRule(_scaling("divide_rounded", before), after)
        case "premultiply":
            inverse = 1 / ranks if dtype == np.float64 else float(round_to(np.float32(1 / ranks), format_of(dtype)))
            return MeanRule(_scaling("multiply_rounded", inverse))
    raise unknown_name(f"no averaging rule {name!r}", name, MEANS)


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


# -- One rank's part -------------------------------------------------------------------------------------------------

@dataclass(slots=True, eq=False)
class PendingCall:
    """One rank's part in a call, from its issue until its result is there; algorithms know it as ``me``.

    ``index`` is the rank's place in the group; ``x`` and ``out`` are flat, ``buffers`` those that the algorithm
    declared. ``count`` gets the bytes that the rank has sent; where a call is only expanded nobody counts. ``where`` is
    the line of the program that issued an asynchronous call, and has gone on; that of another call waits in it.
    """

    call: Call
    index: int
    kernels: Kernels
    x: Array
    out: Array
    buffers: list[Array] = field(default_factory=list)
    count: Callable[[int], None] = do_nothing
    where: str = ""
    done: bool = False

    # -- for the algorithm --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """N, the number of ranks that take part."""
        return len(self.call.group)

    def neighbor(self, distance: int) -> int:
        """The rank ``distance`` places further on the ring."""
        return (self.index + distance) % self.size

    def bounds(self, chunk: int, count: int = 1) -> slice:
        """The place of ``count`` consecutive chunks from ``chunk`` on in the whole vector."""
        return slice(self.call.cut[chunk], self.call.cut[chunk + count])

    def length(self, chunk: int) -> int:
        """Elements of one chunk; ``chunk`` counts modulo N."""
        low, high = self.call.cut[chunk % self.size:chunk % self.size + 2]
        return high - low

    def chunk(self, vector: Array, chunk: int) -> Array:
        """A view of one chunk of the whole vector; ``chunk`` counts modulo N."""
        return vector[self.bounds(chunk % self.size)]

    def copy(self, source: Array, out: Array) -> None:
        """Copies, casting to the dtype of ``out`` with one rounding; nothing to do when both are the same memory."""
        if source is not out and not is_same_memory(source, out):
            self.kernels.cast_pack(source, out)

    def combine(self, a: Array, b: Array, out: Array) -> None:
        """out = a + b rounded once to out's format (or their maximum, minimum); b is cast to that format first."""
        casts = b.dtype != out.dtype and isinstance(out, np.ndarray)
        # A block at a time, since the cast takes memory that nobody is charged for.
        for here in spans(len(out)) if casts else (slice(None),):
            match self.call.op:
                case "max":
                    self.kernels.maximum_rounded(a[here], b[here], out[here])
                case "min":
                    self.kernels.minimum_rounded(a[here], b[here], out[here])
                case _:
                    self.kernels.add_rounded(a[here], b[here], out[here])

    # -- for the backend ----------------------------------------------------------------------------------------------

    def finish(self, nbytes: int) -> None:
        """The backend has carried the call out, and this rank sent ``nbytes`` in it."""
        self.count(nbytes)
        self.done = True

    def release(self) -> None:
        """The rank has fetched its result: nothing is held through this object any more."""
        self.x = self.out = None
        self.buffers = []

    def describe(self) -> str:
        """The call as an error text shows it."""
        return str(self.call)


@dataclass(slots=True, eq=False)
class PendingExchange:
    """A message that the program sends or receives itself; ranks are indices in the whole cluster, None for an absent
    half. ``to_send`` and ``to_receive`` say which halves have not moved yet."""

    rank: int
    send: Array | None
    to: int | None
    out: Array | None
    source: int | None
    key: GroupKey
    count: Callable[[int], None] = do_nothing
    chunks: tuple[int, ...] = ()  # it is no part of a cut vector
    to_send: bool = field(init=False)
    to_receive: bool = field(init=False)

    def __post_init__(self) -> None:
        self.to_send, self.to_receive = self.to is not None, self.source is not None

    @property
    def done(self) -> bool:
        """True when both halves have moved."""
        return not (self.to_send or self.to_receive)

    def sent(self, nbytes: int) -> None:
        """The backend says that what the rank sends has left, in so many bytes."""
        self.to_send = False
        self.count(nbytes)

    def received(self) -> None:
        """The backend says that what the rank receives has arrived."""
        self.to_receive = False

    def describe(self) -> str:
        """The halves that are still open, as an error text shows them."""
        halves = []
        if self.to_send and self.send is not None:
            halves.append(f"send({self.send.shape}, {self.send.dtype}) to rank {self.to}")
        if self.to_receive and self.out is not None:
            halves.append(f"recv({self.out.shape}, {self.out.dtype}) from rank {self.source}")
        return " and ".join(halves)


Pending = PendingCall | PendingExchange
Buffer = tuple[int, np.dtype[Any]]  # elements, dtype


@dataclass(frozen=True, slots=True)
class Exchange:
    """The one primitive: send to one rank while receiving from one, either half possibly absent.

    ``out`` fixes how many elements arrive. ``chunks`` are the numbers of the chunks that ``send`` carries.
    """

    send: Array | None
    to: int | None
    out: Array | None
    source: int | None
    chunks: tuple[int, ...] = ()


Exchanges = Generator[Exchange, None, None]


class Backend:
    """The way between ranks in one run: the in-process hub, or a process of MPI or NCCL.

    What a backend has no use for, it inherits from here: these methods do nothing.
    """

    knows_the_others = True  # False where one rank stands for all
    hides_results = True  # False where those of asynchronous collectives may land in out= before their wait
    checks_inputs = True  # False where nobody asks at the wait whether they have changed
    library: str | None = None  # whose collectives ``algorithm="native"`` asks for: MPI, NCCL
    arrays_in_common: MutableMapping[Any, Array] | None = None  # arrays that ranks share, by the call that they are for
    results: Sequence[Any]  # of the ranks that run here

    # -- for a rank's program, as `Rank` asks -------------------------------------------------------------------------

    def check_use(self, rank: int) -> None:
        """Raises RankUseError unless the caller is the rank's own running program."""

    def hide(self, out: Array) -> None:
        """Fills what shall show nothing until its wait; what is issued next has its result there."""
        poison(out)

    def issue(self, rank: int, me: Pending) -> None:
        """Takes the rank's part and returns at once."""

    def wait(self, rank: int, me: Pending) -> None:
        """Returns when ``me.done``."""

    def compute(self, rank: int, work: Callable[[], Any], operations: int) -> Any:
        """The result of the work, which uses no rank."""
        return work()

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """The ranks of ``key``, all of the group ``parent``, have agreed to be a group of their own."""

    def progress(self) -> bool:
        """Lets what is under way go on; True if anything moved. Asked after each piece of a program's arithmetic."""
        return False

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def drive(self, programs: Sequence[Callable[[], Any]]) -> Generator[Any, None, None]:
        """Runs the programs of the ranks that are here to their end; yields what is watched."""
        raise NotImplementedError

    def release(self, error: BaseException, handled: BaseException | None) -> None:
        """After a failure: clears what the error's frames would keep in memory, but for what the caller handled before.
        """


# -- Checks of what a program hands to a collective: what was asked, what was found, what to do ----------------------

Same = tuple[slice | EllipsisType, slice | EllipsisType]  # the elements of x and of out that may be the same memory
WHOLE: Same = (..., ...)


def checked_vector(x: Any, what: str, *, flat: bool = False, writable: bool = False) -> np.ndarray:
    """The array, if it is one whose bytes lie in a row; ``flat`` asks for one dimension too, ``writable`` that values
    can arrive in it."""
    if not is_array(x):
        raise ValueError(f"{what} must be a NumPy array, found {type(x).__name__}; "
                         "wrap numbers as np.array([...], np.float32)")
    if not x.flags.c_contiguous:
        raise ValueError(f"{what} of shape {x.shape} is not contiguous, and a collective makes no hidden copies; "
                         "pass np.ascontiguousarray(...)")
    if not x.dtype.isnative:
        raise ValueError(f"{what} is in {x.dtype.str}, whose byte order is not this machine's; "
                         "pass x.astype(x.dtype.newbyteorder('='))")
    if x.dtype.hasobject:
        raise ValueError(f"{what} holds Python objects ({x.dtype}); only numbers travel")
    if flat and x.ndim != 1:
        raise ValueError(f"{what} is cut among ranks and must have one dimension, found shape {x.shape}; "
                         "pass x.reshape(-1)")
    if writable and not is_writable(x):
        raise ValueError(f"{what} is read-only; pass a writable array")
    found: np.ndarray = x
    return found


def checked_output(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """``out=`` as given, if the result fits in it."""
    found = checked_vector(out, "out=", writable=True)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"out= has shape {found.shape} and dtype {found.dtype}, but the result has {shape} and "
                         f"{dtype}; pass an array of that shape and dtype, or none")
    return found


def checked_member(index: Any, ranks: int, what: str) -> int:
    """A rank's index, if there is such a rank."""
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < ranks:
        raise ValueError(f"{what}={index!r}, but the group has the ranks 0 to {ranks - 1}")
    return int(index)


def is_in_place(x: np.ndarray, out: np.ndarray, same: Same | None) -> bool:
    """True when the operation is in place; both arrays are contiguous.

    ``same`` names the parts of ``x`` and ``out`` that may be the same memory, None where none may.
    """
    if not may_share_memory(x, out):
        return False
    if same is None:
        raise ValueError("out= overlaps the input, which is still sent from when the first elements arrive; "
                         "pass memory of its own")
    mine, its = x[same[0]], out[same[1]]
    if is_same_memory(mine, its):
        return True
    raise ValueError("out= overlaps the input without being the same elements; pass the input itself (or, where one of "
                     "them is the rank's chunk of the other, a view of that chunk), or memory of its own")
