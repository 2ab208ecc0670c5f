"""All stages compute the same bits, and they are the twin's; what may differ does differ."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.zero.training import MODELS, assert_stages_equal_the_twin, batches, bits, run, twin_of
from zerosim.models import MLP
from zerosim.zero import PARTIAL, REPLICATED, SHARDED

FORMATS = ("fp32", "fp16", "bf16")
WORLDS = (1, 2, 3, 4, 5, 8)
LAYOUTS = ("per_unit", "contiguous")
STEPS = 10


@pytest.mark.parametrize(("ranks", "compute", "layout"), covering(WORLDS, FORMATS, LAYOUTS))
def test_stages_equal_the_twin_over_ten_steps(compute, ranks, layout):
    model = MODELS["odd"]()
    _, said = assert_stages_equal_the_twin(model, batches(model, ranks, 1, STEPS), policy=zs.Policy(compute),
                                           layout=layout)
    assert len({step["norm"] for step in said}) == STEPS  # it trained on something


@pytest.mark.parametrize(("compute", "layout"), covering(FORMATS, LAYOUTS))
def test_more_ranks_than_parameters_equal_the_twin(compute, layout):
    model, ranks = MODELS["fewer_than_ranks"](), 5
    assert model.parameter_count < ranks
    assert_stages_equal_the_twin(model, batches(model, ranks, 3, 3), policy=zs.Policy(compute), layout=layout)


@pytest.mark.parametrize(("ranks", "compute"), covering([1, 3, 4], FORMATS, turn=1))
def test_accumulation_equals_the_twin_of_its_order(compute, ranks):
    model = MODELS["deep"]()
    assert_stages_equal_the_twin(model, batches(model, ranks, 3, 3, seed=5), policy=zs.Policy(compute))


@pytest.mark.parametrize(("compute", "reduce", "accumulate"), [
    ("bf16", "fp32", "fp32"), ("bf16", "bf16", "fp32"), ("fp16", "fp32", "fp16"), ("fp16", "bf16", "fp32"),
    ("fp32", "bf16", "fp32"), ("bf16", "fp32", "bf16")])
def test_mixed_reduce_and_accumulate_formats_equal_the_twin(compute, reduce, accumulate):
    model = MODELS["odd"]()
    assert_stages_equal_the_twin(model, batches(model, 3, 2, 3),
                                 policy=zs.Policy(compute, reduce=reduce, accumulate=accumulate))


ALL_ROWS = [zs.Stage(p, g, o) for p, g, o in itertools.product(
    (REPLICATED, SHARDED), (PARTIAL, REPLICATED, SHARDED), (REPLICATED, SHARDED))]


@pytest.mark.parametrize(("stage", "compute", "layout"), covering(ALL_ROWS, ["fp32", "bf16"], LAYOUTS), ids=str)
def test_every_combination_of_placements_equals_the_twin(stage, compute, layout):
    model = MODELS["odd"]()
    assert_stages_equal_the_twin(model, batches(model, 3, 2, 3), runs=[(stage, {})], policy=zs.Policy(compute),
                                 layout=layout)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_recomputation_changes_no_bit(stage):
    model, ranks, policy = MODELS["deep"](), 3, zs.Policy("fp16")
    data = batches(model, ranks, 2, 2)
    kept, *others = (run(model, data, stage=stage, policy=policy, recompute=recompute)
                     for recompute in ("none", "block", "segment(2)", "segment(5)"))
    for again in others:
        assert all(bits(a[key]) == bits(b[key])
                   for a, b in zip(kept, again, strict=True) for key in ("master", "m", "v"))


def test_clipping_equals_the_twin_and_matters():
    model, sgd = MODELS["odd"](), zs.optim.SGD(lr=0.1)
    data = batches(model, 3, 1, 3)
    twin, _ = assert_stages_equal_the_twin(model, data, sgd, clip_norm=0.5)
    assert bits(twin.master) != bits(twin_of(model, data, sgd)[0].master)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_debug_mode_and_other_schedules_change_no_bit(stage):
    model, ranks = MODELS["deep"](), 5
    data = batches(model, ranks, 2, 2)
    plain = run(model, data, stage=stage, policy=zs.Policy("bf16"))
    for cluster in (zs.Cluster(ranks, debug=True), zs.Cluster(ranks, seed=7), zs.Cluster(ranks, debug=True, seed=8)):
        other = run(model, data, cluster=cluster, stage=stage, policy=zs.Policy("bf16"))
        assert all(bits(a[key]) == bits(b[key]) for a, b in zip(plain, other, strict=True) for key in a if key in
                   ("master", "parameter", "m", "v"))


def test_the_two_orders_of_accumulation_differ_from_two_micro_batches_on():
    model, policy = MODELS["odd"](), zs.Policy("bf16")
    for micro_batches, same in ((1, True), (2, False)):
        data = batches(model, 3, micro_batches, 1)
        one, two = (twin_of(model, data, policy=policy, order=order)[0] for order in ("local_first", "reduce_first"))
        assert (bits(one.slots["m"]) == bits(two.slots["m"])) is same


def test_the_two_layouts_differ_from_three_ranks_on():
    model, policy = MODELS["odd"](), zs.Policy("bf16")
    for ranks, same in ((2, True), (3, False)):
        data = batches(model, ranks, 1, 1)
        one, two = (run(model, data, stage=1, policy=policy, layout=layout)[0]["m"]
                    for layout in ("per_unit", "contiguous"))
        assert (bits(one) == bits(two)) is same


def test_ranks_with_different_data_are_not_averaged_away():
    """The same data on every rank could not see a missing mean; different data can."""
    model, policy = MODELS["odd"](), zs.Policy("fp32")
    data = batches(model, 3, 1, 1)
    alone = [[step[0]] for step in data]
    mean, single = run(model, data, stage=2, policy=policy)[0], run(model, alone, stage=2, policy=policy)[0]
    assert bits(mean["m"]) != bits(single["m"])


def test_one_concatenated_batch_on_one_device_agrees_within_rounding():
    """Mean of per-rank means = mean over the whole batch; the additions come in another order, so only nearly.

    The bound: a gradient of one step is a sum of fewer than 64 products, each rounded at 2^-24 relative; 1e-5 of the
    largest element leaves a factor ten.
    """
    model, policy, ranks = MODELS["odd"](), zs.Policy("fp32"), 4
    data = batches(model, ranks, 2, 1)
    joined = [
        [[tuple(np.concatenate(parts) for parts in zip(*(pair for mine in data[0] for pair in mine), strict=True))]]
    ]
    many, one = run(model, data, stage=3, policy=policy)[0], run(model, joined, policy=policy)[0]
    assert np.abs(many["m"] - one["m"]).max() <= 1e-5 * np.abs(one["m"]).max()


def test_overflow_on_one_rank_makes_every_rank_skip_and_changes_nothing():
    model, policy, ranks = MODELS["odd"](), zs.Policy("fp16", loss_scale=2.0**8), 3
    data = batches(model, ranks, 1, 3)
    x, target = data[1][2][0]
    data[1][2][0] = (x, target + np.float32(3e4))  # the second step overflows on rank 2 alone
    twin, said = assert_stages_equal_the_twin(model, data, policy=policy)
    assert [step["skipped"] for step in said] == [False, True, False]
    clean, _ = twin_of(model, [data[0], data[2]], policy=policy)
    assert bits(clean.master) == bits(twin.master)  # the skipped step left no mark


def test_averaging_rules_change_bits_and_agree_across_stages():
    model, ranks = MODELS["odd"](), 3
    data = batches(model, ranks, 1, 2)
    seen = {}
    for average in ("cast_then_divide", "sum_then_divide", "divide_then_sum", "split", "premultiply"):
        policy = replace(zs.Policy("bf16"), average=average)
        found = {bits(run(model, data, stage=stage, policy=policy)[0]["m"]) for stage in zs.STAGES}
        assert len(found) == 1
        seen[average] = found.pop()
    # split divides by 2, which is exact, then by 1.5: without overflow it is sum_then_divide, bit for bit
    assert seen.pop("split") == seen["sum_then_divide"]
    assert len(set(seen.values())) == 4


def test_the_split_average_survives_a_sum_that_overflows():
    """Three gradients of 3e4 sum to 9e4, beyond fp16's 65504; halved first they stay below it."""
    model = MLP((1, 1), bias=False, seed=3)
    far = [[[(np.ones((1, 1), np.float32), np.full((1, 1), -3e4, np.float32))] for _ in range(3)]]
    skipped = {average: run(model, far, stage=2, policy=zs.Policy("fp16", average=average))[0]["skipped"]
               for average in ("cast_then_divide", "sum_then_divide", "split", "divide_then_sum")}
    assert skipped == {
        "cast_then_divide": [True],
        "sum_then_divide": [True],
        "split": [False],
        "divide_then_sum": [False],
    }


def test_fp32_partial_sums_on_the_wire_change_bits_from_three_ranks_on():
    model = MODELS["odd"]()
    for ranks, same in ((2, True), (3, False)):
        data = batches(model, ranks, 1, 1)
        narrow, wide = (run(model, data, stage=2, policy=zs.Policy("bf16", wire=wire))[0]["m"]
                        for wire in (None, "fp32"))
        assert (bits(narrow) == bits(wide)) is same
