"""Loss scalers: the traces of the machines in use, step by step, and where they end."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics.loss_scale import SCALERS, Dynamic, LossScaleExhausted, Static, scaling_of

PATTERN = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1]
# The scale after each step, from 256 with a window of 2, for overflows in PATTERN.
TRACES = {
    ("torch", 1): "256 512 512 1024 1024 512 256 256 512 512 1024 512 512 256 128",
    ("deepspeed", 1): "256 256 512 512 1024 512 256 256 256 512 512 256 256 128 64",
    ("deepspeed", 2): "256 256 512 512 1024 1024 512 512 512 1024 1024 1024 1024 512 256",
    ("deepspeed-legacy", 2): "256 512 512 1024 1024 1024 512 512 1024 1024 2048 2048 2048 1024 512",
}


def scales(scaler, pattern):
    found = []
    for overflow in pattern:
        scaler.update(bool(overflow))
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(("kind", "hysteresis"), TRACES)
def test_each_kind_follows_its_published_trace(kind, hysteresis):
    scaler = Dynamic(kind, initial=256, window=2, hysteresis=hysteresis).start()
    assert scales(scaler, PATTERN) == [float(x) for x in TRACES[kind, hysteresis].split()]


def test_the_traces_all_differ():
    assert len(set(TRACES.values())) == 4


def computed_from_the_whole_pattern(kind, window, hysteresis, pattern):
    """log2 of the scale's growth after a pattern, from its runs of good and of bad steps, without a state machine."""
    power, spent = 0, 0  # spent: overflows since it last grew
    for overflow, run in groupby(pattern):
        length = len(list(run))
        if overflow:
            power -= max(0, spent + length - (hysteresis - 1)) - max(0, spent - (hysteresis - 1))
            spent += length
        else:
            growths = max(0, length - (kind == "deepspeed")) // window
            power += growths
            spent = 0 if growths else spent
    return power


@given(st.sampled_from(SCALERS), st.integers(1, 4), st.integers(1, 3), st.lists(st.booleans(), max_size=40))
def test_every_step_of_any_pattern_is_what_its_runs_come_to(kind, window, hysteresis, pattern):
    hysteresis = 1 if kind == "torch" else hysteresis
    rule = Dynamic(kind, initial=2.0**60, window=window, hysteresis=hysteresis)
    for step, scale in enumerate(scales(rule.start(), pattern), start=1):
        assert np.log2(scale) - 60 == computed_from_the_whole_pattern(kind, window, hysteresis, pattern[:step])


def test_the_kinds_differ_in_the_first_growth_alone_where_nothing_overflows():
    found = {kind: scales(Dynamic(kind, initial=1, window=3).start(), [0] * 8) for kind in SCALERS}
    assert found["torch"] == found["deepspeed-legacy"] == [1, 1, 2, 2, 2, 4, 4, 4]
    assert found["deepspeed"] == [1, 1, 1, 2, 2, 2, 4, 4]


def test_hysteresis_is_refilled_by_growth_and_by_no_good_step_before_it():
    rule = Dynamic("deepspeed", initial=256, window=3, hysteresis=2)
    assert scales(rule.start(), [1, 0, 1, 0, 1]) == [256, 256, 128, 128, 64]
    assert scales(rule.start(), [1, 0, 0, 0, 0, 1, 1]) == [256, 256, 256, 256, 512, 512, 256]


@pytest.mark.parametrize("at", range(len(PATTERN)))
@pytest.mark.parametrize(("kind", "hysteresis"), TRACES)
def test_a_scaler_that_was_restored_goes_on_as_if_nothing_had_happened(kind, hysteresis, at):
    rule = Dynamic(kind, initial=256, window=2, hysteresis=hysteresis)
    first, second = rule.start(), rule.start()
    scales(first, PATTERN[:at])
    second.restore(first.state())
    assert scales(second, PATTERN[at:]) == scales(first, PATTERN[at:])


@pytest.mark.parametrize("kind", ["deepspeed", "deepspeed-legacy"])
def test_eight_overflows_reach_the_smallest_scale_and_the_ninth_raises(kind):
    scaler = Dynamic(kind, initial=2.0**8, window=2).start()
    assert scales(scaler, [1] * 8)[-1] == 1
    with pytest.raises(LossScaleExhausted, match=r"overflowed at the smallest loss scale, 1: .* or compute in bf16"):
        scaler.update(True)
    assert scaler.scale == 1


def test_a_scaler_that_raised_goes_on_from_its_smallest_scale():
    scaler = Dynamic("deepspeed", initial=1, window=2).start()
    with pytest.raises(LossScaleExhausted):
        scaler.update(True)
    assert scales(scaler, [0, 0, 0, 1]) == [1, 1, 2, 1]


def test_hysteresis_puts_off_the_end_too():
    scaler = Dynamic("deepspeed", initial=1, hysteresis=3).start()
    assert scales(scaler, [1, 1]) == [1, 1]
    with pytest.raises(LossScaleExhausted):
        scaler.update(True)


def test_the_last_step_down_is_as_short_as_the_smallest_scale_wants_it():
    assert scales(Dynamic("deepspeed", initial=8, smallest=3).start(), [1, 1]) == [4, 3]


