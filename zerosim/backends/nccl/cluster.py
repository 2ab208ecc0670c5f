"""A cluster of N ranks in this process, each on a GPU of its own, between which NCCL carries what they send.

Legend: N ranks.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zerosim.backends import TIMEOUT_SECONDS
from zerosim.backends.cupy.cluster import cupy_kernels, cupy_on, device_count
from zerosim.backends.nccl.adapter import HOW_PROCESSES_SHARE, ID_NBYTES, NCCL, Communicator, DeviceStreams, devices_for
from zerosim.backends.nccl.collectives import (
    Communicators,
    Native,
    NCCLTransport,
    arrays_on_device,
    on_stream,
    receive,
    send,
)
from zerosim.backends.processes.notes import Channel
from zerosim.backends.processes.transport import ProcessBackend, ProcessCluster, Request
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import GroupKey, Pending, PendingCall, PendingExchange
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.collectives import NATIVE
from zerosim.ranks.errors import BackendError, ranks_text
from zerosim.ranks.hub import RunOptions
from zerosim.ranks.process import forget_frames


class NCCLCluster(Cluster):
    """N ranks on N GPUs of this machine; rank r's arrays are CuPy's, on its device, and ``rank.xp`` is CuPy.

    The project's own algorithms give the bits that ``Cluster`` gives, since NCCL only moves what our kernels add;
    ``algorithm="native"`` asks NCCL for its own. Rank r has device r, or ``devices[r]``; ``share_devices`` lets several
    ranks have one, for tests, where NCCL is set to allow it. Communication runs on a stream of its own:
    ``Work.wait()`` lets the stream that computes wait for it, and not the program. ``run`` returns when all devices are
    done. Arrays on the host (flags, counts) are exchanged as without GPUs. Other options are those of ``Cluster``.
    """

    def __init__(self, ranks: int, *, devices: Sequence[int] | None = None, share_devices: bool = False,
                 capacity_nbytes: int | None = None, debug: bool = False, seed: int = 0, blas_threads: int = 1) -> None:
        """Raises BackendError where CuPy, NCCL or a GPU is missing, and ValueError for fewer GPUs than ranks."""
        self._cupy = cupy_on(0)
        super().__init__(ranks, capacity_nbytes=capacity_nbytes, debug=debug, seed=seed, blas_threads=blas_threads)
        chosen = devices_for(ranks, device_count(self._cupy), devices, share=share_devices)
        self._all_streams = [DeviceStreams(self._cupy, device, kernels)
                             for device, kernels in zip(chosen, self._kernels(ranks), strict=True)]
        self._communicators = Communicators(NCCL(), chosen)

    @property
    def devices(self) -> list[int]:
        """The device of each rank."""
        return list(self._communicators.devices)

    @property
    def world(self) -> str:
        """The place of the ranks, in words."""
        return "each on a GPU of this machine, over NCCL"

    def _kernels(self, count: int) -> list[NumpyKernels]:
        """Of each rank its own, since what they hold lies on its device."""
        return [cupy_kernels() for _ in range(count)]

    def _transport(self, options: RunOptions) -> NCCLTransport:
        return NCCLTransport(self._all_streams, self._communicators, options)

    @contextmanager
    def device_scope(self) -> Iterator[None]:
        """The caller's own device is current again afterwards."""
        current = self._cupy.cuda.Device()
        try:
            yield
        finally:
            current.use()

    def __repr__(self) -> str:
        return f"<NCCLCluster of {len(self.ranks)} ranks on devices {self.devices}, {len(self.runs)} runs>"


# -- One process per GPU: this rank's part in each call, put on its communication stream as soon as it is issued -----
# Hops, additions and all follow one another on that stream, so a call is done for the host when it is asked for, and
# what reads the result waits on the device. Ranks must therefore issue their calls in one order: where two ranks of one
# group issue the calls of two groups in different orders, NCCL waits for ever. The debug mode finds out who disagrees.


HEARSAY_SECONDS = 5.0
Finish = Callable[[], None]


