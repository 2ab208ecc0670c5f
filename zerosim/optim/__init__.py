"""Optimizers: values that say what state they keep, how it may be cut, and what they need beside their shard."""

from typing import TYPE_CHECKING

from zerosim.face import face

if TYPE_CHECKING:
    from zerosim.optim.base import Optimizer, Slot, UpdateContext
    from zerosim.optim.elementwise import SGD, AdaGrad, Adam, AdamW, Adan, Lion, Momentum, RMSprop
    from zerosim.optim.matrix import KFAC, SOAP, Adafactor, Muon, Shampoo, orthogonalize
    from zerosim.optim.promises import Stateful, bytes_per_parameter, state_nbytes
    from zerosim.optim.schedules import Constant, Warmup, WarmupCosine
    from zerosim.optim.shardability import Shardability, check_shardable
    from zerosim.optim.stepper import Stepper
    from zerosim.optim.tensor_norms import LAMB, LARS, with_norms

__getattr__, __dir__ = face(__name__)
