"""The stand-in for CuPy in place of CuPy, as long as a test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.backends import compiled_kernels, fake_cupy
from zerosim.backends.cupy.kernels import CupyKernels
from zerosim.backends.cupy.tracing import compiled
from zerosim.numerics.arrays import to_host
from zerosim.numerics.kernels import NumpyKernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's kernels on the stand-in: their arithmetic on the CPU."""
    if compiled_kernels.COMPILER is None:
        pytest.skip(compiled_kernels.MISSING)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    # The order in which a library adds up a row is its own; the stand-in's is that of NumPy's kernels.
    monkeypatch.setattr(CupyKernels, "row_products",
                        lambda self, x, y: fake_cupy.asarray(NumpyKernels().row_products(to_host(x), to_host(y))))
    compiled.cache_clear()
    with np.errstate(all="ignore"):  # the tests' own arithmetic on chance bits
        yield CupyKernels()
    compiled.cache_clear()


def differing(found: np.ndarray, expected: np.ndarray) -> int:
    """In how many places the bits differ; any NaN equals any NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.dtype.kind in "iub":
        return int((found != expected).sum())
    with np.errstate(all="ignore"):
        nans, others = (np.isnan(x.astype(np.float64)) for x in (found, expected))
    words = f"u{found.dtype.itemsize}"
    return int(((nans != others) | (~nans & (found.view(words) != expected.view(words)))).sum())
