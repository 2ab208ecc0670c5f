"""Fingerprints of what the package computes, holds and sends: taken before a change of its insides, compared after it.

    python benchmarks/fingerprints.py before.json                    # about four minutes
    python benchmarks/fingerprints.py after.json --against before.json
    python benchmarks/fingerprints.py after.json --against before.json --quick     # a fixed eighth of the cases
    python benchmarks/fingerprints.py after.json --against before.json --only train

A case is a run (a training, a collective, a plan, a command), and most cases are the products of a grid. Its parts are
the first 16 hex digits of SHA-256 of losses, parameters, masters, slots, norms, scales, sent bytes by purpose, peaks by
kind and more. ``--against`` prints the parts that differ and ends with exit code 1. Only public names are used, so that
one script serves both sides. Bits of matrix products depend on the BLAS library: compare files of one machine.

Kept tools for snapshots (syrupy, pytest-regressions) store values and compare them, which takes 60 lines here. The
other lines are cases, which such a tool leaves to its user.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import zerosim as zs
from zerosim import models, optim, planning
from zerosim.cli import main as command_line
from zerosim.display import chrome_trace
from zerosim.numerics.loss_scale import Dynamic

Parts = dict[str, str]
Case = tuple[str, Callable[[], Parts]]
Options = Mapping[str, Any]
PURPOSES = ("parameters", "gradients", "state", "control", "unspecified")
DIGITS = 16
RAISED = "raised"
QUICK = 8  # of so many cases --quick runs one


# -- hashes -----------------------------------------------------------------------------------------------------------


def fingerprint(value: Any) -> str:
    """Of arrays their dtype, shape and bytes, of floats all bits, of collections their members in order."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:DIGITS]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        digest.update(f"array {array.dtype.name} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes())
    elif isinstance(value, float):
        digest.update(f"float {value.hex()} ".encode())
    elif value is None or isinstance(value, bool | int | str | Fraction):
        digest.update(f"{type(value).__name__} {value!s} ".encode())
    elif isinstance(value, Mapping):
        _feed(digest, [part for item in value.items() for part in item])
    elif is_dataclass(value):
        _feed(digest, [getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Sequence | set | frozenset):
        members = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        digest.update(f"sequence {len(members)} ".encode())
        for member in members:
            _feed(digest, member)
    else:
        raise ValueError(f"a fingerprint is of arrays, numbers, texts and collections, found {type(value).__name__}")


def of_text(text: str) -> Parts:
    """The text as it is, and its numbers alone, sorted: where only words or their order change, these stay."""
    numbers = sorted(re.findall(r"\d[\d_,]*\.?\d*(?:e[+-]?\d+)?", text))
    return {"text": fingerprint(text), "numbers": fingerprint(numbers)}


def grid(title: str, run: Callable[..., Parts], **axes: Any) -> Iterator[Case]:
    """A case for each combination of the axes' values, named by them; a mapping gives its values names."""
    named = [axis.items() if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
             for axis in axes.values()]
    for values in product(*named):
        said = " ".join(f"{axis}={name}" for axis, (name, _) in zip(axes, values, strict=True))
        yield f"{title} {said}", partial(run, **{axis: value for axis, (_, value) in zip(axes, values, strict=True)})


# -- trainings --------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], Any]] = {
    "gpt-nano": lambda: models.GPT("gpt-nano", seed=1),
    "mlp": lambda: models.MLP((3, 5, 2), activation="gelu", seed=1),
    "four-weights": models.four_weights,
}
POLICIES: dict[str, Callable[[], zs.Policy]] = {
    "fp32": lambda: zs.Policy("fp32"),
    "bf16": lambda: zs.Policy("bf16"),
    "fp16": lambda: zs.Policy("fp16", loss_scale=Dynamic("torch", initial=2.0**17, window=1)),
    "fp8": lambda: zs.Policy("bf16", matmul="fp8"),
}


def batches(model: Any, ranks: int, micro_batches: int, steps: int) -> list[Any]:
    """batches[step][rank][j] = (x, target), different everywhere."""
    rng = np.random.default_rng(7)
    config = getattr(model, "config", None)
    if config is not None:
        shape = (steps, ranks, micro_batches, 2, 2, config.context)
        drawn = rng.integers(0, config.vocabulary, shape)
    else:
        names = list(model.shapes)
        weights = [name for name in names if name.endswith("weight")]
        inputs, outputs = model.shapes[weights[0]][0], model.shapes[weights[-1]][1]
        return [[[(rng.standard_normal((2, inputs), np.float32), rng.standard_normal((2, outputs), np.float32))
                  for _ in range(micro_batches)] for _ in range(ranks)] for _ in range(steps)]
    return [[[tuple(pair) for pair in of_rank] for of_rank in of_step] for of_step in drawn]


