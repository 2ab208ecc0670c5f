"""What a case hands to a rank: fresh copies, charged to its ledger."""

from collections.abc import Callable, Sequence

import numpy as np

from zerosim.course.puzzles.oracle import Array
from zerosim.ranks.rank import Rank


def lent(rank: Rank, x: Array, kind: str = "input", name: str = "") -> Array:
    """A copy of ``x`` in the rank's memory."""
    copy = rank.memory.alloc(x.shape, x.dtype, kind, name)
    copy[...] = x
    return copy


def vector_of(vectors: Sequence[Array], kind: str = "input") -> Callable[[Rank], tuple[Array]]:
    """The arguments of a puzzle that hands each rank one vector of its own."""
    return lambda rank: (lent(rank, vectors[rank.index], kind),)


class Backward:
    """A backward pass to be called layer by layer: ``gradient_of(layer)`` computes and charges a layer's gradient.

    It goes from the last layer to the first, each once; ValueError otherwise. ``gradients[layer]`` are (n_l,).
    """

    def __init__(self, rank: Rank, gradients: Sequence[Array]) -> None:
        self._rank, self._gradients, self._next = rank, gradients, len(gradients) - 1

    def __call__(self, layer: int) -> Array:
        """The gradient of a layer's weights, (n_l,)."""
        if layer != self._next:
            raise ValueError(f"backward was asked for layer {layer} where layer {self._next} is next: it goes from the "
                             "last layer to the first, each once")
        self._next -= 1
        gradient = self._gradients[layer]
        self._rank.trace.compute(flops=4 * gradient.size, nbytes=3 * gradient.nbytes)
        return lent(self._rank, gradient, "unit_gradient", f"layer {layer}")


class Scaling:
    """A layer of the simplest kind, y = w·x by element; what it makes is charged. Arrays are (n,)."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def forward(self, w: Array, x: Array) -> Array:
        """y = w·x."""
        return self._product(w, x, "activation")

    def backward(self, w: Array, x: Array, dy: Array) -> tuple[Array, Array]:
        """(dx, dw) = (w·dy, x·dy)."""
        return self._product(w, dy, "activation_gradient"), self._product(x, dy, "unit_gradient")

    def _product(self, a: Array, b: Array, kind: str) -> Array:
        out = self._rank.memory.alloc(a.shape, a.dtype, kind)
        self._rank.trace.compute(flops=a.size, nbytes=3 * a.nbytes)
        np.multiply(a, b, out=out)
        return out
