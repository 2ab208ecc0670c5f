"""Bytes and seconds of a training step, predicted before anything runs; a recorded run is replayed.

`zerosim.plan` makes a plan from names: `configuration` computes its rows, `plan_row` is one, `explanation` says each
number with its formula; `questions` asks rows for the largest, the fewest, days and money. Below that stand four
levels:

- *Formulas* that one teaches, a number at once: `closed_forms` (what a step holds at rest, sends, and moves off the
  device), `activations` (what a block keeps), `flops`, `conventions` (how texts and tools count bytes), `collectives`
  and `cost` (the messages of each algorithm, and their seconds), `nccl` (what NCCL takes for them), `efficiency` (what
  devices reach of their peaks), on `shapes` (models) and `hardware` (devices, links).
- *The step in its order*, for what no formula says, the fullest moment and what hides behind what: `step_events`
  (collectives and buffers), `step_activations`, `step_arithmetic`; `step_folds` reads memory and seconds off them.
- *Other programs*: `runtimes` accounts for all that PyTorch's FSDP2, DeepSpeed or Megatron hold, by `saved_tensors`.
- *A run*: `recording` keeps one, `streams` replays it on any machine, `timeline` says what that comes to.
"""

from typing import TYPE_CHECKING

from zerosim.face import face

if TYPE_CHECKING:
    from zerosim.models.transformer import Experts, LatentAttention, Transformer
    from zerosim.planning import (
        activations,
        closed_forms,
        collectives,
        conventions,
        cost,
        cuts,
        efficiency,
        flops,
        hardware,
        nccl,
        questions,
        recording,
        runtimes,
        saved_tensors,
        shapes,
        step_activations,
        step_arithmetic,
        step_events,
        step_folds,
        streams,
        timeline,
    )
    from zerosim.planning.activations import Block
    from zerosim.planning.closed_forms import (
        STAGES,
        Job,
        ShardedStates,
        moved_nbytes,
        resting_nbytes,
        sent_nbytes,
        vectors_sent,
    )
    from zerosim.planning.collectives import ALGORITHMS, sent
    from zerosim.planning.configuration import Plan, PlanConfig
    from zerosim.planning.conventions import CONVENTIONS, Convention, estimate_nbytes, formula, states_nbytes
    from zerosim.planning.cuts import ceil_cut
    from zerosim.planning.explanation import explained
    from zerosim.planning.finetuning import ADAM_8BIT, frozen, lora, quantized
    from zerosim.planning.hardware import Device, Link, Network
    from zerosim.planning.plan import plan_config
    from zerosim.planning.plan_row import PlanRow
    from zerosim.planning.recording import Recording, record
    from zerosim.planning.runtimes import RUNTIMES, AccountRow, account
    from zerosim.planning.shapes import PRESETS, ModelShape, model_of, model_of_parameters, model_shape
    from zerosim.planning.timeline import Machine, Slow, Timeline, replay

__getattr__, __dir__ = face(__name__)
