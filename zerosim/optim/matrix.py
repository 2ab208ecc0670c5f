"""Optimizers of whole matrices, and of whole tensors: what they do to one element depends on all the others.

Legend: a matrix W (I, O), inputs by outputs as a linear layer has it; n elements of a piece. None updates part of a
matrix: a flat piece of one is refused. Workspace comes from the context, so that a ledger knows of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.numerics.step_kernels import move_average
from zerosim.optim.base import Cut, Group, Optimizer, Slot, State, UpdateContext
from zerosim.optim.checks import (
    require_at_least_zero,
    require_count,
    require_decay_rate,
    require_flag,
    require_positive,
    require_tensor,
)
from zerosim.optim.newton_schulz import COEFFICIENTS, orthogonalize


class MatrixOptimizer(Optimizer):
    """An optimizer that needs matrices whole, and takes any other tensor element by element."""

    __slots__ = ()
    cut: ClassVar[Cut] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """A tensor of two dimensions only whole, any other anywhere."""
        return "matrix" if len(shape) == 2 else "anywhere"


@dataclass(frozen=True, slots=True)
class Muon(MatrixOptimizer):
    """b = momentum·b + g; w = (1 - lr·weight_decay)·w - lr·√max(1, O/I)·U, U being b made orthogonal, or, with
    Nesterov's look ahead, g + momentum·b made orthogonal.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", and its code. ``iteration`` is
    "quintic", as published, or "cubic", the classical one that converges. As in practice tensors that are no matrices
    take AdamW, with ``vector_lr`` (what changes lr for a step, as a schedule does, changes it in proportion), beta1,
    beta2 and epsilon; embeddings and the head, matrices but no hidden layers, should be given AdamW by a Group.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    iteration: str = "quintic"
    iterations: int = 5
    weight_decay: float = 0.0
    vector_lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of range and for an iteration that there is not."""
        require_at_least_zero(self, "lr", "weight_decay", "vector_lr", "epsilon")
        require_decay_rate(self, "momentum", "beta1", "beta2")
        require_flag(self, "nesterov")
        require_count(self, "iterations")
        if self.iteration not in COEFFICIENTS:
            raise ValueError(f"Muon was given iteration={self.iteration!r}; choose one of {', '.join(COEFFICIENTS)}")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b of a matrix; AdamW's m and v of anything else."""
        return {"b": Slot(shape)} if len(shape) == 2 else {"m": Slot(shape), "v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (I, O), or on a piece w (n,) of a tensor that is none."""
        require_tensor(self, w, g, state, step)
        now = self.for_group(group)
        if w.ndim != 2:
            lr = now.vector_lr * (now.lr / self.lr) if self.lr else 0.0
            ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=lr, beta1=now.beta1, beta2=now.beta2,
                                  epsilon=now.epsilon, step=step, weight_decay=now.weight_decay)
        elif w.size:
            now._matrix_step(ctx, w, g, state["b"])

    def _matrix_step(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, b: np.ndarray) -> None:
        moved = ctx.empty(w.shape)
        rate, decay = self.lr * max(1.0, w.shape[1] / w.shape[0])**0.5, 1.0 - self.lr * self.weight_decay

        def look(b: np.ndarray, g: np.ndarray, moved: np.ndarray) -> None:
            np.multiply(b, self.momentum, out=b)
            np.add(b, g, out=b)
            np.multiply(b, self.momentum if self.nesterov else 1.0, out=moved)
            if self.nesterov:
                np.add(moved, g, out=moved)

        def move(w: np.ndarray, moved: np.ndarray) -> None:
            np.multiply(moved, rate, out=moved)
            if decay != 1.0:
                np.multiply(w, decay, out=w)
            np.subtract(w, moved, out=w)

        ctx.kernels.step_blocks(look, b, g, moved, scratch=0)
        orthogonalize(ctx, moved, self.iteration, self.iterations)
        ctx.kernels.step_blocks(move, w, moved, scratch=0)


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adam's second moment as a mean for each row and one for each column, and an update of bounded size.

    β = 1 - step^(-decay); rows = β·rows + (1-β)·(mean of g² along the row + ε₁), columns alike; u = g/√V with
    V = rows·columns/mean(rows); w -= α·u/max(1, RMS(u)/threshold), α = max(ε₂, RMS(w))·min(lr, 1/√step). Tensors that
    are no matrices keep V itself, and are needed whole too, since RMS is a tensor's.
    Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 and 5 with section 8's step sizes, without momentum.
    """

    cut: ClassVar[Cut] = "tensor"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})
    lr: float = 1e-2
    decay: float = 0.8
    threshold: float = 1.0
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3

    def __post_init__(self) -> None:
        """Raises ValueError unless all are finite and not negative and the threshold positive."""
        require_at_least_zero(self, "lr", "decay", "epsilon1", "epsilon2")
        require_positive(self, "threshold")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """A mean for each row and for each column of a matrix; one for each element of anything else."""
        return {"rows": Slot(shape[:1]), "columns": Slot(shape[1:])} if len(shape) == 2 else {"v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a whole tensor w, in its own shape."""
        require_tensor(self, w, g, state, step)
        if not w.size:
            return
        now, u = self.for_group(group), ctx.empty(w.shape)
        (now._matrix_direction if w.ndim == 2 else now._vector_direction)(ctx, g, state, step, u)
        alpha = min(now.lr, step**-0.5) * max(now.epsilon2, _rms(ctx, w))
        alpha /= max(1.0, _rms(ctx, u) / now.threshold)

        def move(w: np.ndarray, u: np.ndarray) -> None:
            np.multiply(u, alpha, out=u)
            np.subtract(w, u, out=w)

        ctx.kernels.step_blocks(move, w, u, scratch=0)

    def _matrix_direction(self, ctx: UpdateContext, g: np.ndarray, state: State, step: int, u: np.ndarray) -> None:
        """Moves the means and writes g/√V."""
        means = {name: ctx.empty(state[name].shape) for name in ("rows", "columns")}
        ctx.kernels.mean_squares(g, means["rows"], means["columns"])
        for name, mean in means.items():
            ctx.kernels.step_blocks(self._move_mean(step), state[name], mean)
        ctx.kernels.divide_by_roots(g, state["rows"], state["columns"], u)

    def _vector_direction(self, ctx: UpdateContext, g: np.ndarray, state: State, step: int, u: np.ndarray) -> None:
        """Moves V and writes g/√V."""
        move_mean = self._move_mean(step)

        def block(v: np.ndarray, g: np.ndarray, u: np.ndarray, part: np.ndarray) -> None:
            np.multiply(g, g, out=u)
            move_mean(v, u, part)
            np.sqrt(v, out=part)
            np.divide(g, part, out=u)

        ctx.kernels.step_blocks(block, state["v"], g, u)

    def _move_mean(self, step: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
        """mean = β·mean + (1-β)·(squares + ε₁); the squares are overwritten."""
        beta = 1.0 - step**-self.decay

        def block(mean: np.ndarray, squares: np.ndarray, part: np.ndarray) -> None:
            np.add(squares, self.epsilon1, out=squares)
            move_average(mean, squares, beta, part)

        return block


def _rms(ctx: UpdateContext, x: np.ndarray) -> float:
    """The root of the mean square, added up in float64."""
    return float((ctx.kernels.sum_of_squares(x) / x.size)**0.5)
