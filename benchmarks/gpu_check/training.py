"""Training on one GPU: the same bits on every stage and in every run, the card's end and Ctrl-C, memory, and time.

Time is that of a GPT's step, beside the same step in PyTorch where that is installed. The share of it that Python alone
takes is measured on a model of as many layers whose arrays are so small that the card has nothing to do: all launches,
all bookkeeping, no work.
"""

import gc
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import zerosim as zs
from benchmarks.gpu_check.report import Machine, Writer, Wrong, nvidia_smi
from zerosim.models import GPT, GPTConfig
from zerosim.numerics.arrays import sha256, to_host

FORMATS = ("fp32", "bf16", "fp16")
RANKS = range(1, 9)
Cluster = Callable[[int], zs.Cluster]


def check_training(report: Writer, machine: Machine) -> None:
    """Stages and formats to the same bits, memory, seconds beside PyTorch's, Ctrl-C, and the card's end."""
    for ranks in RANKS:
        report.check(f"{ranks} ranks: stages and runs agree", partial(stages_agree, ranks=ranks), remark=remark_on_bits)
    report.check("state on the host and on disk", offloaded, remark=remark_on_offload)
    report.check("memory beside nvidia-smi", memory, remark=remark_on_memory)
    report.check("a step beside PyTorch's", measured, remark=remark)
    report.check("Ctrl-C", lambda: at_ctrl_c(zs.CuPyCluster(2)), remark=remark_on_end)
    report.check("the card's end", lambda: at_the_cards_end(zs.CuPyCluster(2)), remark=remark_on_end)


# -- the same bits ----------------------------------------------------------------------------------------------------


def trained(rank: zs.Rank, stage: int, compute: str, steps: int = 2, **options: Any) -> tuple[Any, ...]:
    """Losses and norms of some steps of gpt-nano, and what all parameters are then: of one micro-batch a step, so that
    every stage adds in one order."""
    model = GPT("gpt-nano")
    policy = zs.Policy(compute, loss_scale=1024.0) if compute == "fp16" else zs.Policy(compute)
    engine = zs.Engine(rank, model, zs.optim.AdamW(lr=1e-3), stage=stage, policy=policy, clip_norm=1.0, **options)
    rng = np.random.default_rng(rank.index)
    said = []
    for _ in range(steps):
        tokens, targets = rng.integers(0, model.config.vocabulary, (2, 2, model.config.context))
        step = engine.step([(tokens, targets)])
        said.append((step.losses, step.norm, step.skipped))
    states = {(name, key): to_host(value) for name in model.shapes for key, value in engine.state(name).items()
              if value is not None}
    return said, sha256(sorted(states.items()))


def stages_agree(make: Cluster = zs.CuPyCluster, *, ranks: int, formats: Sequence[str] = FORMATS,
                 program: Callable[..., Any] = trained) -> dict[str, Any]:
    """For each format: whether all stages, and the first of them run again, give the same."""
    rows, (first, *others) = [], zs.STAGES
    for compute in formats:
        results = list(make(ranks).run(program, first, compute))
        right, again, *found = (sha256(results), *(sha256(list(make(ranks).run(program, stage, compute)))
                                                   for stage in (first, *others)))
        rows.append({"ranks": ranks, "compute": compute, "runs": 2 + len(found), "same_twice": again == right,
                     "different_stages": [stage for stage, its in zip(others, found, strict=True) if its != right],
                     "losses": [loss for losses, *_ in results[0][0] for loss in losses]})
    return {"rows": rows}


def remark_on_bits(found: dict[str, Any]) -> str:
    """How many trainings; Wrong where stages differ from the first, runs differ from themselves, and losses are no
    numbers."""
    wrong = []
    for row in found["rows"]:
        said = ["two runs differ"] * (not row["same_twice"])
        said += [f"stage {stage} differs" for stage in row["different_stages"]]
        said += ["a loss is no number"] * (not np.isfinite(row["losses"]).all())
        wrong += [f"N={row['ranks']}, {row['compute']}: {', '.join(said)}"] * bool(said)
    if wrong:
        raise Wrong("; ".join(wrong))
    return f"{sum(row['runs'] for row in found['rows'])} trainings, equal bits"


# -- offload ----------------------------------------------------------------------------------------------------------

PLACES = {"host": "host", "host, all but parameters": zs.Offload("host", "host"), "disk": "disk"}
COPIED = 1 << 26  # elements of fp32


