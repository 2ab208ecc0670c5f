"""A step of training on N ranks: beside FSDP2 and DeepSpeed, beside its own arithmetic, and without accounts."""

from collections.abc import Callable, Mapping
from itertools import cycle, pairwise
from typing import Any

import numpy as np

import zerosim as zs
from zerosim.models import GPT, GPTConfig
from zerosim.ranks.memory import Memory
from zerosim.ranks.trace import Trace

from . import Action, Row, Side
from .models import context, first_weights, forward_and_backward

BATCHES, LR = 8, 1e-3


def config(small: bool) -> GPTConfig:
    """4 layers of 256 channels in 8 heads, 128 tokens; or small."""
    if small:
        return GPTConfig(layers=1, channels=32, heads=2, context=8, vocabulary=256)
    return GPTConfig(layers=4, channels=256, heads=8, context=128, vocabulary=256)


def batches(of: GPTConfig, rank: int) -> list[np.ndarray]:
    """Tokens and targets (2, B, T) of some steps, 2 sequences each."""
    rng = np.random.default_rng(rank)
    return [rng.integers(0, of.vocabulary, (2, 2, of.context)) for _ in range(BATCHES)]


def zerosim_side(ranks: int, *, stage: int = 3, workers: int | None = None,
                 before: Callable[[], object] = lambda: None) -> Side:
    """A step of all ranks; ``before`` is called before anything is made."""
    def prepare(small: bool) -> Action:
        before()
        of, cluster = config(small), zs.Cluster(ranks, workers=workers)
        engines = cluster.run(lambda rank: zs.Engine(rank, GPT(of), zs.optim.Adam(lr=LR), stage=stage))
        turns = cycle(zip(*(batches(of, rank) for rank in range(ranks)), strict=True))

        def step() -> float:
            data = next(turns)
            results = cluster.run(lambda rank: engines[rank.index].step(*data[rank.index]))
            cluster.runs.clear()
            return float(results[0].losses[0])

        return step

    return prepare


# -- beside others ----------------------------------------------------------------------------------------------------


def net_of_torch(of: GPTConfig) -> Any:
    """The same GPT as a torch module: blocks, and a head that shares the embedding's weights."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, c: int = of.channels) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2))
            self.qkv, self.projection = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, c = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, of.heads, -1).permute(2, 0, 3, 1, 4)
            x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(
                b, t, c))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(of.vocabulary, of.channels)
            self.wpe = nn.Embedding(of.context, of.channels)
            self.blocks = nn.ModuleList(Block() for _ in range(of.layers))
            self.norm = nn.LayerNorm(of.channels)

        def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy((self.norm(x) @ self.wte.weight.T).flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    return Net()


def torch_steps(forward_and_update: Callable[[Any, Any], None], of: GPTConfig, rank: int) -> Action:
    """A step of this process."""
    import torch

    turns = cycle(batches(of, rank))
    return lambda: forward_and_update(*map(torch.from_numpy, next(turns)))


def fsdp2(small: bool) -> Action:
    """FSDP2 on this process of gloo: a group for each block, and one for the rest."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net = net_of_torch(of := config(small))
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)

    def step(tokens: Any, target: Any) -> None:
        net(tokens, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch_steps(step, of, dist.get_rank())


def deepspeed3(small: bool) -> Action:
    """DeepSpeed's stage 3 on this process of gloo."""
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    net = net_of_torch(of := config(small))
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=LR), config={
            "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})

    def step(tokens: Any, target: Any) -> None:
        engine.backward(engine(tokens, target))
        engine.step()

    return torch_steps(step, of, dist.get_rank())


# -- beside its own parts ---------------------------------------------------------------------------------------------


def arithmetic(ranks: int) -> Side:
    """Forward and backward of as many ranks, one after the other: no collective, no update, no account."""
    def prepare(small: bool) -> Action:
        of = config(small)
        model = GPT(of)
        ctx = context(model, "fp32")
        w, turns = first_weights(model, ctx), cycle(zip(*(batches(of, rank) for rank in range(ranks)), strict=True))
        return lambda: sum(forward_and_backward(model, ctx, w, *pair) for pair in next(turns))

    return prepare


def without_accounts() -> None:
    """Leaves out every row of a trace and every charge of a memory, in this process."""
    def nothing(*given: Any, **named: Any) -> None:
        return None

    for of, names in ((Trace, ("add", "sent")), (Memory, ("_enter", "_leave", "free", "reclassify"))):
        for name in names:
            setattr(of, name, nothing)


# -- many ranks of a tiny model ---------------------------------------------------------------------------------------


def tiny_side(clusters: int, ranks: int, widths: tuple[int, ...] = (8, 16, 4)) -> Side:
    """A ZeRO-3 step of an MLP, 2 samples a rank, on so many clusters, one after the other, of so many ranks each."""
    def prepare(small: bool) -> Action:
        def engine_of(rank: zs.Rank) -> zs.Engine:
            return zs.Engine(rank, zs.models.MLP(widths), zs.optim.Adam(lr=LR), stage=3)

        data = [(d.normal(size=(2, widths[0])), d.normal(size=(2, widths[-1])))
                for d in map(np.random.default_rng, range(ranks))]
        made = [(cluster, cluster.run(engine_of)) for cluster in (zs.Cluster(ranks) for _ in range(clusters))]

        def step() -> None:
            for cluster, engines in made:
                cluster.run(lambda rank, engines=engines: engines[rank.index].step(*data[rank.index]))
                cluster.runs.clear()

        return step

    return prepare


# -- along three curves -----------------------------------------------------------------------------------------------


def mlp_floor(ranks: int, widths: tuple[int, ...]) -> Side:
    """The products of forward and backward, and three copies of 16 bytes for each parameter: what a step cannot do
    without, in plain NumPy."""
    def prepare(small: bool) -> Action:
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal(shape, np.float32) for shape in pairwise(widths)]
        source = np.zeros(4 * sum(w.size for w in weights), np.float32)
        x = rng.standard_normal((2, widths[0]), np.float32)

        def step() -> None:
            for _ in range(ranks):
                outs = [x]
                for w in weights:
                    outs.append(outs[-1] @ w)
                dy = outs[-1]
                for w, inputs in zip(reversed(weights), reversed(outs[:-1]), strict=True):
                    inputs.T @ dy
                    dy = dy @ w.T
            for _ in range(3):
                source.copy()

        return step

    return prepare


