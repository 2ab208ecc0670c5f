"""Adam's moments m and v kept in few bits: an average that forgets slowly loses its small additions too.

Legend: g the gradient, the same in every step; t the step, from 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerosim.course.lost_updates.one_addition import shortest, stored
from zerosim.numerics.arrays import Array
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import Adam


@dataclass(frozen=True, slots=True)
class Moments:
    """m and v after t steps, kept in one format; the shares are of what they would be without rounding.

    ``update`` is what Adam would subtract from the weight, as a multiple of the learning rate: it should be 1.
    """

    format: str
    step: int
    m: float
    v: float
    m_share: float
    v_share: float
    update: float


def moments(kernels: NumpyKernels, fmt: str, adam: Adam, gradient: float, steps: tuple[int, ...]) -> Iterator[Moments]:
    """Adam's m and v with a constant gradient, at the given steps: computed in fp32, stored in ``fmt`` every step.

    The update is computed from m and v as they are stored, in fp32.
    """
    g, betas = np.float32(gradient), (adam.beta1, adam.beta2)
    both, x = stored(kernels, [0.0, 0.0], fmt), np.array([g, g * g], np.float32)  # m and v; what they are averages of
    for step in range(1, max(steps) + 1):
        average(kernels, both, x, betas)
        if step in steps:
            corrections = 1.0 - adam.beta1**step, 1.0 - adam.beta2**step
            m, v = (float(mean) for mean in both)
            m_share, v_share = m / (corrections[0] * gradient), v / (corrections[1] * gradient**2)
            yield Moments(fmt, step, shortest(m), shortest(v), m_share, v_share,
                          unit_update(kernels, both, adam, corrections))  # fmt: skip


def average(kernels: NumpyKernels, means: Array, x: Array, betas: tuple[float, ...]) -> None:
    """means (n,) = β·means + (1-β)·x, in place, each with its own β: the operations of the package's Adam in its
    order, made in fp32, and one rounding to the format."""
    keep, take = np.array(betas, np.float32), np.array([1.0 - beta for beta in betas], np.float32)

    def block(old: Array, new: Array, out: Array) -> None:
        np.add(old * keep, new * take, out=out)

    kernels.elementwise(block, means, x, out=means)


def unit_update(kernels: NumpyKernels, both: Array, adam: Adam, corrections: tuple[float, float]) -> float:
    """(m/correction1) / (√(v/correction2) + ε), in fp32: Adam's update at a learning rate of 1."""
    out = np.empty(1, np.float32)

    def block(m: Array, v: Array, out: Array) -> None:
        np.divide(m / corrections[0], np.sqrt(v / corrections[1]) + adam.epsilon, out=out)

    kernels.elementwise(block, both[:1], both[1:], out=out)
    return shortest(out[0])
