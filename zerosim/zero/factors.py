"""Factors of inputs and output gradients (K-FAC): observed layer by layer, averaged over ranks.

Legend: M rows (samples, or tokens) of a micro-batch, I inputs, O outputs; N ranks, k micro-batches; S loss scale.
A = mean over rows of x xᵀ (I, I); G = mean over rows of g gᵀ (O, O), g the gradient of a row's own loss with respect to
the layer's output: backward hands over dy = S·g/M, or S·g/(M·f) where the loss is the mean over the share f of places
that have a target; g is 0 in the others. Source: Martens & Grosse 2015 (arXiv:1503.05671), section 3.
"""

import math

import numpy as np

from zerosim.numerics.loss_scale import LossScaler
from zerosim.ranks.rank import Rank

Factors = tuple[np.ndarray, np.ndarray]
_LARGEST_POWER = 32  # of S, whose square fp32's products still hold with room for gradients


class Observer:
    """The factors of one rank's layers; ``wanted`` names the weights that are updated with them."""

    def __init__(self, rank: Rank, wanted: frozenset[str], loss_scale: LossScaler) -> None:
        self.rank, self.wanted, self.loss_scale = rank, wanted, loss_scale
        self.share = 1.0  # f, of the micro-batch that goes back
        self._sums: dict[str, Factors] = {}
        self._rows: dict[str, int] = {}

    def observe(self, weight: str, x: np.ndarray, dy: np.ndarray) -> None:
        """Adds the products of one micro-batch: x (M, I), dy (M, O)."""
        if weight not in self.wanted:
            return
        rows = x.shape[0]
        dy, scale = self._within_range(dy)
        products = (self._product(x, weight), self._product(dy, weight))
        self.rank.kernels.multiply_rounded(products[0], 1 / rows, products[0])
        self.rank.kernels.multiply_rounded(products[1], _over(rows * self.share**2, scale**2), products[1])
        for total, product in zip(self._sums.get(weight, ()), products, strict=False):
            self.rank.kernels.add_rounded(total, product, product)
        self._sums[weight] = products
        self._rows[weight] = self._rows.get(weight, 0) + 1

    def _within_range(self, dy: np.ndarray) -> tuple[np.ndarray, float]:
        """dy and its scale S; both divided by a power of two where S² would come near the ends of fp32's range."""
        scale = self.loss_scale.scale
        power = math.frexp(scale)[1] - 1
        if abs(power) <= _LARGEST_POWER:
            return dy, scale
        out = self.rank.kernels.scratch("scaled output gradients", dy.size, np.float32).reshape(dy.shape)
        self.rank.kernels.divide_rounded(dy, math.ldexp(1.0, power), out)
        return out, math.ldexp(scale, -power)

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        out = self.rank.memory.alloc((x.shape[1], x.shape[1]), np.float32, "workspace", f"factor of {name}")
        self.rank.kernels.matmul(x.T, x, out=out)
        return out

    def averaged(self) -> dict[str, Factors]:
        """The means over ranks and micro-batches, by weight: two all-reduces each, under the purpose "state"."""
        found = {}
        for weight, factors in self._sums.items():
            for factor in factors:
                self.rank.all_reduce(factor, out=factor, purpose="state")
                self.rank.kernels.divide_rounded(factor, self.rank.size * self._rows[weight], factor)
            found[weight] = factors
        self.forget()
        return found

    def forget(self) -> None:
        """Drops what was observed."""
        self._sums, self._rows = {}, {}


def _over(rows: float, square: float) -> float:
    """rows/S²; inf where S has come to 0: the step is skipped, as its gradients are no numbers."""
    return rows / square if square else math.inf
