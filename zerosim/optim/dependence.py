"""What an update that may not be cut depends on: found by changing one thing at a time.

Legend: n elements of a tensor.
"""

from __future__ import annotations

import copy

import numpy as np

from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer
from zerosim.optim.trials import Run, Trial, pieces_of

LARGE = 1e3  # a change that no threshold overlooks


def dependence_of(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> str:
    """In words: other elements' numbers, the index, or the length. The trial is one whose pieces have differed."""
    if _reads_others(optimizer, kernels, trial):
        return "the update of an element reads other elements' gradients or weights"
    if _uneven(optimizer, kernels, trial):
        return "the update of an element depends on its index inside the piece"
    if _long_and_short(optimizer, kernels, trial):
        return "the update of an element depends on the length of the piece"
    return "the update of an element depends on where the tensor is cut"


def _reads_others(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> bool:
    """Whether changing one element's numbers, in one way or another, changes another element's update."""
    plain = trial.copy()
    _run(optimizer, kernels, plain)
    count = trial.w.size
    for at in {0, count // 2, count - 1}:
        for factor in (LARGE, -LARGE, 0.0):
            changed = trial.copy()
            changed.w.reshape(-1)[at] *= factor
            for g in changed.gradients:
                g.reshape(-1)[at] = factor
            _run(optimizer, kernels, changed)
            others = np.arange(count) != at
            if (plain.bits()["w"] != changed.bits()["w"])[others].any():
                return True
    return False


def _uneven(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> bool:
    """Whether equal elements become unequal."""
    even = _even(trial)
    _run(optimizer, kernels, even)
    bits = even.bits()["w"]
    return bool((bits != bits[0]).any())


def _long_and_short(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> bool:
    """Whether equal elements become others in a shorter tensor."""
    long = _even(trial)
    _run(optimizer, kernels, long)
    for count in {1, trial.w.size // 2, trial.w.size - 1}:
        short = pieces_of(_even(trial), [0, count, trial.w.size])[0]
        _run(optimizer, kernels, short)
        if long.bits()["w"][0] != short.bits()["w"][0]:
            return True
    return False


def _even(trial: Trial) -> Trial:
    """The same tensor with the same number everywhere."""
    even = trial.copy()
    even.w[...] = 0.5
    for at, g in enumerate(even.gradients):
        g[...] = np.float32(0.25 * (-1)**at / (1 + at))
    return even


def _run(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial) -> None:
    Run(kernels).steps(copy.deepcopy(optimizer), [trial])
