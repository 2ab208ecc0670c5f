"""NCCL, by way of CuPy: the one file that knows ``cupy.cuda.nccl``, so that another binding can take its place.

Signatures are those of CuPy 14.2 with NCCL 2.32 (asked of the library itself, without a GPU, on 2026-11-21).
"""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from zerosim.backends import DRAIN_SECONDS
from zerosim.backends.cupy.host import event_after
from zerosim.numerics.arrays import start
from zerosim.numerics.kernels import NumpyKernels
from zerosim.ranks.call import PendingCall, chunk_lengths
from zerosim.ranks.errors import BackendError, ranks_text
from zerosim.ranks.hub import POLL_SECONDS
from zerosim.ranks.process import guarded

# In these NCCL adds; every other type is moved as bytes, and cannot be added (CuPy has no names for NCCL's fp8 types).
TYPES = {"int8": "NCCL_INT8", "uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "uint32": "NCCL_UINT32",
         "int64": "NCCL_INT64", "uint64": "NCCL_UINT64", "float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16",
         "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}
BYTES = "NCCL_UINT8"
OPS = {"sum": "NCCL_SUM", "mean": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}  # a mean is divided by the rank
HOW_TO_INSTALL = "pip install nvidia-nccl-cu12 (for CuPy's cupy-cuda12x; nvidia-nccl-cu13 for cupy-cuda13x)"


@guarded
class Communicator:
    """One rank's place in one group; its calls are made inside `NCCL.group`. Arrays are contiguous and on the rank's
    device; a stream is its raw pointer."""

    def __init__(self, nccl: Any, inner: Any) -> None:
        self._nccl, self._inner = nccl, inner

    def send(self, x: Any, peer: int, stream: int) -> None:
        """Sends x to the group's rank ``peer``."""
        self._inner.send(start(x), *self._moved(x), peer, stream)

    def recv(self, out: Any, peer: int, stream: int) -> None:
        """Receives out from the group's rank ``peer``."""
        self._inner.recv(start(out), *self._moved(out), peer, stream)

    def native(self, me: PendingCall, stream: int) -> None:
        """NCCL's own collective: one rank's calls, inside a group with those of the other ranks that are here.

        Equal chunks have a call of NCCL's own. Uneven ones become a reduce or a broadcast for each that is not empty.
        """
        call, x, out, nccl, to = me.call, me.x, me.out, self._inner, start(me.out)
        chunks = [(owner, me.bounds(owner), owner == me.index) for owner in range(me.size) if me.length(owner)]
        even = len(set(chunk_lengths(call.cut).tolist())) == 1
        kind, op = self._moved(x)[1], getattr(self._nccl, OPS[call.op])
        match call.operation if call.length else "nothing":
            case "reduce_scatter" if even:
                nccl.reduceScatter(start(x), to, out.size, kind, op, stream)
            case "reduce_scatter":
                for owner, here, mine in chunks:
                    nccl.reduce(start(x[here]), to if mine else 0, x[here].size, kind, op, owner, stream)
            case "all_gather" if even:
                nccl.allGather(start(x), to, *self._moved(x), stream)
            case "all_gather":
                for owner, here, mine in chunks:
                    chunk = out[here]
                    nccl.broadcast(start(x if mine else chunk), start(chunk), *self._moved(chunk), owner, stream)
            case "all_reduce":
                nccl.allReduce(start(x), to, x.size, kind, op, stream)
            case "broadcast":
                nccl.broadcast(start(x), to, *self._moved(out), call.root, stream)
            case "reduce":
                nccl.reduce(start(x), to if call.root == me.index else 0, x.size, kind, op, call.root, stream)

    def _moved(self, x: Any) -> tuple[int, int]:
        """(count, type) under which NCCL moves an array bit for bit."""
        name = TYPES.get(x.dtype.name)
        return (x.nbytes, getattr(self._nccl, BYTES)) if name is None else (x.size, getattr(self._nccl, name))

    def check(self) -> None:
        """Raises NCCL's error where something has gone wrong since it was asked to do it."""
        self._inner.check_async_error()

    def abort(self) -> None:
        """Ends at once, whatever is under way; other ranks must hear of it by other means."""
        self._inner.abort()

    def destroy(self) -> None:
        """Gives the communicator's memory back, when all is done."""
        self._inner.destroy()


@guarded
class NCCL:
    """The library, if it can be had. Raises BackendError where it cannot."""

    def __init__(self) -> None:
        self._nccl = load()
        self.version = version_text(self._nccl.get_version())
        self.error: type[Exception] = self._nccl.NcclError

    def unique_id(self) -> bytes:
        """The id that the ranks of a new communicator must all be given."""
        made: bytes = self._nccl.get_unique_id()
        return made

    def communicator(self, ranks: int, unique_id: bytes, index: int) -> Communicator:
        """The place ``index`` of ``ranks``, on the current device; returns when all ranks have asked for theirs."""
        return Communicator(self._nccl, self._nccl.NcclCommunicator(ranks, unique_id, index))

    def communicators(self, devices: list[int]) -> list[Communicator]:
        """All places of a group whose ranks are in this process, one on each of the devices."""
        return [Communicator(self._nccl, inner) for inner in self._nccl.NcclCommunicator.initAll(devices)]

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls made inside are one: none of them waits for another before all are made."""
        self._nccl.groupStart()
        try:
            yield
        except BaseException:
            with suppress(Exception):  # it tells of the same error; but a group left open would swallow later calls
                self._nccl.groupEnd()
            raise
        self._nccl.groupEnd()


@guarded
def load() -> Any:
    """The module ``cupy.cuda.nccl``, which has to be imported by name."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise BackendError("NCCL", f"NCCL is not to be had: {error}. Install it: {HOW_TO_INSTALL}") from error
    if not nccl.available:
        reasons = [line for warning in said for line in str(warning.message).splitlines() if "Reason:" in line]
        reason = reasons[0].partition("Reason:")[2].strip() if reasons else "CuPy was built without it"
        raise BackendError("NCCL", f"CuPy is installed, but NCCL is not to be had: {reason}. "
                                   f"Install it: {HOW_TO_INSTALL}")
    return nccl


@guarded
def version_text(number: int) -> str:
    """``2.32.3`` for 23203: a digit or two for each part since NCCL 2.9, one for the minor one before.

    >>> version_text(23203), version_text(2708)
    ('2.32.3', '2.7.8')
    """
    scale = 10000 if number >= 10000 else 1000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


# -- CUDA, by way of CuPy: devices, and the two streams of each rank, one that computes and one that communicates ----
# CuPy's current device belongs to the thread, and a device's current stream does too; each rank computes on the stream
# that is current on its device, by default the legacy default stream.


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


class DeviceStreams:
    """One rank's device: the stream that communicates, the kernels that add on it, and how the streams wait.

    The kernels are not the rank's own, since theirs is scratch memory that the stream that computes may be using.
    """

    def __init__(self, xp: Any, device: int, kernels: NumpyKernels) -> None:
        self._cuda, self._runtime, self.device, self.kernels = xp.cuda, xp.cuda.runtime, device, kernels
        self._device = xp.cuda.Device(device)
        with self._device:
            self.stream = xp.cuda.Stream(non_blocking=True)
        self.pointer: int = self.stream.ptr  # of the communication stream, as NCCL takes it

    def select(self) -> None:
        """Makes the device the thread's current one."""
        self._device.use()

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Puts what CuPy is asked for inside the ``with`` block on the communication stream. No other rank may run
        inside: its arithmetic would be put there too."""
        self.select()
        with self.stream:
            yield

    def ready(self) -> Any:
        """An event after all that the rank has computed so far; the device is current."""
        return event_after(self._cuda, self._cuda.get_current_stream())

    def follow(self, event: Any) -> None:
        """Lets all that is communicated from here on wait for the event."""
        self.stream.wait_event(event)

    def finished(self) -> Any:
        """An event after all that the rank has communicated so far."""
        self.select()
        return event_after(self._cuda, self.stream)

    def catch_up(self, event: Any) -> None:
        """Lets all that the rank computes from here on wait for the event; the host does not. The device is current."""
        self._cuda.get_current_stream().wait_event(event)

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
        with suppress(Exception):  # an error has brought us here, and that one is to be raised
            self.synchronize(DRAIN_SECONDS)

    def synchronize(self, seconds: float = math.inf) -> None:
        """Waits until both streams are idle, for so long at the most, so that Ctrl-C is heard meanwhile."""
        deadline = time.monotonic() + seconds
        while not self.idle() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
