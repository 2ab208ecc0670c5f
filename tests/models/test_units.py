"""Units: pure, without weights in what they keep, with first values that do not depend on the cut."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.contexts import bits_of, context, normal, recorded, slope
from tests.models.steps import initial_weights, loss_and_gradients, loss_of
from zerosim.models import MLP, HalfSquaredError, LinearUnit, Model
from zerosim.models.units import Constants, Normal

ACTIVATIONS = [None, "relu", "gelu"]


def unit_and_arrays(name: str, activation: str | None) -> tuple[LinearUnit, dict[str, np.ndarray], list[np.ndarray]]:
    unit = LinearUnit("one", 4, 5, activation)
    w = {"one.weight": normal(name, (4, 5), 1), "one.bias": normal(name, (5,), 2)}
    return unit, w, [normal(name, (3, 4), 3), normal(name, (3, 5), 4)]


def arrays_in(kept: Any) -> Iterator[np.ndarray]:
    if isinstance(kept, np.ndarray):
        yield kept
    elif isinstance(kept, tuple):
        for part in kept:
            yield from arrays_in(part)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_of_a_unit_is_the_slope_of_its_forward(activation):
    ctx = context("fp64")
    unit, w, (x, c) = unit_and_arrays("fp64", activation)

    def weighted() -> float:
        return float(np.sum(unit.forward(ctx, w, x)[0] * c))

    dx, grads = unit.backward(ctx, w, unit.forward(ctx, w, x)[1], c)
    # Differences of step 1e-5 err by about 1e-10 here; no element of h lies that near to ReLU's kink.
    for found, of in [(dx, x), (grads["one.weight"], w["one.weight"]), (grads["one.bias"], w["one.bias"])]:
        np.testing.assert_allclose(found, slope(weighted, of), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(3, 2), (3, 4, 2), (3, 5, 4, 2), (2, 3, 3, 3, 1)])
def test_gradients_of_an_mlp_of_any_depth_are_the_slopes_of_its_loss(activation, bias, widths):
    ctx, model = context("fp64"), MLP(widths, activation=activation, bias=bias, seed=3)
    w = initial_weights(ctx, model)
    for array in w.values():
        array += 0.1  # biases of 0 and dead ReLUs would leave too much untested
    x, target = normal("fp64", (6, widths[0]), 5), normal("fp64", (6, widths[-1]), 6)
    _, grads = loss_and_gradients(ctx, model, w, x, target)
    assert list(model.shapes) == list(w)
    assert grads.keys() == w.keys()
    for name, found in grads.items():
        np.testing.assert_allclose(found, slope(lambda: loss_of(ctx, model, w, x, target), w[name]), atol=1e-8)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_uses_the_weights_it_is_handed_and_nothing_kept_of_forward(name, activation):
    ctx = context(name)
    unit, w, (x, dy) = unit_and_arrays(name, activation)
    _, kept = unit.forward(ctx, w, x)
    dx, grads = unit.backward(ctx, w, kept, dy)

    gathered = {key: array.copy() for key, array in w.items()}
    _, kept = unit.forward(ctx, gathered, x)
    assert not any(np.shares_memory(part, array) for part in arrays_in(kept) for array in gathered.values())
    for array in gathered.values():
        array.fill(np.nan)
    dx_again, grads_again = unit.backward(ctx, w, kept, dy)
    np.testing.assert_array_equal(bits_of(dx), bits_of(dx_again))
    for key in grads:
        np.testing.assert_array_equal(bits_of(grads[key]), bits_of(grads_again[key]))
    assert np.isnan(unit.backward(ctx, gathered, kept, dy)[0].astype(np.float32)).any(), "dx must read the weights"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_interleaved_forwards_do_not_disturb_each_other(activation):
    ctx = context("bf16")
    unit, w, (x, dy) = unit_and_arrays("bf16", activation)
    other = normal("bf16", (3, 4), 9)
    alone = unit.backward(ctx, w, unit.forward(ctx, w, x)[1], dy)
    before = x.copy(), dy.copy()
    _, kept = unit.forward(ctx, w, x)
    _, kept_of_other = unit.forward(ctx, w, other)
    unit.backward(ctx, w, kept_of_other, dy)
    interleaved = unit.backward(ctx, w, kept, dy)
    np.testing.assert_array_equal(bits_of(alone[0]), bits_of(interleaved[0]))
    for key in w:
        np.testing.assert_array_equal(bits_of(alone[1][key]), bits_of(interleaved[1][key]))
    for array, copy in zip((x, dy), before, strict=True):
        np.testing.assert_array_equal(bits_of(array), bits_of(copy))


@pytest.mark.parametrize(("activation", "arrays"), [
    (None, [("linear.y", 2 * 15)]), ("relu", [("linear.y", 2 * 15), ("relu.bits", 2)]),
    ("gelu", [("linear.y", 2 * 15), ("gelu.y", 2 * 15)]),
])
def test_a_unit_allocates_its_output_and_what_its_activation_keeps(activation, arrays):
    ctx, recorder = recorded("bf16")
    unit, w, (x, _) = unit_and_arrays("bf16", activation)
    y, kept = unit.forward(ctx, w, x)
    assert [(name, math.prod(shape) * dtype.itemsize) for _, name, shape, dtype in recorder.allocated] == arrays
    assert {kind for kind, *_ in recorder.allocated} == {"activation"}
    assert kept[0] is x, "the input is kept itself, and charged to whoever made it"
    assert y.shape == (3, 5)


def test_the_first_unit_returns_no_input_gradient_and_the_same_gradients():
    ctx = context("fp32")
    unit, w, (x, dy) = unit_and_arrays("fp32", "relu")
    first = LinearUnit("one", 4, 5, "relu", first=True)
    dx, grads = first.backward(ctx, w, first.forward(ctx, w, x)[1], dy)
    _, expected = unit.backward(ctx, w, unit.forward(ctx, w, x)[1], dy)
    assert dx is None
    for key in w:
        np.testing.assert_array_equal(bits_of(grads[key]), bits_of(expected[key]))


def test_gradients_are_written_where_the_context_says():
    ctx = context("fp16")
    unit, w, (x, dy) = unit_and_arrays("fp16", None)
    bucket = np.full(25, np.nan, np.float16)
    places = {"one.weight": bucket[:20].reshape(4, 5), "one.bias": bucket[20:]}
    into_bucket = type(ctx)(ctx.xp, ctx.policy, ctx.kernels, ctx.workspace, ctx.note, lambda unit: places)
    _, grads = unit.backward(into_bucket, w, unit.forward(ctx, w, x)[1], dy)
    expected = unit.backward(ctx, w, unit.forward(ctx, w, x)[1], dy)[1]
    assert grads is places
    np.testing.assert_array_equal(bits_of(bucket), bits_of(np.concatenate([g.reshape(-1) for g in expected.values()])))


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


def test_initializers_replace_the_first_values():
    unit = LinearUnit("one", 2, 2, initializers={"weight": Constants((1, 2, 3, 4)), "bias": Normal(0, 0.0)})
    np.testing.assert_array_equal(unit.initial("one.weight", 1, 2), [2, 3])
    assert not unit.initial("one.bias", 0, 2).any()
    assert unit.initial("one.weight", 2, 0).shape == (0,)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 9), (8, 1), (0, -1)])
def test_first_values_outside_a_parameter_are_refused(start, count):
    with pytest.raises(ValueError, match=rf"^one\.weight was asked for {count} elements from {start}; it has 8, so ask "
                                         "for a piece that lies inside"):
        LinearUnit("one", 2, 4).initial("one.weight", start, count)


def test_first_values_of_an_unknown_parameter_are_refused():
    with pytest.raises(ValueError, match=r"unit 'one' was asked for the first values of 'one\.gain'; its parameters "
                                         r"are one\.weight, one\.bias"):
        LinearUnit("one", 2, 4).initial("one.gain", 0, 1)


@pytest.mark.parametrize(("keywords", "text"), [
    ({"inputs": 0}, r"was given inputs=0; inputs is a whole number, 1 or more"),
    ({"outputs": 2.0}, r"was given outputs=2\.0; outputs is a whole number"),
    ({"inputs": True}, r"was given inputs=True"),
    ({"activation": "swish"}, r"was given activation='swish'; the activations are None, 'relu', 'gelu'"),
    ({"bias": False, "initializers": {"bias": Normal(0, 1.0)}}, "was given initializers for bias; its parameters are "
                                                                "weight"),
])
def test_a_linear_unit_refuses_what_it_cannot_be(keywords, text):
    with pytest.raises(ValueError, match=rf"^LinearUnit\('one'\) {text}"):
        LinearUnit(**({"name": "one", "inputs": 2, "outputs": 2} | keywords))


def test_a_model_knows_its_parameters_in_the_order_of_the_flat_vector():
    model = MLP([3, 4, 2])
    assert model.shapes == {"layer0.weight": (3, 4), "layer0.bias": (4,), "layer1.weight": (4, 2), "layer1.bias": (2,)}
    assert model.parameter_count == 12 + 4 + 8 + 2 == sum(unit.parameter_count for unit in model.units)
    assert model.units[1].names == ("layer1.weight", "layer1.bias")
    assert model.loss == HalfSquaredError()
    assert [unit.activation for unit in model.units] == ["relu", None]
    assert [unit.first for unit in model.units] == [True, False]
    assert MLP([3, 4, 2], bias=False).parameter_count == 20


def test_a_model_refuses_two_units_or_two_parameters_of_one_name():
    one = LinearUnit("one", 2, 2)
    with pytest.raises(ValueError, match="more than one unit named 'one'; state is kept by name, so give each unit a"):
        Model([one, LinearUnit("one", 2, 1)])

    class Borrower(LinearUnit):
        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return one.shapes

    with pytest.raises(ValueError, match=r"more than one parameter named 'one\.weight', 'one\.bias'; state is kept"):
        Model([one, Borrower("two", 2, 2)])


def test_a_model_without_units_is_refused():
    with pytest.raises(ValueError, match="Model was asked for with no units; give it one unit or more"):
        Model([])


@pytest.mark.parametrize("widths", [(), (3,), None, 3, "ab", {1: 2, 3: 4}])
def test_an_mlp_of_fewer_than_two_widths_is_refused(widths):
    with pytest.raises(ValueError, match=r"MLP was asked for widths .*: the width of the input and that of each layer"):
        MLP(widths)


@pytest.mark.parametrize(("keywords", "text"), [
    ({"seed": None}, "MLP was given seed=None; seed is a whole number"),
    ({"seed": 1.5}, "MLP was given seed=1.5"),
    ({"activation": "rely"}, "MLP was given activation='rely'; the activations are None, 'relu', 'gelu'")])
def test_an_mlp_refuses_a_seed_or_activation_that_is_none_even_where_no_layer_would_use_it(keywords, text):
    with pytest.raises(ValueError, match=text):
        MLP([2, 2], **keywords)


def test_an_mlp_names_the_layer_whose_width_is_refused():
    with pytest.raises(ValueError, match=r"LinearUnit\('layer0'\) was given outputs=0"):
        MLP([3, 0, 2])
