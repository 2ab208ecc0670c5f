"""A double of ``cupy.cuda.nccl`` that moves the data and writes every call down; it is never a GPU, nor NCCL.

It is strict where NCCL hangs or corrupts: in a group every send needs its receive, with the same count and type, and
every rank of a communicator the same collective. Arrays must lie on the communicator's device. Its own collectives add
in rank order, rounding after each addition, which NCCL does not promise.
"""

from __future__ import annotations

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
Call = tuple[Any, ...]


class NcclError(RuntimeError):
    """What NCCL refuses."""


class World:
    """Communicators, and the calls of the group that is open. ``log``: one list of calls for each group closed."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.depth, self.pending, self.log, self.alive = 0, [], [], []

    def call(self, comm: Communicator, name: str, **what: Any) -> None:
        """One call, made at once or when the group is closed."""
        if comm.state != "alive":
            raise NcclError(f"the communicator was {comm.state}")
        self.pending.append((comm, name, what))
        if not self.depth:
            raise AssertionError(f"{name} outside a group: with several ranks in one thread it waits for ever")

    def close(self) -> None:
        """Carries out what the group holds."""
        calls, self.pending = self.pending, []
        if not calls:
            return
        self.log.append([(name, comm.rank, comm.devices, *_shown(what)) for comm, name, what in calls])
        if hasattr(calls[0][0], "carry_out"):  # between processes: the calls of this one
            calls[0][0].carry_out([(name, what) for _, name, what in calls])
            return
        self._messages(calls)
        by_place: dict[tuple[Any, int], list[list[Any]]] = {}
        for comm, name, what in calls:
            if name not in ("send", "recv"):
                mine = by_place.setdefault((comm.clique, comm.rank), [])
                mine.append([comm, name, what])
        for clique in dict.fromkeys(clique for clique, _ in by_place):
            rows = [by_place.get((clique, rank), []) for rank in range(clique.size)]
            assert len({len(row) for row in rows}) == 1, "a rank of the communicator is missing from the collective"
            for together in zip(*rows, strict=True):
                self._collective([comm for comm, _, _ in together], [what for _, _, what in together],
                                 {name for _, name, _ in together})

    def _messages(self, calls: list[tuple[Communicator, str, dict[str, Any]]]) -> None:
        sends: dict[Any, list[Any]] = {}
        for comm, name, what in calls:
            if name == "send":
                sends.setdefault((comm.clique, comm.rank, what["peer"]), []).append((comm, what))
        for comm, name, what in calls:
            if name == "recv":
                waiting = sends.get((comm.clique, what["peer"], comm.rank))
                assert waiting, f"rank {comm.rank} receives from {what['peer']}, which sends nothing: NCCL would hang"
                sender, sent = waiting.pop(0)
                assert (sent["count"], sent["kind"]) == (what["count"], what["kind"]), "a send and its receive differ"
                data = self._read(sender, sent["x"], sent["count"], sent["kind"], sent["stream"]).copy()
                self._join([sender, comm], [sent, what])
                self._write(comm, what["out"], data, what["stream"])
        assert not any(sends.values()), "a send without its receive: NCCL would hang"

    def _collective(self, comms: list[Communicator], whats: list[dict[str, Any]], names: set[str]) -> None:
        assert len(names) == 1, f"ranks of one communicator called {sorted(names)}: NCCL would hang"
        first = whats[0]
        for key in ("count", "kind", "op", "root"):
            assert len({what.get(key) for what in whats}) == 1, f"{names}: ranks disagree on {key}"
        (name,), count, kind, ranks = names, first["count"], first["kind"], len(comms)
        own = count * (ranks if name == "reduceScatter" else 1)
        readers = [first["root"]] if name == "broadcast" else range(ranks)
        inputs = [self._read(comms[i], whats[i]["x"], own, kind, whats[i]["stream"]).copy() for i in readers]
        self._join(comms, whats)
        for comm, what in zip(comms, whats, strict=True):
            self.deliver(comm, name, what, inputs)

    def deliver(self, comm: Communicator, name: str, what: dict[str, Any], inputs: list[np.ndarray]) -> None:
        """Writes one rank's result of a collective, of what all ranks have brought."""
        if name in ("allReduce", "reduce", "reduceScatter"):
            total = inputs[0].copy()
            for x in inputs[1:]:
                total = COMBINE[what["op"]](total, x).astype(total.dtype)
        else:
            total = np.concatenate(inputs)
        if name == "reduceScatter":
            total = total[comm.rank * what["count"]:(comm.rank + 1) * what["count"]]
        if name != "reduce" or comm.rank == what["root"]:
            self._write(comm, what["out"], total, what["stream"])

    def _stream(self, comm: Communicator, pointer: int) -> Any:
        stream = next(s for s in self.cuda.streams if s.ptr == pointer)
        assert stream.device_id == comm.device, "the stream is another device's than the communicator"
        return stream

    def _read(self, comm: Communicator, address: int, count: int, kind: int, stream: int) -> np.ndarray:
        if count:
            self.cuda.use(address, self._stream(comm, stream), writes=False)
        return compiled_kernels.at(address, DTYPES[kind], count)

    def _write(self, comm: Communicator, address: int, data: np.ndarray, stream: int) -> None:
        if len(data):
            self.cuda.use(address, self._stream(comm, stream), writes=True)
            compiled_kernels.at(address, data.dtype, len(data))[:] = data

    def _join(self, comms: list[Communicator], whats: list[dict[str, Any]]) -> None:
        """What has met knows of each other's past."""
        streams = [self._stream(comm, what["stream"]) for comm, what in zip(comms, whats, strict=True)]
        for stream in streams:
            stream.tick()
        for stream in streams:
            for other in streams:
                merge(stream.clock, other.clock)