def offloaded(make: Cluster = zs.CuPyCluster, ranks: int = 2, count: int = COPIED,
              stages: Sequence[int] = tuple(zs.STAGES)) -> dict[str, Any]:
    """Where state rests on the host or on disk: the places and stages with other bits than those of none; and copies
    of so many elements between device and host, alone and beside as long a computation."""
    different = []
    for stage in stages:
        right = sha256(list(make(ranks).run(trained, stage, "bf16")))
        for name, asked in PLACES.items():
            options = {"offload": asked, "overlap": True, "prefetch": 1}
            found = make(ranks).run(lambda rank, stage=stage, options=options: trained(rank, stage, "bf16", **options))
            different += [f"stage {stage}, {name}"] * (sha256(list(found)) != right)
    return {"trainings": len(stages) * len(PLACES), "different": different,
            "copies": make(1).run(copies, count)[0]}


def copies(rank: zs.Rank, count: int) -> dict[str, dict[str, float]]:
    """By direction: seconds of a copy, of sums that take as long, and of both, the copy begun first."""
    kernels, device = rank.kernels, rank.xp.cuda.Device()
    x, there, host = (memory.alloc(count, np.float32, "workspace") for memory in (
        rank.memory, rank.memory, rank.memory.host))
    x[...], host[...] = 0, 0
    found = {}
    for direction, source, out in (("to host", there, host), ("to device", host, there)):
        copy = seconds_of(lambda source=source, out=out: kernels.copy_beside(source, out)(), device.synchronize)
        one = seconds_of(lambda: kernels.add_rounded(x, x, x), device.synchronize)
        times = max(1, round(copy / one))

        def compute(times: int = times) -> None:
            for _ in range(times):
                kernels.add_rounded(x, x, x)

        def both(source: Any = source, out: Any = out, compute: Callable[[], None] = compute) -> None:
            arrived = kernels.copy_beside(source, out)
            compute()
            arrived()

        found[direction] = {"bytes_per_second": 4 * count / copy, "copy_seconds": copy,
                            "compute_seconds": seconds_of(compute, device.synchronize),
                            "both_seconds": seconds_of(both, device.synchronize)}
    return found


def remark_on_offload(found: dict[str, Any]) -> str:
    """How many trainings, and of each direction the rate and the share of the copy that computing hides; Wrong where
    bits differ."""
    if found["different"]:
        raise Wrong("other bits than without offload: " + "; ".join(found["different"]))
    said = [f"{direction} {row['bytes_per_second'] / 1e9:.1f} GB/s, {_hidden(row):.0%} of it beside sums"
            for direction, row in found["copies"].items()]
    return "; ".join([f"{found['trainings']} trainings, the bits of none", *said])


def _hidden(row: dict[str, float]) -> float:
    hidden = row["copy_seconds"] + row["compute_seconds"] - row["both_seconds"]
    return min(1.0, max(0.0, hidden / min(row["copy_seconds"], row["compute_seconds"])))


# -- where a run ends before its end ----------------------------------------------------------------------------------

LARGEST_PIECE, SMALLEST_PIECE = 1 << 30, 1 << 9  # bytes with which a card is filled; the least that CuPy's pool gives


def fills_the_card(rank: zs.Rank, stage: int, compute: str) -> Any:
    """Trains, after it has taken all memory that the card gives."""
    held, nbytes = [], LARGEST_PIECE
    while nbytes >= SMALLEST_PIECE:
        try:
            held.append(rank.memory.alloc(nbytes, np.uint8, "input"))
        except MemoryError:
            nbytes //= 2
    return trained(rank, stage, compute)


def at_the_cards_end(cluster: zs.Cluster) -> dict[str, Any]:
    """The end of a training without memory."""
    found, _ = broken_off(cluster, fills_the_card, 2, "bf16")
    return found


def at_ctrl_c(cluster: zs.Cluster) -> dict[str, Any]:
    """The end of an endless training when this process is interrupted, and the seconds that it takes."""
    begun, sent = threading.Event(), list[float]()

    def trains_for_ever(rank: zs.Rank) -> None:
        while True:
            trained(rank, 3, "bf16")
            begun.set()

    def interrupt() -> None:
        begun.wait()
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # which who runs in a background ignores
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        found, ended = broken_off(cluster, trains_for_ever)
    finally:
        signal.signal(signal.SIGINT, handler)
    return found | {"seconds_to_end": ended - sent[0]}


