"""Which cases of a product are tried: with HYPOTHESIS_PROFILE=long (`make test-all`) all, else a few that cover it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

from hypothesis import settings

THOROUGH = settings.get_current_profile_name() == "long"


def covering(*axes: Iterable[Any], turn: int = 0) -> list[tuple[Any, ...]]:
    """Cases in which every value of every axis occurs, in as many different pairs as so few cases can have.

    There are as many cases as the longest axis has values. ``turn`` chooses other pairs: a test that is parametrized
    passes its parameter's number, so that its cases together meet most combinations. Thorough: the whole product.
    """
    lists = [list(axis) for axis in axes]
    return list(product(*lists)) if THOROUGH else few(lists, turn)


def few(axes: Sequence[list[Any]], turn: int = 0) -> list[tuple[Any, ...]]:
    """The covering cases, whatever the profile."""
    turned = [[(number + place * turn) % len(axis) for number in range(len(axis))] for place, axis in enumerate(axes)]
    candidates, seen, cases = list(product(*turned)), Counter(), []

    def staleness(case: tuple[int, ...]) -> tuple[int, int, int]:
        """The numbers of its values, and of its pairs of values, that have been seen, and how often."""
        values, pairs = list(enumerate(case)), list(combinations(enumerate(case), 2))
        return (sum(value in seen for value in values), sum(pair in seen for pair in pairs),
                sum(seen[thing] for thing in values + pairs))

    for _ in range(max(map(len, axes))):
        best = min(candidates, key=staleness)
        seen.update([*enumerate(best), *combinations(enumerate(best), 2)])
        cases.append(tuple(axis[number] for axis, number in zip(axes, best, strict=True)))
    assert sum(isinstance(number, int) for _, number in seen) == sum(map(len, axes)), "a value is in no case"
    return cases


def chosen(few: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """The few; thorough: every one."""
    return list(every if THOROUGH else few)


def dealt(number: int, **axes: Sequence[Any]) -> dict[str, Any]:
    """Case ``number`` of a product too large to try: a value of each axis, the same one every time.

    Each axis is a deck, which is shuffled anew when all its cards are dealt: among any as many cases as it has values,
    counted from a multiple of their number, each value occurs once, in ever other company.
    """
    found = {}
    for name, values in axes.items():
        shuffled, place = divmod(number, len(values))
        found[name] = Random(f"{name} {shuffled}").sample(values, len(values))[place]
    return found
