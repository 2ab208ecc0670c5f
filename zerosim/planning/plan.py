"""A plan from names, as one writes them in a notebook or types them in a shell: `plan`, and `plan_config` alone."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from zerosim import optim
from zerosim.models.units import ALL, TILED, Recompute
from zerosim.numerics.checks import checked_count, unknown_name
from zerosim.numerics.formats import format_of
from zerosim.numerics.places import Offload
from zerosim.numerics.policy import BY_RANK, Policy
from zerosim.numerics.quantization import ZeroPlusPlus
from zerosim.numerics.units import count_of, counted, nbytes_of
from zerosim.optim.base import Optimizer
from zerosim.options import StepOptions
from zerosim.planning.closed_forms import STAGES
from zerosim.planning.configuration import MARGIN, MOST_RANKS, NODE, Plan, PlanConfig
from zerosim.planning.conventions import ADAM, Convention
from zerosim.planning.finetuning import ADAM_8BIT, EightBit, frozen
from zerosim.planning.finetuning import lora as with_adapters
from zerosim.planning.hardware import DISK_LINK, presets, read
from zerosim.planning.plan_row import ZEROSIM
from zerosim.planning.runtimes import RECOMPUTED
from zerosim.planning.shapes import ModelShape, model_of_config, model_of_parameters, model_shape
from zerosim.ranks.mesh import Mesh

EIGHT_BIT = "adamw8bit"  # the optimizer that plans alone know
ATTENTIONS = FUSED, UNFUSED = ("fused", "unfused")
EVERY_POLICY = ("tiled", "block+tiled", "none", "selective", "sub_block", "block")
# Runtimes whose programs reduce gradients in fp32 and add them up so, where 16 bits are computed in.
WIDE_GRADIENTS = ("fsdp2", "megatron")
Several = str | int | Iterable[Any]


def plan(model: str | ModelShape | None = None, **options: Any) -> Plan:
    """A row of bytes and seconds for each stage and recomputation policy; the options are those of `plan_config`.

    >>> print(plan("llama-2-7b", ranks=8, device="h100-80", recompute="none", batch=4, sequence=2048,
    ...            runtime="zerosim").verdict)
    ZeRO-3 is the fastest that fits with a margin: 767.6 ms a step, 36.61 GB to spare; ZeRO-0 misses by 56.87 GB.
    """
    return plan_config(model, **options).plan()


def plan_config(model: str | ModelShape | None = None, *, params: int | str | None = None,
                largest_layer: int | str | None = None, ranks: int = 8, device: str = "h100-80",
                link: str | None = None, nodes: int | None = None, between: str | None = None, stage: Several = "all",
                recompute: Several = "usual", attention: str = FUSED,
                batch: int = 1, sequence: int | None = None, micro_batches: int | None = None,
                global_batch: int | str | None = None, compute: str | Policy = "bf16",
                optimizer: str | Optimizer | EightBit = ADAM,
                runtime: str = "fsdp2", compiled: bool = False, loss_chunks: int = 1,
                lora: int | None = None, weights: str | None = None, train_only: str | Iterable[str] | None = None,
                convention: str | Convention | Policy | None = None,
                utilization: float | None = None, margin: float = MARGIN, tokens: int | str | None = None,
                price: float | None = None, overlap: bool = True, prefetch: int = 1,
                offload: str | Offload | None = None, host_link: str | None = None,
                disk_link: str | None = None, host_capacity_nbytes: int | str | None = None,
                disk_capacity_nbytes: int | str | None = None, hardware: str | Path | None = None,
                overheads: dict[str, int] | None = None,
                mesh: Mesh | Sequence[int] | str | None = None,
                zeropp: ZeroPlusPlus | str | None = None, reduction: str = BY_RANK) -> PlanConfig:
    """A checked configuration of a preset's name, a config.json, a ModelShape, or a number of parameters, ``params``,
    of which zerosim's engine has the states alone, and another runtime a decoder of the usual proportions.

    ``runtime`` says whose step it is: that of PyTorch's "fsdp2" (DDP at stage 0, ZeroRedundancyOptimizer at 1),
    "deepspeed", "megatron" (its distributed optimizer), or "zerosim", the engine here. Of all but the last ``compiled``
    says that kernels are fused by torch.compile, and ``loss_chunks`` in how many parts logits and their loss are made.
    ``lora`` is the rank of adapters beside frozen linear layers, and ``weights``, "nf4" or "int8", how these rest;
    ``train_only`` names the units or layers that are trained without adapters, as "block3[01],head", all else frozen.
    ``stage`` and ``recompute`` are one, several, or "all"; "usual" is nothing, blocks, and selectively in fsdp2 and
    deepspeed without experts. ``attention`` "fused", as FlashAttention, never holds the probabilities; "unfused" holds
    them, which zerosim's engine alone does, and is usually selective too. ``link`` None is the device's own.
    ``batch`` are sequences of a micro-batch of one rank, of ``sequence`` tokens each, None the model's longest and no
    more than 4,096, and ``global_batch`` those of a step on all ranks, in place of ``micro_batches``. ``tokens`` are
    those of a whole training, as "300B", and ``price`` is that of a device and hour. ``margin`` is the share of the
    device that is to stay free.
    ``compute`` is a format, or a Policy for all formats of a step; ``optimizer`` one of zs.optim's, or the
    name of one, or "adamw8bit" of PyTorch's and DeepSpeed's programs.
    ``convention``, of zerosim's engine alone, counts its states as a text or a tool does; None as it holds them.
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
    policy = compute if isinstance(compute, Policy) else _policy(compute, runtime)
    options, rows = StepOptions.of(ranks, overlap=overlap, prefetch=prefetch, offload=offload, mesh=mesh, zeropp=zeropp,
                                   reduction=reduction), _stages(stage)
    places = options.offload
    if options.mesh and nodes not in (None, 1, options.nodes):
        raise ValueError(f"mesh={str(options.mesh)!r} has {options.nodes} nodes, and nodes={nodes} were asked for; "
                         "leave nodes out")
    to_host = known.host_link(device, host_link) if host_link is not None or not places.is_none else None
    to_disk = known.link(disk_link or DISK_LINK) if disk_link is not None or places.uses_disk else None
    network = known.network(ranks, known.device_link(device, link).name, options.nodes if options.mesh else
                            1 if nodes is None else nodes, between, device)
    if nodes is None and options.mesh is None and NODE < ranks <= MOST_RANKS and runtime != ZEROSIM:
        raise ValueError(f"{ranks} ranks are more than the {NODE} of a node, as boards are sold; say over how many "
                         f"nodes, as nodes={-(-ranks // NODE)}, or nodes=1 where one link joins them all")
    if global_batch is not None:
        micro_batches = _shared(global_batch, ranks, batch, micro_batches)
    shape = _finetuned(_model(model, params, largest_layer, runtime), lora, weights, train_only)
    found = PlanConfig(
        model=shape, ranks=ranks, device=known.device(device), network=network, policy=policy, stages=rows,
        recompute=_policies(recompute, attention, runtime, shape), batch=batch,
        sequence=checked_count("sequence", sequence, 1) if sequence is not None else 0,
        micro_batches=1 if micro_batches is None else micro_batches, optimizer=_optimizer(optimizer), runtime=runtime,
        compiled=compiled, loss_chunks=loss_chunks,
        global_batch=None if global_batch is None else ranks * batch * (micro_batches or 1),
        convention=policy if convention == ZEROSIM else convention, margin=margin, price=price,
        tokens=None if tokens is None else count_of(tokens, "tokens"),
        utilization=utilization, options=options, host_link=to_host, disk_link=to_disk,
        host_capacity_nbytes=_nbytes(host_capacity_nbytes, "host_capacity_nbytes"),
        disk_capacity_nbytes=_nbytes(disk_capacity_nbytes, "disk_capacity_nbytes"), overheads=overheads)
    usual = replace(found, options=replace(options, overlap=True, prefetch=1))  # of others no stage is left out unsaid
    had = tuple(stage for stage in rows if usual.lacking(STAGES[stage]) is None)
    return replace(found, stages=had) if had and len(rows) == len(STAGES) else found  # all are all that there are


