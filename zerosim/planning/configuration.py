"""The configuration of a plan, which computes its rows: bytes and seconds of each stage and recomputation policy.

Legend: N ranks, k micro-batches of B sequences of L tokens; P parameters; s those that a rank's optimizer updates, P or
its share P/N; α seconds of latency, β bytes per second of a link, one way.

Whose step it is says the runtime. Of zerosim's own engine bytes are exact, and seconds rest on peak rates, on a share
of the peak that arithmetic is taken to reach, and on the α-β model of collectives: both are folds over the same events
(`step_events`), under the same options. Of PyTorch's, DeepSpeed's and Megatron's bytes are `runtimes.account`, and the
same events are priced by measured rates (`efficiency`) and by NCCL's own model (`nccl`).

The seconds of a step are those of two streams, one that computes and one that communicates: what is issued goes to the
end of the communication stream, which does one thing after the other; the program goes on, and stands still at a wait
until what it waits for is done: that is what is exposed. Of zerosim's engine a replay (`timeline`) takes as long, as
tests hold, but where transfers run beside it (offload) or an optimizer multiplies whole matrices. Every rank does the
same at the same time, so one is enough.

With `offload` state rests on the host or on disk, and the optimizer's is updated on the host. What moves is counted
by `closed_forms.moved_nbytes`; its seconds are those of one message each way, one after the other and beside nothing,
each device with a link and a disk of its own. The host updates the shares of all its devices at the rate of the
runtime's Adam there (`efficiency`); that of zerosim's engine takes no time.
Sources: Ren et al. 2021, "ZeRO-Offload", sections 3 and 4 (fp32 states and the update on the CPU; gradients there and
parameters back in 16 bits, 4 bytes for each parameter of a rank's share); Rajbhandari et al. 2021, "ZeRO-Infinity",
section 4 (the disk).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zerosim.models.transformer import Transformer
from zerosim.models.units import TILED, Recompute
from zerosim.numerics.checks import checked_count, count_fields, unknown_name
from zerosim.numerics.places import DEVICE, DIRECTIONS, DISK, FROM_DISK, HOST, TO_DEVICE, TO_DISK, TO_HOST, Offload
from zerosim.numerics.policy import Policy
from zerosim.numerics.units import gigabytes, seconds_text
from zerosim.optim.base import Optimizer
from zerosim.options import StepOptions
from zerosim.planning.activations import Block
from zerosim.planning.closed_forms import STAGES, Job, ShardedStates, moved_nbytes, sent_nbytes
from zerosim.planning.conventions import (
    ADAM,
    Convention,
    convention_of,
    is_cut_anywhere,
    per_parameter_nbytes,
    states_nbytes,
)
from zerosim.planning.efficiency import Efficiency, efficiency
from zerosim.planning.finetuning import EightBit, flops_of_trained, sent_in_rings, without_frozen
from zerosim.planning.flops import StepFlops, six_n, step_flops
from zerosim.planning.hardware import (
    DISK_NBYTES,
    HOST_NBYTES,
    OVERHEADS_OF,
    Device,
    Link,
    Machine,
    Network,
    overheads_nbytes,
    positive,
)
from zerosim.planning.plan_row import ZEROSIM, PlanRow, missing_nbytes
from zerosim.planning.runtimes import DEEPSPEED, FSDP2, MEGATRON_CORE, RECOMPUTED, RUNTIMES, AccountRow, account
from zerosim.planning.shapes import ModelShape
from zerosim.planning.step_activations import Place, fullest_nbytes
from zerosim.planning.step_arithmetic import Pieces, of_micro_batch, products_alone
from zerosim.planning.step_events import StepEvent, after_backward, micro_batch
from zerosim.planning.step_folds import Flow, TransientMemory, communication_seconds, transient_memory
from zerosim.shown import ShownPlan

MOST_RANKS = 8192
NODE = 8  # ranks of a node, as boards of accelerators are sold
POLICY = Policy("bf16")
OPTIONS = StepOptions(overlap=True, prefetch=1)  # what frameworks do by default
UTILIZATION = 0.5  # of the device's dense peak that the engine's arithmetic is taken to reach: an assumption
MARGIN = 0.1  # of the device's memory, which a plan wants spare: an allocator's fragments, and peaks that no model has
# Tokens of a sequence by default, where a model takes more: Llama 2's (Touvron et al. 2023, section 2.2), and those of
# meta-llama/llama-cookbook's training_config (`context_length`, read 2026-11); pretraining takes 8,192 and more.
DEFAULT_TOKENS = 4096
# What `Offload` places by one name, and the kinds of state that it is.
STATE_KINDS = {"parameters": ("parameter",), "gradients": ("gradient",),
               "optimizer": ("master", "gradient_copy", "optimizer_state")}


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The model to train, the options of its training, and the machine: what the options of `plan_config` stand for.

    `sequence` 0 is the model's longest, and no more than `DEFAULT_TOKENS`, which `sequence_by_default` says then.
    `convention` None is the engine's own. `kernels` says what a device reaches where that is not what was measured of
    it; `utilization` None is `UTILIZATION` of zerosim, and of others what was measured. `options` are the engine's, of
    bytes and of seconds; a bucket is a unit. Capacities None are `HOST_NBYTES` and `DISK_NBYTES`; `overheads` replaces
    bytes of the runtime by name; `global_batch` says that so many sequences are to be a step's on any number of ranks.
    Raises ValueError for counts below one, unknown stages, policies, runtimes and
    conventions, buckets of bytes, and shares outside their range.
    """

    model: ModelShape
    ranks: int
    device: Device
    network: Network
    policy: Policy = POLICY
    stages: tuple[int, ...] = tuple(STAGES)
    recompute: tuple[str, ...] = ("tiled", "block+tiled")
    batch: int = 1
    sequence: int = 0
    micro_batches: int = 1
    optimizer: Optimizer | EightBit = ADAM
    runtime: str = ZEROSIM
    convention: str | Convention | Policy | None = None
    compiled: bool = False
    loss_chunks: int = 1
    global_batch: int | None = None
    kernels: Efficiency | None = None
    utilization: float | None = None
    margin: float = MARGIN
    tokens: int | None = None
    price: float | None = None
    options: StepOptions = OPTIONS
    host_link: Link | None = None
    disk_link: Link | None = None
    host_capacity_nbytes: int | None = None
    disk_capacity_nbytes: int | None = None
    overheads: dict[str, int] | None = None
    sequence_by_default: bool = False

    def __post_init__(self) -> None:
        count_fields(self, ranks=1, batch=1, micro_batches=1, loss_chunks=1)
        if self.ranks > MOST_RANKS:
            raise ValueError(f"{self.ranks:,} ranks were asked for; every rank's share is looked at, so take "
                             f"{MOST_RANKS:,} at most")
        self._check_names()
        if self.utilization is not None and positive("", "utilization", self.utilization) > 1:
            raise ValueError("utilization is the share of the peak that products reach, above 0 and at most 1, got "
                             f"{self.utilization!r}")
        if positive("", "margin", self.margin, or_zero=True) >= 1:
            raise ValueError("margin is the share of the device that is to stay free, from 0 to below 1, got "
                             f"{self.margin!r}")
        if self.tokens is not None:
            checked_count("tokens", self.tokens, 1)
        if self.price is not None:
            positive("", "price", self.price, or_zero=True)
            if self.tokens is None:
                raise ValueError(f"price={self.price!r} is of a whole training, and no tokens were asked for; say how "
                                 "many, as tokens='300B'")
        if checked_count("sequence", self.sequence, 0) == 0:
            object.__setattr__(self, "sequence", min(self.longest_sequence, DEFAULT_TOKENS))
            object.__setattr__(self, "sequence_by_default", True)
        transformer = self.model.transformer
        if transformer and transformer.positions and self.sequence > transformer.positions:
            raise ValueError(f"sequence={self.sequence}: {self.model.name} has learned positions for "
                             f"{transformer.positions} tokens, and none beyond; take shorter sequences")
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
            raise ValueError(f"what {self.optimizer_name} keeps depends on the shapes of tensors, and what "
                             "it reads from disk is not planned; place its state on the host, or take AdamW")
        for place, used, example in ((HOST, not places.is_none, "pcie4"), (DISK, places.uses_disk, "nvme-pcie4")):
            link, capacity = f"{place}_link", f"{place}_capacity_nbytes"
            for name in (link, capacity):
                if (found := getattr(self, name)) is not None and not used:
                    raise ValueError(f"{name}={getattr(found, 'name', found)!r} is of offload to {place}, and nothing "
                                     f"is placed there; leave it out, or say what is, as offload={place!r}")
            if used and getattr(self, link) is None:
                raise ValueError(f"offload moves state over a {place} link; name one, as {example}")
            if getattr(self, capacity) is not None:
                count_fields(self, **{capacity: 1})

    def _check_names(self) -> None:
        for what, asked in (("stage", self.stages), ("recomputation policy", self.recompute)):
            if not asked:
                raise ValueError(f"a plan has rows for each {what}, and none was asked for; name one at least")
        if unknown := [stage for stage in self.stages if stage not in STAGES]:
            raise ValueError(f"ZeRO has the stages {', '.join(map(str, STAGES))}, found {unknown[0]!r}")
        for policy in self.recompute if self.is_engine else ():
            Recompute.parse(policy)
        convention_of(self.accounting)
        self._check_runtime()
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer | EightBit):
            raise ValueError(f"optimizer={optimizer!r} does not say what it keeps; take one of zs.optim's, as "
                             "zs.optim.AdamW() is")
        if self.model.transformer is None and not is_cut_anywhere(optimizer):
            raise ValueError(f"what {self.optimizer_name} keeps depends on the shapes of tensors, and of "
                             f"{self.model.name} none is known; name a model, or an optimizer such as AdamW")

    def _check_runtime(self) -> None:
        """Raises ValueError for an unknown runtime, and for what only others have."""
        if self.runtime not in RUNTIMES:
            raise unknown_name(f"no runtime is called {self.runtime!r}", self.runtime, RUNTIMES)
        if not self.is_engine and (other := [policy for policy in self.recompute if policy not in RECOMPUTED]):
            raise ValueError(f"recompute={other[0]!r} is no policy of {self.runtime}'s programs; take some of none, "
                             "selective, and block, which is every block, full elsewhere; or runtime='zerosim'")
        options = self.options
        programs, engine = (FSDP2, DEEPSPEED, MEGATRON_CORE), (ZEROSIM,)
        for what, said, whose in (
                (f"compiled={self.compiled}", self.compiled, programs[:2]),
                (f"loss_chunks={self.loss_chunks}", self.loss_chunks > 1, programs),
                ("a model with frozen weights", self.model.has_frozen, programs),
                (f"optimizer={self.optimizer_name}", isinstance(self.optimizer, EightBit), programs[:2]),
                (f"convention={self.convention!r}", self.convention is not None, engine),
                (f"overheads={self.overheads}", self.overheads is not None, engine),
                (f"zeropp='{options.zeropp}'", options.zeropp is not None, engine),
                (f"reduction={options.reduction!r}", options.by_micro_batch, engine)):
            if said and self.runtime not in whose:
                raise ValueError(f"{what} is of {' and '.join(whose)}, and this is a plan of {self.runtime}; leave it "
                                 f"out, or take runtime={whose[0]!r}")
        if self.decoder is None and not self.is_engine:
            raise ValueError(f"a plan of {self.runtime} counts what each layer of a decoder keeps, and "
                             f"{self.model.name} is no decoder of known layers; name one, or take runtime='zerosim' "
                             "for states and traffic alone")

    @property
    def longest_sequence(self) -> int:
        """Tokens of the model's longest sequence; 2,048 where none is known."""
        of = self.model.transformer
        return of.tokens or of.positions or 2048 if of else 2048

    @property
    def is_engine(self) -> bool:
        """True for a plan of zerosim's own engine."""
        return self.runtime == ZEROSIM

    @property
    def optimizer_name(self) -> str:
        """The optimizer's class, as its program has it."""
        return self.optimizer.name if isinstance(self.optimizer, EightBit) else type(self.optimizer).__name__

    @property
    def accounting(self) -> str | Convention | Policy:
        """The convention by which zerosim's states are counted: the engine's own where none was asked for."""
        return self.policy if self.convention is None else self.convention

    @property
    def policies(self) -> tuple[str, ...]:
        """The recomputation policies that make rows: "none" alone where nothing is known of activations."""
        return self.recompute if self.decoder is not None else ("none",)

    @property
    def capacities_nbytes(self) -> dict[str, int]:
        """Bytes that a rank may hold on the device, on its host and on disk."""
        return {DEVICE: self.device.usable_nbytes, HOST: self.host_capacity_nbytes or HOST_NBYTES,
                DISK: self.disk_capacity_nbytes or DISK_NBYTES}

    @property
    def margin_nbytes(self) -> int:
        """The bytes of the device that are to stay free."""
        return round(self.margin * self.device.usable_nbytes)

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

        Raises ValueError for a device without a rate in the compute format, for what the runtime's program has not, and
        as the formulas do.
        """
        offload, mesh = self.options.offload.text, self.options.mesh
        asked = f"mesh='{mesh}'" if mesh else f"{offload=}" if offload != "none" else f"runtime={self.runtime!r}"
        for stage in reversed(self.stages):
            if (reason := self.lacking(STAGES[stage])) is not None:
                raise ValueError(f"{asked} was asked for at stage {stage}: {reason}")
        return Plan(self, tuple(self.row(stage, policy) for stage in self.stages for policy in self.policies))

    def lacking(self, states: ShardedStates) -> str | None:
        """The reason why the runtime's program shards no such states, or not on the mesh or with the places that were
        asked for; None where it does."""
        asked, mesh = self.options.offload, self.options.mesh
        if self.options.zeropp and not states.parameters_sharded:
            return "parts of ZeRO++ are of sharded parameters; take stage 3"
        if self.options.by_micro_batch and not states.gradients_sharded:
            return "reduction='micro_batch' is of sharded gradients; take stages 2 and 3"
        if self.runtime == MEGATRON_CORE and states.gradients_sharded:
            return "Megatron's distributed optimizer is stage 1; take stages 0 and 1, or the runtime fsdp2"
        if self.runtime == DEEPSPEED and states.parameters_sharded and self.options.prefetch > 1:
            return "DeepSpeed fetches elements ahead, of which its default number is counted; take prefetch=1 or 0"
        if mesh and self.runtime == DEEPSPEED and not states.parameters_sharded:
            return "DeepSpeed's hybrid sharding is MiCS, of stage 3 up to version 0.19.6; take that, or fsdp2"
        if mesh and self.runtime == MEGATRON_CORE and not states.optimizer_sharded:
            return "hybrid sharding is of Megatron's distributed optimizer; take stage 1"
        if self.runtime == MEGATRON_CORE and not asked.is_none and (
                asked != Offload(optimizer=HOST) or not states.optimizer_sharded):
            return ("Megatron offloads the distributed optimizer's state alone, to the host; take stage 1 and "
                    "offload='optimizer=host'")
        if self.runtime == DEEPSPEED and not asked.is_none:
            if not states.optimizer_sharded:
                return "DeepSpeed offloads from stage 1 on; take stages 1, 2 and 3"
            if asked.gradients != DEVICE:
                return ("gradients have no place of their own in DeepSpeed, and go to the host with the optimizer's "
                        "state; take offload='optimizer=host'")
            if not states.parameters_sharded and (asked.parameters != DEVICE or asked.uses_disk):
                return "DeepSpeed's offload_param and nvme are of stage 3; take that, or offload='optimizer=host'"
        if self.runtime != FSDP2:
            return None
        if not self.options.overlap:
            return "reductions always run beside backward in PyTorch; leave overlap as it is"
        if states.parameters_sharded and not self.options.prefetch:
            return "FSDP2 gathers one module ahead in backward, which no argument turns off; take prefetch=1"
        if asked.is_none and not mesh:
            return None
        if not states.gradients_sharded:
            return (f"{'hybrid sharding' if mesh else 'offload'} is fully_shard's, and stages 0 and 1 are "
                    "DistributedDataParallel; take stages 2 and 3")
        if not asked.is_none and {asked.optimizer, asked.gradients, asked.parameters} != {HOST}:
            return ("CPUOffloadPolicy takes parameters, gradients and the optimizer's state to the host, none of them "
                    "alone, and none to disk; take offload='host'")
        return None

    def row(self, stage: int, policy: str) -> PlanRow:
        """A stage under a recomputation policy: what is held, sent and moved, and the seconds of it."""
        job, flops, most = self.job(stage, policy), self.flops(policy), self.capacities_nbytes
        held = self.held(stage, policy)
        moved, host_seconds, disk_seconds = self.transfers(job)
        return PlanRow(
            stage, policy, self.runtime, self.ranks, held, self.margin_nbytes,
            sent_nbytes_per_step=(
                sum(times * sent_in_rings(events) for times, events in self.parts(job)) if self.model.has_frozen else
                max(map(sum, zip(*sent_nbytes(job).values(), strict=True)))),
            host_transfer_nbytes_per_step=moved[TO_HOST] + moved[TO_DEVICE], host_transfer_seconds=host_seconds,
            disk_transfer_nbytes_per_step=moved[TO_DISK] + moved[FROM_DISK], disk_transfer_seconds=disk_seconds,
            flops_per_step=flops.hardware, model_flops_per_step=flops.model,
            **self.seconds(job, self.unit_seconds(policy), held),
            tokens_per_step=self.ranks * self.micro_batches * self.batch * self.sequence,
            peak_flops_per_second=self.machine.peak_flops_per_second, capacity_nbytes=most[DEVICE],
            host_capacity_nbytes=most[HOST], disk_capacity_nbytes=most[DISK])

    def has_margin(self, stage: int, policy: str) -> bool:
        """True where the device holds it with the margin, and host and disk do: the row's answer, without its seconds.
        """
        room = self.capacities_nbytes
        room[DEVICE] -= self.margin_nbytes
        return not missing_nbytes(self.held(stage, policy), room)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def job(self, stage: int, policy: str = "none") -> Job:
        """The step of a stage; tied weights, the first tensor of their unit, stay gathered, as the engine keeps them.

        FSDP2 keeps its root, the first and the last unit. Where no unit is known there is nothing that could overlap,
        and nothing ahead. Of frozen weights what rests in fewer bits counts as fewer elements of the compute format.
        """
        model, itemsize = self.model, self.policy.compute_dtype.itemsize
        root = {0, len(model.units) - 1} if self.runtime == FSDP2 and model.transformer is not None else set[int]()
        lengths = model.unit_lengths if not model.has_frozen else tuple(
            -(-sum(tensor.nbytes(itemsize) for tensor in unit.tensors) // itemsize) for unit in model.units)
        return Job(lengths, self.ranks, STAGES[stage], policy=self.policy,
                   micro_batches=self.micro_batches, recompute_units=Recompute.parse(policy).units_per_segment,
                   kept_gathered=tuple(sorted(root | {owner for _, owner in model.tied})), tied=model.tied,
                   tied_lengths=tuple(model.units[owner].tensors[0].parameters for _, owner in model.tied),
                   normed_tensors=len(model.tensors) if "tensor_norm" in self.optimizer.needs else 0,
                   options=self.options if self.has_units else replace(self.options, overlap=False, prefetch=0))

    def of_trained(self, job: Job) -> Job:
        """The step of the weights alone that are trained: of gradients, and of all after backward."""
        return replace(job, unit_lengths=tuple(sum(tensor.parameters for tensor in unit.tensors if not tensor.frozen)
                                               for unit in self.model.units)) if self.model.has_frozen else job

    def held(self, stage: int, policy: str) -> tuple[AccountRow, ...]:
        """The account of what a rank holds at the step's fullest moment, wherever it rests."""
        if not self.is_engine:
            return account(self.runtime, self.model, self.job(stage, policy), batch=self.batch, tokens=self.sequence,
                           recompute=policy, optimizer=self.optimizer, compiled=self.compiled,
                           loss_chunks=self.loss_chunks, platform=self.device.platform)
        rows = self.resting(stage)
        if self.has_units:
            most, source = self.transient_memory(stage, policy).fullest(self.batch), "the engine's order, step_events"
            rows += [AccountRow(kind, what, nbytes, source) for kind, what, nbytes in (
                ("activations", "activations, their gradients and tokens", self.batch * most.sequence_nbytes),
                ("gathered", "gathered parameters", most.gathered_nbytes),
                ("gathered", "secondary shards (hpZ)", most.secondary_nbytes),
                ("buckets", "gradients in flight", most.gradients_nbytes),
                ("buckets", "buffers of collectives", most.buffers_nbytes)) if nbytes]
        return tuple(rows)

    def resting(self, stage: int) -> list[AccountRow]:
        """The engine's account of what is held from step to step, and of the runtime's overhead."""
        convention, places = convention_of(self.accounting), self.options.offload
        platform = self.device.platform
        kinds = states_nbytes(self.model, self.ranks, STAGES[stage], convention, optimizer=self.optimizer,
                              nodes=self.options.replicas)
        states = [(plural, kind, getattr(places, plural)) for plural, of in STATE_KINDS.items() for kind in of]
        return [*(AccountRow(plural, kind.replace("_", " "), kinds[kind], convention.source, place)
                  for plural, kind, place in states if kinds.get(kind)),
                *(AccountRow("overhead", name, nbytes, OVERHEADS_OF[platform][name].source)
                  for name, nbytes in overheads_nbytes(self.overheads, platform).items() if nbytes)]

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
        moved = moved_nbytes(self.of_trained(job), state, job)
        host, disk = (sum(link.seconds(moved[way]) for way in ways if link and moved[way])
                      for link, ways in ((self.host_link, DIRECTIONS[:2]), (self.disk_link, DIRECTIONS[2:])))
        return moved, host, disk

    def update_nbytes(self, job: Job, held: Iterable[AccountRow] = ()) -> tuple[int, int]:
        """Bytes that a rank reads to look for overflow and for the norm; those that it reads and writes to update.

        Gradients are read twice, and once more for the update; masters and the optimizer's state are read and written,
        as the account says, or as much for each parameter; the parameter is written from the master, where it is
        another. With offload the host updates.
        """
        policy, states = job.policy, job.states
        elements = job.held(states.optimizer_sharded)
        gradient = job.reduced_dtype.itemsize
        scanned = 2 * gradient * elements * (self.options.offload.gradients == DEVICE)
        if self.options.offload.optimizer != DEVICE:
            return scanned, 0
        master, parameter = policy.master_dtype.itemsize, policy.compute_dtype.itemsize
        cast = 0 if policy.master_dtype == policy.compute_dtype else master + parameter
        state = (per_parameter_nbytes(self.optimizer, policy.state_dtype.itemsize) * elements
                 if is_cut_anywhere(self.optimizer) else
                 sum(one.nbytes for one in held if one.kind == "optimizer" and "state" in one.what))
        return scanned, (gradient + 2 * master + cast) * elements + 2 * state

    # -- operations and seconds ---------------------------------------------------------------------------------------

    def recomputed(self, policy: str) -> Recompute:
        """The part of a block that is computed again: PyTorch's attention is fused, whatever else a policy keeps."""
        return Recompute.parse(policy) if self.is_engine else Recompute(1 if policy == "block" else None, TILED)

    def flops(self, policy: str) -> StepFlops:
        """Operations of all micro-batches of a rank; by 6PD, a third of it forward, where no shape is known."""
        if self.decoder is not None:
            one = step_flops(self.decoder, self.batch, self.sequence, str(self.recomputed(policy)))
            if self.model.has_frozen:
                one = flops_of_trained(self.model, one, self.batch, self.sequence)
        else:
            forward = six_n(self.model.parameters, self.batch * self.sequence) // 3
            one = StepFlops(forward, 2 * forward, 0)
        k = self.micro_batches
        return StepFlops(k * one.forward, k * one.backward, k * one.recomputed)

    @property
    def reached(self) -> Efficiency | None:
        """The rates that the device reaches under the runtime; None for zerosim's engine, which has no device."""
        if self.is_engine:
            return None
        found = self.kernels or efficiency(self.device, self.runtime, compiled=self.compiled,
                                           format=self.policy.compute)
        if self.utilization is None:
            return found
        rate = self.utilization * self.machine.peak_flops_per_second
        return replace(found, products=rate, linear=rate)

    @property
    def machine(self) -> Machine:
        """The machine on which a replay of this step takes as long as its row."""
        return Machine(self.device, self.network, self.policy.compute, self.utilization or UTILIZATION,
                       host_link=self.host_link, disk_link=self.disk_link)

    def arithmetic(self, policy: str) -> Mapping[Place, Pieces]:
        """The arithmetic of each unit at each of its places in a micro-batch; 6PD by units where no shape is known."""
        if self.decoder is not None:
            return of_micro_batch(self.decoder, self.batch, self.sequence, self.policy, self.recomputed(policy))
        each = six_n(self.model.parameters, self.batch * self.sequence) / 6 / self.model.parameters
        return {(phase, unit): products_alone(products * each * length)
                for unit, length in enumerate(self.model.unit_lengths)
                for phase, products in (("forward", 2), ("backward", 4))}

    def seconds(self, job: Job, computed: Mapping[Place, float], held: Iterable[AccountRow] = ()) -> dict[str, float]:
        """Seconds of a step whose units compute so long, by fields of a row, transfers to host and disk apart.

        Exposed is what the program stands still for; by what its arithmetic gets longer beside hidden communication is
        computed.
        """
        update, k = self.update_seconds(self.of_trained(job), held), self.micro_batches
        reached, network = self.reached, self.network
        price = None if reached is None else reached.collective_seconds
        communication = exposed = 0.0
        for times, events in self.parts(job):
            one = communication_seconds(events, {**computed, **update}, network, price)
            communication, exposed = communication + times * one[0], exposed + times * one[1]
        longer = 0.0 if reached is None else reached.contention_seconds(communication - exposed, network)
        return {"compute_seconds": k * sum(computed.values()) + longer, "communication_seconds": communication,
                "exposed_communication_seconds": exposed, "update_seconds": sum(update.values())}

    def parts(self, job: Job) -> Iterator[tuple[int, Iterable[StepEvent]]]:
        """(times, events) of each part of a step: what follows backward, and micro-batches, of which all but the first
        and the last are equal; nothing is under way between two."""
        trained, k = self.of_trained(job), self.micro_batches
        yield 1, after_backward(trained)
        for number, times in Counter([*[0] * (k > 1), *[1] * (k - 2), k - 1]).items():
            events = micro_batch(job, number)
            yield times, (without_frozen(events, job, trained, self.model.first_trained) if self.model.has_frozen else
                          events)

    def unit_seconds(self, policy: str) -> dict[Place, float]:
        """Seconds of each unit's arithmetic at each of its places in a micro-batch: of zerosim's layers by the
        roofline, of another runtime's at the rates that it reaches."""
        if self.reached is not None:
            return self.reached.unit_seconds(self.model, self.batch, self.sequence, policy)
        found, machine = self.arithmetic(policy), self.machine
        seconds = {pieces: pieces.seconds(machine) for pieces in {*found.values()}}  # equal units have the same
        return {place: seconds[pieces] for place, pieces in found.items()}

    def product_seconds(self, job: Job) -> float:
        """Seconds of the matrix products of a rank's update, Muon's, at the rate of products: shared equally by ranks
        that hold shards, as DTensors share them, and where ranks own whole tensors no less than the largest takes; what
        is sent for that is not counted, nor products on a host or those that an optimizer does not know."""
        if isinstance(self.optimizer, EightBit) or self.options.offload.optimizer != DEVICE:
            return 0.0
        flops = [self.optimizer.product_flops(tensor.shape) or 0 for tensor in self.model.tensors if not tensor.frozen]
        share = sum(flops) / (job.shards if job.states.optimizer_sharded else 1)
        if not (self.runtime == FSDP2 and job.states.gradients_sharded):
            share = max(share, *flops)
        return share / (self.reached.products if self.reached is not None else
                        self.machine.efficiency * self.machine.peak_flops_per_second)

    def update_seconds(self, job: Job, held: Iterable[AccountRow]) -> dict[Place, float]:
        """Seconds in which a rank scans the gradients that it updates with, and updates each unit, by `update_nbytes`;
        with offload a program's host updates the shares of all its devices."""
        scanned, updated = self.update_nbytes(job, held)
        rate, total = self.device.memory_bytes_per_second, sum(job.padded_lengths)
        seconds = updated / rate + self.product_seconds(job)
        if self.options.offload.optimizer != DEVICE and self.reached is not None:
            devices = min(self.ranks, self.network.ranks_per_node or self.ranks)
            seconds = devices * job.held(job.states.optimizer_sharded) / self.reached.host_update
        return {("scan", 0): scanned / rate} | {("update", unit): seconds * length / (total or 1)
                                                for unit, length in enumerate(job.padded_lengths)}


