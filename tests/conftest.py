"""Settings of all tests. The number of hypothesis' examples: HYPOTHESIS_PROFILE=quick (the default) or long."""

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.display.browser import started

if sys.dont_write_bytecode:  # then each process that a test starts would compile NumPy, Matplotlib and us anew
    sys.pycache_prefix = str(Path(__file__).parent.parent / ".pytest_cache" / "compiled")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# At Python's own thresholds garbage is sought in all figures and traces again and again;
# there is little, and the end of each module collects it.
gc.set_threshold(50_000, 20, 100)

# No deadlines, no too_slow: the machines that run this share their cores; speed is the benchmarks' matter.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# Where nobody is there to look at a new counterexample, the examples are the same each time.
settings.register_profile("quick", COMMON, max_examples=25, derandomize="CI" in os.environ)
settings.register_profile("long", COMMON, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--peers``, as `make peers` has it: every test that is chosen must run."""
    parser.addoption("--peers", action="store_true", help="what is skipped, for want of a peer too, has failed")


def not_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """With --peers: a skip is a failure, whose text is its reason."""
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"--peers: nothing may be skipped, found {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The report of one phase of a test."""
    report = yield
    if item.config.getoption("--peers"):
        not_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The report of a module that is imported; one that skips itself need not be among those that are chosen."""
    report = yield
    if collector.config.getoption("--peers") and "peer" in str(report.longrepr):
        not_skipped(report)
    return report


# One of pytest-xdist's workers runs all tests of a row: they share jobs of processes; a browser; what figures and
# lessons measure.
TOGETHER = [("tests/backends/",), ("tests/display/", "tests/documentation/test_slides"),
            ("tests/course/figures/", "tests/course/test_precision", "tests/notebooks/")]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes whole files, and what is together as if it were one file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((row[0] for row in TOGETHER if nodeid.startswith(row)), super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses ids with an address, which differ from one of pytest-xdist's workers to the next: see cases.named."""
    if odd := [item.nodeid for item in items if re.search(" at 0x[0-9a-f]{6}", item.nodeid)]:
        raise pytest.UsageError(f"ids of tests must be the same in every process; give {odd[0]} ids=named")


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """A process that was begun in the background of a shell ignores Ctrl-C; tests of Ctrl-C do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def earlier_modules_are_not_walked_through() -> Iterator[None]:
    """Clears once what one module's tests leave behind, and no later collection of garbage visits it again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def browser_is_closed() -> Iterator[None]:
    """Ends the browser of the tests of pages, where one has been started."""
    yield
    if started.cache_info().currsize:
        started().close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the sums of what tests have counted with ``record_property(name, number)``."""
    counted = Counter[str]()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            if isinstance(value, int):
                counted[name] += value
    for name, number in counted.items():
        terminalreporter.write_line(f"{name}: {number:,}")
