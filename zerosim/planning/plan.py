"""A plan: bytes and seconds of each stage and each recomputation policy, and which of them fit the device.

Legend: N ranks, k micro-batches of B sequences of L tokens; P parameters; s those that a rank's optimizer updates, P or
its share P/N; α seconds of latency, β bytes per second of a link, one way.

`plan` takes names, `PlanConfig` holds what they stand for and computes rows, `Plan` is the rows. Bytes are exact for
what is counted; seconds rest on peak rates, on a share of the peak that arithmetic is taken to reach, and on the α-β
model of collectives. Both are folds over the same events (`step_events`), under the same options.

The seconds of a step are those of two streams, one that computes and one that communicates: what is issued goes to the
end of the communication stream, which does one thing after the other; the program goes on, and stands still at a wait
until what it waits for is done: that is what is exposed. A piece of arithmetic, as the layers note it
(`step_arithmetic`), takes as long as its operations at a share of the device's peak, or as its bytes at the memory's
rate, whichever is longer; a collective takes what the α-β model says, the update reads and writes at the memory's rate.
It is the model of `timeline`, which replays a recording, and tests hold that both say the same seconds of a step, but
where transfers run beside it (offload) or an optimizer multiplies whole matrices. Here every rank does the same at the
same time, so one is enough.

With `offload` state rests on the host or on disk, and the optimizer's is updated on the host. What moves is counted
by `closed_forms.moved_nbytes`; its seconds are those of one message each way, one after the other and beside nothing,
each device with a link and a disk of its own. The host's own update takes no time here: no source gives its rate.
Sources: Ren et al. 2021, "ZeRO-Offload", sections 3 and 4 (fp32 states and the update on the CPU; gradients there and
parameters back in 16 bits, 4 bytes for each parameter of a rank's share); Rajbhandari et al. 2021, "ZeRO-Infinity",
section 4 (the disk).
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from zerosim.models.transformer import Transformer
from zerosim.models.units import ALL, TILED, Recompute
from zerosim.numerics.checks import checked_count, count_fields
from zerosim.numerics.formats import format_of
from zerosim.numerics.places import (
    DEVICE,
    DIRECTIONS,
    DISK,
    FROM_DISK,
    HOST,
    TO_DEVICE,
    TO_DISK,
    TO_HOST,
    Offload,
)
from zerosim.numerics.policy import BY_RANK, Policy
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.numerics.units import count_of, gigabytes, nbytes_of, seconds_text
from zerosim.optim import Optimizer
from zerosim.options import StepOptions
from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import STAGES, Job, moved_nbytes, sent_nbytes
from zerosim.planning.conventions import (
    ADAM,
    Convention,
    convention_of,
    estimate_nbytes,
    is_cut_anywhere,
    normed_tensors,
    per_parameter_nbytes,
    states_nbytes,
)
from zerosim.planning.flops import StepFlops, six_n, step_flops
from zerosim.planning.hardware import (
    DISK_LINK,
    DISK_NBYTES,
    HOST_NBYTES,
    Device,
    Link,
    Machine,
    Network,
    overheads_nbytes,
    positive,
    presets,
    read,
)
from zerosim.planning.shapes import ModelShape, model_of_parameters, model_shape
from zerosim.planning.step_activations import Place, fullest_nbytes
from zerosim.planning.step_arithmetic import Pieces, of_micro_batch, products_alone
from zerosim.planning.step_events import after_backward, micro_batch
from zerosim.planning.step_folds import Flow, TransientMemory, communication_seconds, transient_memory
from zerosim.ranks.mesh import Mesh
from zerosim.shown import ShownPlan

MOST_RANKS = 8192
MOST_SEQUENCES = 1 << 40  # in a batch that nobody has
POLICY = Policy("bf16")
OPTIONS = StepOptions(overlap=True, prefetch=1)  # what frameworks do by default
MARGIN = 0.05  # of the device's memory, which a plan wants spare: an allocator's fragments, and peaks that no model has
UTILIZATION = 0.5  # of the device's dense peak that arithmetic reaches: an assumption, which a plan states
OPTIMIZER_KINDS = ("master", "gradient_copy", "optimizer_state")  # those that `Offload.optimizer` places


# -- a row, and a plan of rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One stage under one recomputation policy: what a rank holds at most and sends in a step, and its seconds.

    Activations, what is gathered, secondary shards (hpZ), and ``buckets_nbytes``, gradients on their way with the
    buffers of collectives, are each at its own fullest moment; ``transient_nbytes`` is all that comes and goes, the
    micro-batch's tokens too, at the fullest moment of all, and part of the total. ``host_nbytes`` lie on the host,
    ``disk_nbytes`` on disk, each of a rank's share of the capacity there, and ``host_transfer_nbytes_per_step`` and
    ``disk_transfer_nbytes_per_step`` go there and back; 0 without offload.
    """

    stage: int
    recompute: str
    convention: str
    parameters_nbytes: int
    gradients_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    gathered_nbytes: int
    secondary_nbytes: int
    buckets_nbytes: int
    transient_nbytes: int
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
    disk_nbytes: int
    disk_transfer_nbytes_per_step: int
    disk_transfer_seconds: float
    peak_flops_per_second: float
    host_capacity_nbytes: int
    disk_capacity_nbytes: int

    @property
    def states_nbytes(self) -> int:
        """Parameters, gradients, and all that the optimizer keeps on the device."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes

    @property
    def total_nbytes(self) -> int:
        """Everything that the device must hold at the step's fullest moment."""
        return self.states_nbytes + self.transient_nbytes + self.overhead_nbytes

    @property
    def spare_nbytes(self) -> int:
        """The capacity less the total; negative where it does not fit."""
        return self.capacity_nbytes - self.total_nbytes

    @property
    def fits(self) -> bool:
        """True where the device holds it, and host and disk what is offloaded."""
        return not self.missing_nbytes

    @property
    def missing_nbytes(self) -> int:
        """The bytes that device, host and disk lack together: 0 where it fits."""
        return sum(self.missing_nbytes_by_place.values())

    @property
    def missing_nbytes_by_place(self) -> dict[str, int]:
        """The bytes that each place lacks: none where it fits."""
        over = {DEVICE: -self.spare_nbytes, HOST: self.host_nbytes - self.host_capacity_nbytes,
                DISK: self.disk_nbytes - self.disk_capacity_nbytes}
        return {place: nbytes for place, nbytes in over.items() if nbytes > 0}

    @property
    def least_seconds(self) -> float:
        """A lower bound of the step's seconds, in which all that goes to host and disk, and back, is beside the rest.
        """
        here = self.step_seconds - self.host_transfer_seconds - self.disk_transfer_seconds
        return max(here, self.host_transfer_seconds / 2, self.disk_transfer_seconds / 2)  # both ways at once

    @property
    def step_seconds(self) -> float:
        """Arithmetic, what is exposed of the communication, the update, and what goes to host and disk, and back."""
        return (self.compute_seconds + self.exposed_communication_seconds + self.update_seconds
                + self.host_transfer_seconds + self.disk_transfer_seconds)

    @property
    def model_flops_utilization(self) -> float:
        """The share of the device's peak that the model's own arithmetic takes; 0 where the step takes no time."""
        seconds = self.step_seconds
        return self.model_flops_per_step / (seconds * self.peak_flops_per_second) if seconds else 0.0

    @property
    def has_margin(self) -> bool:
        """True where it fits, and `MARGIN` of the device stays free."""
        return self.fits and self.spare_nbytes >= MARGIN * self.capacity_nbytes

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation``."""
        return f"ZeRO-{self.stage} {recomputation_text(self.recompute)}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        computed = ("states_nbytes", "total_nbytes", "spare_nbytes", "fits", "step_seconds",
                    "model_flops_utilization")
        return asdict(self) | {name: getattr(self, name) for name in computed}


@dataclass(frozen=True, slots=True, repr=False)
class Plan(ShownPlan):
    """The rows, stage by stage and policy by policy; ``print`` and a notebook show them as a table."""

    config: PlanConfig
    rows: tuple[PlanRow, ...]

    def __repr__(self) -> str:
        return f"<Plan of {self.config.model.name} on {self.config.ranks} ranks: {self.verdict}>"

    @property
    def fitting(self) -> list[PlanRow]:
        """The rows that fit, fastest first; of equally fast ones, the one that sends least, then that holds least."""
        return sorted((row for row in self.rows if row.fits),
                      key=lambda row: (row.step_seconds, row.sent_nbytes_per_step, row.total_nbytes))

    @property
    def cheapest(self) -> PlanRow | None:
        """The fastest row that fits with a margin: devices are paid by the second. Where none has it, the fastest that
        fits; None where none does."""
        return next((row for row in self.fitting if row.has_margin), next(iter(self.fitting), None))

    @property
    def least_sent(self) -> PlanRow | None:
        """Of the rows that fit, the one that sends least, then that takes least time; None where none fits."""
        return min(self.fitting, key=lambda row: (row.sent_nbytes_per_step, row.step_seconds), default=None)

    @property
    def verdict(self) -> str:
        """The cheapest row that fits with a margin, and the one without that comes nearest to it, in one sentence."""
        best, margin = self.cheapest, f"{gigabytes(MARGIN * self.rows[0].capacity_nbytes)} GB"
        others = sorted((row for row in self.rows if row != best and not row.has_margin),
                        key=lambda row: (row.missing_nbytes, -row.spare_nbytes))
        if best is None:
            return f"Nothing fits: {self.name_of(others[0])} comes nearest and {_misses(others[0])}."
        spare = f"{seconds_text(best.step_seconds)} a step, {gigabytes(best.spare_nbytes)} GB to spare"
        text = (f"{self.name_of(best)} is the cheapest that fits with a margin: {spare}" if best.has_margin else
                f"Nothing fits with a margin of {margin}; {self.name_of(best)} is the cheapest that fits: {spare}")
        if not others:
            return text + "."
        near = others[0]
        how = _misses(near) if near.missing_nbytes else (
            f"has {gigabytes(near.spare_nbytes)} GB to spare, less than the margin of {margin}")
        return f"{text}; {self.name_of(near)} {how}."

    def name_of(self, row: PlanRow) -> str:
        """The row's title, or its stage where that tells it from all others."""
        return row.title if len(self.config.policies) > 1 else f"ZeRO-{row.stage}"

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data: exact integers in bytes."""
        model = self.config.model
        return {"model": {"name": model.name, "parameters": model.parameters,
                          "largest_unit_parameters": model.largest_unit.parameters},
                "ranks": self.config.ranks, "device": self.config.device.name,
                "link": self.config.network.inside.name,
                "compute": self.config.policy.compute, "overlap": self.config.options.overlap,
                "prefetch": self.config.options.prefetch, "offload": self.config.options.offload.text,
                "mesh": None if self.config.options.mesh is None else str(self.config.options.mesh),
                "zeropp": None if self.config.options.zeropp is None else asdict(self.config.options.zeropp),
                "reduction": self.config.options.reduction,
                "rows": [row.as_dict() for row in self.rows], "verdict": self.verdict}


def _misses(row: PlanRow) -> str:
    """By how much a row does not fit, and where that is not the device alone, of which the table speaks."""
    by = {place: f"{gigabytes(nbytes)} GB" for place, nbytes in row.missing_nbytes_by_place.items()}
    return "misses by " + (by[DEVICE] if [*by] == [DEVICE] else
                           " and ".join(f"{nbytes} of the {place}" for place, nbytes in by.items()))


def fused_policy(policy: str) -> tuple[str, bool]:
    """A policy's name where attention is taken to be fused, as "tiled" has it; and True where it is not."""
    parsed = Recompute.parse(policy)
    return str(replace(parsed, inside=ALL) if parsed.inside == TILED else parsed), parsed.inside == ALL


