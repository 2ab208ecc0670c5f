"""Sums and tests over arrays, in an order of additions that is written down.

Shapes: n elements or columns; m rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from zerosim.numerics.blocks import BLOCK, Array, Scratch
from zerosim.numerics.formats import FORMATS

# Longer rows einsum cuts into pieces of this length, begun wherever the rows before have ended.
EINSUM_PIECE = 8192  # elements


def sum_rows(x: Array, total: Array, widened: Callable[[Array], Array]) -> None:
    """total (n,) = ((0 + row 0) + row 1) + ... of x (m, n), in total's type; zeros where m is 0.

    `widened` gives some rows contiguous and in total's type, in memory that may be changed if x has another type:
    NumPy adds the rows of contiguous rows in order, those of contiguous columns pairwise.
    """
    m, n = x.shape
    rows_at_once = max(1, BLOCK // max(1, n)) if x.dtype != total.dtype else max(1, m)
    total[...] = 0
    for first in range(0, m, rows_at_once):
        rows = widened(x[first : first + rows_at_once])
        if first > 0:
            np.add(total, rows[0], out=rows[0])
        if n == 1:  # a single column NumPy would add pairwise
            total[...] = np.add.accumulate(rows[:, 0])[-1]
        else:
            np.add.reduce(rows, axis=0, out=total)
    np.add(total, 0, out=total)  # whether NumPy's sum of negative zeros is negative depends on its version


def row_sums(x: Array) -> Array:
    """The sums along the last axis of x (..., n), in x's type; a row's sum depends on nothing but the row."""
    total: Array = np.einsum("...n->...", x[..., :EINSUM_PIECE])
    for first in range(EINSUM_PIECE, x.shape[-1], EINSUM_PIECE):
        total += np.einsum("...n->...", x[..., first : first + EINSUM_PIECE])
    return total


def row_products(x: Array, y: Array) -> Array:
    """The sums along the last axis of x·y (..., n), likewise; no array of products is made."""
    total: Array = np.einsum("...n,...n->...", x[..., :EINSUM_PIECE], y[..., :EINSUM_PIECE])
    for first in range(EINSUM_PIECE, x.shape[-1], EINSUM_PIECE):
        piece = slice(first, first + EINSUM_PIECE)
        total += np.einsum("...n,...n->...", x[..., piece], y[..., piece])
    return total


def row_maxima(x: Array) -> Array:
    """The largest values along the last axis of x (..., n), contiguous, n >= 1; NaN where a row has one.

    NumPy looks for the place of the maximum with vector instructions, three times as fast as for its value.
    """
    rows = x.reshape(-1, x.shape[-1])
    places = rows.argmax(axis=1)
    places += np.arange(0, rows.size, rows.shape[1])
    maxima: Array = rows.reshape(-1).take(places).reshape(x.shape[:-1])
    return maxima


def square_sum(x: Array, factor: Array, divisor: Array, scratch: Scratch) -> float:
    """The sum of (x·factor/divisor)² of one block x (n,): the quotient in x's type, squares and sum in float64."""
    quotient = scratch.array("quotient", x.size, x.dtype)
    square = scratch.array("square", x.size, np.float64)
    if factor == 1:
        np.divide(x, divisor, out=quotient)
    else:
        np.multiply(x, factor, out=quotient)
        np.divide(quotient, divisor, out=quotient)
    np.copyto(square, quotient)
    np.multiply(square, square, out=square)
    return float(np.add.reduce(square))


def has_nonfinite(x: Array, scratch: Scratch) -> bool:
    """Whether one block x (n,) has an infinity or a NaN: without the sign, their codes are the largest there are."""
    constants = nonfinite_codes(x.dtype)
    if constants is None:
        return False
    mask, first = constants
    code = scratch.array("magnitude code", x.size, mask.dtype)
    np.bitwise_and(x.view(mask.dtype), mask, out=code)
    return bool(code.max(initial=0) >= first)


@cache
def nonfinite_codes(dtype: np.dtype[Any]) -> tuple[Array, int] | None:
    """The mask that takes the sign away and the smallest code of what is not finite; None for integers."""
    overflow_values = {fmt.dtype: fmt.overflow_value for fmt in FORMATS.values()} | {np.dtype(np.float64): np.inf}
    if dtype not in overflow_values:
        return None
    code = np.dtype(f"u{dtype.itemsize}")
    mask = np.array((1 << (8 * dtype.itemsize - 1)) - 1, code)
    return mask, int(np.array(overflow_values[dtype], dtype).view(code) & mask)
