"""Training steps of an MLP, beside the closed forms.

Legend: N ranks, P parameters, B batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from zerosim.course.measured.kinds import BytesByKind
from zerosim.models.small import MLP
from zerosim.numerics import random
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.planning import closed_forms
from zerosim.planning.conventions import convention_of, normed_tensors, per_parameter_nbytes, state_nbytes
from zerosim.ranks.cluster import Cluster, NullCluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step under one stage: bytes by kind, per rank, read from the ledgers of a run.

    ``resting_nbytes`` is what a rank holds between two steps, ``peak_nbytes`` the breakdown at its fullest instant.
    ``replicated`` and ``shared`` are the pencil's bytes per parameter: a rank rests at replicated + shared / N.
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
    """What each rank rests at by the closed forms, empty kinds left out."""
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
