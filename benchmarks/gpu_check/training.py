"""A GPT's training step on one GPU: seconds, beside the same step in PyTorch where that is installed, and the share of
them that Python alone takes.

Python's share is measured on a model of as many layers whose arrays are so small that the card has nothing to do: all
launches, all bookkeeping, no work.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

import zerosim as zs
from zerosim.models import GPT, GPTConfig

CONFIG = GPTConfig(layers=12, channels=768, heads=12, context=512, vocabulary=50304)
BATCH, ROUNDS = 8, 10


def seconds_of(action: Callable[[], object], finish: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds of an action and what it leaves under way, after two that are not counted."""
    found = []
    for turn in range(rounds + 2):
        began = time.perf_counter()
        action()
        finish()
        if turn >= 2:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def tokens_of(config: GPTConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets), each (B, T)."""
    tokens, targets = np.random.default_rng(0).integers(0, config.vocabulary, (2, batch, config.context))
    return tokens, targets


def ours(config: GPTConfig, batch: int, compute: str, make: Callable[[int], zs.Cluster], rounds: int = ROUNDS) -> float:
    """Seconds of ``Engine.step`` with AdamW on one rank."""
    found: list[float] = []

    def program(rank: zs.Rank) -> None:
        engine = zs.Engine(rank, GPT(config), zs.optim.AdamW(lr=1e-4), stage=0, policy=zs.Policy(compute))
        device = rank.xp.cuda.Device()
        pair = tokens_of(config, batch)
        found.append(seconds_of(lambda: engine.step([pair]), device.synchronize, rounds))

    make(1).run(program)
    return found[0]


def torchs(config: GPTConfig, batch: int, compute: str) -> float:
    """Seconds of the same step in PyTorch's eager mode on the first GPU: autocast, its fused AdamW."""
    import torch

    from benchmarks import torch_gpt

    model = GPT(config)
    weights = {name: unit.initial(name, 0, int(np.prod(shape))).reshape(shape).astype(np.float32)
               for unit in model.units for name, shape in unit.shapes.items()}
    w = {name: tensor.detach().cuda().requires_grad_() for name, tensor in torch_gpt.tensors_of(weights).items()}
    optimizer = torch.optim.AdamW(w.values(), lr=1e-4, fused=True)
    tokens, targets = (torch.tensor(array).cuda() for array in tokens_of(config, batch))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)

    def step() -> None:
        with torch.autocast("cuda", kind, enabled=kind is not None):
            loss = torch_gpt.loss_of(model, w, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return seconds_of(step, torch.cuda.synchronize)


def torch_is_missing() -> str | None:
    """Why PyTorch cannot stand beside; None where it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed; pip install torch"
    import torch

    return None if torch.cuda.is_available() else "PyTorch is installed, but built without CUDA, or finds no GPU"


def measured(compute: str = "bf16", make: Callable[[int], zs.Cluster] = zs.CuPyCluster, config: GPTConfig = CONFIG,
             batch: int = BATCH, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of a step here and in PyTorch, and the share of Python in ours."""
    small = replace(config, channels=config.heads, context=8, vocabulary=64)
    mine, python = ours(config, batch, compute, make, rounds), ours(small, 1, compute, make, rounds)
    found: dict[str, Any] = {"compute": compute, "parameters": GPT(config).parameter_count,
                             "tokens": batch * config.context, "seconds": mine, "python_seconds": python,
                             "python_share": min(1.0, python / mine)}
    missing = torch_is_missing()
    if missing is not None:
        return found | {"torch": None, "no_torch_because": missing}
    theirs = torchs(config, batch, compute)
    return found | {"torch": {"seconds": theirs, "ratio": mine / theirs}}
