"""Settings of a step as one pastes them: zerosim's engine, PyTorch's FSDP2, DeepSpeed's ds_config; and what is lost.

Sources: PyTorch, documentation and source of ``torch.distributed.fsdp.fully_shard`` and of ``FSDPModule``;
DeepSpeed, documentation "DeepSpeed Configuration JSON" and ``deepspeed/runtime/zero/config.py``, whose sizes of buckets
are numbers of elements; both as of 2026.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from zerosim import optim
from zerosim.course.measured import decoder_of
from zerosim.models.units import SELECTIVE, SUB_BLOCK, TILED, Recompute
from zerosim.numerics.places import DEVICE, DISK, HOST
from zerosim.numerics.policy import BY_RANK
from zerosim.numerics.units import bytes_text, counted
from zerosim.options import StepOptions
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.plan_config import OPTIONS, PlanConfig
from zerosim.planning.plan_row import recomputation_text

NVME_PATH = "/local_nvme"
TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings of one step: a stage, a recomputation policy, k micro-batches of B sequences, and the other options."""

    stage: int
    recompute: str
    batch: int
    micro_batches: int
    options: StepOptions = OPTIONS

    @property
    def title(self) -> str:
        """``ZeRO-2 with block recomputation, optimizer on the host``."""
        places = "" if self.options.offload.is_none else f", {self.options.offload}"
        return f"ZeRO-{self.stage} {recomputation_text(self.recompute)}{places}"


@dataclass(frozen=True, slots=True)
class Pasted:
    """Settings for one program, as ``code`` (empty where it has none for them), and what they leave out or change."""

    program: str
    code: str
    notes: tuple[str, ...]


def pasted(config: PlanConfig, settings: Candidate) -> tuple[Pasted, ...]:
    """The settings for zerosim, FSDP2 and DeepSpeed."""
    return (Pasted("zerosim", _engine(config, settings), tuple(_not_in_engine(config))),
            Pasted("FSDP2", _fsdp(config, settings), tuple(_not_in_fsdp(config, settings))),
            Pasted("DeepSpeed", _as_text(ds_config(config, settings)), tuple(_not_in_deepspeed(config, settings))))


# -- zerosim ----------------------------------------------------------------------------------------------------------


def _engine(config: PlanConfig, settings: Candidate) -> str:
    """Lines of a rank program; without those of a model that the layers here do not make."""
    named = "zs.optim." if hasattr(optim, type(config.optimizer).__name__) else ""
    lines = [f"optimizer = {named}{config.optimizer!r}"]
    with suppress(ValueError):  # which the search says itself
        decoder = decoder_of(config.model, config.sequence)
        lines.insert(0, f"model = zs.models.{type(decoder).__name__}(zs.models.{decoder.config!r}, "
                        f"tied={bool(decoder.units[-1].tied_weights)})")
    options = settings.options
    made = "\n".join(fill(line, 76, subsequent_indent="    ", break_long_words=False) for line in lines)
    return (f"{made}\nengine = zs.Engine(\n    rank, model, optimizer, stage={settings.stage}, "
            f"policy=zs.Policy(\"{config.policy.compute}\"),\n    recompute=\"{settings.recompute}\", "
            f"overlap={options.overlap}, prefetch={options.prefetch},\n    bucket_nbytes={options.bucket_nbytes}"
            + ("" if options.offload.is_none else f",\n    offload=\"{options.offload.text}\"")
            + ("" if options.reduction == BY_RANK else f",\n    reduction=\"{options.reduction}\"") + ")\n"
            f"# each step: {counted(settings.micro_batches, 'micro-batch')} of "
            f"{counted(settings.batch, 'sequence')} of {counted(config.sequence, 'token')} on each rank")


