"""One rank in each process of MPI: arrays as bytes, hop by hop or by MPI's own collectives, and control messages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from zerosim.backends.processes.cluster import ProcessCluster
from zerosim.backends.processes.control import Channel
from zerosim.numerics.arrays import as_bytes, copy_elements, may_share_memory, on_device, to_host
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import Call, GroupKey, PendingCall, chunk_lengths
from zerosim.ranks.cluster import Processor
from zerosim.ranks.collectives import Delivery, sent_by
from zerosim.ranks.errors import BackendError, MismatchError, place_of_call
from zerosim.ranks.hub import Deliveries, Transport


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
# MPI has no name for bf16 or fp8, and all additions are made here, by the kernels. What lies on a device travels by way
# of the host, in memory that no rank is charged for.


def landing(out: Any) -> np.ndarray:
    """The array that MPI writes: out itself, or memory of the host for a device's."""
    return np.empty(out.shape, out.dtype) if on_device(out) else out


def landed(there: np.ndarray, out: Any) -> None:
    """Brings what MPI has written to the device, where it belongs there."""
    if there is not out:
        copy_elements(there, out)


class Half:
    """One end of a message, under way; an error's text says ``whose`` it is, a call's or a rank's."""

    def __init__(self, mpi: Any, comm: Any, delivery: Delivery, tag: int, whose: Call | str, *,
                 rendezvous: bool) -> None:
        self._mpi, self._whose, self.delivery, hop = mpi, whose, delivery, delivery.hop
        self._status = mpi.Status()
        self._there = landing(delivery.out) if delivery.sent is None else to_host(delivery.sent)
        if delivery.sent is None:
            self._request = comm.Irecv([as_bytes(self._there), mpi.BYTE], hop.source, tag)
        else:
            begin = comm.Issend if rendezvous else comm.Isend
            self._request = begin([as_bytes(self._there), mpi.BYTE], hop.destination, tag)

    def is_over(self) -> bool:
        """True when the send has left, or the message is there; MismatchError when it is not as long as expected."""
        out = self.delivery.out
        try:
            if not self._request.Test(self._status):
                return False
            found = self._status.Get_count(self._mpi.BYTE)
        except self._mpi.Exception as error:
            if out is None or error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            found = None
        if out is not None and found != out.nbytes:
            length = "a longer one" if found is None else f"one of {found}"
            raise MismatchError(f"{self._whose} expected a message of {out.nbytes} bytes ({out.shape}, {out.dtype}) "
                                f"from rank {self.delivery.hop.source} of its group at {place_of_call()}, and {length} "
                                "came; the ranks do not mean the same shape and dtype. zs.connect(debug=True) says "
                                "what each of them asked for")
        if out is not None:
            landed(self._there, out)
        return True

    def cancel(self) -> bool:
        """Gives up a receive; True unless it is a send, which may still be under way."""
        if self.delivery.out is None:
            return False
        if self._request != self._mpi.REQUEST_NULL:
            self._request.Cancel()
            with suppress(self._mpi.Exception):  # what has come may be too long
                self._request.Wait()
        return True


# -- ``algorithm="native"``: MPI's own collectives, whose order of additions is the library's ------------------------
# Sums of N terms in any order, each addition rounded once to the format: |result - sum| <= (N-1)·u·(1 + u)^(N-1)·Σ|x|,
# u the format's unit roundoff (Higham 2002, section 4.2); MPI keeps to it with the operators given here.
#
# Legend: n elements, N ranks, chunk i = vector[cut[i]:cut[i + 1]].


# What MPI adds itself; everything else, and every maximum of floats (NaN, signed zeros), goes through our kernels.
BUILT_IN = ("f4", "f8")


