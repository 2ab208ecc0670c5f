"""A cluster of N ranks in this process, each on a GPU of its own, between which NCCL carries what they send.

Legend: N ranks.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from zerosim.backends import PATIENCE_SECONDS
from zerosim.backends.cupy.cluster import cupy_on, device_count
from zerosim.backends.nccl.adapter import HOW_PROCESSES_SHARE, ID_NBYTES, NCCL, Communicator, Lane, devices_for
from zerosim.backends.nccl.collectives import (
    Communicators,
    Native,
    NCCLCarriage,
    arrays_on_device,
    on_lane,
    party_of,
    receive,
    send,
)
from zerosim.backends.processes.notes import Mail
from zerosim.backends.processes.transport import Course, ProcessCluster, ProcessTransport
from zerosim.numerics.arrays import words
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import CollectiveEntry, Entry, ExchangeEntry, Group
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.collectives import NATIVE
from zerosim.ranks.errors import BackendError, Interrupts, forget_frames
from zerosim.ranks.hub import InProcess, Watch, ranks_text


class NCCLCluster(Cluster):
    """N ranks on N GPUs of this machine; rank r's arrays are CuPy's, on its device, and ``rank.xp`` is CuPy.

    The project's own algorithms give the bits that ``Cluster`` gives, since NCCL only moves what our kernels add;
    ``algorithm="native"`` asks NCCL for its own. Rank r has device r, or ``devices[r]``; ``share_devices`` lets several
    ranks have one, for tests, where NCCL has been told to allow it. Communication runs on a stream of its own:
    ``Work.wait()`` lets the stream that computes wait for it, and not the program. ``run`` returns when all devices are
    done. Arrays on the host (flags, counts) are exchanged as without GPUs. Other options are those of ``Cluster``.
    """

    def __init__(self, ranks: int, *, devices: Sequence[int] | None = None, share_devices: bool = False,
                 capacity_nbytes: int | None = None, debug: bool = False, seed: int = 0, blas_threads: int = 1) -> None:
        """Raises BackendError where CuPy, NCCL or a GPU is missing, and ValueError for fewer GPUs than ranks."""
        self._cupy = cupy_on(0)
        super().__init__(ranks, capacity_nbytes=capacity_nbytes, debug=debug, seed=seed, blas_threads=blas_threads)
        chosen = devices_for(ranks, device_count(self._cupy), devices, share=share_devices)
        self._lanes = [Lane(self._cupy, device, self._new_kernels()) for device in chosen]
        self._communicators = Communicators(NCCL(), chosen)

    @property
    def devices(self) -> list[int]:
        """The device of each rank."""
        return list(self._communicators.devices)

    @property
    def world(self) -> str:
        """Where the ranks are, in words."""
        return "each on a GPU of this machine, over NCCL"

    def _new_kernels(self) -> NumpyKernels:
        from zerosim.backends.cupy.kernels import CupyKernels

        return CupyKernels()

    def _kernels_of(self, rank: int) -> NumpyKernels:
        """Of each rank its own, since what they hold lies on its device."""
        return self._new_kernels()

    def _carriage(self, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> NCCLCarriage:
        host = InProcess(self.kernels, hop_by_hop=hop_by_hop, watch=watch, interrupts=interrupts)
        return NCCLCarriage(self._lanes, self._communicators, host, watch=watch, interrupts=interrupts)

    @contextmanager
    def _device(self) -> Iterator[None]:
        """The caller's own device is current again afterwards."""
        current = self._cupy.cuda.Device()
        try:
            yield
        finally:
            current.use()

    def __repr__(self) -> str:
        return f"<NCCLCluster of {len(self.ranks)} ranks on devices {self.devices}, {len(self.runs)} runs>"


# -- One process per GPU: this rank's part in each call, put on its communication stream as soon as it is issued -----
# Hops, additions and all follow one another on that stream, so a call is done for the host when it is asked for, and what
# reads the result waits on the device. Ranks must therefore issue their calls in one order: where two ranks of one group
# issue the calls of two groups in different orders, NCCL waits for ever. The debug mode finds out who disagrees.


