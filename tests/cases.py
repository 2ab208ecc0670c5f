"""Which cases of a product are tried: with HYPOTHESIS_PROFILE=long (`make test-all`) all, else a few that cover it."""

import random
import re
from collections.abc import Iterable
from itertools import product
from typing import Any

from hypothesis import settings

THOROUGH = settings.get_current_profile_name() == "long"


def covering(*axes: Iterable[Any], turn: int = 0, count: int | None = None) -> list[tuple[Any, ...]]:
    """Cases in which every value of every axis occurs about as often as every other, in pairs by chance.

    There are as many cases as the longest axis has values. ``turn`` chooses other pairs: a test that is parametrized
    passes its parameter's number, so that its cases together meet most combinations. Thorough: the whole product.
    Where that is too much, ``count`` says how many cases there are; thorough: six times as many.
    """
    lists, chance, columns = [list(axis) for axis in axes], random.Random(turn), []
    if THOROUGH and count is None:
        return list(product(*lists))
    length = max(map(len, lists)) if count is None else count * (6 if THOROUGH else 1)
    for axis in lists:
        rounds = [chance.sample(axis, len(axis)) for _ in range(0, length, len(axis))]
        columns.append([value for shuffled in rounds for value in shuffled][:length])
    return list(zip(*columns, strict=True))


def named(value: Any) -> str:
    """An id of a case in which no address stands: pytest-xdist's workers must find the same ids."""
    return re.sub(r"<(.*) at 0x[0-9a-f]+>", r"\1", str(value))


def chosen(few: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The few; thorough: every one."""
    return list(every if THOROUGH else few)
