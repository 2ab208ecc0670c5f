"""A GPT or a Llama trained on a text under any stage of ZeRO, or several times side by side, and how a run is shown.

Legend: N ranks, B sequences of a micro-batch, T tokens of a sequence, k micro-batches, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from zerosim import optim
from zerosim.display.views import RIGHT, Part, TextLine, View, marked_table, parts, plain, words
from zerosim.models.gpt import Decoder, generate, logits_of
from zerosim.models.llama import config_of, decoder
from zerosim.models.model_types import from_hugging_face, names_config
from zerosim.models.text import VOCABULARY, Corpus, readable
from zerosim.models.units import Model, Recompute, Weights
from zerosim.numerics.checks import is_count, is_finite_number, require_count, unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.loss_scale import Dynamic, Static
from zerosim.numerics.places import DISK, HOST, offload_of
from zerosim.numerics.policy import BY_RANK, Policy
from zerosim.numerics.units import counted
from zerosim.optim.base import Optimizer
from zerosim.optim.schedules import Warmup
from zerosim.options import StepOptions
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.errors import OutOfMemoryError
from zerosim.ranks.faults import FaultPlan, RankDied
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import PURPOSES, Trace, Traces
from zerosim.zero.checkpoint import INDEX
from zerosim.zero.engine import Batch, Engine
from zerosim.zero.layout import layout_of
from zerosim.zero.offload import OffloadError
from zerosim.zero.param_group import Group
from zerosim.zero.placements import STAGES, stage_of
from zerosim.zero.plugs import check_options
from zerosim.zero.skipped import unreported_skips

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WARMUP = 20  # steps in which the learning rate rises, and then it stays
MOST_RANKS = 1024
FP8 = "fp8"  # matrix products of 8-bit operands, as an experiment


@dataclass(frozen=True)  # no slots: a model that is read from files is read once
class Options:
    """The options of a training. Raises ValueError, in one sentence, for what cannot be.

    ``model`` is a preset's name, which gets a vocabulary of bytes, or a Hugging Face folder or its config.json: bytes
    are then its tokens 0 to 255. ``batch`` is B of one rank's micro-batch, ``sequence`` T (None: the model's context).
    Chosen by what they depend on, where None: ``lr``, by the optimizer;
    ``layout``, "whole_matrices" for an optimizer that needs them and does not ``gather`` them, else "per_unit";
    ``loss_scale``, "dynamic" for fp16, else 1. ``capacity_nbytes`` is what each rank may hold while it trains.
    ``mesh``, as "2x4", and ``zeropp``, as "hpz+qwz", are the engine's.
    """

    model: str = "gpt-micro"
    ranks: int = 4
    stage: int = 3
    compute: str = "bf16"
    optimizer: str = "adamw"
    lr: float | None = None
    micro_batches: int = 1
    batch: int = 4
    sequence: int | None = None
    recompute: str = "none"
    layout: str | None = None
    gather: bool = False
    reduction: str = BY_RANK
    steps: int = 200
    seed: int = 0
    clip_norm: float | None = 1.0
    loss_scale: float | str | None = None
    capacity_nbytes: int | None = None
    offload: str | None = None
    offload_directory: str | None = None
    sample_tokens: int = 160
    mesh: str = "none"
    zeropp: str = "none"

    def __post_init__(self) -> None:
        require_count("sample_tokens", self.sample_tokens, 0)
        for name in ("ranks", "micro_batches", "batch", "steps"):
            require_count(name, getattr(self, name), 1)
        require_count("sequence", self.sequence, 1, none="for the model's context")
        model = self.build()
        if self.tokens > model.config.context:
            raise ValueError(f"sequence={self.sequence} is more than the context of {self.model}, "
                             f"{model.config.context} tokens; take shorter sequences")
        self._check_ranks(model.parameter_count)
        stage, policy, options = stage_of(self.stage), self.policy(), self.step_options
        Recompute.parse(self.recompute)
        if self.lr is not None and (not is_finite_number(self.lr) or self.lr <= 0):
            raise ValueError(f"lr={self.lr!r} must be a positive number")
        check_options(options, stage, policy)
        if not options.offload.uses_disk and self.offload_directory is not None:
            raise ValueError(f"offload_directory={self.offload_directory!r} is of offload to disk, which was not asked "
                             "for; ask for it, or leave the directory out")
        layout_of(model, self.ranks, self.layout_name)

    def _check_ranks(self, parameter_count: int) -> None:
        if self.ranks > parameter_count:
            raise ValueError(f"ranks={self.ranks:,}: {self.model} has {parameter_count:,} parameters, and no layout "
                             "has one for each rank; take fewer ranks, or a larger model")
        if self.ranks > MOST_RANKS:
            raise ValueError(f"ranks={self.ranks:,}: all of them train in this process; take at "
                             f"most {MOST_RANKS:,}")

    @property
    def step_options(self) -> StepOptions:
        """The engine's options of moment, place and order, read from their texts."""
        places = offload_of(self.offload)
        if places.uses_disk:
            places = replace(places, directory=self.offload_directory)
        return StepOptions.of(self.ranks, offload=places, mesh=self.mesh, zeropp=self.zeropp, reduction=self.reduction)

    @cached_property
    def _model(self) -> Decoder:
        if not names_config(self.model):
            return decoder(replace(config_of(self.model), vocabulary=VOCABULARY), seed=self.seed)
        found = from_hugging_face(self.model, context=self.sequence, seed=self.seed)
        if found.config.vocabulary < VOCABULARY:
            raise ValueError(f"{self.model} has a vocabulary of {found.config.vocabulary} tokens, and a text is read "
                             f"as bytes, tokens 0 to {VOCABULARY - 1}; take a model with {VOCABULARY} tokens or more")
        return found

    @property
    def tokens(self) -> int:
        """T, the tokens of a sequence."""
        return self.sequence or self.build().config.context

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks and micro-batches."""
        return self.ranks * self.micro_batches * self.batch * self.tokens

    @property
    def learning_rate(self) -> float:
        """The one asked for, or the optimizer's."""
        lr: float = self.build_optimizer().lr  # type: ignore[attr-defined]
        return lr

    @property
    def layout_name(self) -> str:
        """The layout asked for, or the one that the optimizer can be cut by."""
        if self.layout is not None:
            return self.layout
        return "per_unit" if self.gather or self.build_optimizer().cut == "anywhere" else "whole_matrices"

    def build(self) -> Decoder:
        """The model, with first values by the seed, or with the folder's weights, where it has any."""
        return self._model

    def build_optimizer(self) -> Optimizer:
        """The optimizer by its class's name in any case, at the rate asked for or its own; ValueError lists them."""
        name = str(self.optimizer).lower()
        if name not in OPTIMIZERS:
            raise unknown_name(f"no optimizer is called {self.optimizer!r}", name, sorted(OPTIMIZERS))
        return OPTIMIZERS[name] if self.lr is None else OPTIMIZERS[name].with_lr(self.lr)

    def policy(self) -> Policy:
        """The precision policy: fp16 is scaled dynamically by default. Skipped steps are no error: they are counted."""
        formats = {"compute": "bf16", "matmul": "fp8"} if self.compute == FP8 else {"compute": self._resting_format()}
        chosen = self.loss_scale
        if chosen is None:
            chosen = "dynamic" if formats["compute"] == "fp16" else 1.0
        if chosen == "dynamic":
            return Policy(**formats, loss_scale=Dynamic(window=100))
        try:
            return Policy(**formats, loss_scale=Static(float(chosen), skips=None))
        except ValueError:
            raise ValueError(f"loss_scale={chosen!r} is neither a positive number nor 'dynamic'") from None

    def _resting_format(self) -> str:
        """The compute format's name; ValueError for one of 8 bits, in which weights and gradients cannot rest."""
        name = format_of(self.compute).name
        if name.startswith("fp8"):
            raise ValueError(f"compute={self.compute!r}: weights and gradients that rest in 8 bits, without a scale of "
                             f"their own, learn nothing; take {FP8!r}, an experiment in which the operands of matrix "
                             "products alone are of 8 bits")
        return name

    def engine_settings(self, model: Decoder) -> dict[str, Any]:
        """The arguments of an engine beside rank, model and optimizer."""
        return {"stage": self.stage, "policy": self.policy(), "layout": self.layout_name, "recompute": self.recompute,
                "clip_norm": self.clip_norm, "groups": other_groups(self.build_optimizer(), model),
                "schedule": Warmup(WARMUP), "gather": self.gather, "seed": self.seed} | self.step_options.arguments()


