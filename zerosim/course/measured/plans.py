"""A row of a plan, beside the ledger and trace of a run without data."""

from dataclasses import dataclass

from zerosim.course.measured.kinds import BUFFERS, FLOWING, GRADIENTS
from zerosim.models.gpt import GPT, GPTConfig
from zerosim.optim.base import Optimizer
from zerosim.planning import closed_forms as pencil
from zerosim.planning.conventions import states_nbytes
from zerosim.planning.plan import Question, activations_nbytes, job_of, passing_of
from zerosim.planning.shapes import ModelShape
from zerosim.ranks.cluster import NullCluster
from zerosim.ranks.memory import RESTING_KINDS
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity of a plan's row, in bytes, by pencil and in the ledger of one rank."""

    name: str
    pencil_nbytes: int
    ledger_nbytes: int

    @property
    def difference_nbytes(self) -> int:
        """Ledger less pencil: 0 where they agree."""
        return self.ledger_nbytes - self.pencil_nbytes


def measured_row(question: Question, stage: int, policy: str) -> list[Compared]:
    """A row of a plan, part by part, beside the real engine and layers run for one step without data on rank 0.

    The engine has the question's levers. Pencil counts in zerosim's own dialect, whatever the question's, and without
    offload. The last line is the peak: everything at the one moment at which it is most. Buffers are those of
    collectives, and what an optimizer of whole tensors works in, which the ledger alone knows.
    Raises ValueError for a model that the package cannot build, and for an optimizer that it cannot cut.
    """
    cluster, gpt = NullCluster(question.ranks, representative=0), gpt_of(question.model)
    resting = cluster.run(_null_step, gpt, question, stage, policy)[0]
    memory, sent = cluster.memory[0], cluster.trace[0].sent_nbytes
    predicted = states_nbytes(question.model, question.ranks, pencil.STAGES[stage], question.policy,
                              optimizer=question.optimizer)
    lines = [Compared(f"{kind.replace('_', ' ')} at rest", predicted.get(kind, 0), resting.get(kind, 0))
             for kind in RESTING_KINDS]
    found, at_rest = passing_of(question, stage, policy), predicted.get("gradient", 0)
    lines += [Compared(name, nbytes, memory.peak_nbytes_of(kinds)) for name, nbytes, kinds in (
        ("activations and their gradients", activations_nbytes(question, policy), FLOWING),
        ("gathered units", found.gathered_nbytes, ("gathered_parameter",)),
        ("gradients at rest and in flight", at_rest + found.gradients_nbytes, GRADIENTS),
        ("buffers of collectives", found.buffers_nbytes, BUFFERS),
        ("gradients and buffers", at_rest + found.in_flight_nbytes, GRADIENTS + BUFFERS))]
    lines += [Compared(f"sent: {purpose}", nbytes[0], sent(purpose))
              for purpose, nbytes in pencil.sent_nbytes(job_of(question, stage, policy)).items()]
    return [*lines, Compared("peak", sum(predicted.values()) + found.fullest_nbytes(question.batch),
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


def _null_step(rank: Rank, gpt: GPT, question: Question, stage: int, policy: str) -> dict[str, int]:
    """One step on arrays without data; what rests after it."""
    if not isinstance(question.optimizer, Optimizer):
        raise ValueError(f"a run needs an optimizer of the package, found {question.optimizer!r}; name one")
    engine = Engine(rank, gpt, question.optimizer, stage=stage, policy=question.policy, recompute=policy,
                    overlap=question.overlap, prefetch=question.prefetch)
    shape = (question.batch, question.sequence)
    tokens = rank.xp.empty(shape, "int64")
    engine.step([(tokens, tokens)] * question.micro_batches)
    return rank.memory.now_nbytes_by_kind
