"""A rank, as its program sees it: who it is, what it holds, what it did, and how it talks to the others.

Each collective takes the same way. Its method (`Rank.reduce_scatter`) says what is cut and what may lie where;
`Rank._collective` checks that, makes the `Call` on which all ranks must agree and this rank's `PendingCall`, charges
buffers and hands it to the backend; `_finish` waits for it and returns the result, at once or from `Work.wait`.

Legend: n elements, N ranks of the group, chunk i = vector[splits[i]:splits[i + 1]].
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zerosim.numerics.arrays import checksum, copy_elements, is_array, may_share_memory, on_device, on_host, same_bytes
from zerosim.numerics.checks import is_count, is_number
from zerosim.numerics.kernels import NumpyKernels, do_nothing
from zerosim.ranks.call import (
    NO_MEAN,
    WHOLE,
    Backend,
    Call,
    Cut,
    GroupKey,
    MeanRule,
    PendingCall,
    PendingExchange,
    Same,
    ceil_cut,
    checked_cut,
    checked_member,
    checked_output,
    checked_vector,
    is_in_place,
    mean_rule,
)
from zerosim.ranks.collectives import algorithm_of, check_cuts, checked_options
from zerosim.ranks.errors import AsymmetryError, PendingWorkError, RankUseError, place_of_call, refuse_dropped
from zerosim.ranks.memory import Memory
from zerosim.ranks.process import guarded
from zerosim.ranks.trace import Collective, Issue, Message, Trace, Wait, checked_purpose
from zerosim.ranks.workers import Result

Array = np.ndarray
Splits = Iterable[int] | None
BUFFER = "communication_buffer"


@guarded
@dataclass(slots=True)
class RankState:
    """One rank of a cluster, shared by its handles in all groups that it is in."""

    index: int
    memory: Memory
    kernels: NumpyKernels
    trace_rows: int | None = None  # that are kept
    trace: Trace = field(default_factory=Trace)
    backend: Backend | None = None  # None between runs
    computing: bool = False  # True inside Rank.compute
    calls: Counter[GroupKey] = field(default_factory=Counter)
    pending: "list[Work]" = field(default_factory=list)
    deferred_checks: list[Callable[[], None]] = field(default_factory=list)  # made when the program has ended

    def begin(self, backend: Backend) -> None:
        """A run begins: a new trace, fresh counters; memory lives on."""
        self.backend, self.trace = backend, Trace(
            held_at_start=self.memory.now_nbytes_by_kind, after_compute=backend.progress,
            kept_rows=self.trace_rows)
        self.memory.trace = self.trace
        self.calls.clear()

    def end(self) -> None:
        """The run is over."""
        self.backend, self.trace.after_compute = None, do_nothing
        self.pending.clear()
        self.deferred_checks.clear()

    def in_use(self) -> Backend:
        """The backend, if it is this rank's own program that asks.

        Raises RankUseError otherwise.
        """
        if self.backend is None:
            raise RankUseError(f"rank {self.index} is in no run; "
                               "call it inside the program that Cluster.run(program) runs")
        if self.computing:
            raise RankUseError(f"rank {self.index} was used inside the work of compute(), which may run beside that of "
                               "other ranks and uses arrays alone; communicate before it, or after it")
        self.backend.check_use(self.index)
        return self.backend

    def work_off(self, work: Callable[[], Any]) -> Any:
        """The result of the work, which must not use the rank."""
        self.computing = True
        try:
            return work()
        finally:
            self.computing = False

    def check_not_pending(self, operation: str, x: np.ndarray, out: np.ndarray | None) -> None:
        """Raises PendingWorkError for memory in which the result of an earlier work is still to appear."""
        for work in self.pending:
            if work.hides(x) or work.hides(out):
                raise PendingWorkError(
                    f"{operation} was given, at {place_of_call()}, the out= of {work.title}, issued at {work.where}, "
                    "which was not waited for; call work.wait() first, or pass other memory"
                )

    def check_all_waited(self) -> None:
        """Raises PendingWorkError when the program ended with works that nobody waited for, or whose input changed."""
        for check in self.deferred_checks:
            check()
        if self.pending:
            listed = "; ".join(f"{work.title}, issued at {work.where}" for work in self.pending)
            raise PendingWorkError(f"rank {self.index} ended its program with {len(self.pending)} asynchronous "
                                   f"collective(s) that were never waited for: {listed}. Call work.wait() on each")


class Work:
    """The handle that ``async_op=True`` returns.

    Until this rank's own ``wait()`` the result cannot be read and a caller's ``out=`` shows NaN (0xA5 for integers),
    whatever has been computed already: so a program that reads too early fails on every schedule, not only on an
    unlucky one. The input ``x`` must not change either, which a checksum shows, or ``copy`` where there is one.
    """

    def __init__(self, state: RankState, backend: Backend, me: PendingCall, finish: Callable[[], np.ndarray | None], *,
                 out: np.ndarray | None, x: np.ndarray | None, copy: np.ndarray | None) -> None:
        self.title, self.where, self.out = me.describe(), me.where, out
        self._state, self._backend = state, backend
        self._finish: Callable[[], np.ndarray | None] | None = finish
        self._result: np.ndarray | None = None
        self._x, self._copy = x, copy
        self._checksum = None if x is None or copy is not None else checksum(x)
        state.pending.append(self)

    def hides(self, array: np.ndarray | None) -> bool:
        """True when the array shares memory with an ``out=`` that shows nothing yet."""
        return array is not None and self.out is not None and may_share_memory(array, self.out)

    @property
    def waited(self) -> bool:
        """True after ``wait()``."""
        return self._finish is None

    @property
    def result(self) -> np.ndarray | None:
        """The collective's result; raises PendingWorkError before ``wait()``."""
        if not self.waited:
            raise PendingWorkError(f"the result of {self.title}, issued at {self.where}, was read before wait(), at "
                                   f"{place_of_call()}; call work.wait() first, which also returns it")
        return self._result

    def wait(self) -> np.ndarray | None:
        """Blocks until the collective is done and returns its result; a second wait returns it again.

        Raises PendingWorkError when the input was changed since the issue (on a device: at the end of the program), and
        RankUseError outside the run and the program that issued it.
        """
        if self._finish is not None:
            if self._state.in_use() is not self._backend:
                raise RankUseError(f"rank {self._state.index} waited for {self.title}, which was issued in an earlier "
                                   "run and ended with it; wait in the run that issues")
            if self._x is not None:
                self._check_unchanged(self._x)
            self._result = self._finish()
            self._finish = self._x = self._copy = None
            self._state.pending.remove(self)
        return self._result

    def _check_unchanged(self, x: np.ndarray) -> None:
        """At once for an input on the host; a checksum of one on a device is read when the program has ended, since
        that waits for the device."""
        if self._copy is not None:
            _check_same(self.title, self.where, True, same_bytes(x, self._copy))
        elif on_device(x):
            self._state.deferred_checks.append(
                partial(_check_same, self.title, self.where, self._checksum, checksum(x)))
        else:
            _check_same(self.title, self.where, self._checksum, checksum(x))

    def __repr__(self) -> str:
        return f"<Work {self.title}, {'done' if self.waited else 'pending'}>"


