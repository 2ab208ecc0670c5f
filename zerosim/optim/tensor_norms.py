"""Optimizers whose step is as long as a tensor's norms say: elementwise but for two numbers per tensor.

Legend: n elements of a piece. A step has two halves: ``advance`` moves the moments and ``direction`` says which
vector's norm is wanted; then ``update``, which finds ‖w‖ and that norm, of the whole tensors, in its context.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.optim.base import (
    Cut,
    Group,
    Optimizer,
    Slot,
    State,
    UpdateContext,
    require_at_least_zero,
    require_decay_rate,
    require_update,
)


def norms_in(ctx: UpdateContext, optimizer: Optimizer) -> tuple[float, float]:
    """The two norms; ValueError without them."""
    if ctx.norms is None:
        raise ValueError(
            f"{type(optimizer).__name__}.update needs the norms of the whole tensor, and found none in its "
            "context; call advance() and direction() on all pieces first, and put their norms in "
            "UpdateContext(kernels, norms=...)"
        )
    return ctx.norms


@dataclass(frozen=True, slots=True)
class LAMB(Optimizer):
    """Adam's direction u = m̂/(√v̂ + ε) + weight_decay·w; w -= lr·(‖w‖/‖u‖)·u, the ratio 1 where a norm is 0.

    You et al. 2020 (arXiv:1904.00962), algorithm 2, with φ the identity.
    """

    cut: ClassVar[Cut] = "anywhere"
    needs: ClassVar[frozenset[str]] = frozenset({"tensor_norm"})
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Raises ValueError unless lr, epsilon, weight_decay are finite and not negative, both betas in [0, 1)."""
        require_at_least_zero(self, "lr", "epsilon", "weight_decay")
        require_decay_rate(self, "beta1", "beta2")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two moments, m and v."""
        return {"m": Slot(shape), "v": Slot(shape)}

    def advance(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
                group: Group | None = None) -> None:
        """Moves m and v (n,) by g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)

        def block(m: np.ndarray, v: np.ndarray, g: np.ndarray, part: np.ndarray) -> None:
            m *= now.beta1
            np.multiply(g, 1 - now.beta1, out=part)
            m += part
            v *= now.beta2
            np.multiply(g, g, out=part)
            part *= 1 - now.beta2
            v += part

        ctx.kernels.step_blocks(block, state["m"], state["v"], g)

    def direction(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int, group: Group | None,
                  out: np.ndarray) -> None:
        """Writes u (n,), from moments that have been moved."""
        now = self.for_group(group)
        correction1, correction2 = 1 - now.beta1**step, 1 - now.beta2**step

        def block(w: np.ndarray, m: np.ndarray, v: np.ndarray, u: np.ndarray, root: np.ndarray) -> None:
            np.divide(v, correction2, out=root)
            np.sqrt(root, out=root)
            root += now.epsilon
            np.divide(m, correction1, out=u)
            u /= root
            np.multiply(w, now.weight_decay, out=root)
            u += root

        ctx.kernels.step_blocks(block, w, state["m"], state["v"], out)

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """The second half of a step on w (n,)."""
        weights, direction = norms_in(ctx, self)
        require_update(self, w, g, state, step)
        ratio = weights / direction if weights > 0 and direction > 0 else 1.0
        u = ctx.kernels.empty(w.shape, np.float32)
        self.direction(ctx, w, g, state, step, group, u)
        ctx.kernels.sgd_step(w, u, lr=self.for_group(group).lr * ratio)


@dataclass(frozen=True, slots=True)
class LARS(Optimizer):
    """b = momentum·b + lr·λ·(g + weight_decay·w); w -= b, with λ = trust·‖w‖/(‖g‖ + weight_decay·‖w‖), 1 for zeros.

    You, Gitman & Ginsburg 2017 (arXiv:1708.03888), algorithm 1.
    """

    cut: ClassVar[Cut] = "anywhere"
    needs: ClassVar[frozenset[str]] = frozenset({"tensor_norm"})
    lr: float = 0.1
    momentum: float = 0.9
    trust: float = 1e-3
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        """Raises ValueError unless lr, trust, weight_decay are finite and not negative and momentum in [0, 1)."""
        require_at_least_zero(self, "lr", "trust", "weight_decay")
        require_decay_rate(self, "momentum")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b."""
        return {"b": Slot(shape)}

    def advance(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
                group: Group | None = None) -> None:
        """Nothing moves before the norms are known."""
        require_update(self, w, g, state, step)

    def direction(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int, group: Group | None,
                  out: np.ndarray) -> None:
        """Writes g (n,)."""
        np.copyto(out, g)

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """The second half of a step on w and b (n,), with g (n,)."""
        weights, gradient = norms_in(ctx, self)
        require_update(self, w, g, state, step)
        now = self.for_group(group)
        scale = gradient + now.weight_decay * weights
        rate = now.lr * (now.trust * weights / scale if weights > 0 and scale > 0 else 1.0)

        def block(w: np.ndarray, b: np.ndarray, g: np.ndarray, part: np.ndarray) -> None:
            np.multiply(w, now.weight_decay, out=part)
            part += g
            part *= rate
            b *= now.momentum
            b += part
            w -= b

        ctx.kernels.step_blocks(block, w, state["b"], g)
