"""What all of a rank's groups share: its memory, its trace, its transport, its counters, its open works."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zerosim.numerics.arrays import copy_elements, may_share_memory, poison
from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks import checks
from zerosim.ranks.call import (
    Call,
    CollectiveEntry,
    Cut,
    ExchangeEntry,
    Group,
    Scaling,
    Transport,
    checked_cut,
    gathered_cut,
    scaling,
)
from zerosim.ranks.collectives import Algorithm, Party, algorithm_of
from zerosim.ranks.errors import AsymmetryError, PendingWorkError, RankUseError, guarded
from zerosim.ranks.hub import place_of_call
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import Collective, Issue, Message, Trace, Wait, nothing_follows
from zerosim.ranks.work import Borrowed, Work


@guarded
@dataclass(slots=True)
class RankState:
    """One rank of a cluster, behind the handles that programs see."""

    index: int
    memory: Memory
    kernels: NumpyKernels
    trace: Trace = field(default_factory=Trace)
    transport: Transport | None = None
    calls: Counter[Group] = field(default_factory=Counter)
    pending: list[Work] = field(default_factory=list)
    doubts: list[Callable[[], None]] = field(default_factory=list)  # checks that the end of the program makes

    @property
    def xp(self) -> Any:
        """The array module of what the rank holds."""
        return self.kernels.xp

    def begin(self, transport: Transport) -> None:
        """A run begins: a new trace, fresh counters; memory lives on."""
        self.transport, self.trace = transport, Trace(
            held_at_start=self.memory.now_nbytes_by_kind, after_compute=transport.progress)
        self.memory.trace = self.trace
        self.calls.clear()
        self.pending.clear()
        self.doubts.clear()

    def end(self) -> None:
        """The run is over."""
        self.transport, self.trace.after_compute = None, nothing_follows
        self.pending.clear()
        self.doubts.clear()

    def in_use(self) -> Transport:
        """The transport, if it is this rank's own program that asks.

        Raises RankUseError otherwise.
        """
        if self.transport is None:
            raise RankUseError(f"rank {self.index} is in no run; "
                               "call it inside the program that Cluster.run(program) runs")
        self.transport.check_use(self.index)
        return self.transport

    def check_same_run(self, transport: Transport, title: str) -> None:
        """Raises RankUseError unless it is the program that issued a work, in the same run, that waits for it."""
        if self.in_use() is not transport:
            raise RankUseError(f"rank {self.index} waited for {title}, which was issued in an earlier run and ended "
                               "with it; wait in the run that issues")

    def check_all_waited(self) -> None:
        """Raises PendingWorkError when the program ended with works that nobody waited for, or whose input changed."""
        for check in self.doubts:
            check()
        if self.pending:
            listed = "; ".join(f"{work.title}, issued at {work.where}" for work in self.pending)
            raise PendingWorkError(f"rank {self.index} ended its program with {len(self.pending)} asynchronous "
                                   f"collective(s) that were never waited for: {listed}. Call work.wait() on each")


# -- From a rank's call to the transport and back: checks, buffers, the entry, and what follows when it is done ------
# Legend: n elements, N ranks.


BUFFER = "communication_buffer"


@dataclass(slots=True)
class Request:
    """What a program asked for, before anything is charged or sent.

    ``shape`` is that of the whole vector; ``same`` names the parts of ``x`` and ``out`` that may be the same memory;
    None where none may.
    """

    rank: "Rank"
    operation: str
    algorithm: str
    x: np.ndarray
    cut: Cut
    _: KW_ONLY
    shape: tuple[int, ...]
    out: np.ndarray | None
    out_shape: tuple[int, ...]
    same: checks.Same | None
    op: str = "sum"
    average: str | None = None
    wire: str | None = None
    accumulate: str | None = None
    root: int = 0
    only_root: bool = False
    async_op: bool = False
    purpose: str = "unspecified"
    agreement: str = ""

    def call(self, row: Algorithm, number: int) -> Call:
        """The part on which all ranks must agree."""
        average = checks.reduction(self.op, self.average, self.x.dtype) if "reduce" in self.operation else None
        wire, accumulate = checks.wire_options(row, self.operation, self.algorithm, self.x.dtype, self.op,
                                               wire=self.wire, accumulate=self.accumulate)
        return Call(number, self.rank.communicator, self.rank.group, self.operation, self.algorithm, self.shape,
                    self.x.dtype, self.cut, self.op, average, wire, accumulate, self.root, checks.purpose(self.purpose),
                    self.agreement)

    @property
    def gets_result(self) -> bool:
        return not self.only_root or self.rank.index == self.root


def perform(state: RankState, request: Request) -> Any:
    """Carries a request out: returns its result, or a Work when it is asynchronous."""
    transport = state.in_use()
    row = algorithm_of(request.operation, request.algorithm, request.rank.size)
    checks.served(request.operation, request.algorithm, transport.library)
    call = request.call(row, state.calls[request.rank.key])
    _check_pending(state, request)
    in_place = _check_output(request)
    rule = scaling(call.average, call.ranks, call.dtype) if call.average else Scaling()
    x, borrowed = _captured(state, request, rule, in_place)
    landing = _landing(state, request, in_place)
    entry = _entry(state, request, call, row, x, landing, in_place and x is request.x)
    state.calls[request.rank.key] += 1
    state.trace.rows.append(entry.row)
    if request.async_op:
        state.trace.rows.append(Issue(call))
        if request.out is not None and request.gets_result:
            poison(request.out)
    transport.issue(state.index, entry)

    if not request.async_op:
        return _finish(transport, state, request, rule, entry)
    return Work(str(call), place_of_call(), partial(state.check_same_run, transport),
                partial(_finish, transport, state, request, rule, entry), borrowed, state.pending, state.doubts,
                request.out)


def _finish(transport: Transport, state: RankState, request: Request, rule: Scaling,
            entry: CollectiveEntry) -> np.ndarray | None:
    """Waits for the entry and returns the result. No closure: a frame that is cleared after an error keeps those."""
    transport.wait(state.index, entry)
    if request.async_op:
        state.trace.rows.append(Wait(entry.call))
    return _result(state, request, rule, entry)


def _check_pending(state: RankState, request: Request) -> None:
    """Raises PendingWorkError for memory in which the result of an earlier work is still to appear."""
    for work in state.pending:
        if work.hides(request.x) or work.hides(request.out):
            raise PendingWorkError(
                f"{request.operation} was given the out= of {work.title}, issued at {work.where}, which "
                "was not waited for; call work.wait() first, or pass other memory"
            )


def _check_output(request: Request) -> bool:
    """Checks ``out=``; True when the operation is in place."""
    if request.out is None:
        return False
    if not request.gets_result:
        raise ValueError(f"out= was given to {request.operation} on rank {request.rank.index}, but only the root, rank "
                         f"{request.root}, receives a result; pass out= there alone")
    checks.output(request.out, request.out_shape, request.x.dtype)
    return checks.overlap(request.x, request.out, request.same)


def _captured(state: RankState, request: Request, rule: Scaling, in_place: bool) -> tuple[np.ndarray, Borrowed | None]:
    """The array that the algorithm reads: the input itself, or a charged copy; and how its change would be noticed."""
    x, memory = request.x, state.memory
    copied = rule.changes_input or (request.async_op and (in_place or memory.debug))
    if copied:
        x = memory.alloc(request.x.shape, request.x.dtype, BUFFER, "captured input", like=request.x)
        if rule.changes_input:
            rule.before(state.kernels.serving(request.x), request.x.reshape(-1), x.reshape(-1))
        else:
            copy_elements(request.x, x)
    if not request.async_op or in_place:
        return x, None
    return x, Borrowed(request.x, x if copied and not rule.changes_input else None)


def _landing(state: RankState, request: Request, in_place: bool) -> np.ndarray:
    """Where the algorithm writes: ``out=`` itself, unless it must stay hidden until ``wait()``; or a new array."""
    if request.out is not None and not request.async_op:
        return request.out
    if not request.gets_result:
        return np.empty(0, request.x.dtype)
    kind = BUFFER if request.async_op else "workspace"
    return state.memory.alloc(request.out_shape, request.x.dtype, kind, request.operation, like=request.x)


def _entry(state: RankState, request: Request, call: Call, row: Algorithm, x: np.ndarray, landing: np.ndarray,
           in_place: bool) -> CollectiveEntry:
    party = Party(call, request.rank.index, state.kernels)
    buffers = [state.memory.alloc(length, dtype, BUFFER, call.operation, like=x)
               for length, dtype in row.buffers(party)]
    return CollectiveEntry(call, request.rank.index, x.reshape(-1), landing.reshape(-1), buffers, in_place,
                           Collective(call, state.trace.path, request.async_op), state.trace)


def _result(state: RankState, request: Request, rule: Scaling, entry: CollectiveEntry) -> np.ndarray | None:
    """After the transport is done: the mean's last division, and the result where the caller wants it."""
    landing = entry.out
    entry.let_go()
    if not request.gets_result:
        return None
    rule.after(state.kernels.serving(landing), landing)
    if request.out is None:
        if request.async_op:
            state.memory.reclassify(landing, "workspace")
        return landing.reshape(request.out_shape)
    if request.async_op:
        copy_elements(landing.reshape(request.out_shape), request.out)
    return request.out


