"""A cluster of processes that have a GPU each, on one machine or on many.

Legend: N ranks.
"""

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.errors import BackendError
from zerosim.ranks.explain import ranks_text
from zerosim.ranks.gpu import cupy_on, device_count
from zerosim.ranks.interrupts import Interrupts
from zerosim.ranks.lockstep import Watch
from zerosim.ranks.nccl.adapter import NCCL, Communicator
from zerosim.ranks.nccl.carrier import NCCLCarrier
from zerosim.ranks.nccl.devices import HOW_PROCESSES_SHARE, Lane
from zerosim.ranks.processes.cluster import PATIENCE_SECONDS, ProcessCluster
from zerosim.ranks.processes.mail import Mail
from zerosim.ranks.processes.transport import ProcessTransport

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
    from zerosim.numerics.cupy_kernels import CupyKernels

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
