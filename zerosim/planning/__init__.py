"""Bytes and seconds of a training step, predicted by formulas before anything runs; a recorded run is replayed.

`zerosim.plan` makes a plan. `closed_forms` are the formulas that one teaches; `step` is the training step as events in
the engine's order, over which transient memory and seconds are folds; `activations` and `flops` are of transformers,
`arithmetic` is what their layers note; `shapes` knows models and `conventions` how texts and tools count bytes;
`collectives` has the messages of each algorithm, from their own generators, `cost` their seconds, `hardware` devices
and links. `recording` keeps a run;
`streams` replays it on any machine, and `timeline` says what that comes to.
"""

from zerosim.models.transformer import Transformer
from zerosim.planning import (
    activations,
    arithmetic,
    collectives,
    conventions,
    cost,
    flops,
    hardware,
    recording,
    shapes,
    step,
    streams,
    timeline,
)
from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import (
    STAGES,
    Job,
    ShardedStates,
    crossing_nbytes,
    gathers_by_unit,
    gradient_peak_nbytes,
    resting_nbytes,
    sent_nbytes,
    vectors_sent,
)
from zerosim.planning.collectives import ALGORITHMS, Sent, sent
from zerosim.planning.conventions import CONVENTIONS, Convention, estimate_nbytes, formula, states_nbytes
from zerosim.planning.cuts import (
    LAYOUTS,
    ceil_cut,
    clip,
    padded_unit_lengths,
    region_cuts,
    unit_cuts,
)
from zerosim.planning.explanation import explained
from zerosim.planning.hardware import Device, Link, Network
from zerosim.planning.offloaded import moved_nbytes
from zerosim.planning.plan import Plan, PlanConfig, PlanRow, plan_config
from zerosim.planning.recording import Recording, record
from zerosim.planning.shapes import PRESETS, ModelShape, model_of, model_of_parameters, model_shape
from zerosim.planning.timeline import Machine, SlowLink, SlowRank, Timeline, replay

__all__ = [
    "ALGORITHMS",
    "CONVENTIONS",
    "LAYOUTS",
    "PRESETS",
    "STAGES",
    "Block",
    "Convention",
    "Device",
    "Job",
    "Link",
    "Machine",
    "ModelShape",
    "Network",
    "Plan",
    "PlanConfig",
    "PlanRow",
    "Recording",
    "Sent",
    "ShardedStates",
    "SlowLink",
    "SlowRank",
    "Timeline",
    "Transformer",
    "activations",
    "arithmetic",
    "ceil_cut",
    "clip",
    "collectives",
    "conventions",
    "cost",
    "crossing_nbytes",
    "estimate_nbytes",
    "explained",
    "flops",
    "formula",
    "gathers_by_unit",
    "gradient_peak_nbytes",
    "hardware",
    "model_of",
    "model_of_parameters",
    "model_shape",
    "moved_nbytes",
    "padded_unit_lengths",
    "plan_config",
    "record",
    "recording",
    "region_cuts",
    "replay",
    "resting_nbytes",
    "sent",
    "sent_nbytes",
    "shapes",
    "states_nbytes",
    "step",
    "streams",
    "timeline",
    "unit_cuts",
    "vectors_sent",
]
