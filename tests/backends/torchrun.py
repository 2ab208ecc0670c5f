"""Worlds of processes that are started as torchrun starts them: by variables of the environment, without MPI."""

import secrets
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Listener
from typing import Any

from tests.backends.test_tcp_channel import free_port
from tests.backends.worlds import ROOT, Processes, launch, mpiexec, one_thread


class Torchrun(Processes):
    """Each rank a process with a GPU; notes go over TCP."""

    library = "NCCL"
    backend = "nccl"
    module = "tests.backends.worker"
    settings: dict[str, str] = {}  # noqa: RUF012
    processes: Sequence[Any] = ()

    def missing(self) -> str | None:
        return None

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=key)
        host, port = self._listener.address
        self.processes = self.begin([host, str(port), key.hex(), self.backend])
        self._job = self.processes[0]
        self._line = self._listener.accept()

    def begin(self, words: list[str], **more: str) -> list[Any]:
        """The processes of the job."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": str(self.ranks)}
        return [self._process((), words, **place, RANK=str(rank), LOCAL_RANK=str(rank), **more)
                for rank in range(self.ranks)]

    def _process(self, launcher: tuple[str, ...], words: list[str], **more: str) -> Any:
        before = ("-m", "mpi4py") if launcher else ()
        return subprocess.Popen([*launcher, sys.executable, *before, "-m", self.module, *words], cwd=ROOT, text=True,
                                stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                env={**one_thread(), **self.settings, **more})

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes = ()


class UnderMPI(Torchrun):
    """The same, started by mpiexec: notes go by MPI."""

    def missing(self) -> str | None:
        return Processes.missing(self)

    def begin(self, words: list[str], **more: str) -> list[Any]:
        """One launcher, which has the processes."""
        assert mpiexec()
        return [self._process(launch(self.ranks), words, **more)]
