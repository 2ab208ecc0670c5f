"""A training run on text: options as a value, a record per step, and what it came to.

Legend: N ranks, B sequences of a micro-batch, T tokens of a sequence, k micro-batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from zerosim import optim
from zerosim.models.generate import generate, logits_of
from zerosim.models.gpt import GPT
from zerosim.models.gpt_config import PRESETS, GPTConfig, config_of
from zerosim.models.recompute import Recompute
from zerosim.models.text import VOCABULARY, Corpus, readable
from zerosim.numerics.checks import is_count, is_finite_number
from zerosim.numerics.formats import format_of
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine
from zerosim.zero.layout import layout_of, unit_shapes
from zerosim.zero.placements import stage_of

WARMUP = 20  # steps in which the learning rate rises
PROMPT = "Call me "
HELD_OUT_ROWS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What to train, and how. Raises ValueError, in one sentence, for what cannot be.

    ``batch`` is B of one rank's micro-batch, ``loss_scale`` a number, "dynamic", or None: dynamic for fp16, else 1.
    """

    model: str = "gpt-micro"
    ranks: int = 4
    stage: int = 3
    compute: str = "bf16"
    optimizer: str = "adamw"
    lr: float = 3e-3
    micro_batches: int = 1
    batch: int = 4
    recompute: str = "none"
    layout: str = "per_unit"
    steps: int = 200
    seed: int = 0
    clip_norm: float | None = 1.0
    loss_scale: float | str | None = None
    capacity_nbytes: int | None = None
    sample_tokens: int = 160

    def __post_init__(self) -> None:
        if not is_count(self.sample_tokens) or self.sample_tokens < 0:
            raise ValueError(f"sample_tokens={self.sample_tokens!r} must be a whole number, 0 or more")
        for name in ("ranks", "micro_batches", "batch", "steps"):
            if not is_count(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, 1 or more")
        if self.model not in PRESETS:
            config_of(self.model)
        stage_of(self.stage)
        Recompute.parse(self.recompute)
        layout_of(self.layout, unit_shapes(self.build().units), self.ranks)
        if not is_finite_number(self.lr) or self.lr <= 0:
            raise ValueError(f"lr={self.lr!r} must be a positive number")
        self.policy()
        self.build_optimizer()

    def config(self) -> GPTConfig:
        """The model's shape, with a vocabulary of bytes."""
        return dataclasses.replace(config_of(self.model), vocabulary=VOCABULARY)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks and micro-batches."""
        return self.ranks * self.micro_batches * self.batch * self.config().context

    def build(self) -> GPT:
        """The model, with first values by the seed."""
        return GPT(self.config(), seed=self.seed)

    def build_optimizer(self) -> Optimizer:
        """The optimizer by its name in lower case."""
        return optimizer_named(self.optimizer, self.lr)

    def policy(self) -> Policy:
        """The precision policy: fp16 is scaled dynamically unless told otherwise."""
        chosen = self.loss_scale
        if chosen is None:
            chosen = "dynamic" if format_of(self.compute).name == "fp16" else 1.0
        if chosen == "dynamic":
            return Policy(self.compute, loss_scale=Dynamic(window=100))
        try:
            return Policy(self.compute, loss_scale=float(chosen))
        except ValueError:
            raise ValueError(f"loss_scale={chosen!r} is neither a positive number nor 'dynamic'") from None


def optimizer_named(name: str, lr: float) -> Optimizer:
    """An optimizer of the package by its class's name in any case; ValueError lists them."""
    known = {kind.lower(): getattr(optim, kind) for kind in optim.__all__
             if isinstance(getattr(optim, kind), type) and issubclass(getattr(optim, kind), Optimizer)
             and getattr(optim, kind) is not Optimizer}
    if name.lower() not in known:
        raise ValueError(f"no optimizer is called {name!r}; choose one of {', '.join(sorted(known))}")
    made: Optimizer = known[name.lower()](lr=lr)
    return made


@dataclass(frozen=True, slots=True)
class Step:
    """One step as all ranks saw it: the mean loss in nats, the norm, the scale, whether it was skipped, bytes held."""

    number: int
    loss: float
    norm: float
    scale: float
    skipped: bool
    held_nbytes: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run came to. Bytes are in rank order, or by kind on rank 0; ``digest`` is of all masters, in bits."""

    options: Options
    steps: tuple[Step, ...]
    losses: tuple[tuple[float, ...], ...]  # by step, of each rank and micro-batch, in rank order
    held_out_loss: float
    unigram_entropy: float
    resting_nbytes_by_kind: dict[str, int]
    peak_nbytes_by_kind: dict[str, int]
    peak_nbytes: tuple[int, ...]
    sent_nbytes: dict[str, list[int]]
    digest: str
    sample: str

    @property
    def skipped(self) -> int:
        """Steps that every rank skipped."""
        return sum(step.skipped for step in self.steps)


Heard = Callable[[Step], None]


def train(options: Options, corpus: Corpus, heard: Heard | None = None) -> Trained:
    """Trains on a cluster in this process; ``heard`` is called after every step, by rank 0's program."""
    corpus.require_length(options.config().context)
    cluster = Cluster(options.ranks, capacity_nbytes=options.capacity_nbytes)
    model = options.build()
    found = cluster.run(_program, options, model, corpus, heard)
    steps, held_out, digest, sample, resting = found[0]
    assert len({of_rank[2] for of_rank in found}) == 1, "ranks ended in different weights"
    losses = tuple(tuple(loss for of_rank in found for loss in of_rank[0][i][1]) for i in range(len(steps)))
    return Trained(
        options, tuple(step for step, _ in steps), losses, held_out, corpus.unigram_entropy,
        resting,
        cluster.memory[0].peak_nbytes_by_kind, tuple(cluster.memory.peak_nbytes),
        {purpose: cluster.trace.sent_nbytes(purpose, "train") for purpose in ("parameters", "gradients", "control")},
        digest, sample)


def _program(rank: Rank, options: Options, model: GPT, corpus: Corpus, heard: Heard | None) -> tuple[Any, ...]:
    """One rank: its steps, then the held-out loss, the masters' digest and a sample, the same on every rank."""
    engine = Engine(rank, model, options.build_optimizer(), stage=options.stage, policy=options.policy(),
                    layout=options.layout, recompute=options.recompute, clip_norm=options.clip_norm, schedule=warmed_up,
                    seed=options.seed)
    steps = []
    for number in range(1, options.steps + 1):
        with rank.trace.span("train"):
            result = engine.step(batches(options, model.config.context, corpus, number, rank.index))
        mean = float(rank.all_reduce(np.array([np.mean(result.losses)]), op="mean")[0])
        step = Step(number, mean, result.norm, result.scale, result.skipped, rank.memory.now_nbytes)
        steps.append((step, result.losses))
        if heard is not None and rank.index == 0:
            heard(step)
    resting = rank.memory.now_nbytes_by_kind
    return steps, held_out_loss(engine, corpus), digest(engine), sample(engine, options), resting


def batches(
    options: Options, context: int, corpus: Corpus, step: int, rank: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The k micro-batches of one rank in one step."""
    return [corpus.batch(options.seed, step, j * options.ranks + rank, options.batch, context)
            for j in range(options.micro_batches)]


def warmed_up(step: int) -> float:
    """The factor of the learning rate: rises from 0 to 1 in the first steps, and stays."""
    return min(1.0, step / WARMUP)


def held_out_loss(engine: Engine, corpus: Corpus) -> float:
    """The mean loss in nats on sequences that were not trained on; every rank computes all of it."""
    x, target = corpus.held_out(HELD_OUT_ROWS, engine.model.config.context)  # type: ignore[attr-defined]
    ctx = engine.context()
    logits = logits_of(ctx, engine.model, engine.weights, x)  # type: ignore[arg-type]
    return engine.model.loss.forward(ctx, logits, target)[0]


def digest(engine: Engine) -> str:
    """SHA-256 of all master weights, in the order of the model, in hexadecimal."""
    found = sha256()
    for name in engine.model.shapes:
        found.update(np.ascontiguousarray(engine.state(name)["master"]).tobytes())
    return found.hexdigest()


def sample(engine: Engine, options: Options) -> str:
    """What the model writes after the prompt; every rank computes it, from gathered weights."""
    model: Any = engine.model
    ctx = engine.context()
    tokens: Sequence[int] = list(PROMPT.encode())
    written = generate(lambda t: logits_of(ctx, model, engine.weights, t), tokens, options.sample_tokens,
                       context=model.config.context, temperature=0.8, seed=options.seed)
    return readable(written)
