"""What the host takes over with `offload`, what then goes over its link in a step, and how long that takes.

Legend: N ranks; s parameters that a rank's optimizer updates, P or its share P/N; α seconds of latency, β bytes per
second of the host link, one way.

Masters and the optimizer's state rest on the host and are updated there. Once a step, a rank's s gradients go to the
host in the format in which they rest, and s updated parameters come back in the format that computes; where the
parameter is its own master it goes there too. Each device has a link of its own; one message goes each way, one after
the other and beside nothing. What the host takes to update is not in it: no source gives its rate for a device.
Source: Ren et al. 2021, "ZeRO-Offload", sections 3 and 4 (fp32 states and the update on the CPU; gradients there and
parameters back in 16 bits, 4 bytes for each parameter of a rank's share).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

from zerosim.numerics.formats import format_of
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import counted, seconds_text
from zerosim.planning import activations
from zerosim.planning.activations import fullest_nbytes
from zerosim.planning.closed_forms import STAGES, Job, sent_nbytes, vectors_sent
from zerosim.planning.conventions import (
    ADAM,
    Dialect,
    OptimizerLike,
    checked_optimizer,
    dialect_of,
    estimate_nbytes,
    formula,
    is_cut_anywhere,
    is_sharded,
    normed_tensors,
    per_parameter_nbytes,
    states_nbytes,
)
from zerosim.planning.cost import Curve, curve
from zerosim.planning.cuts import checked_count
from zerosim.planning.flops import StepFlops, logits_flops, matmul_flops, recomputed_flops, six_n
from zerosim.planning.hardware import Device, Hardware, Link, Network, positive, presets, read
from zerosim.planning.shapes import ModelShape, model_of_parameters, model_shape
from zerosim.planning.step import (
    At,
    Event,
    Flow,
    Issued,
    Passing,
    Waited,
    after_backward,
    logits_nbytes,
    micro_batch,
    overheads_nbytes,
    passing,
)
from zerosim.shown import Plotted

HOST_KINDS = ("master", "gradient_copy", "optimizer_state")  # of model states, what rests on the host


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What one rank moves in a step: s elements, so many bytes of each to the host and back, over a link."""

    elements: int
    itemsize_to_host: int
    itemsize_to_device: int
    link: Link

    @property
    def nbytes(self) -> int:
        """Bytes of a step, both ways."""
        return self.elements * (self.itemsize_to_host + self.itemsize_to_device)

    @property
    def seconds(self) -> float:
        """2α + n/β, or 0 where nothing is moved."""
        there, back = (self.elements * each for each in (self.itemsize_to_host, self.itemsize_to_device))
        return self.link.seconds(there) + self.link.seconds(back) if self.nbytes else 0.0

    @property
    def nbytes_formula(self) -> str:
        """``(2 there + 2 back) · 194,701,400``."""
        return f"({self.itemsize_to_host} there + {self.itemsize_to_device} back) · {self.elements:,}"

    @property
    def seconds_formula(self) -> str:
        """2α + n/β with its values."""
        return (f"2 · {self.link.latency_seconds:g} + {self.nbytes:,} / {self.link.bytes_per_second:g} over "
                f"{self.link.name}, beside nothing; the host's own arithmetic is not in it")


def host_traffic(job: Job, link: Link) -> HostTraffic:
    """What a rank of this job moves in a step when its optimizer's states are on the host.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> from zerosim.planning.hardware import link
    >>> moved = host_traffic(Job((10**9,), 8, STAGES[2]), link("pcie4"))
    >>> moved.nbytes_formula, moved.nbytes
    ('(2 there + 2 back) · 125,000,000', 500000000)
    """
    policy, states = job.policy, job.states
    gradient = policy.accumulate_dtype if states.gradients_sharded else policy.reduce_dtype
    parameter = policy.compute_dtype.itemsize
    is_master = policy.compute_dtype == policy.master_dtype
    return HostTraffic(job.held(states.optimizer_sharded), gradient.itemsize + parameter * is_master, parameter, link)


def on_device(dialect: Dialect) -> Dialect:
    """What of a dialect's bytes stays on the device, the optimizer's own state apart, which does not."""
    return replace(dialect, master=0, gradient_copy=0)


# -- A plan as a table: its columns, for a shell's own printing; and as plain text -----------------------------------

def _gb(nbytes: int) -> str:
    """10⁹ bytes: ``107.81``, and ``16,129`` where decimals are noise."""
    return f"{nbytes / 1e9:,.2f}" if abs(nbytes) < 1e12 else f"{nbytes / 1e9:,.0f}"


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "parameters": lambda row: _gb(row.parameters_nbytes), "gradients": lambda row: _gb(row.gradients_nbytes),
    "optimizer": lambda row: _gb(row.optimizer_nbytes), "states": lambda row: _gb(row.states_nbytes),
    "activations": lambda row: _gb(row.activations_nbytes), "gathered": lambda row: _gb(row.gathered_nbytes),
    "buckets": lambda row: _gb(row.buckets_nbytes), "overhead": lambda row: _gb(row.overhead_nbytes),
    "total": lambda row: _gb(row.total_nbytes), "spare": lambda row: _gb(row.spare_nbytes),
    "sent": lambda row: _gb(row.sent_nbytes_per_step), "compute": lambda row: seconds_text(row.compute_seconds),
    "exposed": lambda row: seconds_text(row.exposed_communication_seconds),
    "step": lambda row: seconds_text(row.step_seconds), "MFU": lambda row: f"{row.model_flops_utilization:.2f}"}
