"""Loss scalers: the traces of the machines in use, step by step, and where they end."""

import pytest

from zerosim.numerics.loss_scale import Dynamic, LossScaleExhausted, Static, scaling_of

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


@pytest.mark.parametrize(("dialect", "hysteresis"), TRACES)
def test_each_dialect_follows_its_published_trace(dialect, hysteresis):
    scaler = Dynamic(dialect, initial=256, window=2, hysteresis=hysteresis).start()
    assert scales(scaler, PATTERN) == [float(x) for x in TRACES[dialect, hysteresis].split()]


def test_the_traces_all_differ():
    assert len(set(TRACES.values())) == 4


@pytest.mark.parametrize("at", range(len(PATTERN)))
@pytest.mark.parametrize(("dialect", "hysteresis"), TRACES)
def test_a_scaler_that_was_restored_goes_on_as_if_nothing_had_happened(dialect, hysteresis, at):
    rule = Dynamic(dialect, initial=256, window=2, hysteresis=hysteresis)
    first, second = rule.start(), rule.start()
    scales(first, PATTERN[:at])
    second.restore(first.state())
    assert scales(second, PATTERN[at:]) == scales(first, PATTERN[at:])


@pytest.mark.parametrize("dialect", ["deepspeed", "deepspeed-legacy"])
def test_eight_overflows_reach_the_smallest_scale_and_the_ninth_raises(dialect):
    scaler = Dynamic(dialect, initial=2.0**8, window=2).start()
    assert scales(scaler, [1] * 8)[-1] == 1
    with pytest.raises(LossScaleExhausted, match=r"overflowed at the smallest loss scale, 1: .* or compute in bf16"):
        scaler.update(True)


def test_torch_shrinks_without_end_and_never_raises():
    assert scales(Dynamic(initial=2.0**8).start(), [1] * 20)[-1] == 2.0**-12


def test_growth_stops_before_infinity():
    for dialect in ("torch", "deepspeed"):
        assert scales(Dynamic(dialect, initial=2.0**126, window=1).start(), [0] * 5)[-1] == 2.0**127


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
    ({"dialect": "deepsped"}, "no dynamic loss scaler is called 'deepsped'; .*; did you mean 'deepspeed'"),
    ({"initial": 0}, "initial=0 must be a positive finite number"), ({"initial": "2"}, "initial='2' must be"),
    ({"window": 0}, "window=0 must be a number of steps, 1 or more"), ({"window": 1.5}, "window=1.5 must be"),
    ({"factor": 1}, "factor=1 must be a number above 1"), ({"smallest": -1}, "smallest=-1 must be a positive"),
    ({"hysteresis": 2}, "'torch' shrinks on every overflow, and was given hysteresis=2; take 'deepspeed'")])
def test_settings_that_cannot_be_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        Dynamic(**settings)


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan"), "8", None, 10**400])
def test_a_static_scale_is_a_positive_number_of_fp32(scale):
    with pytest.raises(ValueError, match=r"loss_scale=.* must be a positive finite number of fp32's normal range"):
        Static(scale)
