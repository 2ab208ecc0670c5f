"""What check_shardable refuses: what is no optimizer, and what breaks the promise of ``update``."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from zerosim.numerics.checks import is_count
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer, Slot, state_nbytes
from zerosim.optim.trials import STEPS, Run, Shape, Trial, new_trial

CUTS = ("anywhere", "tensor", "matrix", "layer")
NEEDS = frozenset({"whole_matrix", "tensor_norm", "input_factors"})
LARGEST_NBYTES = 1 << 27  # of state for one tensor of a trial


def checked_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optimizer, and for one that says of itself what nobody understands."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"check_shardable asks for an optimizer with its settings, found {optimizer!r}; write "
                         "check_shardable(zs.optim.Adam(lr=0.01)), or derive your own from zs.optim.Optimizer")
    name, cut = type(optimizer).__name__, getattr(optimizer, "cut", None)
    needs: Any = getattr(optimizer, "needs", None)
    if cut not in CUTS:
        raise ValueError(f"{name} says cut={cut!r}; write one of {', '.join(map(repr, CUTS))} into its class")
    if not isinstance(needs, frozenset | set) or not needs <= NEEDS:
        raise ValueError(f"{name} says needs={needs!r}; write a frozenset of {', '.join(sorted(NEEDS))} into its class")
    try:
        copy.deepcopy(optimizer)
    except Exception as error:
        raise ValueError(f"{name} cannot be copied ({type(error).__name__}: {error}), and every rank has one of its "
                         "own; keep numbers in it, and state in its slots") from error


def usable_trials(optimizer: Optimizer, shapes: Sequence[Shape], seed: int, kernels: NumpyKernels) -> list[Trial]:
    """A trial for each shape that the optimizer takes.

    Raises ValueError for what is no shape, if it takes none, and for an update that breaks its promise.
    """
    for shape in cast(Sequence[Any], shapes):
        if not isinstance(shape, tuple) or not all(map(is_count, shape)) or math.prod(shape) < 2:
            raise ValueError(f"check_shardable takes shapes of tensors that can be cut, found {shape!r}; write tuples "
                             "with two elements or more, as in shapes=[(23,), (12, 7)]")
    trials, said = [], "no shapes were given"
    for shape in shapes:
        try:
            _check_slots(optimizer, shape)
            trial = new_trial(optimizer, shape, seed)
            _try_a_step(optimizer, kernels, trial.copy())
        except BrokenPromise:
            raise
        except Exception as error:  # a user's own class may refuse tensors of a shape in any way
            said = f"{type(error).__name__}: {error}"
        else:
            trials.append(trial)
    if not trials:
        raise ValueError(f"{type(optimizer).__name__} updates no tensor of the shapes "
                         f"{', '.join(map(str, shapes))}; it says {said}")
    return trials


class BrokenPromise(ValueError):
    """An update does what none may do, or not what each must."""


def _check_slots(optimizer: Optimizer, shape: Shape) -> None:
    """Raises BrokenPromise for slots that are none, ValueError for state too large to try."""
    name, slots = type(optimizer).__name__, cast(Any, optimizer.slots(shape))  # a user's may return anything
    if not isinstance(slots, dict) or not all(isinstance(slot, Slot) and slot.format in FORMATS
                                              for slot in slots.values()):
        raise BrokenPromise(f"{name}.slots({shape}) returns {slots!r}; return a dict of names and Slot(shape, format), "
                            f"with a format of {', '.join(FORMATS)}")
    if state_nbytes(optimizer, shape) > LARGEST_NBYTES:
        raise ValueError(f"{name} keeps {state_nbytes(optimizer, shape):,} bytes for a tensor {shape}, too many to try")


def _try_a_step(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> None:
    """Steps must work in place and leave the gradient alone."""
    name, before, handed = type(optimizer).__name__, trial.copy(), dict(trial.state)
    answers = Run(kernels).step(copy.deepcopy(optimizer), [trial], 0)
    if (before.gradients[0].view(np.uint32) != trial.gradients[0].view(np.uint32)).any():
        raise BrokenPromise(f"{name}.update changes the gradient, which others still read; work on a copy")
    if any(trial.state.get(slot) is not handed.get(slot) for slot in {**handed, **trial.state}):
        raise BrokenPromise(f"{name}.update replaces its state, and what it puts there is lost; declare it in slots(), "
                            "and write into it: state['m'][...] = ...")
    if _equal_bits(before, trial) and any(answer is not None for answer in answers):
        raise BrokenPromise(f"{name}.update returns something and changes nothing; update in place: w -= ..., "
                            "state['m'][...] = ...")
    Run(kernels).steps(copy.deepcopy(optimizer), [trial])
    if _equal_bits(before, trial):
        raise BrokenPromise(f"{name}.update changes nothing in {1 + len(STEPS)} steps; update in place, with w -= ..., "
                            "and not w = w - ..., which makes another w")


def _equal_bits(one: Trial, other: Trial) -> bool:
    """True where weights and state are the same."""
    return all((a == b).all() for a, b in zip(one.bits().values(), other.bits().values(), strict=True))
