"""Optimizers: values that say what state they keep and update flat fp32 shards in place."""

from zerosim.optim.base import Optimizer, Slot, UpdateContext
from zerosim.optim.elementwise import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "Slot", "UpdateContext"]
