"""Doubles of several GPUs and of NCCL in the places of CuPy and NCCL, as long as a test runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.backends import fake_cuda, fake_cupy, fake_nccl
from tests.backends.fakes import kernels
from zerosim.backends.cupy.tracing import compiled

__all__ = ["gpus", "kernels"]


@dataclass
class Gpus:
    """The doubles of one test."""

    cupy: Any
    cuda: fake_cuda.Cuda
    nccl: fake_nccl.World


@pytest.fixture
def gpus(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Gpus]]:
    """Makes so many GPUs; the fixture ``kernels`` has put the stand-in for CuPy in place before."""

    def make(count: int) -> Gpus:
        module, cuda = fake_cuda.fake_module(count)
        world = fake_nccl.World(cuda)
        module.cuda.nccl = fake_nccl.fake_module(world)
        monkeypatch.setattr(fake_cupy, "ndarray", fake_cuda.ndarray)  # which the stand-in's own functions make
        for name, part in (("cupy", module), ("cupy.cuda", module.cuda), ("cupy.cuda.nccl", module.cuda.nccl)):
            monkeypatch.setitem(sys.modules, name, part)
        compiled.cache_clear()
        return Gpus(module, cuda, world)

    yield make
    compiled.cache_clear()