def _not_in_engine(config: PlanConfig) -> Iterator[str]:
    if config.policy.compute == "fp16":
        yield ("fp16 trains with a loss scale: give the policy loss_scale=zs.numerics.loss_scale.Dynamic(); the run "
               "that was priced had none.")
    if (of := config.model.transformer) is not None and of.gated:
        yield "base and epsilon are not among a plan's numbers, and change none of them: say the model's own."


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def _fsdp(config: PlanConfig, settings: Candidate) -> str:
    """Lines for a model whose blocks are in the list ``blocks``; none for a stage without sharding."""
    states, policy = STAGES[settings.stage], config.policy
    if not states.optimizer_sharded:
        return ""
    options = [f"reshard_after_forward={states.parameters_sharded}"]
    lines = []
    if policy.compute_dtype != policy.master_dtype:
        lines.append(f"precision = MixedPrecisionPolicy(\n    param_dtype={TORCH[policy.compute]}, "
                     f"reduce_dtype=torch.{policy.reduce_dtype.name})")
        options.append("mp_policy=precision")
    if not settings.options.offload.is_none:
        options.append("offload_policy=CPUOffloadPolicy()")
    arguments = ", ".join(options)
    lines += ["for module in [*blocks, model]:", f"    fully_shard(\n        module, {arguments})"]
    if states.parameters_sharded and settings.options.prefetch > 1:
        ahead = settings.options.prefetch
        lines += ["for i, block in enumerate(blocks):",
                  f"    block.set_modules_to_forward_prefetch(blocks[i + 1:i + {1 + ahead}])",
                  f"    block.set_modules_to_backward_prefetch(blocks[max(0, i - {ahead}):i][::-1])"]
    if settings.micro_batches > 1 and not states.gradients_sharded:
        lines += ["# before the backward of each micro-batch:",
                  f"model.set_requires_gradient_sync(number == {settings.micro_batches})  # numbers from 1 on"]
    return "\n".join(lines)


def _not_in_fsdp(config: PlanConfig, settings: Candidate) -> Iterator[str]:
    states = STAGES[settings.stage]
    if not states.optimizer_sharded:
        yield "fully_shard always shards: stage 0 is DistributedDataParallel there, with buckets of bucket_cap_mb."
        return
    if not states.parameters_sharded:
        yield ("Parameters rest sharded there: they are gathered in forward, unit by unit, and not after the update, "
               "and stay until backward ends.")
    if config.policy.compute_dtype != config.policy.master_dtype:
        yield "Make the model in fp32: its shards are the masters, and no 16-bit copy of them rests."
    if config.policy.compute == "fp16":
        yield "fp16 needs a gradient scaler of one's own."
    if settings.options.bucket_nbytes is not None:
        size = bytes_text(settings.options.bucket_nbytes)
        yield f"A bucket is what one call shards, here a block; {size} cannot be said."
    if states.parameters_sharded and not settings.options.prefetch:
        yield "It gathers one module ahead in backward, which no argument turns off."
    if not settings.options.overlap:
        yield "Reductions always run beside backward."
    yield from _order(settings)
    if settings.options.offload.text not in ("none", HOST):
        yield "CPUOffloadPolicy takes parameters, gradients and the optimizer's state to the host, none of them alone."
    if settings.options.offload.uses_disk:
        yield "Offload to disk: FSDP has none; all of it rests on the host there, if that has the memory."
    yield from _recomputation(settings)


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def ds_config(config: PlanConfig, settings: Candidate) -> dict[str, Any]:
    """The configuration as a dict; of the optimizer and its schedule it says nothing."""
    states, policy = STAGES[settings.stage], config.policy
    lengths = config.job(settings.stage, settings.recompute).padded_lengths
    options = settings.options
    bucket = max(lengths) if options.bucket_nbytes is None else \
        max(1, options.bucket_nbytes // policy.reduce_dtype.itemsize)
    zero: dict[str, Any] = {"stage": settings.stage, "overlap_comm": options.overlap, "contiguous_gradients": True,
                            "reduce_bucket_size": bucket}
    if states.optimizer_sharded and not states.parameters_sharded:
        zero["allgather_bucket_size"] = bucket
    if states.parameters_sharded:
        largest = max(lengths)
        zero |= {"stage3_prefetch_bucket_size": options.prefetch * largest,
                 "stage3_max_live_parameters": (1 + options.prefetch) * largest, "stage3_max_reuse_distance": 0,
                 "stage3_param_persistence_threshold": 0}
    zero |= {name: _deepspeed_device(place) for name, place in _deepspeed_places(settings).items()}
    found: dict[str, Any] = {
        "train_batch_size": config.ranks * settings.batch * settings.micro_batches,
        "train_micro_batch_size_per_gpu": settings.batch, "gradient_accumulation_steps": settings.micro_batches}
    if policy.compute in ("bf16", "fp16"):
        found[policy.compute] = {"enabled": True}
    return found | {"zero_optimization": zero}


def _deepspeed_places(settings: Candidate) -> dict[str, str]:
    """The places of DeepSpeed's two sections of offload: only at stage 3 do parameters leave, and has it a disk."""
    states, asked = STAGES[settings.stage], settings.options.offload
    places = {"offload_optimizer": asked.optimizer if states.optimizer_sharded else DEVICE,
              "offload_param": asked.parameters if states.parameters_sharded else DEVICE}
    return {name: place if states.parameters_sharded else HOST for name, place in places.items() if place != DEVICE}


def _deepspeed_device(place: str) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True} if place == DISK else {
        "device": "cpu", "pin_memory": True}