def broken_off(cluster: zs.Cluster, program: Callable[..., Any], *args: Any) -> tuple[dict[str, Any], float]:
    """The error with which a program ends, what is held then, and whether the cluster trains as before; and the moment
    of its end."""
    before, error = sha256(list(cluster.run(trained, 2, "bf16"))), ""
    try:
        cluster.run(program, *args)
    except (MemoryError, KeyboardInterrupt) as raised:  # its text alone is kept: its frames hold what fills the card
        error = f"{type(raised).__name__}: {raised}".removesuffix(": ")
    ended = time.monotonic()
    gc.collect()
    held = list(cluster.memory.now_nbytes)
    as_before = sha256(list(cluster.run(trained, 2, "bf16"))) == before
    return {"error": error, "held_nbytes": held, "as_before": as_before}, ended


def remark_on_end(found: dict[str, Any]) -> str:
    """The error; Wrong where nothing was raised, something stayed held, or the cluster does not work as before."""
    wrong = ["the run did not end with an error"] * (not found["error"])
    wrong += [f"{sum(found['held_nbytes']):,} bytes are still held"] * any(found["held_nbytes"])
    wrong += ["the cluster does not train as before"] * (not found["as_before"])
    if wrong:
        raise Wrong("; ".join(wrong))
    took = f" after {found['seconds_to_end']:.2f} s" if found.get("seconds_to_end") is not None else ""
    return f"{found['error']}{took}; then the same bits as before"


# -- memory -----------------------------------------------------------------------------------------------------------

def memory(make: Cluster = zs.CuPyCluster, config: GPTConfig | None = None, ranks: int = 2) -> dict[str, Any]:
    """Bytes of a GPT in training, at rest: as the ranks' memories count them, as CuPy's pool does, and as the driver
    and nvidia-smi see the card, which count what other programs take too."""
    import cupy

    gc.collect()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used, card, seen = pool.used_bytes(), _card_nbytes(cupy), nvidia_smi("memory.used")
    cluster, config = make(ranks), config or replace(CONFIG, context=64)

    def program(rank: zs.Rank) -> zs.Engine:
        engine = zs.Engine(rank, GPT(config), zs.optim.AdamW(lr=1e-4), stage=2, policy=zs.Policy("bf16"))
        engine.step([tokens_of(config, 1)])
        return engine

    engines = cluster.run(program)
    gc.collect()
    counted = sum(each.now_nbytes + each.slack_nbytes for each in cluster.memory) + cluster.kernels.scratch_nbytes
    found = {"counted_nbytes": counted, "pool_used_nbytes": pool.used_bytes() - used,
             "pool_total_nbytes": pool.total_bytes(), "card_nbytes": _card_nbytes(cupy) - card}
    with suppress(ValueError):  # where nvidia-smi says nothing
        found["nvidia_smi_nbytes"] = (int(nvidia_smi("memory.used")) - int(seen)) << 20
    del engines
    return found


def _card_nbytes(cupy: Any) -> int:
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def remark_on_memory(found: dict[str, int]) -> str:
    """All four numbers; a byte of the pool that is not counted is Wrong."""
    counted, used = found["counted_nbytes"], found["pool_used_nbytes"]
    if counted != used:
        raise Wrong(f"{counted:,} bytes are counted, and the pool has handed out {used:,}")
    return ", ".join(f"{name.removesuffix('_nbytes').replace('_', ' ')} {nbytes / 1e9:.3f} GB"
                     for name, nbytes in found.items())


# -- time -------------------------------------------------------------------------------------------------------------

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

    from benchmarks.speed import torch_decoders

    model = GPT(config)
    weights = {name: unit.initial(name, 0, int(np.prod(shape))).reshape(shape).astype(np.float32)
               for unit in model.units for name, shape in unit.shapes.items()}
    w = {name: tensor.detach().cuda().requires_grad_() for name, tensor in torch_decoders.tensors_of(weights).items()}
    optimizer = torch.optim.AdamW(w.values(), lr=1e-4, fused=True)
    tokens, targets = (torch.tensor(array).cuda() for array in tokens_of(config, batch))
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute)

    def step() -> None:
        with torch.autocast("cuda", kind, enabled=kind is not None):
            loss = torch_decoders.loss_of(model, w, tokens, targets)
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


def remark(found: dict[str, Any]) -> str:
    """Seconds, Python's share, and the ratio to PyTorch's."""
    beside = (f"{found['torch']['ratio']:.2f} times PyTorch's" if found["torch"]
              else f"nothing beside it: {found['no_torch_because']}")
    return f"{1e3 * found['seconds']:.1f} ms a step, Python's share {found['python_share']:.0%}; {beside}"