def train(model: Callable[[], Any], ranks: int, *, micro_batches: int = 1, steps: int = 2, debug: bool = False,
          seed: int = 0, policy: Callable[[], zs.Policy] = POLICIES["bf16"], optimizer: Any = None,
          way: Options | None = None, **options: Any) -> Parts:
    """The parts of one training: the same Cluster, Engine, steps and inspection that a user writes."""
    made, adam = model(), optim.AdamW(lr=0.01)
    data = batches(made, ranks, micro_batches, steps)

    def program(rank: zs.Rank) -> dict[str, Any]:
        engine = zs.Engine(rank, made, optimizer or adam, policy=policy(), **options, **way or {})
        resting = rank.memory.now_nbytes_by_kind
        results = [engine.step(step[rank.index]) for step in data]
        found = {"losses": [r.losses for r in results], "norms": [r.norm for r in results],
                 "scales": [(r.scale, r.skipped) for r in results], **held_and_sent(rank),
                 "resting": sorted(resting.items())}
        return found | states_of(engine, made)

    return parts_of(zs.Cluster(ranks, debug=debug, seed=seed).run(program))


def by_hand(make: Callable[[], Any], ranks: int, **options: Any) -> Parts:
    """A step written as its parts, with the mean gradient before the update and one unit's weights afterwards."""
    model = make()
    data = batches(model, ranks, 2, 1)[0]

    def program(rank: zs.Rank) -> dict[str, Any]:
        engine = zs.Engine(rank, model, optim.Adam(lr=0.01), policy=zs.Policy("bf16"), **options)
        losses = []
        for x, target in data[rank.index]:
            tape = engine.forward(x, target)
            losses.append(tape.loss)
            engine.backward(tape)
        engine.reduce()
        gradients = {name: engine.state(name)["gradient"] for name in model.shapes}
        result = engine.update(losses)
        (engine.all_gather_parameters if hasattr(engine, "all_gather_parameters") else engine.refresh)()
        with engine.weights(model.units[-1]) as weights:
            held = {name: np.array(array) for name, array in weights.items()}
        return {"losses": losses, "norms": result.norm, "gradient": gradients, "unit": held} | states_of(engine, model)

    return parts_of(zs.Cluster(ranks).run(program))


def held_and_sent(rank: zs.Rank) -> dict[str, Any]:
    """What the rank has sent and held up to here, and the order of both."""
    # That an array of no bytes is held is no difference.
    rows = [row_of(row) for row in rank.trace.rows if hasattr(row, "flops") or getattr(row, "nbytes", None) != 0]
    return {"sent": {purpose: rank.trace.sent_nbytes(purpose) for purpose in PURPOSES},
            "peak": rank.memory.peak_nbytes, "peak by kind": sorted(rank.memory.peak_nbytes_by_kind.items()),
            "order": rows}


def row_of(row: Any) -> tuple[Any, ...]:
    """A row of a trace as plain values, without the names of spans."""
    names = ("purpose", "sent_nbytes", "kind", "nbytes", "flops", "destination", "source")
    return type(row).__name__, *(getattr(row, name, None) for name in names)


def states_of(engine: zs.Engine, model: Any) -> dict[str, Any]:
    """All that inspection shows, by what it is: parameters, masters, and slots."""
    states = {name: engine.state(name) for name in model.shapes}
    found: dict[str, Any] = {key: {name: state[key] for name, state in states.items()}
                             for key in ("parameter", "master")}
    found["slots"] = {name: {key: array for key, array in sorted(state.items()) if key not in (*found, "gradient")}
                      for name, state in states.items()}
    return found


def parts_of(results: Sequence[dict[str, Any]]) -> Parts:
    """One fingerprint for each part, of all ranks together."""
    return {part: fingerprint([result[part] for result in results]) for part in results[0]}


OPTIMIZERS: dict[str, Any] = {type(one).__name__: one for one in (
    optim.SGD(lr=0.1), optim.Momentum(lr=0.1), optim.AdaGrad(lr=0.1), optim.RMSprop(lr=0.01), optim.Adam(lr=0.01),
    optim.AdamW(lr=0.01), optim.Adan(lr=0.01), optim.Lion(lr=0.01), optim.LAMB(lr=0.01), optim.LARS(lr=0.1))}
