"""The NumPy model that a grader hands to a rank: a stack of linear layers, to be called whole or layer by layer.

Legend: B rows of the batch, I and O widths of a layer.
"""

import math
from typing import Any

import numpy as np

from zerosim.models.layers import Context, Gradients
from zerosim.models.small import MLP
from zerosim.models.units import Unit
from zerosim.numerics.policy import Policy
from zerosim.ranks.rank import Rank

Array = np.ndarray
WIDTHS = (6, 7, 5, 8, 6, 7, 1)  # of layers that N does not divide, the last of fewer elements than 8 ranks


def model(seed: int) -> MLP:
    """The same model for the engine: ReLU between linear layers without biases, half the squared error."""
    return MLP(WIDTHS, bias=False, seed=seed)


class Module:
    """One rank's model in fp32. What it makes is in the rank's ledger until no name holds it.

    ``names`` are the parameters, one for each layer, first to last; ``shapes`` their shapes (I, O). ``parameters`` are
    the arrays by name, where the module was made whole, else an empty dict.
    """

    def __init__(self, rank: Rank, seed: int, *, whole: bool) -> None:
        self._rank, self._model = rank, model(seed)
        self.shapes = dict(self._model.shapes)
        self.names = tuple(self.shapes)
        self._units = dict(zip(self.names, self._model.units, strict=True))
        self._context = Context(rank.xp, Policy("fp32"), rank.kernels, rank.memory, rank.trace.compute, self._fresh)
        self.parameters = {name: self.initial(name) for name in self.names} if whole else {}

    def _fresh(self, unit: Unit) -> Gradients:
        return {name: self._rank.memory.alloc(shape, np.float32, "unit_gradient", name)
                for name, shape in unit.shapes.items()}

    def initial(self, name: str) -> Array:
        """A parameter's first values, (I, O) fp32, in a new array."""
        shape = self.shapes[name]
        found = self._rank.memory.alloc(shape, np.float32, "parameter", name)
        found[...] = self._units[name].initial(name, 0, math.prod(shape)).reshape(shape)
        return found

    def forward(self, name: str, weight: Array, x: Array) -> tuple[Array, Any]:
        """A layer: weight (I, O), x (B, I) -> y (B, O), and what its backward needs, in which no weight is."""
        return self._units[name].forward(self._context, {name: weight}, x)

    def backward(self, name: str, weight: Array, kept: Any, dy: Array) -> tuple[Array | None, Array]:
        """A layer: dy (B, O) -> dx (B, I), None for the first layer, and the gradient of its weight, (I, O)."""
        dx, gradients = self._units[name].backward(self._context, {name: weight}, kept, dy)
        return dx, gradients[name]

    def loss(self, y: Array, target: Array) -> tuple[float, Array]:
        """y and target (B, O) -> the mean loss of the batch, and its gradient dy (B, O)."""
        loss, kept = self._model.loss.forward(self._context, y, target)
        return loss, self._model.loss.backward(self._context, kept, 1.0)

    def forward_backward(self, x: Array, target: Array) -> tuple[float, dict[str, Array]]:
        """x (B, I), target (B, O) -> the loss, and the gradient of every parameter by name, this rank's own."""
        tape = []
        for name in self.names:
            x, kept = self.forward(name, self.parameters[name], x)
            tape.append(kept)
        loss, dy = self.loss(x, target)
        gradients: dict[str, Array] = {}
        for name in reversed(self.names):
            before, gradients[name] = self.backward(name, self.parameters[name], tape.pop(), dy)
            dy = dy if before is None else before
        return loss, gradients
