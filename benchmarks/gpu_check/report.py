"""The report of gpu-check: checks, the parts that they belong to, the machine, and the page that is made of them.

A part's file is written when the part begins and after each of its checks, so that nothing is lost, whatever ends it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.processes import ROOT

# The parts in their order, and the module whose function ``check_NAME`` each of them is.
PARTS = {"kernels": "suite", "exhaustive": "exhaustive", "sanitizer": "sanitizer", "speed": "speed", "mpi": "suite",
         "nccl": "collectives", "training": "training", "cards": "collectives", "failures": "suite"}
BUDGET_SECONDS = 600.0  # of a part, at most
RAN, FAILED, LEFT_OUT = "ran", "failed", "left out"
UNDER_WAY, OUT_OF_TIME, INTERRUPTED, DIED = "under way", "out of time", "interrupted", "died"
LINE = 500  # characters of a reason that are printed


class Wrong(Exception):
    """The fault of what a check has found."""


@dataclass(frozen=True)
class Machine:
    """The devices here: versions and cards; ``missing`` says why there is no card, or no NCCL."""

    versions: dict[str, str]
    cards: list[str]
    missing: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that was to be checked: whether it ran, failed or was left out, why, and what was found."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    found: Any = None


@dataclass(frozen=True)
class Part:
    """The checks of one part that have ended, when and on what; ``now`` is the name of the one under way."""

    name: str
    status: str = UNDER_WAY
    reason: str = ""
    date: str = ""
    host: str = ""
    seconds: float = 0.0
    now: str = ""
    cards: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()

    @classmethod
    def read(cls, file: Path) -> Part:
        """The part of a file; ValueError for one that is no report."""
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls(**found | {"cards": tuple(found["cards"]), "checks": tuple(Check(**c) for c in found["checks"])})
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{file} is no report of gpu-check ({type(error).__name__}: {error}); remove it, or name "
                             "another folder with --out") from error

    def counts(self) -> str:
        """``7 ran, 1 failed``, and so on."""
        has = [check.status for check in self.checks]
        numbers = ((has.count(status), status) for status in (RAN, FAILED, LEFT_OUT))
        return ", ".join(f"{number} {status}" for number, status in numbers if number) or "no check ended"


def write(file: Path, data: Any) -> None:
    """The data as JSON, in place of what was there; a reader finds the old file or the new one, and no half."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1, ensure_ascii=False, default=asdict) + "\n", encoding="utf-8")
    new.replace(file)


class Writer:
    """A part under way: each check is printed and written when it ends."""

    def __init__(self, file: Path, name: str, machine: Machine) -> None:
        self.file, self._began = file, time.monotonic()
        self.part = Part(name, date=datetime.now(UTC).isoformat(timespec="seconds"), host=platform.node(),
                         cards=tuple(machine.cards), versions=machine.versions)
        write(file, self.part)

    def check(self, name: str, run: Callable[[], Any], missing: str | None = "", *,
              remark: Callable[[Any], str] = lambda found: "") -> None:
        """Runs a check unless something that it needs is missing. ``remark`` returns what is worth saying of what it
        found, and raises Wrong where that is not as it should be; a check that raises anything else has failed too."""
        self._keep(now=name)
        began, found, status = time.monotonic(), None, FAILED
        try:
            if missing:
                status, reason = LEFT_OUT, missing
            else:
                found = run()
                status, reason = RAN, remark(found)
        except Wrong as wrong:
            reason = str(wrong)
        except Exception as error:  # the other checks are to be tried nevertheless
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        check = Check(name, status, reason, round(time.monotonic() - began, 3), found)
        said = shortened(reason)
        print(f"  {status:>8}: {name}" + f" ({said})" * bool(said) + f", {check.seconds:.1f} s", flush=True)
        self._keep(checks=(*self.part.checks, check), now="")

    def end(self, missing: str = "") -> None:
        """The part's status is that of its checks; what it needs and is not here is the reason of one without any."""
        has = {check.status for check in self.part.checks}
        self._keep(status=next((status for status in (FAILED, RAN) if status in has), LEFT_OUT), reason=missing)

    def _keep(self, **changes: Any) -> None:
        self.part = replace(self.part, seconds=round(time.monotonic() - self._began, 1), **changes)
        write(self.file, self.part)


def shortened(text: str) -> str:
    """The text in one line, its end left out where that is long; the file has all of it."""
    return textwrap.shorten(text, LINE, placeholder=" ...")


# -- the machine ------------------------------------------------------------------------------------------------------

def look() -> Machine:
    """Looks for CuPy, a driver, cards and NCCL."""
    import numpy as np

    import zerosim as zs
    from zerosim.backends.cupy.cluster import cuda_text, cupy_on, device_count
    from zerosim.backends.nccl.adapter import NCCL

    versions = {"python": platform.python_version(), "zerosim": zs.__version__, "numpy": np.__version__,
                "commit": said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")}
    cards: list[str] = []
    try:
        xp = cupy_on(0)
        runtime = xp.cuda.runtime
        versions |= {"cupy": xp.__version__, "cuda_of_cupy": cuda_text(runtime.runtimeGetVersion()),
                     "cuda_of_driver": cuda_text(runtime.driverGetVersion()), "driver": nvidia_smi("driver_version")}
        cards += [runtime.getDeviceProperties(index)["name"].decode() for index in range(device_count(xp))]
        versions["nccl"] = NCCL().version
    except zs.BackendError as error:
        return Machine(versions, cards, str(error))
    return Machine(versions, cards)


def nvidia_smi(field: str) -> str:
    """What nvidia-smi says of the first card."""
    return said_by("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")


def said_by(*words: str) -> str:
    """The first line that a command prints."""
    try:
        said = subprocess.run(words, text=True, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"unknown: {words[0]} did not say"
    return said.split("\n")[0].strip()


# -- all parts --------------------------------------------------------------------------------------------------------

def parts_in(folder: Path) -> list[Part]:
    """The parts that were run, in the table's order."""
    return [Part.read(folder / f"{name}.json") for name in PARTS if (folder / f"{name}.json").exists()]


def all_is_well(parts: Iterable[Part]) -> bool:
    """True where every part came to its end without a failure, and one of them checked something on a card."""
    parts = list(parts)
    return all(part.status in (RAN, LEFT_OUT) for part in parts) and any(
        part.status == RAN and part.cards for part in parts)


def page(folder: Path) -> str:
    """The folder's parts as Markdown: where and when each ran, and each of its checks."""
    parts = [part for part in parts_in(folder) if part.cards]
    if not parts:
        return "Nothing has been run on a GPU yet.\n"
    lines = ["| part | checks | card | when | versions |", "|---|---|---|---|---|"]
    for part in parts:
        ended = "" if part.status in (RAN, FAILED, LEFT_OUT) else f"; {part.status}: {cell(part.reason)}"
        cards = ", ".join(card if count == 1 else f"{count} × {card}" for card, count in Counter(part.cards).items())
        versions = ", ".join(f"{name} {version}" for name, version in part.versions.items())
        lines.append(f"| {part.name} | {part.counts()}{ended} | {cards} | {part.date[:10]} | {versions} |")
    for part in parts:
        lines += ["", f"### {part.name}", "", "| check | | remark | seconds |", "|---|---|---|---|"]
        lines += [f"| {cell(check.name)} | {check.status} | {cell(check.reason)} | {check.seconds:.1f} |"
                  for check in part.checks]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """A text in a cell of a table."""
    return shortened(text).replace("|", "\\|")
