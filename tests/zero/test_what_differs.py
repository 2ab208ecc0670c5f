"""What may differ does differ: an option that changes nothing is none, and equal data could hide a missing mean."""

from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from tests.twin import Twin
from tests.zero.optimizers import OwnSGD
from tests.zero.training import (
    ADAM,
    BF16,
    ODD,
    SGD,
    assert_runs_equal_the_twin,
    batches,
    bits,
    flat_state,
    outcome,
    rules_of,
    run,
    twin_of,
)
from tests.zero.units import gained
from zerosim.models import GPT


def differing(ranks, one, other, k=1):
    """True where the moments of one step differ between two runs (or twins) with these options."""
    data = batches(ODD, ranks, k, 1)
    if "order" in one:
        found = [twin_of(ODD, data, policy=BF16, **options)[0].slots["m"] for options in (one, other)]
    else:
        found = [run(ODD, data, **{"stage": 2, "policy": BF16} | options)[0]["m"] for options in (one, other)]
    return bits(found[0]) != bits(found[1])


def test_orders_of_additions_differ_where_there_are_enough_addends_and_only_there():
    orders = {"order": "local_first"}, {"order": "reduce_first"}
    assert [differing(3, *orders, k) for k in (1, 2)] == [False, True], "two micro-batches"
    layouts = {"layout": "per_unit"}, {"layout": "contiguous"}
    assert [differing(ranks, *layouts) for ranks in (2, 3)] == [False, True]
    wires = {}, {"policy": zs.Policy("bf16", wire="fp32")}
    assert [differing(ranks, *wires) for ranks in (2, 3)] == [False, True], "partial sums in fp32"


def test_averaging_rules_change_bits_and_agree_across_stages():
    data, seen = batches(ODD, 3, 1, 2), {}
    for average in ("cast_then_divide", "sum_then_divide", "divide_then_sum", "split", "premultiply"):
        policy = replace(BF16, average=average)
        found = {outcome(ODD, data, stage=stage, policy=policy)[0]["m"] for stage in zs.STAGES}
        assert len(found) == 1
        seen[average] = found.pop()
    # split divides by 2, which is exact, then by 1.5: without overflow it is sum_then_divide, bit for bit
    assert seen.pop("split") == seen["sum_then_divide"]
    assert len(set(seen.values())) == 4


@pytest.mark.filterwarnings("ignore::zerosim.SkippedStepWarning")
def test_a_schedule_multiplies_every_lr_and_does_not_advance_on_a_skipped_step():
    """A user's own optimizer follows it by reading its lr."""
    factors, data = {1: 1.0, 2: 0.25, 3: 0.125}, batches(ODD, 3, 1, 4)
    data[1][2] = [(np.full((2, 3), 3e38, np.float32), np.zeros((2, 2), np.float32))]  # on one rank, in the second step
    (own, said), (sgd, _) = (assert_runs_equal_the_twin(ODD, data, optimizer, policy=BF16, schedule=factors.__getitem__)
                             for optimizer in (OwnSGD(), SGD))
    assert [step["skipped"] for step in said] == [False, True, False, False]
    assert bits(own.master) == bits(sgd.master) != bits(twin_of(ODD, data, SGD, policy=BF16)[0].master)


