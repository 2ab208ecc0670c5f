"""Optimizers of the tests' own, each with one need that elementwise ones do not have."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import zerosim as zs
from zerosim.optim import Optimizer, Slot


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
        norm = np.sqrt((state["m"] * state["m"]).sum()) or np.float32(1)  # of a matrix that had no gradient
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


class Plain(Optimizer):
    """A user's own class, without a dataclass's conveniences."""

    cut: ClassVar[str] = "anywhere"

    def __init__(self, lr=0.1):
        self.lr = lr

    def slots(self, shape):
        return {"m": Slot(shape)}

    def update(self, ctx, w, g, state, step):
        state["m"] += g
        w -= np.float32(self.lr) * state["m"]


@dataclass(frozen=True)
class OwnSGD(Optimizer):
    """A user's own class: its update reads the lr that it has."""

    cut: ClassVar[str] = "anywhere"
    lr: float = 0.1

    def slots(self, shape):
        return {}

    def update(self, ctx, w, g, state, step):
        w -= np.float32(self.lr) * g


@dataclass(frozen=True)
class Shapeless(OwnSGD):
    """Says that it may be cut anywhere, and keeps a number for each row."""

    def slots(self, shape):
        return {"rows": Slot(shape[:1])}


class Uncut(Plain):
    """Does not say where it may be cut."""

    cut = None


class Normed(zs.optim.SGD):
    """Needs norms, and does not say of what."""

    needs = frozenset({"tensor_norm"})
