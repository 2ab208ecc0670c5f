"""One rank in each process of MPI: arrays as messages of bytes, hop by hop or by MPI's own collectives, and notes."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from zerosim.backends import TIMEOUT_SECONDS
from zerosim.backends.processes.transport import ProcessCluster, Request
from zerosim.numerics.arrays import as_bytes
from zerosim.numerics.kernels import NullKernels, NumpyKernels
from zerosim.ranks.call import GroupKey, Pending, PendingCall, PendingExchange, chunk_lengths
from zerosim.ranks.collectives import NATIVE, Exchange
from zerosim.ranks.errors import BackendError, MismatchError
from zerosim.ranks.hub import sent_by, steps_of


def mpi() -> Any:
    """The module ``mpi4py.MPI``, which starts MPI when it is first imported.

    Raises BackendError where mpi4py, or the MPI library behind it, is missing.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise BackendError("MPI", "ranks as processes need mpi4py, which is not installed here; "
                                  "pip install 'zerosim[mpi]'") from error
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError("MPI", f"mpi4py {mpi4py.__version__} is installed, but finds no MPI library that works: "
                                  f"{error}. Install one: pip install mpich, or your system's MPICH or Open MPI"
                           ) from error
    return MPI


# -- Arrays as messages of bytes ---------------------------------------------------------------------------------------
# MPI has no name for bf16 or fp8, and all additions are made here, by the kernels.

Leftovers = list[Callable[[], bool]]  # each is asked, until it says so, whether what was given up is over


class Halves:
    """The send and the receive of one exchange, under way."""

    def __init__(self, mpi: Any, comm: Any, tag: int, send: np.ndarray | None, to: int | None, out: np.ndarray | None,
                 source: int | None, *, rendezvous: bool = False) -> None:
        self._mpi, self._out, self._source = mpi, out, source
        self._statuses: list[Any] = []
        self._receive = self._send = mpi.REQUEST_NULL
        if out is not None:
            self._receive = comm.Irecv([as_bytes(out), mpi.BYTE], source, tag)
        if send is not None:
            begin = comm.Issend if rendezvous else comm.Isend
            self._send = begin([as_bytes(send), mpi.BYTE], to, tag)

    def sent(self) -> bool:
        """True when the send has left."""
        left: bool = self._send.Test()
        return left

    def received(self, what: str) -> bool:
        """True when the message is there; MismatchError when it is not as long as was expected."""
        if self._out is None:
            return True
        status = self._mpi.Status()
        try:
            if not self._receive.Test(status):
                return False
            count = status.Get_count(self._mpi.BYTE)
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            count = None
        out, self._out = self._out, None
        if count != out.nbytes:
            found = "a longer one" if count is None else f"one of {count}"
            raise MismatchError(f"{what} expected a message of {out.nbytes} bytes ({out.shape}, {out.dtype}) from rank "
                                f"{self._source} of its group, and {found} came; the ranks do not mean the same shape "
                                "and dtype. zs.connect(debug=True) says what each of them asked for")
        return True

    def cancel(self, leftovers: Leftovers) -> None:
        """Gives up the receive; the send may still be under way."""
        if self._receive != self._mpi.REQUEST_NULL:
            self._receive.Cancel()
            with suppress(self._mpi.Exception):  # what has come may be too long
                self._receive.Wait()
        leftovers.append(self.sent)


# -- ``algorithm="native"``: MPI's own collectives, whose order of additions is the library's ------------------------
# Sums of N terms in any order, each addition rounded once to the format: |result - sum| <= (N-1)·u·(1 + u)^(N-1)·Σ|x|,
# u the format's unit roundoff (Higham 2002, section 4.2); MPI keeps to it with the operators given here.
#
# Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].


# What MPI adds itself; everything else, and every maximum of floats (NaN, signed zeros), goes through our kernels.
BUILT_IN = ("f4", "f8")


