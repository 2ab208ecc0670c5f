"""Loss scaling through the engine, the rest: the end of a scaler, accumulation, options, bits."""


import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from tests.zero.training import MODELS, batches, bits, flat_state
from zerosim.numerics.loss_scale import Dynamic, LossScaleExhausted

ADAM = zs.optim.Adam(lr=0.01)
HUGE = (np.full((2, 3), 6e4, np.float32), np.full((2, 2), -6e4, np.float32))  # its gradient overflows fp16
OPTIONS = [{}, {"bucket_nbytes": 6}, {"overlap": True, "bucket_nbytes": 10}, {"recompute": "block", "prefetch": 1}]


def masters(engine):
    return bits(flat_state(engine)["master"])


# --- overflow on one rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "micro_batch"), covering(zs.STAGES, range(3)))
def test_an_overflow_in_any_micro_batch_of_one_rank_skips_the_step_of_all(stage, micro_batch):
    model, ranks = MODELS["odd"](), 3
    data = batches(model, ranks, 3, 1)[0]
    data[1][micro_batch] = HUGE

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy("fp16", loss_scale=Dynamic(initial=8.0)))
        before = masters(engine)
        result = engine.step(data[rank.index])
        return result.skipped, result.scale, engine.loss_scale.scale, masters(engine) == before

    assert list(zs.Cluster(ranks).run(program)) == [(True, 8.0, 4.0, True)] * ranks


@pytest.mark.parametrize(("stage", "culprit"), covering(zs.STAGES, range(4)))
def test_ranks_that_own_nothing_hear_of_an_overflow_and_are_heard(stage, culprit):
    model, ranks = MODELS["fewer_than_ranks"](), 4  # two parameters
    data = batches(model, ranks, 1, 1)[0]
    data[culprit] = [(np.full((2, 1), 6e4, np.float32), np.full((2, 1), -6e4, np.float32))]

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy("fp16", loss_scale=Dynamic(initial=8.0)))
        return engine.step(data[rank.index]).skipped, engine.loss_scale.scale

    assert list(zs.Cluster(ranks).run(program)) == [(True, 4.0)] * ranks


@pytest.mark.parametrize(("stage", "options"), covering(zs.STAGES, OPTIONS), ids=str)
def test_options_change_neither_which_steps_are_skipped_nor_a_bit_after_them(stage, options):
    model, ranks, pattern = MODELS["odd"](), 3, [0, 1, 0, 0, 1, 0]
    data = batches(model, ranks, 2, len(pattern))
    for step, overflow in enumerate(pattern):
        if overflow:
            data[step][step % ranks][1] = HUGE
    policy = zs.Policy("fp16", loss_scale=Dynamic("deepspeed", initial=64, window=2, hysteresis=2))

    def program(rank, options):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=policy, **options)
        return [(engine.step(step[rank.index]).skipped, engine.loss_scale.scale) for step in data], masters(engine)

    plain, pulled = (zs.Cluster(ranks).run(program, own) for own in ({}, options))
    assert list(plain) == list(pulled)
    assert [skipped for skipped, _ in plain[0][0]] == [bool(overflow) for overflow in pattern]


# --- where scaling ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scaler_that_gives_up_says_so_with_the_rank_changes_nothing_and_the_engine_goes_on(stage):
    model, ranks = MODELS["odd"](), 3
    good = batches(model, ranks, 1, 1)[0]
    policy = zs.Policy("fp16", loss_scale=Dynamic("deepspeed", initial=4, window=100))

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=policy)
        before, seen = masters(engine), []
        for _ in range(2):
            seen.append(engine.step([HUGE] if rank.index == 1 else good[rank.index]).skipped)
        with pytest.raises(LossScaleExhausted, match=r"overflowed at the smallest loss scale, 1: no scale would help"):
            engine.step([HUGE] if rank.index == 1 else good[rank.index])
        unchanged = masters(engine) == before
        result = engine.step(good[rank.index])
        return seen, unchanged, result.skipped, result.scale, masters(engine) == before

    assert list(zs.Cluster(ranks).run(program)) == [([True, True], True, False, 1.0, False)] * ranks


def test_nobody_catches_a_scaler_that_gives_up_and_the_rank_is_named():
    model, policy = MODELS["odd"](), zs.Policy("fp16", loss_scale=Dynamic("deepspeed", initial=1))
    with pytest.raises(ValueError, match=r"smallest loss scale, 1"):
        zs.Cluster(2).run(lambda rank: zs.Engine(rank, model, ADAM, policy=policy).step([HUGE]))


@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_scale_that_has_come_to_0_skips_every_step_and_raises_nothing(stage):
    """torch's scale after 166 overflows in a row from 2^16: 0/0 is NaN, on good data too."""
    model, ranks = MODELS["odd"](), 2
    data = batches(model, ranks, 1, 2)
    policy = zs.Policy("fp16", loss_scale=Dynamic(initial=2.0**16, window=1))

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=policy)
        for _ in range(166):
            engine.loss_scale.update(True)
        before = masters(engine)
        results = [engine.step(step[rank.index]) for step in data]
        return [(result.skipped, result.scale) for result in results], masters(engine) == before

    assert list(zs.Cluster(ranks).run(program)) == [([(True, 0.0)] * 2, True)] * ranks


# --- what a scale does to bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", zs.STAGES)
def test_a_power_of_two_changes_no_bit_where_nothing_under_or_overflows(stage, compute):
    model, ranks = MODELS["odd"](), 3
    data = batches(model, ranks, 2, 3)

    def program(rank, scale):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy(compute, loss_scale=scale), clip_norm=0.5)
        results = [engine.step(step[rank.index]) for step in data]
        return [result.norm for result in results], [result.losses for result in results], masters(engine)

    plain, scaled = (list(zs.Cluster(ranks).run(program, scale)) for scale in (1.0, 2.0**12))
    assert plain == scaled
    assert plain != list(zs.Cluster(ranks).run(program, 3.0))  # 3·g is rounded


@pytest.mark.parametrize("stage", zs.STAGES)
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_scale_that_changes_between_a_steps_backwards_or_before_its_reduce_is_refused(stage, backwards):
    """The gradients of one step are all of one S·loss: with two S their sum has no divisor."""
    model = MODELS["odd"]()
    data = batches(model, 2, 2, 1)[0]

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=zs.Policy("fp16", loss_scale=Dynamic(initial=8.0)))
        engine.backward(engine.forward(*data[rank.index][0]))
        engine.loss_scale.update(True)
        if backwards == 2:
            engine.backward(engine.forward(*data[rank.index][1]))
        engine.reduce()

    with pytest.raises(ValueError, match="loss scale"):
        zs.Cluster(2).run(program)


def test_a_scaler_restored_in_another_engine_goes_on_with_the_trace():
    model, rule = MODELS["odd"](), Dynamic("deepspeed", initial=256, window=2, hysteresis=2)
    data = batches(model, 1, 1, 10)
    for step in (2, 3, 7):
        data[step][0] = [HUGE]

    def program(rank, split):
        engines = [zs.Engine(rank, model, ADAM, policy=zs.Policy("fp16", loss_scale=rule)) for _ in range(2)]
        scales = []
        for index, step in enumerate(data):
            if index == split:
                engines[1].loss_scale.restore(engines[0].loss_scale.state())
            engines[index >= split].step(step[0])
            scales.append(engines[index >= split].loss_scale.scale)
        return scales

    whole = zs.Cluster(1).run(program, 10)[0]
    assert all(zs.Cluster(1).run(program, split)[0] == whole for split in range(10))
