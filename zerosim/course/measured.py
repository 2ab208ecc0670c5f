"""The kinds of memory that are looked at together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.models.gpt import GPT, GPTConfig
from zerosim.models.small import MLP
from zerosim.numerics import random
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.optim.elementwise import SGD
from zerosim.planning import closed_forms
from zerosim.planning.activations import Block, fullest_nbytes, tensors
from zerosim.planning.conventions import (
    convention_of,
    normed_tensors,
    per_parameter_nbytes,
    state_nbytes,
    states_nbytes,
)
from zerosim.planning.plan import PlanConfig
from zerosim.planning.shapes import ModelShape
from zerosim.ranks.cluster import Cluster, NullCluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import Compute
from zerosim.zero.engine import Engine

BytesByKind = Mapping[str, int]
FLOWING = ("activation", "checkpointed_input", "activation_gradient")
GRADIENTS, BUFFERS = ("gradient", "unit_gradient"), ("communication_buffer", "workspace")


# -- Training steps of an MLP, beside the closed forms ---------------------------------------------------------------
# Legend: N ranks, P parameters, B batch.


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step under one stage: bytes by kind, per rank, read from the ledgers of a run.

    ``resting_nbytes`` is what a rank holds between two steps, ``peak_nbytes`` the breakdown at its fullest instant.
    ``replicated`` and ``shared`` are the estimate in bytes per parameter: a rank rests at replicated + shared / N.
    """

    stage: int
    ranks: int
    parameter_count: int
    resting_nbytes: tuple[BytesByKind, ...]
    peak_nbytes: tuple[BytesByKind, ...]
    replicated: Fraction
    shared: Fraction

    @property
    def formula(self) -> str:
        """``4 + 12/N``, ``16`` or ``16/N``: bytes per parameter."""
        parts = [f"{self.replicated}"] * bool(self.replicated) + [f"{self.shared}/N"] * bool(self.shared)
        return " + ".join(parts)

    @property
    def formula_nbytes(self) -> Fraction:
        """The formula's value for this N, in bytes per parameter."""
        return self.replicated + self.shared / self.ranks


def measured_step(widths: Sequence[int], optimizer: Optimizer, *, ranks: int, stage: int, policy: Policy, rows: int,
                  layout: str = "per_unit") -> MeasuredStep:
    """Trains an MLP of these widths for one step on N ranks, on B = ``rows`` samples each, and reads the ledgers.

    What rests is asserted to equal the closed forms to the byte, on every rank. Raises ValueError for an optimizer
    whose state is no number of bytes for each parameter, as Muon's.
    """
    cluster, model = Cluster(ranks), MLP(widths)
    found = bytes_per_parameter(closed_forms.STAGES[stage], optimizer, policy)
    engines = cluster.run(_one_step, model, optimizer, stage, policy, (rows, widths[0], widths[-1]), layout)
    assert len(engines) == ranks  # as long as the engines live, what they hold at rest is held
    resting = tuple(cluster.memory.now_nbytes_by_kind)
    job = _job(model, optimizer, ranks, stage, policy, layout)
    assert list(resting) == _predicted(job, optimizer), "the ledger differs from the closed forms"
    return MeasuredStep(stage, ranks, model.parameter_count, resting,
                        tuple(cluster.memory.peak_nbytes_by_kind), *found)


def _one_step(rank: Rank, model: MLP, optimizer: Optimizer, stage: int, policy: Policy, sample: tuple[int, int, int],
              layout: str) -> Engine:
    engine = Engine(rank, model, optimizer, stage=stage, policy=policy, layout=layout)
    rows, inputs, outputs = sample
    key = f"rank{rank.index}"
    x = random.normal((0, "data x", 0, key), 0, rows * inputs).reshape(rows, inputs)
    target = random.normal((0, "data target", 0, key), 0, rows * outputs).reshape(rows, outputs)
    engine.step([(x, target)])
    return engine


def _job(model: MLP, optimizer: Optimizer, ranks: int, stage: int, policy: Policy, layout: str) -> closed_forms.Job:
    """The step on paper; the optimizer's state is added by `_predicted`, whatever its formats are."""
    tensors = sum(len(unit.shapes) for unit in model.units)
    return closed_forms.Job(tuple(unit.parameter_count for unit in model.units), ranks, closed_forms.STAGES[stage],
                            layout=layout,
                      policy=policy, slots=0, normed_tensors=normed_tensors(optimizer, tensors))


def _predicted(job: closed_forms.Job, optimizer: Optimizer) -> list[BytesByKind]:
    """The resting memory of each rank by the closed forms, empty kinds left out."""
    held, itemsize = job.held(job.states.optimizer_sharded), job.policy.state_dtype.itemsize
    state = state_nbytes(optimizer, (held,), itemsize)
    return [found | ({"optimizer_state": state} if state else {}) for found in closed_forms.resting_nbytes(job)]


