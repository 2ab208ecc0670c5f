"""Compares a graded run with the engine's, and says in one sentence what differs.

Legend: N ranks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerosim.course.puzzles.puzzle import Refused
from zerosim.course.puzzles.reference import Arrays

CLOSE = 1e-4  # of the largest element


def copied(found: Any, what: str, shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Copies of arrays by name, once they are what they should be: all names, their shapes, fp32."""
    if not isinstance(found, Mapping):
        raise Refused(f"{what} must be a dict of arrays by name, found {type(found).__name__}")
    if set(found) != set(shapes):
        raise Refused(f"{what} must be by the names {', '.join(shapes)}; found {', '.join(map(str, found)) or 'none'}")
    for name, shape in shapes.items():
        one = found[name]
        if not isinstance(one, np.ndarray) or one.shape != shape or one.dtype != np.float32:
            form = f"{one.dtype} of shape {one.shape}" if isinstance(one, np.ndarray) else type(one).__name__
            raise Refused(f"{what}: {name} must be float32 of shape {shape}, found {form}")
    return {name: found[name].copy() for name in shapes}


def pair(found: Any, what: str) -> tuple[Any, Any]:
    """The two things that a method is to return."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise Refused(f"{what} must return (loss, gradients), found {type(found).__name__}")
    return found


def check(ranks: int, rank: int, when: str, found: Arrays, expected: Arrays, otherwise: str) -> None:
    """Raises Refused with ``otherwise`` where a bit differs."""
    place = _first_difference(found, expected)
    if place:
        raise Refused(f"On N={ranks} {when} rank {rank} {otherwise}: {place}")


def check_loss(ranks: int, rank: int, step: int, found: Any, expected: float) -> None:
    """Raises Refused for another loss than the engine's."""
    if not isinstance(found, float | np.floating) or float(found) != expected:
        raise Refused(f"On N={ranks} in step {step} rank {rank} has another loss: {found!r} where {expected!r} is "
                      "expected, that of its own batch")


def check_gradients(ranks: int, rank: int, when: str, found: Arrays, mean: Arrays, own: Arrays) -> None:
    """Raises Refused for gradients that are not the mean over ranks, with what they seem to be."""
    place = _first_difference(found, mean)
    if place is None:
        return
    if _first_difference(found, own) is None:
        known = "has its own gradients; nothing was added"
    elif _close(found, {name: g * ranks for name, g in mean.items()}):
        known = "has the sum over ranks, and not the mean"
    elif _close(found, {name: g / ranks for name, g in own.items()}):
        known = "divided its own gradients; nothing was added"
    elif _close(found, mean):
        known = ("has the mean, added or rounded in another order; reduce each parameter by a ring of its own, and "
                 "divide by N once")
    else:
        known = "has gradients that are not the mean"
    raise Refused(f"On N={ranks} {when} rank {rank} {known}: {place}")


def check_update(ranks: int, rank: int, when: str, found: Arrays, expected: Arrays, before: Arrays) -> None:
    """Raises Refused for parameters that are not the engine's after a step, with what they seem to be."""
    place = _first_difference(found, expected)
    if place is None:
        return
    left = sum(int((found[name] != expected[name]).sum()) for name in found)
    if all((found[name] == before[name]).all() for name in found):
        known = "has all parameters as they were before; nothing was updated"
    elif all(((found[name] == expected[name]) | (found[name] == before[name])).all() for name in found):
        known = f"has {left} parameters as they were before; what other ranks updated did not arrive"
    elif _close(found, expected):
        known = ("has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do "
                 "the additions have another order")
    else:
        known = "has other parameters"
    raise Refused(f"On N={ranks} {when} rank {rank} {known}: {place}")


def _first_difference(found: Arrays, expected: Arrays) -> str | None:
    for name, right in expected.items():
        wrong = np.argwhere(found[name].view(np.uint32) != right.view(np.uint32))
        if wrong.size:
            at = tuple(int(i) for i in wrong[0])
            return f"element {list(at)} of {name} is {found[name][at]} where {right[at]} is expected"
    return None


def _close(found: Arrays, expected: Arrays) -> bool:
    largest = max(float(np.abs(one).max(initial=0)) for one in expected.values())
    return all(float(np.abs(found[name] - one).max(initial=0)) <= CLOSE * largest for name, one in expected.items())
