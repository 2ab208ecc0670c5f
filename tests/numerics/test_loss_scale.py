"""Loss scalers: the traces of the machines in use, step by step, and where they end."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics import loss_scale

SCALERS, Dynamic, Exhausted = loss_scale.SCALERS, loss_scale.Dynamic, loss_scale.LossScaleExhausted
PATTERN = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1]
# The scale after each step, from 256 with a window of 2, for overflows in PATTERN.
TRACES = {
    ("torch", 1): "256 512 512 1024 1024 512 256 256 512 512 1024 512 512 256 128",
    ("deepspeed", 1): "256 256 512 512 1024 512 256 256 256 512 512 256 256 128 64",
    ("deepspeed", 2): "256 256 512 512 1024 1024 512 512 512 1024 1024 1024 1024 512 256",
    ("deepspeed-legacy", 2): "256 512 512 1024 1024 1024 512 512 1024 1024 2048 2048 2048 1024 512",
}


def scales(scaler: loss_scale.LossScaler, pattern) -> list[float]:
    """The scale after each step of the pattern."""
    found = []
    for overflow in pattern:
        scaler.update(bool(overflow))
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(("kind", "hysteresis"), TRACES)
def test_each_kind_follows_its_published_trace(kind: str, hysteresis: int) -> None:
    scaler = Dynamic(kind, initial=256, window=2, hysteresis=hysteresis).start()
    assert scales(scaler, PATTERN) == [float(x) for x in TRACES[kind, hysteresis].split()]
    assert len(set(TRACES.values())) == 4


def computed_from_the_whole_pattern(kind: str, window: int, hysteresis: int, pattern: list[bool]) -> int:
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


@given(st.sampled_from(SCALERS), st.integers(1, 4), st.integers(1, 3), st.lists(st.booleans(), max_size=40),
       st.integers(0, 40))
def test_every_step_of_any_pattern_is_what_its_runs_come_to(kind, window, hysteresis, pattern, at) -> None:
    """Also of a scaler that goes on from another one's state, which is plain data."""
    hysteresis = 1 if kind == "torch" else hysteresis
    rule = Dynamic(kind, initial=2.0**60, window=window, hysteresis=hysteresis)
    first, second = rule.start(), rule.start()
    found = scales(first, pattern[:at])
    second.restore(first.state())
    assert {type(value) for value in first.state().values()} <= {int, float}
    assert second.state() == first.state()
    for step, scale in enumerate(found + scales(second, pattern[at:]), start=1):
        assert np.log2(scale) - 60 == computed_from_the_whole_pattern(kind, window, hysteresis, pattern[:step])


@pytest.mark.parametrize("kind", ["deepspeed", "deepspeed-legacy"])
def test_deepspeeds_kinds_come_down_to_the_smallest_scale_and_raise_at_the_next_overflow(kind: str) -> None:
    """The last step down is as short as the smallest scale wants it; hysteresis puts off the end."""
    scaler = Dynamic(kind, initial=2.0**8, window=2).start()
    assert scales(scaler, [1] * 8)[-1] == 1
    for _ in range(2):
        with pytest.raises(Exhausted, match=r"overflowed at the smallest loss scale, 1: .* compute in bf16"):
            scaler.update(True)
    assert scales(scaler, [0, 0, 0, 1])[-1] == 1
    assert scales(Dynamic(kind, initial=8, smallest=3).start(), [1, 1]) == [4, 3]
    scaler = Dynamic(kind, initial=1, hysteresis=3).start()
    assert scales(scaler, [1, 1]) == [1, 1]
    with pytest.raises(Exhausted):
        scaler.update(True)


def test_torchs_scale_is_an_fp32_number_and_so_comes_to_0_from_which_nothing_grows() -> None:
    """It shrinks without end, and never raises."""
    scaler = Dynamic(initial=2.0**16, window=1).start()
    assert scales(scaler, [1] * 166)[-2:] == [2.0**-149, 0.0]
    assert scales(scaler, [0, 0, 1, 0]) == [0.0] * 4
    scaler.restore(scaler.state())
    assert scales(Dynamic(initial=0.1, factor=3).start(), [1]) == [float(np.float32(float(np.float32(0.1)) / 3))]


@pytest.mark.parametrize("kind", SCALERS)
def test_growth_stops_before_infinity_and_an_overflow_there_is_one_like_any_other(kind: str) -> None:
    scaler = Dynamic(kind, initial=2.0**125, window=1).start()
    assert scales(scaler, [0] * 6)[-1] == 2.0**127
    assert scales(scaler, [1]) == [2.0**126]


def test_a_static_scale_never_moves_and_counts_the_overflows_in_a_row() -> None:
    scaler, other = loss_scale.Static(8).start(), loss_scale.Static(2).start()
    assert (repr(scaler), scaler == other) == ("StaticScaler(scale=8.0)", False)
    for pattern, in_a_row in (([0, 1, 1], 2), ([0], 0), ([1], 1)):
        assert set(scales(scaler, pattern)) == {8.0}
        assert scaler.in_a_row == in_a_row
    other.restore(scaler.state())
    assert (other.scale, other.state()) == (8, {"scale": 8.0})


@pytest.mark.peer
def test_the_kind_torch_is_pytorchs_own_gradscaler_at_both_ends_of_fp32_too() -> None:
    """Where PyTorch is installed."""
    torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")

    @given(st.lists(st.booleans(), max_size=30), st.sampled_from([1.0, 256.0, 2.0**16, 2.0**126, 2.0**-145]),
           st.integers(1, 4), st.sampled_from([2.0, 4.0]))
    def compare(pattern, initial, window, factor) -> None:
        if initial < 2.0**-126:  # no scale to begin with; the way there is
            pattern, initial = [True] * 145 + pattern, 1.0
        scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_factor=factor, backoff_factor=1 / factor,
                                      growth_interval=window)
        weight, wanted = torch.zeros(1, requires_grad=True), []
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight)  # makes its state
        for overflow in pattern:
            weight.grad = torch.tensor([float("inf") if overflow else 1.0])
            scaler.step(optimizer)
            scaler.update()
            wanted.append(scaler.get_scale())
        assert scales(Dynamic("torch", initial, window, factor=factor).start(), pattern) == wanted

    compare()