class NativeCall:
    """One non-blocking collective of the library, under way."""

    def __init__(self, me: PendingCall, mpi: Any, comm: Any) -> None:
        self.me, self._comm = me, comm
        call, self._op, self._made = me.call, None, list[Any]()  # the last: what MPI gets back when the call is over
        if adds_itself(call.dtype, call.op):
            self._type = mpi.Datatype.fromcode(call.dtype.char)
            self._op = {"max": mpi.MAX, "min": mpi.MIN}.get(call.op, mpi.SUM)
        else:
            self._type = mpi.BYTE.Create_contiguous(call.dtype.itemsize).Commit()
            self._made.append(self._type)
            if "reduce" in call.operation:
                self._op = mpi.Op.Create(combined(call.op, call.dtype), commute=True)
                self._made.append(self._op)
        self._out, self._x = landing(me.out), to_host(me.x)
        if may_share_memory(self._x, self._out):  # MPI forbids that a collective reads where it writes
            self._x = self._x.copy()
        self._request = self._begun()

    def is_over(self) -> bool:
        """True when the library is done, and has all back that it needed for the call."""
        if not self._request.Test():
            return False
        for made in self._made:
            made.Free()
        landed(self._out, self.me.out)
        return True

    def cancel(self) -> bool:
        """False: a collective of the library cannot be given up. It is over when all ranks have begun it, or never."""
        return False

    def _begun(self) -> Any:
        """The request of the library's collective. Counts and displacements are in elements."""
        comm, op, root, mine, cut = self._comm, self._op, self.me.call.root, self.me.index, self.me.call.cut
        lengths, starts = chunk_lengths(cut).tolist(), list(cut[:-1])
        x, out = as_bytes(self._x), as_bytes(self._out)
        whole_x, whole_out = [x, self._type], [out, self._type]
        match self.me.call.operation:
            case "reduce_scatter":
                return comm.Ireduce_scatter(whole_x, whole_out, lengths, op)
            case "all_gather":
                return comm.Iallgatherv(whole_x, [out, (lengths, starts), self._type])
            case "all_reduce":
                return comm.Iallreduce(whole_x, whole_out, op)
            case "broadcast":
                if mine == root:
                    self._out[...] = self._x
                return comm.Ibcast(whole_out, root)
            case "reduce":
                return comm.Ireduce(whole_x, whole_out, op, root)
            case "gather":
                return comm.Igatherv(whole_x, [out, (lengths, starts), self._type] if mine == root else None, root)
            case "all_to_all":
                own = lengths[mine]
                arriving = [own] * len(lengths), [own * rank for rank in range(len(lengths))]
                return comm.Ialltoallv([x, (lengths, starts), self._type], [out, arriving, self._type])
        return comm.Ibarrier()


def adds_itself(dtype: np.dtype[Any], op: str) -> bool:
    """True where MPI's own operator means what ours does."""
    return dtype.kind in "iu" or (dtype.str[1:] in BUILT_IN and op in ("sum", "mean"))