KINDS = ("parameters", "gradients", "optimizer")  # of states, which are their sum
FEWER = tuple(name for name in COLUMNS if name not in KINDS)
FEWEST = ("states", "activations", "total", "spare", "sent", "step")
UNITS = ("GB are 10⁹ bytes of one rank; activations, gathered and buckets (gradients in flight and collectives' "
         "buffers) are each at their fullest, the total is at the step's; MFU is model FLOPs utilization.")


def cells(found: Plan, names: Iterable[str] = COLUMNS) -> list[list[str]]:
    """For each row its stage and policy, and the named columns."""
    names = list(names)
    return [[f"{row.stage} {row.recompute}", *(COLUMNS[name](row) for name in names)] for row in found.rows]


def subject(question: Question, dialect: str) -> tuple[str, str]:
    """What it is a plan of: the model's name, and the rest of the line."""
    model, size = question.model.name, f"{question.model.parameters:,} parameters"
    parts = [*([] if model == size else [size]), f"{counted(question.ranks, 'rank')} of {question.device.name}",
             f"{counted(question.micro_batches, 'micro-batch')} of {counted(question.batch, 'sequence')} of "
             f"{counted(question.sequence, 'token')}", question.policy.compute, levers_text(question),
             f"accounted as {dialect}"]
    return model, ": " + ", ".join(parts)


def levers_text(question: Question) -> str:
    """``overlap and 1 unit ahead``, or what of it there is; where no unit is known nothing goes beside another."""
    if not question.has_units:
        return "nothing overlapped"
    parts = ["overlap"] * question.overlap + [f"{counted(question.prefetch, 'unit')} ahead"] * bool(question.prefetch)
    return " and ".join(parts) or "nothing overlapped"


def names_for(found: Plan, width: int) -> Sequence[str]:
    """The columns that a line of so many characters holds: all, or not the kinds of states, or the least."""
    return next((names for names in (tuple(COLUMNS), FEWER) if len(_lines(found, names)[0]) <= width), FEWEST)


def text_of(found: Plan) -> str:
    """The verdict, what it is a plan of, and a line for each row, columns set to the right; states are not by kind."""
    return "\n".join([found.verdict, "".join(subject(found.question, found.rows[0].dialect)), "",
                      *_lines(found, FEWER), "", UNITS])


def _lines(found: Plan, names: Sequence[str]) -> list[str]:
    table = [["", *names], *cells(found, names)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table]


# -- The seconds of a step: its program on two streams, one that computes and one that communicates ------------------
# Legend: N ranks, k micro-batches; α seconds of latency, β bytes per second.
#
# Products run at a share of the device's peak; a ring takes what the α-β model says; the update reads and writes at the
# memory's rate. What is issued goes to the end of the communication stream, which does one thing after the other; the
# program goes on, and stands still at a wait until what it waits for is done: that is what is exposed. Without overlap
# and prefetch every wait stands beside its issue, and all communication is exposed. It is the model of `timeline`, which
# replays a recording; here every rank does the same at the same time, so one is enough.


Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a step: of the optimizer's update, of all collectives, and of these that are exposed."""

    update_seconds: float
    communication_seconds: float
    exposed_seconds: float


def clock_of(question: Question, job: Job, policy: str) -> Clock:
    """The seconds of the job's step on the question's device and network, with the job's levers."""
    update = update_seconds(question, job)
    # All micro-batches take as long as the first, and nothing is under way between two.
    communication, exposed = communicated(micro_batch(job), products(question, job, policy), question.network)
    last, last_exposed = communicated(after_backward(job), update, question.network)
    return Clock(sum(update.values()), job.micro_batches * communication + last,
                 job.micro_batches * exposed + last_exposed)


def communicated(events: Iterable[Event], seconds_at: Mapping[Place, float], network: Network) -> tuple[float, float]:
    """(seconds of communication, seconds for which the program stands still for it) in a walk of a job.

    ``seconds_at`` are those that a unit computes at each of its places.
    """
    clock = free = communication = exposed = 0.0
    ends: dict[tuple[str, int], float] = {}
    prices: dict[tuple[str, int, int], float] = {}
    for event in events:
        if isinstance(event, At):
            clock += seconds_at.get((event.phase, event.unit), 0.0)
        elif isinstance(event, Issued):
            call = event.operation, event.ranks, event.nbytes
            if call not in prices:  # a model of many equal units has few
                prices[call] = _ring(event.operation, event.ranks, network).seconds(event.nbytes)
            seconds = prices[call]
            communication += seconds
            ends[event.key] = free = max(clock, free) + seconds
        elif isinstance(event, Waited):
            end = ends.pop(event.key)
            if end > clock:
                exposed, clock = exposed + (end - clock), end
    return communication, exposed


@lru_cache(maxsize=64)
def _ring(operation: str, ranks: int, network: Network) -> Curve:
    return curve(operation, "ring", ranks, network)


# -- what is computed --------------------------------------------------------------------------------------------------


def products(question: Question, job: Job, policy: str) -> dict[Place, float]:
    """Seconds of each unit's products at each of its places in a micro-batch."""
    rate = question.device.flops_per_second_in(question.policy.compute) * question.utilization
    if not question.has_activations:
        whole = flops_of(question, policy).forward / job.micro_batches / rate
        each = whole / question.model.parameters
        forward = [each * length for length in job.unit_lengths]
        return {(phase, unit): times * seconds for unit, seconds in enumerate(forward)
                for phase, times in (("forward", 1), ("backward", 2))}
    found: dict[Place, float] = {}
    for unit, flops in enumerate(_unit_flops(question, policy)):
        again = flops.recomputed / rate
        found["forward", unit] = flops.forward / rate
        found["again", unit] = again if job.recompute_units else 0.0
        found["backward", unit] = flops.backward / rate + (0.0 if job.recompute_units else again)
    return found