OF_MATRICES: dict[str, Any] = {type(one).__name__: one for one in (
    optim.Muon(lr=0.01), optim.Adafactor(lr=0.01), optim.Shampoo(lr=0.1), optim.SOAP(lr=0.01))}
OF_MATRICES["Muon cubic"] = optim.Muon(lr=0.01, iteration="cubic")
KFAC = {"KFAC": optim.KFAC(lr=0.1)}
WHOLE = {"whole": {"layout": "whole_matrices"}, "gathered": {"gather": True}}
GROUPS = {
    "hyperparameters": [zs.Group("*bias", weight_decay=0.0, lr=0.1)],
    "optimizer": [zs.Group("*bias", optimizer=optim.SGD(lr=0.5)), zs.Group("*weight", lr=0.02)],
}
SCHEDULES = {"constant": optim.Constant(), "warmup": optim.Warmup(3), "cosine": optim.WarmupCosine(2, 6, final=0.1)}
PLACEMENTS = (zs.zero.REPLICATED, zs.zero.PARTIAL, zs.zero.SHARDED)
RULES: dict[str, Options] = {
    "reduce fp32": {"reduce": "fp32"}, "accumulate fp32": {"accumulate": "fp32"}, "wire fp32": {"wire": "fp32"},
    "megatron": {"reduce": "fp32", "accumulate": "fp32"}, "output fp32": {"output": "fp32"},
    "master bf16": {"master": "bf16"}, "state bf16": {"state": "bf16"}, "scale 1024": {"loss_scale": 1024.0},
    "deepspeed": {"loss_scale": Dynamic("deepspeed", initial=2.0**20, window=2, hysteresis=2)},
    **{f"average {rule}": {"average": rule} for rule in ("sum_then_divide", "divide_then_sum", "split", "premultiply")}}
STAGES = range(4)


def training_cases() -> Iterator[Case]:
    """Stages x policies x ranks x micro-batches, on three models."""
    return grid("train", train, model=MODELS, stage=STAGES, policy=POLICIES, ranks=(1, 2, 3, 4, 8),
                micro_batches=(1, 3))


def optimizer_cases() -> Iterator[Case]:
    """Every optimizer under every stage; those of whole matrices under a layout that spares them, and by gathering."""
    unbiased = partial(models.MLP, (3, 5, 2), bias=False, seed=1)
    for policy, stages in (("fp32", (0, 2)), ("bf16", (1, 3))):
        run = partial(train, steps=3, micro_batches=2, policy=POLICIES[policy])
        axes = {"stage": stages, "ranks": (1, 3, 4)}
        yield from grid("optimizer", partial(run, MODELS["mlp"]), optimizer=OPTIMIZERS, **axes)
        yield from grid("optimizer", partial(run, MODELS["mlp"]), optimizer=OF_MATRICES, way=WHOLE, **axes)
        yield from grid("optimizer", partial(run, unbiased), optimizer=KFAC, way=WHOLE, **axes)
    nano = partial(train, MODELS["gpt-nano"], 3)
    yield from grid("optimizer gpt-nano", nano, optimizer=OPTIMIZERS, stage=(0, 3))
    yield from grid("optimizer gpt-nano", partial(nano, layout="whole_matrices"), optimizer=OF_MATRICES, stage=(0, 3))


