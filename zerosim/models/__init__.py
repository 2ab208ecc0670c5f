"""Models as lists of units, layers as pairs of pure functions, and the policies of what is computed twice."""

from typing import TYPE_CHECKING

from zerosim.face import face

if TYPE_CHECKING:
    from zerosim.models import autodiff
    from zerosim.models.gpt import GPT, PRESETS, Decoder, GPTConfig, generate, logits_of
    from zerosim.models.initializers import Constants, Filled, Normal
    from zerosim.models.layers import Context
    from zerosim.models.llama import Llama, LlamaConfig, decoder
    from zerosim.models.losses import CrossEntropy, HalfSquaredError, Loss
    from zerosim.models.model_types import from_hugging_face
    from zerosim.models.passes import Pass, first_weights, one_pass
    from zerosim.models.rotary import LinearScaling, Llama3Scaling
    from zerosim.models.small import MLP, four_weights
    from zerosim.models.units import LinearUnit, Model, Recompute, Unit

__getattr__, __dir__ = face(__name__)
