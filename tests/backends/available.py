"""The worlds that can be had here, as fixtures: a test that takes one runs in each of its worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.backends.worlds import DOUBLES, GPUS, HERE, MPI, World

ALL = [HERE, *MPI, *DOUBLES, *GPUS]
MISSING = {world: reason for world in ALL if (reason := world.missing()) is not None}
THERE = [pytest.param(world, id=world.name, marks=[pytest.mark.gpu] * (world in GPUS))
         for world in ALL if world not in MISSING]


def worlds(wanted: Callable[[World], Any], doc: str) -> Any:
    """A fixture: each world that is wanted, in turn."""
    def fixture(request: pytest.FixtureRequest) -> World:
        found: World = request.param
        return found

    fixture.__doc__ = doc
    return pytest.fixture(params=[there for there in THERE if wanted(there.values[0])])(fixture)
