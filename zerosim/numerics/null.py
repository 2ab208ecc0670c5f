"""Arrays without data, and kernels that do nothing: a step of a trillion parameters in no memory.

A NullArray answers what can be known without numbers: shapes, types, bytes. Whatever would need a number raises.
"""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zerosim.numerics.blocks import BLOCK, slack_nbytes

_Index = int | slice | EllipsisType | None


class NullArray:
    """A shape and a type. Views (slices, reshape, view, T) share their `base`, as NumPy's do."""

    __slots__ = ("__weakref__", "base", "dtype", "shape")

    def __init__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, base: NullArray | None = None) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.base = base
        if any(length < 0 for length in self.shape):
            raise ValueError(f"an array has no negative lengths, got shape {self.shape}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def T(self) -> NullArray:
        return self._view(self.shape[::-1], self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: _Index | tuple[_Index, ...]) -> NullArray:
        """Integers, slices, ... and None, as in NumPy; no arrays of indices, since which elements they name would
        be data."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(part is None or isinstance(part, int | slice | EllipsisType | np.integer) for part in keys):
            raise TypeError(f"a null array is indexed by integers, slices, ... and None, got {key!r}")
        # One element, repeated by strides of zero: NumPy's own rules for shapes, at no cost.
        shape = np.broadcast_to(np.empty((), np.bool_), self.shape)[keys].shape
        return self._view(shape, self.dtype)

    def __setitem__(self, key: _Index | tuple[_Index, ...], value: object) -> None:
        self[key]

    def reshape(self, *shape: int | tuple[int, ...]) -> NullArray:
        """The same elements in another shape; one length may be -1."""
        asked = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        lengths = [length for length in asked if isinstance(length, int | np.integer)]
        known = math.prod(length for length in lengths if length != -1)
        if lengths.count(-1) == 1 and known and self.size % known == 0:
            lengths[lengths.index(-1)] = self.size // known
        if -1 in lengths or math.prod(lengths) != self.size:
            raise ValueError(f"an array of shape {self.shape} has not as many elements as shape {tuple(asked)}")
        return self._view(tuple(int(length) for length in lengths), self.dtype)

    def view(self, dtype: npt.DTypeLike) -> NullArray:
        """The same bytes in another type; the last length changes with the bytes of an element."""
        dtype = np.dtype(dtype)
        if dtype.itemsize == self.itemsize:
            return self._view(self.shape, dtype)
        row_nbytes = self.shape[-1] * self.itemsize if self.shape else 0
        if not self.shape or row_nbytes % dtype.itemsize:
            raise ValueError(f"an array of shape {self.shape} and type {self.dtype.name} has no view as {dtype.name}")
        return self._view((*self.shape[:-1], row_nbytes // dtype.itemsize), dtype)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> NullArray:
        return self if not copy and np.dtype(dtype) == self.dtype else NullArray(self.shape, dtype)

    def copy(self) -> NullArray:
        return NullArray(self.shape, self.dtype)

    def fill(self, value: object) -> None:
        pass

    def _view(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NullArray:
        return NullArray(shape, dtype, self if self.base is None else self.base)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a null array has no data, so it is neither true nor false: a branch on numbers cannot be taken in a "
            "run without numbers"
        )

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a null array has no data: NumPy's functions cannot compute with it, NullKernels can")

    def __repr__(self) -> str:
        return f"NullArray({self.shape}, {self.dtype.name})"


class NullKernels:
    """The kernels of a run without numbers: allocation gives null arrays, arithmetic does nothing, and everything
    is finite, by declaration."""

    BLOCK = BLOCK
    scratch_nbytes = 0

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NullArray:
        return NullArray(shape, dtype)

    def slack_nbytes(self, nbytes: int) -> int:
        """As for real arrays, so that ledgers agree."""
        return slack_nbytes(nbytes)

    def cast_pack(self, x: Any, out: Any) -> None: ...
    def add_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def sum_rounded(self, addends: Any, out: Any) -> None: ...
    def maximum_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def minimum_rounded(self, a: Any, b: Any, out: Any) -> None: ...
    def multiply_rounded(self, x: Any, factor: float, out: Any) -> None: ...
    def divide_rounded(self, x: Any, divisor: float, out: Any) -> None: ...
    def accumulate(self, total: Any, x: Any) -> None: ...
    def matmul(self, a: Any, b: Any, *, bias: Any = None, out: Any) -> None: ...
    def elementwise(self, function: Any, *inputs: Any, out: Any) -> None: ...
    def column_sum(self, x: Any, out: Any) -> None: ...
    def gradient_block(self, x: Any, divisor: float, factor: float, out: Any) -> None: ...
    def normalize_rows(self, x: Any, w: Any, b: Any, epsilon: Any, mean: Any, rstd: Any, y: Any) -> None: ...
    def scale_rows(self, x: Any, w: Any, b: Any, mean: Any, rstd: Any, y: Any) -> None: ...

    def normalize_rows_gradient(self, x: Any, w: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dw: Any,
                                db: Any) -> None: ...  # fmt: skip

    def take_rows(self, table: Any, rows: Any, out: Any) -> None: ...
    def add_rows(self, x: Any, rows: Any, out: Any) -> None: ...
    def relu(self, x: Any, out: Any, bits: Any) -> None: ...
    def relu_gradient(self, bits: Any, dy: Any, out: Any) -> None: ...
    def gelu(self, x: Any, out: Any, *, exact: bool = False) -> None: ...
    def gelu_gradient(self, x: Any, dy: Any, out: Any, *, exact: bool = False) -> None: ...
    def drop(self, x: Any, draw: Any, threshold: int, factor: float, out: Any) -> None: ...
    def softmax_loss_gradient(self, logits: Any, targets: Any, log_sums: Any, factor: Any, out: Any) -> None: ...
    def attend(self, qkv: Any, heads: Any, p: Any, o: Any) -> None: ...
    def attend_gradient(self, qkv: Any, heads: Any, p: Any, do: Any, dqkv: Any, *, again: Any = False) -> None: ...
    def attend_tiled(self, qkv: Any, heads: Any, log_sums: Any, o: Any) -> None: ...
    def attend_tiled_gradient(self, qkv: Any, heads: Any, log_sums: Any, o: Any, do: Any, dqkv: Any) -> None: ...
    def step_blocks(self, function: Any, *arrays: Any, scratch: int = 1) -> None: ...
    def sgd_step(self, w: Any, g: Any, *, lr: float) -> None: ...

    def adam_step(self, w: Any, m: Any, v: Any, g: Any, *, lr: float, beta1: float, beta2: float,
                  epsilon: float, step: int, weight_decay: float = 0.0) -> None: ...  # fmt: skip

    def widen(self, x: Any) -> Any:
        """The same: no number becomes another."""
        return x

    def quantized(self, x: Any, fmt: str) -> Any:
        """The same: no number becomes another."""
        return x

    def index_range(self, x: Any) -> tuple[int, int]:
        """0 and 0: every index is that of the first, by declaration."""
        return 0, 0

    def count_targets(self, targets: Any) -> int:
        """All of them, by declaration."""
        return int(targets.size)

    def symmetric_power(self, a: Any, exponent: float, damping: float, out: Any) -> None: ...
    def eigenvectors(self, a: Any, out: Any) -> None: ...
    def orthogonal_factor(self, a: Any, out: Any) -> None: ...
    def mean_squares(self, x: Any, rows: Any, columns: Any) -> None: ...
    def divide_by_roots(self, x: Any, rows: Any, columns: Any, out: Any) -> None: ...

    def trace(self, a: Any) -> float:
        """0: there is nothing to add."""
        return 0.0

    def softmax_loss(self, logits: Any, targets: Any, log_sums: Any) -> float:
        """0: there is nothing to add."""
        return 0.0

    def all_finite(self, x: Any) -> bool:
        return True

    def sum_of_squares(self, x: Any, divisor: float = 1.0) -> float:
        """0: there is nothing to add."""
        return 0.0
