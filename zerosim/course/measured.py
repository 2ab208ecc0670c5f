"""Bytes that runs hold and send, beside the formulas: of small steps, of a GPT's activations, of a row of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from zerosim.display.views import words
from zerosim.models.gpt import GPT, Decoder, GPTConfig
from zerosim.models.gpt import PRESETS as GPTS
from zerosim.models.llama import PRESETS as LLAMAS
from zerosim.models.llama import config_of, decoder
from zerosim.models.small import MLP
from zerosim.models.text import VOCABULARY
from zerosim.models.transformer import config_of_transformer, transformer_of
from zerosim.models.units import Model
from zerosim.numerics.places import DEVICE, DIRECTIONS
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.optim.elementwise import SGD
from zerosim.planning import closed_forms
from zerosim.planning.activations import Block, tensors
from zerosim.planning.configuration import PlanConfig
from zerosim.planning.conventions import convention_of, formula, per_parameter_nbytes, states_nbytes
from zerosim.planning.shapes import PRESETS, ModelShape, model_of
from zerosim.planning.step_activations import fullest_nbytes
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.null_cluster import NullCluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import PURPOSES, Compute, SpanBegin
from zerosim.zero.engine import Engine

BytesByKind = Mapping[str, int]
FLOWING = ("activation", "checkpointed_input", "activation_gradient")
GRADIENTS, BUFFERS = ("gradient", "unit_gradient"), ("communication_buffer", "workspace")


@dataclass(frozen=True, slots=True)
class HeldInStep:
    """Bytes of one rank at rest after the step, by kind, and those that it moved in the step, by direction."""

    at_rest: BytesByKind
    moved: BytesByKind


def take_step(cluster: Cluster, model: Model, optimizer: Optimizer, x_shape: tuple[int, int],
              target_shape: tuple[int, int] | None = None, *, micro_batches: int = 1,
              **options: Any) -> list[HeldInStep]:
    """Takes one training step on the cluster, in the span "step"; the cluster's memory and trace have it to the byte.

    All x and targets are zeros, since bytes depend on no value; ``target_shape`` None is that of x. ``options`` are the
    engine's. The list has an entry for each rank that ran.
    """

    def program(rank: Rank) -> HeldInStep:
        engine = Engine(rank, model, optimizer, **options)
        x = rank.xp.zeros(x_shape, "int64" if model.units[0].integer_inputs else "float32")
        target = rank.xp.zeros(target_shape or x_shape, "int64" if model.loss.integer_targets else "float32")
        before = dict(rank.trace.moved_nbytes)
        with rank.trace.span("step"):
            for number in range(1, micro_batches + 1):
                engine.backward(engine.forward(x, target), last=number == micro_batches)
            engine.reduce()
            engine.update()
            engine.all_gather_parameters()
        now = rank.memory.now_nbytes_by_kind
        return HeldInStep({kind: now[kind] for kind in RESTING_KINDS if kind in now},
                          {way: rank.trace.moved_nbytes[way] - before.get(way, 0) for way in DIRECTIONS})

    return list(cluster.run(program))


# -- training steps of an MLP, beside ZeRO's formula ------------------------------------------------------------------
# Legend: N ranks, P parameters, B batch.


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step under one stage: bytes of each rank that ran, at rest and at its fullest instant by kind, and
    sent by purpose.

    ``formula`` is the estimate in bytes per parameter, as ``4 + 12/N``, and ``formula_nbytes`` its value for this N.
    """

    stage: int
    ranks: int
    parameter_count: int
    resting_nbytes: tuple[BytesByKind, ...]
    peak_nbytes: tuple[BytesByKind, ...]
    sent_nbytes: tuple[BytesByKind, ...]
    formula: str
    formula_nbytes: Fraction


