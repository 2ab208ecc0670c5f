"""One step of one small model in PyTorch, by hand, as DDP, as ZeroRedundancyOptimizer and as FSDP2, beside zerosim's.

    python benchmarks/torch_step.py --ranks 2

starts that many processes with gloo, where PyTorch is installed, and prints what is the same and what is not. The model
has two linear layers; the optimizer is SGD with lr 1/2, so that what differs in the weights is what differs in the mean
gradient. It is run on two kinds of data:

exact   small whole numbers, chosen so that every product and every sum inside a rank is a bf16 number: all local
        gradients have the same bits everywhere, and what can differ is the reduction
random  normal numbers: matrix products add in other orders, and in fp32 weights differ by less than `bound`

Legend: N ranks, B samples of a rank, I inputs, H hidden, O outputs.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import permutations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerosim as zs

B, I, H, O = 2, 6, 5, 3  # noqa: E741
LR = 0.5
NAMES = ("layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias")
GATHERS = ("all_gather_into_tensor", "all_gather_single")  # FSDP2 calls the latter from PyTorch 2.13 on
REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
Weights = dict[str, np.ndarray]
Batches = list[tuple[np.ndarray, np.ndarray]]


# -- the same step, five ways -----------------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over the batch of half the squared error: x (B, I), target (B, O)."""
    return 0.5 * ((model(x).float() - target) ** 2).sum() / len(x)