# -- optimizers by name, each with a learning rate that suits a small GPT ----------------------------------------------

# Of 1, 2 and 5 times powers of ten, the rate of the lowest loss on text held out after 100 steps of gpt-micro on the
# text that comes along, with four ranks and all other options as they are by default (2026-11-21).
OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType({type(one).__name__.lower(): one for one in (
    optim.Adafactor(lr=0.02), optim.AdaGrad(lr=0.005), optim.Adam(lr=0.002), optim.AdamW(lr=0.002),
    optim.Adan(lr=0.002), optim.KFAC(lr=0.05), optim.LAMB(lr=0.01), optim.LARS(lr=2.0), optim.Lion(lr=0.001),
    optim.Momentum(lr=0.1), optim.Muon(lr=0.05), optim.RMSprop(lr=0.0005), optim.SGD(lr=0.2), optim.Shampoo(lr=0.1),
    optim.SOAP(lr=0.01))})
OTHER_OPTIMIZER = "adamw"  # updates what an optimizer of matrices does not: vectors, and embeddings


def is_of_matrices(optimizer: Optimizer) -> bool:
    """True where it updates the matrices of linear layers, and others are to update the rest."""
    return optimizer.cut in ("matrix", "layer")


def other_groups(optimizer: Optimizer, model: Model) -> list[Group]:
    """AdamW for vectors, embeddings and a tied head, where the optimizer is one of matrices; else no group.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers", which are what it is for.
    """
    hidden = frozenset(name for unit in model.units for name in unit.factored)
    rest = [name for name in model.shapes if name not in hidden]
    if not is_of_matrices(optimizer) or not rest:
        return []
    return [Group(*rest, optimizer=OPTIMIZERS[OTHER_OPTIMIZER])]


