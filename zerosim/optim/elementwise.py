"""Optimizers that look at one element at a time, so that their state may be cut anywhere.

Legend: n elements of a shard. Arrays are fp32; scalars (1 - β and 1 - β^t among them) are computed in double.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.optim.base import Cut, Group, Optimizer, Slot, State, UpdateContext
from zerosim.optim.checks import require_at_least_zero, require_decay_rate, require_update


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """w -= lr·g. No state."""

    cut: ClassVar[Cut] = "anywhere"
    lr: float

    def __post_init__(self) -> None:
        """Raises ValueError unless lr is finite and not negative."""
        require_at_least_zero(self, "lr")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """None."""
        return {}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        ctx.kernels.sgd_step(w, g, lr=self.for_group(group).lr)


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·(g·g); w -= lr·(m/(1-β1^t))/(√(v/(1-β2^t)) + ε).

    Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1. With ε = 0 a weight whose gradients have all been 0
    becomes NaN (0/0), and the update does not change at all when the loss is scaled by a power of two.
    """

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and epsilon are finite and not negative and both betas in [0, 1)."""
        require_at_least_zero(self, "lr", "epsilon")
        require_decay_rate(self, "beta1", "beta2")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two moments, m and v."""
        return {"m": Slot(shape), "v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, m, v (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)
        ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=now.lr, beta1=now.beta1, beta2=now.beta2,
                          epsilon=now.epsilon, step=step)


@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """Adam after w *= 1 - lr·weight_decay: the decay is decoupled, no part of g, m or v.

    Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2. Every weight decays, biases too; a group with
    weight_decay 0 exempts some.
    """

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError as Adam does, and unless weight_decay is finite and not negative."""
        require_at_least_zero(self, "lr", "epsilon", "weight_decay")
        require_decay_rate(self, "beta1", "beta2")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two moments, m and v."""
        return {"m": Slot(shape), "v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, m, v (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)
        ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=now.lr, beta1=now.beta1, beta2=now.beta2,
                          epsilon=now.epsilon, step=step, weight_decay=now.weight_decay)
