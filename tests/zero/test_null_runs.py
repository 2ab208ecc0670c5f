"""A run without data: the memory and the trace of the real run, event for event, and one rank that stands for all."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.optim.papers import EVERY
from tests.zero.test_stages_agree import FORMAT, WIDE
from tests.zero.training import BF16, MODELS
from zerosim.models import GPT

NAMED = {name: MODELS[name] for name in ("odd", "fewer_than_ranks", "gpt", "untied")} | {
    "global": lambda: GPT("gpt-nano", units=2, normalization="global")}
OPTIMIZERS = {type(one).__name__: one for one in (*EVERY, zs.optim.SOAP(every=2))}


def without_factors(model):
    """A group for each parameter that is no weight of a linear layer, which K-FAC cannot update."""
    factored = {name for unit in model.units for name in unit.factored}
    return [zs.Group(name, optimizer=OPTIMIZERS["Adam"]) for name in model.shapes if name not in factored]


def batch(rank, model, rows):
    """One micro-batch, real or without data, as the rank's arrays are."""
    integers = isinstance(model, GPT)
    shapes = [(rows, 8), (rows, 8)] if integers else [(rows, model.units[0].inputs), (rows, model.units[-1].outputs)]
    dtype = np.int64 if integers else np.float32
    if isinstance(rank.xp.empty(1, dtype), np.ndarray):
        draw = np.random.default_rng(rank.index)
        return tuple(draw.integers(0, 17, shape) if integers else draw.standard_normal(shape) for shape in shapes)
    return tuple(rank.xp.empty(shape, dtype) for shape in shapes)


def program(rank, model, optimizer, micro_batches, steps=2, rows=2, **options):
    engine = zs.Engine(rank, model, optimizer, **options)
    for _ in range(steps):
        engine.step([batch(rank, model, rows) for _ in range(micro_batches)])


def ran(cluster, *args, **options):
    """The cluster after the program: its trace and its memory are what is compared."""
    cluster.run(lambda rank: program(rank, *args, **options))
    return cluster


def outcome(cluster, *args, **options):
    """The cluster after the program, or what the program was refused with."""
    try:
        return ran(cluster, *args, **options)
    except ValueError as refused:
        return str(refused)


def assert_same_rows(one, other):
    for index, (a, b) in enumerate(zip(one.rows, other.rows, strict=False)):
        assert a == b, f"row {index}"
    assert len(one.rows) == len(other.rows)


def assert_same_memory(one, other):
    for question in ("now_nbytes", "peak_nbytes", "slack_nbytes", "peak_nbytes_by_kind"):
        assert getattr(one, question) == getattr(other, question), question


# To shrink a training run takes minutes, and so would one example with buckets of a few bytes. Examples are dear.
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=settings().max_examples // 2)
@given(name=st.sampled_from(sorted(NAMED)), optimizer=st.sampled_from(sorted(OPTIMIZERS)), ranks=st.integers(1, 6),
       stage=st.sampled_from([0, 1, 2, 3]), k=st.integers(1, 2), compute=FORMAT, reduce=st.none() | FORMAT,
       layout=st.sampled_from(["per_unit", "contiguous", "whole_matrices"]), overlap=st.booleans(),
       bucket=st.none() | st.integers(200, 4000), prefetch=st.integers(0, 2), keep=st.sampled_from([None, (), "all"]),
       recompute=st.sampled_from(["none", "block", "segment(2)", "selective", "tiled", "sub_block"]),
       frozen=st.booleans(), mixed=st.booleans())
