"""Maximum and minimum of one block, zeros included: of +0 and -0, NumPy's own return the one or the other."""

from __future__ import annotations

import numpy as np

from zerosim.numerics.blocks import Array


def maximum(a: Array, b: Array, out: Array) -> None:
    """out (n,) = the larger of a and b (n,), of +0 and -0 the positive; NaN if either is."""
    np.maximum(a, b, out=out)  # out is neither a nor b: both are read again
    _settle_zeros(np.bitwise_and, a, b, out)


def minimum(a: Array, b: Array, out: Array) -> None:
    """out (n,) = the smaller of a and b (n,), of +0 and -0 the negative; NaN if either is."""
    np.minimum(a, b, out=out)  # out is neither a nor b: both are read again
    _settle_zeros(np.bitwise_or, a, b, out)


def _settle_zeros(ufunc: np.ufunc, a: Array, b: Array, out: Array) -> None:
    """Where a equals b their bits are equal too, but for the signs of zeros, which `ufunc` combines."""
    word = np.dtype(f"u{out.dtype.itemsize}")
    ufunc(a.view(word), b.view(word), out=out.view(word), where=a == b)
