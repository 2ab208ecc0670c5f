"""A cluster of N ranks in this process, each on a GPU of its own, between which NCCL carries what they send.

Legend: N ranks.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from zerosim.backends.cupy.cluster import CuPyDevice, cupy_kernels, cupy_on, device_count, gpu_of
from zerosim.backends.nccl.adapter import HOW_PROCESSES_SHARE, NCCL, DeviceStreams, devices_for
from zerosim.backends.nccl.transport import (
    Communicators,
    NCCLProcessTransport,
    NCCLTransport,
    ProcessCommunicators,
    together,
)
from zerosim.backends.processes.cluster import ProcessCluster
from zerosim.backends.processes.control import Channel
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.cluster import Cluster, Processor
from zerosim.ranks.errors import ranks_text


class Devices(Processor):
    """A GPU for each rank."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def kernels(self, count: int) -> list[NumpyKernels]:
        """Of each rank its own, since what they hold lies on its device."""
        return [cupy_kernels() for _ in range(count)]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """The caller's own device is current again afterwards."""
        current = self._cupy.cuda.Device()
        try:
            yield
        finally:
            current.use()


class NCCLCluster(Cluster):
    """N ranks on N GPUs of this machine; rank r's arrays are CuPy's, on its device, and ``rank.xp`` is CuPy.

    The project's own collectives give the bits that ``Cluster`` gives, since NCCL only moves what our kernels add;
    ``algorithm="native"`` asks NCCL for its own. Rank r has device r, or ``devices[r]``; ``share_devices`` lets several
    ranks have one, for tests, where NCCL is set to allow it. Communication runs on a stream of its own:
    ``Work.wait()`` lets the stream that computes wait for it, and not the program. ``run`` returns when all devices are
    done. Arrays on the host (flags, counts) are exchanged as without GPUs. Other options are those of ``Cluster``.
    """

    def __init__(self, ranks: int, *, devices: Sequence[int] | None = None, share_devices: bool = False,
                 capacity_nbytes: int | None = None, debug: bool = False, seed: int = 0, blas_threads: int = 1,
                 trace_rows: int | None = None) -> None:
        """Raises BackendError where CuPy, NCCL or a GPU is missing, and ValueError for fewer GPUs than ranks."""
        cupy = cupy_on(0)
        super().__init__(ranks, capacity_nbytes=capacity_nbytes, debug=debug, seed=seed, blas_threads=blas_threads,
                         trace_rows=trace_rows, processor=Devices(cupy))
        self.devices = devices_for(ranks, device_count(cupy), devices, share=share_devices)  # of each rank
        self._where = f" on devices {self.devices}"
        streams = {rank: DeviceStreams(cupy, device, cupy_kernels()) for rank, device in enumerate(self.devices)}
        self._transport = NCCLTransport(streams, Communicators(NCCL(), self.devices))

    def close(self) -> None:
        """Gives NCCL's memory back; the next run makes new communicators."""
        self._transport.destroy()


# -- A cluster of processes that have a GPU each, on one machine or on many ------------------------------------------
# Legend: N ranks.


class NCCLProcessCluster(ProcessCluster):
    """One rank in each process of a job, on the GPU ``device``, or ``local_rank`` modulo the GPUs that it sees.

    The project's own algorithms give the bits that ``Cluster`` gives; ``algorithm="native"`` asks NCCL for its own.
    ``channel`` carries control messages, and arrays on the host (flags, counts): MPI's, or a TCPChannel. The
    rank's device stays the thread's current one. ``share_devices`` lets several ranks have one card, for tests.
    """

    def __init__(self, channel: Channel, *, local_rank: int, device: int = -1, share_devices: bool = False,
                 **options: Any) -> None:
        """Raises BackendError on every process where one of them misses CuPy, NCCL or a GPU that takes it, and
        ValueError where two would share a card without share_devices."""
        nccl, streams, card, gpu = together(channel, lambda: _found(local_rank, device))
        check_cards(channel, card, share=share_devices)
        self.device = streams.device
        transport = NCCLProcessTransport(channel.index, streams, ProcessCommunicators(nccl, streams, channel))
        super().__init__(channel, transport, gpu, **options)


class Card(NamedTuple):
    """A GPU among those of all machines: two containers may have one host name, and one card two host names.

    CuPy ends a UUID at its first zero byte; the place on the bus tells apart what is left of two.
    """

    uuid: str
    bus_id: str


def _found(local_rank: int, device: int) -> tuple[NCCL, DeviceStreams, Card, CuPyDevice]:
    """NCCL; this process' device, which becomes the thread's current one, with its streams; and which card it is."""
    gpu, nccl = gpu_of(local_rank, device), NCCL()
    cuda = gpu.cupy.cuda
    cuda.Device(gpu.number).use()
    uuid = bytes(cuda.runtime.getDeviceProperties(gpu.number)["uuid"]).hex()
    card = Card(uuid, cuda.Device(gpu.number).pci_bus_id)
    return nccl, DeviceStreams(gpu.cupy, gpu.number, cupy_kernels()), card, gpu


def check_cards(channel: Channel, card: Card, *, share: bool) -> None:
    """Raises ValueError on every process where two ranks have one card without share_devices."""
    of_ranks: Sequence[tuple[str, str, str]] = channel.all_gather((*card, socket.gethostname()))
    cards = [Card(uuid, bus_id) for uuid, bus_id, _ in of_ranks]
    for each in dict.fromkeys(cards):
        ranks = [rank for rank, other in enumerate(cards) if other == each]
        if len(ranks) > 1 and not share:
            raise ValueError(f"{ranks_text(ranks)} of {channel.size} have one GPU, {each.bus_id} of "
                             f"{of_ranks[ranks[0]][2]}, and NCCL wants one for each rank; start no more processes on a "
                             f"machine than it has GPUs, or, {HOW_PROCESSES_SHARE}")
