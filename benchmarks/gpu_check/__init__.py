"""The first hour on a machine with NVIDIA GPUs: everything that only such a machine can show, part by part.

``zerosim gpu-check`` runs it. Each part is a process that has a limited time, prints each of its checks when that ends,
and keeps it in a JSON file of its own; a part that takes longer is ended with all its processes. What cannot be checked
here is left out with its reason. The last part has the programs that fail, since they can leave a card in disorder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_check.processes import run
from benchmarks.gpu_check.report import (
    BUDGET_SECONDS,
    DIED,
    INTERRUPTED,
    OUT_OF_TIME,
    PARTS,
    UNDER_WAY,
    Part,
    Writer,
    all_is_well,
    look,
    parts_in,
    write,
)


def main(only: Sequence[str], budget_seconds: float, folder: Path) -> int:
    """Runs parts, one after the other, and returns the exit code: 0 where all that is in the folder is well."""
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise ValueError(f"--only names {', '.join(map(repr, unknown))}, and the parts are {', '.join(PARTS)}; name "
                         "one or more of these, with commas between")
    if not 0 < budget_seconds <= BUDGET_SECONDS:
        raise ValueError(f"a budget of {budget_seconds:g} seconds was asked for; a part takes more than 0 and at most "
                         f"{BUDGET_SECONDS:g}")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in PARTS if name in only or not only]
    for number, name in enumerate(chosen, 1):
        print(f"== {name} ({number} of {len(chosen)}), at most {budget_seconds:g} s", flush=True)
        file = folder / f"{name}.json"
        part = run_part(name, file, budget_seconds)
        said = f": {part.reason}" if part.reason else f", {part.counts()}, {part.seconds:.0f} s"
        print(f"   {name} {part.status}{said}; {file}", flush=True)
    well = all_is_well(parts_in(folder))
    print("everything is as it should be" if well else "NOT everything is as it should be, or nothing was checked")
    return 0 if well else 1


def run_part(name: str, file: Path, budget_seconds: float) -> Part:
    """The part as its process has left it: one that did not come to its end has what it had checked by then."""
    write(file, Part(name))  # an error here, where that cannot be
    try:
        ended = run([sys.executable, "-m", "benchmarks.gpu_check", name, file], budget_seconds, captured=False)
    except KeyboardInterrupt:
        left(file, INTERRUPTED, "interrupted")
        raise
    if ended.code is None:
        return left(file, OUT_OF_TIME, f"took longer than {budget_seconds:g} seconds, and was ended")
    return left(file, DIED, f"its process ended with exit code {ended.code}")


def left(file: Path, status: str, why: str) -> Part:
    """The part; one that is still under way gets this status, and the reason names the check that it was in."""
    part = Part.read(file)
    if part.status == UNDER_WAY:
        part = replace(part, status=status, reason=why + f" in {part.now!r}" * bool(part.now))
        write(file, part)
    return part


def carry_out(name: str, file: Path) -> None:
    """Runs a part in this process; where there is no card all of it is left out."""
    machine = look()
    report = Writer(file, name, machine)
    if machine.cards:
        getattr(import_module(f"benchmarks.gpu_check.{PARTS[name]}"), f"check_{name}")(report, machine)
    report.end("" if machine.cards else machine.missing)
