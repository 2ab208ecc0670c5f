"""What layers refuse, and the words in which they do it: what was asked, what was found, what to do."""

from typing import Any

import numpy as np

from zerosim.models.context import Context
from zerosim.numerics.checks import is_count


def require_shape(where: str, what: str, found: Any, wanted: tuple[int, ...], remedy: str) -> None:
    """Raises ValueError unless the array ``found`` has the shape ``wanted``."""
    if found.shape != wanted:
        raise ValueError(f"{where} asked for {what} of shape {wanted}, and found {found.shape}; {remedy}")


def require_matrix(where: str, what: str, found: Any, axes: str) -> None:
    """Raises ValueError unless ``found`` has two dimensions, which ``axes`` names."""
    if found.ndim != 2:
        raise ValueError(f"{where} asked for {what} of shape {axes}, and found {found.shape}; reshape it to "
                         "two dimensions")


def require_at_rest(ctx: Context, where: str, **arrays: np.ndarray | None) -> None:
    """Raises ValueError unless all arrays are in the compute dtype.

    A wider input would be computed with silently, and would hide a rounding that the hardware makes.
    """
    for what, array in arrays.items():
        if array is not None and array.dtype != ctx.dtype:
            raise ValueError(f"{where} computes in {ctx.dtype}, and found {what} in {array.dtype}; "
                             f"round it first, with ctx.cast({what})")


def require_integer(where: str, **numbers: Any) -> None:
    """Raises ValueError unless every number is an integer."""
    for what, number in numbers.items():
        if not is_count(number):
            raise ValueError(f"{where} was given {what}={number!r}; {what} is a whole number")


def require_list(where: str, what: str, found: Any, least: int, example: str) -> None:
    """Raises ValueError unless ``found`` is a list or tuple of at least so many."""
    if not isinstance(found, list | tuple) or len(found) < least:
        raise ValueError(f"{where} was asked for {what} {found!r}; it needs a list of at least {least}, as in "
                         f"{example}")


def require_positive(where: str, **counts: Any) -> None:
    """Raises ValueError unless every count is an integer of at least 1."""
    for what, count in counts.items():
        if not is_count(count) or count < 1:
            raise ValueError(f"{where} was given {what}={count!r}; {what} is a whole number, 1 or more")
