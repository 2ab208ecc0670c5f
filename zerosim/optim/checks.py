"""What optimizers ask of their arrays and hyperparameters: what was asked, what was found, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerosim.numerics.checks import is_count, is_finite_number, is_number
from zerosim.optim.base import Optimizer, State


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
    _require_step(where, step)


def require_tensor(optimizer: Optimizer, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
    """Raises ValueError unless w and g are fp32 of one shape, the state what slots() says of it, and step 1 or more.

    A flat piece of a matrix, which comes with the state of a matrix, is refused: the rest of it would be missing.
    """
    where = f"{type(optimizer).__name__}.update"
    slots = optimizer.slots(w.shape)
    if state.keys() != slots.keys():
        if w.ndim != 2 and state.keys() == optimizer.slots((1, 1)).keys():
            raise ValueError(f"{where} was handed a flat piece {w.shape} of a matrix, and never updates part of one: "
                             "take layout='whole_matrices', or gather=True, which gathers the matrix for each update "
                             "and pays in the ledger, or give this parameter an elementwise optimizer by a Group")
        raise ValueError(f"{where} asked for the state {_listed(slots)} of a tensor {w.shape}, and found "
                         f"{_listed(state)}; allocate what slots() names, as zeros")
    wanted = {"w": w.shape, "g": w.shape} | {name: slot.shape for name, slot in slots.items()}
    for name, array in {"w": w, "g": g, **state}.items():
        if array.dtype != np.float32 or array.shape != wanted[name]:
            raise ValueError(f"{where} asked for {name} in float32 of shape {wanted[name]}, and found {array.dtype} of "
                             f"shape {array.shape}; hand it the whole tensor in its own shape")
    _require_step(where, step)


def _require_step(where: str, step: int) -> None:
    if not is_count(step) or step < 1:
        raise ValueError(f"{where} was asked for step {step}; count steps from 1, since at 0 the corrections "
                         "of the moments, 1 - beta**step, are 0")


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


def require_positive(optimizer: Optimizer, *names: str) -> None:
    """Raises ValueError unless each of these hyperparameters is a finite number above 0."""
    for name in names:
        value = getattr(optimizer, name)
        if not (is_finite_number(value) and value > 0):
            raise ValueError(f"{type(optimizer).__name__} was given {name}={value!r}; {name} is a finite number above "
                             "0: something is divided by it")


def require_count(optimizer: Optimizer, *names: str) -> None:
    """Raises ValueError unless each of these hyperparameters is a whole number of at least 1."""
    for name in names:
        value = getattr(optimizer, name)
        if not is_count(value) or value < 1:
            raise ValueError(f"{type(optimizer).__name__} was given {name}={value!r}; {name} is a whole number, 1 or "
                             "more")


def require_flag(optimizer: Optimizer, *names: str) -> None:
    """Raises ValueError unless each of these hyperparameters is True or False."""
    for name in names:
        value = getattr(optimizer, name)
        if not isinstance(value, bool):
            raise ValueError(f"{type(optimizer).__name__} was given {name}={value!r}; {name} is True or False")