class OnStream(Request):
    """A part whose calls are on the stream: done for the host at once where its arrays lie on the device; where they
    lie on the host, and are carried by copies on the device, when ``finish`` has copied back what arrived."""

    def __init__(self, streams: DeviceStreams, abort: Finish, finish: Finish | None = None) -> None:
        self._streams, self._abort, self._finished = streams, abort, streams.finished()
        self._on_device, self._finish = finish is None, finish

    def advance(self) -> bool:
        """Looks whether the device is done, where something is left for the host to do."""
        if self._finish is None or not self._streams.reached(self._finished):
            return False
        self._finish()
        self._finish = None
        return True

    def wait(self) -> None:
        """The stream that computes waits for what is on the device, and the host does not."""
        if self._on_device:
            self._streams.select()
            self._streams.catch_up(self._finished)

    def cancel(self) -> None:
        """Aborts NCCL: a call on a stream cannot be taken back."""
        self._abort()


class Broken(Request):
    """A part that NCCL refused, perhaps because another rank has failed: then a note soon says so. If not, NCCL's
    error is this rank's own. It is never done."""

    def __init__(self, error: Exception, abort: Finish) -> None:
        # Its frames know the arrays of the call and, by way of the backend's, this object: memory would keep those.
        self._error, self._abort = forget_frames(error), abort
        self._deadline = time.monotonic() + HEARSAY_SECONDS

    def advance(self) -> bool:
        """Raises NCCL's error when nobody has been heard to have failed for some time."""
        if time.monotonic() > self._deadline:
            raise self._error
        return False

    def cancel(self) -> None:
        """Aborts NCCL."""
        self._abort()