def option_cases() -> Iterator[Case]:
    """Layouts, recomputation, buckets, overlap, prefetch, groups, ties, dropout, clipping, schedules, policies."""
    nano, mlp = partial(train, MODELS["gpt-nano"], 3), partial(train, MODELS["mlp"])
    layouts = ("per_unit", "contiguous", "whole_matrices")
    yield from grid("layout mlp", mlp, layout=layouts, stage=STAGES, ranks=(2, 3, 5))
    yield from grid("layout gpt-nano", nano, layout=layouts, stage=STAGES)
    yield from grid("recompute", nano, recompute=("block", "segment(2)", "segment(3)", "sub_block", "selective",
                                                  "tiled", "block+tiled", "segment(2)+selective"), stage=(1, 3))
    yield from grid("bucket", partial(nano, micro_batches=2), bucket_nbytes=(None, 64, 1000), stage=STAGES,
                    overlap=(False, True))
    tied = {str(yes): partial(models.GPT, "gpt-nano", tied=yes) for yes in (True, False)}
    yield from grid("unshard", partial(train, ranks=3, stage=3, overlap=True), prefetch=(1, 9),
                    keep_gathered=(None, "all", ("block0",), ()), model=tied)
    config = models.GPTConfig(layers=3, channels=8, heads=2, context=6, vocabulary=11, dropout=0.25)
    gpts = {f"tied={tied} units={units} {normalization}":
            partial(models.GPT, config, tied=tied, units=units, normalization=normalization, seed=3)
            for tied, units, normalization in product((True, False), ("block", "sub_block", 2), ("own", "global"))}
    yield from grid("dropout", partial(train, ranks=3, micro_batches=2), model=gpts, stage=(0, 3))
    mlps = {f"{activation} bias={bias}": partial(models.MLP, (2, 3, 3, 1), activation=activation, bias=bias, seed=2)
            for activation, bias in product(("relu", "gelu", None), (True, False))}
    yield from grid("model", partial(train, stage=3), model=mlps, ranks=(1, 4))
    yield from grid("frozen", partial(nano, groups=[zs.Group("block0.*", frozen=True)], steps=3), stage=STAGES)
    yield from grid("groups", partial(mlp, ranks=3, steps=3), groups=GROUPS, stage=STAGES)
    yield from grid("clip", partial(mlp, ranks=3), clip_norm=(1e-3, 0.5, 1e6), stage=STAGES)
    yield from grid("schedule", partial(mlp, ranks=3, stage=2, steps=7), schedule=SCHEDULES)
    policies = {f"{compute} {name}": partial(zs.Policy, compute, **rule)
                for (name, rule), compute in product(RULES.items(), ("bf16", "fp16"))
                if (name, compute) != ("master bf16", "fp16")}
    yield from grid("policy", partial(mlp, ranks=3, micro_batches=2, steps=3), policy=policies, stage=(0, 2, 3))
    eights = {name: partial(zs.Policy, name, reduce="bf16") for name in ("fp8_e4m3", "fp8_e5m2")}
    yield from grid("policy", partial(mlp, ranks=3), policy=eights, stage=(1, 3))
    yield from grid("cluster", partial(nano, overlap=True, prefetch=1), debug=(False, True), seed=(1, 2), stage=(1, 3))
    yield from grid("by hand", partial(by_hand, MODELS["gpt-nano"]), stage=STAGES, ranks=(1, 3, 4))
    yield from grid("placements", placed, parameters=PLACEMENTS, gradients=PLACEMENTS, optimizer=PLACEMENTS)


def placed(parameters: Any, gradients: Any, optimizer: Any) -> Parts:
    """A training under a row of placements, or that they are refused."""
    try:
        stage = zs.Stage(parameters, gradients, optimizer)
    except ValueError:
        return {"refused": "ValueError"}
    return train(MODELS["mlp"], 3, stage=stage, micro_batches=2)


# -- collectives ------------------------------------------------------------------------------------------------------

ALGORITHMS = {
    "reduce_scatter": ("ring", "pairwise", "halving"),
    "all_gather": ("ring", "doubling", "bruck"),
    "all_reduce": ("ring", "doubling", "rabenseifner", "tree", "naive", "everyone"),
    "broadcast": ("tree", "naive"), "reduce": ("tree", "naive"), "gather": ("pairwise",), "all_to_all": ("pairwise",),
}
ROOTED = ("broadcast", "reduce", "gather")
REDUCTIONS: tuple[dict[str, Any], ...] = (
    {}, {"op": "max"}, {"op": "min"}, {"op": "mean"},
    *({"op": "mean", "average": rule} for rule in ("divide_then_sum", "split", "premultiply")))
WIDER: tuple[dict[str, Any], ...] = ({"wire": "fp32"}, {"accumulate": "fp32"})
SETTINGS = {"reduce": REDUCTIONS, "all_reduce": REDUCTIONS + WIDER, "reduce_scatter": REDUCTIONS + WIDER}


def values(ranks: int, length: int, dtype: Any) -> list[np.ndarray]:
    """One vector for each rank, of many magnitudes, with zeros of both signs."""
    rng = np.random.default_rng([ranks, length])
    drawn = rng.standard_normal((ranks, length)) * 10.0 ** rng.integers(-6, 2, (ranks, length))
    drawn[rng.random((ranks, length)) < 0.1] = -0.0
    with np.errstate(all="ignore"):
        return list(drawn.astype(dtype))


