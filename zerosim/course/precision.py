"""The failures of mixed precision, and what helps against each: all of it is run.

Small gradients become 0; dynamic loss scalers differ; no loss scale cures an overflow in forward; weights and Adam's
averages that rest in 16 bits stall or explode. What becomes of one weight, or of one average, is in `lost_updates`.
Legend: B batch, T tokens, g a gradient as fp32 computes it, S the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zerosim.course.precision_runs import BATCHES, LargestValue, Rested, Trial, largest_values, policies, rested, trials
from zerosim.course.training import whole_weights
from zerosim.display.views import View, plain
from zerosim.models.gpt import GPT, config_of
from zerosim.models.text import VOCABULARY, Corpus
from zerosim.models.units import Pass, one_pass
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_count
from zerosim.numerics.formats import Format, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.optim import AdamW
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.shown import Shown
from zerosim.zero.engine import Engine

SCALES = (1.0, 2.0**8, 2.0**16, 2.0**20)
SEQUENCES = 4  # B
LR = 3e-3
MOST_TENSORS = 4
STEPS_RATIO = 8  # steps of the small network that rests in other formats, for each step on the text


@dataclass(frozen=True, slots=True)
class PrecisionQuestion:
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
        return max(BATCHES, STEPS_RATIO * self.steps)

    def build(self) -> GPT:
        """The model, with a vocabulary of bytes."""
        return GPT(replace(config_of(self.model), vocabulary=VOCABULARY))


@dataclass(frozen=True, slots=True)
class Precision(Shown):
    """All answers: a field, or two, for each section."""

    question: PrecisionQuestion
    underflows: Underflows
    pattern: tuple[bool, ...]
    traces: tuple[ScalerTrace, ...]
    trials: tuple[Trial, ...]
    largest: tuple[LargestValue, ...]
    rested: tuple[Rested, ...]

    def view(self) -> View:
        """The four sections, for a terminal or a notebook."""
        from zerosim.course.precision_view import lesson

        return lesson(self)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data; what is no finite number is the text "inf", "-inf" or "nan"."""
        data: dict[str, Any] = plain(self)
        return data


def precision(question: PrecisionQuestion, corpus: Corpus) -> Precision:
    """Runs everything: ten seconds for the question as it stands."""
    return Precision(
        question, underflows(question, corpus), PATTERN, tuple(traces()), tuple(trials(question.format)),
        tuple(largest_values(question.format)),
        tuple(rested(policy, question.resting_steps) for policy in policies(question.format)))


# -- 1: gradients that are too small for a format ---------------------------------------------------------------------
# S times the loss has S times the gradients: scaled up, fewer of them fall below the format's smallest number, and more
# rise above its largest. Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2 and figure 3.


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
    binades: tuple[Binade, ...]
    rounded: tuple[Fates, ...]
    computed: tuple[Fates, ...]
    at_output: tuple[Fates, ...]
    worst: tuple[TensorLoss, ...]


@dataclass(frozen=True, slots=True)
class Binade:
    """The number of gradients of a magnitude from 2^exponent up to, but not including, 2^(exponent + 1)."""

    exponent: int
    elements: int


@dataclass(frozen=True, slots=True)
class Fates:
    """The fates of so many gradients in a format, S times as large; all counts but ``elements`` add up to it.

    ``zero``: 0 in fp32. ``lost``: 0 here alone. ``subnormal``: kept with fewer bits. ``normal``: kept with all bits.
    ``not_finite``: inf or NaN.
    """

    format: str
    scale: float
    elements: int
    zero: int
    lost: int
    subnormal: int
    normal: int
    not_finite: int

    @property
    def lost_share(self) -> float:
        """The share of the gradients other than 0 that are lost."""
        return self.lost / max(1, self.elements - self.zero)


@dataclass(frozen=True, slots=True)
class TensorLoss:
    """The number of lost gradients of one parameter."""

    name: str
    elements: int
    lost: int


def underflows(question: PrecisionQuestion, corpus: Corpus) -> Underflows:
    """Trains on the text, in fp32, and counts the gradients of the batch that would come next."""
    model, fmt = question.build(), question.format
    corpus.require_length(model.config.context)
    weights = Cluster(1).run(_trained, model, corpus, question.steps)[0]
    x, target = _batch(model, corpus, question.steps)
    exact = one_pass(model, weights, Policy(), x, target)
    found = {scale: one_pass(model, weights, Policy(fmt), x, target, scale) for scale in SCALES}

    def computed(scale: float, passed: Pass) -> Fates:
        return fates(exact.gradients.values(), [passed.gradients[name] for name in exact.gradients], fmt, scale)

    return Underflows(
        corpus.name, x.size, exact.loss, binades(exact.gradients.values()),
        tuple(rounded_fates(exact.gradients.values(), fmt, scale) for scale in SCALES),
        tuple(computed(scale, passed) for scale, passed in found.items()),
        tuple(fates([exact.output_gradient], [passed.output_gradient], fmt, scale) for scale, passed in found.items()),
        tuple(losses_by_tensor(exact.gradients, found[1.0].gradients, fmt, 1.0))[:MOST_TENSORS])


