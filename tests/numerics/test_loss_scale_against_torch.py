"""The kind `torch` beside PyTorch's own GradScaler, where PyTorch is installed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.numerics.loss_scale import Dynamic

torch = pytest.importorskip("torch", reason="PyTorch is an optional peer, and not installed here")


def of_gradscaler(pattern, initial, window, factor):
    """The scale after each step of a GradScaler whose only gradient is 1, or inf where the pattern says so."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_factor=factor, backoff_factor=1 / factor,
                                  growth_interval=window)
    weight = torch.zeros(1, requires_grad=True)
    optimizer, scales = torch.optim.SGD([weight], lr=1.0), []
    scaler.scale(weight)  # makes its state
    for overflow in pattern:
        weight.grad = torch.tensor([float("inf") if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def ours(pattern, initial, window, factor):
    scaler, scales = Dynamic("torch", initial, window, factor=factor).start(), []
    for overflow in pattern:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


@given(st.lists(st.booleans(), max_size=30), st.sampled_from([1.0, 256.0, 2.0**16, 2.0**126, 2.0**-145]),
       st.integers(1, 4), st.sampled_from([2.0, 4.0]))
def test_the_kind_torch_is_gradscaler_at_both_ends_of_fp32_too(pattern, initial, window, factor):
    if initial < 2.0**-126:  # no scale to begin with; the way there is
        pattern, initial = [True] * 145 + pattern, 1.0
    assert ours(pattern, initial, window, factor) == of_gradscaler(pattern, initial, window, factor)


def test_the_published_pattern_is_gradscalers():
    pattern = [digit == "1" for digit in "000001100001011"]
    assert of_gradscaler(pattern, 256.0, 2, 2.0) == [256, 512, 512, 1024, 1024, 512, 256, 256, 512, 512, 1024, 512, 512,
                                                     256, 128]
