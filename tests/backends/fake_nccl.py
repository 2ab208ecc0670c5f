"""A double of ``cupy.cuda.nccl`` that moves the data and writes every call down; it is never a GPU, nor NCCL.

It is strict where NCCL hangs or corrupts: every send needs its receive, with the same count and type, and every rank of
a communicator the same collective. Arrays must lie on the communicator's device. Its own collectives add in rank order,
rounding after each addition, which NCCL does not promise. When a group closes, first all that its calls send leaves,
then all that they receive is taken: inside this process at once, or over sockets of this machine.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from tests.backends import compiled_kernels
from tests.backends.fake_cuda import Cuda, merge

# Of CuPy 14.2.0's compiled module with NCCL 2.32.3, as its docstrings have them (2026-11-21), less the C types.
CALLS = {
    "send": "sendbuf count datatype peer stream", "recv": "recvbuf count datatype peer stream",
    "allReduce": "sendbuf recvbuf count datatype op stream", "allGather": "sendbuf recvbuf count datatype stream",
    "reduceScatter": "sendbuf recvbuf recvcount datatype op stream",
    "reduce": "sendbuf recvbuf count datatype op root stream",
    "broadcast": "sendbuff recvbuff count datatype root stream"}
OTHERS = {"check_async_error": "", "abort": "", "destroy": "", "initAll": "devices"}
MEANINGS = {"sendbuf": "x", "sendbuff": "x", "recvbuf": "out", "recvbuff": "out", "recvcount": "count",
            "datatype": "kind"}
CONSTANTS = {"NCCL_INT8": 0, "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_UINT32": 3, "NCCL_INT64": 4, "NCCL_UINT64": 5,
             "NCCL_FLOAT16": 6, "NCCL_FLOAT32": 7, "NCCL_FLOAT64": 8, "NCCL_BFLOAT16": 9, "NCCL_SUM": 0, "NCCL_MAX": 2,
             "NCCL_MIN": 3}
DTYPES = dict(enumerate(map(np.dtype, (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16,
                                       np.float32, np.float64, ml_dtypes.bfloat16))))
COMBINE = {0: np.add, 2: np.maximum, 3: np.minimum}


class NcclError(RuntimeError):
    """What NCCL refuses."""


class Group(threading.local):
    """The group that is open in a thread, each of which has its own: how deep, and its calls."""

    def __init__(self) -> None:
        self.depth, self.pending = 0, []


class World:
    """Communicators, and groups. ``log``: one list of calls for each group closed."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.group = cuda, Group()
        self.log, self.alive = [], []

    def close(self) -> None:
        """Carries out what the group holds."""
        calls, self.group.pending = self.group.pending, []
        if calls:
            self.log.append([(name, comm.rank, comm.devices, *_shown(what)) for comm, name, what in calls])
        for comm, name, what in calls:
            comm.leave(name, what)
        for comm, name, what in calls:
            comm.take(name, what)
        for comm, _, _ in calls:
            assert not any(comm.clique.mail.values()), "a send without its receive: NCCL would hang"


def _shown(what: dict[str, Any]) -> list[Any]:
    """(count, type, stream, then peer, root or operation) of a call, without addresses."""
    rest = [what[key] for key in ("peer", "root", "op") if key in what]
    return [what["count"], DTYPES[what["kind"]].name, what["stream"], *rest]


class Clique:
    """The ranks of one communicator, all in this process, and what is on its way between them."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices, self.size = devices, len(devices)
        self.mail: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def send(self, source: int, to: int, message: Any) -> None:
        self.mail[source, to].append(message)

    def take(self, source: int, to: int) -> Any:
        assert self.mail[source, to], f"rank {to} waits for rank {source}, which sends nothing: NCCL would hang"
        return self.mail[source, to].popleft()

    def close(self, *, at_once: bool) -> None:
        """There is nothing to give back."""


class LinkedClique(Clique):
    """The ranks of one communicator, of which one is here. A unique id names a folder; each rank listens there, calls
    those before it, and those after it call. A thread sends, so that what NCCL does at once does not wait for itself
    here."""

    def __init__(self, size: int, unique_id: bytes, index: int) -> None:
        super().__init__(tuple(range(size)))
        folder = Path(unique_id.rstrip(b"\0").decode())
        self.lines: dict[int, Connection] = {}
        with Listener(str(folder / str(index)), "AF_UNIX", backlog=size) as listener:
            for other in range(index):
                self.lines[other] = self._connected(str(folder / str(other)))
                self.lines[other].send(index)
            while len(self.lines) < size - 1:
                line = listener.accept()
                self.lines[line.recv()] = line
        with suppress(OSError):  # not empty until every rank has met all others
            folder.rmdir()
        self.leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sender = threading.Thread(target=self._send, daemon=True)
        self.sender.start()

    def _connected(self, address: str) -> Connection:
        deadline = time.monotonic() + 600
        while True:
            try:
                return Client(address, "AF_UNIX")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # until the other side has come

    def send(self, source: int, to: int, message: Any) -> None:
        *said, _ = message  # the streams of another process are no business of this one's
        super().send(source, to, message) if to == source else self.leaving.put((to, (*said, {})))

    def _send(self) -> None:
        for to, message in iter(self.leaving.get, None):
            try:
                self.lines[to].send(message)
            except OSError:
                return

    def take(self, source: int, to: int) -> Any:
        try:
            return super().take(source, to) if to == source else self.lines[source].recv()
        except (EOFError, OSError) as error:
            raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: remote process exited: {error!r}") from error

    def close(self, *, at_once: bool) -> None:
        """Wakes whoever waits for a message, too: closing alone would leave a thread waiting."""
        self.leaving.put(None)
        if not at_once:
            self.sender.join()
        for line in self.lines.values():
            with socket.socket(fileno=os.dup(line.fileno())) as wire, suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)


def unique_id() -> bytes:
    """128 bytes: a folder's name."""
    return tempfile.mkdtemp(prefix=f"zs{secrets.token_hex(3)}").encode().ljust(128, b"\0")