def curve(name: str, what: str, points: Mapping[int, tuple[int, tuple[int, ...]]]) -> tuple[Row, ...]:
    """A row for each point, (ranks, widths) by where it stands."""
    return tuple(Row(f"by-{name}-{at}", f"A ZeRO-3 step of an MLP, {at:,} {what}", "its products and memory traffic",
                     None, tiny_side(1, *given), mlp_floor(*given), repetitions=3) for at, given in points.items())


MODEL = "of a GPT of 4 layers, 256 channels, 2 x 128 tokens a rank, Adam, fp32"
ROWS = (
    *(Row(f"{name}-{ranks}", f"A ZeRO-3 step {MODEL}, N = {ranks}, accounts on", f"{peer} on gloo, a process a rank",
          goal, zerosim_side(ranks), side, needs=needs, processes=(1, ranks))
      for name, peer, goal, side, needs in (
          ("fsdp2", "PyTorch's FSDP2", 0.6, fsdp2, ("torch",)),
          ("deepspeed", "DeepSpeed's stage 3", 0.5, deepspeed3, ("torch", "deepspeed")))
      for ranks in (2, 4, 8)),
    *(Row(f"parts-{stage}-{ranks}", f"A ZeRO-{stage} step {MODEL}, N = {ranks}: all of it, one thread",
          "its ranks' forward and backward alone", 1.15, zerosim_side(ranks, stage=stage, workers=1), arithmetic(ranks))
      for stage in (1, 2, 3) for ranks in (4, 8)),
    Row("accounts", f"A ZeRO-3 step {MODEL}, N = 4, accounts and trace on", "off", 1.05, zerosim_side(4),
        zerosim_side(4, before=without_accounts)),
    Row("tiny", "A ZeRO-3 step of an MLP of 8, 16, 4 on 64 ranks", "64 clusters of one rank, one after the other",
        1 / 3, tiny_side(1, 64), tiny_side(64, 1)),
    *curve("ranks", "ranks, 8, 16, 4", {ranks: (ranks, (8, 16, 4)) for ranks in (1, 4, 16, 64, 256, 1024)}),
    *curve("parameters", "parameters in 4 layers, N = 4", {
        4 * width * width: (4, (width,) * 5) for width in (50, 160, 500, 1600, 5000)}),
    *curve("layers", "layers of 256, N = 4", {layers: (4, (256,) * (layers + 1)) for layers in (1, 4, 16, 64)}),
)
