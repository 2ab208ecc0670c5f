"""Doubles of CuPy, of GPUs and of NCCL in the places of the real ones, for a while. Nothing here is a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.backends import fake_cuda, fake_cupy, fake_nccl
from zerosim.backends.cupy.tracing import compiled


@dataclass
class Doubles:
    """What stands in for CuPy, its devices, and NCCL."""

    cupy: Any
    cuda: fake_cuda.Cuda
    nccl: fake_nccl.World


@contextmanager
def installed(gpus: int) -> Iterator[Doubles]:
    """So many GPUs, whose streams are judged."""
    cuda, devices = fake_cupy.cuda_of(gpus)
    world = fake_nccl.World(devices)
    cuda.nccl = fake_nccl.fake_module(world)
    with ExitStack() as stack:
        stack.enter_context(patch.object(fake_cupy, "cuda", cuda, create=True))
        names = {"cupy": fake_cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": cuda.nccl}
        stack.enter_context(patch.dict(sys.modules, names))
        stack.enter_context(np.errstate(all="ignore"))  # NumPy computes here, and warns
        compiled.cache_clear()
        yield Doubles(fake_cupy, devices, world)
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


if __name__ == "__main__":  # a process of a job that has one GPU
    import zerosim as zs

    with installed(1):
        zs.connect("nccl")