# -- a run: a record for every step as it is taken, and what it came to -----------------------------------------------

@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One step: the mean loss of all ranks in nats, the norm, the scale and whether it was skipped, the same for all.

    Bytes are those of one rank: by kind at the fullest instant of the step, and sent in it by purpose.
    """

    number: int
    loss: float
    norm: float
    scale: float
    skipped: bool
    tokens: int
    peak_nbytes_by_kind: dict[str, int]
    sent_nbytes: dict[str, int]
    sent_across_nbytes: int = 0  # of these, to other nodes of the mesh

    @property
    def peak_nbytes(self) -> int:
        """Bytes held at the fullest instant."""
        return sum(self.peak_nbytes_by_kind.values())


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run. Bytes are in rank order, or by kind on the fullest rank; ``digest`` is of all masters."""

    options: Options
    steps: tuple[TrainingStep, ...]
    losses: tuple[tuple[float, ...], ...]  # by step, of each rank and micro-batch, in rank order
    held_out_loss: float
    unigram_entropy: float
    fullest_rank: int
    resting_nbytes_by_kind: dict[str, int]
    peak_nbytes_by_kind: dict[str, int]
    resting_nbytes: tuple[int, ...]
    peak_nbytes: tuple[int, ...]
    sent_nbytes: dict[str, list[int]]
    digest: str
    sample: str
    last_step: Traces | None = None  # what the ranks did in it, where that was to be kept
    sent_across_nbytes: tuple[int, ...] = ()  # to other nodes of a mesh, in rank order; none without one
    resumed_from: int | None = None  # the step of the checkpoint from which the run has gone on
    differences: tuple[str, ...] = ()  # between that run and this one
    # Of the fullest rank, at rest on its host and disk, by kind.
    offloaded_nbytes: dict[str, dict[str, int]] = field(default_factory=dict)
    happened: tuple[str, ...] = ()  # the faults that struck, and what came of them, in words
    different_ranks: tuple[int, ...] = ()  # whose masters differ from rank 0's, which no run without faults has

    @property
    def skipped(self) -> int:
        """Steps that every rank skipped."""
        return sum(step.skipped for step in self.steps)

    @property
    def diverged_at(self) -> int | None:
        """The step from which on no loss is a finite number; None where the last one is."""
        learned = [step.number for step in self.steps if math.isfinite(step.loss)]
        first = 1 + max(learned, default=self.steps[0].number - 1)
        return first if first <= self.steps[-1].number else None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folder of a run's checkpoint, which is written after every so many steps and the last (``every``; None:
    never), and from which the run goes on (``resume``). Raises ValueError for neither, and for no whole number."""

    folder: str
    every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every is None and not self.resume:
            raise ValueError(f"nothing would be written to {self.folder!r} or read from it; ask for --save-every, or "
                             "for --resume")
        if self.every is not None and (not is_count(self.every) or self.every < 1):
            raise ValueError(f"a checkpoint is to be saved every {self.every!r} steps; take a whole number, 1 or more")

    def is_due(self, step: int, last: int) -> bool:
        """True where a checkpoint is written after this step."""
        return self.every is not None and (step % self.every == 0 or step == last)


OnStep = Callable[[TrainingStep], None]
OnResume = Callable[[int, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class _RankResult:
    """The result of one rank; ``evaluation`` is the loss on text held out and the sample, on rank 0 alone."""

    steps: list[TrainingStep]
    losses: list[tuple[float, ...]]
    resting_nbytes_by_kind: dict[str, int]
    digest: str
    evaluation: tuple[float, str] | None
    last_step: Trace
    resumed_from: int | None
    differences: tuple[str, ...]
    offloaded_nbytes: dict[str, dict[str, int]]


def train(options: Options, corpus: Corpus, on_step: OnStep | None = None, *, keep_last_step: bool = False,
          checkpoints: Checkpoints | None = None, on_resume: OnResume | None = None,
          weights: str | None = None, faults: FaultPlan | None = None, checksums: bool = False,
          max_restarts: int = 0) -> Trained:
    """Trains on a cluster in this process; ``on_step`` is called after every step, by rank 0's program.

    ``keep_last_step`` keeps the traces of the last step, to be saved. ``checkpoints`` says whether the run is saved,
    and goes on from what was saved: then the steps are those that it took itself, and ``on_resume`` is called before
    them, with the step of the checkpoint and what is different. ``weights`` is a file or folder of which the first
    weights are, in place of drawn ones; see `zerosim.zero.hugging_face`. ``faults`` and ``checksums`` are the
    cluster's. When a rank dies the others, renumbered, go on from the last checkpoint, or, where there is none yet,
    begin anew, at most ``max_restarts`` times.

    Raises ValueError for a text that is too short, for an optimizer that the layout does not suit, and for a
    checkpoint, weights or offloaded state that cannot be written or read; OutOfMemoryError where a rank has less than
    the run needs.
    """
    corpus.require_length(options.tokens)
    if checkpoints is not None and not checkpoints.resume and (Path(checkpoints.folder) / INDEX).exists():
        raise ValueError(f"{checkpoints.folder!r} has the checkpoint of another run, which would be replaced; go on "
                         "from it by --resume, or name another folder")
    cluster = Cluster(options.ranks, capacity_nbytes=options.capacity_nbytes, faults=faults, checksums=checksums)
    try:
        with unreported_skips():
            found: list[_RankResult] = list(cluster.run(_program, options, options.build(), corpus, on_step,
                                                        checkpoints, on_resume, weights))
    except OffloadError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    except RankDied as death:
        if max_restarts < 1 or options.ranks == 1:
            raise
        saved = checkpoints is not None and (Path(checkpoints.folder) / INDEX).exists()
        goes_on = "go on from the last checkpoint" if saved else "begin anew, since there is no checkpoint"
        said = f"rank {death.rank} of {options.ranks} died in step {death.step}; {options.ranks - 1} {goes_on}"
        try:
            again = train(replace(options, ranks=options.ranks - 1), corpus, on_step, keep_last_step=keep_last_step,
                          checkpoints=checkpoints and replace(checkpoints, resume=saved), on_resume=on_resume,
                          weights=None if saved else weights, faults=faults and faults.rest(), checksums=checksums,
                          max_restarts=max_restarts - 1)
        except ValueError as error:  # fewer ranks cannot have each mesh, fault or layout
            raise ValueError(f"{said}, but: {error}") from error
        return replace(again, happened=(said, *again.happened))
    first = found[0]
    different = tuple(rank for rank, of_rank in enumerate(found) if of_rank.digest != first.digest)
    assert faults is not None or not different, "ranks ended in different weights"
    assert first.evaluation is not None, "rank 0 evaluates what it trained"
    peaks = [max(of_rank.steps, key=lambda step: step.peak_nbytes) for of_rank in found]
    fullest = max(range(options.ranks), key=lambda rank: peaks[rank].peak_nbytes)
    # Of the purposes for which some rank sends, and of the two that every stage is compared by.
    sent = {purpose: [sum(step.sent_nbytes[purpose] for step in of_rank.steps) for of_rank in found]
            for purpose in PURPOSES}
    return Trained(
        options=options, steps=tuple(first.steps),
        losses=tuple(tuple(loss for of_rank in found for loss in of_rank.losses[i]) for i in range(len(first.steps))),
        held_out_loss=first.evaluation[0], sample=first.evaluation[1], unigram_entropy=corpus.unigram_entropy,
        fullest_rank=fullest,
        resting_nbytes_by_kind=found[fullest].resting_nbytes_by_kind,
        offloaded_nbytes=found[fullest].offloaded_nbytes,
        peak_nbytes_by_kind=peaks[fullest].peak_nbytes_by_kind,
        resting_nbytes=tuple(sum(of_rank.resting_nbytes_by_kind.values()) for of_rank in found),
        peak_nbytes=tuple(peak.peak_nbytes for peak in peaks),
        sent_nbytes={purpose: nbytes for purpose, nbytes in sent.items() if any(nbytes) or purpose in PURPOSES[:2]},
        sent_across_nbytes=(tuple(sum(step.sent_across_nbytes for step in of_rank.steps) for of_rank in found)
                            if options.step_options.mesh else ()),
        digest=first.digest, last_step=Traces(of_rank.last_step for of_rank in found) if keep_last_step else None,
        resumed_from=first.resumed_from, differences=first.differences, different_ranks=different,
        happened=tuple(f"injected: {row}" for row in faults.struck) if faults else ())


def require_engine(options: Options) -> None:
    """Raises what making the engine raises: an optimizer that the layout does not suit, states that do not fit."""
    model = options.build()
    Cluster(options.ranks, capacity_nbytes=options.capacity_nbytes).run(
        lambda rank: _engine(rank, options, model).steps_taken)


def _engine(rank: Rank, options: Options, model: Decoder) -> Engine:
    return Engine(rank, model, options.build_optimizer(), **options.engine_settings(model))


def _program(rank: Rank, options: Options, model: Decoder, corpus: Corpus, on_step: OnStep | None,
             checkpoints: Checkpoints | None, on_resume: OnResume | None, weights: str | None) -> _RankResult:
    """One rank: its steps, then the results of the run."""
    engine = _engine(rank, options, model)
    if weights is not None:
        engine.load_weights(weights)
    # By these a step finds its micro-batches in a text, whichever rank takes them.
    data = {"seed": options.seed, "micro-batches of a step": options.ranks * options.micro_batches,
            "batch": options.batch, "sequence": options.tokens,
            "text": sha256(corpus.tokens.tobytes()).hexdigest()[:16]}
    resumed_from, differences = _resume(engine, options, checkpoints, data)
    rank.trace.steps_begun = resumed_from or 0
    if resumed_from is not None and on_resume is not None and rank.index == 0:
        on_resume(resumed_from, differences)
    steps: list[TrainingStep] = []
    losses: list[tuple[float, ...]] = []
    for number in range((resumed_from or 0) + 1, options.steps + 1):
        rank.trace.drop()  # read and done with; those of a long run would pile up
        last_step = Trace(held_at_start=rank.memory.now_nbytes_by_kind)
        batch = batches(options, corpus, number, rank.index)
        step, own = _step(engine, options, number, batch, last_step)
        steps.append(step)
        losses.append(own)
        if on_step is not None and rank.index == 0:
            on_step(step)
        if checkpoints is not None and checkpoints.is_due(number, options.steps):
            engine.save(checkpoints.folder, {"steps": number, "data": data})
    resting = rank.memory.now_nbytes_by_kind
    places = {HOST: rank.memory.host.now_nbytes_by_kind, DISK: rank.memory.disk.now_nbytes_by_kind}
    # The capacity is one for training: to evaluate the model takes whole tensors of state, and other batches.
    rank.memory.capacity_nbytes = None
    count = options.sample_tokens if math.isfinite(steps[-1].loss) else 0  # who has diverged writes nothing
    parameters, masters = whole_weights(engine)
    evaluation = None if rank.index else evaluate(engine, options, parameters, corpus, count)
    return _RankResult(steps, losses, resting, digest(masters), evaluation, last_step, resumed_from, differences,
                       {place: nbytes for place, nbytes in places.items() if nbytes})


def _resume(engine: Engine, options: Options, checkpoints: Checkpoints | None,
            data: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """The steps taken before, skipped ones too, and what is different now; None and nothing for a new run.

    Raises ValueError where no step is left.
    """
    if checkpoints is None or not checkpoints.resume:
        return None, ()
    found = engine.load(checkpoints.folder)
    if not isinstance(found.progress, dict) or found.progress.keys() != {"steps", "data"}:
        raise ValueError(f"the checkpoint in {checkpoints.folder!r} is of no such run: it was saved with the progress "
                         f"{found.progress!r}; go on from it by engine.load()")
    taken, before = found.progress["steps"], found.progress["data"]
    if taken >= options.steps:
        raise ValueError(f"the checkpoint in {checkpoints.folder!r} is of step {taken}, and {options.steps} steps were "
                         "asked for; ask for more, since the earlier ones count")
    changed = [f"{name} of the data: saved with {before.get(name)}, here {value}" for name, value in data.items()
               if before.get(name) != value]
    return taken, (*found.differences, *changed)


def _step(engine: Engine, options: Options, number: int, micro_batches: Sequence[Batch], kept: Trace
          ) -> tuple[TrainingStep, tuple[float, ...]]:
    """One step's record, and this rank's losses; the rows go into ``kept``."""
    memory, trace = engine.rank.memory, engine.rank.trace
    before = {purpose: trace.sent_nbytes(purpose) for purpose in PURPOSES}
    memory.reset_peak()
    result = engine.step(micro_batches)
    peak = memory.peak_nbytes_by_kind
    sent = {purpose: trace.sent_nbytes(purpose) - before[purpose] for purpose in PURPOSES}
    kept.rows += trace.rows
    mean = engine.rank.all_reduce(np.array([np.mean(result.losses)]), op="mean")  # after what is counted
    mesh = engine.options.mesh
    step = TrainingStep(number, float(mean[0]), result.norm, result.scale, result.skipped, options.tokens_per_step,
                        peak, sent, mesh.nbytes_across(engine.rank.index, kept) if mesh else 0)
    return step, result.losses


def batches(options: Options, corpus: Corpus, step: int, rank: int) -> list[Batch]:
    """The k micro-batches of one rank in one step."""
    return [corpus.batch(options.seed, step, j * options.ranks + rank, options.batch, options.tokens)
            for j in range(options.micro_batches)]


# -- a trained model evaluated: its loss on text held out, a digest of its weights, and what it writes -----------------

PROMPT = "Call me "
TEMPERATURE = 0.8
HELD_OUT_ROWS = 16


def digest(masters: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of all master weights, in their order, in hexadecimal."""
    found = sha256()
    for master in masters.values():
        found.update(np.ascontiguousarray(master).tobytes())
    return found.hexdigest()


