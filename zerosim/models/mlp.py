"""A multilayer perceptron of any depth: linear units, an activation after each but the last."""

import math
from collections.abc import Sequence
from itertools import pairwise

from zerosim.models.checks import require_integer, require_list
from zerosim.models.initializers import Initializer, Normal
from zerosim.models.losses import HalfSquaredError
from zerosim.models.units import LinearUnit, Model, require_activation
from zerosim.numerics.checks import is_count


class MLP(Model):
    """Linear units ``layer0``, ``layer1``, … from widths[i] to widths[i+1], and half the squared error.

    >>> MLP([4, 8, 2]).shapes
    {'layer0.weight': (4, 8), 'layer0.bias': (8,), 'layer1.weight': (8, 2), 'layer1.bias': (2,)}
    """

    def __init__(self, widths: Sequence[int], *, activation: str | None = "relu", bias: bool = True,
                 seed: int = 0) -> None:
        """Weights are normal of deviation 1/sqrt(inputs), by the seed and their name alone; biases are 0.

        Raises ValueError for fewer than two widths, for a width below 1, an unknown activation and a seed that is no
        whole number.
        """
        require_list("MLP", "widths", widths, 2, "MLP([4, 8, 2]): the width of the input and that of each layer")
        require_integer("MLP", seed=seed)
        require_activation("MLP", activation)  # also where no layer but the last would have it
        last = len(widths) - 2
        super().__init__([
            LinearUnit(f"layer{index}", inputs, outputs, activation if index < last else None, bias,
                       initializers=_initializers(seed, inputs), first=index == 0)
            for index, (inputs, outputs) in enumerate(pairwise(widths))], HalfSquaredError())


def _initializers(seed: int, inputs: int) -> dict[str, Initializer]:
    # LinearUnit refuses a width that is none, in words that name the layer; it must not spoil the root first.
    return {"weight": Normal(seed, 1 / math.sqrt(inputs))} if is_count(inputs) and inputs > 0 else {}
