"""The failures of mixed precision, and what helps against each: all of it is run, and shown in four sections.

Small gradients become 0; dynamic loss scalers differ; no loss scale cures an overflow in forward; weights and Adam's
averages that rest in 16 bits stall or explode. What becomes of one weight, or of one average, is in `lost_updates`.
Legend: B batch, T tokens, N ranks, g a gradient as fp32 computes it, S the loss scale, lr the learning rate, u the unit
of the data (`precision_runs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from zerosim.course.precision_runs import BATCHES, WIDTHS, samples, trained
from zerosim.course.training import whole_weights
from zerosim.display.style import percent, rough, short
from zerosim.display.views import Heading, Part, View, marked_table, parts
from zerosim.models.gpt import Decoder
from zerosim.models.llama import config_of, decoder
from zerosim.models.passes import Pass, one_pass
from zerosim.models.small import MLP
from zerosim.models.text import VOCABULARY, Corpus
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import require_count
from zerosim.numerics.formats import FORMATS, Format, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.loss_scale import Dynamic, Scaling, Static
from zerosim.numerics.policy import Policy
from zerosim.optim import SGD, Adam, AdamW
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.shown import Answer
from zerosim.zero.engine import Engine

SCALES = (1.0, 2.0**8, 2.0**16, 2.0**20)
SEQUENCES = 4  # B
TEXT_LR = 3e-3
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
        require_count("steps", self.steps, 1)


    def build(self) -> Decoder:
        """The model, with a vocabulary of bytes."""
        return decoder(replace(config_of(self.model), vocabulary=VOCABULARY))


@dataclass(frozen=True, slots=True)
class Precision(Answer):
    """All answers: a field, or two, for each section."""

    question: PrecisionQuestion
    underflows: Underflows
    traces: tuple[ScalerTrace, ...]
    trials: tuple[Trial, ...]
    rested: tuple[Rested, ...]

    def view(self) -> View:
        """The four sections, for a terminal or a notebook."""
        return View("Mixed precision", ": what goes wrong in 16 bits, and what helps.",
                    parts(_small_gradients(self), _loss_scaling(self), _overflows(self), _resting(self)))


def precision(question: PrecisionQuestion, corpus: Corpus) -> Precision:
    """Runs everything: ten seconds for the question as it stands."""
    steps = max(BATCHES, STEPS_RATIO * question.steps)
    return Precision(
        question, underflows(question, corpus), tuple(traces()), tuple(trials(question.format)),
        tuple(rested(policy, steps) for policy in policies(question.format)))


# -- 1: gradients that are too small for a format ---------------------------------------------------------------------
# S times the loss has S times the gradients: scaled up, fewer of them fall below the format's smallest number, and more
# rise above its largest. Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2 and figure 3.


@dataclass(frozen=True, slots=True)
class Underflows:
    """The gradients of one batch of a text, in fp32 and in the format of the question, for each of SCALES.

    ``rounded``: S times the fp32 gradients of the parameters, rounded to the format. ``computed``: those of a backward
    in the format, from S times the loss. ``at_output``: the gradients of the logits, where that backward begins.
    ``worst``: of ``computed`` at S = 1, the parameters that lose most.
    """

    text: str
    tokens: int
    loss: float
    rounded: tuple[Fates, ...]
    computed: tuple[Fates, ...]
    at_output: tuple[Fates, ...]
    worst: dict[str, Fates]


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
        corpus.name, x.size, exact.loss,
        tuple(rounded_fates(exact.gradients.values(), fmt, scale) for scale in SCALES),
        tuple(computed(scale, passed) for scale, passed in found.items()),
        tuple(fates([exact.output_gradient], [passed.output_gradient], fmt, scale) for scale, passed in found.items()),
        worst(exact.gradients, found[1.0].gradients, fmt))


def _trained(rank: Rank, model: Decoder, corpus: Corpus, steps: int) -> dict[str, Array]:
    """The weights after so many steps in fp32, by name."""
    engine = Engine(rank, model, AdamW(TEXT_LR))
    for step in range(steps):
        engine.step([_batch(model, corpus, step)])
    return whole_weights(engine)[1]


def _batch(model: Decoder, corpus: Corpus, step: int) -> tuple[Array, Array]:
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
        finite, given, stored_0 = np.isfinite(magnitude), g != 0, magnitude == 0
        small = magnitude < row.smallest_normal
        kinds = (np.ones_like(given), finite & ~given, given & stored_0, given & ~stored_0 & small,
                 given & finite & ~small, ~finite)
        counts = [count + int(np.count_nonzero(kind)) for count, kind in zip(counts, kinds, strict=True)]
    elements, zero, lost, subnormal, normal, not_finite = counts
    return Fates(row.name, scale, elements, zero, lost, subnormal, normal, not_finite)


def worst(exact: Mapping[str, Array], found: Mapping[str, Array], fmt: str) -> dict[str, Fates]:
    """The fates in each of the parameters that lose most gradients, without a loss scale; the worst first."""
    by_name = {name: fates([g], [found[name]], fmt, 1.0) for name, g in exact.items()}
    lossy = sorted((name for name, one in by_name.items() if one.lost), key=lambda name: (-by_name[name].lost, name))
    return {name: by_name[name] for name in lossy[:MOST_TENSORS]}


def _small_gradients(found: Precision) -> Iterator[Part | str]:
    """The fates of the gradients at several loss scales."""
    question, seen = found.question, found.underflows
    yield Heading(1, f"Small gradients in {question.format}")
    yield f"{question.model} on {seen.text}, after AdamW (lr {TEXT_LR:g}) in fp32, steps: {question.steps:,}."
    yield f"The gradients of the next batch, {seen.tokens:,} tokens, at several loss scales S:"
    yield marked_table(
        ">S", ">rounded: 0", ">subnormal", ">inf", ">computed: 0", ">subnormal", ">inf", ">logits: 0",
        rows=map(_scale_cells, seen.rounded, seen.computed, seen.at_output))
    yield "Rounded: S times the fp32 gradients. Computed: a backward all in the format,"
    yield "from S times the loss; logits: where it begins. Subnormal: with fewer bits."
    for name, of_tensor in seen.worst.items():
        yield f"  Lost with S = 1 in {name}: {of_tensor.lost:,} of {of_tensor.elements:,}"


def _scale_cells(rounded: Fates, computed: Fates, at_output: Fates) -> tuple[str, ...]:
    counts = [rounded.lost, rounded.subnormal, rounded.not_finite, computed.lost, computed.subnormal,
              computed.not_finite, at_output.lost]
    return scale_text(rounded.scale), *(f"{count:,}" for count in counts)


def scale_text(scale: float) -> str:
    """``2^16`` for powers of two that are not short themselves."""
    mantissa, exponent = math.frexp(scale)
    return short(scale) if mantissa != 0.5 or 1 <= scale < 1000 else f"2^{exponent - 1}"


# -- 2: the dynamic loss scalers in use, on the same overflows: they are not one machine ------------------------------

PATTERN = tuple(digit == "1" for digit in "000001100001011")  # which steps overflow
FIRST_SCALE = 256.0
WINDOW = 2  # good steps until a scale grows; in earnest, 2,000 (PyTorch) or 1,000 (DeepSpeed)
MACHINES = (("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed-legacy", 2))


@dataclass(frozen=True, slots=True)
class ScalerTrace:
    """The scale after each step of PATTERN."""

    kind: str
    hysteresis: int
    scales: tuple[float, ...]


def traces() -> Iterator[ScalerTrace]:
    """Each of MACHINES, from FIRST_SCALE on."""
    for kind, hysteresis in MACHINES:
        scaler = Dynamic(kind, FIRST_SCALE, WINDOW, hysteresis).start()
        scales = []
        for overflow in PATTERN:
            scaler.update(overflow)
            scales.append(scaler.scale)
        yield ScalerTrace(kind, hysteresis, tuple(scales))


def _loss_scaling(found: Precision) -> Iterator[Part | str]:
    """The scale after each step by each of the machines in use."""
    yield Heading(2, f"Dynamic loss scaling: four machines (from {FIRST_SCALE:g}, window {WINDOW})")
    names = [f">{trace.kind}" + (f" ({trace.hysteresis})" if trace.kind != "torch" else "")
             for trace in found.traces]
    yield marked_table(">step", "", *names, rows=(
        (str(step), "overflow" if overflow else "", *(short(trace.scales[step - 1]) for trace in found.traces))
        for step, overflow in enumerate(PATTERN, start=1)))
    yield "An overflow skips the step and halves S. DeepSpeed's hysteresis, in brackets,"
    yield "is how many that takes, until S grows again. S doubles on the last good step"
    yield "of a window (torch, deepspeed-legacy), or on the next one (deepspeed)."


# -- 3: two overflows: one in backward, which a smaller loss scale cures, and one in forward, which none does ----------
# The same network learns the same task in a small unit, in which fp16 holds all its activations, and in a large one, in
# which fp16 still holds the inputs, but not what the first layer adds up of them.

OVERFLOW_WIDTHS = (8, 256, 1)
OVERFLOW_ROWS = 16  # B
OVERFLOW_RANKS = 2
OVERFLOW_STEPS = 40
OVERFLOW_SEED = 2
OVERFLOW_LR = 0.002  # at u = 1
LOWEST, HIGHEST = 0.5, 1.9  # the inputs, in units: of one sign, so that what a layer adds up does not cancel
OVERFLOW_FIRST_SCALE = 2.0**16
SCALINGS: Mapping[str, Scaling] = {
    "S = 1": Static(1.0), "S = 2^-16": Static(2.0**-16), "torch": Dynamic("torch", OVERFLOW_FIRST_SCALE),
    "deepspeed": Dynamic("deepspeed", OVERFLOW_FIRST_SCALE)}


@dataclass(frozen=True, slots=True)
class Trial:
    """The course of a training in one unit and format with one loss scaling; losses are in units squared, as at u = 1.

    ``scale`` is S at the end; ``gave_up`` is the step at which the scaler raised, or None.
    """

    unit: float
    format: str
    scaling: str
    steps: int
    skipped: int
    first_loss: float
    last_loss: float
    scale: float
    gave_up: int | None


def large_unit(fmt: str) -> float:
    """The largest power of two in which the format still holds the inputs; fp16's for formats that reach further."""
    largest = min(format_of(fmt).largest, FORMATS["fp16"].largest)
    return 2.0 ** math.floor(math.log2(largest / HIGHEST))


