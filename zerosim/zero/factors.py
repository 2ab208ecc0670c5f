"""The factors that K-FAC needs of each layer: added up over micro-batches beside the gradients, and reduced over ranks.

Legend: N ranks; M rows (samples, or tokens) of a micro-batch, I inputs and O outputs of a layer; S loss scale.
"""

import math

import numpy as np

from zerosim.numerics.loss_scale import LossScaler
from zerosim.ranks.rank import Rank
from zerosim.zero.gradients import Observer

Factors = tuple[np.ndarray, np.ndarray]  # of a layer: A (I, I) of its inputs, G (O, O) of its output gradients
LARGEST_POWER = 32  # of S, whose square fp32's products still hold with room for gradients


def empty_factor(rank: Rank, n: int, weight: str) -> np.ndarray:
    """Memory for a factor (n, n) of a weight."""
    return rank.memory.alloc((n, n), np.float32, "workspace", f"factor of {weight}")


class FactorObserver(Observer):
    """The factors A and G of one rank's layers (K-FAC); ``wanted`` names the weights that are updated with them.

    A is the mean over rows of x xᵀ, G that of g gᵀ, with g the gradient of a row's own loss with respect to the layer's
    output: backward hands over dy = S·g/M, or S·g/(M·f) where the loss is the mean over the share f of places that have
    a target; g is 0 in the others. Source: Martens & Grosse 2015 (arXiv:1503.05671), section 3.
    """

    def __init__(self, rank: Rank, wanted: frozenset[str], loss_scale: LossScaler) -> None:
        super().__init__()
        self.rank, self.wanted, self.loss_scale = rank, wanted, loss_scale

    def observe(self, weight: str, x: np.ndarray, dy: np.ndarray) -> None:
        """Adds the products of one micro-batch: x (M, I), dy (M, O)."""
        if weight not in self.wanted:
            return
        rows = x.shape[0]
        dy, scale = self._within_range(dy)
        products = (self._product(x, weight), self._product(dy, weight))
        self.rank.kernels.multiply_rounded(products[0], 1 / rows, products[0])
        # S = 0 gives inf: the step is skipped, as its gradients are no numbers
        factor = rows * self.share**2 / scale**2 if scale**2 else math.inf
        self.rank.kernels.multiply_rounded(products[1], factor, products[1])
        for total, product in zip(self.sums.get(weight, ()), products, strict=False):
            self.rank.kernels.add_rounded(total, product, product)
        self.sums[weight] = products
        self.rows[weight] = self.rows.get(weight, 0) + 1

    def _within_range(self, dy: np.ndarray) -> tuple[np.ndarray, float]:
        """dy and its scale S; both divided by a power of two where S² would come near the ends of fp32's range."""
        scale = self.loss_scale.scale
        power = math.frexp(scale)[1] - 1
        if abs(power) <= LARGEST_POWER:
            return dy, scale
        out = self.rank.kernels.scratch("scaled output gradients", dy.size, np.float32).reshape(dy.shape)
        self.rank.kernels.divide_rounded(dy, math.ldexp(1.0, power), out)
        return out, math.ldexp(scale, -power)

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        out = empty_factor(self.rank, x.shape[1], name)
        self.rank.kernels.matmul(x.T, x, out=out)
        return out

    def averaged(self) -> dict[str, Factors]:
        """The means over ranks and micro-batches, by weight: two all-reduces each, under the purpose "state"."""
        found = {}
        for weight, factors in self.sums.items():
            for factor in factors:
                self.rank.all_reduce(factor, out=factor, purpose="state")
                self.rank.kernels.divide_rounded(factor, self.rank.size * self.rows[weight], factor)
            found[weight] = factors
        self.abandon()
        return found

    def abandon(self) -> None:
        """Drops what was observed."""
        self.sums, self.rows = {}, {}
