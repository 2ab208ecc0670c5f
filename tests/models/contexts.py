"""Contexts for the tests of layers: every format, and float64, in which finite differences are sharp."""

import weakref
from collections import Counter
from typing import Any

import numpy as np

import zerosim as zs
from tests.ranks.data import FLOATS
from zerosim.models import Context
from zerosim.numerics import kernels

FLOWING = ("activation", "activation_gradient")


class Recorder:
    """A workspace and a note: what was allocated, what is alive at any moment, by kind, and what was computed."""

    def __init__(self, of: Any = None) -> None:
        self.kernels = of or kernels.NumpyKernels()
        self.allocated: list[tuple[str, str, tuple[int, ...], np.dtype]] = []
        self.now: Counter[str] = Counter()
        self.moments: list[tuple[int, int]] = []  # bytes of FLOWING after each allocation
        self.flops = self.nbytes = 0

    def alloc(self, shape: Any, dtype: Any, kind: str, name: str = "") -> np.ndarray:
        array = self.kernels.empty(shape, np.dtype(dtype))
        self.allocated.append((kind, name, array.shape, array.dtype))
        self.now[kind] += array.nbytes
        self.moments.append((self.now[FLOWING[0]], self.now[FLOWING[1]]))
        weakref.finalize(array if array.base is None else array.base, self._free, kind, array.nbytes)
        return array

    def _free(self, kind: str, nbytes: int) -> None:
        self.now[kind] -= nbytes

    def note(self, *, flops: int = 0, nbytes: int = 0) -> None:
        self.flops += flops
        self.nbytes += nbytes


def context(name: str) -> Context:
    """A context without ranks in the format of this name, or in float64."""
    return Context.standalone(zs.Policy(name))


def recorded(name: str, of: Any = None) -> tuple[Context, Recorder]:
    """The same, with these kernels, and what hears of its allocations and of its arithmetic."""
    recorder, plain = Recorder(of), context(name)
    return Context(np, plain.policy, recorder.kernels, recorder, recorder.note, plain.gradients), recorder


def normal(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Standard normal values in the format of this name."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(FLOATS[name])


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bit patterns of an array: equal means equal bits."""
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])
