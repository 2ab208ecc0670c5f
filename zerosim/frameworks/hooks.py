"""Hooks that record one step of a real run, of PyTorch's DDP or FSDP2 or of DeepSpeed, for `zerosim.oracle`.

Every rank runs the same lines around one step, from before its first forward until after its update:

    with recorded(model, "run", optimizer, clip_norm=1.0):     # of DeepSpeed recorded(engine, "run")
        ...

A hook on every parameter keeps each micro-batch's own gradient, as backward makes it, before any reduction; weights and
state are made whole by the framework's own accessors before and after. Sizes are those of one device: record a small
model, or few layers. Torch is imported when a step is recorded, and never by zerosim itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zerosim.frameworks.settings import format_or_none
from zerosim.numerics.formats import format_of
from zerosim.oracle.record import StepSettings, write_rank, write_settings

SLOTS = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "buffer"}  # torch's names of state, and the record's
RULES = {"SGD", "Adam", "AdamW", "DeepSpeedCPUAdam", "FusedAdam"}  # classes of optimizers, or their bases
OTHER = ("amsgrad", "nesterov", "maximize", "dampening")  # options that make another rule of one
DEEPSPEED = {1: "flat", 2: "flat", 3: "tensors"}  # whose part of what a rank owns, by stage
Tensors = Mapping[str, Any]


def array(tensor: Any) -> np.ndarray:
    """A tensor's values on the host, in its own format."""
    tensor = tensor.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return np.array(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.array(tensor.numpy())


class TorchStep:
    """A step of DDP, of FSDP2, or of a plain module: parameters by name, whole, and the optimizer's settings."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = getattr(model, "module", model), optimizer
        self.sharded = [module for module in model.modules() if hasattr(module, "unshard")]
        self.settings: dict[str, Any] = {"layout": "rows" if self.sharded else "whole"}

    def local(self) -> Tensors:
        """The parameters to which backward hands the rank's own gradients; FSDP2's are those that it gathers."""
        for module in self.sharded:
            module.unshard()
        found = dict(self.model.named_parameters())
        for module in self.sharded:
            module.reshard()
        return found

    def masters(self) -> Tensors:
        """The weights that are updated."""
        return {name: _whole(one) for name, one in self.model.named_parameters()}

    def state(self, key: str) -> Tensors:
        """One slot of the optimizer's state; of none there is nothing."""
        return {name: _whole(self.optimizer.state[one][key]) for name, one in self.model.named_parameters()
                if key in self.optimizer.state.get(one, {})}

    def copies(self) -> Tensors:
        """The weights that compute, where they rest beside masters."""
        return {}


class DeepSpeedStep(TorchStep):
    """A step of a DeepSpeed engine at stage 1, 2 or 3."""

    def __init__(self, engine: Any) -> None:
        self.model, self.engine, self.optimizer = engine.module, engine, engine.optimizer.optimizer
        self.sharded: list[Any] = []
        scale = float(engine.optimizer.loss_scale)
        self.settings = {"layout": DEEPSPEED[engine.zero_optimization_stage()], "loss_scale": scale,
                         "micro_batches": engine.gradient_accumulation_steps(), "clip_norm": engine.gradient_clipping()
                         or None, "reduce": format_or_none(engine.communication_data_type)}

    def masters(self) -> Tensors:
        """The fp32 masters."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(one) for name, one in self.trained()}

    def state(self, key: str) -> Tensors:
        """One slot of the optimizer's state; of none there is nothing."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if not any(key in state for state in self.optimizer.state.values()):
            return {}
        return {name: safe_get_full_optimizer_state(one, key) for name, one in self.trained()}

    def copies(self) -> Tensors:
        """The weights that compute."""
        if self.settings["layout"] == "flat":
            return dict(self.trained())
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return {name: one.detach().clone() for name, one in self.trained()}

    def trained(self) -> list[tuple[str, Any]]:
        """The parameters that are not frozen: of others no rank owns a part."""
        return [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]


@contextmanager
def recorded(model: Any, folder: str | Path, optimizer: Any = None, **settings: Any) -> Iterator[None]:
    """Records the step inside the block, on every rank, into a folder that all of them see; rank 0 writes the settings.

    ``settings`` are `StepSettings`' own, and win over what is read from the framework: of PyTorch ``clip_norm``,
    ``loss_scale``, ``reduce`` and ``compute``. Losses count as divided by the number of micro-batches, as is the
    custom: ``divisor`` is N·S unless it is given. A parameter of PyTorch's that had no gradient on any rank and did not
    change is left out. Raises ValueError for an optimizer of another rule or of param groups with different settings,
    for a step in which no parameter had a gradient, and for a parameter that had one in some micro-batches only.
    """
    import torch.distributed as dist

    step = DeepSpeedStep(model) if hasattr(model, "zero_optimization_stage") else TorchStep(model, optimizer)
    ranks, rank, folder = dist.get_world_size(), dist.get_rank(), Path(folder)
    local = step.local()
    gradients: dict[str, list[np.ndarray]] = {}
    handles = [one.register_hook(lambda g, name=name: gradients.setdefault(name, []).append(array(g)))
               for name, one in local.items() if one.requires_grad]
    rules, before = _optimizer(step.optimizer), _state(step)
    masters = {name.removeprefix("master/"): x for name, x in before.items() if name.startswith("master/")}
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    after, of_ranks = _state(step), [(0, set[str]())] * ranks
    dist.all_gather_object(of_ranks, (max(map(len, gradients.values()), default=0), {*gradients} | {
        name for name, x in masters.items() if isinstance(step, DeepSpeedStep)
        or x.tobytes() != after[f"master/{name}"].tobytes()}))
    count, updated = max(found for found, _ in of_ranks), set[str]().union(*(names for _, names in of_ranks))
    if not count:
        raise ValueError("recorded() saw no gradient in its block; begin it before the forward of the step")
    arrays = {f"{when}/{name}": x for when, state in (("before", before), ("after", after))
              for name, x in state.items() if name.split("/", 1)[1] in updated}
    arrays |= {f"after/weights/{name}": array(one) for name, one in step.copies().items() if name in updated}
    masters = {name: x for name, x in masters.items() if name in updated}
    dtype = next((g.dtype for gs in gradients.values() for g in gs), np.dtype(np.float32))
    for name, master in masters.items():
        of_each = gradients.get(name, [np.zeros(master.shape, dtype)] * count)
        if len(of_each) < count:
            raise ValueError(f"recorded() saw gradients of {name} in {len(of_each)} of {count} micro-batches, and not "
                             "in which; record a step in which all of them use it, or none")
        arrays |= {f"gradient/{j}/{name}": g for j, g in enumerate(of_each)}
    found = {"ranks": ranks, "parameters": {name: list(x.shape) for name, x in masters.items()}, "compute":
             format_of(dtype).name, "micro_batches": count, **rules, **step.settings, **settings}
    found.setdefault("divisor", ranks * found.get("loss_scale", 1.0))
    folder.mkdir(parents=True, exist_ok=True)
    write_rank(folder, rank, arrays)
    if rank == 0:
        write_settings(folder, StepSettings(**found))
    dist.barrier()


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _state(step: TorchStep) -> dict[str, np.ndarray]:
    """Masters and the optimizer's state, by slot and name."""
    found = {f"master/{name}": array(one) for name, one in step.masters().items()}
    for key, slot in SLOTS.items():
        found |= {f"{slot}/{name}": array(one) for name, one in step.state(key).items()}
    return found


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """The settings of Adam, AdamW or SGD, torch's or DeepSpeed's, and the number of the step that it takes next."""
    if not RULES & {base.__name__ for base in type(optimizer).__mro__}:
        raise ValueError(f"recorded() was given the optimizer {type(optimizer).__name__}, and the oracle knows the "
                         f"rules of {', '.join(sorted(RULES))}; call it as recorded(model, folder, optimizer)")
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    first, kind = groups[0], type(optimizer).__name__
    if any(group != first for group in groups) or any(map(first.get, OTHER)):
        raise ValueError(f"{kind} has param groups of different settings, or one of {', '.join(OTHER)}, and the oracle "
                         "knows one rule for all parameters; record a step of one group of Adam, AdamW or SGD")
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    found = {"lr": float(first["lr"]), "weight_decay": float(first["weight_decay"]), "step": max(counts, default=0) + 1}
    if "betas" in first:
        decoupled = first.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False))
        return found | {"optimizer": "adamw" if decoupled else "adam", "beta1": first["betas"][0],
                        "beta2": first["betas"][1], "epsilon": first["eps"]}
    momentum = first.get("momentum", 0.0)
    return found | {"optimizer": "momentum" if momentum else "sgd", "momentum": momentum,
                    "step": 1 + any("momentum_buffer" in state for state in optimizer.state.values())}
