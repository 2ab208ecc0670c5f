"""Settings of a planned step as one pastes them into its program, and what that program has no setting for.

Sources, as of 2026: PyTorch 2.13, documentation and source of ``fully_shard``, ``FSDPModule``,
``DistributedDataParallel`` and ``ZeroRedundancyOptimizer``; DeepSpeed 0.19, documentation "DeepSpeed Configuration
JSON" and ``deepspeed/runtime/zero/config.py``, whose sizes of buckets are numbers of elements; Megatron-LM,
``megatron/training/arguments.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from zerosim import optim
from zerosim.course.measured import decoder_of
from zerosim.numerics.places import DEVICE, DISK
from zerosim.numerics.policy import BY_RANK, Policy
from zerosim.numerics.units import counted
from zerosim.planning import runtimes
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.configuration import PlanConfig
from zerosim.planning.conventions import is_cut_anywhere
from zerosim.planning.finetuning import EightBit
from zerosim.planning.plan_row import PlanRow, fused_policy

NVME_PATH = "/local_nvme"
TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


@dataclass(frozen=True, slots=True)
class Pasted:
    """Settings for one program, as ``code``, and what else is to do or to know."""

    program: str
    code: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A runtime's name, the places that its offload has, in the order in which they are tried, and its settings."""

    name: str
    offloads: tuple[str, ...]
    code: Callable[[PlanConfig, PlanRow], str]
    notes: Callable[[PlanConfig, PlanRow], Iterator[str]]


def pasted(config: PlanConfig, row: PlanRow) -> Pasted:
    """The settings of a row for the program that the plan is of."""
    program = PROGRAMS[config.runtime]
    return Pasted(program.name, program.code(config, row), tuple(program.notes(config, row)))


def unsaid(config: PlanConfig, stage: int, recompute: str) -> str | None:
    """The reason why the program has no settings for a stage and a policy under the configuration's options; None where
    it has."""
    states, options, runtime = STAGES[stage], config.options, config.runtime
    if (reason := config.lacking(states)) is not None:
        return reason
    if config.is_engine and states.optimizer_sharded and not is_cut_anywhere(config.optimizer):
        return (f"{config.optimizer_name} needs whole tensors, and a plan's units are cut anywhere: take "
                "stage 0, or the engine's layout='whole_matrices', which no plan counts")
    if runtime == runtimes.DEEPSPEED and options.mesh:
        return "DeepSpeed 0.19 no longer has MiCS, its hybrid sharding; leave the mesh out, or take the runtime fsdp2"
    if runtime == runtimes.MEGATRON_CORE and recompute == "selective":
        return ("Megatron's selective recomputation is of attention's core, which a fused one makes again anyway; "
                "take recompute='none,block'")
    if runtime == runtimes.MEGATRON_CORE and not options.offload.is_none:
        return "no flags of Megatron's offload are written here; take offload='none'"
    if runtime == runtimes.MEGATRON_CORE and config.loss_chunks > 1:
        return "no flag of Megatron's makes the loss in parts; take loss_chunks=1"
    return None


# -- zerosim ----------------------------------------------------------------------------------------------------------


def _engine(config: PlanConfig, row: PlanRow) -> str:
    """Lines of a rank program; without those of a model that the layers here do not make."""
    named = "zs.optim." if hasattr(optim, config.optimizer_name) else ""
    lines = [f"optimizer = {named}{config.optimizer!r}"]
    with suppress(ValueError):  # which the notes say
        decoder = decoder_of(config.model, config.sequence)
        lines.insert(0, f"model = zs.models.{type(decoder).__name__}(zs.models.{decoder.config!r}, "
                        f"tied={bool(decoder.units[-1].tied_weights)})")
    options, policy = config.options, config.policy
    formats = f"Policy(\"{policy.compute}\")" if policy == Policy(policy.compute) else repr(policy)
    made = "\n".join(fill(line, 76, subsequent_indent="    ", break_long_words=False) for line in lines)
    return (f"{made}\nengine = zs.Engine(\n    rank, model, optimizer, stage={row.stage}, policy=zs.{formats},\n"
            f"    recompute=\"{row.recompute}\", overlap={options.overlap}, prefetch={options.prefetch}"
            + ("" if options.offload.is_none else f",\n    offload=\"{options.offload.text}\"")
            + (f",\n    mesh=\"{options.mesh}\"" if options.mesh else "")
            + ("" if options.reduction == BY_RANK else f",\n    reduction=\"{options.reduction}\"") + ")\n"
            f"# each step: {counted(config.micro_batches, 'micro-batch')} of "
            f"{counted(config.batch, 'sequence')} of {counted(config.sequence, 'token')} on each rank")