def test_torch_shrinks_without_end_and_never_raises():
    assert scales(Dynamic(initial=2.0**8).start(), [1] * 20)[-1] == 2.0**-12


def test_torchs_scale_is_an_fp32_number_and_so_comes_to_0_from_which_nothing_grows():
    scaler = Dynamic(initial=2.0**16, window=1).start()
    assert scales(scaler, [1] * 166)[-2:] == [2.0**-149, 0.0]
    assert scales(scaler, [0, 0, 1, 0]) == [0.0] * 4
    assert scales(Dynamic(initial=0.1, factor=3).start(), [1]) == [float(np.float32(float(np.float32(0.1)) / 3))]


@pytest.mark.parametrize("kind", SCALERS)
def test_growth_stops_before_infinity_and_an_overflow_there_is_one_like_any_other(kind):
    scaler = Dynamic(kind, initial=2.0**125, window=1).start()
    assert scales(scaler, [0] * 6)[-1] == 2.0**127
    assert scales(scaler, [1]) == [2.0**126]


def test_a_static_scale_never_moves():
    scaler = Static(8).start()
    assert scales(scaler, [0, 1, 1, 0]) == [8.0] * 4
    other = Static(2).start()
    other.restore(scaler.state())
    assert other.scale == 8


def test_a_number_is_a_static_scale_and_a_rule_is_itself():
    assert scaling_of(4) == Static(4)
    assert scaling_of(Dynamic("deepspeed")) == Dynamic("deepspeed")


@pytest.mark.parametrize(("settings", "text"), [
    ({"kind": "deepsped"}, "no dynamic loss scaler is called 'deepsped'; .*; did you mean 'deepspeed'"),
    ({"initial": 0}, "initial=0 must be a positive finite number"), ({"initial": "2"}, "initial='2' must be"),
    ({"window": 0}, "window=0 must be a number of steps, 1 or more"), ({"window": 1.5}, "window=1.5 must be"),
    ({"window": True}, "window=True must be"), ({"hysteresis": 0}, "hysteresis=0 must be a number of steps, 1 or more"),
    ({"factor": 1}, "factor=1 must be a number above 1"), ({"factor": float("nan")}, "factor=nan must be"),
    ({"factor": float("inf")}, "factor=inf must be"), ({"smallest": -1}, "smallest=-1 must be a positive"),
    ({"hysteresis": 2}, "'torch' shrinks on every overflow, without end, and was given hysteresis=2; take 'deepspeed'"),
    ({"smallest": 0.5}, "'torch' shrinks on every overflow, without end, and was given smallest=0.5; take 'deepspeed'"),
    ({"kind": "deepspeed", "initial": 2, "smallest": 4}, "initial=2 lies below smallest=4; begin at the smallest")])
def test_settings_that_cannot_be_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Dynamic(**settings)


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan"), "8", None, 10**400])
def test_a_static_scale_is_a_positive_number_of_fp32(scale):
    with pytest.raises(ValueError, match=r"loss_scale=.* must be a positive finite number of fp32's normal range"):
        Static(scale)


KINDS = (Static(8), Dynamic("torch"), Dynamic("deepspeed"), Dynamic("deepspeed-legacy"))


@pytest.mark.parametrize("rule", KINDS, ids=str)
def test_a_state_is_plain_data_and_the_next_runs_state(rule):
    scaler = rule.start()
    scaler.update(False)
    state = scaler.state()
    assert {type(value) for value in state.values()} <= {int, float}
    other = rule.start()
    other.restore(state)
    assert other.state() == state


@pytest.mark.parametrize(("rule", "state", "text"), [
    (KINDS[0], {}, "kind 'static' goes on from scale, and was given nothing; restore the state of a scaler of the"),
    (KINDS[0], {"scale": float("nan")}, "scale=nan is no state that a loss scaler of the kind 'static' comes to"),
    (KINDS[1], {"scale": 1.0}, "kind 'torch' goes on from good_steps, scale, and was given scale"),
    (KINDS[1], {"scale": 1.0, "good_steps": -1}, "good_steps=-1 is no state that a loss scaler of the kind 'torch'"),
    (KINDS[1], {"scale": -1.0, "good_steps": 0}, "scale=-1.0 is no state"),
    (KINDS[1], {"scale": 10**400, "good_steps": 0}, "scale=10+ is no state"),
    (KINDS[2], {"scale": 1.0, "good_steps": 0}, "kind 'deepspeed' goes on from overflows_left, scale, steps_since"),
    (KINDS[3], {"scale": 1.0, "steps_since": 2, "overflows_left": 0}, "overflows_left=0 is no state"),
    (KINDS[3], {"scale": 1.0, "steps_since": 1.5, "overflows_left": 1}, "steps_since=1.5 is no state"),
    (KINDS[2], None, "and was given None; restore the state")], ids=str)
def test_a_state_that_no_such_scaler_has_said_is_refused_and_changes_nothing(rule, state, text):
    scaler = rule.start()
    before = scaler.state()
    with pytest.raises(ValueError, match=text):
        scaler.restore(state)
    assert scaler.state() == before