def _as_text(found: dict[str, Any]) -> str:
    """JSON, a line for each field, without lines of brackets alone."""
    return re.sub(r"\s*\n\s*}", "}", json.dumps(found, indent=1)).replace("{\n ", "{", 1)


def _not_in_deepspeed(config: PlanConfig, settings: Candidate) -> Iterator[str]:
    states = STAGES[settings.stage]
    if settings.options.bucket_nbytes is None:
        yield ("A bucket there is a number of elements, not a unit: this one holds the largest unit, so several small "
               "units may share it.")
    if states.parameters_sharded:
        yield ("Parameters are gathered module by module. How far ahead is a number of elements: here the largest "
               "unit's, times the units ahead.")
    if config.policy.compute == "fp16":
        yield "It scales the loss dynamically."
    yield from _order(settings)
    yield from _offload_in_deepspeed(settings)
    yield from _recomputation(settings)


def _offload_in_deepspeed(settings: Candidate) -> Iterator[str]:
    """Notes on the offload that DeepSpeed has elsewhere."""
    asked, said = settings.options.offload, _deepspeed_places(settings)
    if asked.is_none:
        return
    if not said:
        yield "It offloads from stage 1 on: at stage 0 all state stays on the device."
        return
    if asked.gradients != HOST:
        yield "Gradients have no place of their own there: they go to the host with the optimizer's state."
    if asked.parameters != DEVICE and "offload_param" not in said:
        yield "offload_param is of stage 3 there: parameters stay on the device."
    if asked.uses_disk:
        yield (f"nvme_path is a folder of one's own on the disk, in place of {NVME_PATH}." if DISK in said.values() else
               "nvme is of stage 3 there: what rests on disk here is on the host.")


def _order(settings: Candidate) -> Iterator[str]:
    if settings.options.by_micro_batch:
        yield "Gradients are added by rank there, so bits depend on the number of ranks; no setting changes the order."


def _recomputation(settings: Candidate) -> Iterator[str]:
    """Attention and recomputation stand in the model's own code, in both programs."""
    asked = Recompute.parse(settings.recompute)
    if asked.inside in (SELECTIVE, TILED):
        yield ("Attention is in the model's code: a fused attention, as scaled_dot_product_attention, keeps no "
               "probabilities either.")
    if asked.units_per_segment is not None or asked.inside == SUB_BLOCK:
        yield (f"Recomputation ({settings.recompute}) is in the model's code: torch.utils.checkpoint.checkpoint around "
               "what is run again.")
