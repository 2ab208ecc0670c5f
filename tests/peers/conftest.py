"""What the tests beside real peers need."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def installed() -> None:
    """Skips, and `make peers` fails, where a peer is missing."""
    missing = [name for name in ("torch", "deepspeed") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)}: a peer that is not installed here; make peers installs it")
