"""Compares what ranks returned with what they should have, and finds the words for a difference.

Every text follows "On N=3 (n=7) rank 1 ", and is one sentence without its full stop.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zerosim.course.puzzles.puzzle import Case

Leaf = tuple[str, Any]
CLOSE = 1e-4  # of the largest element: what another order of fp32 additions may change, and a wrong formula exceeds


def wrong_result(case: Case, found: Sequence[Any], names: Sequence[str]) -> tuple[int, str] | None:
    """The first rank whose result is wrong, and what is wrong with it; None where all are right."""
    bounds = [None] * case.ranks if case.bounds is None else case.bounds
    for rank, value in enumerate(found):
        if _holds_itself(value):
            return rank, "returned a list that contains itself"
        text = _difference(value, case.expected[rank], bounds[rank], names)
        if text:
            known = next((what for what, results in case.mistakes.items() if all(  # every rank returned what it returns
                _difference(*of_rank, ()) is None for of_rank in zip(found, results, bounds, strict=True))), None)
            return rank, f"{known or 'returned what is wrong'}: {text}"
    return None


def _holds_itself(value: Any) -> bool:
    try:
        _structure(value)
    except RecursionError:
        return True
    return False


def _structure(value: Any) -> Any:
    return [_structure(item) for item in value] if isinstance(value, list | tuple) else None


def _leaves(value: Any, names: Sequence[str], place: str = "") -> Iterator[Leaf]:
    if not isinstance(value, list | tuple):
        yield place, value
        return
    for number, item in enumerate(value):
        name = names[number] if number < len(names) else f"item {number}"
        yield from _leaves(item, (), f"{place}, {name}" if place else name)


def _wrong(place: str, found: Any, expected: Any, bound: Any) -> str | None:
    """The words for a result of another kind, shape or dtype than expected, or of another value; None for a right one.
    """
    name = place or "the result"
    if isinstance(expected, list | tuple):
        return f"{name} is {_kind(found)} where {len(expected)} things are expected"
    if not isinstance(expected, np.ndarray):
        is_number = isinstance(found, bool | int | float | np.generic)
        what = repr(found) if is_number else _kind(found)
        return None if is_number and found == expected else f"{name} is {what} where {expected!r} is expected"
    if not isinstance(found, np.ndarray):
        return f"{name} is {_kind(found)} where an array of shape {expected.shape} is expected"
    if found.shape != expected.shape:
        return f"{name} has shape {found.shape} where {expected.shape} is expected"
    if found.dtype != expected.dtype:
        return f"{name} is {found.dtype} where {expected.dtype} is expected"
    wrong = _wrong_elements(found, expected, bound)
    if not wrong.size:
        return None
    at = int(wrong[0])
    one, right = found.reshape(-1)[at], expected.reshape(-1)[at]
    where = f"element {at}" + (f" of {place}" if place else "")
    near = _near(found, expected) if bound is None else ""
    return f"{where} is {one} where {right} is expected{near}"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _difference(found: Any, expected: Any, bounds: Any, names: Sequence[str]) -> str | None:
    """The words for the first leaf that is not as expected; None where all are."""
    if _structure(found) != _structure(expected):
        return _wrong("", found, expected, None)
    a, b = list(_leaves(found, names)), list(_leaves(expected, names))
    allowed = [None] * len(b) if bounds is None else [leaf for _, leaf in _leaves(bounds, ())]
    return next(filter(None, (_wrong(place, one, right, bound) for (place, one), (_, right), bound in zip(
        a, b, allowed, strict=True))), None)


def _wrong_elements(found: np.ndarray, expected: np.ndarray, bound: Any) -> np.ndarray:
    """The places at which bits differ, or at which the difference is beyond the bound."""
    if bound is None:
        unsigned = np.dtype(f"u{expected.dtype.itemsize}")
        a, b = (np.ascontiguousarray(x).reshape(-1).view(unsigned) for x in (found, expected))
        return np.flatnonzero(a != b)
    with np.errstate(all="ignore"):
        distance = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return np.flatnonzero(~(distance.reshape(-1) <= np.asarray(bound).reshape(-1)))


def _near(found: np.ndarray, expected: np.ndarray) -> str:
    """Words for a result whose numbers are right but for their rounding."""
    with np.errstate(all="ignore"):
        a, b = found.astype(np.float64), expected.astype(np.float64)
        distance, largest = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
    return ", which is the same sum added or rounded in another order" if distance <= CLOSE * largest else ""
