"""The project's own tests on the card, run by pytest in processes of their own, each run with a limit.

Plugins that are installed beside pytest are left out, and warnings are no errors: on a machine that nobody prepared,
both would fail what is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from benchmarks.gpu_check.processes import run
from benchmarks.gpu_check.report import Writer, module_is_missing, python

KERNELS = ("tests/backends/test_kernels.py", "tests/backends/test_cupy.py")
CONFORMANCE = ("tests/backends/test_one_suite.py", "tests/backends/test_native.py")
FAILURES = ("tests/backends/test_failures.py",)
EXCUSES = r"needs \d+ GPUs, and this machine has \d+|mpi4py|mpiexec"  # all else that is skipped should have run
OPTIONS = ("-q", "-rfEs", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-m", "gpu")
COLLECT_SECONDS = 120.0
TEST_SECONDS = 120.0    # after which processes of a job are taken to hang
FAILURE_SECONDS = 45.0  # likewise, in tests of what fails


def missing() -> str:
    """What the tests need and is not here."""
    return module_is_missing("pytest", "hypothesis")


def pytest(words: Sequence[str], seconds: float, test_seconds: float = TEST_SECONDS) -> dict[str, Any]:
    """The end of a run of tests: its exit code, the line with which pytest ends, what it skipped, and what failed."""
    done = run(python("-m", "pytest", *OPTIONS, *words), seconds, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", COLUMNS="10000",
               ZEROSIM_TEST_SECONDS=str(test_seconds))
    said = done.stdout.strip()
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", said, re.MULTILINE)
    return {"exit_code": done.code, "seconds": round(done.seconds, 1), "said": said.split("\n")[-1],
            "skipped": re.findall(r"^SKIPPED.*$", said, re.MULTILINE), "failures": failures,
            "end": (said + done.stderr)[-6000:] if done.code != 0 else ""}


def judged(found: dict[str, Any]) -> str:
    """The faults of a run: failures, or tests skipped for a card or a library that is here."""
    if found["exit_code"] is None:
        return f"was ended after {found['seconds']:g} seconds; {found['end'][-400:]}"
    if found["exit_code"]:
        return "; ".join([f"pytest ended with exit code {found['exit_code']}: {found['said']}", *found["failures"][:5]])
    unexcused = [line for line in found["skipped"] if not re.search(EXCUSES, line)]
    return f"skipped, though there is a GPU: {'; '.join(unexcused)}" if unexcused else ""


def remark(found: dict[str, Any]) -> str:
    """The line with which pytest ends."""
    return str(found["said"]).strip("= ")


def collected(files: Sequence[str]) -> list[str]:
    """The tests for GPUs in these files, by pytest's names of them. Raises RuntimeError where it finds none."""
    done = run(python("-m", "pytest", "--collect-only", *OPTIONS, *files), COLLECT_SECONDS,
               PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if done.code != 0 or not found:
        raise RuntimeError(f"pytest finds no tests in {', '.join(files)}: {(done.stdout + done.stderr)[-2000:]}")
    return found


def of_world(tests: Sequence[str], name: str) -> list[str]:
    """Those of one world: its name is a parameter of theirs."""
    return [test for test in tests if re.search(rf"[\[-]{re.escape(name)}[\]-]", test)]


def worlds(report: Writer, wanted: Callable[[Any], bool], files: Sequence[str], seconds: float,
           test_seconds: float = TEST_SECONDS) -> None:
    """A check for each world of GPUs that is wanted: all tests of the files on it."""
    from tests.backends.worlds import GPUS

    tests = cache(partial(collected, files))
    for world in filter(wanted, GPUS):
        report.check(world.name, lambda name=world.name: pytest(of_world(tests(), name), seconds, test_seconds),
                     missing() or world.missing(), judge=judged, remark=remark)
