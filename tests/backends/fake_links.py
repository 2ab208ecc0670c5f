"""Communicators of the double of NCCL between processes: messages go over sockets of this machine. Never a GPU.

A unique id names a folder; each rank listens there, and whoever talks to it first connects. A group sends from a thread
of its own while it receives, so that what NCCL does at once does not wait for itself here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from tests.backends.fake_nccl import DTYPES, Clique, Communicator, NcclError


def unique_id() -> bytes:
    """128 bytes: a folder's name."""
    return tempfile.mkdtemp(prefix=f"zs{secrets.token_hex(3)}").encode().ljust(128, b"\0")


class LinkedClique(Clique):
    """The ranks of one communicator, of which one is here: it calls those before it, and those after it call."""

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

    def _connected(self, address: str) -> Connection:
        deadline = time.monotonic() + 600
        while True:
            try:
                return Client(address, "AF_UNIX")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # until the other side has come

    def close(self) -> None:
        """Wakes a thread that waits for a message: closing alone would leave it waiting."""
        for line in self.lines.values():
            if not line.closed:
                with socket.socket(fileno=os.dup(line.fileno())) as wire, contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)


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
                    data = np.frombuffer(self.clique.lines[what["peer"]].recv_bytes(), DTYPES[what["kind"]])
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
                self.clique.lines[peer].send_bytes(data)
            except OSError:
                return

    def _collective(self, name: str, what: dict[str, Any], own_messages: list[bytes]) -> None:
        mine = own_messages.pop(0)
        parts = [self.clique.lines[rank].recv_bytes() if rank != self.rank else mine
                 for rank in range(self.clique.size)]
        self.world.deliver(self, name, what, [np.frombuffer(part, DTYPES[what["kind"]]) for part in parts])

    def abort(self) -> None:
        super().abort()
        self.clique.close()

    def destroy(self) -> None:
        super().destroy()
        self.clique.close()