def update_seconds(question: Question, job: Job) -> dict[Place, float]:
    """Seconds in which a rank scans the gradients that it updates with, and updates each unit, by `update_nbytes`."""
    scanned, updated = update_nbytes(question, job)
    rate, total = question.device.memory_bytes_per_second, sum(job.padded_lengths)
    found: dict[Place, float] = {("scan", 0): scanned / rate}
    for unit, length in enumerate(job.padded_lengths):
        found["update", unit] = updated * length / (total or 1) / rate
    return found


def update_nbytes(question: Question, job: Job) -> tuple[int, int]:
    """Bytes that a rank reads to look for overflow and for the norm; those that it reads and writes to update.

    Gradients are read twice, and once more for the update; masters and the optimizer's state are read and written; the
    parameter is written from the master, where it is another. With offload the host updates.
    """
    policy, states = job.policy, job.states
    elements = job.held(states.optimizer_sharded)
    gradient = (policy.accumulate_dtype if states.gradients_sharded else policy.reduce_dtype).itemsize
    if question.offload:
        return 2 * gradient * elements, 0
    master, parameter = policy.master_dtype.itemsize, policy.compute_dtype.itemsize
    cast = 0 if policy.master_dtype == policy.compute_dtype else master + parameter
    return 2 * gradient * elements, (gradient + 2 * master + cast) * elements + 2 * _state_nbytes(question, job)


def _state_nbytes(question: Question, job: Job) -> int:
    """What the optimizer keeps on a rank beside masters, as the engine keeps it."""
    if is_cut_anywhere(question.optimizer):
        each = per_parameter_nbytes(question.optimizer, job.policy.state_dtype.itemsize)
        return each * job.held(job.states.optimizer_sharded)
    kinds = states_nbytes(question.model, job.ranks, job.states, job.policy, optimizer=question.optimizer)
    return kinds.get("optimizer_state", 0)


def flops_of(question: Question, policy: str) -> StepFlops:
    """Of all micro-batches of a rank; by 6PD, half of it backward's gradients of inputs, where no shape is known."""
    micro_batches, transformer = question.micro_batches, question.model.transformer
    if not question.has_activations or transformer is None:
        forward = six_n(question.model.parameters, question.batch * question.sequence) // 3
        return StepFlops(micro_batches * forward, 2 * micro_batches * forward, 0)
    parts = _unit_flops(question, policy)
    forward, again = sum(part.forward for part in parts), sum(part.recomputed for part in parts)
    return StepFlops(micro_batches * forward, 2 * micro_batches * forward, micro_batches * again)


def _unit_flops(question: Question, policy: str) -> list[StepFlops]:
    """The products of each unit in one micro-batch: none of the embedding, a block's, the head's."""
    transformer = question.model.transformer
    assert transformer is not None
    block = transformer.block(question.batch, question.sequence)
    forward, again = matmul_flops(block), recomputed_flops(block, policy)
    head = logits_flops(block, transformer.vocabulary)
    return [StepFlops(0, 0, 0), *[StepFlops(forward, 2 * forward, again)] * transformer.blocks,
            StepFlops(head, 2 * head, 0)]


# -- One row of a plan: bytes by what they are for, seconds by what takes them ---------------------------------------
# Legend: N ranks, k micro-batches.
#
# Bytes and seconds are of one program, with the same levers: `passing` reads off it what comes and goes beside the model
# states, `clock` how long it stands still for communication. The update reads and writes at the memory's rate; with
# offload, what it needs of the device goes over the link to the host, beside nothing.


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank holds at most, sends in a step, and how long a step takes.

    Activations, what is gathered, and ``buckets_nbytes``, gradients on their way with the buffers of collectives, are
    each at its own fullest moment; ``passing_nbytes`` is all that comes and goes, the micro-batch's tokens too, at the
    fullest moment of all, and part of the total. ``host_nbytes`` lie on the host, ``host_transfer_nbytes_per_step`` go
    there and back; both 0 without offload.
    """

    stage: int
    recompute: str
    dialect: str
    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    gathered_nbytes: int
    buckets_nbytes: int
    passing_nbytes: int
    overhead_nbytes: int
    host_nbytes: int
    capacity_nbytes: int
    sent_nbytes_per_step: int
    flops_per_step: int
    model_flops_per_step: int
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    update_seconds: float
    host_transfer_nbytes_per_step: int
    host_transfer_seconds: float
    model_flops_utilization: float

    @property
    def states_nbytes(self) -> int:
        """Parameters, gradients, and all that the optimizer keeps on the device."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes

    @property
    def total_nbytes(self) -> int:
        """Everything that the device must hold at the step's fullest moment."""
        return self.states_nbytes + self.passing_nbytes + self.overhead_nbytes

    @property
    def spare_nbytes(self) -> int:
        """What the capacity leaves; negative where it does not fit."""
        return self.capacity_nbytes - self.total_nbytes

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.spare_nbytes >= 0

    @property
    def step_seconds(self) -> float:
        """Products, what is exposed of the communication, the update, and what goes to the host and back."""
        return (self.compute_seconds + self.exposed_communication_seconds + self.update_seconds
                + self.host_transfer_seconds)

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation``."""
        how = "" if self.recompute == "none" else f" with {self.recompute} recomputation"
        return f"ZeRO-{self.stage}{how}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what is reckoned from them."""
        reckoned = ("states_nbytes", "total_nbytes", "spare_nbytes", "fits", "step_seconds")
        return asdict(self) | {name: getattr(self, name) for name in reckoned}


