"""What rests in 16 bits: without a master training stalls, with moments in fp16 it explodes; with a master neither."""

import math

import numpy as np
import pytest

import zerosim as zs
from zerosim.course.precision_runs import BATCHES, RESTING_LR, policies, rested, resting_batch

STEPS = 120


@pytest.fixture(scope="module")
def found():
    runs = [rested(policy, STEPS) for policy in policies("fp16")]
    return {(run.compute, run.master, run.state, run.matmul): run for run in runs}


def test_each_format_is_tried_with_a_master_without_and_with_state_of_its_own(found):
    assert list(found) == [
        ("fp32", "fp32", "fp32", None),
        ("fp16", "fp32", "fp32", None), ("fp16", "fp16", "fp32", None), ("fp16", "fp32", "fp16", None),
        ("bf16", "fp32", "fp32", None), ("bf16", "bf16", "fp32", None), ("bf16", "fp32", "bf16", None),
        ("bf16", "fp32", "fp32", "fp8")]
    assert [policy.compute for policy in policies("bf16")] == ["fp32", *["bf16"] * 4]
    assert [policy.compute for policy in policies("fp32")] == ["fp32", *["bf16"] * 4]


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_with_an_fp32_master_16_bit_training_keeps_up_with_fp32(found, fmt):
    exact, mixed = found["fp32", "fp32", "fp32", None], found[fmt, "fp32", "fp32", None]
    assert mixed.last_loss == pytest.approx(exact.last_loss, rel=0.01)  # measured: 0.1 %, from the roundings' noise
    assert mixed.moved_share > 0.95


def test_without_a_master_bf16_stalls_where_a_master_does_not(found):
    pure, mixed = found["bf16", "bf16", "fp32", None], found["bf16", "fp32", "fp32", None]
    assert pure.moved_share < 0.15 < 0.95 < mixed.moved_share
    fallen = [run.first_loss - run.last_loss for run in (pure, mixed)]
    assert fallen[0] < fallen[1] / 2


def test_without_a_master_fp16_stands_still_in_fewer_weights_since_its_gaps_are_8_times_as_small(found):
    shares = [found[fmt, fmt, "fp32", None].moved_share for fmt in ("bf16", "fp16")]
    assert shares[0] < shares[1] < 0.9


def test_adams_moments_in_fp16_make_training_explode_and_in_bf16_do_not(found):
    exploded, kept = found["fp16", "fp32", "fp16", None], found["bf16", "fp32", "bf16", None]
    assert not exploded.last_loss <= 100 * found["fp16", "fp32", "fp32", None].last_loss
    assert kept.last_loss == pytest.approx(found["bf16", "fp32", "fp32", None].last_loss, rel=0.01)


def test_fp8_products_train_too_and_come_to_something_else(found):
    fp8, mixed = found["bf16", "fp32", "fp32", "fp8"], found["bf16", "fp32", "fp32", None]
    assert fp8.last_loss != mixed.last_loss
    assert fp8.last_loss == pytest.approx(mixed.last_loss, rel=0.05)  # measured: 1 %


def test_losses_are_means_over_the_first_the_middle_and_the_last_round_of_the_data():
    policy, losses = zs.Policy("bf16"), []

    def program(rank):
        model = zs.models.MLP((8, 32, 32, 2), seed=0)
        engine = zs.Engine(rank, model, zs.optim.Adam(RESTING_LR), stage=3, policy=policy)
        return [engine.step([resting_batch(step)]).losses[0] for step in range(60)]

    losses = zs.Cluster(1).run(program)[0]  # the stage changes no bit
    run = rested(policy, 60)
    assert (run.first_loss, run.middle_loss, run.last_loss) == tuple(
        float(np.mean(losses[start:start + 20])) for start in (0, 20, 40))


def test_the_data_come_round_again():
    np.testing.assert_array_equal(resting_batch(3)[0], resting_batch(3 + BATCHES)[0])
    assert not np.array_equal(resting_batch(3)[0], resting_batch(4)[0])
    assert all(array.dtype == np.float32 for array in resting_batch(0))


def test_weights_of_nan_have_not_moved():
    run = rested(zs.Policy("fp8_e4m3", state="fp8_e4m3"), 2 * BATCHES)
    assert math.isnan(run.last_loss)
    assert run.moved_share == 0


def test_less_than_one_round_of_the_data_is_refused():
    with pytest.raises(ValueError, match="asked for 19 steps; one round of the data takes 20, so ask for that or more"):
        rested(zs.Policy(), 19)
