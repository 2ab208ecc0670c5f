"""CUDA, by way of CuPy: devices, and the two streams of each rank, one that computes and one that communicates.

CuPy's current device belongs to the thread, and a device's current stream does too; each rank computes on the stream
that is current on its device, by default the legacy default stream.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from zerosim.numerics.arrays import to_host
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.explain import ranks_text

NAP_SECONDS = 50e-6
REST_SECONDS = 5.0  # what a device has after an abort to run what still stands on its streams
SUCCESS, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady (CUDA Runtime API, "Data types", cudaError)
HOW_TO_SHARE = ("to share cards pass share_devices=True, with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment (NCCL "
                "2.30 or newer; about 2 ranks)")
HOW_PROCESSES_SHARE = (f"{HOW_TO_SHARE}; or, with any NCCL, a different NCCL_HOSTID for each process, "
                       "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_NET=Socket and NCCL_SOCKET_IFNAME=lo")


def devices_for(ranks: int, count: int, devices: Sequence[int] | None, *, share: bool) -> list[int]:
    """The device of each rank: the first ``ranks`` of ``count``, or those asked for; with ``share``, in turn.

    Raises ValueError for a device that there is not, for not as many as ranks, and for one that two ranks would share.
    """
    if devices is None:
        if ranks > count and not share:
            raise ValueError(f"{ranks} ranks need {ranks} GPUs, and this machine has {count}; run {count} ranks, run "
                             f"them on one card with zs.CuPyCluster({ranks}), or, {HOW_TO_SHARE}")
        return [rank % count for rank in range(ranks)]
    chosen = list(devices)
    wrong = [device for device in chosen if not 0 <= device < count]
    if wrong or len(chosen) != ranks:
        found = f"there is no device {wrong[0]}" if wrong else f"{len(chosen)} are named"
        raise ValueError(f"devices={chosen} must name a device from 0 to {count - 1} for each of {ranks} ranks, but "
                         f"{found}")
    if not share and len(set(chosen)) < ranks:
        shared = next(device for device in chosen if chosen.count(device) > 1)
        both = ranks_text(rank for rank, device in enumerate(chosen) if device == shared)
        raise ValueError(f"devices={chosen} gives device {shared} to {both}, where NCCL wants a GPU for each rank; "
                         f"name {ranks} devices, or, {HOW_TO_SHARE}")
    return chosen


class Lane:
    """One rank's device: the stream that communicates, the kernels that add on it, and how the streams wait.

    The kernels are not the rank's own, since theirs is scratch memory that the stream that computes may be using.
    """

    def __init__(self, xp: Any, device: int, kernels: NumpyKernels) -> None:
        self._cuda, self._runtime, self.device, self.kernels = xp.cuda, xp.cuda.runtime, device, kernels
        self._device = xp.cuda.Device(device)
        with self._device:
            self.stream = xp.cuda.Stream(non_blocking=True)
            self._fetching = xp.cuda.Stream(non_blocking=True)

    @property
    def pointer(self) -> int:
        """The communication stream, as NCCL takes it."""
        pointer: int = self.stream.ptr
        return pointer

    def select(self) -> None:
        """Makes the device the thread's current one."""
        self._device.use()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Inside, what is asked of CuPy happens on the communication stream. Nobody may switch ranks inside."""
        self.select()
        with self.stream:
            yield

    def ready(self) -> Any:
        """An event after all that the rank has computed so far; the device is current."""
        return self._event(self._cuda.get_current_stream())

    def follow(self, event: Any) -> None:
        """What is communicated from here on waits for the event."""
        self.stream.wait_event(event)

    def finished(self) -> Any:
        """An event after all that the rank has communicated so far."""
        self.select()
        return self._event(self.stream)

    def catch_up(self, event: Any) -> None:
        """What the rank computes from here on waits for the event; the host does not. The device is current."""
        self._cuda.get_current_stream().wait_event(event)

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def fetch(self, x: Any) -> np.ndarray:
        """The elements on the host, of an array that is known to be done; waits for no other work of the device."""
        self.select()
        with self._fetching:
            return to_host(x)

    def idle(self) -> bool:
        """True when the device has done all that was asked of both streams; raises what went wrong there."""
        self.select()
        streams = self.stream, self._cuda.get_current_stream()
        return all(self._answered(self._runtime.streamQuery(stream.ptr)) for stream in streams)

    def reached(self, event: Any) -> bool:
        """True when the device has come to the event; raises what went wrong before."""
        return self._answered(self._runtime.eventQuery(event.ptr))

    def _answered(self, status: int) -> bool:
        """CuPy's own ``done`` calls every status but success not done: after an error one would ask it for ever."""
        if status not in (SUCCESS, NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == SUCCESS

    def rest(self) -> None:
        """After an abort: waits for what still stands on the streams, which may write to memory that is free by now.

        Gives up after some seconds, and where the device is broken.
        """
        deadline = time.monotonic() + REST_SECONDS
        with suppress(Exception):  # an error has brought us here, and that one is to be told
            while not self.idle() and time.monotonic() < deadline:
                time.sleep(NAP_SECONDS)

    def synchronize(self) -> None:
        """Waits until the lane is idle, so that Ctrl-C is heard meanwhile."""
        while not self.idle():
            time.sleep(NAP_SECONDS)
