"""Targets of the Makefile, in seconds: rows that take minutes, and need a checkout, git, make and what pip installs."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from . import Action, Row

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = ("PYTHONPATH", "PYTHONSAFEPATH")  # of the process that measures, not of what it measures


def demo(small: bool) -> Action:
    """A new clone; what is timed makes its environment, where pip's cache is as it is, and runs the worked example."""
    if small:
        return lambda: _make("help", CHECKOUT)
    clone = TemporaryDirectory()
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone.name], check=True)
    return lambda: _make("demo", Path(clone.name))


def tests(small: bool) -> Action:
    """The tests, in the checkout's environment, which is made before."""
    if not small:
        _make(".venv/.stamp-dev", CHECKOUT)
    return lambda: _make("help" if small else "test", CHECKOUT)


def cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended, and of theirs."""
    import resource  # which Windows does not have

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _make(target: str, checkout: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    subprocess.run(["make", target], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)


BY_NAME = "{}; takes minutes, run only where it is named"
ROWS = (
    Row("make-demo", "make demo in a new clone", BY_NAME.format("seconds"), 12.0, demo, None),
    Row("make-test", "make test", BY_NAME.format("seconds"), 100.0, tests, None),
    Row("make-test-cpu", "make test, by all its processes", BY_NAME.format("CPU seconds"), 180.0, tests, None,
        clock=cpu_seconds),
)
