"""Loss scaling through the engine: who skips, what a skipped step changes, where scaling ends, what a scale does."""

from itertools import pairwise

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.twin import Twin
from tests.zero.training import ADAM, BF16, HUGE, MODELS, alone, batches, bits, flat_state, outcome, run
from zerosim.models import MLP
from zerosim.numerics import loss_scale

ODD = MODELS["odd"]()
PATTERN = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1]
RULES = [("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed-legacy", 2)]
OPTIONS = [{}, {"bucket_nbytes": 6}, {"overlap": True, "bucket_nbytes": 10}, {"recompute": "block", "prefetch": 1}]


def patterned(ranks, micro_batches):
    """Batches of which those steps overflow that the pattern says: in one micro-batch of one rank, each time others."""
    data = batches(ODD, ranks, micro_batches, len(PATTERN))
    for step, overflow in enumerate(PATTERN):
        if overflow:
            data[step][step % ranks][step % micro_batches] = HUGE
    return data


EIGHT = zs.Policy("fp16", loss_scale=loss_scale.Dynamic(initial=8.0))


def trained(rank, model, data, **options):
    """The results of all steps, and the scale and the state after each of them."""
    engine, seen = zs.Engine(rank, model, ADAM, **options), []
    for step in data:
        result = engine.step(step[rank.index])
        seen.append((result, engine.loss_scale.scale, flat_state(engine)))
    return seen


# -- who skips --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "how", "options"), covering(zs.STAGES, RULES, OPTIONS), ids=str)
def test_an_overflow_anywhere_skips_the_step_of_all_by_the_trace_of_the_rule_and_changes_nothing_else(
        stage, how, options):
    rule = loss_scale.Dynamic(how[0], initial=256, window=2, hysteresis=how[1])
    policy, data = zs.Policy("fp16", loss_scale=rule), patterned(3, 3)
    twin = Twin(ODD, ADAM, 3, policy, "per_unit", "local_first" if stage < 2 else "reduce_first")
    said = [twin.step(step) for step in data]
    assert [step["skipped"] for step in said] == [bool(overflow) for overflow in PATTERN]
    for seen in zs.Cluster(3).run(lambda rank: trained(rank, ODD, data, stage=stage, policy=policy, **options)):
        scaler = rule.start()
        for (result, scale, _), step in zip(seen, said, strict=True):
            assert (result.skipped, result.scale) == (step["skipped"], step["scale"])
            assert np.isnan(result.norm) == result.skipped
            scaler.update(result.skipped)
            assert scale == scaler.scale
        for before, now in pairwise(seen):
            same = [bits(before[2][key]) == bits(now[2][key]) for key in ("parameter", "master", "m", "v")]
            assert same == [now[0].skipped] * 4
        assert bits(seen[-1][2]["master"]) == bits(twin.master)


def test_a_skipped_step_leaves_no_mark_and_bf16_skips_on_inf_without_any_scaling():
    data = batches(ODD, 3, 1, 3)
    for policy, culprit in ((zs.Policy("fp16", loss_scale=8.0), HUGE), (BF16, (
            np.full((2, 3), 3e38, np.float32), np.zeros((2, 2), np.float32)))):
        with_it = [data[0], [data[1][0], data[1][1], [culprit]], data[2]]
        for stage in zs.STAGES:
            found, clean = (run(ODD, of, stage=stage, policy=policy) for of in (with_it, [data[0], data[2]]))
            assert [result["skipped"] for result in found] == [[False, True, False]] * 3
            assert bits(found[0]["master"]) == bits(clean[0]["master"])


@pytest.mark.parametrize(("stage", "culprit"), covering(zs.STAGES, range(4)))
def test_ranks_that_own_nothing_hear_of_an_overflow_and_are_heard_and_count_the_same_steps(stage, culprit):
    model = MODELS["fewer_than_ranks"]()  # two parameters
    good, bad = batches(model, 4, 1, 2)
    bad[culprit] = [(np.full((2, 1), 6e4, np.float32), np.full((2, 1), -6e4, np.float32))]

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=EIGHT)
        skipped = [engine.step(step[rank.index]).skipped for step in (good, bad, good)]
        return skipped, engine.loss_scale.scale, engine.steps_taken

    assert list(zs.Cluster(4).run(program)) == [([False, True, False], 4.0, 2)] * 4


def test_an_overflow_of_the_sum_the_quotient_or_the_scaled_loss_gradient_is_seen():
    one = MLP((1, 1), bias=False, seed=1)
    data = [[[(np.full((1, 1), 2.0**8, np.float32), np.full((1, 1), -(2.0**7), np.float32))] for _ in range(2)]]
    far = [[[(np.full((2, 3), 1e3, np.float32), np.full((2, 2), 3e38, np.float32))]]]
    for stage in zs.STAGES:
        every, single = (run(one, of, stage=stage, policy=zs.Policy("fp16")) for of in (data, [data[0][:1]]))
        assert [result["skipped"] for result in every] == [[True]] * 2, "each rank's gradient is finite"
        assert single[0]["skipped"] == [False]
        quotient = run(ODD, far, stage=stage, policy=zs.Policy(loss_scale=2.0**-100))[0]
        assert quotient["skipped"] == [True], "the sum fits in fp32; divided by the scale it does not"
        assert np.isfinite(quotient["master"]).all()
        scaled = run(ODD, batches(ODD, 2, 1, 1), stage=stage, policy=zs.Policy("fp16", loss_scale=2.0**40))
        assert [result["skipped"] for result in scaled] == [[True]] * 2


