"""Kernels without data: each call is one event that computes nothing, and all is finite, by declaration."""

from __future__ import annotations

import sys
from typing import Any

import numpy.typing as npt

from zerosim.numerics.blocks import slack_nbytes
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.null import NullArray, NullModule


class NullKernels:
    """The kernels of a run without numbers: allocation gives null arrays, arithmetic does nothing, and everything
    is finite, by declaration."""

    BLOCK = sys.maxsize  # what is never computed is one block, however long
    scratch_nbytes = 0
    xp = NullModule()

    def __init__(self) -> None:
        self._numbers = NumpyKernels()

    def serving(self, x: Any) -> Any:
        """These for an array without data; NumPy's for one with data, as flags and counts that programs make."""
        return self if isinstance(x, NullArray) else self._numbers

    def fill(self, out: Any, values: Any) -> None: ...

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> NullArray:
        return NullArray(shape, dtype)

    def scratch(self, name: str, count: int, dtype: npt.DTypeLike) -> NullArray:
        return NullArray(count, dtype)

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

    def count_nan(self, x: Any) -> int:
        """0: everything is finite, by declaration."""
        return 0

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
