"""A run without data: the memory and the trace of the real run, event for event, and one rank that stands for all."""

from itertools import product
from operator import attrgetter

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering, named
from tests.zero.drawn import ON_DISK, drawn, made
from tests.zero.training import ADAM, BF16, MODELS, batches
from zerosim.models import GPT

NANO, UNTIED = GPT("gpt-nano"), GPT("gpt-nano", tied=False)
ADAMW = zs.optim.AdamW()
COMPUTED_BY_HAND = {"gained", "scalars", "unused", "own gradients"}  # by NumPy's functions
# What no twin computes, or what a drawn run may not meet: each place of state at every stage.
WITHOUT_A_TWIN = [
    *((NANO, {"recompute": recompute, "stage": stage}) for stage, recompute in enumerate(
        ("tiled", "block+tiled", "segment(2)+selective", "block+sub_block"))),
    *((MODELS["wide"](), {"optimizer": zs.optim.KFAC(), "layout": layout, "gather": True, "stage": stage,
                          "groups": [zs.Group("*.bias", optimizer=ADAM)]})
      for stage, layout in covering(zs.STAGES, ["per_unit", "contiguous", "whole_matrices"])),
    (NANO, {"stage": 3, "overlap": True, "reduction": "micro_batch"}),
    *((MODELS["deep"](), {"stage": stage, "offload": asked, "prefetch": 1, "mesh": mesh}) for stage, asked, mesh in
      covering(zs.STAGES, ["host", ON_DISK, zs.Offload("host", "host")], [None, (2, 1), (1, 2)], count=6))]


def ran(cluster, model, data, *, optimizer=ADAMW, **options):
    """The cluster after a run: its trace and its memory are what is compared. Null ranks get arrays without data."""
    def program(rank):
        engine = zs.Engine(rank, model, optimizer, **options)
        for step in data:
            engine.step([tuple(x if rank.xp is np else rank.xp.empty(x.shape, x.dtype) for x in pair)
                         for pair in step[rank.index]])

    cluster.run(program)
    return cluster


def assert_same_rank(one, at, other, place):
    """A rank of one cluster has the trace that a rank of another has, and its memory on the device, host and disk."""
    rows, expected = one.trace[at].rows, other.trace[place].rows
    for index, (a, b) in enumerate(zip(rows, expected, strict=False)):
        assert a == b, f"row {index}"
    assert len(rows) == len(expected)
    for where, question in product(("", "host.", "disk."), ("now_nbytes", "peak_nbytes", "slack_nbytes",
                                                            "peak_nbytes_by_kind")):
        asked = attrgetter(where + question)
        assert asked(one.memory[at]) == asked(other.memory[place]), where + question


def assert_a_null_run_is_the_real_one(model, data, **options):
    real, null = (ran(kind(len(data[0])), model, data, **options) for kind in (zs.Cluster, zs.NullCluster))
    for rank in range(len(data[0])):
        assert_same_rank(null, rank, real, rank)


@pytest.mark.parametrize("case", drawn(6, [name for name in MODELS if name not in COMPUTED_BY_HAND]))
def test_a_null_run_makes_the_real_runs_memory_and_trace_event_for_event(case):
    model, data, options = made(case)
    runs = options.pop("runs")
    stage, own = runs[case["seed"] % len(runs)]
    del options["debug"], options["seed"]  # the cluster's
    assert_a_null_run_is_the_real_one(model, data, stage=stage, **own, **options)


@pytest.mark.parametrize(("model", "options"), WITHOUT_A_TWIN, ids=named)
def test_so_does_one_of_what_no_twin_computes(model, options):
    assert_a_null_run_is_the_real_one(model, batches(model, 2, 2, 1 if model is NANO else 2), policy=BF16, **options)


@pytest.mark.parametrize(("ranks", "stage", "optimizer"), [
    *covering([1, 2, 3, 5, 8], [3, 2, 1, 0], [ADAMW, zs.optim.LAMB(), zs.optim.SGD(lr=0.1)]),
    (4, 3, zs.optim.Adam())])
def test_one_rank_stands_for_all_where_each_does_the_same(ranks, stage, optimizer):
    options = {"optimizer": optimizer, "stage": stage, "policy": BF16, "overlap": True, "prefetch": 1,
               "reduction": "micro_batch" if ranks == 4 else "rank"}
    data = batches(UNTIED, ranks, 2, 2)
    every = ran(zs.NullCluster(ranks), UNTIED, data, **options)
    for index in {0, ranks - 1}:
        one = ran(zs.NullCluster(ranks, representative=index), UNTIED, data, **options)
        assert len(one.trace) == len(one.memory) == len(one.runs[-1].results) == 1
        assert_same_rank(one, 0, every, index)
        assert len(set(every.memory.peak_nbytes)) == 1


@pytest.mark.parametrize("layout", ["contiguous", "whole_matrices"])
def test_no_rank_stands_for_all_in_a_layout_that_is_not_the_same_for_each(layout):
    data, options = batches(NANO, 3, 1, 1), {"stage": 3, "layout": layout, "policy": BF16}
    with pytest.raises(zs.AsymmetryError, match=r"rank 0 stands for all ranks and was asked for all_gather\(call 0, .*"
                                                r"but its ranks do not all bring.*with NullCluster\(ranks\) without"):
        ran(zs.NullCluster(3, representative=0), NANO, data, **options)
    assert len(set(ran(zs.NullCluster(3), NANO, data, **options).trace.sent_nbytes("parameters"))) > 1


def test_a_trillion_parameters_train_on_1024_ranks_in_no_memory():
    """The whole model, of 1.0e12 parameters, for one step; `zerosim bench null` measures one of more layers."""
    model = GPT(zs.models.GPTConfig(layers=32, channels=51200, heads=160, context=2048, vocabulary=51200))
    tokens = np.zeros((1, 2048), np.int64)
    cluster = ran(zs.NullCluster(1024, representative=0), model, [[[(tokens, tokens)]]], stage=3, policy=BF16,
                  recompute="block")
    assert model.parameter_count > 10**12
    assert cluster.memory[0].peak_nbytes_by_kind["optimizer_state"] >= 8 * model.parameter_count // 1024


def test_a_capacity_ends_a_null_run_as_it_ends_a_real_one():
    texts = []
    for kind in (zs.Cluster, zs.NullCluster):
        with pytest.raises(zs.OutOfMemoryError) as error:
            ran(kind(2, capacity_nbytes=40_000), NANO, batches(NANO, 2, 1, 1), stage=1)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