plan.__signature__ = signature(plan_config).replace(return_annotation=Plan)  # type: ignore[attr-defined]  # for a notebook


def _finetuned(model: ModelShape, lora: int | None, weights: str | None, train_only: Any) -> ModelShape:
    """The model with adapters beside frozen weights, with quantized ones, or with some frozen, as was asked for."""
    if lora is None and weights is None and train_only is None:
        return model
    if train_only is not None:
        if lora is not None or weights is not None:
            raise ValueError(f"train_only={train_only!r} is without adapters and quantized weights, and lora= or "
                             "weights= were asked for too; leave it or them out")
        return frozen(model, but=[*(train_only.split(",") if isinstance(train_only, str) else train_only)])
    if lora is None:
        raise ValueError(f"weights={weights!r} cannot be trained, and nothing else would be; say the rank of adapters "
                         "beside them, as lora=16")
    return with_adapters(model, checked_count("lora", lora, 1), stored=weights or "")


def _optimizer(asked: Any) -> Any:
    """The optimizer of a name, in any case, with a rate for which no plan asks; what is no name, is looked at by the
    configuration."""
    if not isinstance(asked, str):
        return asked
    if asked.lower() == EIGHT_BIT:
        return ADAM_8BIT
    names = {name.lower(): name for name in optim.__all__}
    found: Any = getattr(optim, names.get(asked.lower(), ""), None)
    if not _is_optimizer(found):
        known = [name for name in names if _is_optimizer(getattr(optim, names[name]))]
        raise unknown_name(f"no optimizer is called {asked!r}", asked.lower(), sorted([*known, EIGHT_BIT]))
    return found(lr=1e-3)


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer


def _policy(compute: str, runtime: str) -> Policy:
    """The formats of a step of a runtime's programs that computes in this one."""
    format = format_of(compute).name
    if format.startswith("fp8"):
        raise ValueError(f"compute={compute!r}: weights and gradients do not rest in 8 bits; plan in bf16 or fp16")
    return Policy(format, reduce="fp32", accumulate="fp32") if runtime in WIDE_GRADIENTS else Policy(format)


def _nbytes(asked: int | str | None, what: str) -> int | None:
    return None if asked is None else nbytes_of(asked, what)


TYPICAL_VOCABULARY = 32_000  # Llama 2's
COUNT = re.compile(r"[\d.,_]+(?:[kmbt]|e\d+)?", re.IGNORECASE)  # a model that is a number of parameters, as 7B


def _model(model: str | ModelShape | None, params: int | str | None,
           largest_layer: int | str | None, runtime: str) -> ModelShape:
    if isinstance(model, str) and params is None and COUNT.fullmatch(model.strip()):
        model, params = None, model
    if (model is None) == (params is None):
        raise ValueError("a plan is of a model or of a number of parameters: name one of the two, as model='gpt2-xl' "
                         "or params='7.5B'")
    if params is not None:
        count = count_of(params, "params")
        largest = None if largest_layer is None else count_of(largest_layer, "largest_layer")
        return typical_decoder(count) if runtime != ZEROSIM and largest is None else model_of_parameters(count, largest)
    if largest_layer is not None:
        raise ValueError("largest_layer goes with a number of parameters; a model's shape has its own layers")
    return model if isinstance(model, ModelShape) else model_shape(_path(model, "model"))


