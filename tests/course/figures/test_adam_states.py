"""Adam's m and v at rest in fewer bits: when v stands still, what is stored, and what the trainings come to."""

from importlib import import_module

import numpy as np
import pytest

import zerosim as zs
from tests.display import seen
from zerosim.course import lost_updates, precision_runs

lesson = import_module("zerosim.course.figures.adam_states")  # the package's name of it is the function


def moved(v, ratio, fmt):
    """v (n,) of a format after a step of Adam whose g² is the ratio times v, in the format again."""
    w, m, moving = np.zeros((3, len(v)), np.float32)
    moving[:] = v
    zs.optim.Adam().update(zs.optim.UpdateContext(lesson.KERNELS), w, np.sqrt(ratio * v, dtype=np.float32),
                           {"m": m, "v": moving}, 1)
    return zs.round_to(moving, fmt)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_v_stands_still_just_where_the_ratios_say(fmt):
    drawn = np.random.default_rng(7)
    v = zs.round_to(np.exp2(drawn.uniform(-10, 10, 1000)).astype(np.float32), fmt)
    v[:20] = 2.0 ** np.arange(-10, 10)  # whose gap below is half of that above
    low, high = np.array([lost_updates.standing_ratios(fmt, float(one), 0.999) for one in v]).T
    ratio = np.where(drawn.random(len(v)) < 0.3, np.maximum(low, 0) * drawn.uniform(0.9, 1.1, len(v)),
                     high * drawn.uniform(0.5, 1.5, len(v))).astype(np.float32)
    clear = (np.abs(ratio - low) > 1e-3) & (np.abs(ratio - high) > 1e-3)  # fp32 has its own roundings
    after = moved(v, ratio, fmt)
    assert ((after == v) == ((low < ratio) & (ratio < high)))[clear].all()
    assert (after > v)[clear & (ratio > high)].all()
    assert (after < v)[clear & (ratio < low)].all()
    assert clear.mean() > 0.95


def test_no_gradient_makes_v_smaller_in_bf16_and_with_beta2_of_0_95_or_in_fp16_one_does():
    numbers = [2.0**power * (1 + place / 128) for power in (-40, 0, 5) for place in range(128)]
    assert all(lost_updates.standing_ratios("bf16", v, 0.999)[0] < 0 for v in numbers)
    assert (moved(np.array(numbers, np.float32), np.float32(0), "bf16") == np.array(numbers, np.float32)).all()
    assert all(2.9 < lost_updates.standing_ratios("bf16", v, 0.999)[1] < 5 for v in numbers)
    assert all(lost_updates.standing_ratios("bf16", v, 0.95)[0] > 0.9 for v in numbers)
    assert all(0.5 < lost_updates.standing_ratios("fp16", 1 + place / 1024, 0.999)[0] < 0.8 for place in range(1024))


def test_in_fp16_v_never_leaves_0_for_gradients_up_to_0_0054_and_the_step_is_huge():
    for g, stands in ((0.0054, True), (0.0055, False)):
        assert (max(lesson.v_of(["fp16"], [g] * 50)["fp16"]) == 0) is stands


def test_on_plain_arrays_it_trains_as_engines_whose_policies_have_these_formats_of_state_bit_for_bit():
    def program(rank, rest, steps):
        policy = zs.Policy("fp64", state=rest)
        engine = zs.Engine(rank, precision_runs.format_run_network(), zs.optim.Adam(1e-3), policy=policy)
        return [engine.step([precision_runs.samples(step, 1)]).losses[0] for step in range(steps)]

    for rest, mine in lesson.losses_of(["fp32", "fp16", "bf16"], 1e-3, 1, 30).items():
        assert (len(mine) < 30) is (rest == "fp16")
        mine = mine[:len(mine) - (rest == "fp16")]  # the last one is NaN, or far away
        assert zs.Cluster(1).run(program, rest, len(mine))[0] == mine


def test_the_dynamic_numbers_are_256_and_an_element_is_the_nearest_multiple_of_its_blocks_largest():
    for name, numbers in lesson.DYNAMIC.items():
        assert (len(set(numbers.tolist())), numbers[-1], 0 in numbers) == (256, 1, True)
        assert (numbers.min() < 0) == (name == "m")
        x = np.random.default_rng(3).standard_normal(600).astype(np.float32) ** (1 if name == "m" else 2)
        back = lesson.RESTS["8 bits, dynamic"](name, x, 1)
        for here in (slice(0, 256), slice(256, 512), slice(512, 600)):
            largest = np.abs(x[here]).max()
            distances = np.abs(x[here, None] / largest - numbers)
            assert np.abs(back[here] / largest - x[here] / largest) == pytest.approx(distances.min(axis=1), abs=1e-6)
    assert lesson.RESTS["8 bits, dynamic"]("v", np.zeros(3, np.float32), 1).tolist() == [0, 0, 0]
    assert np.isnan(lesson.RESTS["8 bits, dynamic"]("v", np.float32([1, np.nan]), 1)).all()


def test_v_is_of_gradients_of_1_and_then_of_a_tenth_and_stochastic_rounding_goes_up_as_often_as_the_number_is_near():
    v = 0.0
    for g in [1.0] * 50 + [0.1] * 50:
        v = 0.999 * v + 0.001 * g * g
    assert lesson.adam_states_data(50).v["fp32"][-1] == pytest.approx(v, rel=1e-5)
    found = lesson.RESTS["bf16, stochastic"]("v", np.full(1000, 1 + 2.0**-9, np.float32), 1)
    assert {*found.tolist()} == {1, 1 + 2.0**-7}
    assert 200 < np.count_nonzero(found > 1) < 300


@pytest.mark.slow
def test_bf16_learns_more_slowly_stochastic_rounding_as_fp32_and_fp16_and_linear_8_bits_explode():
    data = seen.data_of("adam-states")
    half = len(data.v["fp32"]) // 2
    assert data.v["fp32"][-1] < data.v["fp32"][half - 1] / 4
    assert set(data.v["bf16"][half:]) == {data.v["bf16"][half - 1]} == {0.25}
    for rest, bound in (("fp16", 0.25), ("bf16, stochastic", 0.25)):
        assert data.v[rest][-1] == pytest.approx(data.v["fp32"][-1], rel=bound)
    for condition in data.losses:
        assert 1.02 < data.curve(condition, "bf16")[-1] < 1.1
        assert data.curve(condition, "bf16, stochastic")[-1] == pytest.approx(1, abs=0.02)
        for rest in ("fp16", "8 bits, linear"):
            assert len(data.losses[condition][rest]) < 10
    dynamic = [data.curve(condition, "8 bits, dynamic") for condition in data.losses]
    assert (dynamic[0][-1] < 1, dynamic[1]) == (True, [])


def test_trainings_may_all_explode_and_one_in_the_last_step():
    explode, go_on = [1.0] * 49 + [101.0], [1.0] * 50
    losses = {0: lesson.losses_of(["fp32", "bf16"], 1e3, 0, 60), 1: {"fp32": go_on, "bf16": explode},
              2: {"fp32": explode[-2:], "bf16": go_on}}
    data = lesson.AdamStates({}, {(1e3, seed): found for seed, found in losses.items()})
    assert data.exploded((1e3, 0)) == ["fp32 explodes at step 2", "bf16 explodes at step 2"]
    assert data.exploded((1e3, 1)) == ["bf16 explodes at step 50"]
    assert data.exploded((1e3, 2)) == ["fp32 explodes at step 2"]
    assert [data.curve(condition, "bf16") for condition in data.losses] == [[], [], []]
