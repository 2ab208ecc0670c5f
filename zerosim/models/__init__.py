"""Models as lists of units, layers as pairs of pure functions, and the policies of what is computed twice."""

from zerosim.models.context import Context
from zerosim.models.four_weights import four_weights
from zerosim.models.losses import HalfSquaredError, Loss
from zerosim.models.mlp import MLP
from zerosim.models.recompute import BLOCK, NONE, Recompute, segment
from zerosim.models.units import LinearUnit, Model, Unit

__all__ = ["BLOCK", "MLP", "NONE", "Context", "HalfSquaredError", "LinearUnit", "Loss", "Model", "Recompute",
           "Unit", "four_weights", "segment"]