def _shown(what: dict[str, Any]) -> list[Any]:
    """(count, type, stream, then peer, root or operation) of a call, without addresses."""
    rest = [what[key] for key in ("peer", "root", "op") if key in what]
    return [what["count"], DTYPES[what["kind"]].name, what["stream"], *rest]


class Clique:
    """The ranks that have one communicator together."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.devices, self.size = devices, len(devices)


class Communicator:
    """NcclCommunicator."""

    world: World

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        raise NotImplementedError("between processes the double is fake_links.LinkedCommunicator")

    @classmethod
    def initAll(cls, devices: list[int]) -> list[Communicator]:
        assert isinstance(devices, list)
        if len(set(devices)) < len(devices):
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage: duplicate GPU")
        clique, made = Clique(tuple(devices)), []
        for rank in range(len(devices)):
            comm = cls.__new__(cls)
            comm.clique, comm.rank, comm.device, comm.state = clique, rank, devices[rank], "alive"
            comm.devices = clique.devices
            made.append(comm)
        cls.world.alive += made
        return made

    def check_async_error(self) -> None: ...

    def abort(self) -> None:
        self.state = "aborted"

    def destroy(self) -> None:
        self.state = "destroyed"


def _call(name: str, parameters: list[str]) -> Any:
    """The method of that name: its arguments by what they mean."""
    def call(self: Communicator, *values: int) -> None:
        assert all(isinstance(value, int) for value in values), "CuPy takes integers"
        self.world.call(self, name, **dict(zip([MEANINGS.get(one, one) for one in parameters], values, strict=True)))

    return call


for name, parameters in CALLS.items():
    setattr(Communicator, name, _call(name, parameters.split()))


def fake_module(world: World, kind: type[Communicator] = Communicator, unique_id: Any = lambda: bytes(128)
                ) -> ModuleType:
    """A module in the place of cupy.cuda.nccl."""
    module = ModuleType("cupy.cuda.nccl")
    communicator = type("NcclCommunicator", (kind,), {"world": world})

    def start() -> None:
        world.depth += 1

    def end() -> None:
        world.depth -= 1
        if not world.depth:
            world.close()

    vars(module).update(CONSTANTS)
    vars(module).update(available=True, get_version=lambda: 23203, get_unique_id=unique_id,
                        NcclCommunicator=communicator, NcclError=NcclError, groupStart=start, groupEnd=end)
    return module
