"""Processes with a limit: one that takes longer is ended with all that it has started, and leaves nothing on the card.

All of them, of whatever group or session, inherit a variable of a name that no other process has, and are found by it
where the system shows the environments of processes, as Linux does. Elsewhere the first of them alone is ended. On
Linux a process also ends with the one that has started it, whatever ended that.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = Path("/proc")
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl
DYING_SECONDS = 30.0  # which a process that was killed may take inside the driver


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code, None where it was ended; what it said; and the seconds that it took."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(words: Sequence[str | Path], seconds: float, *, captured: bool = True, **variables: str) -> Ended:
    """Runs a command in the checkout, with these variables too. After so many seconds, and when this process is
    interrupted, all its processes are ended."""
    with Started(words, captured=captured, **variables) as started:
        return started.ended(seconds)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Started:
    """A command under way. What it prints goes to files, which no process left over can hold open for a reader."""

    def __init__(self, words: Sequence[str | Path], *, captured: bool = True, **variables: str) -> None:
        self.mark = f"ZEROSIM_STARTED_{secrets.token_hex(8)}"
        self.began = time.monotonic()
        # The checkout first; what is there already may be the place of CuPy.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed on exit
                       for _ in range(2 * captured)]
        stdout, stderr = self._files or (None, None)
        self.process = subprocess.Popen(
            list(map(str, words)), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True, preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", self.mark: "1",
                 **variables})

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what is left of it; nothing that it said can be read any more."""
        self._kill()
        for file in self._files:
            file.close()

    def ended(self, seconds: float) -> Ended:
        """The end of it, or of the time that it has."""
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(max(0.0, self.began + seconds - time.monotonic()))
        took = time.monotonic() - self.began
        self._kill()
        said = ["", ""]
        for place, file in enumerate(self._files):
            file.seek(0)
            said[place] = file.read()
        return Ended(code, *said, took)

    def _kill(self) -> None:
        until = time.monotonic() + DYING_SECONDS
        while (left := self.left()) and time.monotonic() < until:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        if not PROCESSES.is_dir():
            self.process.kill()
        self.process.wait(DYING_SECONDS)

    def left(self) -> list[int]:
        """The processes of it that are there, by number."""
        sign, found = f"{self.mark}=1".encode(), []
        for entry in PROCESSES.glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or gone meanwhile
                if sign in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found
