"""Optimizers of whole matrices, and of whole tensors: what they do to one element depends on all the others.

Legend: a matrix W (R, C). Tensors of other than two dimensions are no matrices, and each optimizer says what it does
with them. No optimizer here updates part of a matrix: it refuses flat pieces of one.
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
    require_tensor,
    require_update,
)
from zerosim.optim.newton_schulz import COEFFICIENTS, orthogonalized


@dataclass(frozen=True, slots=True)
class Muon(Optimizer):
    """b = momentum·b + g; w -= lr·√max(1, R/C)·O, O the momentum (Nesterov's, if asked) orthogonalized.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers". ``iteration`` is "quintic", as published, or "cubic".
    Tensors that are no matrices take Adam with ``vector_lr``, as in practice; so should embeddings and the head, by a
    Group.
    """

    cut: ClassVar[Cut] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_matrix"})
    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    iteration: str = "quintic"
    iterations: int = 5
    weight_decay: float = 0.0
    vector_lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        """Raises ValueError for numbers out of range and for an iteration that there is not."""
        require_at_least_zero(self, "lr", "weight_decay", "vector_lr", "epsilon", "iterations")
        require_decay_rate(self, "momentum", "beta1", "beta2")
        if self.iteration not in COEFFICIENTS:
            raise ValueError(f"Muon was given iteration={self.iteration!r}; choose one of {', '.join(COEFFICIENTS)}")

    def cut_of(self, shape: tuple[int, ...]) -> Cut:
        """A matrix only whole, anything else anywhere."""
        return "matrix" if len(shape) == 2 else "anywhere"

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b of a matrix; Adam's m and v of anything else."""
        return {"b": Slot(shape)} if len(shape) == 2 else {"m": Slot(shape), "v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a matrix w (R, C), or on a piece (n,) of a vector."""
        now = self.for_group(group)
        if "b" not in state:
            require_update(self, w, g, state, step)
            ctx.kernels.adam_step(w, state["m"], state["v"], g, lr=now.vector_lr * now.lr / self.lr if self.lr else 0.0,
                                  beta1=now.beta1, beta2=now.beta2, epsilon=now.epsilon, step=step)
            return
        require_tensor(self, w, g, state, step)
        b = state["b"]
        b *= np.float32(now.momentum)
        b += g
        moved = g + np.float32(now.momentum) * b if now.nesterov else b
        direction = orthogonalized(ctx.kernels, moved, now.iterations, now.iteration)
        direction *= np.float32(now.lr * max(1.0, w.shape[0] / w.shape[1])**0.5)
        if now.weight_decay:
            w *= np.float32(1 - now.lr * now.weight_decay)
        w -= direction


@dataclass(frozen=True, slots=True)
class Adafactor(Optimizer):
    """Adam's second moment as a row of means and a column of means, and an update of bounded RMS.

    β = 1 - step^(-decay); rows = β·rows + (1-β)·mean_C(g² + ε₁), columns alike over R; V = rows·columns/mean(rows);
    u = g/√V, divided by max(1, RMS(u)/threshold); w -= lr·max(ε₂, RMS(w))·u. Vectors keep V itself.
    Shazeer & Stern 2018 (arXiv:1804.04235), algorithms 4 and 5, without momentum.
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
        require_at_least_zero(self, "lr", "decay", "threshold", "epsilon1", "epsilon2")
        if not self.threshold:
            raise ValueError("Adafactor was given threshold=0; updates are divided by it, so take 1.0")

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """A mean for each row and for each column of a matrix; one for each element of anything else."""
        if len(shape) == 2:
            return {"rows": Slot(shape[:1]), "columns": Slot(shape[1:])}
        return {"v": Slot(shape)}

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int,
               group: Group | None = None) -> None:
        """One step on a whole tensor."""
        require_tensor(self, w, g, state, step)
        now = self.for_group(group)
        kept = 1 - step**-now.decay
        squares = g * g
        squares += np.float32(now.epsilon1)
        if w.ndim == 2:
            for name, mean in (("rows", squares.mean(axis=1)), ("columns", squares.mean(axis=0))):
                state[name][...] = np.float32(kept) * state[name] + np.float32(1 - kept) * mean
            v = state["rows"][:, None] * (state["columns"] / state["rows"].mean())[None, :]
        else:
            state["v"][...] = np.float32(kept) * state["v"] + np.float32(1 - kept) * squares
            v = state["v"]
        u = g / np.sqrt(v)
        u *= np.float32(now.lr * max(now.epsilon2, _rms(w)) / max(1.0, _rms(u) / now.threshold))
        w -= u


def _rms(x: np.ndarray) -> float:
    """The root of the mean square, added up in float64; 0 for no elements."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0