def collective(operation: str, algorithm: str, ranks: int, format: str) -> Parts:
    """All settings of one algorithm on so many ranks; each on vectors of several lengths, evenly cut and not.

    In bf16 hop by hop.
    """
    dtype = zs.format_of(format).dtype
    found: dict[str, list[Any]] = {"results": [], "sent": [], "hops": [], "peaks": []}
    for setting in SETTINGS.get(operation, ({},)):
        for uneven, asynchronous in ((False, False), (True, False), (False, True)):
            cluster = zs.Cluster(ranks, debug=format == "bf16")
            program = partial(_called, operation, algorithm, setting, dtype, uneven, asynchronous)
            try:
                results = cluster.run(program)
            except ValueError as error:
                found["results"].append(type(error).__name__)
                continue
            found["results"].append(list(results))
            found["sent"].append(cluster.trace.sent_nbytes())
            found["peaks"].append(cluster.memory.peak_nbytes_by_kind)
            found["hops"].append([call.hops() for call in cluster.trace[0].collectives()])
    return {part: fingerprint(of_part) for part, of_part in found.items()}


def _called(operation: str, algorithm: str, setting: dict[str, Any], dtype: Any, uneven: bool, asynchronous: bool,
            rank: zs.Rank) -> list[Any]:
    found = []
    for length in (0, 1, 2 * rank.size + 1, 64):
        x = values(rank.size, length, dtype)[rank.index]
        cut = _cut(length, rank.size) if uneven else planning.ceil_cut(length, rank.size)
        options: dict[str, Any] = {"algorithm": algorithm, "async_op": asynchronous, **setting}
        if operation in ("all_gather", "gather"):
            x = x[cut[rank.index]:cut[rank.index + 1]].copy()
            options["splits"] = cut
        elif operation in ("reduce_scatter", "all_reduce", "all_to_all") and uneven:
            options["splits"] = cut
        if operation in ROOTED:
            options["root"] = rank.size - 1 if uneven else 0
        result = getattr(rank, operation)(x, **options)
        found.append(result.wait() if asynchronous else result)
    return found


def _cut(length: int, ranks: int) -> tuple[int, ...]:
    inner = np.random.default_rng([length, ranks]).integers(0, length + 1, ranks - 1)
    return (0, *sorted(inner.tolist()), length)


def messages(ranks: int, debug: bool) -> Parts:
    """Exchanges, sends, groups and barriers, and what each rank sent in them; hop by hop too."""

    def program(rank: zs.Rank) -> Any:
        x = values(rank.size, 5, np.float32)[rank.index]
        left, right = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
        found = [np.array(rank.exchange(x, right, np.empty(5, np.float32), left, purpose="state"))]
        rank.barrier()
        group = rank.split(rank.index % 2, key=-rank.index)
        found.append(group.all_reduce(x, purpose="gradients"))
        found.append(group.all_gather(x[:group.index], splits=_triangle(group.size)))
        if rank.size > 1 and rank.index < 2:
            if rank.index == 0:
                rank.send(x, 1)
            else:
                found.append(np.array(rank.recv(np.empty(5, np.float32), 0)))
        return {"results": found, **held_and_sent(rank)}

    cluster = zs.Cluster(ranks, debug=debug)
    parts = parts_of(cluster.run(program))
    with zs.step_through(program, ranks=ranks) as steps:
        parts["steps"] = fingerprint([(step.call and step.call.operation, step.hop) for step in steps])
    return parts