def _notes_of_engine(config: PlanConfig, row: PlanRow) -> Iterator[str]:
    named, _ = fused_policy(row.recompute)
    if named != row.recompute:
        yield (f"recompute=\"{row.recompute}\" is the table's {named} with fused attention, which keeps no "
               "probabilities.")
    try:
        decoder_of(config.model, config.sequence)
    except ValueError:
        yield (f"zerosim's layers do not make {config.model.name}: the plan is of the engine with such a model, which "
               "is to be written.")
    if config.policy.compute == "fp16":
        yield "fp16 trains with a loss scale: give the policy loss_scale=zs.numerics.loss_scale.Dynamic()."
    if (of := config.model.transformer) is not None and of.gated:
        yield "base and epsilon are not among a plan's numbers, and change none of them: say the model's own."


# -- PyTorch ----------------------------------------------------------------------------------------------------------


def _fsdp(config: PlanConfig, row: PlanRow) -> str:
    """Lines for a model whose blocks are in the list ``blocks``: DDP's for stages 0 and 1, fully_shard's for others."""
    states, policy, options = STAGES[row.stage], config.policy, config.options
    narrow = policy.compute_dtype != policy.master_dtype
    if not states.gradients_sharded:
        lines = ["model = DistributedDataParallel(model, gradient_as_bucket_view=True)"]
        if states.optimizer_sharded:
            lines += ["optimizer = ZeroRedundancyOptimizer(\n    model.parameters(), "
                      f"optimizer_class={config.optimizer_name})"]
        if narrow:
            lines += [f"# forward and loss: with torch.autocast(\"cuda\", dtype={TORCH[policy.compute]}):"]
        if config.micro_batches > 1:
            lines += [f"# the first {config.micro_batches - 1} of {config.micro_batches} micro-batches: with "
                      "model.no_sync():"]
        return "\n".join(lines)
    lines, arguments = [], ["module"] + ["reshard_after_forward=False"] * (not states.parameters_sharded)
    if mesh := options.mesh:
        lines += [f"mesh = init_device_mesh(\n    \"cuda\", ({mesh.nodes}, {mesh.ranks_per_node}), "
                  "mesh_dim_names=(\"replicate\", \"shard\"))"]
        arguments += ["mesh=mesh"]
    if narrow:
        lines += [f"precision = MixedPrecisionPolicy(\n    param_dtype={TORCH[policy.compute]}, "
                  f"reduce_dtype=torch.{policy.reduce_dtype.name})"]
        arguments += ["mp_policy=precision"]
    arguments += ["offload_policy=CPUOffloadPolicy()"] * (not options.offload.is_none)
    lines += ["for module in [*blocks, model]:",
              fill(f"fully_shard({', '.join(arguments)})", 76, initial_indent="    ", subsequent_indent="        ")]
    if isinstance(config.optimizer, EightBit):
        lines += [f"optimizer = torchao.optim.{config.optimizer_name}(model.parameters())"]
    if states.parameters_sharded and (ahead := options.prefetch) > 1:
        lines += ["for i, block in enumerate(blocks):",
                  f"    block.set_modules_to_forward_prefetch(blocks[i + 1:i + {1 + ahead}])",
                  f"    block.set_modules_to_backward_prefetch(blocks[max(0, i - {ahead}):i][::-1])"]
    return "\n".join(lines)


def _notes_of_fsdp(config: PlanConfig, row: PlanRow) -> Iterator[str]:
    yield (f"Each step: {counted(config.micro_batches, 'micro-batch')} of {counted(config.batch, 'sequence')} on each "
           "rank.")
    if config.options.mesh and config.micro_batches > 1:
        yield "Nodes add up once a step: model.set_requires_all_reduce(False) before all micro-batches but the last."
    if STAGES[row.stage].parameters_sharded:
        yield "What is in no block is gathered by the call on the model, and stays so to backward's end, as by default."
    if config.policy.compute_dtype != config.policy.master_dtype:
        yield "Make the model in fp32: what rests are the masters."
    if config.policy.compute == "fp16":
        yield "fp16 needs a gradient scaler of one's own."
    yield from _of_the_model(config, row)


def _of_the_model(config: PlanConfig, row: PlanRow) -> Iterator[str]:
    """Notes of the model's own code, in PyTorch's and DeepSpeed's programs: attention, recomputation and more."""
    if config.model.has_frozen:
        yield "Weights are frozen, and adapters made, as by peft's get_peft_model, before the model is wrapped."
    if config.compiled:
        yield "Each block is compiled first: block.compile()."
    if config.loss_chunks > 1:
        yield (f"Logits and their loss are made in {config.loss_chunks} parts, with a loss of one's own, or as Liger "
               "Kernel's LigerFusedLinearCrossEntropyLoss makes them.")
    yield "Attention is a fused one, as scaled_dot_product_attention."
    if row.recompute == "block":
        yield ("Recomputation is in the model's code: torch.utils.checkpoint.checkpoint around each block; of Hugging "
               "Face model.gradient_checkpointing_enable().")
    elif row.recompute == "selective":
        yield ("Recomputation is in the model's code: torch.utils.checkpoint.checkpoint around each block with "
               "create_selective_checkpoint_contexts, and the operators that torchtitan saves.")


