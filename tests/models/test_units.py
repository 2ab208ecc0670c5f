"""Units: pure, without weights in what they keep, with first values that do not depend on the cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.contexts import bits_of, context, normal, recorded
from zerosim.models import MLP, HalfSquaredError, LinearUnit, Recompute


@pytest.mark.parametrize(("activation", "nbytes"), [
    (None, {"linear.y": 2 * 15}), ("relu", {"linear.y": 2 * 15, "relu.bits": 2}),
    ("gelu", {"linear.y": 2 * 15, "gelu.y": 2 * 15})])
def test_a_unit_allocates_its_output_and_what_its_activation_keeps(activation, nbytes):
    (ctx, recorder), unit = recorded("bf16"), LinearUnit("one", 4, 5, activation, bias=False)
    unit.forward(ctx, {"one.weight": normal("bf16", (4, 5))}, normal("bf16", (3, 4)))
    assert {name: math.prod(shape) * dtype.itemsize for _, name, shape, dtype in recorder.allocated} == nbytes


def test_the_first_unit_alone_computes_no_gradient_of_its_input():
    ctx, x, w = context("fp16"), normal("fp16", (3, 4)), normal("fp16", (4, 4))
    for unit in MLP([4, 4, 4], bias=False).units:
        y, kept = unit.forward(ctx, {f"{unit.name}.weight": w}, x)
        assert (unit.backward(ctx, {f"{unit.name}.weight": w}, kept, y)[0] is None) == (unit.name == "layer0")


@given(st.lists(st.integers(0, 35), max_size=6))
def test_first_values_have_the_same_bits_however_they_are_cut(cuts):
    unit = MLP([5, 7, 2], seed=1).units[0]
    borders = [0, *sorted(cuts), 35]
    pieces = [unit.initial("layer0.weight", lo, hi - lo) for lo, hi in pairwise(borders)]
    assert {piece.dtype for piece in pieces} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(bits_of(np.concatenate(pieces)), bits_of(unit.initial("layer0.weight", 0, 35)))


def test_first_values_depend_on_the_seed_and_on_the_name():
    first, second = MLP([64, 64, 64], seed=1).units
    weight = first.initial("layer0.weight", 0, 4096)
    assert (bits_of(weight) != bits_of(second.initial("layer1.weight", 0, 4096))).any()
    assert (bits_of(weight) != bits_of(MLP([64, 64], seed=2).units[0].initial("layer0.weight", 0, 4096))).any()


def test_weights_have_deviation_one_over_the_root_of_their_inputs_and_biases_are_zero():
    unit = MLP([64, 256], seed=0).units[0]
    weight = unit.initial("layer0.weight", 0, 64 * 256)
    # 16384 draws: the deviation is known to 1/sqrt(2·16384) = 0.6 %, the mean to 1/8/128; four times that
    # here.
    assert abs(weight.std() * 8 - 1) < 0.022
    assert abs(weight.mean()) < 4 / 8 / 128
    assert not unit.initial("layer0.bias", 0, 256).any()


def test_a_model_knows_its_parameters_in_the_order_of_the_flat_vector():
    model = MLP([3, 4, 2])
    assert model.shapes == {"layer0.weight": (3, 4), "layer0.bias": (4,), "layer1.weight": (4, 2), "layer1.bias": (2,)}
    assert model.parameter_count == 12 + 4 + 8 + 2 == sum(unit.parameter_count for unit in model.units)
    assert model.units[1].names == ("layer1.weight", "layer1.bias")
    assert model.loss == HalfSquaredError()
    assert [unit.activation for unit in model.units] == ["relu", None]
    assert [unit.first for unit in model.units] == [True, False]
    assert MLP([3, 4, 2], bias=False).parameter_count == 20


# -- recomputation policies as values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "policy"), [
    ("none", Recompute()), ("block", Recompute(1)), ("segment(1)", Recompute(1)), ("segment(2)", Recompute(2)),
    (" segment( 12 ) ", Recompute(12)), ("sub_block", Recompute(None, "sub_block")),
    ("selective", Recompute(None, "selective")), ("tiled", Recompute(None, "tiled")),
    ("block+selective", Recompute(1, "selective")), ("segment(3) + tiled", Recompute(3, "tiled"))])
def test_a_text_names_a_policy_which_prints_as_such_a_text(text, policy):
    assert Recompute.parse(text) == policy
    assert Recompute.parse(str(policy)) == policy


@given(st.integers(1, 12), st.integers(0, 40))
def test_segments_hold_every_unit_once_and_in_order_and_the_last_may_be_shorter(k, unit_count):
    segments = Recompute(k).segments(unit_count)
    assert [unit for run in segments for unit in run] == list(range(unit_count))
    assert all(len(run) == k for run in segments[:-1])
    assert Recompute().segments(unit_count) == []
