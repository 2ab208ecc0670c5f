"""Communicators of the double of NCCL between processes: messages go over sockets of this machine. Never a GPU.

A unique id names a folder; each rank listens there, and whoever talks to it first connects. A group sends from a thread
of its own while it receives, so that what NCCL does at once does not wait for itself here.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from tests.backends.fake_nccl import COMBINE, DTYPES, Clique, Communicator, NcclError


def unique_id() -> bytes:
    """128 bytes: a folder's name."""
    return tempfile.mkdtemp(prefix=f"zs{secrets.token_hex(3)}").encode().ljust(128, b"\0")


class LinkedClique(Clique):
    """The ranks of one communicator, of which one is here."""

    def __init__(self, size: int, unique_id: bytes, index: int) -> None:
        super().__init__(tuple(range(size)))
        self.index, self.folder = index, Path(unique_id.rstrip(b"\0").decode())
        self.lines: dict[int, Connection] = {}
        self.comes = threading.Condition()
        self.listener = Listener(str(self.folder / str(index)), "AF_UNIX", backlog=size)
        threading.Thread(target=self._accept, daemon=True).start()
        for other in range(index):
            self._connect(other)
        for other in range(size):
            if other != index:
                self.line(other)

    def _accept(self) -> None:
        while True:
            try:
                line = self.listener.accept()
                with self.comes:
                    self.lines[line.recv()] = line
                    self.comes.notify_all()
            except (OSError, EOFError):
                return

    def _connect(self, other: int) -> None:
        deadline = time.monotonic() + 600
        while True:
            try:
                line = Client(str(self.folder / str(other)), "AF_UNIX")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        line.send(self.index)
        self.lines[other] = line

    def line(self, other: int) -> Connection:
        """The connection with another rank; waits for it."""
        with self.comes:
            if not self.comes.wait_for(lambda: other in self.lines, 600):
                raise NcclError(f"rank {other} did not come")
            return self.lines[other]

    def close(self) -> None:
        self.listener.close()
        for line in self.lines.values():
            line.close()


class LinkedCommunicator(Communicator):
    """NcclCommunicator(ndev, commId, rank), on the current device."""

    clique: LinkedClique

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert len(commId) == 128
        self.clique, self.rank, self.state = LinkedClique(ndev, commId, rank), rank, "alive"
        self.device, self.devices = self.world.cuda.selected, self.clique.devices
        self.world.alive.append(self)

    def carry_out(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        """This rank's calls of one group."""
        world = self.world
        outgoing: list[tuple[int, bytes]] = []
        for name, what in calls:
            if name == "send":
                data = world._read(self, what["x"], what["count"], what["kind"], what["stream"])
                outgoing.append((what["peer"], data.tobytes()))
            elif name != "recv":
                own = what["count"] * (self.clique.size if name == "reduceScatter" else 1)
                sends = name != "broadcast" or self.rank == what["root"]
                data = world._read(self, what["x"], own, what["kind"], what["stream"]).tobytes() if sends else b""
                outgoing += [(other, data) for other in range(self.clique.size)]
        own_messages = [data for peer, data in outgoing if peer == self.rank]
        sender = threading.Thread(target=self._send, args=([m for m in outgoing if m[0] != self.rank],))
        sender.start()
        try:
            for name, what in calls:
                if name == "recv":
                    data = np.frombuffer(self.clique.line(what["peer"]).recv_bytes(), DTYPES[what["kind"]])
                    assert len(data) == what["count"], "a send and its receive differ"
                    world._write(self, what["out"], data, what["stream"])
                elif name != "send":
                    self._collective(name, what, own_messages)
        except (EOFError, OSError) as error:
            self.state = "broken by a remote process"  # as NCCL: every later call is an error too
            raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: remote process exited: {error!r}") from error
        sender.join()

    def _send(self, messages: list[tuple[int, bytes]]) -> None:
        for peer, data in messages:
            try:
                self.clique.line(peer).send_bytes(data)
            except OSError:
                return

    def _collective(self, name: str, what: dict[str, Any], own_messages: list[bytes]) -> None:
        dtype, count, mine = DTYPES[what["kind"]], what["count"], own_messages.pop(0)
        parts = [np.frombuffer(mine if rank == self.rank else self.clique.line(rank).recv_bytes(), dtype)
                 for rank in range(self.clique.size)]
        if name in ("allReduce", "reduce", "reduceScatter"):
            total = parts[0].copy()
            for x in parts[1:]:
                total = COMBINE[what["op"]](total, x).astype(dtype)
        else:
            total = np.concatenate(parts)
        if name == "reduceScatter":
            total = total[self.rank * count:(self.rank + 1) * count]
        if name != "reduce" or self.rank == what["root"]:
            self.world._write(self, what["out"], total, what["stream"])

    def abort(self) -> None:
        super().abort()
        self.clique.close()

    def destroy(self) -> None:
        super().destroy()
        self.clique.close()