# -- DeepSpeed --------------------------------------------------------------------------------------------------------


def ds_config(config: PlanConfig, stage: int) -> dict[str, Any]:
    """The configuration as a dict; of the optimizer and its schedule it says nothing."""
    states, policy, options = STAGES[stage], config.policy, config.options
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": options.overlap, "contiguous_gradients": True,
                            "reduce_bucket_size": runtimes.REDUCE_BUCKET}
    if states.parameters_sharded:
        zero |= {"stage3_prefetch_bucket_size": runtimes.PREFETCH_BUCKET * options.prefetch,
                 "stage3_max_live_parameters": runtimes.MOST_LIVE, "sub_group_size": runtimes.SUB_GROUP,
                 "stage3_param_persistence_threshold": runtimes.PERSISTENCE_THRESHOLD}
    zero |= {name: {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True} if place == DISK else
             {"device": "cpu", "pin_memory": True} for name, place in (
                 ("offload_optimizer", options.offload.optimizer), ("offload_param", options.offload.parameters))
             if place != DEVICE}
    found: dict[str, Any] = {
        "train_batch_size": config.ranks * config.batch * config.micro_batches,
        "train_micro_batch_size_per_gpu": config.batch, "gradient_accumulation_steps": config.micro_batches}
    if policy.compute in ("bf16", "fp16"):
        found[policy.compute] = {"enabled": True}
    if policy.reduce:
        found["communication_data_type"] = policy.reduce
    if policy.accumulate:
        found["data_types"] = {"grad_accum_dtype": policy.accumulate}
    return found | {"zero_optimization": zero}


def _ds_config_text(config: PlanConfig, row: PlanRow) -> str:
    """JSON, a line for each field, without lines of brackets alone."""
    return re.sub(r"\s*\n\s*}", "}", json.dumps(ds_config(config, row.stage), indent=1)).replace("{\n ", "{", 1)


def _notes_of_deepspeed(config: PlanConfig, row: PlanRow) -> Iterator[str]:
    yield "Sizes are numbers of elements, DeepSpeed's defaults, with which the bytes are counted."
    if config.policy.compute == "fp16":
        yield "It scales the loss dynamically."
    if config.options.offload.uses_disk:
        yield f"nvme_path is a folder of one's own on the disk, in place of {NVME_PATH}."
    yield from _of_the_model(config, row)


# -- Megatron ---------------------------------------------------------------------------------------------------------


def _megatron(config: PlanConfig, row: PlanRow) -> str:
    """The flags of data parallelism, of formats, of the batch and of recomputation."""
    overlapped, sharded = config.options.overlap, STAGES[row.stage].optimizer_sharded
    flags = [f"--micro-batch-size {config.batch}",
             f"--global-batch-size {config.ranks * config.batch * config.micro_batches}",
             f"--seq-length {config.sequence}",
             *[f"--{config.policy.compute}"] * (config.policy.compute != "fp32"),
             *["--use-distributed-optimizer"] * sharded, *["--overlap-grad-reduce"] * overlapped,
             *["--overlap-param-gather"] * (overlapped and sharded),
             *[f"--num-distributed-optimizer-instances {config.options.nodes}"] * (config.options.nodes > 1),
             *["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"] * (
                 row.recompute == "block")]
    return fill(" ".join(flags), 76, break_long_words=False, break_on_hyphens=False)


def _notes_of_megatron(config: PlanConfig, row: PlanRow) -> Iterator[str]:
    yield "These are the flags of data parallelism: tensor, pipeline and context parallelism stay 1."


PROGRAMS = {
    "fsdp2": Program("PyTorch", ("none", "host"), _fsdp, _notes_of_fsdp),
    "deepspeed": Program("DeepSpeed", ("none", "optimizer=host", "optimizer=host+parameters=host",
                                       "optimizer=disk+parameters=disk"),
                         _ds_config_text, _notes_of_deepspeed),
    "megatron": Program("Megatron", ("none",), _megatron, _notes_of_megatron),
    "zerosim": Program("zerosim", ("none", "optimizer=host", "optimizer=host+gradients=host", "host",
                                   "optimizer=disk+gradients=host+parameters=host", "disk"),
                       _engine, _notes_of_engine)}