def row_of(question: Question, stage: int, policy: str) -> Row:
    """What the stage holds, sends and takes under the recomputation policy."""
    job, held = job_of(question, stage, policy), held_nbytes(question, stage, policy)
    moved, flops, clock = traffic_of(question, job), flops_of(question, policy), clock_of(question, job, policy)
    rate = question.device.flops_per_second_in(question.policy.compute)
    compute = flops.hardware / (rate * question.utilization)
    transfer = moved.seconds if moved else 0.0
    seconds = compute + clock.exposed_seconds + clock.update_seconds + transfer
    return Row(
        stage, policy, dialect_of(question.dialect).name, **held, capacity_nbytes=question.device.reported_nbytes,
        sent_nbytes_per_step=max(map(sum, zip(*sent_nbytes(job).values(), strict=True))),
        flops_per_step=flops.hardware, model_flops_per_step=flops.model, compute_seconds=compute,
        communication_seconds=clock.communication_seconds, exposed_communication_seconds=clock.exposed_seconds,
        update_seconds=clock.update_seconds, host_transfer_nbytes_per_step=moved.nbytes if moved else 0,
        host_transfer_seconds=transfer, model_flops_utilization=flops.model / (seconds * rate) if seconds else 0.0)


def held_nbytes(question: Question, stage: int, policy: str) -> dict[str, int]:
    """The parts of what a rank holds, by the names of a row's fields; `host_nbytes` is not on the device."""
    found = passing_of(question, stage, policy)
    return _resting_nbytes(question, stage) | {
        "activations_nbytes": activations_nbytes(question, policy),
        "gathered_nbytes": found.gathered_nbytes * question.has_units,
        "buckets_nbytes": found.in_flight_nbytes * question.has_units,
        "passing_nbytes": found.fullest_nbytes(question.batch) * question.has_units}


def _resting_nbytes(question: Question, stage: int) -> dict[str, int]:
    """What is held from step to step, on the device and on the host, and the runtime's overhead."""
    kinds = states_nbytes(question.model, question.ranks, STAGES[stage], question.dialect, optimizer=question.optimizer)
    optimizer = sum(kinds.get(kind, 0) for kind in HOST_KINDS)
    host = optimizer if question.offload else 0
    return {"parameters_nbytes": kinds.get("parameter", 0), "gradients_nbytes": kinds.get("gradient", 0),
            "optimizer_nbytes": optimizer - host, "host_nbytes": host,
            "overhead_nbytes": sum(overheads_nbytes(question.overheads).values())}


def fits(question: Question, stage: int, policy: str) -> bool:
    """Whether the device holds it: the row's own answer, without its seconds."""
    resting = _resting_nbytes(question, stage)
    spare = question.device.reported_nbytes - (sum(resting.values()) - resting["host_nbytes"])
    if spare < 0 or not question.has_units:
        return spare >= 0
    return passing_of(question, stage, policy).fullest_nbytes(question.batch) <= spare


def job_of(question: Question, stage: int, policy: str) -> Job:
    """The step on paper; tied weights, the first tensor of their unit, stay gathered, as the engine keeps them.

    Where no unit is known there is nothing that could overlap, and nothing ahead.
    """
    model = question.model
    return Job(model.unit_lengths, question.ranks, STAGES[stage], policy=question.policy,
               micro_batches=question.micro_batches, recompute_units=activations.parse(policy)[0],
               kept_gathered=tuple(sorted({owner for _, owner in model.borrows})), borrows=model.borrows,
               borrowed_lengths=tuple(model.units[owner].tensors[0].parameters for _, owner in model.borrows),
               normed_tensors=normed_tensors(question.optimizer, len(model.tensors)),
               overlap=question.overlap and question.has_units, prefetch=question.prefetch * question.has_units)


def passing_of(question: Question, stage: int, policy: str) -> Passing:
    """What comes and goes in a step."""
    transformer, flow = question.model.transformer, None
    if question.has_activations and transformer is not None:
        block = transformer.block(1, question.sequence, question.policy.compute_dtype.itemsize)
        flow = Flow(block, transformer.blocks, transformer.vocabulary, policy)
    return passing(replace(job_of(question, stage, policy), micro_batches=min(2, question.micro_batches)), flow)


def traffic_of(question: Question, job: Job) -> HostTraffic | None:
    """What a rank moves to its host and back in a step; None without offload."""
    return host_traffic(job, question.host_link) if question.offload and question.host_link else None


def activations_nbytes(question: Question, policy: str) -> int:
    """What is kept, what is being made and the gradients that flow back, at the fullest moment; 0 where they are not
    known."""
    transformer = question.model.transformer
    if not question.has_activations or transformer is None:
        return 0
    block = transformer.block(question.batch, question.sequence, question.policy.compute_dtype.itemsize)
    return fullest_nbytes(block, transformer.blocks, transformer.vocabulary, policy)


# -- A plan: what each stage and each recomputation policy would hold, send and take, and whether it fits the device ---
# Legend: N ranks, k micro-batches of B sequences of L tokens; P parameters. Bytes are exact for what is counted; seconds
# rest on peak rates, on a share of the peak that products are taken to reach, and on the α-β model of collectives.


