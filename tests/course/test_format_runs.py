"""The small training in many formats: what it records is what the engine does, and the unit of its data is no trick."""

import numpy as np
import pytest

import zerosim as zs
from tests.cases import covering
from zerosim.course.precision_runs import (
    EPSILON,
    FORMAT_RUN_LR,
    POLICIES,
    SMALL_UNIT,
    format_run,
    format_run_network,
    resting_batch,
)
from zerosim.models.units import first_weights, one_pass
from zerosim.numerics.loss_scale import Dynamic

SCALED = zs.Policy("fp16", loss_scale=Dynamic(initial=2.0**20, window=3))


def by_steps(rank, policy, steps, unit):
    """The same training by the engine's own step."""
    optimizer = zs.optim.Adam(FORMAT_RUN_LR, epsilon=EPSILON * unit**2)
    engine = zs.Engine(rank, format_run_network(), optimizer, stage=2, policy=policy)
    return [engine.step([tuple(array * np.float32(unit) for array in resting_batch(step, rank.index))])
            for step in range(steps)]


@pytest.mark.parametrize(("ranks", "how"), covering([2, 1, 5, 3], [
    ("fp32", 1.0), ("bf16 without a master", 1.0), ("scaled", SMALL_UNIT), ("scaled", 1.0)]), ids=str)
def test_a_run_is_what_the_engine_does_step_by_step(ranks, how):
    name, unit = how
    policy = SCALED if name == "scaled" else POLICIES[name]
    run = format_run(policy, 12, ranks=ranks, unit=unit)
    found = zs.Cluster(ranks).run(by_steps, policy, 12, unit)
    assert run.scales == tuple(result.scale for result in found[0])
    assert run.skipped == tuple(result.skipped for result in found[0])
    for step, loss in enumerate(run.losses):
        assert loss == sum(results[step].losses[0] for results in found) / ranks / unit**2


def test_ranks_see_other_data():
    assert not np.array_equal(resting_batch(0, 0)[0], resting_batch(0, 1)[0])
    assert np.array_equal(resting_batch(0)[0], resting_batch(0, 0)[0])


def test_who_overflowed_and_who_was_skipped_is_what_gradients_from_the_same_weights_say():
    """As long as every step is skipped, the weights are the first ones."""
    run, seen = format_run(zs.Policy("fp16", loss_scale=Dynamic(initial=2.0**20)), 10, ranks=3), set()
    for step in range(run.skipped.index(False)):
        flat = []
        for rank in range(3):
            network = format_run_network()
            found = one_pass(network, first_weights(network), zs.Policy("fp16"), *resting_batch(step, rank),
                             run.scales[step])
            flat.append(np.concatenate([gradient.ravel() for gradient in found.gradients.values()]))
        finite = [np.isfinite(gradient).all() for gradient in flat]
        assert run.overflowed[step] == tuple(rank for rank in range(3) if not finite[rank])
        seen.add(len(run.overflowed[step]))
        if all(finite):  # the sum overflows, in fp16, where no addend does
            assert np.abs(np.sum([gradient.astype(np.float64) for gradient in flat], axis=0)).max() > 65519
    assert seen == {0, 1, 3}


@pytest.mark.parametrize(("name", "ranks"), covering(
    ["fp32", "bf16 with a master", "bf16 without a master"], [1, 3]))
def test_in_a_smaller_unit_formats_of_a_wide_range_learn_the_same_to_the_bit(name, ranks):
    one, other = (format_run(POLICIES[name], 25, ranks=ranks, unit=unit) for unit in (1.0, SMALL_UNIT))
    assert np.array(one.losses).tobytes() == np.array(other.losses).tobytes()


def test_in_a_smaller_unit_fp16_loses_gradients_unless_the_loss_is_scaled():
    losses = {(name, unit): format_run(POLICIES[name], 60, unit=unit).losses[-1]
              for name in POLICIES if name.startswith("fp16") for unit in (1.0, SMALL_UNIT)}
    exact = format_run(POLICIES["fp32"], 60).losses[-1]
    assert losses["fp16 with a master, S = 1", 1.0] == pytest.approx(exact, rel=0.01)
    assert losses["fp16 with a master and loss scaling", SMALL_UNIT] == pytest.approx(exact, rel=0.01)
    assert losses["fp16 with a master, S = 1", SMALL_UNIT] > 1.05 * exact