def trials(fmt: str, steps: int = OVERFLOW_STEPS) -> Iterator[Trial]:
    """Every scaling in the format, and the formats of fp32's range without scaling, in both units."""
    wide = [name for name in dict.fromkeys((fmt, "bf16", "fp32")) if has_wide_range(name)]
    for unit in (1.0, large_unit(fmt)):
        if not has_wide_range(fmt):
            for scaling in SCALINGS:
                yield trial(unit, fmt, scaling, steps)
        for name in wide:
            yield trial(unit, name, "S = 1", steps)


def trial(unit: float, fmt: str, scaling: str, steps: int = OVERFLOW_STEPS) -> Trial:
    """Trains on two ranks, with one of SCALINGS; the losses are rank 0's."""
    run = trained(overflow_network, SGD(OVERFLOW_LR / unit**2), partial(overflow_batch, unit),
                  Policy(fmt, loss_scale=SCALINGS[scaling]), steps, ranks=OVERFLOW_RANKS, unit=unit)
    return Trial(unit, fmt, scaling, steps, sum(run.skipped), run.losses_by_rank[0][0], run.losses_by_rank[-1][0],
                 run.scale, run.gave_up)


def overflow_network() -> MLP:
    """The network: ReLU keeps units, and so does every layer without a bias."""
    return MLP(OVERFLOW_WIDTHS, bias=False, seed=OVERFLOW_SEED)


