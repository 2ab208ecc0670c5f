"""The project's own tests on the card, run by pytest in processes of their own, each run with a limit.

Plugins that are installed beside pytest are left out, and warnings are no errors: on a machine that nobody prepared,
both would fail what is right.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_check.processes import run
from benchmarks.gpu_check.report import BUDGET_SECONDS, Machine, Writer, Wrong

KERNELS = ("tests/backends/test_kernels.py", "tests/backends/test_cupy.py")
CONFORMANCE = ("tests/backends/test_one_suite.py", "tests/backends/test_native.py")
FAILURES = ("tests/backends/test_failures.py",)
EXCUSES = r"needs \d+ GPUs, and this machine has \d+|mpi4py|mpiexec"  # all else that is skipped should have run
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "-o", "filterwarnings=default",
          "-m", "gpu")
TEST_SECONDS = 120.0    # after which processes of a job are taken to hang
FAILURE_SECONDS = 45.0  # likewise, in tests of what fails


def check_kernels(report: Writer, machine: Machine) -> None:
    """What is installed, and the suite's tests of kernels and of training, bit by bit."""
    from zerosim.doctor import examine

    report.check("zerosim doctor", lambda: examine().as_json(), remark=usable)
    for file in KERNELS:
        report.check(file, partial(pytest, [file], 0.8 * BUDGET_SECONDS), missing(), remark=remark)


def usable(found: dict[str, Any]) -> str:
    """Wrong where a backend cannot be used; MPI need not be here."""
    lacking = [row for row in found["backends"] if not row["usable"] and row["name"] != "MPI"]
    if lacking:
        raise Wrong("; ".join(f"{row['name']}: {row['reason']}" for row in lacking))
    return ""


def check_mpi(report: Writer, machine: Machine) -> None:
    """The conformance suite: ranks of one process, and processes whose arrays travel over MPI by way of the host."""
    check_worlds(report, lambda world: world.library != "NCCL", CONFORMANCE, BUDGET_SECONDS / 3)


def check_failures(report: Writer, machine: Machine) -> None:
    """Programs that fail, in every world of one card: each says so on all ranks, and the world works afterwards."""
    check_worlds(report, lambda world: world.cards == 1, FAILURES, BUDGET_SECONDS / 3, FAILURE_SECONDS)


def check_worlds(report: Writer, wanted: Callable[[Any], bool], files: Sequence[str], seconds: float,
                 test_seconds: float = TEST_SECONDS) -> None:
    """A check for each world of GPUs that is wanted: all tests of the files on it."""
    from tests.backends.worlds import GPUS

    for world in filter(wanted, GPUS):
        report.check(world.name, partial(pytest, files, seconds, test_seconds, ZEROSIM_TEST_WORLD=world.name),
                     missing() or world.missing(), remark=remark)


def missing() -> str:
    """The modules that the tests need and that cannot be imported here, and what brings them."""
    lacking = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    return f"{', '.join(lacking)} not installed in {sys.executable}: pip install 'zerosim[test]'" if lacking else ""


def pytest(files: Sequence[str], seconds: float, test_seconds: float = TEST_SECONDS, **variables: str
           ) -> dict[str, Any]:
    """The end of a run of tests: its exit code, the line with which pytest ends, what it skipped, and what failed."""
    done = run([*PYTEST, *files], seconds, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", COLUMNS="10000",
               ZEROSIM_TEST_SECONDS=str(test_seconds), **variables)
    said = done.stdout.strip()
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", said, re.MULTILINE)
    return {"exit_code": done.code, "seconds": round(done.seconds, 1), "said": said.split("\n")[-1],
            "skipped": re.findall(r"^SKIPPED.*$", said, re.MULTILINE), "failures": failures,
            "end": (said + done.stderr)[-6000:] if done.code != 0 else ""}


def remark(found: dict[str, Any]) -> str:
    """The line with which pytest ends; Wrong where tests failed, or were skipped for a card or a library that is
    here."""
    if found["exit_code"] is None:
        raise Wrong(f"was ended after {found['seconds']:g} seconds; {found['end'][-400:]}")
    if found["exit_code"]:
        said = f"pytest ended with exit code {found['exit_code']}: {found['said']}"
        raise Wrong("; ".join([said, *found["failures"][:5]]))
    unexcused = [line for line in found["skipped"] if not re.search(EXCUSES, line)]
    if unexcused:
        raise Wrong(f"skipped, though there is a GPU: {'; '.join(unexcused)}")
    return str(found["said"]).strip("= ")
