"""NCCL, by way of CuPy: the one file that knows ``cupy.cuda.nccl``, so that another binding can take its place.

Signatures are those of CuPy 14.2 with NCCL 2.32 (asked of the library itself, without a GPU, on 2026-11-21).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from zerosim.numerics.arrays import start
from zerosim.ranks.errors import BackendError
from zerosim.ranks.interrupts import guarded

# In these NCCL adds; every other type is moved as bytes, and cannot be added (CuPy has no names for NCCL's fp8 types).
TYPES = {"int8": "NCCL_INT8", "uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "uint32": "NCCL_UINT32",
         "int64": "NCCL_INT64", "uint64": "NCCL_UINT64", "float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16",
         "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}
BYTES = "NCCL_UINT8"
OPS = {"sum": "NCCL_SUM", "mean": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}  # a mean is divided by the rank
ID_NBYTES = 128  # of a communicator's unique id
HOW_TO_INSTALL = "pip install nvidia-nccl-cu12 (for CuPy's cupy-cuda12x; nvidia-nccl-cu13 for cupy-cuda13x)"


@guarded
class Communicator:
    """One rank's place in one group. Arrays are contiguous and on the rank's device; a stream is its raw pointer."""

    def __init__(self, nccl: Any, inner: Any) -> None:
        self._nccl, self._inner = nccl, inner

    def send(self, x: Any, peer: int, stream: int) -> None:
        """Sends x to the group's rank ``peer``."""
        count, kind = self._moved(x)
        self._inner.send(start(x), count, kind, peer, stream)

    def recv(self, out: Any, peer: int, stream: int) -> None:
        """Receives out from the group's rank ``peer``."""
        count, kind = self._moved(out)
        self._inner.recv(start(out), count, kind, peer, stream)

    def broadcast(self, x: Any, out: Any, root: int, stream: int) -> None:
        """out = the root's x; elsewhere x is not looked at."""
        count, kind = self._moved(out)
        self._inner.broadcast(start(x), start(out), count, kind, root, stream)

    def all_gather(self, x: Any, out: Any, stream: int) -> None:
        """out (N·n,) = the x (n,) of all ranks, in order."""
        count, kind = self._moved(x)
        self._inner.allGather(start(x), start(out), count, kind, stream)

    def all_reduce(self, x: Any, out: Any, op: str, stream: int) -> None:
        """out (n,) = the sum, maximum or minimum of the x (n,) of all ranks."""
        self._inner.allReduce(start(x), start(out), x.size, self._added(x), self._op(op), stream)

    def reduce_scatter(self, x: Any, out: Any, op: str, stream: int) -> None:
        """out (n,) = this rank's chunk of the same of x (N·n,)."""
        self._inner.reduceScatter(start(x), start(out), out.size, self._added(x), self._op(op), stream)

    def reduce(self, x: Any, out: Any, op: str, root: int, stream: int) -> None:
        """out (n,) = the same at the root; elsewhere out is None."""
        into = 0 if out is None else start(out)
        self._inner.reduce(start(x), into, x.size, self._added(x), self._op(op), root, stream)

    def _moved(self, x: Any) -> tuple[int, int]:
        """(count, type) under which NCCL moves an array bit for bit."""
        name = TYPES.get(x.dtype.name)
        return (x.nbytes, getattr(self._nccl, BYTES)) if name is None else (x.size, getattr(self._nccl, name))

    def _added(self, x: Any) -> int:
        kind: int = getattr(self._nccl, TYPES[x.dtype.name])
        return kind

    def _op(self, op: str) -> int:
        number: int = getattr(self._nccl, OPS[op])
        return number

    def check(self) -> None:
        """Raises NCCL's error where something has gone wrong since it was asked to do it."""
        self._inner.check_async_error()

    def abort(self) -> None:
        """Ends at once, whatever is under way; other ranks must be told by other means."""
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
        """What the ranks of a new communicator must all be given."""
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
def adds(dtype: np.dtype[Any]) -> bool:
    """True for the types in which NCCL adds."""
    return dtype.name in TYPES


@guarded
def version_text(number: int) -> str:
    """``2.32.3`` for 23203: a digit or two for each part since NCCL 2.9, one for the minor one before.

    >>> version_text(23203), version_text(2708)
    ('2.32.3', '2.7.8')
    """
    scale = 10000 if number >= 10000 else 1000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"