def measured_step(widths: Sequence[int], optimizer: Optimizer, *, ranks: int, stage: int, policy: Policy, rows: int = 1,
                  with_data: bool = True) -> MeasuredStep:
    """Trains an MLP of these widths for one step on N ranks, on B = ``rows`` samples each, and reads what they held.

    Without data it is one rank that stands for all, and the model may have any size. The formula is without padding:
    Adam in mixed precision has (replicated, shared) = (16, 0), (4, 12), (2, 14), (0, 16) in stages 0 to 3. Raises
    ValueError for an optimizer whose state is no number of bytes for each parameter, as Muon's.
    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    model, own_nbytes = MLP(widths), per_parameter_nbytes(optimizer, policy.state_dtype.itemsize)
    states = closed_forms.STAGES[stage]
    replicated, shared = convention_of(policy).per_parameter(states, own_nbytes)
    cluster: Cluster = Cluster(ranks) if with_data else NullCluster(ranks, representative=0)
    held = take_step(cluster, model, optimizer, (rows, widths[0]), (rows, widths[-1]), stage=stage, policy=policy)
    return MeasuredStep(stage, ranks, model.parameter_count, tuple(of_rank.at_rest for of_rank in held),
                        tuple(cluster.memory.peak_nbytes_by_kind),
                        tuple({purpose: trace.sent_nbytes(purpose) for purpose in PURPOSES} for trace in cluster.trace),
                        formula(states, policy, own_nbytes), replicated + Fraction(shared, ranks))


# -- what a GPT keeps and computes under each recomputation policy, beside the closed forms ---------------------------

# The arrays that a block keeps of its forward pass, its input first, by the closed forms' names.
MADE_IN_ORDER = ("LayerNorm 1 input", *("LayerNorm 1 statistics",) * 2, "QKV", "attention output", "probabilities",
                 "LayerNorm 2 input", *("LayerNorm 2 statistics",) * 2, "pre-GELU", "post-GELU")


@dataclass(frozen=True, slots=True)
class MeasuredActivations:
    """One micro-batch of a GPT under a recomputation policy, on a rank without data.

    Bytes of activations, checkpointed inputs and their gradients: when forward ends, and at the fullest moment of all.
    ``flops`` are those of forward and backward.
    """

    policy: str
    kept_nbytes: int
    peak_nbytes: int
    flops: int


def measured_activations(block: Block, blocks: int, vocabulary: int, policy: str) -> MeasuredActivations:
    """Runs a GPT of such blocks in bf16, forward and back, and reads its memory; the peak is asserted to be the
    estimate to the byte."""
    cluster, kept = run_blocks(block, blocks, vocabulary, policy)
    found = MeasuredActivations(policy, kept, cluster.memory[0].peak_nbytes_of(FLOWING), flops_of_passes(cluster))
    assert found.peak_nbytes == fullest_nbytes(block, blocks, vocabulary, policy), "it differs from the estimate"
    return found


def run_blocks(block: Block, blocks: int, vocabulary: int, policy: str) -> tuple[Cluster, int]:
    """A cluster without data on which a GPT of such blocks went forward and back, and the bytes of activations between
    the two."""
    cluster, gpt = NullCluster(1), GPT(GPTConfig(blocks, block.channels, block.heads, block.tokens, vocabulary))

    def program(rank: Rank) -> int:
        engine = Engine(rank, gpt, SGD(lr=0.1), policy=Policy("bf16"), recompute=policy)
        tokens = rank.xp.zeros((block.batch, block.tokens), "int64")
        tape = engine.forward(tokens, tokens)
        kept = rank.memory.now_nbytes_by_kind
        engine.backward(tape)
        return sum(kept.get(kind, 0) for kind in FLOWING)

    return cluster, cluster.run(program)[0]


def flops_of_passes(cluster: Cluster) -> int:
    """The operations of rank 0, forward and back."""
    return sum(row.flops for row in cluster.trace[0].rows if isinstance(row, Compute))


def measured_tensors(block: Block) -> dict[str, int]:
    """Bytes of each tensor that one plain block holds after its forward pass, its input first, read from the trace.

    They are asserted to be the estimates to the byte. Statistics of a LayerNorm are two arrays, and one line here.
    """
    trace = run_blocks(block, 1, 1, "none")[0].trace[0]
    loss = next(place for place, row in enumerate(trace.rows) if isinstance(row, SpanBegin) and row.path[-1] == "loss")
    held = (life for life in trace.lifetimes("activation") if life.lives_at(loss))  # the head's come after the block's
    found = dict.fromkeys(MADE_IN_ORDER, 0)
    for name, life in zip(MADE_IN_ORDER, held, strict=False):
        found[name] += life.nbytes
    assert found == {name: one.nbytes for name, one in tensors(block).items()}, "it differs from the estimate"
    return found


# -- a row of a plan, beside memory and trace of a run without data ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of a plan's row, in bytes, as planned and as measured on one rank."""

    name: str
    estimated_nbytes: int
    measured_nbytes: int

    @property
    def difference_nbytes(self) -> int:
        """Measured less estimated: 0 where they agree."""
        return self.measured_nbytes - self.estimated_nbytes


