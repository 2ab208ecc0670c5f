"""The worked example: four weights in two layers, small enough to follow by hand.

h = w1·x1 + w2·x2; a = relu(h); y = w3·a + w4; loss = ½(y - t)².
"""

from collections.abc import Sequence

from zerosim.models.checks import require_list
from zerosim.models.initializers import Constants
from zerosim.models.losses import HalfSquaredError
from zerosim.models.units import LinearUnit, Model
from zerosim.numerics.checks import is_number


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
