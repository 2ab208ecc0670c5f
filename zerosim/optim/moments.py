"""More optimizers that look at one element at a time.

Legend: n elements of a shard. Arrays are fp32, scalars double; every operation rounds, in the order in which it is
written.
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


@dataclass(frozen=True, slots=True)
class Momentum(Optimizer):
    """b = momentum·b + g; w -= lr·b, or w -= lr·(g + momentum·b) with Nesterov's look ahead.

    Polyak 1964, "Some methods of speeding up the convergence of iteration methods"; Sutskever et al. 2013, section 2.
    """

    cut: ClassVar[Cut] = "anywhere"
    lr: float
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError unless lr is finite and not negative and momentum in [0, 1)."""
        require_at_least_zero(self, "lr")
        require_decay_rate(self, "momentum")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b."""
        return {"b": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, b (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)

        def block(w: np.ndarray, b: np.ndarray, g: np.ndarray, change: np.ndarray) -> None:
            b *= now.momentum
            b += g
            if now.nesterov:
                np.multiply(b, now.momentum, out=change)
                change += g
                change *= now.lr
            else:
                np.multiply(b, now.lr, out=change)
            w -= change

        ctx.kernels.step_blocks(block, w, state["b"], g)


@dataclass(frozen=True, slots=True)
class AdaGrad(Optimizer):
    """v += g²; w -= lr·g/(√v + ε). Duchi, Hazan & Singer 2011, section 1 (the diagonal form)."""

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-2
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and epsilon are finite and not negative."""
        require_at_least_zero(self, "lr", "epsilon")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The sum of squares v."""
        return {"v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, v (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)

        def block(w: np.ndarray, v: np.ndarray, g: np.ndarray, root: np.ndarray, change: np.ndarray) -> None:
            np.multiply(g, g, out=change)
            v += change
            _rooted(v, now.epsilon, root)
            np.multiply(g, now.lr, out=change)
            change /= root
            w -= change

        ctx.kernels.step_blocks(block, w, state["v"], g, scratch=2)


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """v = α·v + (1-α)·g²; w -= lr·g/(√v + ε). Tieleman & Hinton 2012, lecture 6.5 of "Neural networks"."""

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and epsilon are finite and not negative and alpha in [0, 1)."""
        require_at_least_zero(self, "lr", "epsilon")
        require_decay_rate(self, "alpha")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The mean of squares v."""
        return {"v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, v (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)

        def block(w: np.ndarray, v: np.ndarray, g: np.ndarray, root: np.ndarray, change: np.ndarray) -> None:
            np.multiply(g, g, out=change)
            _decayed(v, change, now.alpha)
            _rooted(v, now.epsilon, root)
            np.multiply(g, now.lr, out=change)
            change /= root
            w -= change

        ctx.kernels.step_blocks(block, w, state["v"], g, scratch=2)


@dataclass(frozen=True, slots=True)
class Lion(Optimizer):
    """w *= 1 - lr·weight_decay; w -= lr·sign(β1·m + (1-β1)·g); m = β2·m + (1-β2)·g.

    Chen et al. 2023 (arXiv:2302.06675), algorithm 2.
    """

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and weight_decay are finite and not negative and both betas in [0, 1)."""
        require_at_least_zero(self, "lr", "weight_decay")
        require_decay_rate(self, "beta1", "beta2")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The moment m."""
        return {"m": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, m (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now = self.for_group(group)

        def block(w: np.ndarray, m: np.ndarray, g: np.ndarray, part: np.ndarray, change: np.ndarray) -> None:
            np.multiply(m, now.beta1, out=change)
            np.multiply(g, 1 - now.beta1, out=part)
            change += part
            np.sign(change, out=change)
            change *= now.lr
            if now.weight_decay:
                w *= 1 - now.lr * now.weight_decay
            w -= change
            np.multiply(g, 1.0, out=part)
            _decayed(m, part, now.beta2)

        ctx.kernels.step_blocks(block, w, state["m"], g, scratch=2)


@dataclass(frozen=True, slots=True)
class Adan(Optimizer):
    """Adam of three averages: of gradients, of their differences, and of the squares of both together.

    d = g - g_before (0 in the first step); m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·d; u = g + β2·d;
    n = β3·n + (1-β3)·u²; w = (w - lr·(m̂ + β2·v̂)/(√n̂ + ε))/(1 + lr·weight_decay), x̂ = x/(1 - β^t).
    Xie et al. 2022 (arXiv:2208.06677), algorithm 1, with the bias corrections of its published code and β as the share
    that is kept. The gradient before is kept in 16 bit, as bf16.
    """

    cut: ClassVar[Cut] = "anywhere"
    lr: float = 1e-3
    beta1: float = 0.98
    beta2: float = 0.92
    beta3: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError unless lr, epsilon, weight_decay are finite and not negative, all betas in [0, 1)."""
        require_at_least_zero(self, "lr", "epsilon", "weight_decay")
        require_decay_rate(self, "beta1", "beta2", "beta3")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The three averages m, v, n, and the gradient before."""
        return {"m": Slot(shape), "v": Slot(shape), "n": Slot(shape), "before": Slot(shape, "bf16")}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on w, m, v, n, before (n,), with g (n,)."""
        require_update(self, w, g, state, step)
        now, first = self.for_group(group), step == 1
        corrections = [1 - beta**step for beta in (now.beta1, now.beta2, now.beta3)]

        def block(w: np.ndarray, m: np.ndarray, v: np.ndarray, n: np.ndarray, before: np.ndarray, g: np.ndarray,
                  d: np.ndarray, part: np.ndarray) -> None:
            np.subtract(g, g if first else before, out=d)
            np.copyto(before, g)
            np.multiply(g, 1.0, out=part)
            _decayed(m, part, now.beta1)
            np.multiply(d, now.beta2, out=part)
            part += g
            part *= part
            _decayed(n, part, now.beta3)
            _decayed(v, d, now.beta2)
            np.divide(v, corrections[1], out=d)
            d *= now.beta2
            np.divide(m, corrections[0], out=part)
            d += part
            d *= now.lr
            np.divide(n, corrections[2], out=part)
            np.sqrt(part, out=part)
            part += now.epsilon
            d /= part
            w -= d
            if now.weight_decay:
                w /= 1 + now.lr * now.weight_decay

        ctx.kernels.step_blocks(block, w, *(state[name] for name in ("m", "v", "n", "before")), g, scratch=2)


def _decayed(average: np.ndarray, addend: np.ndarray, beta: float) -> None:
    """average = β·average + (1-β)·addend; the addend is overwritten."""
    average *= beta
    addend *= 1 - beta
    average += addend


def _rooted(squares: np.ndarray, epsilon: float, root: np.ndarray) -> None:
    """root = √squares + ε."""
    np.sqrt(squares, out=root)
    root += epsilon
