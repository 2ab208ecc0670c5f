"""The pytest plugin of zerosim: ``pytest --zerosim-ranks 1,2,3,4`` runs a test once for each number of ranks.

pytest loads this file in every run of every project, wherever zerosim is installed. So it lies beside the package, as
hypothesis's does, and imports nothing of it, nor NumPy, before a test asks for a cluster; and all of its names begin
with zerosim. ``-p no:zerosim`` leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from zerosim import Cluster

RANKS = "zerosim_ranks"  # of the setting, the marker, and the argument of a test
USUAL = "1,2,3,4"
HELP = ("numbers of ranks for tests with the argument zerosim_ranks or zerosim_cluster; with 2 alone every order of "
        "additions is the same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, and the setting of pytest.ini or pyproject.toml that it goes before."""
    parser.getgroup("zerosim").addoption("--zerosim-ranks", metavar=USUAL, help=f"{HELP} (default: {USUAL})")
    parser.addini(RANKS, HELP, default=USUAL)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker; refuses a bad option before a test is looked for."""
    config.addinivalue_line("markers", f"{RANKS}(2, 4): the numbers of ranks for which this test is meant; of them "
                            "those of --zerosim-ranks are run, where it is given")
    _asked(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each number of ranks: a plain parameter, so that hypothesis's @given takes it, and in order."""
    if RANKS not in metafunc.fixturenames:
        return
    numbers, marker = _asked(metafunc.config), metafunc.definition.get_closest_marker(RANKS)
    if marker:
        try:
            own = _checked(f"@pytest.mark.{RANKS} of {metafunc.definition.nodeid}", marker.args)
        except pytest.UsageError as error:
            pytest.fail(str(error), pytrace=False)
        given = metafunc.config.getoption("--zerosim-ranks") is not None
        numbers = [number for number in own if number in numbers or not given]
    skipped = [] if numbers else [pytest.param(0, id="no-ranks", marks=pytest.mark.skip(
        reason=f"none of its numbers of ranks, {', '.join(map(str, own))}, is in --zerosim-ranks"))]
    metafunc.parametrize(RANKS, numbers or skipped, ids=None if skipped else [f"{number}-ranks" for number in numbers])


@pytest.fixture
def zerosim_cluster(zerosim_ranks: int) -> Cluster:
    """A new zerosim.Cluster for each number of ranks of --zerosim-ranks; the argument zerosim_ranks is that number."""
    import zerosim

    return zerosim.Cluster(zerosim_ranks)


def _asked(config: pytest.Config) -> list[int]:
    option = config.getoption("--zerosim-ranks")
    name, text = (f"{RANKS} in {config.inipath}", config.getini(RANKS)) if option is None else (
        "--zerosim-ranks", option)
    return _checked(name, text.split(","))


def _checked(name: str, given: list[str] | tuple[object, ...]) -> list[int]:
    """The numbers; a UsageError for what is none."""
    words = [str(word).strip() for word in given]
    if not words or not all(word.isdecimal() and int(word) for word in words) or len({*words}) < len(words):
        raise pytest.UsageError(f"{name} takes different numbers of ranks, 1 or more, as {USUAL}; found "
                                f"{', '.join(words)!r}")
    return [int(word) for word in words]
