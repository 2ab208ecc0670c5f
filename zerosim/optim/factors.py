"""Optimizers with a factor for each side of a matrix.

Legend: a matrix W (R, C) with gradient G; L (R, R), R (C, C). Roots and eigenvectors are computed in float64.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.numerics.checks import is_count
from zerosim.optim.base import (
    Cut,
    Group,
    Optimizer,
    Slot,
    State,
    UpdateContext,
    require_at_least_zero,
    require_decay_rate,
    require_tensor,
    require_update,
)


@dataclass(frozen=True, slots=True)
class Shampoo(Optimizer):
    """L += G Gᵀ; R += Gᵀ G; w -= lr·(L + εI)^(-1/4) G (R + εI)^(-1/4). Vectors take AdaGrad, its diagonal form.

    Gupta, Koren & Singer 2018 (arXiv:1802.09568), algorithm 1.
    """

    cut: ClassVar[Cut] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})
    lr: float = 0.1
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and epsilon are finite and not negative."""
        require_at_least_zero(self, "lr", "epsilon")

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """A matrix only whole, anything else anywhere."""
        return "matrix" if len(shape) == 2 else "anywhere"

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """Two factors of a matrix; the sum of squares of anything else."""
        if len(shape) != 2:
            return {"v": Slot(shape)}
        return {"left": Slot((shape[0], shape[0])), "right": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (R, C), or on a piece (n,) of a vector."""
        now = self.for_group(group)
        if "v" in state:
            require_update(self, w, g, state, step)
            state["v"][...] += g * g
            w -= np.float32(now.lr) * g / np.sqrt(state["v"] + np.float32(now.epsilon))
            return
        require_tensor(self, w, g, state, step)
        _add_product(ctx, state["left"], g, g.T, 1.0, 1.0)
        _add_product(ctx, state["right"], g.T, g, 1.0, 1.0)
        left, right = (inverse_root(state[side], now.epsilon, 4) for side in ("left", "right"))
        w -= np.float32(now.lr) * _product(ctx, _product(ctx, left, g), right)


@dataclass(frozen=True, slots=True)
class SOAP(Optimizer):
    """Adam in the eigenbasis of Shampoo's factors, which is turned anew every ``every`` steps. Vectors take Adam.

    G' = Qₗᵀ G Qᵣ; m = β₁·m + (1-β₁)·G; v = β₂·v + (1-β₂)·G'²; w -= lr·Qₗ (Qₗᵀ m̂ Qᵣ/(√v̂ + ε)) Qᵣᵀ; then
    L = β₂·L + (1-β₂)·G Gᵀ, R alike, and Q = the orthogonal factor of L Q. The first step only begins L, R and Q: in
    its own gradient's basis that gradient is diagonal, and the rest of it rounding.
    Vyas et al. 2024 (arXiv:2409.11321), algorithm 3, and its published code for the first step.
    """

    cut: ClassVar[Cut] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})
    lr: float = 3e-3
    beta1: float = 0.95
    beta2: float = 0.95
    epsilon: float = 1e-8
    every: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of range."""
        require_at_least_zero(self, "lr", "epsilon")
        require_decay_rate(self, "beta1", "beta2")
        if not is_count(self.every) or self.every < 1:
            raise ValueError(f"SOAP was given every={self.every!r}; it is a number of steps, 1 or more")

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """A matrix only whole, anything else anywhere."""
        return "matrix" if len(shape) == 2 else "anywhere"

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """m and v; of a matrix two factors and their eigenvectors beside them."""
        own = {"m": Slot(shape), "v": Slot(shape)}
        if len(shape) != 2:
            return own
        left, right = Slot((shape[0], shape[0])), Slot((shape[1], shape[1]))
        return own | {"left": left, "right": right, "left_basis": left, "right_basis": right}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (R, C), or on a piece (n,) of a vector."""
        now = self.for_group(group)
        if "left" not in state:
            require_update(self, w, g, state, step)
            ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=now.lr, beta1=now.beta1, beta2=now.beta2,
                                  epsilon=now.epsilon, step=step)
            return
        require_tensor(self, w, g, state, step)
        if step > 1:
            self._adam_step(ctx, w, g, state, step - 1, now)
        _add_product(ctx, state["left"], g, g.T, now.beta2, 1 - now.beta2)
        _add_product(ctx, state["right"], g.T, g, now.beta2, 1 - now.beta2)
        for side in ("left", "right"):
            factor, basis = state[side].astype(np.float64), state[f"{side}_basis"]
            if step == 1:
                basis[...] = np.linalg.eigh(factor)[1][:, ::-1]
            elif step % now.every == 0:
                basis[...] = np.linalg.qr(factor @ basis.astype(np.float64))[0]

    @staticmethod
    def _adam_step(ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int, now: "SOAP") -> None:
        """Adam on the rotated gradient, and back."""
        left, right, m, v = (state[name] for name in ("left_basis", "right_basis", "m", "v"))
        rotated = _product(ctx, _product(ctx, left.T, g), right)
        m *= np.float32(now.beta1)
        m += np.float32(1 - now.beta1) * g
        v *= np.float32(now.beta2)
        v += np.float32(1 - now.beta2) * rotated * rotated
        direction = _product(ctx, _product(ctx, left.T, m), right)
        direction /= np.float32(1 - now.beta1**step)
        direction /= np.sqrt(v / np.float32(1 - now.beta2**step)) + np.float32(now.epsilon)
        w -= np.float32(now.lr) * _product(ctx, _product(ctx, left, direction), right.T)


@dataclass(frozen=True, slots=True)
class KFAC(Optimizer):
    """w -= lr·(A + λI)⁻¹ G (B + λI)⁻¹: A and B are running means of the layer's factors of inputs and output gradients.

    Martens & Grosse 2015 (arXiv:1503.05671), sections 3 and 5, with plain damping λ; the factors come in the context,
    from a linear layer (inputs, outputs) that hands them over. Weights alone: a bias takes another optimizer, by a
    Group.
    """

    cut: ClassVar[Cut] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix", "input_factors"})
    lr: float = 0.1
    damping: float = 1e-2
    decay: float = 0.95

    def __post_init__(self) -> None:
        """Raises ValueError unless lr and damping are finite and not negative and decay in [0, 1)."""
        require_at_least_zero(self, "lr", "damping")
        require_decay_rate(self, "decay")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The running factors of a weight (inputs, outputs); ValueError for what is none."""
        if len(shape) != 2:
            raise ValueError(
                f"KFAC updates the weights of linear layers, (inputs, outputs), and was asked for a tensor of "
                f"shape {shape}; give it another optimizer by a Group"
            )
        return {"inputs": Slot((shape[0], shape[0])), "outputs": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a weight w (inputs, outputs)."""
        require_tensor(self, w, g, state, step)
        if ctx.factors is None:
            raise ValueError("KFAC.update needs the layer's factors, and found none in its context; an engine observes "
                             "them, or put them in UpdateContext(kernels, factors=(A, B))")
        now = self.for_group(group)
        kept = 0.0 if step == 1 else now.decay
        for name, factor in zip(("inputs", "outputs"), ctx.factors, strict=True):
            state[name][...] = np.float32(kept) * state[name] + np.float32(1 - kept) * factor
        inputs, outputs = (damped(state[name], now.damping) for name in ("inputs", "outputs"))
        natural = np.linalg.solve(outputs, np.linalg.solve(inputs, g.astype(np.float64)).T).T
        w -= (now.lr * natural).astype(np.float32)


def inverse_root(factor: np.ndarray, epsilon: float, power: int) -> np.ndarray:
    """(factor + εI)^(-1/power) of a symmetric matrix, by its eigenvectors in float64, fp32."""
    values, vectors = np.linalg.eigh(damped(factor, epsilon))
    root: np.ndarray = ((vectors * np.maximum(values, epsilon or np.finfo(np.float64).tiny)**(-1 / power)) @ vectors.T)
    return root.astype(np.float32)


def damped(factor: np.ndarray, damping: float) -> np.ndarray:
    """factor + damping·I in float64."""
    return factor.astype(np.float64) + damping * np.eye(len(factor))


def _product(ctx: UpdateContext, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = ctx.kernels.empty((a.shape[0], b.shape[1]), np.float32)
    ctx.kernels.matmul(a, b, out=out)
    return out


def _add_product(
    ctx: UpdateContext, total: np.ndarray, a: np.ndarray, b: np.ndarray, kept: float, share: float
) -> None:
    """total = kept·total + share·(a @ b)."""
    total *= np.float32(kept)
    total += np.float32(share) * _product(ctx, a, b)