MOST_RANKS = 8192
UTILIZATION = 0.5  # of the device's dense peak that matrix products reach: an assumption, which a plan states


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be trained, how, and on what.

    `tokens` None is the model's own context (2048 where it has none). `dialect` is an accounting dialect's name, or a
    Policy for zerosim's own. `offload` keeps master weights and optimizer state on the host, over `host_link`.
    `overlap` and `prefetch` are the engine's levers, of bytes and of seconds alike; a bucket is a unit, since others
    cut units into unequal chunks, and no rank would stand for all. `overheads` replaces bytes of the runtime by name,
    as `buffers.overhead_nbytes` takes them.
    Raises ValueError for counts below one, unknown stages, policies and dialects, and a utilization outside (0, 1].
    """

    model: ModelShape
    ranks: int
    device: Device
    network: Network
    policy: Policy = field(default_factory=lambda: Policy("bf16"))
    stages: tuple[int, ...] = tuple(STAGES)
    recompute: tuple[str, ...] = ("none", "selective", "block")
    batch: int = 1
    tokens: int | None = None
    micro_batches: int = 1
    optimizer: OptimizerLike = ADAM
    dialect: str | Dialect | Policy = "zero-paper"
    utilization: float = UTILIZATION
    offload: bool = False
    host_link: Link | None = None
    overlap: bool = True
    prefetch: int = 1
    overheads: dict[str, int] | None = None

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("batch", 1), ("micro_batches", 1), ("prefetch", 0)):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), least))
        if self.ranks > MOST_RANKS:
            raise ValueError(f"{self.ranks:,} ranks were asked for; every rank's share is looked at, so take "
                             f"{MOST_RANKS:,} at most")
        self._check_names()
        if positive("the plan", "utilization", self.utilization) > 1:
            raise ValueError("the plan: utilization is the share of the peak that products reach, above 0 and at most "
                             f"1, got {self.utilization!r}")
        transformer = self.model.transformer
        own = (transformer.tokens or transformer.positions) if transformer else 0
        tokens = own or 2048 if self.tokens is None else self.tokens
        object.__setattr__(self, "tokens", checked_count("tokens", tokens, 1))
        if transformer and transformer.positions and self.sequence > transformer.positions:
            raise ValueError(f"sequences of {self.sequence} tokens were asked for, and {self.model.name} has learned "
                             f"places for {transformer.positions}; take shorter ones")
        if self.offload and self.host_link is None:
            raise ValueError("offload moves gradients and parameters over a link to the host; name one, as pcie4")

    def _check_names(self) -> None:
        for what, asked in (("stage", self.stages), ("recomputation policy", self.recompute)):
            if not asked:
                raise ValueError(f"a plan has rows for each {what}, and none was asked for; name one at least")
        if unknown := [stage for stage in self.stages if stage not in STAGES]:
            raise ValueError(f"ZeRO has the stages {', '.join(map(str, STAGES))}, found {unknown[0]!r}")
        for policy in self.recompute:
            activations.parse(policy)
        dialect_of(self.dialect)
        optimizer = checked_optimizer(self.optimizer)
        if self.model.transformer is None and not is_cut_anywhere(optimizer):
            raise ValueError(f"what {type(optimizer).__name__} keeps depends on the shapes of tensors, and of "
                             f"{self.model.name} none is known; name a model, or an optimizer such as AdamW")
        for name in ("offload", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    @property
    def sequence(self) -> int:
        """L, tokens of a sequence."""
        assert self.tokens is not None
        return self.tokens

    @property
    def policies(self) -> tuple[str, ...]:
        """The recomputation policies that make rows: "none" alone where nothing is known of activations."""
        return self.recompute if self.has_activations else ("none",)

    @property
    def has_units(self) -> bool:
        """False where a number of parameters is known and no layer of it: then nothing is known of what is gathered."""
        return self.model.transformer is not None or len(self.model.units) > 1

    @property
    def has_activations(self) -> bool:
        """False where only a number of parameters is known, and for encoder-decoders."""
        return self.model.transformer is not None and not self.model.transformer.encoder_blocks


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Plotted):
    """The rows, stage by stage and policy by policy; ``print`` and a notebook show them as a table."""

    question: Question
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.question.model.name} on {self.question.ranks} ranks: {self.verdict}>"

    @property
    def fitting(self) -> list[Row]:
        """The rows that fit, fastest first; of equally fast ones, the one that sends least, then that holds least."""
        return sorted((row for row in self.rows if row.fits),
                      key=lambda row: (row.step_seconds, row.sent_nbytes_per_step, row.total_nbytes))

    @property
    def verdict(self) -> str:
        """What fits and by how much, and by how much the next lower stage misses, in one sentence."""
        if not self.fitting:
            least = min(self.rows, key=lambda row: row.total_nbytes)
            return f"Nothing fits: {least.title} holds least and misses by {_gigabytes(-least.spare_nbytes)}."
        best = self.fitting[0]
        order = {stage: place for place, stage in enumerate(sorted(self.question.stages))}
        missing = [row for row in self.rows if not row.fits and order[row.stage] < order[best.stage]]
        text = f"{best.title} fits with {_gigabytes(best.spare_nbytes)} to spare"
        if not missing:
            return text + "."
        near = max(missing, key=lambda row: (order[row.stage], row.spare_nbytes))
        return f"{text}; {near.title} misses by {_gigabytes(-near.spare_nbytes)}."

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data: exact integers in bytes."""
        model = self.question.model
        return {"model": {"name": model.name, "parameters": model.parameters,
                          "largest_unit_parameters": model.largest_unit.parameters},
                "ranks": self.question.ranks, "device": self.question.device.name,
                "compute": self.question.policy.compute, "overlap": self.question.overlap,
                "prefetch": self.question.prefetch,
                "rows": [row.as_dict() for row in self.rows], "verdict": self.verdict}