class NativeRequest(Request):
    """One non-blocking collective of the library, under way."""

    def __init__(self, me: PendingCall, mpi: Any, comm: Any, leftovers: Leftovers) -> None:
        self.me, self._comm, self._leftovers = me, comm, leftovers
        call, self._made = me.call, list[Any]()  # what MPI gets back when the call is over
        if adds_itself(call.dtype, call.op):
            self._type = mpi.Datatype.fromcode(call.dtype.char)
            self._op = {"max": mpi.MAX, "min": mpi.MIN}.get(call.op, mpi.SUM)
        else:
            self._type = mpi.BYTE.Create_contiguous(call.dtype.itemsize).Commit()
            self._made.append(self._type)
            if "reduce" in call.operation:
                self._op = mpi.Op.Create(combined(me.kernels, call.op, call.dtype), commute=True)
                self._made.append(self._op)
        # MPI forbids that a collective reads where it writes.
        self._x = me.x.copy() if me.in_place else me.x
        self._request = getattr(self, f"_{call.operation}")()

    def advance(self) -> bool:
        """Looks whether the library is done."""
        if not self._over():
            return False
        self.me.finish(sent_by(self.me.call.normalized(), self.me.index))
        return True

    def cancel(self) -> None:
        """A collective of the library cannot be given up: it is over when all ranks have begun it, or never."""
        if not self.me.done:
            self._leftovers.append(self._over)

    def _over(self) -> bool:
        """True when the library is done, and has all back that it needed for the call."""
        if not self._request.Test():
            return False
        for made in self._made:
            made.Free()
        return True

    # -- the collectives ------------------------------------------------------------------------------------------

    def _message(self, x: np.ndarray, *layout: Any) -> list[Any]:
        return [as_bytes(x), *layout, self._type]

    def _chunks(self) -> tuple[list[int], list[int]]:
        """Counts and displacements of the chunks, in elements."""
        cut = self.me.call.cut
        return chunk_lengths(cut).tolist(), list(cut[:-1])

    def _reduce_scatter(self) -> Any:
        lengths, _ = self._chunks()
        return self._comm.Ireduce_scatter(self._message(self._x), self._message(self.me.out), lengths, self._op)

    def _all_gather(self) -> Any:
        return self._comm.Iallgatherv(self._message(self._x), self._message(self.me.out, self._chunks()))

    def _all_reduce(self) -> Any:
        return self._comm.Iallreduce(self._message(self._x), self._message(self.me.out), self._op)

    def _broadcast(self) -> Any:
        if self.me.index == self.me.call.root and not self.me.in_place:
            self.me.out[...] = self._x
        return self._comm.Ibcast(self._message(self.me.out), self.me.call.root)

    def _reduce(self) -> Any:
        return self._comm.Ireduce(self._message(self._x), self._message(self.me.out), self._op, self.me.call.root)

    def _gather(self) -> Any:
        at_root = self.me.index == self.me.call.root
        into = self._message(self.me.out, self._chunks()) if at_root else None
        return self._comm.Igatherv(self._message(self._x), into, self.me.call.root)

    def _all_to_all(self) -> Any:
        lengths, starts = self._chunks()
        own = lengths[self.me.index]
        arriving = [own] * len(lengths), [own * rank for rank in range(len(lengths))]
        return self._comm.Ialltoallv(self._message(self._x, (lengths, starts)),
                                     self._message(self.me.out, arriving))

    def _barrier(self) -> Any:
        return self._comm.Ibarrier()


def adds_itself(dtype: np.dtype[Any], op: str) -> bool:
    """True where MPI's own operator means what ours does."""
    return dtype.kind in "iu" or (dtype.str[1:] in BUILT_IN and op in ("sum", "mean"))