HEARSAY_SECONDS = 5.0
Finish = Callable[[], None]


class OnDevice:
    """An entry whose arrays lie on the device: done for the host, under way there."""

    def __init__(self, lane: Lane, abort: Finish) -> None:
        self._lane, self._abort, self._finished = lane, abort, lane.finished()

    def advance(self) -> bool:
        """Nothing is left for the host to do."""
        return False

    def wait(self) -> None:
        """The stream that computes waits; the host does not."""
        self._lane.select()
        self._lane.catch_up(self._finished)

    def drop(self) -> None:
        """Aborts NCCL: a call on a stream cannot be taken back."""
        self._abort()


class OnHost:
    """An entry whose arrays lie on the host, carried by copies on the device: done when what arrived is copied back."""

    def __init__(self, lane: Lane, abort: Finish, finish: Finish) -> None:
        self._lane, self._abort, self._finished = lane, abort, lane.finished()
        self._finish: Finish | None = finish

    def advance(self) -> bool:
        """Looks whether the device is done, and if so copies what has arrived."""
        if self._finish is None or not self._lane.reached(self._finished):
            return False
        self._finish()
        self._finish = None
        return True

    def wait(self) -> None:
        """What arrived is in memory."""

    def drop(self) -> None:
        """Aborts NCCL: a call on a stream cannot be taken back."""
        self._abort()


class Broken:
    """An entry that NCCL refused, perhaps because another rank has failed: then the mail soon says so. If not, NCCL's
    error is this rank's own."""

    def __init__(self, error: Exception, abort: Finish) -> None:
        # Its frames know the entry's arrays and, by way of the transport's, this object: the ledger would keep those.
        self._error, self._abort = forget_frames(error), abort
        self._deadline = time.monotonic() + HEARSAY_SECONDS

    def advance(self) -> bool:
        """Raises NCCL's error when nobody has been heard to have failed for some time."""
        if time.monotonic() > self._deadline:
            raise self._error
        return False

    def wait(self) -> None:
        """Never called: the entry is never done."""

    def drop(self) -> None:
        """Aborts NCCL."""
        self._abort()


