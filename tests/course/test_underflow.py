"""Gradients too small for a format: each is counted once, as exact arithmetic says; a pass finds what engines do."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.numerics import oracle
from zerosim.course.precision import Binade, Fates, binades, fates, losses_by_tensor, rounded_fates
from zerosim.models.units import first_weights, one_pass
from zerosim.numerics.kernels import NumpyKernels

KERNELS = NumpyKernels()
ANY = st.floats(width=32, allow_nan=False)
TINY = st.floats(-(2.0**-10), 2.0**-10, width=32)


def array(*values):
    return np.array(values, np.float32)


# --- counting -----------------------------------------------------------------------------------------------


def fate(value, row):
    """The name of a count, from an exact value as rounded by the oracle."""
    if not math.isfinite(value):
        return "not_finite"
    return "lost" if value == 0 else "subnormal" if abs(value) < 2.0**row.emin else "normal"


@given(st.lists(ANY | TINY, max_size=12), st.integers(-8, 24), st.sampled_from(oracle.LOW))
def test_every_gradient_is_counted_once_and_as_exact_arithmetic_has_it(values, power, row):
    expected = dict.fromkeys(("zero", "lost", "subnormal", "normal", "not_finite"), 0)
    for value in values:
        with np.errstate(over="ignore"):
            scaled = float(np.float32(value) * np.float32(2.0**power))  # the product is one of fp32
        expected["zero" if value == 0 else fate(oracle.rounded(scaled, row, "nearest"), row)] += 1
    found = rounded_fates(KERNELS, [array(*values)], row.name, 2.0**power)
    assert found == Fates(row.name, 2.0**power, len(values), **expected)


def test_fp16_loses_up_to_2_to_the_minus_25_and_keeps_all_bits_from_its_smallest_normal_number_on():
    half = 2.0**-25  # of the smallest subnormal number, a tie that goes to 0
    above, below = (np.nextafter(np.float32(x), np.float32(to)) for x, to in ((half, 1), (2.0**-14, 0)))
    edges = array(half, above, below, 2.0**-14, 65519.0, 65520.0, 0.0)
    found = rounded_fates(KERNELS, [edges], "fp16")
    # The number just below 2^-14 is rounded up to it, and so is normal.
    assert found == Fates("fp16", 1.0, 7, zero=1, lost=1, subnormal=1, normal=3, not_finite=1)


def test_a_scale_of_2_to_the_k_lifts_by_k_binades():
    g = np.exp2(np.arange(-60, 10, dtype=np.float32))
    for power in (0, 8, 16):
        found = rounded_fates(KERNELS, [g], "fp16", 2.0**power)
        assert (found.lost, found.subnormal) == (-25 + 61 - power, 10)
        assert found.not_finite == max(0, power + 9 - 15)


def test_bf16_loses_nothing_that_a_gradient_is():
    g = np.exp2(np.arange(-100, 10, dtype=np.float32))
    assert rounded_fates(KERNELS, [g], "bf16").normal == len(g)


def test_arrays_of_any_shapes_are_added_up_and_none_is_changed():
    arrays = [array(1e-9, 1.0).reshape(2, 1), array(), array(1e-6).reshape(())]
    before = [x.copy() for x in arrays]
    assert rounded_fates(KERNELS, arrays, "fp16") == Fates("fp16", 1.0, 3, 0, 1, 1, 1, 0)
    for x, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, kept)


def test_what_is_0_in_fp32_is_not_lost_whatever_the_format_found():
    found = fates(KERNELS, [array(0.0, 0.0, 1.0)], [array(0.0, 0.5, 0.0)], "fp32", 1.0)
    assert (found.zero, found.lost, found.lost_share) == (2, 1, 1.0)


def test_nothing_but_zeros_has_a_share_of_0():
    assert rounded_fates(KERNELS, [array(0.0)], "fp16").lost_share == 0


@given(st.lists(ANY, max_size=20))
def test_every_finite_gradient_but_0_lies_in_one_binade(values):
    finite = [abs(value) for value in values if math.isfinite(value) and value]
    found = binades([array(*values)])
    assert sum(binade.elements for binade in found) == len(finite)
    assert [binade.exponent for binade in found] == list(range(
        min((math.frexp(x)[1] for x in finite), default=1) - 1, max((math.frexp(x)[1] for x in finite), default=0)))
    for binade in found:
        assert binade.elements == sum(2.0**binade.exponent <= x < 2.0 ** (binade.exponent + 1) for x in finite)


def test_binades_without_gradients_are_there_too():
    assert binades([array(1.0, -1.5), array(0.3)]) == (Binade(-2, 1), Binade(-1, 0), Binade(0, 2))


def test_the_parameters_that_lose_most_come_first_and_those_that_lose_nothing_not_at_all():
    exact = {"a": array(1e-9, 1.0), "b": array(1.0), "c": array(1e-9, 1e-9)}
    found = {name: g.astype(np.float16) for name, g in exact.items()}
    assert [(t.name, t.elements, t.lost) for t in losses_by_tensor(KERNELS, exact, found, "fp16", 1.0)] == [
        ("c", 2, 2), ("a", 2, 1)]


# --- one pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_finds_the_bits_that_an_engine_reduces(fmt, tied):
    model, policy, scale = zs.models.GPT("gpt-nano", tied=tied), zs.Policy(fmt, loss_scale=64.0), 64.0
    rng = np.random.default_rng(0)
    x, target = rng.integers(0, 17, (2, 3, 8))

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=0.1), policy=policy)
        tape = engine.forward(x, target)
        engine.backward(tape)
        engine.reduce()
        return tape.loss, {name: engine.state(name)["gradient"].reshape(shape) for name, shape in model.shapes.items()}

    loss, gradients = zs.Cluster(1).run(program)[0]
    found = one_pass(model, first_weights(model), policy, x, target, scale)
    assert found.loss == loss
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in found.gradients.items():
        np.testing.assert_array_equal(gradient.astype(np.float32) / np.float32(scale), gradients[name])


def test_a_pass_sees_the_largest_output_of_each_unit_and_where_backward_begins():
    model = zs.models.MLP([3, 4, 2], seed=1)
    x, target = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    found = one_pass(model, first_weights(model), zs.Policy(), x, target[:, :2], 4.0)
    w = first_weights(model)
    hidden = np.maximum(x @ w["layer0.weight"], 0)
    y = hidden @ w["layer1.weight"]
    assert found.largest == pytest.approx({"layer0": hidden.max(), "layer1": np.abs(y).max()}, rel=1e-6)
    np.testing.assert_allclose(found.output_gradient, 4 * (y - target[:, :2]) / 5, rtol=1e-5, atol=1e-6)


def test_neither_the_weights_nor_the_data_of_a_pass_are_changed():
    model, (x, target) = zs.models.GPT("gpt-nano"), np.random.default_rng(0).integers(0, 17, (2, 2, 8))
    weights = first_weights(model)
    before = [array.copy() for array in (*weights.values(), x, target)]
    one_pass(model, weights, zs.Policy("fp16"), x, target)
    for array_before, now in zip(before, (*weights.values(), x, target), strict=True):
        np.testing.assert_array_equal(array_before, now)