# -- A rank, as its program sees it: who it is, what it holds, what it did, and how it talks to the others -----------
# Legend: n elements, N ranks of the group, chunk i = vector[splits[i]:splits[i + 1]].


Array = np.ndarray
Splits = Iterable[int] | None


class Rank:
    """One rank in one group of ranks. Every collective must be called by all ranks of the group, in the same order.

    Options that collectives share: ``algorithm`` names a row of the table; ``out`` receives the result (it may be the
    input where that makes sense); ``splits`` are the N+1 boundaries of the cut (None: the ceil cut); ``async_op``
    returns a Work at once; ``purpose`` says in the trace what the bytes are for; ``agreement`` is a text that must be
    the same on all ranks, checked beside shapes and dtypes, never sent. Reductions take ``op`` ("sum",
    "mean", "max", "min"), ``average`` (the rule of a mean), ``wire`` (the format in which partial sums travel) and
    ``accumulate`` (the format in which an owner adds). Wrong arguments raise ValueError, disagreeing ranks
    MismatchError, ranks that wait for each other DeadlockError, too many bytes OutOfMemoryError.
    """

    def __init__(self, state: RankState, group: tuple[int, ...], communicator: tuple[int, ...] = ()) -> None:
        self._state, self.group, self.communicator = state, group, communicator
        self.key = group, communicator
        self.index = group.index(state.index)
        self.size = len(group)

    @property
    def memory(self) -> Memory:
        """What the rank holds, by kind."""
        return self._state.memory

    @property
    def trace(self) -> Trace:
        """What the rank did in this run, or in the last one."""
        return self._state.trace

    @property
    def xp(self) -> Any:
        """The array module: numpy, cupy on a GPU, or one whose arrays have no data."""
        return self._state.xp

    @property
    def kernels(self) -> Any:
        """Arithmetic rounded like the formats'."""
        return self._state.kernels

    def __repr__(self) -> str:
        return f"<Rank {self.index} of {self.size}>"

    # -- messages -------------------------------------------------------------------------------------------------

    def exchange(self, send: Array | None, to: int | None, out: Array | None, source: int | None, *,
                 purpose: str = "unspecified") -> Array | None:
        """Sends ``send`` to rank ``to`` while receiving ``out`` from rank ``source``; returns ``out``.

        The one primitive. Either half may be absent (None, None). ``out`` fixes the shape and dtype of what arrives;
        the two sizes may differ. It returns when ``send`` may be reused; where MPI would hang it raises DeadlockError.
        """
        transport = self._state.in_use()
        if (send is None) != (to is None) or (out is None) != (source is None):
            raise ValueError("exchange takes send and to together, and out and source together; "
                             "pass both or None for both")
        if send is not None:
            checks.vector(send, "send")
        if out is not None:
            checks.writable(out, "out=")
        if send is not None and out is not None and may_share_memory(send, out):
            raise ValueError("out= overlaps send, which may not have left when the first elements arrive; "
                             "pass memory of its own")
        row = Message(self._global(to, "to"), self._global(source, "source"), checks.purpose(purpose), self.trace.path)
        self.trace.rows.append(row)
        entry = ExchangeEntry(self._state.index, send, row.destination, out, row.source, self.key, row, self.trace)
        transport.issue(self._state.index, entry)
        transport.wait(self._state.index, entry)
        return out

    def send(self, x: Array, to: int, *, purpose: str = "unspecified") -> None:
        """Sends ``x`` to rank ``to``; returns when it has been received."""
        self.exchange(x, to, None, None, purpose=purpose)

    def recv(self, out: Array, source: int, *, purpose: str = "unspecified") -> Array | None:
        """Receives ``out``, of its shape and dtype, from rank ``source``; returns it."""
        return self.exchange(None, None, out, source, purpose=purpose)

    def _global(self, index: int | None, what: str) -> int | None:
        return None if index is None else self.group[checks.member(index, self.size, what)]

    # -- collectives of equals ------------------------------------------------------------------------------------

    def reduce_scatter(self, x: Array, *, op: str = "sum", algorithm: str = "ring", average: str | None = None,
                       wire: str | None = None, accumulate: str | None = None, splits: Splits = None,
                       out: Array | None = None, async_op: bool = False, purpose: str = "unspecified",
                       agreement: str = "") -> Any:
        """x (n,) -> this rank's chunk of the sum over ranks. Ring: n - |chunk r| elements sent in N-1 steps."""
        checks.vector(x, "the input of reduce_scatter", flat=True)
        cut = checked_cut(splits, len(x), self.size)
        own = slice(cut[self.index], cut[self.index + 1])
        return perform(self._state, Request(
            self, "reduce_scatter", algorithm, x, cut, shape=x.shape, out=out, out_shape=x[own].shape,
            same=(own, ...), op=op, average=average, wire=wire, accumulate=accumulate, async_op=async_op,
            purpose=purpose, agreement=agreement))

    def all_gather(self, x: Array, *, algorithm: str = "ring", length: int | None = None, splits: Splits = None,
                   out: Array | None = None, async_op: bool = False, purpose: str = "unspecified",
                   agreement: str = "") -> Any:
        """x (this rank's chunk) -> (n,), the chunks of all ranks in order. Ring: n - |chunk r+1| elements sent.

        ``length`` is n for the ceil cut; without it and ``splits`` all chunks are as long as this one.
        """
        checks.vector(x, "the input of all_gather", flat=True)
        cut = self._gathered_cut("all_gather", x, splits, length)
        own = slice(cut[self.index], cut[self.index + 1])
        return perform(self._state, Request(
            self, "all_gather", algorithm, x, cut, shape=(cut[-1],), out=out, out_shape=(cut[-1],), same=(..., own),
            async_op=async_op, purpose=purpose, agreement=agreement))

    def all_reduce(self, x: Array, *, op: str = "sum", algorithm: str = "ring", average: str | None = None,
                   wire: str | None = None, accumulate: str | None = None, splits: Splits = None,
                   out: Array | None = None, async_op: bool = False, purpose: str = "unspecified",
                   agreement: str = "") -> Any:
        """x (any shape) -> the sum over ranks, of that shape, the same bits on every rank. ``out=x`` works in place."""
        checks.vector(x, "the input of all_reduce")
        cut = checked_cut(splits, x.size, self.size)
        if splits is not None:
            checks.cutting(algorithm_of("all_reduce", algorithm, self.size), "all_reduce", algorithm, self.size)
        return perform(self._state, Request(
            self, "all_reduce", algorithm, x, cut, shape=x.shape, out=out, out_shape=x.shape, same=checks.WHOLE,
            op=op, average=average, wire=wire, accumulate=accumulate, async_op=async_op, purpose=purpose,
            agreement=agreement))

    def all_to_all(self, x: Array, *, algorithm: str = "pairwise", splits: Splits = None, out: Array | None = None,
                   async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (n,) -> (N * len(chunk r),): chunk r of every rank, in rank order. It does not work in place."""
        checks.vector(x, "the input of all_to_all", flat=True)
        cut = checked_cut(splits, len(x), self.size)
        length = self.size * (cut[self.index + 1] - cut[self.index])
        return perform(self._state, Request(
            self, "all_to_all", algorithm, x, cut, shape=x.shape, out=out, out_shape=(length,), same=None,
            async_op=async_op, purpose=purpose))

    def barrier(self) -> None:
        """Returns when every rank of the group has called it."""
        nothing = np.empty(0, np.uint8)
        cut = (0,) * (self.size + 1)
        perform(self._state, Request(
            self, "barrier", "dissemination", nothing, cut, shape=(0,), out=np.empty(0, np.uint8), out_shape=(0,),
            same=checks.WHOLE, purpose="control"))

    # -- collectives with a root ----------------------------------------------------------------------------------

    def broadcast(self, x: Array, root: int = 0, *, algorithm: str = "tree", out: Array | None = None,
                  async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (any shape) of the root -> the same on every rank; elsewhere ``x`` gives shape and dtype only."""
        checks.vector(x, "the input of broadcast")
        return perform(self._state, Request(
            self, "broadcast", algorithm, x, checked_cut(None, x.size, self.size), shape=x.shape, out=out,
            out_shape=x.shape, same=checks.WHOLE,
            root=checks.member(root, self.size, "root"), async_op=async_op, purpose=purpose))

    def reduce(self, x: Array, root: int = 0, *, op: str = "sum", algorithm: str = "tree", average: str | None = None,
               out: Array | None = None, async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (any shape) -> the sum over ranks at the root; None elsewhere (there ``out`` is refused)."""
        checks.vector(x, "the input of reduce")
        return perform(self._state, Request(
            self, "reduce", algorithm, x, checked_cut(None, x.size, self.size), shape=x.shape, out=out,
            out_shape=x.shape, same=checks.WHOLE, op=op, average=average, root=checks.member(root, self.size, "root"),
            only_root=True, async_op=async_op, purpose=purpose))

    def gather(self, x: Array, root: int = 0, *, algorithm: str = "pairwise", length: int | None = None,
               splits: Splits = None, out: Array | None = None, async_op: bool = False,
               purpose: str = "unspecified") -> Any:
        """x (this rank's chunk) -> (n,) at the root, None elsewhere."""
        checks.vector(x, "the input of gather", flat=True)
        cut = self._gathered_cut("gather", x, splits, length)
        own = slice(cut[self.index], cut[self.index + 1])
        return perform(self._state, Request(
            self, "gather", algorithm, x, cut, shape=(cut[-1],), out=out, out_shape=(cut[-1],), same=(..., own),
            root=checks.member(root, self.size, "root"), only_root=True, async_op=async_op, purpose=purpose))

    def _gathered_cut(self, operation: str, x: Array, splits: Splits, length: int | None) -> Cut:
        cut = gathered_cut(splits, length, len(x), self.size)
        expected = cut[self.index + 1] - cut[self.index]
        if len(x) != expected:
            raise ValueError(f"rank {self.index} brings {len(x)} elements to {operation}, but its chunk of the cut "
                             f"{cut} has {expected}; pass the chunk, or the splits= that it was cut by")
        return cut

    # -- groups ---------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> "Rank | None":
        """A handle in the group of the ranks that gave the same ``color``, in order of ``key``, then of index.

        Memory and trace are shared with this rank. With color None the rank joins no group and gets None.
        """
        if color is not None and not (is_count(color) and 0 <= color < 2**63):
            raise ValueError(
                f"color={color!r} must be a whole number from 0 on; pass None to join no group"
            )
        if not is_count(key):
            raise ValueError(f"key={key!r} must be a whole number; ranks of a group are ordered by it")
        if not self._state.in_use().knows_the_others:
            raise AsymmetryError(f"rank {self.index} stands for all ranks and was asked to split() them, but what "
                                 "color the others choose is not known; run all of them, with NullCluster(ranks)")
        number = self._state.calls[self.key]
        mine = np.array([-1 if color is None else color, key], np.int64)
        table = self.all_gather(mine, purpose="control").reshape(self.size, 2)
        if color is None:
            return None
        members = sorted((int(k), index) for index, (c, k) in enumerate(table) if c == color)
        joined = Rank(self._state, tuple(self.group[index] for _, index in members),
                      (*self.communicator, number, int(color)))
        self._state.in_use().join(self.key, joined.key)
        return joined
