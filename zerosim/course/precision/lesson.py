"""What goes wrong in mixed precision, and what helps, each of it run.

Small gradients become 0; dynamic loss scalers differ; no loss scale cures an overflow in forward; weights and Adam's
averages that rest in 16 bits stall or explode. What becomes of one weight, or of one average, is in `lost_updates`.
Legend: B batch, T tokens, S loss scale.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from zerosim.course.precision import forward_overflow, resting_formats, scaler_traces, underflow
from zerosim.display.tables import without_infinities
from zerosim.models.gpt import GPT, config_of
from zerosim.models.text import VOCABULARY, Corpus
from zerosim.models.units import Pass, one_pass
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_count
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.policy import Policy
from zerosim.optim import AdamW
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

SCALES = (1.0, 2.0**8, 2.0**16, 2.0**20)
SEQUENCES = 4  # B
LR = 3e-3
MOST_TENSORS = 4
STEPS_RATIO = 8  # steps of the small network that rests in other formats, for each step on the text


@dataclass(frozen=True, slots=True)
class Question:
    """A format to look at, and a model that is trained for so many steps before its gradients are counted.

    Raises ValueError for an unknown format or model, and for fewer than one step.
    """

    format: str = "fp16"
    model: str = "gpt-micro"
    steps: int = 50

    def __post_init__(self) -> None:
        format_of(self.format)
        config_of(self.model)
        if not is_count(self.steps) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r} must be a whole number, 1 or more")

    @property
    def resting_steps(self) -> int:
        """Steps of each training with other formats at rest."""
        return max(resting_formats.BATCHES, STEPS_RATIO * self.steps)

    def build(self) -> GPT:
        """The model, with a vocabulary of bytes."""
        return GPT(replace(config_of(self.model), vocabulary=VOCABULARY))


@dataclass(frozen=True, slots=True)
class Underflows:
    """The gradients of one batch of a text, in fp32 and in the format of the question, for each of SCALES.

    ``rounded``: S times the fp32 gradients of the parameters, rounded to the format. ``computed``: those of a backward
    in the format, from S times the loss. ``at_output``: the gradients of the logits, where that backward begins.
    ``worst``: the parameters that lose most at S = 1.
    """

    text: str
    tokens: int
    loss: float
    binades: tuple[underflow.Binade, ...]
    rounded: tuple[underflow.Fates, ...]
    computed: tuple[underflow.Fates, ...]
    at_output: tuple[underflow.Fates, ...]
    worst: tuple[underflow.TensorLoss, ...]


@dataclass(frozen=True, slots=True)
class Precision:
    """All answers."""

    question: Question
    underflows: Underflows
    pattern: tuple[bool, ...]
    traces: tuple[scaler_traces.ScalerTrace, ...]
    trials: tuple[forward_overflow.Trial, ...]
    largest: tuple[forward_overflow.LargestValue, ...]
    rested: tuple[resting_formats.Rested, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain data; what is no finite number is the text "inf", "-inf" or "nan"."""
        plain: dict[str, Any] = without_infinities(dataclasses.asdict(self))
        return plain


def precision(question: Question, corpus: Corpus) -> Precision:
    """Runs everything: ten seconds for the question as it stands."""
    return Precision(
        question, underflows(question, corpus), scaler_traces.PATTERN, tuple(scaler_traces.traces()),
        tuple(forward_overflow.trials(question.format)), tuple(forward_overflow.largest_values(question.format)),
        tuple(resting_formats.rested(policy, question.resting_steps)
              for policy in resting_formats.policies(question.format)))


def underflows(question: Question, corpus: Corpus) -> Underflows:
    """Trains on the text, in fp32, and counts the gradients of the batch that would come next."""
    model, kernels = question.build(), NumpyKernels()
    corpus.require_length(model.config.context)
    weights = Cluster(1).run(_trained, model, corpus, question.steps)[0]
    x, target = _batch(model, corpus, question.steps)
    exact = one_pass(model, weights, Policy(), x, target)
    found = {scale: one_pass(model, weights, Policy(question.format), x, target, scale) for scale in SCALES}

    def counted(gradients: Pass, scale: float) -> underflow.Fates:
        of_all = (gradients.gradients[name] for name in exact.gradients)
        return underflow.fates(kernels, exact.gradients.values(), of_all, question.format, scale)

    return Underflows(
        corpus.name, x.size, exact.loss, underflow.binades(exact.gradients.values()),
        tuple(underflow.rounded_fates(kernels, exact.gradients.values(), question.format, scale) for scale in SCALES),
        tuple(counted(found[scale], scale) for scale in SCALES),
        tuple(underflow.fates(kernels, [exact.output_gradient], [found[scale].output_gradient], question.format, scale)
              for scale in SCALES),
        tuple(underflow.losses_by_tensor(kernels, exact.gradients, found[1.0].gradients, question.format,
                                         1.0))[:MOST_TENSORS])


def _trained(rank: Rank, model: GPT, corpus: Corpus, steps: int) -> dict[str, Array]:
    """The weights after so many steps in fp32, by name."""
    engine = Engine(rank, model, AdamW(LR))
    for step in range(steps):
        engine.step([_batch(model, corpus, step)])
    found = {}
    for name, shape in model.shapes.items():
        master = engine.state(name)["master"]
        assert master is not None, "every parameter is trained"
        found[name] = master.reshape(shape).copy()
    return found


def _batch(model: GPT, corpus: Corpus, step: int) -> tuple[Array, Array]:
    return corpus.batch(0, step, 0, SEQUENCES, model.config.context)