def test_a_null_run_makes_the_real_runs_memory_and_trace_event_for_event(
        name, optimizer, ranks, stage, k, compute, reduce, layout, overlap, bucket, prefetch, keep, recompute, frozen,
        mixed):
    model = NAMED[name]()
    groups = [zs.Group(next(iter(model.shapes)), frozen=True)] if frozen else []
    groups += without_factors(model) if optimizer == "KFAC" else []
    groups += [zs.Group(WIDE[name], compute="fp32")] if mixed and name in WIDE else []
    if recompute in ("selective", "tiled", "sub_block") and not isinstance(model, GPT):
        recompute = "none"
    options = {"stage": stage, "policy": zs.Policy(compute, reduce=reduce), "layout": layout, "overlap": overlap,
               "bucket_nbytes": bucket, "prefetch": prefetch, "keep_gathered": keep, "recompute": recompute,
               "groups": groups, "gather": True}
    args = model, OPTIMIZERS[optimizer], k
    real, null = (outcome(kind(ranks), *args, **options) for kind in (zs.Cluster, zs.NullCluster))
    if isinstance(real, str):  # both refuse, for one reason
        assert null == real
        return
    for rank in range(ranks):
        assert_same_rows(null.trace[rank], real.trace[rank])
        assert_same_memory(null.memory[rank], real.memory[rank])


@pytest.mark.parametrize(("ranks", "stage", "optimizer"), [
    *covering([1, 2, 3, 5, 8], [3, 2, 1, 0], ["AdamW", "LAMB", "SGD"])])
def test_one_rank_stands_for_all_where_each_does_the_same(ranks, stage, optimizer):
    args = GPT("gpt-nano", tied=False), OPTIMIZERS[optimizer], 2
    options = {"stage": stage, "policy": BF16, "overlap": True, "prefetch": 1}
    every = ran(zs.NullCluster(ranks), *args, **options)
    for index in {0, ranks - 1}:
        one = ran(zs.NullCluster(ranks, representative=index), *args, **options)
        assert len(one.trace) == len(one.memory) == len(one.runs[-1].results) == 1
        assert_same_rows(one.trace[0], every.trace[index])
        assert_same_memory(one.memory[0], every.memory[index])
        assert len(set(every.memory.peak_nbytes)) == 1


@pytest.mark.parametrize("layout", ["contiguous", "whole_matrices"])
def test_no_rank_stands_for_all_in_a_layout_that_is_not_the_same_for_each(layout):
    options = {"stage": 3, "layout": layout, "policy": BF16}
    with pytest.raises(zs.AsymmetryError, match=r"rank 0 stands for all ranks and was asked for all_gather\(call 0, .*"
                                                r"but its ranks do not all bring.*with NullCluster\(ranks\) without"):
        ran(zs.NullCluster(3, representative=0), GPT("gpt-nano"), OPTIMIZERS["AdamW"], 1, **options)
    uneven = ran(zs.NullCluster(3), GPT("gpt-nano"), OPTIMIZERS["AdamW"], 1, **options)

    assert len(set(uneven.trace.sent_nbytes("parameters"))) > 1


def test_a_trillion_parameters_train_on_1024_ranks_in_no_memory():
    """The whole model, of 1.0e12 parameters, for one step; what it takes is measured in benchmarks/bench_null.py."""
    config = zs.models.GPTConfig(layers=128, channels=25600, heads=160, context=2048, vocabulary=51200)
    model = GPT(config)
    cluster = ran(zs.NullCluster(1024, representative=0), model, OPTIMIZERS["AdamW"], 1, steps=1, rows=1, stage=3,
                  policy=BF16, recompute="block")
    assert model.parameter_count > 10**12
    assert cluster.memory[0].peak_nbytes_by_kind["optimizer_state"] >= 8 * model.parameter_count // 1024


def test_a_capacity_ends_a_null_run_as_it_ends_a_real_one():
    texts = []
    for cluster in (zs.Cluster(2, capacity_nbytes=40_000), zs.NullCluster(2, capacity_nbytes=40_000)):
        with pytest.raises(zs.OutOfMemoryError) as error:
            ran(cluster, GPT("gpt-nano"), OPTIMIZERS["AdamW"], 1, stage=1)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