def _triangle(ranks: int) -> list[int]:
    return [index * (index - 1) // 2 for index in range(ranks + 1)]


def collective_cases() -> Iterator[Case]:
    """Every collective by every algorithm on formats and numbers of ranks; messages and groups."""
    for operation, algorithms in ALGORITHMS.items():
        for formats, ranks in ((("fp32", "bf16", "fp16"), (1, 2, 3, 4, 5, 8)), (("fp8_e4m3", "fp8_e5m2"), (3, 8))):
            yield from grid(operation, partial(collective, operation), algorithm=algorithms, ranks=ranks,
                            format=formats)
    yield from grid("messages", messages, ranks=(1, 2, 3, 4, 5, 8), debug=(False, True))


# -- runs without data ------------------------------------------------------------------------------------------------


def null(name: str, ranks: int, representative: int | None, way: Options | None = None, **options: Any) -> Parts:
    """A step of a GPT on arrays without data: what is held and sent, and in which order."""
    model = models.GPT(name)

    def program(rank: zs.Rank) -> dict[str, Any]:
        engine = zs.Engine(rank, model, optim.AdamW(), policy=zs.Policy("bf16"), **options, **way or {})
        resting = sorted(rank.memory.now_nbytes_by_kind.items())
        tokens = rank.xp.empty((2, model.config.context), "int64")
        engine.step([(tokens, tokens)] * 2)
        return {**held_and_sent(rank), "resting": resting}

    return parts_of(zs.NullCluster(ranks, representative=representative).run(program))


def null_cases() -> Iterator[Case]:
    """Stages, recomputation and overlap; all ranks of a small model, one for all of a large one."""
    yield from grid("null gpt-nano", partial(null, "gpt-nano", representative=None), stage=STAGES, ranks=(1, 3, 8))
    ways = {"one by one": {"overlap": False, "prefetch": 0}, "overlapped": {"overlap": True, "prefetch": 1}}
    yield from grid("null gpt2", partial(null, "gpt2", 64, 0), stage=STAGES,
                    recompute=("none", "block", "selective", "tiled"), way=ways)


# -- numbers ----------------------------------------------------------------------------------------------------------


def rounded(format: str) -> Parts:
    """Rounding of random fp32 patterns and of every 16-bit code, and the format's spacing around them."""
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 2**32, 1 << 16, np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.standard_normal(1 << 16) * 10.0 ** rng.uniform(-45, 6, 1 << 16)).astype(np.float32)
    ties = np.arange(2**16, dtype=np.uint32).repeat(2) << 16
    ties[1::2] |= 0x8000
    with np.errstate(all="ignore"):
        found = {"patterns": zs.round_to(patterns, format), "near": zs.round_to(near, format),
                 "ties": zs.round_to(ties.view(np.float32), format)}
        finite = np.abs(near[:256]).tolist()
        found["spacing"] = np.array([float(zs.spacing(x, format)) for x in finite])
    return {part: fingerprint(array) for part, array in found.items()}


def passes(model: Callable[[], Any], policy: Callable[[], zs.Policy]) -> Parts:
    """Forward and backward without ranks, and a model's first values."""
    made = model()
    weights = models.first_weights(made)
    found = models.one_pass(made, weights, policy(), *batches(made, 1, 1, 1)[0][0][0])
    return {"first": fingerprint(weights), "pass": fingerprint(found)}


def number_cases() -> Iterator[Case]:
    """Formats, and passes without ranks."""
    yield from grid("round", rounded, format=zs.FORMATS)
    yield from grid("pass", passes, model=MODELS, policy=POLICIES)


# -- planning ---------------------------------------------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"ranks": 8, "batch": 4, "sequence": 2048},
    "gpt2-xl": {"ranks": 4, "device": "a100-40", "compute": "fp16"},
    "zero-100b": {"ranks": 512, "nodes": 64, "mesh": "64x8"}, "t5-11b": {"ranks": 16, "nodes": 2},
    "qwen2-72b": {"ranks": 64, "nodes": 8, "recompute": "all", "micro_batches": 4},
    "megatron-1t": {"ranks": 1024, "nodes": 128, "overlap": False, "prefetch": 0},
    "opt-13b": {"ranks": 3, "offload": "optimizer=host", "device": "a100-80", "optimizer": optim.Muon()},
    "gpt2": {"ranks": 2, "compute": "fp32", "optimizer": optim.SGD(lr=0.1), "device": "rtx-4090", "link": "pcie4"}}


def planned(name: str) -> Parts:
    """A plan as text, as data, and with every formula."""
    asked = planning.plan_config(name, runtime="zerosim", **PLANS[name])
    found = zs.plan(name, runtime="zerosim", **PLANS[name])
    lines = [line for row in found.rows for line in planning.explained(asked, row)]
    data = json.dumps(found.as_dict(), default=str)
    return {**{f"table {part}": of for part, of in of_text(str(found)).items()},
            **{f"data {part}": of for part, of in of_text(data).items()},
            **{f"formulas {part}": of for part, of in of_text(repr(lines)).items()}}


def closed_forms(layout: str) -> Parts:
    """Bytes by closed forms for many jobs."""
    found: dict[str, list[Any]] = {"resting": [], "sent": [], "vectors": []}
    for lengths, ranks, stage, policy, k, recompute in product(
            ((2, 2), (7, 5, 3, 1, 9), (24, 0, 5)), (1, 2, 3, 4, 5, 8), planning.STAGES,
            (zs.Policy("fp32"), zs.Policy("fp16"), zs.Policy("bf16", reduce="fp32", accumulate="fp32")), (1, 3),
            (None, 1, 2)):
        job = planning.Job(lengths, ranks, planning.STAGES[stage], layout=layout, policy=policy, micro_batches=k,
                           recompute_units=recompute, tied=((len(lengths) - 1, 0),), kept_gathered=(0,) * (k == 3),
                           tied_lengths=(2,))
        found["resting"].append(planning.resting_nbytes(job))
        found["sent"].append(planning.sent_nbytes(job))
        found["vectors"].append(planning.vectors_sent(job))
    return {part: fingerprint(of_part) for part, of_part in found.items()}


