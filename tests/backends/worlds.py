"""The worlds on which the one suite runs: each runs a program on N ranks and says what came of it on every rank."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import zerosim as zs

ROOT = Path(__file__).parent.parent.parent
SECONDS = 600.0  # after which a world of processes is taken to hang, on a busy machine too


@dataclass(frozen=True)
class Task:
    """A program, as a function of an importable module, and the cluster's options."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One rank's: its result, bytes sent and peak; or the exception that it raised, with its notes, and bytes held."""

    result: Any
    sent_nbytes: int
    peak_nbytes: int
    error: BaseException | None
    notes: tuple[str, ...]
    held_nbytes: int


@dataclass(frozen=True)
class Command:
    """``zerosim ...``, typed on every rank; ``{rank}`` in a word is its number."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """What a command printed, on all ranks in their order, and the exit code of each."""

    codes: tuple[int, ...]
    stdout: str
    stderr: str

    @classmethod
    def of(cls, words: Sequence[str]) -> Said:
        """The command, typed in this process."""
        from typer.testing import CliRunner  # which most processes of the pool never need

        from zerosim import cli

        done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
        return cls((done.exit_code,), done.stdout, done.stderr)


def notes(error: BaseException) -> tuple[str, ...]:
    """What was added to an exception on its way."""
    return tuple(getattr(error, "__notes__", ()))


class World:
    """N ranks somewhere. ``library`` names whose own collectives ``native`` asks for; ``exact``: NumPy's arithmetic."""

    library: str | None = None
    exact = True
    explains_at_once = True  # what ranks disagree about is found before anything is sent

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks

    def missing(self) -> str | None:
        """Why this world cannot be had here; None where it can."""
        return None

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        """What came of it on every rank, in rank order."""
        raise NotImplementedError

    def run(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        """Like ``outcomes``, where nothing may go wrong."""
        found = self.outcomes(program, *args, **options)
        for outcome in found:
            if outcome.error is not None:
                raise outcome.error
        return found

    def close(self) -> None:
        """Ends the world."""


class Here(World):
    """All ranks in this process."""

    def __init__(self, name: str, ranks: int, cluster: Callable[..., zs.Cluster] = zs.Cluster, **options: Any) -> None:
        super().__init__(name, ranks)
        self.cluster, self.options = cluster, options

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        options.pop("timeout_seconds", None)
        cluster = self.cluster(self.ranks, **self.options, **options)
        try:
            results = cluster.run(program, *args)
        except Exception as error:
            return [Outcome(None, 0, 0, error, notes(error), held) for held in cluster.memory.now_nbytes]
        return [Outcome(result, sent, peak, None, (), 0) for result, sent, peak
                in zip(results, cluster.trace.sent_nbytes(), cluster.memory.peak_nbytes, strict=True)]


class Processes(World):
    """Each rank a process of its own, started once for all tests, and again after one that ended them."""

    explains_at_once = False
    library: str | None = "MPI"
    backend = "mpi"

    def __init__(self, name: str, ranks: int) -> None:
        super().__init__(name, ranks)
        self._listener: Listener | None = None
        self._job: subprocess.Popen[str] | None = None
        self._line: Any = None

    def missing(self) -> str | None:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed; pip install 'zerosim[mpi]'"
        return None if mpiexec() else "there is no mpiexec; pip install 'zerosim[mpi]'"

    def outcomes(self, program: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        found: list[Outcome] = self._asked(Task(program, args, options))
        return found

    def said(self, *words: str) -> Said:
        """The command line on processes that are there already."""
        found: list[Said] = self._asked(Command(words))
        return Said(tuple(one.codes[0] for one in found), "".join(one.stdout for one in found),
                    "".join(one.stderr for one in found))

    def _asked(self, what: Task | Command) -> Any:
        if self._line is None:
            self._start()
        self._line.send(what)
        if not self._line.poll(SECONDS):
            self.close()
            raise TimeoutError(f"{self.name} did not answer within {SECONDS:g} seconds")
        try:
            return self._line.recv()
        except EOFError:
            said = self._job.communicate()[1] if self._job is not None else ""
            self.close()
            raise RuntimeError(f"{self.name} ended in the midst of a test:\n{said}") from None

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        self._listener = Listener(("127.0.0.1", 0), authkey=key)
        host, port = self._listener.address
        self._job = subprocess.Popen(
            [*launch(self.ranks), sys.executable, "-m", "mpi4py", "-m", "tests.backends.worker", host, str(port),
             key.hex(), self.backend], cwd=ROOT, text=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env=one_thread())
        self._line = self._listener.accept()

    def close(self) -> None:
        for line in (self._line, self._listener):
            if line is not None:
                line.close()
        if self._job is not None:
            try:
                self._job.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                self._job.kill()
                self._job.communicate()
        self._line = self._listener = self._job = None


@cache
def mpiexec() -> str | None:
    """The launcher beside this interpreter, else on the PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")


@cache
def launch(ranks: int) -> tuple[str, ...]:
    """The launcher's words for N processes, more than there are cores."""
    launcher = mpiexec()
    assert launcher is not None
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    return (launcher, *(("--oversubscribe",) if "Open MPI" in said or "OpenRTE" in said else ()), "-n", str(ranks))


def one_thread() -> dict[str, str]:
    """This environment, with what a launcher of processes needs."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


# One pool of processes for each number of ranks, started when it is first asked, for all tests of the session.
MPI = {ranks: Processes(f"MPI, {ranks} processes", ranks) for ranks in (2, 3, 4)}
WORLDS: list[World] = [Here("in-process, 5 ranks in another order", 5, seed=7), *MPI.values()]
