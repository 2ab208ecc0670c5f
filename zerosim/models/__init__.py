"""Models as lists of units, layers as pairs of pure functions, and the policies of what is computed twice."""

from zerosim.models.context import Context
from zerosim.models.cross_entropy import CrossEntropy
from zerosim.models.four_weights import four_weights
from zerosim.models.gpt import GPT
from zerosim.models.gpt_config import PRESETS, GPTConfig
from zerosim.models.losses import HalfSquaredError, Loss
from zerosim.models.mlp import MLP
from zerosim.models.one_pass import Pass, first_weights, one_pass
from zerosim.models.recompute import BLOCK, NONE, Recompute, segment
from zerosim.models.units import LinearUnit, Model, Unit

__all__ = ["BLOCK", "GPT", "MLP", "NONE", "PRESETS", "Context", "CrossEntropy", "GPTConfig", "HalfSquaredError",
           "LinearUnit", "Loss", "Model", "Pass", "Recompute", "Unit", "first_weights",
           "four_weights", "one_pass", "segment"]
