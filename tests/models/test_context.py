"""The context that layers are called with."""


import numpy as np
import pytest

from tests.models.contexts import bits_of, context, normal, recorded
from tests.ranks.data import FLOATS
from zerosim.models import Context, LinearUnit
from zerosim.numerics import policy


def test_cast_rounds_a_batch_and_leaves_alone_what_is_at_rest_already():
    ctx, recorder = recorded("fp16")
    x = np.array([[0.1, 65520.0]], np.float32)
    y = ctx.cast(x)
    assert recorder.allocated == [("input", "", (1, 2), np.dtype(np.float16))]
    np.testing.assert_array_equal(bits_of(y), bits_of(np.array([[0.1, np.inf]], np.float16)))
    assert ctx.cast(y) is y


def test_a_context_without_ranks_makes_new_gradients_at_every_backward():
    unit = LinearUnit("one", 2, 3)
    ctx = context("fp16")
    first, second = ctx.gradients(unit), ctx.gradients(unit)
    assert {name: (array.shape, array.dtype) for name, array in first.items()} == {
        "one.weight": ((2, 3), FLOATS["fp16"]), "one.bias": ((3,), FLOATS["fp16"])}
    assert not any(np.shares_memory(first[name], second[name]) for name in first)


def test_a_product_notes_its_operations_and_what_it_reads_at_rest():
    ctx, recorder = recorded("bf16")
    a, b, bias, out = (normal("bf16", shape) for shape in [(3, 4), (4, 5), (5,), (3, 5)])
    ctx.matmul(a, b, out, bias=bias)
    wanted = 2 * 3 * 4 * 5 + 3 * 5, 2 * (12 + 20 + 5 + 15)
    assert (recorder.flops, recorder.nbytes) == wanted
    ctx.matmul(ctx.kernels.widen(a), b, again := np.empty_like(out), bias=bias)
    assert (recorder.flops, recorder.nbytes) == tuple(2 * count for count in wanted)
    np.testing.assert_array_equal(bits_of(again), bits_of(out))


@pytest.mark.parametrize(("gradient", "formats"), [
    (None, ("fp8_e4m3", "fp8_e4m3")), ("a", ("fp8_e5m2", "fp8_e4m3")), ("b", ("fp8_e4m3", "fp8_e5m2"))])
def test_the_fp8_experiment_rounds_values_to_e4m3_and_gradients_to_e5m2(gradient, formats):
    ctx, plain = Context.standalone(policy.Policy(compute="bf16", matmul="fp8")), context("bf16")
    a, b = normal("bf16", (6, 7)), normal("bf16", (7, 5), 1)
    found, wanted, unrounded = np.empty((3, 6, 5), FLOATS["bf16"])
    ctx.matmul(a, b, found, gradient=gradient)
    k = plain.kernels
    k.matmul(*(k.quantized(x, name) for x, name in zip((a, b), formats, strict=True)), out=wanted)
    plain.matmul(a, b, unrounded, gradient=gradient)
    np.testing.assert_array_equal(bits_of(found), bits_of(wanted))
    assert (bits_of(found) != bits_of(unrounded)).mean() > 0.5
