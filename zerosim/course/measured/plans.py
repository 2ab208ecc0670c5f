"""A row of a plan, beside the ledger and trace of a run without data."""

from dataclasses import dataclass

from zerosim.course.measured.kinds import BUFFERS, FLOWING, GRADIENTS
from zerosim.models.gpt import GPT, GPTConfig
from zerosim.optim.base import Optimizer
from zerosim.planning import closed_forms
from zerosim.planning.conventions import states_nbytes
from zerosim.planning.plan import PlanConfig
from zerosim.planning.shapes import ModelShape
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine


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
