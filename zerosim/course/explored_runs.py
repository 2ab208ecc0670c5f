"""The runs of the page that moves: a training step of a small model, recorded under every setting that the page has.

For each setting the step is taken twice. A Llama of two blocks shows what is computed, sent and held, when, replayed on
a made-up machine. The worked example's four weights show the numbers, with a look at every rank after each part of the
step. Beside both stand the closed forms of what is held and sent.

Legend: N ranks, k micro-batches, Ψ parameters, padding included.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from multiprocessing import get_context
from operator import attrgetter
from typing import Any

import numpy as np

from zerosim.course.worked_example import (
    NAMES,
    STATES,
    Example,
    StepRecorder,
    UnitPass,
    decimal,
    looked_at_step,
    sample_of,
    watched_engine,
)
from zerosim.display.replayed import MACHINE
from zerosim.display.run_data import HeldArrays, Pool, deflated, run_data
from zerosim.display.style import short, shortest
from zerosim.models.llama import Llama, LlamaConfig
from zerosim.models.units import Recompute
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.options import StepOptions
from zerosim.planning import closed_forms
from zerosim.planning.hardware import Link, Machine, Network, Slow
from zerosim.planning.recording import Recording, record
from zerosim.planning.timeline import replay
from zerosim.ranks import trace
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine
from zerosim.zero.placements import STAGES

RANKS = (1, 2, 3, 4, 8)
ONE_NODE, TWO_NODES, MESH = "one", "two", "2x2"  # of four ranks, nodes of two: one ring through both, or a 2×2 mesh
FORMATS = ("bf16", "fp16")
MODEL = LlamaConfig(layers=2, channels=32, heads=4, context=16, vocabulary=64, key_value_heads=2, feed_forward=64)
SEQUENCES = 4  # of a micro-batch of one rank
BLANK = "·"  # where nothing is written yet
SLOW = 1.5  # times as long as the others the slow rank computes
# Links twice as fast as those of the reports' made-up machine, so that arithmetic can hide what is sent; between nodes
# a message takes longer.
INSIDE, BETWEEN = (Link("made up for a picture", rate, latency, "made up for a picture", "2025-01-01")
                   for rate, latency in ((10e9, 0.5e-6), (2e9, 1.5e-6)))


@dataclass(frozen=True, slots=True)
class StepSetting:
    """One setting of the page. ``nodes`` says how the ranks stand: see `ONE_NODE`; ``slow``: the last one computes
    slower."""

    n: int = 4
    nodes: str = ONE_NODE
    stage: int = 3
    format: str = "bf16"
    overlap: bool = False
    prefetch: bool = False
    recompute: bool = False
    micro: int = 1
    offload: bool = False
    slow: bool = False

    @property
    def key(self) -> str:
        """Its name among the runs of its ranks and nodes: the other fields, as digits and words."""
        _, _, *rest = asdict(self).values()
        return " ".join(str(int(value) if isinstance(value, bool) else value) for value in rest)

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options."""
        return {"stage": self.stage, "policy": self.format, "overlap": self.overlap, "prefetch": int(self.prefetch),
                "recompute": "block" if self.recompute else "none", "mesh": "2x2" if self.nodes == MESH else None,
                "offload": "optimizer=host" if self.offload else None}

    @property
    def machine(self) -> Machine:
        """The machine on which the step is replayed."""
        network = Network(INSIDE) if self.nodes == ONE_NODE else Network(INSIDE, BETWEEN, 2)
        return replace(MACHINE, network=network, slow=[Slow(self.n - 1, SLOW)] * self.slow)


def settings() -> list[StepSetting]:
    """All that the page offers; nodes are for four ranks, and units are gathered ahead where they are at all."""
    places = [(n, nodes) for n in RANKS for nodes in ((ONE_NODE, TWO_NODES, MESH) if n == 4 else (ONE_NODE,))]
    both = (False, True)
    ahead = {stage: both if states.parameters_sharded else (False,) for stage, states in closed_forms.STAGES.items()}
    return [StepSetting(n, nodes, stage, *rest) for (n, nodes), stage in product(places, STAGES)
            for rest in product(FORMATS, both, ahead[stage], both, (1, 2), both, both)]


def settings_on(numbers: str) -> list[StepSetting]:
    """The settings of some numbers of ranks, named as ``"2,4"``; ValueError for others than the page has."""
    asked = [number.strip() for number in numbers.split(",")]
    if unknown := [number for number in asked if number not in map(str, RANKS)]:
        raise ValueError(f"asked for {unknown[0]!r} ranks; the page has {', '.join(map(str, RANKS))}: name some of "
                         "them, with commas between")
    return [setting for setting in settings() if str(setting.n) in asked]


