"""What a training step holds and sends, predicted with pencil and paper; it never looks at a run."""

from zerosim.planning import activations, moments, transformer_flops
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

__all__ = [
    "ALGORITHMS",
    "LAYOUTS",
    "STAGES",
    "Job",
    "Sent",
    "States",
    "activations",
    "ceil_cut",
    "chunk_lengths",
    "clip",
    "gathers_by_unit",
    "gradient_peak_nbytes",
    "moments",
    "owned_ranges",
    "padded_unit_lengths",
    "region_cuts",
    "resting_nbytes",
    "sent",
    "sent_nbytes",
    "transformer_flops",
    "unit_cuts",
    "vectors_sent",
]
