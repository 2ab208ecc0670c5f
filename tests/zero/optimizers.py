"""Optimizers of the tests' own, each with one need that elementwise ones do not have."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.optim.base import Optimizer, Slot


@dataclass(frozen=True, slots=True)
class Spectral(Optimizer):
    """Needs whole matrices: m += g; rows += Σ_columns g²; w -= lr·m/‖m‖/√(1 + rows). Vectors take w -= lr·g."""

    cut: ClassVar[str] = "matrix"
    lr: float = 0.1

    def cut_of(self, shape):
        return "matrix" if len(shape) == 2 else "anywhere"

    def slots(self, shape):
        return {"m": Slot(shape), "rows": Slot(shape[:1])} if len(shape) == 2 else {}

    def update(self, ctx, w, g, state, step):
        lr = self.lr
        if not state:
            w -= np.float32(lr) * g
            return
        assert w.ndim == 2, "a matrix optimizer is never handed part of a matrix"
        state["m"] += g
        state["rows"] += (g * g).sum(1)
        norm = np.sqrt((state["m"] * state["m"]).sum())
        w -= np.float32(lr) * state["m"] / norm / np.sqrt(1 + state["rows"])[:, None]


@dataclass(frozen=True, slots=True)
class Trusting(Optimizer):
    """Needs norms of whole tensors: m = m/2 + g; w -= lr·(‖w‖/‖m + w/8‖)·(m + w/8)."""

    cut: ClassVar[str] = "anywhere"
    needs: ClassVar[frozenset[str]] = frozenset({"tensor_norm"})
    lr: float = 0.1

    def slots(self, shape):
        return {"m": Slot(shape)}

    def advance(self, ctx, w, g, state, step):
        state["m"][...] = state["m"] * np.float32(0.5) + g

    def direction(self, ctx, w, g, state, step, out):
        out[...] = state["m"] + w * np.float32(0.125)

    def update(self, ctx, w, g, state, step):
        weights, direction = ctx.norms
        ratio = np.float32(self.lr * (weights / direction if weights and direction else 1.0))
        w -= ratio * (state["m"] + w * np.float32(0.125))


@dataclass(frozen=True, slots=True)
class Factored(Optimizer):
    """Needs factors: w -= lr·g/(1 + mean(A))/(1 + mean(G))."""

    cut: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset({"input_factors"})
    lr: float = 0.1

    def slots(self, shape):
        return {}

    def update(self, ctx, w, g, state, step):
        inputs, outputs = ctx.factors
        assert (len(inputs), len(outputs)) == w.shape
        w -= np.float32(self.lr) * g / (1 + inputs.mean()) / (1 + outputs.mean())