def measured_row(config: PlanConfig, stage: int, policy: str) -> list[Compared]:
    """A row of a plan, part by part, beside the real engine and layers run for one step without data on rank 0.

    The engine has the configuration's options, and its model fused matrices, of which the estimate is too: it tells
    norms of tensors apart. The estimate is in zerosim's own convention, whatever the configuration's; of offload, what
    rests on the device. The last line is the peak: everything at the one moment at which it is most. Buffers are those
    of collectives and of what is fetched to the device, and what an optimizer of whole tensors works in, which is
    measured alone.
    Raises ValueError for a model that the package cannot build, and for an optimizer that it cannot cut.
    """
    cluster, model = NullCluster(config.ranks, representative=0), config.model
    if model.transformer is not None:
        config = replace(config, model=model_of(model.name, replace(model.transformer, fused=True)))
    held = run_planned(cluster, config, stage, policy)
    resting = held.at_rest
    memory, sent = cluster.memory[0], cluster.trace[0].sent_nbytes
    predicted = states_nbytes(config.model, config.ranks, closed_forms.STAGES[stage], config.policy,
                              optimizer=config.optimizer, nodes=config.options.replicas)
    places = config.options.offload
    predicted = {kind: nbytes for kind, nbytes in predicted.items() if places.place_of(kind) == DEVICE}
    lines = [Compared(f"{words(kind)} at rest", predicted.get(kind, 0), resting.get(kind, 0))
             for kind in RESTING_KINDS]
    lines += [Compared(f"moved {way}", nbytes, held.moved[way])
              for way, nbytes in config.transfers(config.job(stage, policy))[0].items() if not places.is_none]
    found, at_rest = config.transient_memory(stage, policy), predicted.get("gradient", 0)
    lines += [Compared(name, nbytes, memory.peak_nbytes_of(kinds)) for name, nbytes, kinds in (
        ("activations and their gradients", config.activations_nbytes(policy), FLOWING),
        ("gathered units", found.gathered_nbytes, ("gathered_parameter",)),
        *([("secondary shards", found.secondary_nbytes, ("secondary_parameter",))] if config.options.zeropp else []),
        ("gradients at rest and in flight", at_rest + found.gradients_nbytes, GRADIENTS),
        ("buffers of collectives", found.buffers_nbytes, BUFFERS),
        ("gradients and buffers", at_rest + found.in_flight_nbytes, GRADIENTS + BUFFERS))]
    lines += [Compared(f"sent: {purpose}", nbytes[0], sent(purpose))
              for purpose, nbytes in closed_forms.sent_nbytes(config.job(stage, policy)).items()]
    return [*lines, Compared("peak", sum(predicted.values()) + found.fullest(config.batch).nbytes(config.batch),
                             memory.peak_nbytes)]


def run_planned(cluster: Cluster, config: PlanConfig, stage: int, policy: str) -> HeldInStep:
    """Takes the step that is planned, with the configuration's options; what its first rank held."""
    assert isinstance(config.optimizer, Optimizer)  # the plan of an engine has no other
    return take_step(cluster, decoder_of(config.model, config.sequence), config.optimizer,
                     (config.batch, config.sequence), micro_batches=config.micro_batches, policy=config.policy,
                     stage=stage, recompute=policy, **config.options.arguments())[0]


def preset_shape(name: Any) -> Any:
    """The shape of a preset that `zerosim train` alone has, over its vocabulary of bytes; any other model as it is."""
    if not isinstance(name, str) or name in PRESETS or name not in {**GPTS, **LLAMAS}:
        return name
    trained = decoder(replace(config_of(name), vocabulary=VOCABULARY))
    return model_of(name, replace(transformer_of(trained.config, tied=trained.tied), fused=False))


def decoder_of(model: ModelShape, tokens: int | None = None) -> Decoder:
    """The package's own GPT or Llama of a model on paper; ValueError where it has other layers than these.

    ``tokens`` is the context of a model without learned positions, its own where nothing is said.
    """
    try:
        if model.transformer is None:
            raise ValueError("of it a number of parameters is known, and no layer")
        return decoder(config_of_transformer(model.transformer, tokens=tokens), tied=model.transformer.tied)
    except ValueError as error:
        raise ValueError(f"{model.name} cannot be measured: {error}; plan it without --measure, or measure gpt2-xl or "
                         "llama-3-8b") from None
