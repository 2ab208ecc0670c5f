"""What a training step holds and sends, predicted with pencil and paper; it never looks at a run."""

from zerosim.planning import activations, activations_published, buffers, model_flops, moments, transformer_flops
from zerosim.planning.closed_forms import (
    STAGES,
    Job,
    States,
    gathers_by_unit,
    gradient_peak_nbytes,
    resting_nbytes,
    sent_nbytes,
    vectors_sent,
)
from zerosim.planning.collectives import ALGORITHMS, Sent, sent
from zerosim.planning.cuts import (
    LAYOUTS,
    ceil_cut,
    chunk_lengths,
    clip,
    owned_ranges,
    padded_unit_lengths,
    region_cuts,
    unit_cuts,
)
from zerosim.planning.dialects import DIALECTS, Dialect, estimate_nbytes, formula, states_nbytes
from zerosim.planning.shapes import ModelShape, Transformer, model_of, model_of_parameters
from zerosim.planning.shapes_config import model_shape
from zerosim.planning.shapes_presets import PRESETS

__all__ = [
    "ALGORITHMS",
    "DIALECTS",
    "LAYOUTS",
    "PRESETS",
    "STAGES",
    "Dialect",
    "Job",
    "ModelShape",
    "Sent",
    "States",
    "Transformer",
    "activations",
    "activations_published",
    "buffers",
    "ceil_cut",
    "chunk_lengths",
    "clip",
    "estimate_nbytes",
    "formula",
    "gathers_by_unit",
    "gradient_peak_nbytes",
    "model_flops",
    "model_of",
    "model_of_parameters",
    "model_shape",
    "moments",
    "owned_ranges",
    "padded_unit_lengths",
    "region_cuts",
    "resting_nbytes",
    "sent",
    "sent_nbytes",
    "states_nbytes",
    "transformer_flops",
    "unit_cuts",
    "vectors_sent",
]
