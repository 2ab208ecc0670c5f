"""What the ranks of a job do: the same training by PyTorch's own DDP, FSDP2, HSDP, ZeRO-1, and by DeepSpeed."""

import os
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

NAMES = {"0.weight": "layer0.weight", "0.bias": "layer0.bias", "2.weight": "layer1.weight", "2.bias": "layer1.bias"}
OPTIMIZERS = {"AdamW": {"lr": 0.01, "weight_decay": 0.01}, "SGD": {"lr": 0.5},
              "AdamW of a large epsilon": {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-3}}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Weights = dict[str, np.ndarray]


def made(folder: str, fields: dict[str, Any]) -> None:
    """Saves a model of this configuration, with weights of a seed, by `transformers`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(folder)


def model_of(weights: Weights, folder: str | None = None) -> nn.Module:
    """Two linear layers and a ReLU, torch's weights are (outputs, inputs); or the model of a folder."""
    if folder is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    (inputs, hidden), (_, outputs) = weights["layer0.weight"].shape, weights["layer1.weight"].shape
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    model.load_state_dict({there: torch.from_numpy(weights[here].T.copy()) for there, here in NAMES.items()})
    return model


def loss_of(model: Any, x: np.ndarray, target: np.ndarray) -> torch.Tensor:
    """The mean over the batch of half the squared error, in the model's format up to its outputs; of tokens, their mean
    cross-entropy where there is a target."""
    if x.dtype == np.int64:
        return nn.functional.cross_entropy(model(torch.from_numpy(x)).logits.flatten(0, 1),
                                           torch.from_numpy(target).flatten(), ignore_index=-1)
    y = model(torch.from_numpy(x).to(next(model.parameters()).dtype))
    y = y if y.dtype == torch.float64 else y.float()
    return 0.5 * ((y - torch.from_numpy(target)) ** 2).sum() / len(x)


def arrays(module: Any) -> Weights:
    """Whole weights, those of the MLP by zerosim's names; those of 16 bits as fp32."""
    whole = {name.removeprefix("module."): p.full_tensor() if hasattr(p, "full_tensor") else p
             for name, p in module.named_parameters()}
    found = {name: (p if p.dtype == torch.float64 else p.float()).detach().numpy().copy() for name, p in whole.items()}
    return {NAMES[name]: w.T for name, w in found.items()} if found.keys() == NAMES.keys() else found


def by_torch(case: dict[str, Any], weights: Weights, data: list) -> dict[str, Any]:
    """DDP, ZeroRedundancyOptimizer, FSDP2 (a mesh of two dimensions is HSDP), or all ranks' data in float64."""
    model, way, options = model_of(weights, case.get("made")), case["way"], dict(case.get("options", {}))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if way == "float64":
        model.double()
        mine = [[pair for of_rank in step for pair in of_rank] for step in data]
    else:
        mine = [step[rank] for step in data]
    if way in ("DDP", "ZeroRedundancyOptimizer"):
        model = DistributedDataParallel(model)
    elif way == "FSDP2":
        mesh = tuple(options.pop("mesh", (ranks,)))
        formats = {name: FORMATS[value] for name, value in options.pop("mp_policy", {}).items()}
        options |= {"mp_policy": MixedPrecisionPolicy(**formats),
                    "mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh):])}
        if options.pop("offload_policy", None):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        layers = [part for part in model.modules() if isinstance(part, nn.ModuleList)]  # of `transformers`
        for layer in layers[0] if layers else model[:1]:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    kind, numbers = getattr(torch.optim, case["optimizer"].split()[0]), OPTIMIZERS[case["optimizer"]]
    optimizer = (ZeroRedundancyOptimizer(model.parameters(), kind, **numbers)
                 if way == "ZeroRedundancyOptimizer" else kind(model.parameters(), **numbers))
    for step in mine:
        optimizer.zero_grad()
        for number, (x, target) in enumerate(step):
            last = number == len(step) - 1
            waits = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
            with waits:
                if case.get("all_reduce") == "last":  # of replicas, where there are some
                    model.set_requires_all_reduce(last)
                (loss_of(model, x, target) / len(step)).backward()
        if case.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
    return {"weights": arrays(model)}


def by_deepspeed(case: dict[str, Any], weights: Weights, data: list) -> dict[str, Any]:
    """DeepSpeed under a configuration; ``lift_fp16`` takes away its refusal of fp16 on a CPU, and nothing else."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    os.environ["LOCAL_SIZE"] = str(case["per_node"])  # which tells DeepSpeed how many ranks are of a node
    if case["lift_fp16"]:
        get_accelerator().is_fp16_supported = lambda: True
    model = model_of(weights, case.get("made"))
    kind = getattr(torch.optim, case["optimizer"].split()[0])
    optimizer = kind(model.parameters(), **OPTIMIZERS[case["optimizer"]])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case["config"])
    skipped, scales = [], []
    for step in (step[dist.get_rank()] for step in data):
        before = engine.skipped_steps
        for x, target in step:
            engine.backward(loss_of(engine, x, target))
            engine.step()
        skipped.append(engine.skipped_steps > before)
        scales.append(float(getattr(engine.optimizer, "cur_scale", getattr(engine.optimizer, "loss_scale", 1.0))))
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=sharded):
        return {"weights": arrays(engine.module), "skipped": skipped, "scales": scales}


def trained(cases: list[dict[str, Any]], weights: Weights, data: list) -> list[dict[str, Any]]:
    """One result per case: weights and what else is known, or why it does not run here: ``refused``."""
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        try:
            run = by_deepspeed if case["way"] == "DeepSpeed" else by_torch
            found.append(run(case, weights, data[:case["steps"]]))
        except Exception as error:
            found.append({"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        dist.barrier()
    return found


def resaved(weights: Weights, folder: str, saves: bool) -> Weights:
    """Whole parameters that torch.distributed.checkpoint saves from FSDP2's shards, or loads into those of zeros."""
    import torch.distributed.checkpoint as dcp

    model = model_of(weights if saves else {name: np.zeros_like(w) for name, w in weights.items()})
    fully_shard(model[0])
    fully_shard(model)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder) if saves else dcp.load(state, checkpoint_id=folder)
    return arrays(model)


def reduced(vectors: np.ndarray, collective: str, dtype: str) -> np.ndarray:
    """(n,) each rank's sum of (N, n) by gloo: of an all-reduce, or its part of a reduce-scatter."""
    mine = torch.from_numpy(vectors[dist.get_rank()]).to(FORMATS[dtype])
    if collective == "all_reduce":
        dist.all_reduce(mine)
        return mine.float().numpy()
    part = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_tensor(part, mine)
    return part.float().numpy()


def shards(weights: Weights) -> Weights:
    """This rank's rows of each parameter under ``fully_shard``, by PyTorch's names."""
    model = fully_shard(model_of(weights), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {name: parameter.to_local().detach().numpy().copy() for name, parameter in model.named_parameters()}


def several(function: str, calls: list[tuple]) -> list:
    """One job of many calls of another."""
    warnings.simplefilter("ignore")
    return [globals()[function](*call) for call in calls]
