"""Optimizers with a factor for each side of a matrix: Shampoo, SOAP, K-FAC.

Legend: a matrix W (I, O), inputs by outputs as a linear layer has it, with gradient G; left factors (I, I), right ones
(O, O); n elements of a piece. Factors are kept in fp32; their roots, inverses and eigenvectors are computed in float64.
None updates part of a matrix: a flat piece of one is refused. Workspace comes from the context.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.numerics.step_kernels import move_average, move_square_average
from zerosim.optim.base import Cut, Group, Optimizer, Slot, State, UpdateContext
from zerosim.optim.checks import (
    require_at_least_zero,
    require_count,
    require_decay_rate,
    require_positive,
    require_tensor,
)
from zerosim.optim.matrix import MatrixOptimizer
from zerosim.optim.sides import between, move_factor, outer_products, subtract


@dataclass(frozen=True, slots=True)
class Shampoo(MatrixOptimizer):
    """L += G Gᵀ; R += Gᵀ G; w -= lr·(L + εI)^(-1/4) G (R + εI)^(-1/4), with the roots made anew in every step.

    Gupta, Koren and Singer 2018 (arXiv:1802.09568), algorithm 1. Tensors that are no matrices take the diagonal form,
    elementwise: v += g·g; w -= lr·g/√(v + ε).
    """

    lr: float = 0.1
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        """Raises ValueError unless lr is finite and not negative and epsilon above 0."""
        require_at_least_zero(self, "lr")
        require_positive(self, "epsilon")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two factors of a matrix; the sum of squares of anything else."""
        if len(shape) != 2:
            return {"v": Slot(shape)}
        return {"left": Slot((shape[0], shape[0])), "right": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is none."""
        require_tensor(self, w, g, state, step)
        now = self.for_group(group)
        if w.ndim != 2:
            now._vector_step(ctx, w, g, state["v"])
            return
        factors = (state["left"], state["right"])
        roots = outer_products(ctx, g)
        for factor, root in zip(factors, roots, strict=True):
            ctx.kernels.accumulate(factor, root)
            ctx.symmetric_power(factor, -0.25, now.epsilon, root)
        subtract(ctx, w, between(ctx, roots[0], g, roots[1]), now.lr)

    def _vector_step(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, v: np.ndarray) -> None:
        def block(w: np.ndarray, v: np.ndarray, g: np.ndarray, change: np.ndarray, root: np.ndarray) -> None:
            np.multiply(g, g, out=change)
            np.add(v, change, out=v)
            np.add(v, self.epsilon, out=root)
            np.sqrt(root, out=root)
            np.multiply(g, self.lr, out=change)
            np.divide(change, root, out=change)
            np.subtract(w, change, out=w)

        ctx.kernels.step_blocks(block, w, v, g, scratch=2)


@dataclass(frozen=True, slots=True)
class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's factors, which is turned every ``every`` steps.

    G' = Qₗᵀ G Qᵣ; m = β1·m + (1-β1)·G; v = β2·v + (1-β2)·G'²; u = Qₗ (Qₗᵀ m̂ Qᵣ/(√v̂ + ε)) Qᵣᵀ;
    w = (1 - lr·weight_decay)·w - lr·u; then L = β2·L + (1-β2)·G Gᵀ, R alike, and Q = the orthogonal factor of L Q. The
    first step only begins L, R and Q, and leaves w alone: in its own gradient's basis that gradient is diagonal, and
    the rest of it rounding.
    Vyas et al. 2024 (arXiv:2409.11321), algorithm 3; the first step and the defaults as in its published code, without
    that code's sorting of eigenvectors. Tensors that are no matrices take AdamW, from the first step on.
    """

    lr: float = 3e-3
    beta1: float = 0.95
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    every: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of range."""
        require_at_least_zero(self, "lr", "epsilon", "weight_decay")
        require_decay_rate(self, "beta1", "beta2")
        require_count(self, "every")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """m and v; of a matrix two factors and their eigenvectors beside them."""
        own = {"m": Slot(shape), "v": Slot(shape)}
        if len(shape) != 2:
            return own
        left, right = Slot((shape[0], shape[0])), Slot((shape[1], shape[1]))
        return own | {"left": left, "right": right, "left_basis": left, "right_basis": right}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is none."""
        require_tensor(self, w, g, state, step)
        now = self.for_group(group)
        if w.ndim != 2:
            ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=now.lr, beta1=now.beta1, beta2=now.beta2,
                                  epsilon=now.epsilon, step=step, weight_decay=now.weight_decay)
            return
        if step > 1:
            now._adam_step(ctx, w, g, state, step - 1)
        now._turn(ctx, g, state, step)

    def _adam_step(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
        """Adam on the rotated gradient, and back; ``step`` counts those that moved w."""
        left, right, decay = state["left_basis"], state["right_basis"], 1.0 - self.lr * self.weight_decay
        turned = between(ctx, left.T, g, right)

        def average(m: np.ndarray, v: np.ndarray, g: np.ndarray, turned: np.ndarray, part: np.ndarray) -> None:
            move_average(m, g, self.beta1, part)
            move_square_average(v, turned, self.beta2, part)

        def divide(turned: np.ndarray, v: np.ndarray, root: np.ndarray) -> None:
            np.divide(v, 1.0 - self.beta2**step, out=root)
            np.sqrt(root, out=root)
            np.add(root, self.epsilon, out=root)
            np.divide(turned, 1.0 - self.beta1**step, out=turned)
            np.divide(turned, root, out=turned)

        ctx.kernels.step_blocks(average, state["m"], state["v"], g, turned)
        turned = between(ctx, left.T, state["m"], right)
        ctx.kernels.step_blocks(divide, turned, state["v"])
        if decay != 1.0:
            ctx.kernels.multiply_rounded(w, decay, w)
        subtract(ctx, w, between(ctx, left, turned, right.T), self.lr)

    def _turn(self, ctx: UpdateContext, g: np.ndarray, state: State, step: int) -> None:
        """Moves the factors, and the bases where it is their turn."""
        for side, product in zip(("left", "right"), outer_products(ctx, g), strict=True):
            factor, basis = state[side], state[f"{side}_basis"]
            move_factor(ctx, factor, product, self.beta2)
            if step == 1:
                ctx.eigenvectors(factor, basis)
            elif step % self.every == 0:
                ctx.matmul(factor, basis, product)
                ctx.orthogonal_factor(product, basis)


@dataclass(frozen=True, slots=True)
class KFAC(Optimizer):
    """w -= lr·(A + π√λ·I)⁻¹ G (B + √λ/π·I)⁻¹, A and B running means of the layer's factors.

    A (I, I) is that of its inputs, B (O, O) of the gradients of its outputs; λ is ``damping``, and
    π = √((trace(A)/I)/(trace(B)/O)).
    Martens and Grosse 2015 (arXiv:1503.05671): sections 3 and 4.2, the running means of section 5 (kept by
    min(1 - 1/step, decay)), the damping of section 6.3. Its step length and momentum (sections 6.4 and 7) are left out,
    since they need products with the exact Fisher matrix: ``lr`` and ``damping`` are fixed. The factors come in the
    context, from a linear layer that hands them over. Weights of such layers alone: biases, gains and embeddings are
    refused, and take another optimizer by a Group.
    """

    cut: ClassVar[Cut] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix", "input_factors"})
    lr: float = 0.1
    damping: float = 1e-2
    decay: float = 0.95

    def __post_init__(self) -> None:
        """Raises ValueError unless lr is finite and not negative, damping above 0 and decay in [0, 1)."""
        require_at_least_zero(self, "lr")
        require_positive(self, "damping")
        require_decay_rate(self, "decay")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The running factors of a weight (I, O); ValueError for a tensor that is no weight."""
        if len(shape) != 2:
            raise ValueError("KFAC updates the weights of linear layers, (inputs, outputs), and was asked for a tensor "
                             f"or a flat piece of one, of shape {shape}; it never updates part of a matrix. Take "
                             "layout='whole_matrices' for weights; give the others another optimizer by a Group")
        return {"inputs": Slot((shape[0], shape[0])), "outputs": Slot((shape[1], shape[1]))}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a weight w (I, O)."""
        require_tensor(self, w, g, state, step)
        now = self.for_group(group)
        kept = min(1.0 - 1.0 / step, now.decay)
        for name, factor in zip(("inputs", "outputs"), _factors_in(ctx, w), strict=True):
            move_factor(ctx, state[name], factor, kept)
        balance, root = _balance(ctx, state["inputs"], state["outputs"]), now.damping**0.5
        inputs, outputs = ctx.empty(state["inputs"].shape), ctx.empty(state["outputs"].shape)
        ctx.symmetric_power(state["inputs"], -1.0, root * balance, inputs)
        ctx.symmetric_power(state["outputs"], -1.0, root / balance, outputs)
        subtract(ctx, w, between(ctx, inputs, g, outputs), now.lr)


def _balance(ctx: UpdateContext, inputs: np.ndarray, outputs: np.ndarray) -> float:
    """π: the root of how much larger A's mean eigenvalue is than B's; 1 where one of them is 0 or not finite."""
    first, second = (ctx.kernels.trace(factor) / max(1, len(factor)) for factor in (inputs, outputs))
    return float((first / second)**0.5) if 0 < first < math.inf and 0 < second < math.inf else 1.0


def _factors_in(ctx: UpdateContext, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a context, for a weight (I, O); ValueError without them, and for those of another layer."""
    if ctx.factors is None:
        raise ValueError("KFAC.update needs the layer's factors, and found none in its context; an engine observes "
                         "them, or put them in UpdateContext(kernels, factors=(A, B))")
    found = tuple(factor.shape for factor in ctx.factors)
    wanted = ((w.shape[0], w.shape[0]), (w.shape[1], w.shape[1]))
    if found != wanted:
        raise ValueError(f"KFAC.update asked for factors of shapes {wanted} for a weight {w.shape}, and found {found}; "
                         "hand it those of the same layer, inputs first")
    return ctx.factors