def recomputation_text(policy: str) -> str:
    """A policy in words; attention is taken to be fused unless it is said not to be.

    >>> [recomputation_text(policy) for policy in ("tiled", "block+tiled", "block")]
    ['without recomputation', 'with block recomputation', 'with block recomputation, attention unfused']
    """
    named, unfused = fused_policy(policy)
    how = "without recomputation" if named == "none" else f"with {named} recomputation"
    return how + ", attention unfused" * unfused


# -- the configuration, which computes them ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The model to train, the options of its training, and the machine.

    `tokens` None is the model's own context (2048 where it has none). `convention` is an accounting convention's name,
    or a Policy for zerosim's own. `options` are the engine's, of bytes and of seconds; a bucket is a unit. What they
    place off the device, the optimizer's state first, moves over `host_link` and `disk_link`; a rank's share of what
    there is are `host_capacity_nbytes` and `disk_capacity_nbytes` (None: `HOST_NBYTES` and `DISK_NBYTES`). `overheads`
    replaces bytes of the runtime by name, as `hardware.overheads_nbytes` takes them. Raises ValueError for counts below
    one, unknown stages, policies and conventions, buckets of bytes, and a utilization outside (0, 1].
    """

    model: ModelShape
    ranks: int
    device: Device
    network: Network
    policy: Policy = POLICY
    stages: tuple[int, ...] = tuple(STAGES)
    recompute: tuple[str, ...] = ("tiled", "block+tiled")
    batch: int = 1
    tokens: int | None = None
    micro_batches: int = 1
    optimizer: Optimizer = ADAM
    convention: str | Convention | Policy = "zero-paper"
    utilization: float = UTILIZATION
    options: StepOptions = OPTIONS
    host_link: Link | None = None
    disk_link: Link | None = None
    host_capacity_nbytes: int | None = None
    disk_capacity_nbytes: int | None = None
    overheads: dict[str, int] | None = None

    def __post_init__(self) -> None:
        count_fields(self, ranks=1, batch=1, micro_batches=1)
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
        if (bucket := self.options.bucket_nbytes) is not None:
            raise ValueError(f"bucket_nbytes={bucket}: a plan is of buckets of a unit, since others cut units into "
                             "unequal chunks, and no rank would stand for all; leave it out")
        self._check_places()

    def _check_places(self) -> None:
        """Raises ValueError for state that a plan does not place off the device, and for a link or a capacity that is
        missing, or of nothing."""
        places = self.options.offload
        if not places.is_none and places.optimizer == DEVICE:
            raise ValueError(f"offload of {places}: a plan takes the optimizer's state off the device first, "
                             "which is most of all; place it on the host or on disk too")
        if places.uses_disk and not is_cut_anywhere(self.optimizer):
            raise ValueError(f"what {type(self.optimizer).__name__} keeps depends on the shapes of tensors, and what "
                             "it reads from disk is not planned; place its state on the host, or take AdamW")
        for name, used, example in (("host_link", not places.is_none, "pcie4"),
                                    ("disk_link", places.uses_disk, "nvme-pcie4")):
            found = getattr(self, name)
            if found is not None and not used:
                raise ValueError(f"{name}={found.name!r} is of offload, which was not asked for; pass "
                                 "offload='optimizer=host', or leave the link out" if name == "host_link" else
                                 f"{name}={found.name!r} is of offload to disk, which was not asked for; leave it out")
            if found is None and used:
                raise ValueError(f"offload moves state over a {name.replace('_', ' ')}; name one, as {example}")
        for name, used in (("host_capacity_nbytes", not places.is_none),
                           ("disk_capacity_nbytes", places.uses_disk)):
            if (nbytes := getattr(self, name)) is not None:
                if not used:
                    raise ValueError(f"{name}={nbytes!r} is of offload, and nothing is placed there; leave it out")
                count_fields(self, **{name: 1})

    def _check_names(self) -> None:
        for what, asked in (("stage", self.stages), ("recomputation policy", self.recompute)):
            if not asked:
                raise ValueError(f"a plan has rows for each {what}, and none was asked for; name one at least")
        if unknown := [stage for stage in self.stages if stage not in STAGES]:
            raise ValueError(f"ZeRO has the stages {', '.join(map(str, STAGES))}, found {unknown[0]!r}")
        for policy in self.recompute:
            Recompute.parse(policy)
        convention_of(self.convention)
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer={optimizer!r} does not say what it keeps; take one of zs.optim's, as "
                             "zs.optim.AdamW() is")
        if self.model.transformer is None and not is_cut_anywhere(optimizer):
            raise ValueError(f"what {type(optimizer).__name__} keeps depends on the shapes of tensors, and of "
                             f"{self.model.name} none is known; name a model, or an optimizer such as AdamW")

    @property
    def sequence(self) -> int:
        """L, tokens of a sequence."""
        assert self.tokens is not None
        return self.tokens

    @property
    def policies(self) -> tuple[str, ...]:
        """The recomputation policies that make rows: "none" alone where nothing is known of activations."""
        return self.recompute if self.decoder is not None else ("none",)

    @property
    def capacities_nbytes(self) -> dict[str, int]:
        """Bytes that a rank may hold on the device, on its host and on disk."""
        return {DEVICE: self.device.reported_nbytes, HOST: self.host_capacity_nbytes or HOST_NBYTES,
                DISK: self.disk_capacity_nbytes or DISK_NBYTES}

    @property
    def has_units(self) -> bool:
        """False where a number of parameters is known and no layer of it: then nothing is known of what is gathered."""
        return self.model.transformer is not None or len(self.model.units) > 1

    @property
    def decoder(self) -> Transformer | None:
        """The transformer whose activations and products are counted; None for an encoder-decoder, or without a shape.
        """
        transformer = self.model.transformer
        return None if transformer is None or transformer.encoder_blocks else transformer

    # -- a row --------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """One row for each stage and recomputation policy.

        Raises ValueError for a device without a rate in the compute format, and as the formulas do.
        """
        return Plan(self, tuple(self.row(stage, policy) for stage in self.stages for policy in self.policies))

    def row(self, stage: int, policy: str) -> PlanRow:
        """Bytes and seconds of a stage under a recomputation policy."""
        job, flops = self.job(stage, policy), self.flops(policy)
        moved, host_seconds, disk_seconds = self.transfers(job)
        transient, has_units = self.transient_memory(stage, policy), self.has_units
        update, computed = self.update_seconds(job), self.unit_seconds(policy)
        # All micro-batches but the first and the last take as long, and nothing is under way between two.
        communication, exposed = communication_seconds(after_backward(job), update, self.network)
        k = self.micro_batches
        for number, times in Counter([*[0] * (k > 1), *[1] * (k - 2), k - 1]).items():
            one = communication_seconds(micro_batch(job, number), computed, self.network)
            communication, exposed = communication + times * one[0], exposed + times * one[1]
        return PlanRow(
            stage, policy, convention_of(self.convention).name, **self.resting_nbytes(stage),
            activations_nbytes=self.activations_nbytes(policy), gathered_nbytes=transient.gathered_nbytes * has_units,
            secondary_nbytes=transient.secondary_nbytes * has_units,
            buckets_nbytes=transient.in_flight_nbytes * has_units,
            transient_nbytes=transient.fullest_nbytes(self.batch) * has_units,
            capacity_nbytes=self.device.reported_nbytes,
            sent_nbytes_per_step=max(map(sum, zip(*sent_nbytes(job).values(), strict=True))),
            flops_per_step=flops.hardware, model_flops_per_step=flops.model,
            compute_seconds=k * sum(computed.values()),
            communication_seconds=communication, exposed_communication_seconds=exposed,
            update_seconds=sum(update.values()),
            host_transfer_nbytes_per_step=moved[TO_HOST] + moved[TO_DEVICE], host_transfer_seconds=host_seconds,
            disk_transfer_nbytes_per_step=moved[TO_DISK] + moved[FROM_DISK], disk_transfer_seconds=disk_seconds,
            peak_flops_per_second=self.machine.peak_flops_per_second,
            host_capacity_nbytes=self.capacities_nbytes[HOST], disk_capacity_nbytes=self.capacities_nbytes[DISK])

    def fits(self, stage: int, policy: str) -> bool:
        """True where the device holds it, and host and disk do: the row's own answer, without its seconds."""
        resting, most = self.resting_nbytes(stage), self.capacities_nbytes
        if resting["host_nbytes"] > most[HOST] or resting["disk_nbytes"] > most[DISK]:
            return False
        spare = self.device.reported_nbytes - (sum(resting.values()) - resting["host_nbytes"] - resting["disk_nbytes"])
        if spare < 0 or not self.has_units:
            return spare >= 0
        return self.transient_memory(stage, policy).fullest_nbytes(self.batch) <= spare

    # -- bytes --------------------------------------------------------------------------------------------------------

    def job(self, stage: int, policy: str = "none") -> Job:
        """The step of a stage; tied weights, the first tensor of their unit, stay gathered, as the engine keeps them.

        Where no unit is known there is nothing that could overlap, and nothing ahead.
        """
        model = self.model
        return Job(model.unit_lengths, self.ranks, STAGES[stage], policy=self.policy,
                   micro_batches=self.micro_batches, recompute_units=Recompute.parse(policy).units_per_segment,
                   kept_gathered=tuple(sorted({owner for _, owner in model.tied})), tied=model.tied,
                   tied_lengths=tuple(model.units[owner].tensors[0].parameters for _, owner in model.tied),
                   normed_tensors=normed_tensors(self.optimizer, len(model.tensors)),
                   options=self.options if self.has_units else replace(self.options, overlap=False, prefetch=0))

    def resting_nbytes(self, stage: int) -> dict[str, int]:
        """Bytes held from step to step, on the device and on the host, and the runtime's overhead, by fields of a row.
        """
        kinds = states_nbytes(self.model, self.ranks, STAGES[stage], self.convention, optimizer=self.optimizer,
                              nodes=self.options.replicas)
        places = {"parameters": kinds.get("parameter", 0), "gradients": kinds.get("gradient", 0),
                  "optimizer": sum(kinds.get(kind, 0) for kind in OPTIMIZER_KINDS)}
        off = Counter({place: sum(n for name, n in places.items() if getattr(self.options.offload, name) == place)
                       for place in (HOST, DISK)})
        return {**{f"{name}_nbytes": n * (getattr(self.options.offload, name) == DEVICE) for name, n in places.items()},
                "host_nbytes": off[HOST], "disk_nbytes": off[DISK],
                "overhead_nbytes": sum(overheads_nbytes(self.overheads).values())}

    def transient_memory(self, stage: int, policy: str) -> TransientMemory:
        """Bytes that come and go in a step."""
        flow = None
        if self.decoder is not None:
            block = Block.of(self.decoder, 1, self.sequence, self.policy.compute_dtype.itemsize)
            flow = Flow(block, self.decoder.blocks, self.decoder.vocabulary, policy)
        return transient_memory(replace(self.job(stage, policy), micro_batches=min(2, self.micro_batches)), flow)

    def activations_nbytes(self, policy: str) -> int:
        """Activations, what is being made and the gradients that flow back, at their fullest; 0 where not known."""
        if self.decoder is None:
            return 0
        block = Block.of(self.decoder, self.batch, self.sequence, self.policy.compute_dtype.itemsize)
        return fullest_nbytes(block, self.decoder.blocks, self.decoder.vocabulary, policy)

    def transfers(self, job: Job) -> tuple[dict[str, int], float, float]:
        """Bytes that a rank moves in a step by direction; seconds between device and host, and between host and disk.

        Seconds are α + n/β each way.
        """
        state = 0  # which moves only where it rests on disk
        if job.options.offload.uses_disk:
            state = per_parameter_nbytes(self.optimizer, job.policy.state_dtype.itemsize)
        moved = moved_nbytes(job, state)
        host, disk = (sum(link.seconds(moved[way]) for way in ways if link and moved[way])
                      for link, ways in ((self.host_link, DIRECTIONS[:2]), (self.disk_link, DIRECTIONS[2:])))
        return moved, host, disk

    def update_nbytes(self, job: Job) -> tuple[int, int]:
        """Bytes that a rank reads to look for overflow and for the norm; those that it reads and writes to update.

        Gradients are read twice, and once more for the update; masters and the optimizer's state are read and written;
        the parameter is written from the master, where it is another. With offload the host updates.
        """
        policy, states = job.policy, job.states
        elements = job.held(states.optimizer_sharded)
        gradient = job.reduced_dtype.itemsize
        scanned = 2 * gradient * elements * (self.options.offload.gradients == DEVICE)
        if self.options.offload.optimizer != DEVICE:
            return scanned, 0
        master, parameter = policy.master_dtype.itemsize, policy.compute_dtype.itemsize
        cast = 0 if policy.master_dtype == policy.compute_dtype else master + parameter
        if is_cut_anywhere(self.optimizer):
            state = per_parameter_nbytes(self.optimizer, policy.state_dtype.itemsize) * elements
        else:
            kinds = states_nbytes(self.model, job.ranks, states, policy, optimizer=self.optimizer)
            state = kinds.get("optimizer_state", 0)
        return scanned, (gradient + 2 * master + cast) * elements + 2 * state

    # -- operations and seconds ---------------------------------------------------------------------------------------

    def flops(self, policy: str) -> StepFlops:
        """Operations of all micro-batches of a rank; by 6PD, a third of it forward, where no shape is known."""
        if self.decoder is not None:
            one = step_flops(self.decoder, self.batch, self.sequence, policy)
        else:
            forward = six_n(self.model.parameters, self.batch * self.sequence) // 3
            one = StepFlops(forward, 2 * forward, 0)
        k = self.micro_batches
        return StepFlops(k * one.forward, k * one.backward, k * one.recomputed)

    @property
    def machine(self) -> Machine:
        """The machine on which a replay of this step takes as long as its row."""
        return Machine(self.device, self.network, self.policy.compute, self.utilization, host_link=self.host_link,
                       disk_link=self.disk_link)

    def arithmetic(self, policy: str) -> Mapping[Place, Pieces]:
        """The arithmetic of each unit at each of its places in a micro-batch; 6PD by units where no shape is known."""
        if self.decoder is not None:
            return of_micro_batch(self.decoder, self.batch, self.sequence, self.policy, Recompute.parse(policy))
        each = six_n(self.model.parameters, self.batch * self.sequence) / 6 / self.model.parameters
        return {(phase, unit): products_alone(products * each * length)
                for unit, length in enumerate(self.model.unit_lengths)
                for phase, products in (("forward", 2), ("backward", 4))}

    def unit_seconds(self, policy: str) -> dict[Place, float]:
        """Seconds of each unit's arithmetic at each of its places in a micro-batch, by the roofline."""
        found, machine = self.arithmetic(policy), self.machine
        seconds = {pieces: pieces.seconds(machine) for pieces in {*found.values()}}  # equal units have the same
        return {place: seconds[pieces] for place, pieces in found.items()}

    def update_seconds(self, job: Job) -> dict[Place, float]:
        """Seconds in which a rank scans the gradients that it updates with, and updates each unit, by `update_nbytes`.
        """
        scanned, updated = self.update_nbytes(job)
        rate, total = self.device.memory_bytes_per_second, sum(job.padded_lengths)
        found: dict[Place, float] = {("scan", 0): scanned / rate}
        for unit, length in enumerate(job.padded_lengths):
            found["update", unit] = updated * length / (total or 1) / rate
        return found

    # -- the inverse questions: each is answered by the same rows -----------------------------------------------------

    def largest_batch(self) -> int:
        """The most sequences of a micro-batch that fit in some row; 0 where not even one does."""
        return _largest(lambda batch: replace(self, batch=batch)._some_row_fits(), MOST_SEQUENCES)

    def fewest_ranks(self) -> int | None:
        """The smallest power of two of ranks on which some row fits.

        None where no number of ranks helps, up to the most that are planned for: what lies whole on each rank is too
        much. Ranks are taken to be on one node.
        """
        network, alone = Network(self.network.inside), replace(self.options, mesh=None, zeropp=None)
        for ranks in (1 << power for power in range(MOST_RANKS.bit_length())):
            if replace(self, ranks=ranks, network=network, options=alone)._some_row_fits():
                return ranks
        return None

    def largest_model(self, stage: int) -> int:
        """The most parameters whose model states alone, unpadded, fit beside the runtime's overheads in a stage.

        With offload, each where it rests. Raises ValueError for an optimizer whose state depends on the shapes of
        tensors.
        Source of the question: Rajbhandari et al. 2020 (ZeRO), table 1.
        """
        convention, shards = convention_of(self.convention), self.ranks // self.options.replicas
        state = per_parameter_nbytes(self.optimizer, convention.state_itemsize)
        overhead = {DEVICE: sum(overheads_nbytes(self.overheads).values())}
        kinds = {"optimizer": ("master", "gradient_copy"), "gradients": ("gradient",), "parameters": ("parameter",)}
        counted: list[tuple[Convention, int, int]] = []  # what is counted, the optimizer's state, capacity
        for place, capacity in self.capacities_nbytes.items():
            elsewhere: dict[str, Any] = {name: 0 for kind, names in kinds.items()
                                         if getattr(self.options.offload, kind) != place for name in names}
            counted.append((replace(convention, **elsewhere), 0 if "master" in elsewhere else state,
                            capacity - overhead.get(place, 0)))
        return _largest(lambda parameters: all(
            estimate_nbytes(parameters, shards, STAGES[stage], of, optimizer_nbytes=own) <= most
            for of, own, most in counted), 1 << 60)

    def _some_row_fits(self) -> bool:
        return any(self.fits(stage, policy) for stage in self.stages for policy in self.policies)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` for which ``fits`` holds, where what holds for one holds for less; 0 if
    not even 1."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


# -- from names to a plan: what one writes in a notebook or types in a shell ------------------------------------------


ATTENTIONS = FUSED, UNFUSED = ("fused", "unfused")
EVERY_POLICY = ("tiled", "block+tiled", "none", "selective", "sub_block", "block")
USUAL_POLICIES = {FUSED: ("none", "block"), UNFUSED: ("none", "selective", "block")}
Several = str | int | Iterable[Any]


def plan(model: str | ModelShape | None = None, **options: Any) -> Plan:
    """A row of bytes and seconds for each stage and recomputation policy; the options are those of `plan_config`.

    >>> print(plan("llama-2-7b", ranks=8, device="h100-80", recompute="none", batch=4, tokens=2048).verdict)
    ZeRO-3 is the cheapest that fits with a margin: 767.6 ms a step, 37.14 GB to spare; ZeRO-0 misses by 56.35 GB.
    """
    return plan_config(model, **options).plan()


def plan_config(model: str | ModelShape | None = None, *, parameters: int | str | None = None,
                largest_layer: int | str | None = None, ranks: int = 8, device: str = "h100-80",
                link: str | None = None, nodes: int = 1, between: str | None = None, stage: Several = "all",
                recompute: Several = "usual", attention: str = FUSED,
                batch: int = 1, tokens: int | None = None, micro_batches: int = 1, compute: str | Policy = "bf16",
                optimizer: Optimizer = ADAM, convention: str | Convention | Policy | None = None,
                utilization: float = UTILIZATION, overlap: bool = True, prefetch: int = 1,
                offload: str | Offload | None = None, host_link: str | None = None,
                disk_link: str | None = None, host_capacity_nbytes: int | str | None = None,
                disk_capacity_nbytes: int | str | None = None, hardware: str | Path | None = None,
                overheads: dict[str, int] | None = None,
                mesh: Mesh | Sequence[int] | str | None = None,
                zeropp: ZeroPlusPlus | str | None = None, reduction: str = BY_RANK) -> PlanConfig:
    """A checked configuration of a preset's name, a config.json, a ModelShape, or a number of ``parameters``.

    ``stage`` and ``recompute`` are one, several, or "all"; "usual" is to recompute nothing, and blocks. ``attention``
    "fused", as FlashAttention, never holds the probabilities: the engine's "tiled", where a policy does not say itself
    what a block keeps; "unfused" holds them, and "usual" recomputes selectively too. ``link`` None is the device's own.
    ``compute`` is a format, or a Policy for all formats of a step.
    ``convention`` None is "zero-paper", or "fp32" where that is computed in; "zerosim" is the engine's own.
    ``overlap`` and ``prefetch`` are the engine's options, what goes beside other work and how many units are gathered
    ahead: they spare seconds and cost bytes, and a plan counts both. ``mesh``, nodes and ranks of a node as "2x4", puts
    states in shards inside each node, over the links of as many nodes; with ``zeropp``, as "hpz+qwz+qgz", on all ranks,
    and the plan is of stage 3. ``reduction`` "micro_batch", the engine's other order of additions, makes a plan of
    sharded gradients, stages 2 and 3. ``offload`` says what rests on the host or on disk, as the engine's does: "host"
    or "disk" everything, or kinds one by one, as "optimizer=host+gradients=host", or an `Offload`.
    ``host_link`` None is the device's own, ``disk_link`` None nvme-pcie4; capacities are a device's share, None 250 GB
    of the host and 3,840 GB of disk. ``hardware`` is a TOML file of one's own devices and links. Raises ValueError, in
    one sentence, for what is not known or cannot be.
    """
    known = presets() if hardware is None else read(_path(hardware, "hardware"))
    policy = compute if isinstance(compute, Policy) else Policy(_format(compute))
    options, rows = StepOptions.of(ranks, overlap=overlap, prefetch=prefetch, offload=offload, mesh=mesh, zeropp=zeropp,
                                   reduction=reduction), _stages(stage)
    places = options.offload
    if options.mesh and nodes not in (1, options.nodes):
        raise ValueError(f"mesh={str(options.mesh)!r} has {options.nodes} nodes, and nodes={nodes} were asked for; "
                         "leave nodes out")
    if options.zeropp is not None:
        rows = _only(rows, "parameters_sharded", f"a plan with zeropp={str(zeropp)!r} is of sharded parameters, stage "
                     "3")
    if options.by_micro_batch:
        rows = _only(rows, "gradients_sharded", f"a plan with reduction={reduction!r} is of sharded gradients, stage 2 "
                     "or 3")
    to_host = known.host_link(device, host_link) if host_link is not None or not places.is_none else None
    to_disk = known.link(disk_link or DISK_LINK) if disk_link is not None or places.uses_disk else None
    network = known.network(ranks, known.device_link(device, link).name, options.nodes if options.mesh else nodes,
                            between)
    if convention is None:
        convention = "fp32" if policy.compute == "fp32" else "zero-paper"
    return PlanConfig(
        model=_model(model, parameters, largest_layer), ranks=ranks, device=known.device(device), network=network,
        policy=policy, stages=rows, recompute=_policies(recompute, attention), batch=batch, tokens=tokens,
        micro_batches=micro_batches, optimizer=optimizer, convention=policy if convention == "zerosim" else convention,
        utilization=utilization, options=options, host_link=to_host, disk_link=to_disk,
        host_capacity_nbytes=_nbytes(host_capacity_nbytes, "host_capacity_nbytes"),
        disk_capacity_nbytes=_nbytes(disk_capacity_nbytes, "disk_capacity_nbytes"), overheads=overheads)


plan.__signature__ = signature(plan_config).replace(return_annotation=Plan)  # type: ignore[attr-defined]  # for a notebook


def _nbytes(asked: int | str | None, what: str) -> int | None:
    return None if asked is None else nbytes_of(asked, what)


COUNT = re.compile(r"[\d.,_]+(?:[kmbt]|e\d+)?", re.IGNORECASE)  # a model that is a number of parameters, as 7B


def _model(model: str | ModelShape | None, parameters: int | str | None,
           largest_layer: int | str | None) -> ModelShape:
    if isinstance(model, str) and parameters is None and COUNT.fullmatch(model.strip()):
        model, parameters = None, model
    if (model is None) == (parameters is None):
        raise ValueError("a plan is of a model or of a number of parameters: name one of the two, as gpt2-xl or 7.5e9")
    if parameters is not None:
        largest = None if largest_layer is None else count_of(largest_layer, "largest_layer")
        return model_of_parameters(count_of(parameters, "parameters"), largest)
    if largest_layer is not None:
        raise ValueError("largest_layer goes with a number of parameters; a model's shape has its own layers")
    return model if isinstance(model, ModelShape) else model_shape(_path(model, "model"))


def _path(asked: Any, what: str) -> str | Path:
    if isinstance(asked, str | Path):
        return asked
    raise ValueError(f"{what}={asked!r} must be a name or the path of a file, as a text")


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


def _only(rows: tuple[int, ...], sharded: str, what: str) -> tuple[int, ...]:
    """The stages of which this state is sharded; ValueError where others were asked for by number."""
    found = tuple(stage for stage in rows if stage not in STAGES or getattr(STAGES[stage], sharded))
    if len(found) < len(rows) < len(STAGES):
        raise ValueError(f"{what}, found stage {', '.join(map(str, sorted({*rows} - {*found})))}; leave that out")
    return found


def _policies(asked: Several, attention: str) -> tuple[str, ...]:
    """The engine's policies: with fused attention tiled ones, but for those that say what a block keeps."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} must be {FUSED}, as FlashAttention is, or {UNFUSED}")
    if isinstance(asked, str) and asked == "all":
        return EVERY_POLICY
    asked = USUAL_POLICIES[attention] if isinstance(asked, str) and asked == "usual" else asked
    try:
        texts = asked.split(",") if isinstance(asked, str) else [str(text) for text in asked]  # type: ignore[union-attr]
    except TypeError:
        raise ValueError(f"recompute={asked!r} must be usual, all, or some policies, as in block,tiled") from None
    policies = [Recompute.parse(text) for text in texts]
    fused = [replace(one, inside=TILED) if attention == FUSED and one.inside == ALL else one for one in policies]
    return tuple(dict.fromkeys(map(str, fused)))
