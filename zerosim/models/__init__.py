"""Models as lists of units, layers as pairs of pure functions, and the policies of what is computed twice."""

from zerosim.models.gpt import GPT, PRESETS, GPTConfig
from zerosim.models.layers import Context
from zerosim.models.losses import CrossEntropy, HalfSquaredError, Loss
from zerosim.models.small import MLP, four_weights
from zerosim.models.units import BLOCK, NONE, LinearUnit, Model, Pass, Recompute, Unit, first_weights, one_pass, segment

__all__ = ["BLOCK", "GPT", "MLP", "NONE", "PRESETS", "Context", "CrossEntropy", "GPTConfig", "HalfSquaredError",
           "LinearUnit", "Loss", "Model", "Pass", "Recompute", "Unit", "first_weights",
           "four_weights", "one_pass", "segment"]
