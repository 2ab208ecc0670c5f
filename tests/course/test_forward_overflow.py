"""Overflow in backward is cured by a smaller loss scale; overflow in forward by none, but by bf16."""

import math

import numpy as np
import pytest

import zerosim as zs
from zerosim.course.precision_runs import (
    HIGHEST,
    RANKS,
    SCALINGS,
    STEPS,
    has_wide_range,
    large_unit,
    largest_values,
    overflow_batch,
    overflow_network,
    trial,
    trials,
)
from zerosim.models.units import first_weights, one_pass

LARGE = large_unit("fp16")


@pytest.fixture(scope="module")
def found():
    return {(t.unit, t.format, t.scaling): t for t in trials("fp16")}


def test_fp16_holds_every_input_and_target_in_both_units():
    for unit in (1.0, LARGE):
        for step in range(STEPS):
            for rank in range(RANKS):
                x = overflow_batch(unit, step, rank)[0]
                assert np.abs(x).max() <= zs.FORMATS["fp16"].largest
    assert LARGE == 2.0**15


def test_ranks_and_steps_have_data_of_their_own():
    seen = {overflow_batch(1.0, step, rank)[0].tobytes() for step in range(3) for rank in range(RANKS)}
    assert len(seen) == 3 * RANKS


def test_a_dynamic_scale_shrinks_until_backward_fits_and_then_the_loss_falls(found):
    for scaling in ("torch", "deepspeed"):
        one = found[1.0, "fp16", scaling]
        assert 0 < one.skipped < STEPS / 2
        assert one.scale == 2.0 ** (16 - one.skipped)
        assert one.last_loss < one.first_loss / 4


def test_no_loss_scale_cures_an_overflow_in_forward(found):
    for scaling in SCALINGS:
        one = found[LARGE, "fp16", scaling]
        assert one.skipped == (STEPS if one.gave_up is None else one.gave_up - 1)
        assert not math.isfinite(one.first_loss)
    assert found[LARGE, "fp16", "torch"].scale == 2.0 ** (16 - STEPS)


def test_deepspeed_gives_up_at_its_smallest_scale_and_torch_never(found):
    assert {scaling: found[LARGE, "fp16", scaling].gave_up for scaling in SCALINGS} == {
        "S = 1": None, "S = 2^-16": None, "torch": None, "deepspeed": 17}
    assert found[LARGE, "fp16", "deepspeed"].scale == 1


@pytest.mark.parametrize("power", range(-24, 25, 6))
def test_what_comes_out_of_a_layer_does_not_know_of_the_loss_scale(power):
    model = overflow_network()
    seen = one_pass(model, first_weights(model), zs.Policy("fp16"), *overflow_batch(LARGE, 0, 0), 2.0**power)
    assert seen.largest["layer0"] == math.inf
    assert math.isnan(seen.largest["layer1"])  # infinities of both signs, added up
    assert not any(np.isfinite(gradient).all() for gradient in seen.gradients.values())


def test_the_overflow_is_in_the_first_layer_whose_inputs_fp16_holds():
    values = {(v.unit, v.format, v.layer): v.value for v in largest_values("fp16")}
    assert values[LARGE, "fp16", "layer0"] == math.inf
    assert values[LARGE, "fp32", "layer0"] > zs.FORMATS["fp16"].overflow_from
    assert values[1.0, "fp16", "layer0"] == pytest.approx(values[1.0, "fp32", "layer0"], rel=2.0**-10)


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_formats_of_fp32s_range_learn_the_same_in_both_units_bit_for_bit(found, fmt):
    small, large = (found[unit, fmt, "S = 1"] for unit in (1.0, LARGE))
    assert (small.first_loss, small.last_loss, small.skipped) == (large.first_loss, large.last_loss, large.skipped)
    assert small.last_loss < small.first_loss / 4
    values = {(v.unit, v.layer): v.value for v in largest_values(fmt) if v.format == fmt}
    assert all(value * LARGE == values[LARGE, layer] for (unit, layer), value in values.items() if unit == 1.0)


def test_a_format_of_wide_range_is_not_scaled_and_none_is_told_twice():
    assert [(t.unit, t.format, t.scaling) for t in trials("bf16", 2)] == [
        (unit, fmt, "S = 1") for unit in (1.0, LARGE) for fmt in ("bf16", "fp32")]
    assert [has_wide_range(fmt) for fmt in zs.FORMATS] == [True, False, True, False, False]


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_the_other_unit_is_the_largest_in_which_a_format_holds_the_inputs(fmt):
    unit, largest = large_unit(fmt), zs.FORMATS[fmt].largest
    assert unit * HIGHEST <= largest < 2 * unit * HIGHEST
    assert trial(unit, fmt, "S = 2^-16", 3).skipped == 3


def test_a_trial_run_again_is_the_same(found):
    assert trial(1.0, "fp16", "torch") == found[1.0, "fp16", "torch"]