# -- where scaling ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scaler_that_gives_up_says_so_with_the_rank_changes_nothing_and_the_engine_goes_on(stage):
    good = batches(ODD, 3, 1, 1)[0]
    policy = zs.Policy("fp16", loss_scale=loss_scale.Dynamic("deepspeed", initial=4, window=100))

    def program(rank):
        engine = zs.Engine(rank, ODD, ADAM, stage=stage, policy=policy)
        before, seen, bad = flat_state(engine)["master"], [], [HUGE] if rank.index == 1 else good[rank.index]
        for _ in range(2):
            seen.append(engine.step(bad).skipped)
        with pytest.raises(loss_scale.LossScaleExhausted,
                           match=r"overflowed at the smallest loss scale, 1: no scale would help"):
            engine.step(bad)
        unchanged = bits(flat_state(engine)["master"]) == bits(before)
        result = engine.step(good[rank.index])
        return seen, unchanged, result.skipped, result.scale, bits(flat_state(engine)["master"]) == bits(before)

    assert list(zs.Cluster(3).run(program)) == [([True, True], True, False, 1.0, False)] * 3


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scale_that_has_come_to_0_skips_every_step_and_raises_nothing(stage):
    """torch's scale after 166 overflows in a row from 2^16: 0/0 is NaN, on good data too."""
    data, policy = batches(ODD, 2, 1, 2), zs.Policy("fp16", loss_scale=loss_scale.Dynamic(initial=2.0**16, window=1))

    def program(rank):
        weights_alone = {"layout": "whole_matrices", "groups": [zs.Group("*.bias", optimizer=ADAM)]}
        for optimizer, options in ((ADAM, {}), (zs.optim.KFAC(), weights_alone)):
            engine = zs.Engine(rank, ODD, optimizer, stage=stage, policy=policy, **options)
            for _ in range(166):
                engine.loss_scale.update(True)
            before = flat_state(engine)["master"]
            results = [engine.step(step[rank.index]) for step in data]
            assert [(result.skipped, result.scale) for result in results] == [(True, 0.0)] * 2
            assert bits(flat_state(engine)["master"]) == bits(before)

    zs.Cluster(2).run(program)


# -- what a scale does to bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "compute"), covering(zs.STAGES, ["fp32", "bf16"]))
def test_a_power_of_two_changes_no_bit_where_nothing_under_or_overflows(stage, compute):
    """Not of a clipped step either; and where S·N·k is 2^129, beyond fp32."""
    data = [[[(x / 64, target / 64) for x, target in mine] for mine in step] for step in batches(ODD, 4, 2, 3)]
    plain, scaled, beyond, other = (
        outcome(ODD, data, stage=stage, policy=zs.Policy(compute, loss_scale=scale), clip_norm=0.01)
        for scale in (1.0, 2.0**12, 2.0**126, 3.0))
    assert plain == scaled
    assert compute == "bf16" or plain == beyond
    assert plain != other, "3·g is rounded"


def test_small_gradients_are_lost_without_scaling_and_kept_with_it():
    small = [[[(x * np.float32(1e-6), t * np.float32(1e-6)) for x, t in mine] for mine in step]
             for step in batches(ODD, 2, 1, 1)]
    lost, kept = (run(ODD, small, policy=zs.Policy("fp16", loss_scale=scale))[0]["m"] for scale in (1.0, 2.0**16))
    assert np.count_nonzero(lost) < np.count_nonzero(kept)


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_scale_that_changes_between_a_steps_backwards_or_before_its_reduce_is_refused(stage, backwards):
    """The gradients of one step are all of one S·loss: with two S their sum has no divisor."""
    data = batches(ODD, 2, 2, 1)[0]

    def program(rank):
        engine = zs.Engine(rank, ODD, ADAM, stage=stage, policy=EIGHT)
        engine.backward(engine.forward(*data[rank.index][0]))
        engine.loss_scale.update(True)
        if backwards == 2:
            engine.backward(engine.forward(*data[rank.index][1]))
        engine.reduce()

    with pytest.raises(ValueError, match="the loss scale went from 8 to 4 within a step"):
        zs.Cluster(2).run(program)


def test_a_scaler_restored_in_another_engine_goes_on_with_the_trace():
    rule, data = loss_scale.Dynamic("deepspeed", initial=256, window=2, hysteresis=2), patterned(1, 1)

    def program(rank, split):
        engines = [zs.Engine(rank, ODD, ADAM, policy=zs.Policy("fp16", loss_scale=rule)) for _ in range(2)]
        scales = []
        for index, step in enumerate(data):
            if index == split:
                engines[1].loss_scale.restore(engines[0].loss_scale.state())
            engines[index >= split].step(step[0])
            scales.append(engines[index >= split].loss_scale.scale)
        return scales

    whole = alone(program, len(data))
    assert all(alone(program, split) == whole for split in range(len(data)))
