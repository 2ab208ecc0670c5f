"""Dynamic loss scaling through the engine: skipped steps, the scale's trace, and what small gradients gain by it."""

from itertools import pairwise

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.twin import Twin
from tests.zero.training import MODELS, batches, bits, flat_state
from zerosim.numerics.loss_scale import Dynamic

ADAM = zs.optim.Adam(lr=0.01)
PATTERN = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1]
HUGE = (np.full((2, 3), 6e4, np.float32), np.full((2, 2), -6e4, np.float32))  # its gradient overflows fp16


def patterned(model, ranks):
    """Batches of which those steps overflow that the pattern says, on one rank alone, each time another."""
    data = batches(model, ranks, 1, len(PATTERN))
    for step, overflow in enumerate(PATTERN):
        if overflow:
            data[step][step % ranks] = [HUGE]
    return data


def trained(rank, model, data, **options):
    """The results of all steps, and the state after each of them."""
    engine, seen = zs.Engine(rank, model, ADAM, **options), []
    for step in data:
        result = engine.step(step[rank.index])
        seen.append((result, engine.loss_scale.scale, flat_state(engine)))
    return seen


@pytest.mark.parametrize(("stage", "how"), covering(
    zs.STAGES, [("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed-legacy", 2)]))
def test_the_engine_follows_the_trace_of_the_kind_and_the_twin(stage, how):
    kind, hysteresis = how
    rule = Dynamic(kind, initial=256, window=2, hysteresis=hysteresis)
    model, ranks, policy = MODELS["odd"](), 3, zs.Policy("fp16", loss_scale=rule)
    data, scaler = patterned(model, ranks), rule.start()
    twin = Twin(model, ADAM, ranks, policy, "per_unit", "local_first")
    said = [twin.step(step) for step in data]
    assert [step["skipped"] for step in said] == [bool(overflow) for overflow in PATTERN]
    for seen in zs.Cluster(ranks).run(lambda rank: trained(rank, model, data, stage=stage, policy=policy)):
        scaler = rule.start()
        for (result, scale, _), step, overflow in zip(seen, said, PATTERN, strict=True):
            assert (result.skipped, result.scale) == (bool(overflow), step["scale"])
            scaler.update(bool(overflow))
            assert scale == scaler.scale
        assert bits(seen[-1][2]["master"]) == bits(twin.master)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_skipped_step_changes_nothing_but_the_scale(stage):
    model, ranks = MODELS["odd"](), 3
    data, policy = patterned(model, ranks), zs.Policy("fp16", loss_scale=Dynamic(initial=256, window=2))
    seen = zs.Cluster(ranks).run(lambda rank: trained(rank, model, data, stage=stage, policy=policy))[1]
    for before, now in pairwise(seen):
        same = [bits(before[2][key]) == bits(now[2][key]) for key in ("parameter", "master", "m", "v")]
        assert same == [now[0].skipped] * 4
        assert np.isnan(now[0].norm) == now[0].skipped
        assert now[1] < before[1] if now[0].skipped else now[1] >= before[1]


def test_an_overflow_that_appears_only_in_the_sum_of_finite_gradients_is_seen():
    """Every rank's gradient is finite in fp16; their sum is not."""
    model, ranks = zs.models.MLP((1, 1), bias=False, seed=1), 2
    data = [[[(np.full((1, 1), 2.0**8, np.float32), np.full((1, 1), -(2.0**7), np.float32))] for _ in range(ranks)]]
    for stage in zs.STAGES:
        seen = zs.Cluster(ranks).run(
            lambda rank, s=stage: trained(rank, model, data, stage=s, policy=zs.Policy("fp16"))
        )
        assert [result.skipped for ((result, _, _),) in seen] == [True] * ranks
        alone = zs.Cluster(1).run(lambda rank, s=stage: trained(rank, model, data, stage=s, policy=zs.Policy("fp16")))
        assert not alone[0][0][0].skipped


def test_small_gradients_are_lost_without_scaling_and_kept_with_it():
    model, data = MODELS["odd"](), batches(MODELS["odd"](), 2, 1, 1)
    small = [[[(x * np.float32(1e-6), t * np.float32(1e-6)) for x, t in mine] for mine in step] for step in data]
    moved = {}
    for scale in (1.0, 2.0**16):
        seen = zs.Cluster(2).run(
            lambda rank, s=scale: trained(rank, model, small, policy=zs.Policy("fp16", loss_scale=s))
        )
        moved[scale] = int((seen[0][0][2]["m"] != 0).sum())
    assert moved[1.0] < moved[2.0**16]


def test_bf16_skips_on_inf_without_any_scaling():
    model, ranks = MODELS["odd"](), 3
    data = batches(model, ranks, 1, 3)
    data[1][2] = [(np.full((2, 3), 3e38, np.float32), np.zeros((2, 2), np.float32))]
    seen = zs.Cluster(ranks).run(lambda rank: trained(rank, model, data, stage=2, policy=zs.Policy("bf16")))
    assert [[result.skipped for result, _, _ in of_rank] for of_rank in seen] == [[False, True, False]] * ranks


def test_the_same_step_after_ranks_disagree_on_the_scale_is_stopped():
    model = MODELS["odd"]()
    data = batches(model, 2, 1, 1)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=1, policy=zs.Policy("fp16", loss_scale=Dynamic(initial=256)))
        if rank.index:
            engine.loss_scale.update(True)
        engine.step(data[0][rank.index])

    with pytest.raises(zs.MismatchError, match="loss scale"):
        zs.Cluster(2).run(program)


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_divisor_beyond_fp32_changes_no_bit_of_a_training_run(stage):
    """S·N·k is 2^129 from the first step: S cancels exactly, as any power of two does."""
    model, ranks, found = MODELS["odd"](), 4, {}
    data = [[[(x / 64, target / 64) for x, target in mine] for mine in step] for step in batches(model, ranks, 2, 3)]
    for scale in (1.0, 2.0**126):
        seen = zs.Cluster(ranks).run(lambda rank, scale=scale: trained(
            rank, model, data, stage=stage, policy=zs.Policy(loss_scale=scale)))
        found[scale] = [(result.norm, result.skipped, bits(state["master"]))
                        for of_rank in seen for result, _, state in of_rank]
    assert found[1.0] == found[2.0**126]
    assert all(norm > 1e-6 and not skipped for norm, skipped, _ in found[1.0])
