"""Optimizers as users write them, and mistakes in them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zerosim.optim import Optimizer, Slot


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
class Rateless(Optimizer):
    """A user's own class that has no lr."""

    cut: ClassVar[str] = "anywhere"

    def slots(self, shape):
        return {}

    def update(self, ctx, w, g, state, step):
        w -= g


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