def plan_of(question: Question) -> Plan:
    """One row for each stage and recomputation policy.

    Raises ValueError for a device without a rate in the compute format, and as the formulas do.
    """
    return Plan(question, tuple(row_of(question, stage, policy)
                                for stage in question.stages for policy in question.policies))


def _gigabytes(nbytes: int) -> str:
    """``11 GB``: 10⁹ bytes, three digits."""
    return f"{nbytes / 1e9:.3g} GB" if abs(nbytes) < 1e12 else f"{nbytes / 1e9:,.0f} GB"


# -- The inverse questions: the largest model that fits, the fewest ranks, the largest batch, the cheapest stage -----
# Each is asked of a plan, and answered by the same rows: a number fits, and the next one does not.


MOST = 1 << 40  # sequences in a batch that nobody has


def largest_batch(question: Question) -> int:
    """The most sequences of a micro-batch that fit in some row; 0 where not even one does."""
    return _largest(lambda batch: _some_fits(replace(question, batch=batch)), MOST)


def fewest_ranks(question: Question) -> int | None:
    """The smallest power of two of ranks on which some row fits.

    None where no number of ranks helps, up to the most that are planned for: what lies whole on each rank is too much.
    Ranks are taken to be on one node.
    """
    network = replace(question.network, between=None, ranks_per_node=None)
    for ranks in (1 << power for power in range(MOST_RANKS.bit_length())):
        if _some_fits(replace(question, ranks=ranks, network=network)):
            return ranks
    return None


def cheapest_that_fits(found: Plan) -> Row | None:
    """Of the rows that fit, the one that sends least, then that takes least time; None where none fits."""
    return min(found.fitting, key=lambda row: (row.sent_nbytes_per_step, row.step_seconds), default=None)


def largest_model(question: Question, stage: int) -> int:
    """The most parameters whose model states alone, unpadded, fit beside the runtime's overheads in a stage.

    With offload, of the states that stay on the device. Raises ValueError for an optimizer whose state depends on the
    shapes of tensors.
    Source of the question: Rajbhandari et al. 2020 (ZeRO), table 1.
    """
    spare = question.device.reported_nbytes - sum(overheads_nbytes(question.overheads).values())
    dialect = dialect_of(question.dialect)
    state = per_parameter_nbytes(question.optimizer, dialect.state_itemsize)
    if question.offload:
        dialect, state = on_device(dialect), 0
    return _largest(lambda parameters: estimate_nbytes(parameters, question.ranks, STAGES[stage], dialect,
                                                       optimizer_nbytes=state) <= spare, 1 << 60)