class NCCLPointToPoint:
    """Makes the calls of this process' rank: one communicator for each group of ranks, one stream for all of them.

    ``gone`` is called once when the communicators have been aborted.
    """

    library = "NCCL"
    in_order = True  # there is one stream

    def __init__(self, nccl: NCCL, streams: DeviceStreams, world: Communicator, index: int, ranks: int,
                 gone: Finish) -> None:
        self._nccl, self._streams, self._index, self._gone = nccl, streams, index, gone
        self._world: GroupKey = tuple(range(ranks)), ()
        self._comms: dict[GroupKey, Communicator] = {self._world: world}

    def begin(self, me: Pending) -> Request:
        """Puts all that the part asks for on the stream."""
        streams, on_device = self._streams, arrays_on_device(me)
        streams.select()
        streams.follow(streams.ready())
        try:
            finish = self._carried(me, on_device)
        except self._nccl.error as error:
            error.add_note(f"raised by NCCL when it was asked for {me.describe()}")
            return Broken(error, self._abort)
        if not on_device:
            return OnStream(streams, self._abort, finish)
        finish()
        return OnStream(streams, self._abort)

    def _carried(self, me: Pending, on_device: bool) -> Finish:
        """Makes the calls; what is returned ends the part, when the device is done where arrays are on the host."""
        if isinstance(me, PendingExchange):
            return self._exchange(me, on_device)
        if me.call.operation == "barrier":
            return self._barrier(me)
        return self._collective(me, on_device)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, me: PendingCall, on_device: bool) -> Finish:
        staged = me if on_device else replace(
            me, x=self._uploaded(me.x), out=self._like(me.out), in_place=False,
            buffers=[self._like(buffer) for buffer in me.buffers])
        sent = (self._native if me.call.algorithm == NATIVE else self._hops)(staged)

        def finish() -> None:
            if staged is not me:
                me.out[...] = self._streams.fetch(staged.out)
            me.finish(sent)

        return finish

    def _hops(self, me: PendingCall) -> int:
        sent = 0
        for hop in on_stream(self._streams, me):
            self._move(me.call.key, hop.send, hop.to, hop.out, hop.source)
            sent += 0 if hop.send is None else hop.send.nbytes
        return sent

    def _move(self, key: GroupKey, sent: Any, to: int | None, out: Any, source: int | None) -> None:
        """A send and a receive in one group, either possibly absent; ranks are the group's indices."""
        with self._nccl.group():
            if to is not None:
                send(self._comms[key], self._streams, sent, to)
            if source is not None:
                receive(self._comms[key], self._streams, out, source)

    def _native(self, me: PendingCall) -> int:
        streams, native = self._streams, Native(me)
        with streams.communicating():
            native.prepare(streams.kernels.serving(me.x).cast_pack)
        with self._nccl.group():
            native.enqueue(self._comms[me.call.key], streams.pointer)
        return native.sent_nbytes

    def _barrier(self, me: PendingCall) -> Finish:
        """Empty messages are none to NCCL, so one number is added up; all that was communicated before is done then."""
        token = self._uploaded(np.zeros(1, np.int32))
        with self._nccl.group():
            self._comms[me.call.key].all_reduce(token, token, "sum", self._streams.pointer)

        def finish() -> None:
            assert token.size  # held until the device has no more use for it
            me.finish(0)

        return finish

    # -- messages -------------------------------------------------------------------------------------------------

    def _exchange(self, me: PendingExchange, on_device: bool) -> Finish:
        sent, out = me.send, me.out
        if not on_device:
            sent, out = (None if sent is None else self._uploaded(sent)), (None if out is None else self._like(out))
        to, source = (None if rank is None else me.key[0].index(rank) for rank in (me.to, me.source))
        self._move(me.key, sent, to, out, source)

        def finish() -> None:
            if me.out is not None and out is not me.out:
                me.out[...] = self._streams.fetch(out)
            me.to_send = me.to_receive = False
            if me.send is not None:
                me.count(me.send.nbytes)

        return finish

    # -- copies on the device of what lies on the host ------------------------------------------------------------

    def _uploaded(self, x: np.ndarray) -> Any:
        with self._streams.communicating():
            return self._streams.kernels.uploaded(x)

    def _like(self, x: np.ndarray) -> Any:
        with self._streams.communicating():
            return self._streams.kernels.empty(x.shape, x.dtype)

    # -- groups and ends ------------------------------------------------------------------------------------------

    def new_group(self, parent: GroupKey, key: GroupKey) -> None:
        """A communicator for the group. Its id comes from its first member, over the parent's communicator: so ranks
        that join no group need not take part, as they would have to in NCCL's own split."""
        members, streams = key[0], self._streams
        first = self._index == members[0]
        on_device = self._uploaded(np.frombuffer(self._nccl.unique_id() if first else bytes(ID_NBYTES), np.uint8))
        with self._nccl.group():
            if first:
                for rank in members[1:]:
                    send(self._comms[parent], streams, on_device, parent[0].index(rank))
            else:
                receive(self._comms[parent], streams, on_device, parent[0].index(members[0]))
        streams.synchronize()
        unique_id = streams.fetch(on_device).tobytes()
        self._comms[key] = self._nccl.communicator(len(members), unique_id, members.index(self._index))

    def _abort(self) -> None:
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            with suppress(Exception):  # an error has brought us here, and that one is to be raised
                comm.abort()
        if comms:
            self._streams.rest()
            self._gone()

    def drain(self) -> bool:
        """Aborts all communicators: nothing of this rank is under way any more."""
        self._abort()
        return True

    def close_drained(self) -> None:
        """All is aborted here; where it is not yet, nobody waits for this rank."""

    def idle(self) -> bool:
        """True when the device is; raises what has gone wrong there, or on the way to another rank."""
        for comm in self._comms.values():
            comm.check()
        return self._streams.idle()

    def close(self) -> None:
        """Gives back the communicators of the groups that this run made."""
        for key, comm in self._comms.items():
            if key != self._world:
                comm.destroy()


# -- A cluster of processes that have a GPU each, on one machine or on many ------------------------------------------
# Legend: N ranks.


T = TypeVar("T")