def bytes_per_parameter(states: closed_forms.ShardedStates, optimizer: Optimizer,
                        policy: Policy) -> tuple[Fraction, Fraction]:
    """(replicated, shared): what every rank holds of each parameter, and what all ranks hold of it together.

    Without padding. Adam in mixed precision: (16, 0), (4, 12), (2, 14), (0, 16) in stages 0 to 3. Raises ValueError for
    an optimizer whose state is no number of bytes for each parameter.
    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    state = per_parameter_nbytes(optimizer, policy.state_dtype.itemsize)
    replicated, shared = convention_of(policy).per_parameter(states, state)
    return Fraction(replicated), Fraction(shared)


@dataclass(frozen=True, slots=True)
class MeasuredBytes:
    """One step without data, on a rank that stands for all: what it holds at rest by kind, and sends by purpose."""

    stage: int
    ranks: int
    parameter_count: int
    resting_nbytes: BytesByKind
    sent_nbytes: BytesByKind


def measured_bytes(widths: Sequence[int], optimizer: Optimizer, *, ranks: int, stage: int,
                   policy: Policy) -> MeasuredBytes:
    """Trains an MLP of these widths for one step on N ranks on arrays without data, of any size, and reads rank 0.

    What rests and what was sent is asserted to equal the closed forms to the byte. Raises ValueError for an optimizer
    whose state is no number of bytes for each parameter, as Muon's.
    """
    per_parameter_nbytes(optimizer)
    cluster, model = NullCluster(ranks, representative=0), MLP(widths)
    resting = cluster.run(_null_mlp_step, model, optimizer, stage, policy, (widths[0], widths[-1]))[0]
    job = _job(model, optimizer, ranks, stage, policy, "per_unit")
    sent = {purpose: cluster.trace[0].sent_nbytes(purpose) for purpose in closed_forms.sent_nbytes(job)}
    assert resting == _predicted(job, optimizer)[0], "the ledger differs from the closed forms"
    predicted = {purpose: nbytes[0] for purpose, nbytes in closed_forms.sent_nbytes(job).items()}
    assert sent == predicted, "so does the trace"
    return MeasuredBytes(stage, ranks, model.parameter_count, resting, sent)


def _null_mlp_step(rank: Rank, model: MLP, optimizer: Optimizer, stage: int, policy: Policy,
                   sample: tuple[int, int]) -> BytesByKind:
    """One step on one sample; what rests after it."""
    engine = Engine(rank, model, optimizer, stage=stage, policy=policy)
    x, target = (rank.xp.zeros((1, width), "float32") for width in sample)
    engine.step([(x, target)])
    return {kind: nbytes for kind, nbytes in rank.memory.now_nbytes_by_kind.items() if kind in RESTING_KINDS}


# -- What a GPT keeps and computes under each recomputation policy, beside the closed forms -------------------------

# The arrays that a block keeps of its forward pass, in the order of its layers, by the closed forms' names.
MADE_IN_ORDER = (*("LayerNorm 1 statistics",) * 2, "QKV", "attention output", "probabilities", "LayerNorm 2 input",
                 *("LayerNorm 2 statistics",) * 2, "pre-GELU", "post-GELU")


@dataclass(frozen=True, slots=True)
class MeasuredActivations:
    """One micro-batch of a GPT under a recomputation policy, on a rank without data, at stage 3.

    Bytes of activations, checkpointed inputs and their gradients: when forward ends, and at the fullest moment of all.
    ``flops`` are those of forward and backward.
    """

    policy: str
    kept_nbytes: int
    peak_nbytes: int
    flops: int


def measured_activations(block: Block, blocks: int, vocabulary: int, policy: str) -> MeasuredActivations:
    """Runs forward and backward of a GPT of such blocks in bf16, and reads the ledger; its peak is asserted to be
    estimates to the byte."""
    gpt = GPT(GPTConfig(blocks, block.channels, block.heads, block.tokens, vocabulary))
    cluster = NullCluster(1)

    def program(rank: Rank) -> int:
        engine = Engine(rank, gpt, SGD(lr=0.1), stage=3, policy=Policy("bf16"), recompute=policy)
        tokens = rank.xp.empty((block.batch, block.tokens), "int64")
        tape = engine.forward(tokens, tokens)
        kept = sum(rank.memory.now_nbytes_by_kind.get(kind, 0) for kind in FLOWING)
        engine.backward(tape)
        return kept

    kept = cluster.run(program)[0]
    found = MeasuredActivations(policy, kept, cluster.memory[0].peak_nbytes_of(FLOWING), sum(
        row.flops for row in cluster.trace[0].rows if isinstance(row, Compute)))
    assert found.peak_nbytes == fullest_nbytes(block, blocks, vocabulary, policy), "it differs from the estimate"
    return found


def measured_tensors(block: Block) -> dict[str, int]:
    """Bytes of each tensor that one plain block holds after its forward pass, its input first, read from the ledger.

    They are asserted to be the estimates to the byte. Statistics of a LayerNorm are two arrays, and one line here.
    """
    cluster = NullCluster(1)
    gpt = GPT(GPTConfig(1, block.channels, block.heads, block.tokens, 1))

    def program(rank: Rank) -> Any:
        ctx = Engine(rank, gpt, SGD(lr=0.1), policy=Policy("bf16")).context()
        unit, x = gpt.units[1], ctx.empty((block.batch, block.tokens, block.channels), name="x")
        weights = {name: rank.xp.empty(shape, ctx.dtype) for name, shape in unit.shapes.items()}
        return x, unit.forward(ctx, weights, x)[1]  # its output is the next block's

    kept = cluster.run(program)
    found = dict.fromkeys(("LayerNorm 1 input", *MADE_IN_ORDER), 0)
    lives = [life for life in cluster.trace[0].lifetimes("activation") if life.died is None]
    assert len(kept) == 1  # as long as it is there, what was kept is held
    for name, life in zip(("LayerNorm 1 input", *MADE_IN_ORDER), lives, strict=True):
        found[name] += life.nbytes
    assert found == {name: one.nbytes for name, one in tensors(block).items()}, "it differs from the estimate"
    return found


# -- A row of a plan, beside the ledger and trace of a run without data ----------------------------------------------

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

    The engine has the configuration's options. The estimate is in zerosim's own convention, whatever the
    configuration's, and without offload. The last line is the peak: everything at the one moment at which
    it is most. Buffers are those of collectives, and what an optimizer of whole tensors works in, which is
    measured alone.
    Raises ValueError for a model that the package cannot build, and for an optimizer that it cannot cut.
    """
    cluster, gpt = NullCluster(config.ranks, representative=0), gpt_of(config.model)
    resting = cluster.run(_null_step, gpt, config, stage, policy)[0]
    memory, sent = cluster.memory[0], cluster.trace[0].sent_nbytes
    predicted = states_nbytes(config.model, config.ranks, closed_forms.STAGES[stage], config.policy,
                              optimizer=config.optimizer)
    lines = [Compared(f"{kind.replace('_', ' ')} at rest", predicted.get(kind, 0), resting.get(kind, 0))
             for kind in RESTING_KINDS]
    found, at_rest = config.transient_memory(stage, policy), predicted.get("gradient", 0)
    lines += [Compared(name, nbytes, memory.peak_nbytes_of(kinds)) for name, nbytes, kinds in (
        ("activations and their gradients", config.activations_nbytes(policy), FLOWING),
        ("gathered units", found.gathered_nbytes, ("gathered_parameter",)),
        ("gradients at rest and in flight", at_rest + found.gradients_nbytes, GRADIENTS),
        ("buffers of collectives", found.buffers_nbytes, BUFFERS),
        ("gradients and buffers", at_rest + found.in_flight_nbytes, GRADIENTS + BUFFERS))]
    lines += [Compared(f"sent: {purpose}", nbytes[0], sent(purpose))
              for purpose, nbytes in closed_forms.sent_nbytes(config.job(stage, policy)).items()]
    return [*lines, Compared("peak", sum(predicted.values()) + found.fullest_nbytes(config.batch),
                             memory.peak_nbytes)]