def whole_weights(engine: Engine) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The whole parameters and their masters, by name: gathered where they rest sharded, so on every rank at once."""
    parameters, masters = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name in engine.model.shapes:
        state = engine.state(name, only=("parameter", "master"))
        for kind, found in (("parameter", parameters), ("master", masters)):
            if (weight := state[kind]) is not None:
                found[name] = weight
    return parameters, masters


def evaluate(engine: Engine, options: Options, weights: Weights, corpus: Corpus, count: int) -> tuple[float, str]:
    """The mean loss in nats on sequences that were not trained on, and the prompt with ``count`` bytes after it, drawn
    from the logits of bytes, whatever other tokens the model has.

    Raises ValueError for logits that are NaN or infinite.
    """
    model = options.build()
    logits = partial(logits_of, engine.context(), model, lambda unit: nullcontext(weights))
    x, target = corpus.held_out(HELD_OUT_ROWS, options.tokens)
    held_out, _ = model.loss.forward(engine.context(), logits(x), target)
    written = generate(lambda tokens: logits(tokens)[..., :VOCABULARY], list(PROMPT.encode()), count,
                       context=options.tokens, temperature=TEMPERATURE, seed=options.seed)
    return held_out, readable(written)


# -- a run as one reads it: a bar while it goes, tables when it is done ------------------------------------------------


class TrainingBar:
    """A progress bar, with tokens per second, and the latest step's loss, loss scale and peak bytes of rank 0."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=total, said="")
        self.begin("training")

    def begin(self, what: str) -> None:
        """The steps that follow are those of another run."""
        self._progress.update(self._task, description=what, said="")
        self._begun, self._tokens = time.perf_counter(), 0

    def on_step(self, step: TrainingStep) -> None:
        """One step is done."""
        self._tokens += step.tokens
        rate = self._tokens / max(time.perf_counter() - self._begun, 1e-9)
        self._progress.update(self._task, advance=1, said=f"loss {step.loss:.3f}  {rate:,.0f} tokens/s  "
                                                          f"scale {step.scale:g}  {step.peak_nbytes / 1e6:,.1f} MB")


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[TrainingBar]:
    """A progress bar of ``total`` steps on a terminal, removed at the end; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
               TextColumn("{task.fields[said]}"), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        yield TrainingBar(progress, total)


def training_view(found: Trained, text_name: str) -> View:
    """A training: its losses, its memory and traffic, and the text that it writes."""
    return View(found.options.model, f" on {' '.join(text_name.splitlines())}: {_headline(found.options)}",
                parts(_training_parts(found)))


def _training_parts(found: Trained) -> Iterator[Part | str]:
    yield ""
    yield marked_table("", RIGHT + "nats per byte", RIGHT + "bits", rows=[
        (what, f"{nats:.4f}", f"{nats / math.log(2):.3f}") for what, nats in (
            ("loss, first step", found.steps[0].loss), ("loss, last step", found.steps[-1].loss),
            ("loss on text held out", found.held_out_loss), ("entropy of single bytes", found.unigram_entropy))])
    yield ""
    fullest = found.fullest_rank
    yield marked_table(f"rank {fullest} holds, bytes", RIGHT + "at rest", RIGHT + "at the peak", rows=[
        *((words(kind), f"{found.resting_nbytes_by_kind.get(kind, 0):,}", f"{nbytes:,}")
          for kind, nbytes in found.peak_nbytes_by_kind.items()),
        ("all", f"{sum(found.resting_nbytes_by_kind.values()):,}", f"{sum(found.peak_nbytes_by_kind.values()):,}")])
    yield ""
    yield marked_table(f"rank {fullest} sends, bytes", RIGHT + "per step", RIGHT + "in all", rows=[
        (purpose, f"{nbytes[fullest] / len(found.steps):,.0f}", f"{nbytes[fullest]:,}")
        for purpose, nbytes in found.sent_nbytes.items()])
    yield ""
    for place, held in found.offloaded_nbytes.items():
        kinds = " and ".join(f"{nbytes:,} bytes of {words(kind)}" for kind, nbytes in held.items())
        yield f"Rank {fullest} keeps {kinds} on {'disk' if place == DISK else 'the host'} beside them."
    if across := sum(found.sent_across_nbytes):
        yield f"All ranks together send {across / len(found.steps):,.0f} bytes per step to other nodes."
    if len(set(found.peak_nbytes)) > 1:
        yield f"Ranks differ: at the peak the emptiest holds {min(found.peak_nbytes):,} bytes."
    if found.resumed_from is not None:
        yield f"Went on from step {found.resumed_from}."
        yield from map(escape, found.differences)
    yield (f"Steps: {len(found.steps)}, of {found.options.tokens_per_step:,} tokens each; skipped: {found.skipped}; "
           f"loss scale at the end: {found.steps[-1].scale:g}.")
    if (vocabulary := found.options.build().config.vocabulary) > VOCABULARY:
        yield f"The text's bytes are tokens 0 to {VOCABULARY - 1} of {vocabulary:,}: no tokenizer cut it."
    yield from map(escape, found.happened)
    others = list(found.different_ranks)
    whose = f"which differ on ranks {others}" if others else "the same on every rank"
    yield escape(f"SHA-256 of all master weights, {whose}: {found.digest[:16]}…")
    if found.options.sample_tokens:
        yield from ("", TextLine("It writes:", indent=0), "")
        yield escape(found.sample)  # brackets that it writes are no markup


def _headline(options: Options) -> str:
    """Parameters, ranks, stage, formats and optimizer, in words."""
    model, optimizer = options.build(), options.build_optimizer()
    config, formats = model.config, options.compute
    if formats == FP8:
        formats = ("an experiment: bf16 with matrix products of fp8 operands (e4m3, gradients e5m2, a scale for each "
                   "tensor)")
    updated = f"{options.optimizer.lower()} (lr {options.learning_rate:g}"
    mesh, zeropp = options.step_options.mesh, options.step_options.zeropp
    nodes = f" ({mesh}, {f'with {zeropp}' if zeropp else 'sharded inside nodes'})" if mesh else ""
    if is_of_matrices(optimizer):
        updated += f"; vectors and embeddings by {OTHER_OPTIMIZER}"
    return (f"{model.parameter_count:,} parameters, {config.layers} blocks of {config.channels} channels, "
            f"ZeRO-{options.stage} on {counted(options.ranks, 'rank')}{nodes}, layout "
            f"{options.layout_name}, {formats}, {updated})")


def require_learned(found: Trained) -> None:
    """Raises ValueError where nothing was learned: the last losses are no finite numbers, or every step was skipped."""
    happened = "".join(f"; {one}" for one in found.happened)
    if found.skipped == len(found.steps):
        raise ValueError(f"all {len(found.steps)} steps were skipped, since some gradient overflowed in each at a loss "
                         f"scale of {found.steps[-1].scale:g}; take a smaller scale, or more steps for it to fall"
                         f"{happened}")
    if found.diverged_at is not None:
        raise ValueError(
            f"training has diverged: from step {found.diverged_at} on the loss is no finite number, and "
            f"{found.skipped} of {len(found.steps)} steps were skipped; take a smaller learning rate than "
            f"{found.options.learning_rate:g}, or a format of more range than {found.options.compute}{happened}")


def training_as_json(found: Trained) -> dict[str, Any]:
    """All of it as plain data; what is not finite is a text."""
    data: dict[str, Any] = plain(replace(found, last_step=None))  # that is saved, and not printed
    data["options"] |= {"lr": found.options.learning_rate, "layout": found.options.layout_name}
    data["skipped"] = found.skipped
    data["held_out_bits_per_byte"] = plain(found.held_out_loss / math.log(2))
    data["unigram_entropy_bits"] = found.unigram_entropy / math.log(2)
    return data


# -- the same training several times, side by side: under every stage, in every format, or with different optimizers ---

OVER: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "stage": tuple(STAGES), "compute": ("fp32", "bf16", "fp16"), "optimizer": ("sgd", "adamw", "lion", "muon"),
    "recompute": ("none", "sub_block", "selective", "tiled", "block"), "mesh": ("none", "2x2"),
    "zeropp": ("flat", "hpz", "qwz", "qgz", "hpz+qwz+qgz")})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that differ in one option; ``same_bits`` says which of them ended in the same bits."""

    over: str
    values: tuple[Any, ...]
    runs: tuple[Trained, ...]

    @property
    def same_bits(self) -> list[list[Any]]:
        """The values whose runs saw the same losses and ended in the same weights, bit for bit, together."""
        together: dict[tuple[Any, ...], list[Any]] = {}
        for value, run in zip(self.values, self.runs, strict=True):
            # NaN equals nothing, but the same text.
            together.setdefault((run.digest, str(run.losses)), []).append(value)
        return list(together.values())

    @property
    def all_same_bits(self) -> bool:
        """True where every run saw the same losses and ended in the same weights."""
        return len(self.same_bits) == 1