class Communicator:
    """NcclCommunicator(ndev, commId, rank), on the current device."""

    world: World

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert len(commId) == 128
        self._join(LinkedClique(ndev, commId, rank), rank, self.world.cuda.selected)

    def _join(self, clique: Clique, rank: int, device: int) -> None:
        self.clique, self.rank, self.device, self.state = clique, rank, device, "alive"
        self.devices = clique.devices
        self.world.alive.append(self)

    @classmethod
    def initAll(cls, devices: list[int]) -> list[Communicator]:
        assert isinstance(devices, list)
        if len(set(devices)) < len(devices):
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage: duplicate GPU")
        clique, made = Clique(tuple(devices)), [cls.__new__(cls) for _ in devices]
        for rank, comm in enumerate(made):
            comm._join(clique, rank, devices[rank])
        return made

    def check_async_error(self) -> None: ...

    def abort(self) -> None:
        others = [comm for comm in self.world.alive if comm is not self and comm.state == "alive"]
        assert self.world.group.depth or not others, (
            "an abort outside a group: it would wait until the kernels of other communicators end")
        self.state = "aborted"
        self.clique.close(at_once=True)

    def destroy(self) -> None:
        self.state = "destroyed"
        self.clique.close(at_once=False)

    def call(self, name: str, **what: Any) -> None:
        """One call, made when the group is closed."""
        if self.state != "alive":
            raise NcclError(f"the communicator was {self.state}")
        assert self.world.group.depth, f"{name} outside a group: with several ranks in one thread it waits for ever"
        self.world.group.pending.append((self, name, what))

    def leave(self, name: str, what: dict[str, Any]) -> None:
        """Sends this rank's elements to those who wait for them, and what its stream knows to have happened."""
        stream, count = self._stream(what), what["count"] * (self.clique.size if name == "reduceScatter" else 1)
        data = None
        if name != "recv" and (name != "broadcast" or self.rank == what["root"]):
            self._use(what["x"], count * DTYPES[what["kind"]].itemsize, stream, writes=False)
            data = compiled_kernels.at(what["x"], DTYPES[what["kind"]], count).copy()
        stream.tick()
        for to in {"send": [what.get("peer")], "recv": []}.get(name, range(self.clique.size)):
            self.clique.send(self.rank, to, (_agreed(name, what), data, dict(stream.clock)))

    def take(self, name: str, what: dict[str, Any]) -> None:
        """Writes this rank's result, of what the others have sent."""
        stream, inputs = self._stream(what), []
        for source in {"send": [], "recv": [what.get("peer")]}.get(name, range(self.clique.size)):
            try:
                said, data, past = self.clique.take(source, self.rank)
            except NcclError:
                self.state = "broken by a remote process"  # as NCCL: every later call is an error too
                raise
            assert said == _agreed(name, what), f"ranks of one communicator disagree: {said}, {_agreed(name, what)}"
            merge(stream.clock, past)
            inputs += [] if data is None else [data]
        if name == "send" or (name == "reduce" and self.rank != what["root"]):
            return
        if "op" in what:
            total = inputs[0]
            for x in inputs[1:]:
                total = COMBINE[what["op"]](total, x).astype(total.dtype)
        else:
            total = np.concatenate(inputs)
        if name == "reduceScatter":
            total = total[self.rank * what["count"]:(self.rank + 1) * what["count"]]
        self._use(what["out"], total.nbytes, stream, writes=True)
        compiled_kernels.at(what["out"], total.dtype, len(total))[:] = total

    def _stream(self, what: dict[str, Any]) -> Any:
        stream = next(s for s in self.world.cuda.streams if s.ptr == what["stream"])
        assert stream.device_id == self.device, "the stream is another device's than the communicator"
        return stream

    def _use(self, address: int, nbytes: int, stream: Any, *, writes: bool) -> None:
        if nbytes:
            self.world.cuda.use(address, address + nbytes, stream, writes=writes)


def _agreed(name: str, what: dict[str, Any]) -> tuple[Any, ...]:
    """What all who take part in a call must mean."""
    kind = "message" if name in ("send", "recv") else name
    return kind, *(what.get(key) for key in ("count", "kind", "op", "root"))


def _call(name: str, parameters: list[str]) -> Any:
    """The method of that name: its arguments by what they mean."""
    def call(self: Communicator, *values: int) -> None:
        assert all(isinstance(value, int) for value in values), "CuPy takes integers"
        self.call(name, **dict(zip([MEANINGS.get(one, one) for one in parameters], values, strict=True)))

    return call


for name, parameters in CALLS.items():
    setattr(Communicator, name, _call(name, parameters.split()))


def fake_module(world: World) -> ModuleType:
    """A module in the place of cupy.cuda.nccl."""
    module = ModuleType("cupy.cuda.nccl")

    def start() -> None:
        world.group.depth += 1

    def end() -> None:
        world.group.depth -= 1
        if not world.group.depth:
            world.close()

    vars(module).update(CONSTANTS)
    vars(module).update(available=True, get_version=lambda: 23203, get_unique_id=unique_id, NcclError=NcclError,
                        NcclCommunicator=type("NcclCommunicator", (Communicator,), {"world": world}), groupStart=start,
                        groupEnd=end)
    return module
