"""ZeRO: where parameters, gradients and optimizer state rest, and how a training step moves them."""

from zerosim.zero.engine import Engine
from zerosim.zero.groups import Group
from zerosim.zero.layout import Layout
from zerosim.zero.layouts import layout_of
from zerosim.zero.placements import PARTIAL, REPLICATED, SHARDED, STAGES, Placement, Stage, redistribute
from zerosim.zero.update import StepResult

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "SHARDED",
    "STAGES",
    "Engine",
    "Group",
    "Layout",
    "Placement",
    "Stage",
    "StepResult",
    "layout_of",
    "redistribute",
]