def combined(op: str, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    """The operator ``inout = in (op) inout`` on MPI's buffers of this dtype, each element rounded once."""
    kernels = NumpyKernels()
    combine = {"max": kernels.maximum_rounded, "min": kernels.minimum_rounded}.get(op, kernels.add_rounded)

    def operator(inbuf: Any, inout: Any, datatype: Any) -> None:
        total = np.frombuffer(inout, dtype)
        combine(np.frombuffer(inbuf, dtype), total, total)

    return operator


# -- Control messages between processes as small MPI messages, on a communicator of their own ------------------------

class MPIChannel(Channel):
    """Carries pickled control messages."""

    def __init__(self, comm: Any) -> None:
        self._mpi, self._comm = mpi(), comm.Dup()
        self._leaving: list[Any] = []
        self._status = self._mpi.Status()
        super().__init__(self._comm.rank, self._comm.size)

    def send(self, message: Any, to: int | None = None) -> None:
        """Sends a control message to one rank, or to all others."""
        for rank in range(self.size) if to is None else (to,):
            if rank != self.index:
                self._leaving.append(self._comm.isend(message, rank))

    def incoming(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) of what has come since the last call."""
        if self._leaving:
            self._leaving = [request for request in self._leaving if not request.Test()]
        while (message := self._comm.improbe(status=self._status)) is not None:
            yield self._status.source, message.recv()

    def abort(self) -> None:
        """Ends all processes of the job."""
        self._comm.Abort(1)

    def close(self) -> None:
        """Gives the communicator back."""
        self._mpi.Request.Waitall(self._leaving)
        self._comm.Free()


# -- The transport: each hop is a pair of non-blocking messages, looked at by whoever asks next ------------------------

MESSAGES = 0  # the tag of a program's own messages; a collective's is 1 + its number, modulo what MPI can hold


class MPITransport(Transport):
    """Makes the hops of this process' rank; one communicator for each group of ranks."""

    library = "MPI"  # every call has a tag, every group a communicator: calls may begin in different orders
    world = "each a process, over MPI"

    def __init__(self, mpi: Any, comm: Any, *, rendezvous: bool) -> None:
        self._mpi, self._comm, self._rendezvous = mpi, comm.Dup(), rendezvous
        self._comms: dict[GroupKey, Any] = {(tuple(range(comm.size)), ()): self._comm}
        self._under_way: list[Half | NativeCall] = []

    def move(self, key: GroupKey, step: Sequence[Delivery], call: Call | None = None) -> Deliveries:
        """Posts the receives, then the sends, and asks until they are done."""
        comm = self._comms[key]
        tag = MESSAGES if call is None else 1 + call.number % (comm.Get_attr(self._mpi.TAG_UB) - 1)
        halves = [Half(self._mpi, comm, delivery, tag, call or f"rank {self._comm.rank}",
                       rendezvous=self._rendezvous and call is None)
                  for delivery in sorted(step, key=lambda delivery: delivery.out is None)]
        self._under_way += halves
        if call is None:
            yield None  # a message that nobody has agreed on yet is posted and not looked at
        while halves:
            for half in halves.copy():
                if half.is_over():
                    halves.remove(half)
                    self._under_way.remove(half)
                    yield half.delivery
            if halves:
                yield None

    def native(self, parts: Sequence[PendingCall]) -> Deliveries:
        """MPI's own collective."""
        (me,) = parts
        native = NativeCall(me, self._mpi, self._comms[me.call.key])
        self._under_way.append(native)
        while not native.is_over():
            yield None
        self._under_way.remove(native)
        me.finish(sent_by(me.call.normalized(), me.index))

    def new_group(self, parent: GroupKey, key: GroupKey, group_id: bytes) -> None:
        """A communicator for the group; only its members are here, and all of them."""
        everyone, comm = self._comms[parent].Get_group(), self._comms[parent]
        members = everyone.Incl([parent[0].index(rank) for rank in key[0]])
        earlier, self._comms[key] = self._comms.get(key), comm.Create_group(members)
        for one in (members, everyone, *([earlier] if earlier else [])):
            one.Free()

    def abort(self) -> None:
        """Gives up the receives; sends and the library's own collectives stay under way."""
        self._under_way = [each for each in self._under_way if not each.cancel()]

    def drain(self) -> bool:
        """Takes and forgets what arrives; True when nothing that this rank has begun is under way."""
        for comm in self._comms.values():
            status = self._mpi.Status()
            while (message := comm.Improbe(status=status)) is not None:
                message.Recv([np.empty(status.Get_count(self._mpi.BYTE), np.uint8), self._mpi.BYTE])
        self._under_way = [each for each in self._under_way if not each.is_over()]
        return not self._under_way

    def destroy(self) -> None:
        """Gives back the communicators, which live as long as the cluster: a later run may use its groups."""
        for comm in self._comms.values():
            comm.Free()


# -- The cluster of the processes that mpiexec has started -----------------------------------------------------------

class MPICluster(ProcessCluster):
    """One rank in each process of an MPI communicator, MPI.COMM_WORLD unless another is given.

    The project's own algorithms give the bits that ``Cluster`` gives; ``algorithm="native"`` asks MPI for its own.
    ``processor`` has this rank's arrays: NumPy's on the host, unless another is given.
    """

    def __init__(self, comm: Any = None, processor: Processor | None = None, *, debug: bool = False,
                 **options: Any) -> None:
        """Raises BackendError where mpi4py or MPI is missing."""
        library = mpi()
        comm = library.COMM_WORLD if comm is None else comm
        super().__init__(MPIChannel(comm), MPITransport(library, comm, rendezvous=debug), processor, debug=debug,
                         **options)