# -- a step of the Llama: what ranks do, and when ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a run: its recording, what each rank held before it, by array, and its host, by kind, the traces and
    the peaks."""

    recording: Recording
    held: list[HeldArrays]
    on_host: list[dict[str, int]]
    traces: trace.Traces
    peak_nbytes: list[int]


def _step(rank: Rank, engines: Sequence[Engine], setting: StepSetting) -> None:
    """The rank program: a step on data of the rank's own."""
    tokens = np.random.default_rng(rank.index).integers(
        0, MODEL.vocabulary, (setting.micro, SEQUENCES, MODEL.context + 1))
    engines[rank.index].step([(batch[:, :-1], batch[:, 1:]) for batch in tokens])


def recorded_step(setting: StepSetting) -> RecordedStep:
    """Trains the Llama for one step; all that rests was allocated before it, when the engines were made."""
    cluster = Cluster(setting.n)
    engines = list(cluster.run(lambda rank: Engine(rank, Llama(MODEL), Adam(lr=0.01), **setting.options)))
    held = [_resting(of_rank) for of_rank in cluster.trace]
    on_host = [memory.host.now_nbytes_by_kind for memory in cluster.memory]
    for memory in cluster.memory:
        memory.reset_peak()
    cluster.run(_step, engines, setting)
    return RecordedStep(record(cluster.trace), held, on_host, cluster.trace, cluster.memory.peak_nbytes)


def _resting(of_rank: trace.Trace) -> HeldArrays:
    """The arrays that are held after a trace."""
    found = HeldArrays()
    for row in of_rank.rows:
        if isinstance(row, trace.Held) and row.nbytes:
            found[row.kind, row.name, abs(row.nbytes)] += 1 if row.nbytes > 0 else -1
    return +found


# -- a step of the four weights: the numbers ---------------------------------------------------------------------------


def numbered_step(setting: StepSetting) -> list[StepRecorder]:
    """Trains the worked example for one step, each micro-batch the sample of one of its steps, looking at every rank
    after each part of it."""
    return list(Cluster(setting.n).run(lambda rank: looked_at_step(
        *watched_engine(rank, Example(), setting.options),
        {f"backward {number}": sample_of(rank.index, number) for number in range(1, setting.micro + 1)})))


def numbers_data(recorders: Sequence[StepRecorder], pool: Pool) -> dict[str, Any]:
    """The step as words in the pool: at each moment each state of each rank, four weights, "" where it has none and a
    point where nothing is written yet; and of each micro-batch x1, x2, the target, a, y, the loss, and the gradient
    that each rank computed itself."""
    first = recorders[0].snapshots
    states = (*STATES, *(name for name in first["start"].values if name not in (*STATES, "reduced")))
    looks = [[pool.column(pool.named(_four(look.values[state], is_written=(moment, state) != ("start", "gradient")))
                          for state in states) for moment, look in recorder.snapshots.items()]
             for recorder in recorders]
    return {"moments": [*first], "states": states, "looks": looks, "divisor": recorders[0].divisor,
            "passes": [[pool.named(of_batch) for of_batch in _passes(recorder.passes, rank)]
                       for rank, recorder in enumerate(recorders)]}


def _four(values: Mapping[int, Any], *, is_written: bool) -> list[str]:
    return ["" if number not in values else _text(values[number]) if is_written else BLANK
            for number in range(len(NAMES))]


def _text(value: Any) -> str:
    """All digits of a 16-bit number, the shortest decimals of an fp32."""
    return decimal(value) if np.dtype(type(value)).itemsize == 2 else short(shortest(value))


def _passes(passes: Sequence[UnitPass], rank: int) -> Iterator[list[str]]:
    """The forward and the gradients of each micro-batch; what is run again is left out."""
    backward = [(at, one.gradients) for at, one in enumerate(passes) if one.gradients is not None]
    begun = 0  # where the micro-batch's own forward stands, both units
    for number, ((_, second), (end, first)) in enumerate(zip(backward[::2], backward[1::2], strict=True), 1):
        (x1, x2), target = sample_of(rank, number)
        a, y = (one.values_out[0] for one in passes[begun:begun + 2])
        begun = end + 1
        yield [*map(short, (x1, x2, target)), _text(a), _text(y), short(shortest((float(y) - target) ** 2 / 2)),
               *map(_text, (*first, *second))]


# -- the closed forms, with today's numbers in them --------------------------------------------------------------------


