"""Two small models: a multilayer perceptron of any depth, and the four weights of the worked example."""

from collections.abc import Sequence
from itertools import pairwise

from zerosim.models.initializers import Constants
from zerosim.models.losses import HalfSquaredError
from zerosim.models.units import LinearUnit, Model, require_activation
from zerosim.numerics.checks import is_number, require_integers, require_list


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
        require_integers("MLP", seed=seed)
        require_activation("MLP", activation)  # also where no layer but the last would have it
        last = len(widths) - 2
        super().__init__([
            LinearUnit(f"layer{index}", inputs, outputs, activation if index < last else None, bias,
                       first=index == 0, seed=seed)
            for index, (inputs, outputs) in enumerate(pairwise(widths))], HalfSquaredError())


# -- The worked example ------------------------------------------------------------------------------------------------
# h = w1·x1 + w2·x2; a = relu(h); y = w3·a + w4; loss = ½(y - t)².

def four_weights(weights: Sequence[float] = (2.0, -3.0, 1.0, 0.5)) -> Model:
    """Units ``layer1`` (weight (2, 1): w1, w2; ReLU) and ``layer2`` (weight (1, 1): w3, bias (1,): w4).

    ``weights`` are the first values of w1, w2, w3, w4, the order of the flat vector. Raises ValueError unless
    there are four.
    """
    require_list("four_weights", "weights", weights, 4, "four_weights([2.0, -3.0, 1.0, 0.5]): w1, w2, w3, w4")
    if len(weights) > 4 or not all(map(is_number, weights)):
        raise ValueError(f"four_weights was given {weights!r}; it takes four numbers: w1, w2, w3, w4")
    w1, w2, w3, w4 = map(float, weights)
    first = {"weight": Constants((w1, w2))}
    second = {"weight": Constants((w3,)), "bias": Constants((w4,))}
    return Model([LinearUnit("layer1", 2, 1, "relu", bias=False, initializers=first, first=True),
                  LinearUnit("layer2", 1, 1, initializers=second)], HalfSquaredError())