def _trained(rank: Rank, model: GPT, corpus: Corpus, steps: int) -> dict[str, Array]:
    """The weights after so many steps in fp32, by name."""
    engine = Engine(rank, model, AdamW(LR))
    for step in range(steps):
        engine.step([_batch(model, corpus, step)])
    return whole_weights(engine, "master")


def _batch(model: GPT, corpus: Corpus, step: int) -> tuple[Array, Array]:
    return corpus.batch(0, step, 0, SEQUENCES, model.config.context)


def rounded_fates(gradients: Iterable[Array], fmt: Format | str, scale: float = 1.0) -> Fates:
    """The fates of S·g, the product in fp32, rounded once: gradients of any shape, fp32."""
    kernels, exact, found = NumpyKernels(), list(gradients), []
    for g in exact:
        found.append(np.empty(g.shape, format_of(fmt).dtype))
        kernels.multiply_rounded(g, scale, found[-1])
    return fates(exact, found, fmt, scale)


def fates(exact: Iterable[Array], found: Iterable[Array], fmt: Format | str, scale: float) -> Fates:
    """The fates of gradients that are ``exact`` in fp32 and, S times as large, ``found`` in the format."""
    kernels, row, counts = NumpyKernels(), format_of(fmt), [0] * 6
    for g, stored in zip(exact, found, strict=True):
        magnitude = np.empty(stored.shape, np.float32)
        kernels.cast_pack(stored, magnitude)
        np.abs(magnitude, out=magnitude)
        finite, was, gone = np.isfinite(magnitude), g != 0, magnitude == 0
        small = magnitude < row.smallest_normal
        kinds = (np.ones_like(was), finite & ~was, was & gone, was & ~gone & small, was & finite & ~small, ~finite)
        counts = [count + int(np.count_nonzero(kind)) for count, kind in zip(counts, kinds, strict=True)]
    elements, zero, lost, subnormal, normal, not_finite = counts
    return Fates(row.name, scale, elements, zero, lost, subnormal, normal, not_finite)


def binades(gradients: Iterable[Array]) -> tuple[Binade, ...]:
    """The number of gradients, fp32 of any shape, in each binade, from the smallest but 0 to the largest; binades
    between them that have none are there too, infinities and NaN nowhere."""
    counts: dict[int, int] = {}
    for g in gradients:
        _, exponents = np.frexp(g[np.isfinite(g) & (g != 0)])  # g = m·2^e with 1/2 <= |m| < 1
        for exponent, count in zip(*np.unique(exponents - 1, return_counts=True), strict=True):
            counts[int(exponent)] = counts.get(int(exponent), 0) + int(count)
    span = range(min(counts, default=0), max(counts, default=-1) + 1)
    return tuple(Binade(exponent, counts.get(exponent, 0)) for exponent in span)


def losses_by_tensor(exact: Mapping[str, Array], found: Mapping[str, Array], fmt: Format | str,
                     scale: float) -> Iterator[TensorLoss]:
    """The parameters that lose gradients, those that lose most first."""
    lost = {name: fates([g], [found[name]], fmt, scale).lost for name, g in exact.items()}
    for name in sorted(lost, key=lambda name: (-lost[name], name)):
        if lost[name]:
            yield TensorLoss(name, exact[name].size, lost[name])


# -- 2: the dynamic loss scalers in use, on the same overflows: they are not one machine ------------------------------

PATTERN = tuple(digit == "1" for digit in "000001100001011")  # which steps overflow
INITIAL = 256.0
WINDOW = 2  # good steps until a scale grows; in earnest, 2,000 (PyTorch) or 1,000 (DeepSpeed)
MACHINES = (("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed-legacy", 2))


@dataclass(frozen=True, slots=True)
class ScalerTrace:
    """The scale after each step of PATTERN."""

    kind: str
    hysteresis: int
    scales: tuple[float, ...]


def traces() -> Iterator[ScalerTrace]:
    """Each of MACHINES, from INITIAL on."""
    for kind, hysteresis in MACHINES:
        scaler = Dynamic(kind, INITIAL, WINDOW, hysteresis).start()
        scales = []
        for overflow in PATTERN:
            scaler.update(overflow)
            scales.append(scaler.scale)
        yield ScalerTrace(kind, hysteresis, tuple(scales))
