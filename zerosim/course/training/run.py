"""A training run on text: a record for every step as it is taken, and what the run came to.

Legend: N ranks, B sequences of a micro-batch, T tokens of a sequence, k micro-batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerosim.course.training.evaluation import digest, held_out_loss, sample
from zerosim.course.training.options import Options
from zerosim.models.gpt import GPT
from zerosim.models.text import Corpus
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.ranks.trace import PURPOSES, Trace, Traces
from zerosim.zero.engine import Batch, Engine


@dataclass(frozen=True, slots=True)
class Step:
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

    @property
    def peak_nbytes(self) -> int:
        """Bytes held at the fullest instant."""
        return sum(self.peak_nbytes_by_kind.values())


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run came to. Bytes are in rank order, or by kind on the rank that held most; ``digest`` is of all masters.
    """

    options: Options
    steps: tuple[Step, ...]
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

    @property
    def skipped(self) -> int:
        """Steps that every rank skipped."""
        return sum(step.skipped for step in self.steps)

    @property
    def diverged_at(self) -> int | None:
        """The step from which on no loss is a finite number; None where the last one is."""
        learned = [step.number for step in self.steps if math.isfinite(step.loss)]
        first = 1 + max(learned, default=0)
        return first if first <= len(self.steps) else None


Heard = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class _OfRank:
    """What one rank reports at the end; ``looked`` is the loss on text held out and the sample, on rank 0 alone."""

    steps: list[Step]
    losses: list[tuple[float, ...]]
    resting_nbytes_by_kind: dict[str, int]
    digest: str
    looked: tuple[float, str] | None
    last_step: Trace

    @property
    def peak_nbytes_by_kind(self) -> dict[str, int]:
        """By kind, at the fullest instant of all steps."""
        return max(self.steps, key=lambda step: step.peak_nbytes).peak_nbytes_by_kind

    @property
    def peak_nbytes(self) -> int:
        """At the fullest instant of all steps."""
        return sum(self.peak_nbytes_by_kind.values())

    @property
    def resting_nbytes(self) -> int:
        """Between two steps."""
        return sum(self.resting_nbytes_by_kind.values())

    def sent_nbytes(self, purpose: str) -> int:
        """In all steps together."""
        return sum(step.sent_nbytes[purpose] for step in self.steps)


def train(options: Options, corpus: Corpus, heard: Heard | None = None, *, keep_last_step: bool = False) -> Trained:
    """Trains on a cluster in this process; ``heard`` is called after every step, by rank 0's program.

    ``keep_last_step`` keeps the traces of the last step, to be saved.

    Raises ValueError for a text that is too short and for an optimizer that the layout does not suit, and
    OutOfMemoryError where a rank has less than the run needs.
    """
    corpus.require_length(options.config().context)
    cluster = Cluster(options.ranks, capacity_nbytes=options.capacity_nbytes)
    found: list[_OfRank] = list(cluster.run(_program, options, options.build(), corpus, heard))
    first, peaks = found[0], [of_rank.peak_nbytes for of_rank in found]
    fullest = peaks.index(max(peaks))
    assert len({of_rank.digest for of_rank in found}) == 1, "ranks ended in different weights"
    assert first.looked is not None, "rank 0 looks at what it trained"
    losses = tuple(tuple(loss for of_rank in found for loss in of_rank.losses[i]) for i in range(options.steps))
    return Trained(
        options, tuple(first.steps), losses, first.looked[0], corpus.unigram_entropy,
        fullest, found[fullest].resting_nbytes_by_kind, found[fullest].peak_nbytes_by_kind,
        tuple(of_rank.resting_nbytes for of_rank in found), tuple(peaks),
        _sent_by_purpose(found),
        first.digest, first.looked[1], Traces(of_rank.last_step for of_rank in found) if keep_last_step else None)


def _sent_by_purpose(ranks: Sequence[_OfRank]) -> dict[str, list[int]]:
    """Bytes by rank, of the purposes for which some rank sends, and of the two that every stage is compared by."""
    sent = {purpose: [of_rank.sent_nbytes(purpose) for of_rank in ranks] for purpose in PURPOSES}
    return {purpose: nbytes for purpose, nbytes in sent.items() if any(nbytes) or purpose in PURPOSES[:2]}


def require_engine(options: Options) -> None:
    """Raises what making the engine raises: an optimizer that the layout does not suit, states that do not fit."""
    model = options.build()
    Cluster(options.ranks, capacity_nbytes=options.capacity_nbytes).run(
        lambda rank: _engine(rank, options, model).steps_taken)


def _engine(rank: Rank, options: Options, model: GPT) -> Engine:
    return Engine(rank, model, options.build_optimizer(), **options.engine_settings(model))


def _program(rank: Rank, options: Options, model: GPT, corpus: Corpus, heard: Heard | None) -> _OfRank:
    """One rank: its steps, then what the run came to."""
    engine = _engine(rank, options, model)
    steps: list[Step] = []
    losses: list[tuple[float, ...]] = []
    for number in range(1, options.steps + 1):
        last_step, batch = _fresh(rank), batches(options, model.config.context, corpus, number, rank.index)
        step, own = _step(engine, options, number, batch, last_step)
        steps.append(step)
        losses.append(own)
        if heard is not None and rank.index == 0:
            heard(step)
    resting = rank.memory.now_nbytes_by_kind
    # The capacity is one for training: to look at the model takes whole tensors of state, and other batches.
    rank.memory.capacity_nbytes = None
    count = options.sample_tokens if math.isfinite(steps[-1].loss) else 0  # who has diverged writes nothing
    held_out, written = held_out_loss(engine, model, corpus), sample(engine, model, count, options.seed)
    looked = None if held_out is None or written is None else (held_out, written)
    return _OfRank(steps, losses, resting, digest(engine), looked, last_step)


def _fresh(rank: Rank) -> Trace:
    """Clears the rank's trace; the one to keep a step's rows in, which begins with what the rank holds."""
    rank.trace.rows.clear()  # read and done with; those of a long run would pile up
    return Trace(held_at_start=rank.memory.now_nbytes_by_kind)


def _step(engine: Engine, options: Options, number: int, micro_batches: Sequence[Batch], kept: Trace
          ) -> tuple[Step, tuple[float, ...]]:
    """One step's record, and this rank's losses; the rows go into ``kept``."""
    memory, trace = engine.rank.memory, engine.rank.trace
    before = {purpose: trace.sent_nbytes(purpose) for purpose in PURPOSES}
    memory.reset_peak()
    result = engine.step(micro_batches)
    peak = memory.peak_nbytes_by_kind
    sent = {purpose: trace.sent_nbytes(purpose) - before[purpose] for purpose in PURPOSES}
    kept.rows += trace.rows
    mean = engine.rank.all_reduce(np.array([np.mean(result.losses)]), op="mean")  # after what is counted
    return Step(number, float(mean[0]), result.norm, result.scale, result.skipped, options.tokens_per_step, peak,
                sent), result.losses


def batches(options: Options, context: int, corpus: Corpus, step: int, rank: int) -> list[Batch]:
    """The k micro-batches of one rank in one step."""
    return [corpus.batch(options.seed, step, j * options.ranks + rank, options.batch, context)
            for j in range(options.micro_batches)]