def overflow_batch(unit: float, step: int, rank: int) -> tuple[Array, Array]:
    """x (B, 8) and target (B, 1), both in fp32 and in the unit; the target is x0·x1 + x2 of the numbers at u = 1."""
    shape = (OVERFLOW_ROWS, OVERFLOW_WIDTHS[0])
    words = random.uniform((0, "forward overflow", step, rank), 0, math.prod(shape)).reshape(shape)
    x = np.float32(LOWEST) + np.float32(HIGHEST - LOWEST) * words
    target = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    return x * np.float32(unit), target * np.float32(unit)


def has_wide_range(fmt: str) -> bool:
    """True when a format has fp32's exponents."""
    return format_of(fmt).max_exponent == FORMATS["fp32"].max_exponent


def _overflows(found: Precision) -> Iterator[Part | str]:
    """The same training in two units, with every loss scaling."""
    unit = found.trials[-1].unit
    yield Heading(3, "Overflow in backward, and in forward")
    yield f"A small network with inputs from {LOWEST:g} to {HIGHEST:g}; and again in another unit, where"
    yield f"inputs and targets are {short(unit)} times as large. Losses are in the first unit."
    yield ""
    small = [trial for trial in found.trials if trial.unit == 1]
    large = [trial for trial in found.trials if trial.unit != 1]
    yield marked_table(
        "format", "loss scale", ">skipped", ">loss, last", f">x {short(unit)}: skipped", ">loss, last",
        rows=((a.format, a.scaling, *_trial_cells(a), *_trial_cells(b)) for a, b in zip(small, large, strict=True)))
    if not all(math.isfinite(trial.first_loss) for trial in large):
        yield "The larger ones overflow on the way forward, before any loss scale enters."


