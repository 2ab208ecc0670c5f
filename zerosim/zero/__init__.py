"""ZeRO: where parameters, gradients and optimizer state rest, and how a training step moves them."""

from typing import TYPE_CHECKING

from zerosim.face import face

if TYPE_CHECKING:
    from zerosim.numerics.quantization import ZeroPlusPlus
    from zerosim.zero.checkpoint import CheckpointError, Restored
    from zerosim.zero.engine import Engine
    from zerosim.zero.hugging_face import export_weights
    from zerosim.zero.layout import Layout, lay_out, layout_of
    from zerosim.zero.offload import OffloadError, ScratchFile
    from zerosim.zero.param_group import Group, ParamGroup
    from zerosim.zero.placements import PARTIAL, REPLICATED, SHARDED, STAGES, Placement, Stage, redistribute
    from zerosim.zero.skipped import NonFiniteGradients, SkippedStepWarning
    from zerosim.zero.update import StepResult

__getattr__, __dir__ = face(__name__)