def _some_fits(question: Question) -> bool:
    return any(fits(question, stage, policy) for stage in question.stages for policy in question.policies)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` for which ``fits`` holds, where what holds for one holds for less; 0 if
    not even 1."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# -- From names to a plan: what one writes in a notebook or types in a shell -----------------------------------------
# Legend: N ranks.


RECOMPUTE = {"usual": ("none", "selective", "block"), "all": ("none", "selective", "tiled", "sub_block", "block")}
Several = str | int | Iterable[Any]


def plan(model: str | ModelShape | None = None, **asked: Any) -> Plan:
    """What each stage and recomputation policy holds, sends and takes; see `question` for what can be asked.

    >>> print(plan("llama-2-7b", ranks=8, device="h100-80", link="nvlink4", batch=4, tokens=2048).verdict)
    ZeRO-3 fits with 2.37 GB to spare; ZeRO-2 misses by 8.21 GB.
    """
    return plan_of(question(model, **asked))


def question(model: str | ModelShape | None = None, *, parameters: int | str | None = None,
             largest_layer: int | str | None = None, ranks: int = 8, device: str = "h100-80", link: str = "nvlink4",
             nodes: int = 1, between: str | None = None, stage: Several = "all", recompute: Several = "usual",
             batch: int = 1, tokens: int | None = None, micro_batches: int = 1, compute: str = "bf16",
             optimizer: OptimizerLike = ADAM, dialect: str | Dialect | Policy | None = None,
             utilization: float = UTILIZATION, overlap: bool = True, prefetch: int = 1, offload: bool = False,
             host_link: str | None = None, hardware: str | Path | None = None,
             overheads: dict[str, int] | None = None) -> Question:
    """A checked question: a preset's name, a config.json, a ModelShape, or a number of ``parameters``.

    ``stage`` and ``recompute`` are one, several, or "all"; "usual" is to recompute nothing, selectively, and blocks.
    ``dialect`` None is "zero-paper", or "fp32" where that is computed in; "zerosim" is the engine's own.
    ``overlap`` and ``prefetch`` are the engine's levers, what goes beside other work and how many units are gathered
    ahead: they spare seconds and cost bytes, and a plan counts both. ``offload`` keeps masters and the optimizer's
    state on the host, over ``host_link``: None is the device's own. ``hardware`` is a
    TOML file of one's own devices and links. Raises ValueError, in one sentence, for what is not known or cannot be.
    """
    known = presets() if hardware is None else read(_path(hardware, "hardware"))
    policy = Policy(_format(compute))
    if dialect is None:
        dialect = "fp32" if policy.compute == "fp32" else "zero-paper"
    return Question(
        model=_model(model, parameters, largest_layer), ranks=ranks, device=known.device(device),
        network=known.network(ranks, link, nodes, between), policy=policy, stages=_stages(stage),
        recompute=_policies(recompute), batch=batch, tokens=tokens, micro_batches=micro_batches, optimizer=optimizer,
        dialect=policy if dialect == "zerosim" else dialect, utilization=utilization, offload=offload,
        host_link=_host_link(known, device, host_link, offload), overlap=overlap, prefetch=prefetch,
        overheads=overheads)


plan.__signature__ = signature(question).replace(return_annotation=Plan)  # type: ignore[attr-defined]  # for a notebook


def whole_number(text: int | float | str, what: str) -> int:
    """A count as one writes it, 7.5e9 or 7_500_000_000; ValueError for what is no positive whole number."""
    digits = str(text).strip()
    if "," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+", digits):
        raise ValueError(f"{what}={text!r} has a comma that is not between thousands; write 7.5e9 or 7,500,000,000")
    try:
        number = Decimal(digits.replace("_", "").replace(",", ""))
    except InvalidOperation:
        raise ValueError(f"{what}={text!r} is no number; write it in digits, as in 7.5e9") from None
    if not number.is_finite() or number != number.to_integral_value() or not 0 < number < 2**62:
        raise ValueError(f"{what}={text!r} must be a whole number above 0 and below 2^62")
    return int(number)


def _model(model: str | ModelShape | None, parameters: int | str | None,
           largest_layer: int | str | None) -> ModelShape:
    if (model is None) == (parameters is None):
        raise ValueError("a plan is of a model or of a number of parameters: name one of the two, as gpt2-xl or 7.5e9")
    if parameters is not None:
        largest = None if largest_layer is None else whole_number(largest_layer, "largest_layer")
        return model_of_parameters(whole_number(parameters, "parameters"), largest)
    if largest_layer is not None:
        raise ValueError("largest_layer goes with a number of parameters; a model's shape has its own layers")
    return model if isinstance(model, ModelShape) else model_shape(_path(model, "model"))


def _path(asked: Any, what: str) -> str | Path:
    if isinstance(asked, str | Path):
        return asked
    raise ValueError(f"{what}={asked!r} must be a name or the path of a file, as a text")


def _host_link(known: Hardware, device: str, host_link: str | None, offload: bool) -> Link | None:
    if host_link is not None:
        return known.link(host_link)
    return known.host_link(device) if offload else None


def _format(compute: str) -> str:
    name = format_of(compute).name
    if name.startswith("fp8"):
        raise ValueError(f"compute={compute!r}: weights and gradients do not rest in 8 bits; plan in bf16 or fp16")
    return name


def _stages(asked: Several) -> tuple[int, ...]:
    if isinstance(asked, str) and asked == "all":
        return tuple(STAGES)
    several = asked.split(",") if isinstance(asked, str) else [asked] if isinstance(asked, int) else asked
    try:
        return tuple(dict.fromkeys(int(one) if isinstance(one, str) else operator.index(one) for one in several))
    except (TypeError, ValueError):
        raise ValueError(f"stage={asked!r} must be all, or some of {', '.join(map(str, STAGES))}, as in 2,3") from None


def _policies(asked: Several) -> tuple[str, ...]:
    if isinstance(asked, str) and asked in RECOMPUTE:
        return RECOMPUTE[asked]
    try:
        texts = asked.split(",") if isinstance(asked, str) else [str(text) for text in asked]  # type: ignore[union-attr]
    except TypeError:
        raise ValueError(f"recompute={asked!r} must be usual, all, or some policies, as in block,tiled") from None
    return tuple(dict.fromkeys(text.strip() for text in texts))


# -- Each number of a plan's row with its formula, the values filled in ----------------------------------------------
# Legend: N ranks, k micro-batches, B sequences of L tokens, d channels, H heads, n blocks, V vocabulary, P parameters.


Line = tuple[str, str, str]  # what, the formula with its values, the value


def explained(question: Question, row: Row) -> list[Line]:
    """(what, formula, value) for every number of a row, in the order of its columns."""
    return [*_states(question, row), *_beside_states(question, row), *_seconds(question, row)]


def _states(question: Question, row: Row) -> Iterator[Line]:
    job, states, dialect = job_of(question, row.stage, row.recompute), STAGES[row.stage], dialect_of(question.dialect)
    padded, ranks = sum(job.padded_lengths), question.ranks
    yield ("parameters of the model, with padding", f"{question.model.parameters:,} -> {padded:,}", f"{padded:,}")
    own, each, what = 0, "its own state", "of whole tensors, beside the optimizer's own state"
    if is_cut_anywhere(question.optimizer):
        own = per_parameter_nbytes(question.optimizer, dialect.state_itemsize)
        each, what = str(own), f"{own} of them the optimizer's own state"
    yield (f"model states ({dialect.name})", f"({formula(states, dialect, own)}) bytes, N = {ranks}, {what}",
           f"{row.states_nbytes + row.host_nbytes:,}")
    held = {"parameter": row.parameters_nbytes, "gradient": row.gradients_nbytes}
    for kind, nbytes in held.items():
        share = f"/{ranks}" if is_sharded(kind, states) else ""
        yield (kind + "s", f"{dialect.kinds(states)[kind]} · {padded:,}{share}", f"{nbytes:,}")
    share = f"/{ranks}" if states.optimizer_sharded else ""
    where = f"; {row.host_nbytes:,} of it on the host" if row.host_nbytes else ""
    copies = sum(nbytes for kind, nbytes in dialect.kinds(states).items() if kind in HOST_KINDS)
    yield ("optimizer", f"({copies} + {each}) · {padded:,}{share}{where}", f"{row.optimizer_nbytes:,}")


def _beside_states(question: Question, row: Row) -> Iterator[Line]:
    job, transformer = job_of(question, row.stage, row.recompute), question.model.transformer
    padded = sum(job.padded_lengths)
    if question.has_activations and transformer is not None:
        block = transformer.block(question.batch, question.sequence, question.policy.compute_dtype.itemsize)
        peak = activations.peak_nbytes(block, transformer.blocks, row.recompute)
        logits = logits_nbytes(block, transformer.vocabulary, fp32_copy=False)
        yield ("activations", f"{row.recompute} of n = {transformer.blocks} blocks, BLd = {block.stream:,}, BHL² = "
               f"{block.square:,}, keeps {peak.nbytes:,}; logits BLV and the loss are {logits:,}; at the fullest "
               "moment both, with the gradients that flow back", f"{row.activations_nbytes:,}")
    yield from _coming_and_going(question, row)
    parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in overheads_nbytes(question.overheads).items())
    yield ("overhead of the runtime", f"estimates: {parts}", f"{row.overhead_nbytes:,}")
    yield ("capacity", f"{question.device.name} reports", f"{row.capacity_nbytes:,}")
    vectors = {purpose: f"{float(times):.4g} Ψ of {purpose}" for purpose, times in vectors_sent(job).items() if times}
    yield ("sent per step", f"(N-1)/N · ({' + '.join(vectors.values()) or '0'}), Ψ = "
           f"{job.policy.compute_dtype.itemsize} · {padded:,}, and control", f"{row.sent_nbytes_per_step:,}")


def _coming_and_going(question: Question, row: Row) -> Iterator[Line]:
    """What is gathered and on its way, and all that comes and goes, with the question's levers."""
    if not question.has_units:
        yield ("gathered units, gradients in flight", "not known without a largest layer", "0")
        return
    job, found = job_of(question, row.stage, row.recompute), passing_of(question, row.stage, row.recompute)
    itemsize, padded, largest = job.policy.compute_dtype.itemsize, sum(job.padded_lengths), max(job.padded_lengths)
    if row.gathered_nbytes:
        yield ("gathered units", f"{itemsize} · {row.gathered_nbytes // itemsize:,} elements at once: a unit, what it "
               f"borrows, and {job.prefetch} ahead; the largest has {largest:,}", f"{row.gathered_nbytes:,}")
    two = ", or one that goes back while another is reduced" * (job.overlap and job.states.gradients_sharded)
    yield ("gradients in flight", f"{itemsize} · {found.gradients_nbytes // itemsize:,} elements at once: a unit and "
           f"what its borrowers wrote{two}, or what has been reduced", f"{found.gradients_nbytes:,}")
    hops = f"{min(2, job.ranks - 1)} chunks of hops, each 1/{job.ranks} of a unit, and where a chunk lands"
    refreshed = job.overlap and job.states.optimizer_sharded and not job.states.parameters_sharded
    ahead = f"; {counted(job.prefetch, 'unit')} ahead landing beside where it is gathered" * bool(
        job.prefetch and job.states.parameters_sharded)
    whole = f"overlapped refresh: {itemsize} · {padded:,} · (1 + 1/{job.ranks}), every unit and a copy of its own chunk"
    yield ("buffers of collectives", whole if refreshed else hops + ahead, f"{found.buffers_nbytes:,}")
    yield ("buckets", "these two at the moment at which they are most together", f"{row.buckets_nbytes:,}")
    most = found.fullest(question.batch)
    phase, unit = most.place
    yield ("all that comes and goes", f"{most.gathered_nbytes:,} gathered + {most.gradients_nbytes:,} of gradients + "
           f"{most.buffers_nbytes:,} of buffers + {question.batch} · {most.sequence_nbytes:,} of activations and "
           f"tokens, at the fullest moment: {phase}, {question.model.units[unit].name}", f"{row.passing_nbytes:,}")


def _seconds(question: Question, row: Row) -> Iterator[Line]:
    flops = flops_of(question, row.recompute)
    rate = question.device.flops_per_second_in(question.policy.compute)
    yield ("FLOPs per step", f"forward {flops.forward:.4g} + backward {flops.backward:.4g} + again "
           f"{flops.recomputed:.4g}", f"{row.flops_per_step:,}")
    yield ("compute", f"{row.flops_per_step:.4g} / ({question.utilization:g} · {rate:.4g} per second)",
           f"{row.compute_seconds:.4g} s")
    yield ("communication", f"rings unit by unit, α + n/β over {question.network.inside.name}"
           + (f" and {question.network.between.name}" if question.network.between else ""),
           f"{row.communication_seconds:.4g} s")
    job = job_of(question, row.stage, row.recompute)
    yield ("of it exposed", f"what the program stands still for, with {levers_text(question)}",
           f"{row.exposed_communication_seconds:.4g} s")
    scanned, updated = update_nbytes(question, job)
    yield ("update", f"({scanned:,} scanned for overflow and norm + {updated:,} read and written) / "
           f"{question.device.memory_bytes_per_second:.4g} per second", f"{row.update_seconds:.4g} s")
    moved = traffic_of(question, job)
    if moved is not None:
        yield ("to the host and back", moved.nbytes_formula, f"{row.host_transfer_nbytes_per_step:,}")
        yield ("of that the seconds", moved.seconds_formula, f"{row.host_transfer_seconds:.4g} s")
    yield ("step", "compute + exposed + update" + " + host" * (moved is not None), f"{row.step_seconds:.4g} s")
    yield ("model FLOPs utilization", f"{row.model_flops_per_step:.4g} / (step · {rate:.4g})",
           f"{row.model_flops_utilization:.3f}")