def gpt_of(model: ModelShape) -> GPT:
    """The package's own GPT of a model on paper; ValueError where it has other layers than that."""
    of = model.transformer
    if of is not None and of.positions:
        gpt = GPT(GPTConfig(of.blocks, of.channels, of.heads, of.positions, of.vocabulary), tied=of.tied)
        if tuple(unit.parameter_count for unit in gpt.units) == model.unit_lengths:
            return gpt
    raise ValueError(f"{model.name} cannot be measured: zerosim's layers make models of GPT-2's kind, with learned "
                     "places, biases and plain blocks; plan it without --measure, or measure gpt2-xl")


def _null_step(rank: Rank, gpt: GPT, config: PlanConfig, stage: int, policy: str) -> dict[str, int]:
    """One step on arrays without data; what rests after it."""
    if not isinstance(config.optimizer, Optimizer):
        raise ValueError(f"a run needs an optimizer of the package, found {config.optimizer!r}; name one")
    engine = Engine(rank, gpt, config.optimizer, stage=stage, policy=config.policy, recompute=policy,
                    overlap=config.overlap, prefetch=config.prefetch)
    shape = (config.batch, config.sequence)
    tokens = rank.xp.empty(shape, "int64")
    engine.step([(tokens, tokens)] * config.micro_batches)
    return rank.memory.now_nbytes_by_kind