def costs(ranks: int) -> Parts:
    """What collectives send and take, algorithm by algorithm."""
    network = planning.hardware.presets().network
    networks = [network(ranks, "nvlink4")]
    if ranks % 2 == 0 and ranks > 2:
        networks.append(network(ranks, "nvlink4", ranks // 2))
    found: dict[str, list[Any]] = {"sent": [], "cost": []}
    for operation, algorithms in (*ALGORITHMS.items(), ("barrier", ("dissemination",))):
        for algorithm, length in product(algorithms, (0, 7, 10**6 + 1)):
            cut = planning.ceil_cut(length, ranks)
            try:
                found["sent"].append(planning.sent(operation, algorithm, cut, 2))
            except ValueError as error:
                found["sent"].append(type(error).__name__)
                continue
            for network in networks:
                price = planning.cost.cost(operation, algorithm, cut, 2, network)
                found["cost"].append((price.seconds, price.latency_seconds, price.transfer_seconds))
    return {part: fingerprint(of_part) for part, of_part in found.items()}


def states_by_convention(name: str) -> Parts:
    """Bytes of model states as published texts count them."""
    shape = planning.model_shape(name)
    found = [planning.states_nbytes(shape, ranks, planning.STAGES[stage], convention)
             for convention, stage, ranks in product(planning.CONVENTIONS, planning.STAGES, (1, 4, 64))]
    return {"states": fingerprint(found), "units": fingerprint(shape.unit_lengths)}


def replayed(stage: int, overlap: bool, recompute: str) -> Parts:
    """A recorded step of three ranks, replayed: seconds, usage, critical path, memory, Chrome's trace."""
    model = models.GPT("gpt-nano")
    data = batches(model, 3, 2, 1)[0]
    cluster = zs.Cluster(3)

    def program(rank: zs.Rank) -> None:
        engine = zs.Engine(rank, model, optim.AdamW(), stage=stage, policy=zs.Policy("bf16"), overlap=overlap,
                           prefetch=int(overlap), recompute=recompute)
        engine.step(data[rank.index])

    cluster.run(program)
    hardware, timeline = planning.hardware, planning.timeline
    recording = planning.recording.record(cluster.trace)
    found: dict[str, Any] = {"recording": json.dumps(planning.recording.to_plain(recording), default=str)}
    for name, machine in {
            "fast": timeline.Machine(hardware.device("h100-80"), hardware.Network(hardware.link("nvlink4"))),
            "slow": timeline.Machine(hardware.device("a100-40"), hardware.Network(hardware.link("pcie4")),
                                     slow=[timeline.Slow(1, 2.0)])}.items():
        line = timeline.replay(recording, machine)
        curve = timeline.memory(line, 0)
        found[name] = [float(line.step_seconds), float(line.exposed_seconds),
                       [list(map(float, (usage.compute_seconds, usage.communication_seconds, usage.exposed_seconds,
                                         usage.waited_seconds))) for usage in line.usage]]
        found[f"{name} memory"] = [curve.seconds, curve.nbytes]
        found[f"{name} path"] = [float(event.seconds) for event in timeline.critical_path(line)]
        found[f"{name} chrome"] = sorted(re.findall(r"[\d.e+-]+", json.dumps(chrome_trace.chrome_trace(line))))
    return {part: fingerprint(of_part) for part, of_part in found.items()}


def planning_cases() -> Iterator[Case]:
    """Plans, closed forms, costs, conventions and timelines."""
    yield from grid("plan", planned, name=tuple(PLANS))
    yield from grid("closed forms", closed_forms, layout=("per_unit", "contiguous"))
    yield from grid("costs", costs, ranks=(1, 2, 3, 4, 5, 8, 12, 64))
    yield from grid("states", states_by_convention, name=tuple(planning.PRESETS))
    yield from grid("timeline", replayed, stage=STAGES, overlap=(False, True), recompute=("none", "block"))


# -- the command line -------------------------------------------------------------------------------------------------

NANO = "--model gpt-nano --ranks 3"
COMMANDS = (
    "replay",
    "replay --ranks 3 --data 1,3:5;2,1:7;1,1:1",
    "replay --compute bf16 --layout per_unit --recompute block",
    "replay --compute fp32 --hops",
    "lost-updates --steps 2000",
    "lost-updates --format bf16 --steps 1000 --update 1e-3",
    "precision --model gpt-nano --steps 5",
    "precision --model gpt-nano --steps 3 --format bf16",
    "cost --nbytes 14e9 --ranks 8 --link nvlink4",
    "cost --nbytes 1e6 --ranks 12 --link pcie5 --collective all_gather",
    "cost --nbytes 1e9 --ranks 64 --link nvlink4 --nodes 8 --algorithm rabenseifner",
    "plan --model llama-2-7b --ranks 8",
    "plan --params 7.5e9 --largest-layer 2e8 --ranks 64 --runtime zerosim",
    "plan --model gpt2 --ranks 4 --measure --runtime zerosim",
    "plan --model gpt2 --ranks 2 --optimizer muon --compute fp16 --explain",
    f"train {NANO} --steps 6 --sample 20",
    f"train {NANO} --steps 4 --stage 2 --compute fp16 --micro-batches 2 --sample 4",
    f"train {NANO} --steps 4 --stage 1 --optimizer muon --recompute block --sample 4",
    f"train {NANO} --steps 3 --compute fp8 --layout contiguous --sample 4",
    f"compare {NANO} --steps 4",
    f"compare {NANO} --steps 3 --over compute",
    f"compare {NANO} --steps 3 --over recompute",
    f"compare {NANO} --steps 3 --over optimizer --values adamw,lion,sgd",
)


def commanded(words: str) -> Parts:
    """What a command prints as JSON: the text, and its numbers alone."""
    printed = io.StringIO()
    arguments, sys.argv = sys.argv, ["zerosim", *words.split(), "--json"]
    try:
        with contextlib.redirect_stdout(printed):
            command_line()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"zerosim {words} --json ended with exit code {end.code}") from None
    finally:
        sys.argv = arguments
    return of_text(printed.getvalue())


def command_cases() -> Iterator[Case]:
    """Commands that print data."""
    return grid("zerosim", commanded, words=COMMANDS)


# -- the whole --------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "train": training_cases, "optimizers": optimizer_cases, "options": option_cases, "collectives": collective_cases,
    "null": null_cases, "numbers": number_cases, "planning": planning_cases, "commands": command_cases}


