"""The speed of a GPT's forward and backward in each format, beside PyTorch's eager mode where that is installed.

4 layers of 256 channels in 8 heads, 8 sequences of 128 bytes, one thread each. All take turns, so that a slow minute of
the machine is everybody's; medians. Seconds are this machine's; trust the ratios.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
from rich.console import Console
from rich.table import Table

from zerosim.models import GPT, Context, GPTConfig, Unit
from zerosim.numerics.policy import Policy

MODEL = GPT(GPTConfig(layers=4, channels=256, heads=8, context=128, vocabulary=256))
BATCH, ROUNDS = 8, 15
FORMATS = ("fp32", "bf16", "fp16")
Arrays = dict[str, np.ndarray]
Action = Callable[[], object]


def first_weights(ctx: Context) -> Arrays:
    """Every parameter in the compute format."""
    return {name: ctx.cast(unit.initial(name, 0, int(np.prod(shape)))).reshape(shape)
            for unit in MODEL.units for name, shape in unit.shapes.items()}


def context(name: str) -> Context:
    """A context without ranks, which has a place for a tied parameter's gradient too."""
    ctx = Context.standalone(Policy(name))

    def places(unit: Unit) -> Arrays:
        return {name: ctx.empty(MODEL.shapes[name], "unit_gradient") for name in (*unit.shapes, *unit.tied_weights)}

    return replace(ctx, gradients=places)


def step(ctx: Context, w: Arrays, tokens: np.ndarray, target: np.ndarray) -> float:
    """Forward and backward; tokens and target (B, T)."""
    kept, x = [], tokens
    for unit in MODEL.units:
        x, of_unit = unit.forward(ctx, w, x)
        kept.append(of_unit)
        del of_unit
    loss, of_loss = MODEL.loss.forward(ctx, x, target)
    dy = MODEL.loss.backward(ctx, of_loss, 1.0)
    del x, of_loss
    for unit in reversed(MODEL.units):
        dy, _ = unit.backward(ctx, w, kept.pop(), dy)
    return loss


def contestants(tokens: np.ndarray, target: np.ndarray) -> dict[str, Action]:
    """The measured functions, by name."""
    actions: dict[str, Action] = {}
    for name in FORMATS:
        ctx = context(name)
        actions[name] = partial(step, ctx, first_weights(ctx), tokens, target)
    if find_spec("torch"):
        import torch
        import torch_gpt

        torch.set_num_threads(1)
        w = torch_gpt.tensors_of(first_weights(context("fp32")))
        for name, fused in (("torch, its own attention", True), ("torch, attention written out", False)):
            actions[name] = partial(torch_gpt.step, MODEL, w, torch.tensor(tokens), torch.tensor(target), fused=fused)
    return actions


def medians(actions: dict[str, Action]) -> dict[str, float]:
    """Median seconds of each, in turns, after one turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(ROUNDS + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Prints one row for each contestant."""
    rng = np.random.default_rng(0)
    tokens, target = rng.integers(0, MODEL.config.vocabulary, (2, BATCH, MODEL.config.context))
    found = medians(contestants(tokens, target))
    peers = {name: seconds for name, seconds in found.items() if name.startswith("torch")}
    table = Table(title=f"GPT of {MODEL.parameter_count:,} parameters: forward and backward of {tokens.size} tokens")
    table.add_column("")
    for column in ("ms", "beside fp32", *(f"beside {name}" for name in peers)):
        table.add_column(column, justify="right")
    for name, seconds in found.items():
        others = [seconds / found["fp32"], *(seconds / peer for peer in peers.values())]
        table.add_row(name, f"{1e3 * seconds:.1f}", *(f"{ratio:.2f}" for ratio in others))
    Console().print(table)
    if not peers:
        print("PyTorch is not installed here, so nothing stands beside it; pip install torch, and run this again")


if __name__ == "__main__":
    main()
