"""The context that layers are called with."""

import numpy as np
import pytest

from tests.models.contexts import DTYPES, bits_of, context, recorded
from zerosim.models import Context, LinearUnit
from zerosim.numerics.policy import Policy


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_a_context_allocates_in_the_compute_dtype_of_its_policy(name):
    ctx = Context.standalone(Policy(compute=name))
    assert ctx.dtype == DTYPES[name]
    assert ctx.empty((2, 3)).dtype == DTYPES[name]
    assert ctx.empty((2, 3), dtype=np.uint8).dtype == np.uint8
    assert ctx.wide_dtype == np.float32


def test_empty_charges_the_kind_it_is_told():
    ctx, recorder = recorded("bf16")
    ctx.empty((2, 3))
    ctx.empty(4, "workspace", np.float32, name="scratch")
    assert recorder.allocated == [("activation", "", (2, 3), DTYPES["bf16"]),
                                  ("workspace", "scratch", (4,), np.dtype(np.float32))]


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
        "one.weight": ((2, 3), DTYPES["fp16"]), "one.bias": ((3,), DTYPES["fp16"])}
    assert not any(np.shares_memory(first[name], second[name]) for name in first)