def values_of(over: str, text: str | None) -> list[Any] | None:
    """``"0,3"`` as values of an option: whole numbers for stages, words for the others; None without a text."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [int(word) if word.isdecimal() else word for word in words] if over == "stage" else words


def runs_of(options: Options, over: str = "stage", values: Sequence[Any] | None = None) -> dict[Any, Options]:
    """The runs to be made, by value of one option; without values, by all of them.

    Raises ValueError for an option not in OVER, for fewer than two values, for one that comes twice, and for one that
    cannot be.
    """
    if over not in OVER:
        raise unknown_name(f"asked to compare over {over!r}", over, OVER)
    chosen = OVER[over] if values is None else tuple(values)
    if len(chosen) < 2 or len(set(chosen)) < len(chosen):
        raise ValueError(f"values={','.join(map(str, chosen))!r}: a comparison over {over} takes two or more that "
                         f"differ, as in {','.join(map(str, OVER[over]))}")
    return {value: replace(options, sample_tokens=0, **{over: value}) for value in chosen}


def compare(options: Options, corpus: Corpus, over: str = "stage", values: Sequence[Any] | None = None,
            on_run: Callable[[str], None] | None = None, on_step: OnStep | None = None) -> Comparison:
    """Trains once for each value of one option; ``on_run`` is called with each run's name, ``on_step`` with each step.

    Raises what `runs_of` and `train` raise; all that can be checked, before the first run.
    """
    chosen = runs_of(options, over, values)
    corpus.require_length(options.tokens)
    for value, one in chosen.items():
        with _naming(f"{over} {value}"):
            require_engine(one)
    runs = []
    for value, one in chosen.items():
        if on_run is not None:
            on_run(f"{over} {value}")
        with _naming(f"{over} {value}"):
            runs.append(train(one, corpus, on_step))
    return Comparison(over, tuple(chosen), tuple(runs))


@contextmanager
def _naming(which: str) -> Iterator[None]:
    """Names the run that does not fit."""
    try:
        yield
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{which}: {error}") from error


def comparison_view(found: Comparison, text_name: str) -> View:
    """Losses, memory and traffic of each run, and which of them ended in the same bits."""
    options = found.runs[0].options
    return View(options.model, f" on {' '.join(text_name.splitlines())}, {counted(options.ranks, 'rank')}, "
                               f"{counted(options.steps, 'step')}, by {found.over}", parts(_comparison_parts(found)))


def _comparison_parts(found: Comparison) -> Iterator[Part | str]:
    yield ""
    yield marked_table("", *(f"{RIGHT}{value}" for value in found.values), rows=_rows(found))
    yield ""
    yield "Losses are in nats per byte. Bytes are those of the rank that holds or sends most, sent ones per step."
    for value, run in zip(found.values, found.runs, strict=True):
        if run.diverged_at is not None:
            yield f"{found.over} {value} diverged: from step {run.diverged_at} on its loss is not finite."
    if all(run.diverged_at is not None for run in found.runs):
        return
    if found.all_same_bits:
        yield f"All {len(found.runs)} runs saw the same losses and ended in the same weights, bit for bit."
    elif len(found.same_bits) == len(found.runs):
        yield "No two runs ended in the same weights."
    else:
        groups = "; ".join(", ".join(map(str, values)) for values in found.same_bits if len(values) > 1)
        alone = ", ".join(str(values[0]) for values in found.same_bits if len(values) == 1)
        yield (f"These ended in the same weights, bit for bit: {groups}."
               + (f" In weights that no other run has: {alone}." if alone else ""))


def _rows(found: Comparison) -> list[tuple[str, ...]]:
    runs = found.runs
    purposes = dict.fromkeys(purpose for run in runs for purpose in run.sent_nbytes)
    chosen = [("learning rate", *(f"{run.options.learning_rate:g}" for run in runs)),
              ("layout", *(run.options.layout_name for run in runs))]
    return [
        *(row for row in chosen if len(set(row[1:])) > 1),
        ("loss, first step", *(f"{run.steps[0].loss:.4f}" for run in runs)),
        ("loss, last step", *(f"{run.steps[-1].loss:.4f}" for run in runs)),
        ("loss, held out", *(f"{run.held_out_loss:.4f}" for run in runs)),
        ("steps skipped", *(str(run.skipped) for run in runs)),
        ("at rest, bytes", *(f"{max(run.resting_nbytes):,}" for run in runs)),
        ("at the peak, bytes", *(f"{max(run.peak_nbytes):,}" for run in runs)),
        *((f"sent, {purpose}", *(f"{max(run.sent_nbytes.get(purpose, [0])) // len(run.steps):,}" for run in runs))
          for purpose in purposes),
        *([("sent between nodes, all", *(f"{sum(run.sent_across_nbytes) // len(run.steps):,}"
                                         if run.sent_across_nbytes else "-" for run in runs))]
          if any(run.sent_across_nbytes for run in runs) else []),
        ("masters, SHA-256", *(run.digest[:8] for run in runs))]


def comparison_as_json(found: Comparison) -> dict[str, Any]:
    """All runs as plain data, by the value in which they differ."""
    return {"over": found.over, "same_bits": found.all_same_bits, "same_bits_by_value": found.same_bits,
            "runs": {str(value): training_as_json(run) for value, run in zip(found.values, found.runs, strict=True)}}
