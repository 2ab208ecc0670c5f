"""A ZeRO-3 step of a GPT beside PyTorch's FSDP2 and DeepSpeed's stage 3 on the same cores, where they are installed.

    python benchmarks/bench_peers.py              # 2, 4 and 8 ranks, three rounds
    python benchmarks/bench_peers.py 4 8

zerosim's ranks share one process, with accounts and traces on; a peer has a process a rank, of one thread, over gloo.
All take turns, each time as new processes; a row has the median over rounds of each run's median step, which leaves the
first out. Adam in fp32, 4 layers of 256 channels in 8 heads, 2 sequences of 128 tokens a rank.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import zerosim as zs
from zerosim.models import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, channels=256, heads=8, context=128, vocabulary=256)
ROWS, STEPS, ROUNDS, RANKS, LR = 2, 8, 3, (2, 4, 8), 1e-3
PEERS = {"FSDP2": "torch", "DeepSpeed": "deepspeed"}  # the module that each needs


def batches(rank: int) -> list[np.ndarray]:
    """Tokens and targets (2, B, T) of each step."""
    rng = np.random.default_rng(rank)
    return [rng.integers(0, CONFIG.vocabulary, (2, ROWS, CONFIG.context)) for _ in range(STEPS)]


def seconds_of(steps: list[Callable[[], object]]) -> list[float]:
    """Wall-clock seconds of each."""
    found = []
    for step in steps:
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


def of_zerosim(ranks: int) -> list[float]:
    """Seconds of each step, as rank 0 sees them."""
    def program(rank: zs.Rank) -> list[float]:
        engine = zs.Engine(rank, GPT(CONFIG), zs.optim.Adam(lr=LR), stage=3)
        return seconds_of([lambda pair=pair: engine.step(*pair) for pair in batches(rank.index)])  # type: ignore[misc]

    found: list[float] = zs.Cluster(ranks).run(program)[0]
    return found


def net_of_torch() -> Any:
    """The same GPT as a torch module: blocks, and a head that shares the embedding's weights."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, c: int = CONFIG.channels) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2))
            self.qkv, self.projection = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, c = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, CONFIG.heads, -1).permute(2, 0, 3, 1, 4)
            x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(
                b, t, c))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(CONFIG.vocabulary, CONFIG.channels)
            self.wpe = nn.Embedding(CONFIG.context, CONFIG.channels)
            self.blocks = nn.ModuleList(Block() for _ in range(CONFIG.layers))
            self.norm = nn.LayerNorm(CONFIG.channels)

        def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy((self.norm(x) @ self.wte.weight.T).flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    return Net()


def of_fsdp2(rank: int, ranks: int) -> list[float]:
    """Seconds of each step of this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = net_of_torch()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)

    def step(tokens: np.ndarray, target: np.ndarray) -> None:
        net(torch.from_numpy(tokens), torch.from_numpy(target)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds_of([lambda pair=pair: step(*pair) for pair in batches(rank)])  # type: ignore[misc]


def of_deepspeed(rank: int, ranks: int) -> list[float]:
    """Seconds of each step of this process."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    net = net_of_torch()
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=LR), config={
            "train_micro_batch_size_per_gpu": ROWS, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})

    def step(tokens: np.ndarray, target: np.ndarray) -> None:
        engine.backward(engine(torch.from_numpy(tokens), torch.from_numpy(target)))
        engine.step()

    return seconds_of([lambda pair=pair: step(*pair) for pair in batches(rank)])  # type: ignore[misc]


def apart(name: str, ranks: int) -> float:
    """The median step of a run in processes of its own, in seconds; the first is left out."""
    processes = 1 if name == "zerosim" else ranks
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29_000 + os.getpid() % 1000),
                       WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
                       DS_ACCELERATOR="cpu")
    runs = [Popen([sys.executable, __file__, name, str(ranks)], env=environment | {
        "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=PIPE, stderr=PIPE, text=True) for rank in range(processes)]
    said = [run.communicate() for run in runs]
    if any(run.returncode for run in runs):
        raise RuntimeError(f"{name} on {ranks} ranks ended badly: {said[0][1][-2000:]}")
    return statistics.median(json.loads(said[0][0].splitlines()[-1])[1:])


def main(ranks: list[int]) -> None:
    """Prints a row for each number of ranks."""
    names = ["zerosim", *(name for name, needs in PEERS.items() if find_spec(needs))]
    table = Table(title=f"A ZeRO-3 step of a GPT of {GPT(CONFIG).parameter_count:,} parameters, Adam, fp32")
    for column in ("ranks", *(f"{name}, ms" for name in names), *(f"beside {name}" for name in names[1:])):
        table.add_column(column, justify="right")
    for size in ranks:
        rounds = [[apart(name, size) for name in names] for _ in range(ROUNDS)]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        table.add_row(str(size), *(f"{1e3 * seconds:.0f}" for seconds in medians),
                      *(f"{medians[0] / seconds:.2f}" for seconds in medians[1:]))
    Console().print(table)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["zerosim", ranks]:
            print(json.dumps(of_zerosim(int(ranks))))
        case [name, ranks] if name in PEERS:
            run = of_fsdp2 if name == "FSDP2" else of_deepspeed
            print("\n" + json.dumps(run(int(os.environ["RANK"]), int(ranks))), flush=True)
            os._exit(0)  # an ordinary end of gloo's threads aborts now and then
        case sizes:
            main([int(size) for size in sizes] or [*RANKS])