def job_of(setting: StepSetting) -> closed_forms.Job:
    """The Llama's step on paper."""
    return closed_forms.Job(
        tuple(unit.parameter_count for unit in Llama(MODEL).units), setting.n, closed_forms.STAGES[setting.stage],
        policy=Policy(setting.format), micro_batches=setting.micro,
        recompute_units=Recompute.parse(setting.options["recompute"]).units_per_segment,
        options=StepOptions.of(setting.n, overlap=setting.overlap, prefetch=int(setting.prefetch),
                               offload=setting.options["offload"], mesh=setting.options["mesh"]))


def formulas(setting: StepSetting) -> list[tuple[str, str, str, str, list[int]]]:
    """The bytes held at rest and sent in the step, row by row: "held" or "sent", the kind or the purpose, the formula,
    the formula with today's numbers, and its value for each rank."""
    job = job_of(setting)
    held, shards, total = closed_forms.resting_nbytes(job), job.shards, sum(job.padded_lengths)
    rows = []
    for kind, each in (("parameter", 2), ("gradient", 2), ("master", 4), ("optimizer_state", 8)):
        cut = job.states.cuts(kind)
        over = ("N" if setting.nodes != MESH else "R") * cut
        rows.append(("held", kind, f"{each}Ψ{'/' * cut}{over}", f"{each} · {total:,}{f' / {shards}' * cut}",
                     [of_rank.get(kind, 0) for of_rank in held]))
    sent, vectors = closed_forms.sent_nbytes(job), closed_forms.vectors_sent(job)
    share, numbers = ("(N-1)/N", f"{setting.n - 1}/{setting.n}") if setting.nodes != MESH else ("(R-1)/R", "1/2")
    for purpose in ("gradients", "parameters"):
        times = int(vectors[purpose])
        across = " + across nodes, 2 · 2Ψ/R · (M-1)/M" if setting.nodes == MESH and purpose == "gradients" else ""
        values = f" + 2 · 2 · {total:,} / 2 · 1/2" if across else ""
        rows.append(("sent", purpose, f"{times} · 2Ψ · {share}{across}" if times else "0",
                     f"{times} · 2 · {total:,} · {numbers}{values}" if times else "0", sent[purpose]))
    return rows


# -- all of it as the page has it: a chunk for each number of ranks and way of standing --------------------------------


@dataclass(frozen=True, slots=True)
class RunChunk:
    """The runs of one stage on one number of ranks that stand one way, as text, deflated."""

    name: str
    runs: int
    deflated: bytes

    @property
    def ranks(self) -> int:
        """N."""
        return int(self.name.split()[0])


def chunk_of(some: Sequence[StepSetting]) -> RunChunk:
    """Runs, replays and looks at each of these settings, which have the same ranks and nodes."""
    pool, runs = Pool(), dict[str, Any]()
    numbers: dict[StepSetting, Any] = {}
    steps: dict[StepSetting, RecordedStep] = {}
    for setting in some:
        # What the machine is like changes no recording, and what rank is slow no number.
        ran = replace(setting, slow=False, nodes=MESH if setting.nodes == MESH else ONE_NODE)
        if ran not in steps:
            steps.clear()
            steps[ran] = recorded_step(ran)
            numbers[ran] = numbers_data(numbered_step(ran), pool)
        step = steps[ran]
        found = run_data(replay(step.recording, setting.machine), pool, step.held)
        rows = [[what, kind, pool.words[form], pool.words[value], pool.column(nbytes)]
                for what, kind, form, value, nbytes in formulas(setting)]
        runs[setting.key] = found | {"numbers": numbers[ran], "formulas": rows, "on_host": step.on_host}
    name = f"{some[0].n} {some[0].nodes} {some[0].stage}"
    return RunChunk(name, len(runs), deflated(pool.as_json() | {"runs": runs}))


def chunks_of(some: Iterable[StepSetting]) -> Iterator[RunChunk]:
    """The chunks of these settings, the largest first, made by as many processes as there are cores."""
    groups = sorted((list(group) for _, group in groupby(some, attrgetter("n", "nodes", "stage"))),
                    key=lambda group: -len(group) * group[0].n)
    workers = min(os.cpu_count() or 1, len(groups))
    if workers == 1:
        yield from map(chunk_of, groups)
        return
    # Processes of their own, not forks: a caller may have threads, such as one that shows how far this is.
    executor = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        yield from executor.map(chunk_of, groups)
    finally:
        executor.shutdown(cancel_futures=True)  # what has not begun when somebody presses Ctrl-C