def _check_same(title: str, where: str, before: Any, after: Any) -> None:
    if int(before) != int(after):
        raise PendingWorkError(f"the input of {title}, issued at {where}, was changed before wait(); it is "
                               "still read until then: wait first, or hand over a copy")


class Rank:
    """One rank in one group of ranks. Every collective must be called by all ranks of the group, in the same order.
    ``index`` of ``size`` may also be written as ``rank`` of ``world_size``, and ``op="mean"`` as "avg".

    Options that collectives share: ``algorithm`` names a row of the table; ``out`` receives the result (it may be the
    input where that makes sense); ``splits`` are the N+1 boundaries of the cut (None: the ceil cut); ``async_op``
    returns a Work at once, and ``copy_in_flight=False`` lets its result arrive in ``out`` itself, which is undefined
    until ``wait()``: without a second copy, but a program that reads too early may go unseen; ``purpose`` says in the
    trace what the bytes are for. Reductions take ``op`` ("sum", "mean", "max", "min"), ``average`` (a mean's rule),
    ``wire`` (the format in which partial sums travel) and ``accumulate`` (the format in which an owner adds). Wrong
    arguments raise ValueError, disagreeing ranks MismatchError, ranks that wait for each other DeadlockError, too many
    bytes OutOfMemoryError.
    """

    agreement = ""  # the text that all ranks must agree on in each collective, see `agreeing`

    def __init__(self, state: RankState, group: tuple[int, ...], communicator: tuple[int, ...] = ()) -> None:
        self._state, self.group, self.communicator = state, group, communicator
        self.key = group, communicator
        self.index = self.rank = group.index(state.index)
        self.size = self.world_size = len(group)

    @property
    def memory(self) -> Memory:
        """The bytes that the rank holds, by kind."""
        return self._state.memory

    @property
    def trace(self) -> Trace:
        """The record of what the rank did in this run, or in the last one."""
        return self._state.trace

    @property
    def xp(self) -> Any:
        """The array module: numpy, cupy on a GPU, or one whose arrays have no data."""
        return self._state.kernels.xp

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
        state, backend = self._state, self._state.in_use()
        if any((array is None) != (peer is None) or is_array(peer) for array, peer in ((send, to), (out, source))):
            found = ", ".join("array" if is_array(one) else repr(one) for one in (send, to, out, source))
            raise ValueError("exchange(send, to, out, source), send(x, to) and recv(out, source) take for each half an "
                             f"array and then a rank's index, or None for both; found ({found})")
        if send is not None:
            checked_vector(send, "send")
        if out is not None:
            checked_vector(out, "out=", writable=True)
        if send is not None and out is not None and may_share_memory(send, out):
            raise ValueError("out= overlaps send, which may not have left when the first elements arrive; "
                             "pass memory of its own")
        row = Message(self._global(to, "to"), self._global(source, "source"), checked_purpose(purpose),
                      state.trace.path)
        state.trace.add(row)
        me = PendingExchange(state.index, send, row.destination, out, row.source, self.key,
                             partial(state.trace.sent, row))
        backend.issue(state.index, me)
        backend.wait(state.index, me)
        return out

    def send(self, x: Array, to: int, *, purpose: str = "unspecified") -> None:
        """Sends ``x`` to rank ``to``; returns when it has been received."""
        self.exchange(x, to, None, None, purpose=purpose)

    def recv(self, out: Array, source: int, *, purpose: str = "unspecified") -> Array | None:
        """Receives ``out``, of its shape and dtype, from rank ``source``; returns it."""
        return self.exchange(None, None, out, source, purpose=purpose)

    def _global(self, index: int | None, what: str) -> int | None:
        return None if index is None else self.group[checked_member(index, self.size, what)]

    # -- what a rank computes -------------------------------------------------------------------------------------

    def compute(self, work: Callable[[], Result], *, operations: int) -> Result:
        """The result of ``work()``, which computes with arrays of this rank, and may do so beside other ranks' work.

        It may use this rank's memory, trace and kernels; it calls nothing that communicates or computes on a rank, and
        touches nothing that ranks share. ``operations`` of arithmetic, roughly, tell whether it is worth a
        thread. Raises what the work raises, RankUseError where that uses the rank, and ValueError for operations that
        are no number from 0 on.
        """
        if not is_number(operations) or not operations >= 0:
            raise ValueError(f"compute was given operations={operations!r}; say roughly how many the work makes, as "
                             "2 * m * k * n for a product")
        state = self._state
        found: Result = state.in_use().compute(state.index, partial(state.work_off, work), operations)
        return found

    def alloc_in_common(self, length: int, dtype: Any, kind: str, name: str = "") -> Array:
        """A new array (n,), charged to ``kind``, into which the group's next collectives put the same values on every
        rank, and which is then only read. Ranks of one process may have it in common: a gather is one copy and not N.
        Give it back with ``memory.free``: merely let go it stays on the account until the last rank lets it go. Raises
        OutOfMemoryError, and RankUseError out of turn."""
        memory, in_common = self._state.memory, self._state.in_use().arrays_in_common
        asked = self.key, self._state.calls[self.key], length, np.dtype(dtype)
        room = None if in_common is None else in_common.get(asked)
        found = memory.alloc(length, dtype, kind, name, room=room)
        if in_common is not None and on_host(found):
            in_common.setdefault(asked, found)
        return found

    # -- collectives of equals ------------------------------------------------------------------------------------

    def reduce_scatter(self, x: Array, *, op: str = "sum", algorithm: str = "ring", average: str | None = None,
                       wire: str | None = None, accumulate: str | None = None, splits: Splits = None,
                       out: Array | None = None, async_op: bool = False, copy_in_flight: bool = True,
                       purpose: str = "unspecified") -> Any:
        """x (n,) -> this rank's chunk of the sum over ranks. Ring: n - |chunk r| elements sent in N-1 steps."""
        checked_vector(x, "the input of reduce_scatter", flat=True)
        cut = checked_cut(splits, len(x), self.size)
        own = slice(cut[self.index], cut[self.index + 1])
        return self._collective("reduce_scatter", algorithm, x, cut, result=(own.stop - own.start,), same=(own, ...),
                                out=out, async_op=async_op, copy_in_flight=copy_in_flight, op=op, average=average,
                                wire=wire, accumulate=accumulate, purpose=purpose)

    def all_gather(self, x: Array, *, algorithm: str = "ring", length: int | None = None, splits: Splits = None,
                   out: Array | None = None, async_op: bool = False, copy_in_flight: bool = True,
                   purpose: str = "unspecified") -> Any:
        """x (this rank's chunk) -> (n,), the chunks of all ranks in order. Ring: n - |chunk r+1| elements sent.

        ``length`` is n for the ceil cut, that of ``out`` where nothing is said; without these and ``splits`` all chunks
        are as long as this one.
        """
        length = out.size if length is None and splits is None and is_array(out) else length  # type: ignore[union-attr]
        return self._gathered("all_gather", algorithm, x, splits, length, out=out, async_op=async_op,
                              copy_in_flight=copy_in_flight, purpose=purpose)

    def all_reduce(self, x: Array, *, op: str = "sum", algorithm: str = "ring", average: str | None = None,
                   wire: str | None = None, accumulate: str | None = None, splits: Splits = None,
                   out: Array | None = None, async_op: bool = False, copy_in_flight: bool = True,
                   purpose: str = "unspecified") -> Any:
        """x (any shape) -> the sum over ranks, of that shape, the same bits on every rank. ``out=x`` works in place."""
        checked_vector(x, "the input of all_reduce")
        cut = checked_cut(splits, x.size, self.size)
        if splits is not None:
            check_cuts("all_reduce", algorithm, self.size)
        return self._collective("all_reduce", algorithm, x, cut, out=out, async_op=async_op,
                                copy_in_flight=copy_in_flight, op=op, average=average, wire=wire,
                                accumulate=accumulate, purpose=purpose)

    def all_to_all(self, x: Array, *, algorithm: str = "pairwise", splits: Splits = None, out: Array | None = None,
                   async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (n,) -> (N * len(chunk r),): chunk r of every rank, in rank order. It does not work in place."""
        checked_vector(x, "the input of all_to_all", flat=True)
        cut = checked_cut(splits, len(x), self.size)
        length = self.size * (cut[self.index + 1] - cut[self.index])
        return self._collective("all_to_all", algorithm, x, cut, result=(length,), same=None, out=out,
                                async_op=async_op, purpose=purpose)

    def barrier(self) -> None:
        """Returns when every rank of the group has called it."""
        x, out = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._collective("barrier", "dissemination", x, (0,) * (self.size + 1), out=out, purpose="control")

    # -- collectives with a root ----------------------------------------------------------------------------------

    def broadcast(self, x: Array, root: int = 0, *, algorithm: str = "tree", out: Array | None = None,
                  async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (any shape) of the root -> the same on every rank; elsewhere ``x`` gives shape and dtype only."""
        checked_vector(x, "the input of broadcast")
        return self._collective("broadcast", algorithm, x, ceil_cut(x.size, self.size), out=out, async_op=async_op,
                                root=checked_member(root, self.size, "root"), purpose=purpose)

    def reduce(self, x: Array, root: int = 0, *, op: str = "sum", algorithm: str = "tree", average: str | None = None,
               out: Array | None = None, async_op: bool = False, purpose: str = "unspecified") -> Any:
        """x (any shape) -> the sum over ranks at the root; None elsewhere (there ``out`` is refused)."""
        checked_vector(x, "the input of reduce")
        return self._collective("reduce", algorithm, x, ceil_cut(x.size, self.size), out=out, async_op=async_op, op=op,
                                average=average, root=checked_member(root, self.size, "root"), purpose=purpose)

    def gather(self, x: Array, root: int = 0, *, algorithm: str = "pairwise", length: int | None = None,
               splits: Splits = None, out: Array | None = None, async_op: bool = False,
               purpose: str = "unspecified") -> Any:
        """x (this rank's chunk) -> (n,) at the root, None elsewhere."""
        return self._gathered("gather", algorithm, x, splits, length, out=out, async_op=async_op,
                              root=checked_member(root, self.size, "root"), purpose=purpose)

    def _gathered(self, operation: str, algorithm: str, x: Array, splits: Splits, length: int | None,
                  **options: Any) -> Any:
        """Gathers by the cut of its splits, of a given length, or of N chunks as long as the own one."""
        checked_vector(x, f"the input of {operation}", flat=True)
        if length is not None and (not is_count(length) or length < 0):
            raise ValueError(f"length={length!r} must be the number of elements of the whole vector, 0 or more")
        whole = len(x) * self.size if length is None else int(length)
        cut = checked_cut(splits, whole, self.size, any_length=length is None)
        own = slice(cut[self.index], cut[self.index + 1])
        expected = own.stop - own.start
        if len(x) != expected:
            raise ValueError(f"rank {self.index} brings {len(x)} elements to {operation}, but its chunk of the cut "
                             f"{cut} has {expected}; pass the chunk, an out= for all chunks, or the splits= of the cut")
        return self._collective(operation, algorithm, x, cut, whole=(cut[-1],), same=(..., own), **options)

    # -- the way that all collectives take ------------------------------------------------------------------------

    def _collective(self, operation: str, algorithm: str, x: Array, cut: Cut, *, out: Array | None,
                    whole: tuple[int, ...] | None = None, result: tuple[int, ...] | None = None,
                    same: Same | None = WHOLE, async_op: bool = False, copy_in_flight: bool = True,
                    wire: str | None = None, accumulate: str | None = None, purpose: str = "unspecified",
                    **options: Any) -> Any:
        """Carries a collective out: returns its result, or a Work when it is asynchronous.

        ``whole`` and ``result`` are the shapes of the whole vector and of the result, ``x``'s where none is given;
        ``same`` names the parts of ``x`` and ``out`` that may be the same memory, None where none may; ``options`` are
        fields of the `Call`.
        """
        state, backend = self._state, self._state.in_use()
        memory, trace = state.memory, state.trace
        row = algorithm_of(operation, algorithm, self.size)
        whole, number = x.shape if whole is None else whole, state.calls[self.key]
        call = checked_options(
            Call(number, self.communicator, self.group, operation, algorithm, whole, x.dtype, cut,
                 purpose=checked_purpose(purpose), agreement=self.agreement, **options),
            row, library=backend.library, wire=wire, accumulate=accumulate)
        state.check_not_pending(operation, x, out)
        shape, receives = whole if result is None else result, call.gets_result(self.index)
        if out is not None and not receives:
            raise ValueError(f"out= was given to {operation} on rank {self.index}, but only the root, rank "
                             f"{call.root}, receives a result; pass out= there alone")
        if memory.debug and out is None and receives and not async_op:
            refuse_dropped(call, __file__)
        in_place = out is not None and is_in_place(x, checked_output(out, shape, x.dtype), same)
        copy_in_flight &= backend.hides_results
        copied = async_op and (copy_in_flight or memory.debug or out is None)  # what arrives, until wait()

        # Memory: a copy of the input where it will change, the result, the algorithm's buffers.
        rule, captured = mean_rule(call.average, self.size, x.dtype) if call.average else NO_MEAN, x
        if rule.before or (copied and in_place) or (async_op and memory.debug):
            captured = memory.alloc(x.shape, x.dtype, BUFFER, "captured input", like=x)
            if rule.before:
                rule.before(state.kernels.serving(x), x.reshape(-1), captured.reshape(-1))
            else:
                copy_elements(x, captured)
        if out is not None and not copied:
            landing = out
        else:
            landing = memory.alloc(shape, x.dtype, BUFFER if async_op else "workspace", operation,
                                   like=x) if receives else np.empty(0, x.dtype)
        sends = Collective(call, trace.path, async_op)
        me = PendingCall(call, self.index, state.kernels.serving(x),
                         captured if captured.ndim == 1 else captured.reshape(-1),
                         landing if landing.ndim == 1 else landing.reshape(-1),
                         count=partial(trace.sent, sends), where=place_of_call() if async_op else "")
        me.buffers = [memory.alloc(length, dtype, BUFFER, operation, like=x) for length, dtype in row.buffers(me)]

        state.calls[self.key] = number + 1
        trace.add(sends)
        if async_op:
            trace.add(Issue(call))
            if out is not None and not (in_place and captured is x):
                backend.hide(out)
        backend.issue(state.index, me)
        if not async_op:
            return _finish(state, backend, me, out, shape, rule)
        return Work(state, backend, me, partial(_finish, state, backend, me, out, shape, rule, async_op=True),
                    out=out, x=None if in_place or not backend.checks_inputs else x,
                    copy=None if in_place or rule.before or captured is x else captured)

    # -- other handles of this rank -------------------------------------------------------------------------------

    def agreeing(self, text: str) -> "Rank":
        """A handle in the same group, whose collectives are a mismatch unless all ranks call them with this text.

        It is compared beside shapes and dtypes, and never sent.
        """
        handle = object.__new__(type(self))
        handle.__dict__.update(self.__dict__, agreement=text)
        return handle

    def split(self, color: int | None, key: int = 0) -> "Rank | None":
        """A handle in the group of the ranks that gave the same ``color``, in order of ``key``, then of index.

        Memory and trace are shared with this rank, and later runs may use the handle. With color None the rank joins no
        group and gets None.
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
        return self._joined([index for _, index in members], number, int(color))

    def new_group(self, members: Sequence[int]) -> "Rank":
        """A handle in the group of these ranks, in this order; each of them asks for it, at the same place.

        Nothing is sent, because all know the members. Memory and trace are shared with this rank. Raises ValueError for
        ranks that there are not, or twice, and where this rank is not among them.
        """
        named = [checked_member(index, self.size, "member of a group") for index in members]
        if self.index not in named or len(set(named)) < len(named):
            raise ValueError(f"rank {self.index} asked for a group of the ranks {named}; name each member once, this "
                             "rank among them")
        return self._joined(named, self._state.calls[self.key])

    def _joined(self, members: Sequence[int], *number: int) -> "Rank":
        joined = Rank(self._state, tuple(self.group[index] for index in members), (*self.communicator, *number))
        if joined.key not in self._state.calls:
            self._state.in_use().new_group(self.key, joined.key)
            self._state.calls[joined.key] = 0
        return joined


def _finish(state: RankState, backend: Backend, me: PendingCall, out: Array | None, shape: tuple[int, ...],
            rule: MeanRule, *, async_op: bool = False) -> np.ndarray | None:
    """Waits for the rank's part and returns the result where the caller wants it, after a mean's last division.

    No closure: a frame that is cleared after an error keeps those.
    """
    backend.wait(state.index, me)
    if async_op:
        state.trace.add(Wait(me.call))
    landing: Array = me.out
    me.release()
    if not me.call.gets_result(me.index):
        return None
    if rule.divide_after != 1:
        state.kernels.serving(landing).divide_rounded(landing, rule.divide_after, landing)
    if out is None:
        if async_op:
            state.memory.reclassify(landing, "workspace")
        return landing.reshape(shape)
    if async_op and not may_share_memory(landing, out):
        copy_elements(landing.reshape(shape), out)
    return out