class NCCLProcessCluster(ProcessCluster):
    """One rank in each process of a job, on the GPU ``local_rank`` modulo the GPUs that the process sees.

    The project's own algorithms give the bits that ``Cluster`` gives; ``algorithm="native"`` asks NCCL for its own.
    ``channel`` carries notes between the processes: MPI's, or a TCPChannel. The rank's device stays the thread's
    current one. Arrays on the host travel by way of the device. ``share_devices`` lets several ranks have one card, for
    tests.
    """

    def __init__(self, channel: Channel, *, local_rank: int, share_devices: bool = False,
                 capacity_nbytes: int | None = None, debug: bool = False, blas_threads: int = 1,
                 timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Raises BackendError on every process where one of them misses CuPy, NCCL or a GPU that takes it, and
        ValueError where two would share a card without share_devices."""
        self._nccl, self._streams, card = together(channel, lambda: _found(local_rank))
        self.device = self._streams.device
        check_cards(channel, card, share=share_devices)
        super().__init__(channel, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads,
                         timeout_seconds=timeout_seconds)
        self._communicator: Communicator | None = None
        self._connected()

    @property
    def world(self) -> str:
        """The place of the ranks, in words."""
        return "each a process with a GPU, over NCCL"

    def close(self) -> None:
        """Gives NCCL's memory back."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
        super().close()

    def _kernels(self, count: int) -> list[NumpyKernels]:
        return [cupy_kernels()] * count

    def _connected(self) -> Communicator:
        """The communicator of all; made anew by all processes together after a run that failed."""
        if self._communicator is None:
            unique_id = self._channel.everyone(self._nccl.unique_id() if self.index == 0 else None)[0]
            self._streams.select()
            self._communicator = self._nccl.communicator(self._channel.size, unique_id, self.index)
        return self._communicator

    def _aborted(self) -> None:
        self._communicator = None

    def _point_to_point(self) -> NCCLPointToPoint:
        return NCCLPointToPoint(self._nccl, self._streams, self._connected(), self.index, self._channel.size,
                                self._aborted)

    def _backend(self, options: RunOptions) -> ProcessBackend:
        self._streams.select()
        return super()._backend(options)


def together(channel: Channel, find: Callable[[], T]) -> T:
    """The result of ``find()`` in this process; every process calls it.

    Raises in all of them what it raised in one: there its own error, elsewhere BackendError with its rank and text.
    """
    error: Exception | None = None
    try:
        found = find()
    except Exception as raised:  # whatever it is, the others wait for it
        error = raised
    texts: list[str | None] = channel.everyone(None if error is None else f"{error}" or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise BackendError("NCCL", f"rank {rank} of {channel.size} cannot take part: {text}")
    return found


class Card(NamedTuple):
    """A GPU among those of all machines: two containers may have one host name, and one card two host names.

    CuPy ends a UUID at its first zero byte; the place on the bus tells apart what is left of two.
    """

    uuid: str
    bus_id: str


def _found(local_rank: int) -> tuple[NCCL, DeviceStreams, Card]:
    """NCCL; this process' device, which becomes the thread's current one, with its streams; and which card it is."""
    xp = cupy_on(0)
    nccl, device = NCCL(), local_rank % device_count(xp)
    xp.cuda.Device(device).use()
    uuid = bytes(xp.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()
    return nccl, DeviceStreams(xp, device, cupy_kernels()), Card(uuid, xp.cuda.Device(device).pci_bus_id)


def check_cards(channel: Channel, card: Card, *, share: bool) -> None:
    """Raises ValueError on every process where two ranks have one card without share_devices."""
    of_ranks: Sequence[tuple[str, str, str]] = channel.everyone((*card, socket.gethostname()))
    cards = [Card(uuid, bus_id) for uuid, bus_id, _ in of_ranks]
    for each in dict.fromkeys(cards):
        ranks = [rank for rank, other in enumerate(cards) if other == each]
        if len(ranks) > 1 and not share:
            raise ValueError(f"{ranks_text(ranks)} of {channel.size} have one GPU, {each.bus_id} of "
                             f"{of_ranks[ranks[0]][2]}, and NCCL wants one for each rank; start no more processes on a "
                             f"machine than it has GPUs, or, {HOW_PROCESSES_SHARE}")