class NCCLCarrier:
    """Makes the calls of this process' rank: one communicator for each group of ranks, one stream for all of them.

    ``gone`` is called once when the communicators have been aborted.
    """

    library = "NCCL"
    in_order = True  # there is one stream

    def __init__(self, nccl: NCCL, lane: Lane, world: Communicator, index: int, ranks: int, gone: Finish) -> None:
        self._nccl, self._lane, self._index, self._gone = nccl, lane, index, gone
        self._world: Group = tuple(range(ranks)), ()
        self._comms: dict[Group, Communicator] = {self._world: world}

    def begin(self, entry: Entry) -> Course:
        """Puts all that the entry asks for on the stream."""
        lane, on_device = self._lane, arrays_on_device(entry)
        lane.select()
        lane.follow(lane.ready())
        try:
            finish = self._carried(entry, on_device)
        except self._nccl.error as error:
            error.add_note(f"raised by NCCL when it was asked for {entry.describe()}")
            return Broken(error, self._abort)
        if on_device:
            finish()
            return OnDevice(lane, self._abort)
        return OnHost(lane, self._abort, finish)

    def _carried(self, entry: Entry, on_device: bool) -> Finish:
        """Makes the calls; what is returned ends the entry, when the device is done where arrays are on the host."""
        if isinstance(entry, ExchangeEntry):
            return self._exchange(entry, on_device)
        if entry.call.operation == "barrier":
            return self._barrier(entry)
        return self._collective(entry, on_device)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, entry: CollectiveEntry, on_device: bool) -> Finish:
        staged = entry if on_device else replace(
            entry, x=self._uploaded(entry.x), out=self._like(entry.out), in_place=False,
            buffers=[self._like(buffer) for buffer in entry.buffers])
        sent = (self._native if entry.call.algorithm == NATIVE else self._hops)(staged)

        def finish() -> None:
            if staged is not entry:
                entry.out[...] = self._lane.fetch(staged.out)
            entry.finish(sent)

        return finish

    def _hops(self, entry: CollectiveEntry) -> int:
        lane, comm, sent = self._lane, self._comms[entry.call.key], 0
        for hop in on_lane(lane, party_of(entry, lane), entry.x, entry.out):
            with self._nccl.group():
                if hop.to is not None:
                    send(comm, lane, hop.send, hop.to)
                if hop.source is not None:
                    receive(comm, lane, hop.out, hop.source)
            sent += 0 if hop.send is None else hop.send.nbytes
        return sent

    def _native(self, entry: CollectiveEntry) -> int:
        lane, native = self._lane, Native(entry)
        with lane.communicating():
            native.prepare(lane.kernels.serving(entry.x).cast_pack)
        with self._nccl.group():
            native.enqueue(self._comms[entry.call.key], lane.pointer)
        return native.sent_nbytes

    def _barrier(self, entry: CollectiveEntry) -> Finish:
        """Empty messages are none to NCCL, so one number is added up; all that was communicated before is done then."""
        token = self._uploaded(np.zeros(1, np.int32))
        with self._nccl.group():
            self._comms[entry.call.key].all_reduce(token, token, "sum", self._lane.pointer)

        def finish() -> None:
            assert token.size  # held until the device has no more use for it
            entry.finish(0)

        return finish

    # -- messages -------------------------------------------------------------------------------------------------

    def _exchange(self, entry: ExchangeEntry, on_device: bool) -> Finish:
        sent, out = entry.send, entry.out
        if not on_device:
            sent, out = (None if sent is None else self._uploaded(sent)), (None if out is None else self._like(out))
        group, comm, lane = entry.key[0], self._comms[entry.key], self._lane
        with self._nccl.group():
            if entry.to is not None:
                send(comm, lane, sent, group.index(entry.to))
            if entry.source is not None:
                receive(comm, lane, out, group.index(entry.source))

        def finish() -> None:
            if entry.out is not None and out is not entry.out:
                entry.out[...] = lane.fetch(out)
            entry.to_send = entry.to_receive = False
            if entry.send is not None:
                entry.count(entry.send.nbytes)

        return finish

    # -- copies on the device of what lies on the host ------------------------------------------------------------

    def _uploaded(self, x: np.ndarray) -> Any:
        with self._lane.communicating():
            return self._lane.kernels.xp.asarray(words(x)).view(x.dtype)

    def _like(self, x: np.ndarray) -> Any:
        with self._lane.communicating():
            return self._lane.kernels.empty(x.shape, x.dtype)

    # -- groups and ends ------------------------------------------------------------------------------------------

    def join(self, parent: Group, key: Group) -> None:
        """A communicator for the group. Its id comes from its first member, over the parent's communicator: so ranks
        that join no group need not take part, as they would have to in NCCL's own split."""
        members, lane = key[0], self._lane
        first = self._index == members[0]
        on_device = self._uploaded(np.frombuffer(self._nccl.unique_id() if first else bytes(ID_NBYTES), np.uint8))
        with self._nccl.group():
            if first:
                for rank in members[1:]:
                    send(self._comms[parent], lane, on_device, parent[0].index(rank))
            else:
                receive(self._comms[parent], lane, on_device, parent[0].index(members[0]))
        lane.synchronize()
        unique_id = lane.fetch(on_device).tobytes()
        self._comms[key] = self._nccl.communicator(len(members), unique_id, members.index(self._index))

    def _abort(self) -> None:
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            with suppress(Exception):  # an error has brought us here, and that one is to be told
                comm.abort()
        if comms:
            self._lane.rest()
            self._gone()

    def drain(self) -> bool:
        """Aborts all communicators: nothing of this rank is under way any more."""
        self._abort()
        return True

    def settle(self) -> None:
        """All is aborted here; where it is not yet, nobody waits for this rank."""

    def idle(self) -> bool:
        """True when the device is; raises what has gone wrong there, or on the way to another rank."""
        for comm in self._comms.values():
            comm.check()
        return self._lane.idle()

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
    ``mail`` carries notes between the processes: MPI's, or a TCPMail. The rank's device stays the thread's current one.
    Arrays on the host travel by way of the device. ``share_devices`` lets several ranks have one card, for tests.
    """

    def __init__(self, mail: Mail, *, local_rank: int, share_devices: bool = False, capacity_nbytes: int | None = None,
                 debug: bool = False, blas_threads: int = 1, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Raises BackendError on every process where one of them misses CuPy, NCCL or a GPU that takes it, and
        ValueError where two would share a card and were not told to."""
        self._nccl, self._lane, card = together(mail, lambda: _found(local_rank))
        self.device = self._lane.device
        _check_cards(mail, card, share=share_devices)
        super().__init__(mail, capacity_nbytes=capacity_nbytes, debug=debug, blas_threads=blas_threads,
                         patience_seconds=patience_seconds)
        self._communicator: Communicator | None = None
        self._connected()

    @property
    def world(self) -> str:
        """Where the ranks are, in words."""
        return "each a process with a GPU, over NCCL"

    def close(self) -> None:
        """Gives NCCL's memory back."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
        super().close()

    def _new_kernels(self) -> NumpyKernels:
        return _kernels()

    def _connected(self) -> Communicator:
        """The communicator of all; made anew by all processes together after a run that failed."""
        if self._communicator is None:
            unique_id = self._mail.everyone(self._nccl.unique_id() if self.index == 0 else None)[0]
            self._lane.select()
            self._communicator = self._nccl.communicator(self._mail.size, unique_id, self.index)
        return self._communicator

    def _aborted(self) -> None:
        self._communicator = None

    def _carrier(self) -> NCCLCarrier:
        return NCCLCarrier(self._nccl, self._lane, self._connected(), self.index, self._mail.size, self._aborted)

    def _driver(self, *, hop_by_hop: bool, watch: Watch | None, interrupts: Interrupts) -> ProcessTransport:
        self._lane.select()
        return super()._driver(hop_by_hop=hop_by_hop, watch=watch, interrupts=interrupts)


def together(mail: Mail, find: Callable[[], T]) -> T:
    """What ``find()`` gives in this process; every process calls it.

    Raises in all of them what it raised in one: there its own error, elsewhere BackendError with its rank and text.
    """
    error: Exception | None = None
    try:
        found = find()
    except Exception as raised:  # whatever it is, the others wait to hear of it
        error = raised
    texts: list[str | None] = mail.everyone(None if error is None else f"{error}" or type(error).__name__)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise BackendError("NCCL", f"rank {rank} of {mail.size} cannot take part: {text}")
    return found


def _kernels() -> NumpyKernels:
    from zerosim.backends.cupy.kernels import CupyKernels

    return CupyKernels()


def _found(local_rank: int) -> tuple[NCCL, Lane, str]:
    """NCCL; this process' device, which becomes the thread's current one, with its streams; and which card it is."""
    xp = cupy_on(0)
    nccl, device = NCCL(), local_rank % device_count(xp)
    xp.cuda.Device(device).use()
    return nccl, Lane(xp, device, _kernels()), xp.cuda.Device(device).pci_bus_id


def _check_cards(mail: Mail, bus_id: str, *, share: bool) -> None:
    """Raises ValueError on every process where two ranks have one card and were not told to share it."""
    cards: Sequence[tuple[str, str]] = mail.everyone((socket.gethostname(), bus_id))
    for host, card in dict.fromkeys(cards):
        ranks = [rank for rank, other in enumerate(cards) if other == (host, card)]
        if len(ranks) > 1 and not share:
            raise ValueError(f"{ranks_text(ranks)} of {mail.size} have one GPU, {card} of {host}, and NCCL wants one "
                             "for each rank; start no more processes on a machine than it has GPUs, or, "
                             f"{HOW_PROCESSES_SHARE}")
