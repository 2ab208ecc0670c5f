"""``world``: every world of the suite in turn; one that cannot be had here is skipped, by name and with its reason."""

from collections.abc import Iterator

import pytest

from tests.backends.worlds import WORLDS, World

LIBRARIES = [world for world in WORLDS if world.library is not None]


@pytest.fixture(params=WORLDS, ids=lambda world: world.name, scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """N ranks somewhere."""
    yield from opened(request.param)


@pytest.fixture(params=LIBRARIES, ids=lambda world: world.name, scope="session")
def library(request: pytest.FixtureRequest) -> Iterator[World]:
    """N ranks whose messages a library carries."""
    yield from opened(request.param)


def opened(found: World) -> Iterator[World]:
    """The world while tests use it."""
    reason = found.missing()
    if reason is not None:
        pytest.skip(f"{found.name}: {reason}")
    yield found


@pytest.fixture(scope="session", autouse=True)
def end_of_the_pool() -> Iterator[None]:
    """Ends the processes when all tests are over."""
    yield
    for world in WORLDS:
        world.close()
