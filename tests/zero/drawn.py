"""Training runs that are drawn from everything that an engine can be told, the same ones every time."""

import math
from itertools import islice, product

import zerosim as zs
from tests.cases import THOROUGH, chosen, covering
from tests.optim.papers import ELEMENTWISE, MATRIX, NORMED
from tests.support import DISK
from tests.zero.training import ADAM, MODELS, SGD, batches
from zerosim.models import Decoder, Llama
from zerosim.zero import PARTIAL, REPLICATED, SHARDED

FORMATS = ("fp32", "fp16", "bf16")
ROWS = [zs.Stage(p, g, o) for p, g, o in product(
    (REPLICATED, SHARDED), (PARTIAL, REPLICATED, SHARDED), (REPLICATED, SHARDED))]
CASES = {
    "ranks": (1, 2, 3, 4, 5, 8), "k": (1, 2, 3), "steps": (2, 2, 3, 10),
    "layout": ("per_unit", "contiguous", "whole_matrices"),
    "optimizer": (ADAM, SGD, *ELEMENTWISE[1:], *NORMED, *MATRIX[:3], zs.optim.SOAP(every=2), zs.optim.Adafactor()),
    "compute": FORMATS, "reduce": (None, *FORMATS), "accumulate": (None, *FORMATS),
    "master": ("fp32", "fp32", "as compute"), "master_from": ("first_values", "compute"),
    "state": ("fp32", "fp32", "fp16", "bf16"),
    "groups": ("none", "none", "one is frozen", "weights are frozen", "another lr", "another optimizer", "in fp32"),
    "clip_norm": (None, None, 0.01, 0.5, 10.0), "debug": (False, True), "seed": range(5), "row": ROWS,
    "nodes": (None, None, None, 2, 3, 4)}
ON_DISK = zs.Offload("disk", "disk", "disk", DISK)
RUNS = {  # buckets: how many of fp32 would make the model
    "buckets": (0, 1, 3, 20), "overlap": (False, True), "copy_in_flight": (False, True), "prefetch": (0, 1, 2, 3),
    "keep_gathered": (None, (), "all"),
    "recompute": ("none", "block", "segment(2)", "segment(5)", "sub_block", "selective"),
    "offload": (None, "host", ON_DISK, zs.Offload("host"), zs.Offload("host", "host"), zs.Offload(parameters="host"),
                zs.Offload("disk", parameters="host", directory=DISK), zs.Offload(gradients="host"))}


def drawn(count, models=tuple(MODELS)):
    """So many cases for `made`: of every axis a value, and the options of five runs, at each stage and on the row."""
    runs = iter(covering(*RUNS.values(), count=5 * count))
    return [dict(zip(("model", *CASES), values, strict=True), runs=list(islice(runs, 5)))
            for values in covering(models, *CASES.values(), count=count)]


def made(case):
    """A model, its data, and the options of `assert_runs_equal_the_twin`: three runs, at stage 0, 1 or 2 by the case's
    seed, at stage 3, and on a row that may be no stage; thorough: at all stages, and on the row. Where a model or many
    ranks take long, there are fewer ranks, steps or micro-batches.
    """
    model, compute, layout = MODELS[case["model"]](), case["compute"], case["layout"]
    groups = groups_of(case["groups"], model, case["seed"])
    master = compute if case["master"] == "as compute" and not any(group.compute for group in groups) else "fp32"
    policy = zs.Policy(compute, reduce=case["reduce"], accumulate=case["accumulate"], master=master,
                       master_from=case["master_from"], state=case["state"],
                       loss_scale=1024.0 if compute == "fp16" else 1.0)
    ranks, steps = case["ranks"], case["steps"]
    dear = isinstance(model, Decoder) or case["model"] == "autodiff"
    most_ranks, most_steps, most_k = 8, 2 + 32 // ranks**2, 3
    if dear:
        most_ranks, most_steps, most_k = (4, 2, 3) if THOROUGH else (3, 2, 2)
    ranks, nodes, row = min(ranks, most_ranks), case["nodes"], case["row"]
    mesh = None if nodes is None else (min(nodes, most_ranks), max(1, ranks // nodes))
    ranks = ranks if mesh is None else math.prod(mesh)
    data = batches(model, ranks, min(case["k"], most_k), min(steps, most_steps), seed=case["seed"])
    if mesh and row.gradients is REPLICATED:
        row = zs.Stage(row.parameters, SHARDED, row.optimizer)
    runs = [(stage, options_of(model, *values))
            for stage, values in zip((*zs.STAGES, row), case["runs"], strict=True)]
    runs = chosen([runs[case["seed"] % 3], *runs[3:]], runs)
    options = {key: case[key] for key in ("optimizer", "layout", "clip_norm", "debug", "seed")} | {"mesh": mesh}
    return model, data, options | {
        "runs": runs, "groups": groups, "policy": policy, "gather": layout != "whole_matrices"}


def groups_of(kind, model, seed):
    """Groups of this kind, where the model has parameters for it. Norms and gains alone may rest in fp32."""
    names = list(model.shapes)
    norms = "*norm*" if isinstance(model, Llama) else "*ln_*" if isinstance(model, Decoder) else "scale.*"
    groups = {"one is frozen": [zs.Group(names[seed % len(names)], frozen=True)],
              "weights are frozen": [zs.Group("*.weight", frozen=True)],
              "another lr": [zs.Group("*.bias", lr=0.05)],
              "another optimizer": [zs.Group("*.bias", optimizer=ADAM), zs.Group(names[0], optimizer=zs.optim.LARS())],
              "in fp32": [zs.Group(norms, compute="fp32")]}.get(kind, [])
    fit = all(any(map(group.matches, names)) for group in groups)
    all_frozen = all(any(group.frozen and group.matches(name) for group in groups) for name in names)
    return groups if fit and not all_frozen else []


def options_of(model, *values):
    """The options of one run, which change no bit."""
    options = dict(zip(RUNS, values, strict=True))
    buckets = options.pop("buckets")
    if buckets:
        options["bucket_nbytes"] = 1 + 4 * model.parameter_count // buckets
    if options["recompute"] in ("sub_block", "selective") and not isinstance(model, Decoder):
        options["recompute"] = "none"
    return options