def typical_decoder(parameters: int) -> ModelShape:
    """A Llama of about so many parameters: n blocks of 128n channels in heads of 128, as GPT-3's largest has them.

    >>> found = typical_decoder(175 * 10**9)
    >>> found.transformer.blocks, found.transformer.channels, f"{found.parameters / 175e9:.3f}"
    (96, 12288, '1.000')

    The gated feed-forward network takes what is left of the parameters. Raises ValueError where that is less than the
    channels, since the vocabulary is too large a part.
    """
    blocks = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    channels = 128 * blocks
    inside = (parameters - 2 * TYPICAL_VOCABULARY * channels - 4 * blocks * channels**2) // (3 * blocks * channels)
    if inside < channels:
        raise ValueError(f"a decoder of {parameters:,} parameters has no usual shape; name a model, or take "
                         "runtime='zerosim' for states and traffic alone")
    return model_of_config({"model_type": "llama", "hidden_size": channels, "num_hidden_layers": blocks,
                            "num_attention_heads": blocks, "intermediate_size": inside, "max_position_embeddings": 4096,
                            "vocab_size": TYPICAL_VOCABULARY, "tie_word_embeddings": False},
                           name=f"a decoder of {blocks} blocks and {channels:,} channels")


def _path(asked: Any, what: str) -> str | Path:
    if isinstance(asked, str | Path):
        return asked
    raise ValueError(f"{what}={asked!r} must be a name or the path of a file, as a text")


def _stages(asked: Several) -> tuple[int, ...]:
    if isinstance(asked, str) and asked == "all":
        return tuple(STAGES)
    several = asked.split(",") if isinstance(asked, str) else [asked] if isinstance(asked, int) else asked
    try:
        return tuple(dict.fromkeys(int(one) if isinstance(one, str) else operator.index(one) for one in several))
    except (TypeError, ValueError):
        raise ValueError(f"stage={asked!r} must be all, or some of {', '.join(map(str, STAGES))}, as in 2,3") from None


def _shared(global_batch: int | str, ranks: int, batch: int, micro_batches: int | None) -> int:
    """The micro-batches of each rank in a step of so many sequences; ValueError where they do not share it equally."""
    sequences = count_of(global_batch, "global_batch")
    each = checked_count("ranks", ranks, 1) * checked_count("batch", batch, 1)
    if micro_batches is not None:
        raise ValueError(f"global_batch={sequences} says how many micro-batches there are, and micro_batches="
                         f"{micro_batches} was asked for too; leave one of them out")
    if sequences % each:
        near = sorted({max(1, sequences // each) * each, (sequences // each + 1) * each})
        raise ValueError(f"global_batch={sequences} is no multiple of {each} sequences, a micro-batch of {batch} on "
                         f"each of {counted(ranks, 'rank')}; take {' or '.join(map(str, near))}, or other ranks or "
                         "another batch")
    return sequences // each


def _policies(asked: Several, attention: str, runtime: str, model: ModelShape) -> tuple[str, ...]:
    """The policies of PyTorch programs as they are; the engine's with fused attention tiled, but for those that say
    what a block keeps."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} must be {FUSED}, as FlashAttention is, or {UNFUSED}")
    engine = runtime == ZEROSIM
    if attention == UNFUSED and not engine:
        raise ValueError(f"attention={attention!r} is of zerosim's own engine, and this is a plan of {runtime}, whose "
                         "attention is fused; leave it out, or take runtime='zerosim'")
    if isinstance(asked, str) and asked == "all":
        return EVERY_POLICY if engine else RECOMPUTED
    if isinstance(asked, str) and asked == "usual":
        experts = model.transformer is not None and model.transformer.experts is not None
        selective = attention == UNFUSED or (runtime in ("fsdp2", "deepspeed") and not experts)
        asked = RECOMPUTED if selective else RECOMPUTED[::2]
    try:
        texts = asked.split(",") if isinstance(asked, str) else [str(text) for text in asked]  # type: ignore[union-attr]
    except TypeError:
        raise ValueError(f"recompute={asked!r} must be usual, all, or some policies, as in block,tiled") from None
    if not engine:
        return tuple(dict.fromkeys(text.strip() for text in texts))
    policies = [Recompute.parse(text) for text in texts]
    fused = [replace(one, inside=TILED) if attention == FUSED and one.inside == ALL else one for one in policies]
    return tuple(dict.fromkeys(map(str, fused)))