def test_a_parameter_in_fp32_is_its_own_master_and_does_change_bits():
    model, data = gained(), batches(gained(), 2, 1, 2)
    mixed, plain = (run(model, data, policy=BF16, groups=groups)[0]
                    for groups in ((zs.Group("scale.*", compute="fp32"),), ()))
    rest = 6 * 3 + 2 + 5 * 2 + 2  # padding to a multiple of 2 included: 20 + 12
    assert (mixed["held"]["parameter"], mixed["held"]["master"]) == (2 * rest + 4 * 6, 4 * rest)
    assert bits(mixed["master"]) != bits(plain["master"])


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_masters_from_the_compute_format_begin_as_its_numbers_and_have_other_bits_after_a_step_too(compute):
    model, data, groups = gained(), batches(gained(), 3, 1, 1), (zs.Group("scale.*", compute="fp32"),)

    def begun(rank, policy, stage):
        return flat_state(zs.Engine(rank, model, ADAM, policy=policy, stage=stage, groups=groups))

    found = []
    for policy in (zs.Policy(compute), zs.Policy(compute, master_from="compute")):
        twin = Twin(model, ADAM, 3, policy, "per_unit", "local_first", rules_of(groups, model, ADAM, policy))
        for stage in zs.STAGES:
            for state in zs.Cluster(3).run(begun, policy, stage):
                assert (bits(state["master"]), bits(state["parameter"])) == (bits(twin.master), bits(twin.compute))
        taken, _ = assert_runs_equal_the_twin(model, data, policy=policy, groups=groups)
        found.append((dict(twin.weights), taken.weights, bits(twin.compute), bits(taken.compute)))
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        for name in model.shapes:  # biases begin as 0, and what computes in fp32 is its own master
            assert (np.mean(one[name] != other[name]) > 0.5) == name.endswith("weight")
    for name, weights in found[1][0].items():
        dtype = np.float32 if name == "scale.gain" else zs.format_of(compute).dtype
        assert bits(weights.astype(dtype).astype(np.float32)) == bits(weights)
    assert found[0][2] == found[1][2]
    assert found[0][3] != found[1][3]


def test_a_parameter_that_some_ranks_use_is_averaged_over_all():
    """Rank 0 alone uses the gain: its gradient is divided by N all the same."""
    data = batches(gained(), 3, 1, 1)
    used = zs.Cluster(3).run(lambda rank: run_on(rank, gained(used=rank.index == 0), data))
    twin = Twin(gained(), SGD, 1, zs.Policy(), "per_unit", "local_first")
    first = twin.weights["scale.gain"].copy()
    _, gradient = twin.gradient(*data[0][0][0])
    expected = first - np.float32(0.1) * (gradient["scale.gain"] / np.float32(3))
    assert [bits(gain) for gain in used] == [bits(expected)] * 3


def run_on(rank, model, data):
    engine = zs.Engine(rank, model, SGD, stage=2)
    engine.step(data[0][rank.index])
    return engine.state("scale.gain")["master"]


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["own", "global"])
def test_global_normalization_weighs_every_token_the_same_and_own_does_not(normalization):
    """The norm of one device with all tokens in one batch; and its loss, from three ranks' results alone."""
    model = GPT("gpt-nano", normalization=normalization)
    data = batches(model, 3, 2, 1, seed=3)[0]

    def step(rank, data):
        return zs.Engine(rank, model, ADAM).step(data[rank.index])

    results = list(zs.Cluster(3).run(step, data))
    together = tuple(np.concatenate([pair[i] for mine in data for pair in mine]) for i in (0, 1))
    alone = zs.Cluster(1).run(step, [[together]])[0]
    near = abs(results[0].norm - alone.norm) < 1e-5 * alone.norm  # fp32 sums in another order
    far = abs(results[0].norm - alone.norm) > 1e-3 * alone.norm
    assert (near, far) == (normalization == "global", normalization == "own")

    assert [result.tokens for result in results] == [tuple(int((t >= 0).sum()) for _, t in mine) for mine in data]
    assert [result.places for result in results] == [tuple(t.size for _, t in mine) for mine in data]
    found = sum(loss * weight for result in results for loss, weight in zip(
        result.losses, result.places if normalization == "global" else result.tokens, strict=True))
    (loss,), (tokens,), (places,) = alone.losses, alone.tokens, alone.places
    mean = loss * places / tokens if normalization == "global" else loss
    assert abs(found / tokens - mean) < 1e-5 * mean
    assert abs(np.mean([loss for result in results for loss in result.losses]) - mean) > 1e-3 * mean


def test_a_step_in_which_no_rank_has_a_target_is_refused_where_all_tokens_weigh_the_same():
    model = GPT("gpt-nano", normalization="global")
    ((((x, target),),),) = batches(model, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^no rank has a valid target in this step, .*; leave the step out\n"):
        zs.Cluster(2).run(lambda rank: zs.Engine(rank, model, ADAM).step(x, np.full_like(target, -1)))