def take(sections: Sequence[str], *, quick: bool) -> dict[str, Parts]:
    """The parts of every case; with ``quick`` of those whose name's hash says so."""
    found: dict[str, Parts] = {}
    for section in sections:
        start, before = time.process_time(), len(found)
        for name, case in SECTIONS[section]():
            if name in found:
                raise ValueError(f"two cases are called {name!r}")
            if not quick or int(fingerprint(name), 16) % QUICK == 0:
                try:
                    found[name] = case()
                except Exception as error:  # one case that cannot be run any more hides no other
                    found[name] = {RAISED: f"{type(error).__name__}: {error}"}
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"{section:12} {len(found) - before:5} cases  {time.process_time() - start:6.1f} s", file=sys.stderr)
    return found


def differing(before: dict[str, Parts], after: dict[str, Parts], *, whole: bool) -> list[str]:
    """One line for each part that is not what it was; where all cases were run, for each that there is no more."""
    lines = []
    for name, parts in after.items():
        if name not in before:
            lines.append(f"{name}: new")
            continue
        wrong = [part for part in {**before[name], **parts} if before[name].get(part) != parts.get(part)]
        if wrong:
            lines.append(f"{name}: {', '.join(wrong)}")
    if whole:
        lines += [f"{name}: gone" for name in before if name not in after]
    return lines


def main() -> int:
    """Writes the fingerprints; 1 where some are not those of ``--against``, or a case raised an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="a file of another time, to compare with")
    parser.add_argument("--quick", action="store_true", help=f"one case in {QUICK}, always the same")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be repeated")
    asked = parser.parse_args()
    found = take(asked.only or list(SECTIONS), quick=asked.quick)
    asked.out.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(found)} cases, {sum(map(len, found.values()))} parts, all together "
          f"{fingerprint(dict(sorted(found.items())))}")
    raised = any(RAISED in parts for parts in found.values())
    if asked.against is None:
        return int(raised)
    before = json.loads(asked.against.read_text(encoding="utf-8"))
    lines = differing(before, found, whole=not (asked.quick or asked.only))
    print("\n".join(lines) or f"all as in {asked.against}")
    return int(raised or bool(lines))


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        sys.exit(main())
