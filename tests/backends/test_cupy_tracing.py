"""Functions of elements as kernels: what can be traced, what is refused and how, and when a trace may be used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.backends.fakes import differing, kernels
from zerosim.backends.cupy.tracing import Unknown, key_of
from zerosim.numerics.arrays import to_host
from zerosim.optim.elementwise import SGD

__all__ = ["kernels"]


def refused(kernels: Any, function: Any) -> str:
    x = kernels.uploaded(np.ones(3, np.float32))
    with pytest.raises((ValueError, AttributeError)) as error:
        kernels.elementwise(function, x, out=x)
    return str(error.value)


def test_what_cannot_be_one_kernel_is_refused_by_name(kernels: Any) -> None:
    assert "np.sin, which cannot be written into one CUDA kernel" in refused(kernels, lambda x, y: np.sin(x, out=y))
    assert "np.add.reduce" in refused(kernels, lambda x, y: np.add.reduce(x))
    assert "np.where" in refused(kernels, lambda x, y: np.where(x > 0, x, y))
    assert "whether a comparison" in refused(kernels, lambda x, y: 1 if x > 0 else 2)
    assert "whether a block is true" in refused(kernels, lambda x, y: 1 if x else 2)
    assert "has no sum" in refused(kernels, lambda x, y: x.sum())
    assert "the place [0]" in refused(kernels, lambda x, y: y.__setitem__(0, 1.0))
    beside = np.ones(3, np.float32)
    assert "an array (3,) beside its blocks" in refused(kernels, lambda x, y: np.add(x, beside, out=y))


def test_operators_masks_and_clips_are_numpys(kernels: Any) -> None:
    def function(x: Any, y: Any) -> None:
        np.copyto(y, (2 - x) * 3 / (1 + x * x) - 0.5)
        y += np.clip(x, -0.5, 0.25)
        y *= np.sign(x)
        y -= -x if isinstance(x, np.ndarray) else np.negative(x)
        y /= np.square(x) + 1e-3
        np.copyto(y, 7.0, where=x >= 1.5)
        np.copyto(y, np.abs(x), where=x < -1.5)

    x = np.random.default_rng(0).standard_normal(10_001).astype(np.float32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    found, expected = kernels.uploaded(x * 0), x * 0
    kernels.elementwise(function, kernels.uploaded(x), out=found)
    function(x, expected)
    assert differing(to_host(found), expected) == 0


def test_a_number_that_changes_changes_the_step(kernels: Any) -> None:
    w, g = (kernels.uploaded(np.ones(5, np.float32)) for _ in range(2))
    for lr in (0.5, 0.25, 0.5):
        kernels.step_blocks(SGD(lr).block(1), w, g)
    assert to_host(w).tolist() == [-0.25] * 5


@dataclass(frozen=True)
class Rates:
    lr: float


class Mutable:
    lr = 1.0


def closing_over(value: Any) -> Any:
    return lambda x: np.multiply(x, value)


def test_equal_functions_have_equal_keys_and_others_have_not() -> None:
    assert key_of(closing_over(0.1)) == key_of(closing_over(0.1))
    for other in (0.2, -0.1, 1, True, None, np.float64(0.1), np.float32(0.1), np.array(0.1), Rates(0.1), np.add):
        assert key_of(closing_over(0.1)) != key_of(closing_over(other))
    assert key_of(closing_over(0.0)) != key_of(closing_over(-0.0))
    assert key_of(closing_over(1)) != key_of(closing_over(True))
    assert key_of(closing_over(Rates(1.0))) != key_of(closing_over(Rates(np.float64(1.0))))
    assert key_of(lambda x: np.add(x, 1)) != key_of(lambda x: np.add(x, 2))


def test_what_may_change_is_never_remembered() -> None:
    for value in (Mutable(), [1.0], np.ones(2), {"lr": 1.0}):
        with pytest.raises(Unknown):
            key_of(closing_over(value))
