"""What an optimizer promises: its state per parameter, where that may be cut, and one update in place."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from zerosim.numerics.checks import is_finite_number, is_number
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels

Cut = Literal["anywhere", "tensor", "matrix", "layer"]
State = Mapping[str, np.ndarray]
Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of state beside a parameter: its shape, and the name of its format. It starts as zeros."""

    shape: tuple[int, ...]
    format: str = "fp32"


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """What an update is handed besides its arrays.

    ``norms`` are those of the whole tensor's weights and of its direction, ``factors`` those of the layer's inputs
    (I, I) and output gradients (O, O), for optimizers that need them.
    """

    kernels: NumpyKernels
    norms: tuple[float, float] | None = None
    factors: tuple[np.ndarray, np.ndarray] | None = None


class Optimizer(ABC):
    """An update rule as a frozen value: its fields are hyperparameters, and state lives with the caller.

    ``cut`` says where a shard may begin: "anywhere" iff the update of element i reads only element i's
    weight, gradient and state, else on the borders of tensors, matrices or layers. ``needs`` names what it
    reads beyond its own shard: "whole_matrix", "tensor_norm", "input_factors".
    """

    __slots__ = ()

    cut: ClassVar[Cut]
    needs: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The state kept for a parameter, or a flat piece of one, of this shape; by name."""

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """Where the state of a tensor of this shape may be cut: as ``cut`` says, unless an optimizer knows better."""
        return self.cut

    @abstractmethod
    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step, in place: w and every slot of ``state`` change, g (unscaled, averaged) does not.

        w, g and the state are fp32, flat, of one length. ``step`` counts from 1. ``group`` replaces
        hyperparameters for this call, as in {"lr": 0.01}. Raises ValueError for arrays, a step or a group
        that do not fit.
        """

    def for_group(self, group: Group | None) -> Self:
        """This optimizer with a group's hyperparameters for its own; ValueError for one it does not have."""
        if not group:
            return self
        known = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # a dataclass, below
        unknown = sorted(group.keys() - set(known))
        if unknown:
            raise ValueError(f"{type(self).__name__} was given a group with {', '.join(unknown)}; its "
                             f"hyperparameters are {', '.join(known)}")
        return dataclasses.replace(self, **group)  # type: ignore[type-var]


def bytes_per_parameter(optimizer: Optimizer, shape: tuple[int, ...] = (64, 64)) -> float:
    """Bytes of weights, gradient, master and state in 16-bit mixed precision, per element of a tensor of this shape.

    2 + 2 + 4, and what the optimizer keeps: 16 with Adam. Source: Rajbhandari et al. 2020 (ZeRO), section 3.1.
    """
    kept = sum(math.prod(slot.shape) * format_of(slot.format).nbytes for slot in optimizer.slots(shape).values())
    return 2 + 2 + 4 + kept / math.prod(shape)


def require_update(optimizer: Optimizer, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
    """Raises ValueError unless w, g and the state are flat fp32 of one length and ``step`` is 1 or more."""
    where = f"{type(optimizer).__name__}.update"
    slots = optimizer.slots(w.shape)
    if state.keys() != slots.keys():
        raise ValueError(f"{where} asked for the state {_listed(slots)}, and found {_listed(state)}; "
                         "allocate what slots() names, as zeros")
    for name, array in {"w": w, "g": g, **state}.items():
        if array.ndim != 1 or array.dtype != np.float32 or array.shape != w.shape:
            raise ValueError(f"{where} asked for {name} in flat float32, of w's {w.size} elements, and found "
                             f"{array.dtype} of shape {array.shape}; hand it the fp32 shards")
    if step < 1:
        raise ValueError(f"{where} was asked for step {step}; count steps from 1, since at 0 the corrections "
                         "of the moments, 1 - beta**step, are 0")


def require_tensor(optimizer: Optimizer, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
    """Raises ValueError unless w and g are fp32 of one shape, the state what slots() says of it, and step 1 or more.

    A flat piece of a matrix is refused: the rest of the matrix would be missing.
    """
    where = f"{type(optimizer).__name__}.update"
    flat = w.ndim == 1 and any(array.ndim != 1 for array in state.values())
    slots = None if flat else optimizer.slots(w.shape)
    if slots is None or state.keys() != slots.keys():
        raise ValueError(
            f"{where} needs whole tensors in their own shape, and found {w.shape} with the state "
            f"{_listed(state)}; no part of a matrix can be updated alone: take layout='whole_matrices', or "
            "gather it first"
        )
    for name, array in {"w": w, "g": g, **state}.items():
        shape = w.shape if name in ("w", "g") else slots[name].shape
        if array.dtype != np.float32 or array.shape != shape:
            raise ValueError(f"{where} asked for {name} in float32 of shape {shape}, and found {array.dtype} of shape "
                             f"{array.shape}")
    if step < 1:
        raise ValueError(f"{where} was asked for step {step}; count steps from 1")


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def require_at_least_zero(optimizer: Optimizer, *names: str) -> None:
    """Raises ValueError unless each of these hyperparameters is a finite number of at least 0."""
    for name in names:
        value = getattr(optimizer, name)
        if not (is_finite_number(value) and value >= 0):
            raise ValueError(f"{type(optimizer).__name__} was given {name}={value!r}; {name} is a finite "
                             "number, 0 or more")


def require_decay_rate(optimizer: Optimizer, *names: str) -> None:
    """Raises ValueError unless each of these hyperparameters is a number in [0, 1)."""
    for name in names:
        value = getattr(optimizer, name)
        if not (is_number(value) and 0 <= value < 1):
            raise ValueError(f"{type(optimizer).__name__} was given {name}={value!r}; {name} lies in [0, 1): "
                             "at 1 the moment would never leave 0")
