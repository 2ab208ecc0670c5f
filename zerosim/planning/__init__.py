"""What a training step holds, sends and takes, predicted with pencil and paper; of a run it sees a recording at most.

`zerosim.plan` asks for a plan. The parts of one are modules: `activations`, `moments`, `buffers`, `model_flops` and
`transformer_flops` reckon; `program` is a step in the engine's order, of which `passing` reads the bytes and `clock`
the seconds; `hardware` knows devices and links, `cost` the seconds of a collective, `offload` those of the host; `fit`
turns the question round; `recording` keeps a run, and `timeline` replays it on any machine.
"""

from zerosim.course.published import activations as activations_published
from zerosim.planning import activations, cost, hardware, recording, timeline
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
from zerosim.planning.conventions import DIALECTS, Dialect, estimate_nbytes, formula, states_nbytes
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
from zerosim.planning.plan import Plan, Question, Row, explained, question
from zerosim.planning.shapes import PRESETS, ModelShape, Transformer, model_of, model_of_parameters, model_shape

__all__ = [
    "ALGORITHMS",
    "DIALECTS",
    "LAYOUTS",
    "PRESETS",
    "STAGES",
    "Dialect",
    "Job",
    "ModelShape",
    "Plan",
    "Question",
    "Row",
    "Sent",
    "States",
    "Transformer",
    "activations",
    "activations_published",
    "buffers",
    "ceil_cut",
    "chunk_lengths",
    "clip",
    "cost",
    "estimate_nbytes",
    "explained",
    "fit",
    "formula",
    "gathers_by_unit",
    "gradient_peak_nbytes",
    "hardware",
    "model_flops",
    "model_of",
    "model_of_parameters",
    "model_shape",
    "moments",
    "offload",
    "owned_ranges",
    "padded_unit_lengths",
    "question",
    "recording",
    "region_cuts",
    "resting_nbytes",
    "sent",
    "sent_nbytes",
    "states_nbytes",
    "timeline",
    "transformer_flops",
    "unit_cuts",
    "vectors_sent",
]