def _trial_cells(trial: Trial) -> tuple[str, str]:
    gave_up = "" if trial.gave_up is None else ", gave up"
    return f"{trial.skipped} of {trial.gave_up or trial.steps}{gave_up}", _value(trial.last_loss)


def _value(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"[red]{value}[/]"
    return rough(value, digits if value < 1000 else digits - 1)


# -- 4: what rests between steps in other formats: master weights, Adam's state, products in fp8 ----------------------
# A network as small as this one shows it: weights that are updated in the format that computes move only where lr is
# half a gap, or more; Adam's v in fp16 is 0, so that Adam divides by its ε.

RESTING_LR = 1e-4


@dataclass(frozen=True, slots=True)
class Rested:
    """The course of a training. Losses are means over the first, the middle and the last round of the data.

    ``moved_share`` is the share of the weights that the last step changed, as far as their format shows it.
    """

    compute: str
    master: str
    state: str
    matmul: str | None
    steps: int
    skipped: int
    first_loss: float
    middle_loss: float
    last_loss: float
    moved_share: float


def policies(fmt: str) -> Iterator[Policy]:
    """fp32; then the format and bf16, each with fp32 masters and state, without masters, with state of its own; then
    bf16 with products in fp8."""
    yield Policy("fp32")
    for name in dict.fromkeys((fmt, "bf16")):
        if name != "fp32":
            scale = 1.0 if has_wide_range(name) else Dynamic("torch")
            yield Policy(name, loss_scale=scale)
            yield Policy(name, loss_scale=scale, master=name)
            yield Policy(name, loss_scale=scale, state=name)
    yield Policy("bf16", matmul="fp8")


def rested(policy: Policy, steps: int) -> Rested:
    """Trains with Adam, at least one round of the data."""
    if steps < BATCHES:
        raise ValueError(f"asked for {steps} steps; one round of the data takes {BATCHES}, so ask for that or more")
    run = trained(lambda: MLP(WIDTHS, seed=0), Adam(RESTING_LR), samples, policy, steps)
    starts = (0, (steps - BATCHES) // 2, steps - BATCHES)
    with np.errstate(all="ignore"):  # a mean of infinities is one
        first, middle, last = (float(np.mean(run.losses[start:start + BATCHES])) for start in starts)
    return Rested(policy.compute, policy.master, policy.state, policy.matmul, steps, sum(run.skipped), first,
                  middle, last, run.moved_share)


def _resting(found: Precision) -> Iterator[Part | str]:
    """The same training with masters, state and products in other formats."""
    yield Heading(4, f"What rests between steps: {found.rested[0].steps} steps of Adam, lr = {RESTING_LR:g}")
    yield marked_table(
        "compute", "master", "m and v", "matmul", ">loss", ">middle", ">end", ">moved", ">skips",
        rows=((run.compute, run.master if run.master != run.compute or run.compute == "fp32" else "none", run.state,
               run.matmul or "", *(_value(loss, 3) for loss in (run.first_loss, run.middle_loss, run.last_loss)),
               percent(run.moved_share), str(run.skipped)) for run in found.rested))
    yield "Losses are means over all data. Moved: weights that the last step changed."