# -- the rows ---------------------------------------------------------------------------------------------------------


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
    def fastest(self) -> PlanRow | None:
        """The fastest row that fits with a margin: devices are paid by the second. Where none has it, the fastest that
        fits; None where none does."""
        return next((row for row in self.fitting if row.has_margin), next(iter(self.fitting), None))

    @property
    def least_sent(self) -> PlanRow | None:
        """Of the rows that fit, the one that sends least, then that takes least time; None where none fits."""
        return min(self.fitting, key=lambda row: (row.sent_nbytes_per_step, row.step_seconds), default=None)

    @property
    def nearest(self) -> PlanRow | None:
        """Of the rows without the margin, and beside the fastest that fits, the one that comes nearest to it."""
        return min((row for row in self.rows if row != self.fastest and not row.has_margin), default=None,
                   key=lambda row: (row.missing_nbytes, -row.spare_nbytes))

    @property
    def verdict(self) -> str:
        """The fastest row that fits with a margin, and the one without that comes nearest to it, in one sentence."""
        best, first = self.fastest, self.rows[0]
        margin = f"{gigabytes(first.margin_nbytes)} GB"
        near = self.nearest
        if best is None:
            assert near is not None
            return f"Nothing fits: {self.name_of(near)} comes nearest and {_misses(near)}."
        spare = f"{seconds_text(best.step_seconds)} a step, {gigabytes(best.spare_nbytes)} GB to spare"
        with_margin = " with a margin" * (self.config.margin > 0)
        text = (f"{self.name_of(best)} is the fastest that fits{with_margin}: {spare}" if best.has_margin else
                f"Nothing fits with a margin of {margin}; {self.name_of(best)} is the fastest that fits: {spare}")
        if not self.config.has_units:
            text = f"By its states alone: {text}"
        if near is None:
            return text + "."
        how = _misses(near) if near.missing_nbytes else (
            f"has {gigabytes(near.spare_nbytes)} GB to spare, less than the margin of {margin}")
        return f"{text}; {self.name_of(near)} {how}."

    def name_of(self, row: PlanRow) -> str:
        """The row's title, or its stage where that tells it from all others."""
        return row.title if len(self.config.policies) > 1 else f"ZeRO-{row.stage}"

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data: exact integers in bytes."""
        config, model, options = self.config, self.config.model, self.config.options
        return {"model": {"name": model.name, "parameters": model.parameters,
                          "largest_unit_parameters": model.largest_unit.parameters},
                "runtime": config.runtime, "ranks": config.ranks, "device": config.device.name,
                "link": config.network.inside.name, "compute": config.policy.compute, "batch": config.batch,
                "sequence": config.sequence, "micro_batches": config.micro_batches,
                "margin": config.margin, "tokens": config.tokens, "price": config.price,
                "convention": convention_of(config.accounting).name if config.is_engine else None,
                "overlap": options.overlap, "prefetch": options.prefetch,
                "offload": options.offload.text, "mesh": None if options.mesh is None else str(options.mesh),
                "zeropp": None if options.zeropp is None else asdict(options.zeropp), "reduction": options.reduction,
                "rows": [row.as_dict() for row in self.rows], "verdict": self.verdict}


def _misses(row: PlanRow) -> str:
    """By how much a row does not fit, and where that is not the device alone, of which the table speaks."""
    by = {place: f"{gigabytes(nbytes)} GB" for place, nbytes in row.missing_nbytes_by_place.items()}
    return "misses by " + (by[DEVICE] if [*by] == [DEVICE] else
                           " and ".join(f"{nbytes} of the {place}" for place, nbytes in by.items()))