def by_hand(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    """ZeRO-2 on one flat vector."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    loss_of(model, x, target).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    padding = -len(gradient) % ranks
    gradient = torch.cat([gradient, gradient.new_zeros(padding)])
    shard = gradient.new_empty(len(gradient) // ranks)
    dist.reduce_scatter_tensor(shard, gradient)         # partial -> sharded
    shard /= ranks                                      # the mean, once
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()] + [gradient.new_zeros(padding)])
    own = nn.Parameter(flat.chunk(ranks)[rank].clone())
    own.grad = shard
    torch.optim.SGD([own], lr=LR).step()                # on 1/N of the vector
    dist.all_gather_into_tensor(flat, own.detach())     # sharded -> replicated
    torch.nn.utils.vector_to_parameters(flat[:len(flat) - padding], model.parameters())


def ddp(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    """DistributedDataParallel: gradients are all-reduced in buckets while backward runs."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    loss_of(wrapped, x, target).backward()
    optimizer.step()


def zero_redundancy(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    """ZeRO-1: DDP, and an optimizer that updates the tensors of which this rank is the owner."""
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=LR)
    loss_of(wrapped, x, target).backward()
    optimizer.step()


def fsdp(model: nn.Module, x: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """FSDP2: a group for each linear layer but the last one, which the call on the model itself shards."""
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss_of(model, x, target).backward()
    optimizer.step()


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[..., None]] = {
    "by hand": by_hand, "DDP": ddp, "ZeroRedundancyOptimizer": zero_redundancy,
    "fully_shard": fsdp,
    "fully_shard, resharded": partial(fsdp, reshard_after_forward=True),
    "fully_shard, kept": partial(fsdp, reshard_after_forward=False),
    "fully_shard, bf16": partial(fsdp, mp_policy=BF16),
    "fully_shard, bf16, reduced in fp32": partial(fsdp, mp_policy=BF16_FP32),
}


def rule_of(way: str) -> str:
    """The rule of the mean on gloo: DDP multiplies by 1/N before it adds, the others divide the sum."""
    return "premultiply" if way in ("DDP", "ZeroRedundancyOptimizer") else "sum_then_divide"


def in_zerosim(way: str, ranks: int) -> dict[str, Any]:
    """The engine's arguments for one of these ways, with gloo's rule of the mean."""
    if not way.startswith("fully_shard"):
        stage = {"by hand": 2, "DDP": 0, "ZeroRedundancyOptimizer": 1}[way]
        return {"stage": stage, "policy": zs.Policy(average=rule_of(way))}
    call = WAYS[way]
    options = call.keywords if isinstance(call, partial) else {}
    found = zs.from_fsdp(mesh=(ranks,), root_units=("layer1",), **options).engine_arguments()
    return found | {"policy": replace(found["policy"], average=rule_of(way))}


# -- data, exact and random -------------------------------------------------------------------------------------------


def random_data(ranks: int, seed: int = 0) -> tuple[Weights, Batches]:
    """Weights by name, and a batch x (B, I), target (B, O) for each rank: normal numbers."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = dict(zip(NAMES, (normal(I, H), normal(H), normal(H, O), normal(O)), strict=True))
    return weights, [(normal(B, I), normal(B, O)) for _ in range(ranks)]


def exact_data(ranks: int) -> tuple[Weights, Batches]:
    """The same of small whole numbers: the first seed whose local gradients are bf16 numbers, and their sum is not."""
    for seed in range(10_000):
        weights, batches = ({name: np.rint(w) for name, w in part.items()} if isinstance(part, dict) else
                            [(np.rint(2 * x), np.rint(8 * target)) for x, target in part]
                            for part in random_data(ranks, seed))
        local = [local_values(weights, *batch) for batch in batches]
        total = np.concatenate([np.sum([found[name] for found in local], 0).reshape(-1) for name in weights])
        if all(is_bf16(value) for found in local for value in found.values()) and not is_bf16(total):
            return weights, batches
    raise ValueError(f"no exact data for {ranks} ranks were found")


def local_values(weights: Weights, x: np.ndarray, target: np.ndarray) -> Weights:
    """What a rank computes of a batch, in float64: activations, their gradients, and those of weights by name."""
    w0, b0, w1, b1 = (np.asarray(w, np.float64) for w in weights.values())
    hidden = x @ w0 + b0
    active = np.maximum(hidden, 0)
    y = active @ w1 + b1
    dy = (y - target) / len(x)
    dhidden = (dy @ w1.T) * (hidden > 0)
    return {"hidden": hidden, "y": y, "dy": dy, "dhidden": dhidden, "layer0.weight": x.T @ dhidden,
            "layer0.bias": dhidden.sum(0), "layer1.weight": active.T @ dy, "layer1.bias": dy.sum(0)}


def is_bf16(values: np.ndarray) -> bool:
    """True where all are bf16 numbers."""
    return bool(np.all(zs.round_to(values.astype(np.float32), "bf16") == values))


def bound(weights: Weights, batches: Batches) -> Weights:
    """By how much two fp32 steps may differ, whatever the order of their additions.

    A sum of products with k roundings lies within k·u/(1 - k·u) of the exact one, times the sum of their magnitudes;
    u = 2^-24 (Higham 2002, "Accuracy and Stability of Numerical Algorithms", sections 3.1 and 3.4). The magnitudes come
    from the same step on absolute values, which ReLU does not shrink; k counts the longest chain. Both may be off.
    """
    magnitudes = {name: np.abs(w).astype(np.float64) for name, w in weights.items()}
    sums = {name: np.zeros(w.shape) for name, w in weights.items()}
    for x, target in batches:
        w0, b0, w1, b1 = magnitudes.values()
        active = np.abs(x) @ w0 + b0
        dy = (active @ w1 + b1 + np.abs(target)) / len(x)
        dhidden = dy @ w1.T
        for name, value in zip(sums, (np.abs(x).T @ dhidden, dhidden.sum(0), active.T @ dy, dy.sum(0)), strict=True):
            sums[name] += value / len(batches)
    u, k = 2.0**-24, (I + 1) + (H + 1) + 2 + O + B + len(batches) + 2
    share = k * u / (1 - k * u)
    return {name: 2 * (LR * sums[name] * share + u * (magnitudes[name] + LR * sums[name])) for name in sums}


# -- running both -----------------------------------------------------------------------------------------------------


def torch_step(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    """A process of gloo: every way on both kinds of data; rank 0 saves the weights, and how often it gathered."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    calls = counted_collectives()
    for kind, (weights, batches) in (("exact", exact_data(ranks)), ("random", random_data(ranks))):
        for name in names:
            model = nn.Sequential(nn.Linear(I, H), nn.ReLU(), nn.Linear(H, O))
            arrays = list(weights.values())
            with torch.no_grad():
                for p, w in zip(model.parameters(), arrays, strict=True):
                    p.copy_(torch.tensor(np.asarray(w, np.float32).T))  # a Linear of torch holds (outputs, inputs)
            calls.clear()
            x, target = (torch.tensor(np.asarray(part, np.float32)) for part in batches[rank])
            WAYS[name](model, x, target)
            full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
            if rank == 0:
                np.savez(f"{folder}/{kind} {names.index(name)}.npz", *(p.detach().float().numpy().T for p in full),
                         calls=np.array([sum(map(calls.count, GATHERS)), sum(map(calls.count, REDUCE_SCATTERS))]))
    dist.barrier()
    os._exit(0)  # an ordinary end aborts now and then: "terminate called without an active exception"


def counted_collectives() -> list[str]:
    """A list to which every later call of these collectives adds its name."""
    calls: list[str] = []

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return collective(*arguments, **options)
        return counted

    for name in (*GATHERS, *REDUCE_SCATTERS):
        if hasattr(dist, name):
            setattr(dist, name, counting(name, getattr(dist, name)))
    return calls


def zerosim_step(weights: Weights, batches: Batches, **options: Any) -> tuple[Weights, list[int]]:
    """The weights after one step of the engine, and rank 0's all-gathers of parameters and reduce-scatters."""

    def program(rank: zs.Rank) -> Weights:
        engine = zs.Engine(rank, zs.models.MLP((I, H, O)), zs.optim.SGD(lr=LR), weights=weights, **options)
        engine.step([batches[rank.index]])
        states = {name: engine.state(name) for name in weights}
        return {name: state["parameter"] if state["master"] is None else state["master"]
                for name, state in states.items()}

    cluster = zs.Cluster(len(batches))
    found = cluster.run(program)[0]
    return found, [len(cluster.trace[0].collectives("all_gather", "parameters")),
                   len(cluster.trace[0].collectives("reduce_scatter", "gradients"))]


def in_torch(ranks: int, names: list[str]) -> dict[tuple[str, str], tuple[Weights, list[int]]]:
    """By kind of data and way: the weights after the step, and rank 0's all-gathers and reduce-scatters."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(torch_step, (ranks, folder, names), ranks, start_method="spawn")
        for kind in ("exact", "random"):
            for name in names:
                with np.load(f"{folder}/{kind} {names.index(name)}.npz") as file:
                    weights = dict(zip(NAMES, (file[f"arr_{at}"] for at in range(4)), strict=True))
                    found[kind, name] = weights, file["calls"].tolist()
    return found


def is_of_some_order(way: str, found: Weights, weights: Weights, batches: Batches) -> bool:
    """True where each weight is the one that some order of adding the ranks' exact gradients gives, by the rule."""
    policy = in_zerosim(way, len(batches))["policy"]
    one, ranks = np.float32(1), np.float32(len(batches))

    def rounded(value: np.ndarray) -> np.ndarray:
        return zs.round_to(value, policy.reduce or policy.compute)

    local = [local_values(weights, *batch) for batch in batches]
    for name, w in weights.items():
        addends = [each[name].astype(np.float32) for each in local]
        if policy.average == "premultiply":
            addends = [rounded(g * rounded(one / ranks)) for g in addends]
        fits = np.zeros(w.shape, bool)
        for order in permutations(addends):
            total = reduce(lambda a, b: rounded(a + b), order)
            mean = total if policy.average == "premultiply" else rounded(total / ranks)
            fits |= w.astype(np.float32) - np.float32(LR) * mean == found[name]
        if not fits.all():
            return False
    return True


@dataclass(frozen=True)
class Row:
    """One way: the stage, rank 0's all-gathers and reduce-scatters there and here, and how far apart the weights are.

    On exact data: equal bits, and those of some order of additions. On random data: the largest ``difference``, and the
    largest ``share`` of `bound`, which is of fp32.
    """

    way: str
    stage: int
    torch_calls: list[int]
    calls: list[int]
    is_equal: bool
    is_of_some_order: bool
    difference: float
    share: float | None


def compared(ranks: int, names: list[str]) -> list[Row]:
    """A row for each of these ways."""
    exact, random, rows = exact_data(ranks), random_data(ranks), []
    most, theirs = bound(*random), in_torch(ranks, names)
    for name in names:
        options, (found, torch_calls) = in_zerosim(name, ranks), theirs["exact", name]
        own, calls = zerosim_step(*exact, **options)
        there, here = theirs["random", name][0], zerosim_step(*random, **options)[0]
        away = {key: np.abs(here[key].astype(np.float64) - there[key]) for key in here}
        share = max(float(np.max(away[key] / most[key])) for key in away)
        rows.append(Row(name, options["stage"], torch_calls, calls,
                        all(np.array_equal(own[key], found[key]) for key in own), is_of_some_order(name, found, *exact),
                        max(float(np.max(value)) for value in away.values()),
                        share if options["policy"].compute == "fp32" else None))
    return rows


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    print(f"PyTorch {torch.__version__} on gloo, NumPy {np.__version__}, zerosim {zs.__version__}: one step on "
          f"{asked.ranks} ranks\n")
    print(f"{'':42}gathers + scatters   exact data         random data")
    print(f"{'':36}stage PyTorch   zerosim    bits               difference   of the bound")
    for row in compared(asked.ranks, list(WAYS)):
        there, here = (f"{gathers} + {scatters}" for gathers, scatters in (row.torch_calls, row.calls))
        bits = "equal" if row.is_equal else "of another order" if row.is_of_some_order else "different"
        share = "" if row.share is None else f"{row.share:.2%}"
        print(f"{row.way:36}{row.stage:^6}{there:10}{here:11}{bits:19}{row.difference:<13.1e}{share}".rstrip())


if __name__ == "__main__":
    main()