def combined(kernels: NumpyKernels | NullKernels, op: str, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    """The operator ``inout = in (op) inout`` on MPI's buffers of this dtype, each element rounded once."""
    combine = {"max": kernels.maximum_rounded, "min": kernels.minimum_rounded}.get(op, kernels.add_rounded)

    def operator(inbuf: Any, inout: Any, datatype: Any) -> None:
        total = np.frombuffer(inout, dtype)
        combine(np.frombuffer(inbuf, dtype), total, total)

    return operator


# -- Notes between processes as small MPI messages, on a communicator of their own -----------------------------------

class MPIChannel:
    """Carries pickled notes; nothing in it waits but ``everyone``."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._leaving: list[Any] = []
        self.index: int = self._comm.rank
        self.size: int = self._comm.size

    def post(self, note: Any, to: int | None = None) -> None:
        """Sends a note to one rank, or to all others."""
        for rank in range(self.size) if to is None else (to,):
            if rank != self.index:
                self._leaving.append(self._comm.isend(note, rank))

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """(rank, note) of what has come since the last call."""
        self._leaving = [request for request in self._leaving if not request.Test()]
        status = self._mpi.Status()
        while (message := self._comm.improbe(status=status)) is not None:
            yield status.source, message.recv()

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order."""
        values: list[Any] = self._comm.allgather(value)
        return values

    def abort(self) -> None:
        """Ends all processes of the job."""
        self._comm.Abort(1)

    def close(self) -> None:
        """Gives the communicator back."""
        self._comm.Free()


# -- Collectives over MPI: each hop of an algorithm is a pair of non-blocking messages, made by whoever asks next ----

MESSAGES = 0  # the tag of a program's own messages; a collective's is 1 + its number, modulo what MPI can hold


class MessageRequest(Request):
    """A message that the program sends itself."""

    def __init__(self, me: PendingExchange, halves: Halves, leftovers: Leftovers) -> None:
        self.me, self._halves, self._leftovers = me, halves, leftovers

    def advance(self) -> bool:
        """Looks whether either half has moved."""
        me, before = self.me, (self.me.to_send, self.me.to_receive)
        if me.to_send and self._halves.sent():
            assert me.send is not None
            me.to_send = False
            me.count(me.send.nbytes)
        if me.to_receive and self._halves.received(f"rank {me.rank}"):
            me.to_receive = False
        return before != (me.to_send, me.to_receive)

    def cancel(self) -> None:
        """Gives up the halves that have not moved."""
        self._halves.cancel(self._leftovers)


class HopsRequest(Request):
    """A collective on its way: this rank's generator, and the hop that it waits for."""

    def __init__(self, me: PendingCall, mpi: Any, comm: Any, leftovers: Leftovers) -> None:
        self.me, self._mpi, self._comm, self._leftovers = me, mpi, comm, leftovers
        self._tag = 1 + me.call.number % (comm.Get_attr(mpi.TAG_UB) - 1)
        self._steps = steps_of(me)
        self._nbytes = 0
        self._hop: Exchange | None = None
        self._halves: Halves | None = None
        self._next()

    def _next(self) -> None:
        self._hop, self._halves = next(self._steps, None), None
        if self._hop is None:
            self.me.finish(self._nbytes)
            return
        hop = self._hop
        self._halves = Halves(self._mpi, self._comm, self._tag, hop.send, hop.to, hop.out, hop.source)
        self._nbytes += 0 if hop.send is None else hop.send.nbytes

    def advance(self) -> bool:
        """Makes every hop whose messages have arrived and left."""
        moved = False
        while self._halves is not None and self._halves.received(str(self.me.call)) and self._halves.sent():
            self._next()
            moved = True
        return moved

    def cancel(self) -> None:
        """Gives up the hop under way, and all that would have followed."""
        if self._halves is not None:
            self._halves.cancel(self._leftovers)


class MPIPointToPoint:
    """Makes the hops of this process' rank; one communicator for each group of ranks."""

    library = "MPI"
    in_order = False  # every call has a tag, every group a communicator

    def __init__(self, mpi: Any, comm: Any, *, rendezvous: bool) -> None:
        self._mpi, self._rendezvous = mpi, rendezvous
        self._world: GroupKey = tuple(range(comm.size)), ()
        self._comms: dict[GroupKey, Any] = {self._world: comm}
        self._leftovers: Leftovers = []

    def begin(self, me: Pending) -> Request:
        """Posts the first messages of the part."""
        if isinstance(me, PendingExchange):
            group, comm = me.key[0], self._comms[me.key]
            to = None if me.to is None else group.index(me.to)
            source = None if me.source is None else group.index(me.source)
            halves = Halves(self._mpi, comm, MESSAGES, me.send, to, me.out, source, rendezvous=self._rendezvous)
            return MessageRequest(me, halves, self._leftovers)
        comm = self._comms[me.call.key]
        if me.call.algorithm == NATIVE:
            return NativeRequest(me, self._mpi, comm, self._leftovers)
        return HopsRequest(me, self._mpi, comm, self._leftovers)

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """A communicator for the group; only its members are here, and all of them."""
        everyone, comm = self._comms[parent].Get_group(), self._comms[parent]
        members = everyone.Incl([parent[0].index(rank) for rank in key[0]])
        self._comms[key] = comm.Create_group(members)
        members.Free()
        everyone.Free()

    def idle(self) -> bool:
        """True: what a program has waited for is done, and it waits for all."""
        return True

    def drain(self) -> bool:
        """Takes and forgets what arrives; True when nothing that this rank has begun is under way."""
        for comm in self._comms.values():
            status = self._mpi.Status()
            while (message := comm.Improbe(status=status)) is not None:
                message.Recv([np.empty(status.Get_count(self._mpi.BYTE), np.uint8), self._mpi.BYTE])
        self._leftovers[:] = [is_over for is_over in self._leftovers if not is_over()]
        return not self._leftovers

    def close_drained(self) -> None:
        """Takes what came with the last note, and gives back the communicators."""
        self.drain()
        self.close()

    def close(self) -> None:
        """Gives back the communicators of the groups that this run made."""
        for key, comm in self._comms.items():
            if key != self._world:
                comm.Free()


# -- The cluster of the processes that mpiexec has started -----------------------------------------------------------

class MPICluster(ProcessCluster):
    """One rank in each process of an MPI communicator, MPI.COMM_WORLD unless another is given.

    The project's own algorithms give the bits that ``Cluster`` gives; ``algorithm="native"`` asks MPI for its own.
    """

    def __init__(self, comm: Any = None, *, capacity_nbytes: int | None = None, debug: bool = False,
                 blas_threads: int = 1, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Raises BackendError where mpi4py or MPI is missing."""
        self._mpi = mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        super().__init__(MPIChannel(self._comm), capacity_nbytes=capacity_nbytes, debug=debug,
                         blas_threads=blas_threads, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Gives back the communicators."""
        super().close()
        self._comm.Free()

    def _point_to_point(self) -> MPIPointToPoint:
        return MPIPointToPoint(self._mpi, self._comm, rendezvous=self.debug)
