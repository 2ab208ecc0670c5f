"""Units whose backward is found: their gradients are slopes, their bits those of the layers, their arrays counted.

Under every stage, format and option, and without data, the model "autodiff" of `tests/zero` is drawn with the others.
"""

import gc
import operator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.cases import named
from tests.models.contexts import bits_of, normal, recorded
from tests.support import assert_refused, literally
from zerosim.models import GPT, PRESETS, Context, Model, autodiff, first_weights, one_pass

NANO = PRESETS["gpt-nano"]
# What a unit computes from w (4, 4), row (4,), one (1, 1), table (5, 4) and x (2, 3, 4): every operation, broadcast or
# not, from the left and from the right, of constants too.
OPERATIONS = {
    "add": lambda w, x: x + w["row"] + 1,
    "the same operand twice": lambda w, x: (y := x * w["row"]) * y + y,
    "subtract": lambda w, x: 2 - (x - w["one"] - np.arange(4)),
    "multiply": lambda w, x: w["row"] * x * w["one"] * 0.5,
    "divide": lambda w, x: 3 / (x / (w["row"] * w["row"] + 1) + 5) / 2,
    "negative and power": lambda w, x: (-x) ** 3 * w["row"] ** 2.0,
    "exp and log": lambda w, x: np.log(np.exp(x) + w["row"].exp()).log(),
    "sqrt and tanh": lambda w, x: np.sqrt((x * x + 1).sqrt()) * (x * w["one"]).tanh(),
    "maximum": lambda w, x: autodiff.maximum(x, w["row"]) + np.maximum(0.3, x),
    "relu and gelu": lambda w, x: x.relu() * w["row"].gelu() + x.gelu(exact=True),
    "rows times a matrix": lambda w, x: x @ w["w"] @ w["w"].T,
    "a constant times a matrix": lambda w, x: np.ones((2, 4), np.float32) @ w["w"],
    "stacks of matrices": lambda w, x: x @ (x * w["row"]).transpose(0, 2, 1),
    "linear": lambda w, x: autodiff.linear(x.reshape(6, 4), w["w"], w["row"]),
    "linear of weights alone": lambda w, x: autodiff.linear(w["table"], w["w"]).gelu() + w["table"].relu(),
    "sums": lambda w, x: x.sum() + (x * w["row"]).sum((0, -1)) * x.sum(1, keepdims=True)[0, 0, :3] + w["table"].sum(),
    "means": lambda w, x: x.mean(-1, keepdims=True) * x.mean(axis=0) - w["w"].mean(),
    "parts": lambda w, x: autodiff.concatenate([x[:, 1:, ::2], w["w"][None, :2, 1:3] * x[1, :, :2][None, :2]], 0),
    "layernorm": lambda w, x: autodiff.layernorm(x, w["row"], w["one"].reshape(1) * w["row"]),
    "layernorm of weights": lambda w, x: autodiff.layernorm(w["table"], w["row"], w["row"]),
    "softmax": lambda w, x: autodiff.softmax(x * w["row"]) * x,
    "attention": lambda w, x: autodiff.attention(x @ autodiff.concatenate([w["w"], w["w"] * w["row"], w["w"].T]), 2),
    "a weight itself": lambda w, x: w["w"],
    "the input itself": lambda w, x: x,
}
SHAPES = {"w": (4, 4), "row": (4,), "one": (1, 1), "table": (5, 4)}


def weights_of(unit, format="fp64"):
    return {name: normal(format, shape, seed) for seed, (name, shape) in enumerate(unit.shapes.items())}


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=list(OPERATIONS))
def test_the_gradient_of_an_operation_is_the_slope_and_no_weight_is_saved_for_it(function):
    unit = autodiff.AutodiffUnit("unit", SHAPES, function)
    zs.testing.check_gradients(unit, normal("fp64", (2, 3, 4), 9), weights=weights_of(unit), elements=4)


def test_rows_of_a_table_by_tokens_have_the_slope_as_gradient_also_of_a_tied_table():
    def embed(w, tokens):
        return (autodiff.embedding(tokens, w["wte"]) * w["gain"]).reshape(6, 3)

    model = Model([autodiff.TokenUnit("embed", {"wte": (5, 3), "gain": (3,)}, embed),
                   autodiff.AutodiffUnit("head", {"w": (3, 3)}, lambda w, x: x @ w["w"] @ w["embed.wte"].T,
                                ties={"embed.wte": "embed"})])
    weights = {name: normal("fp64", shape, 5) for name, shape in model.shapes.items()}
    tokens = np.array([[4, 0, 4], [1, 1, 2]])
    zs.testing.check_gradients(model, tokens, normal("fp64", (6, 5), 7), weights=weights, elements=None)


def test_no_gradient_goes_through_what_is_detached():
    unit, x = autodiff.AutodiffUnit("unit", {"w": (4,)}, lambda w, x: x.detach() * x + w["w"].detach()), np.arange(4.0)
    ctx, w = Context.standalone(zs.Policy("fp64")), {"unit.w": np.ones(4)}
    y, saved = unit.forward(ctx, w, x)
    dx, gradients = unit.backward(ctx, w, saved, np.ones(4))
    assert (y.tolist(), dx.tolist(), gradients) == ([1, 2, 5, 10], [0, 1, 2, 3], {"unit.w": None})


def test_dropout_draws_the_same_mask_backward_by_its_name():
    unit = autodiff.AutodiffUnit("unit", {"w": (4,)}, lambda w, x: autodiff.dropout(x * w["w"], 0.5, "here"))
    zs.testing.check_gradients(unit, normal("fp64", (3, 4)), weights={"unit.w": normal("fp64", (4,))}, elements=None)


# -- bits, and bytes ---------------------------------------------------------------------------------------------------


def block(w, x):
    """A block of GPT-2 (Radford et al. 2019, section 2.3), its operations in the order of the one by hand."""
    def linear(x, name):
        return autodiff.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    h = autodiff.layernorm(x, w["ln_1.weight"], w["ln_1.bias"])
    x = linear(autodiff.attention(linear(h, "attention.qkv"), NANO.heads), "attention.projection") + x
    h = autodiff.layernorm(x, w["ln_2.weight"], w["ln_2.bias"])
    return linear(linear(h, "ffn.up").gelu(), "ffn.down") + x


def test_attention_keeps_its_probabilities_whatever_blocks_keep():
    unit, (ctx, recorder) = autodiff.AutodiffUnit("u", {}, lambda w, x: autodiff.attention(x, 2)), recorded("bf16")
    unit.forward(replace(ctx, keep="tiled"), {}, normal("bf16", (2, 3, 12)))
    assert [name for _, name, *_ in recorder.allocated] == ["attention.o", "attention.p"]


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_a_transformers_block_has_the_bits_of_the_one_by_hand(format):
    by_hand, weights = GPT(NANO), first_weights(GPT(NANO))
    units = [unit if "block" not in unit.name else autodiff.AutodiffUnit(
        unit.name, {name.removeprefix(f"{unit.name}."): shape for name, shape in unit.shapes.items()}, block)
        for unit in by_hand.units]
    rng = np.random.default_rng(0)
    tokens, target = rng.integers(0, NANO.vocabulary, (2, 3, NANO.context))
    found = [one_pass(model, weights, format, tokens, target, 64.0)
             for model in (by_hand, Model(units, by_hand.loss))]
    assert found[0].loss == found[1].loss
    for name, gradient in found[0].gradients.items():
        np.testing.assert_array_equal(bits_of(found[1].gradients[name]), bits_of(gradient), name)


def test_each_operation_rounds_once_to_the_compute_format():
    """ml_dtypes' own additions and products are made in fp32 and rounded once."""
    unit = autodiff.AutodiffUnit("unit", {"w": (6,), "b": (6,)}, lambda w, x: (x * w["w"] + w["b"]) * 0.1 - x)
    w, x = weights_of(unit, "bf16"), normal("bf16", (50, 6), 3)
    y, _ = unit.forward(Context.standalone(zs.Policy("bf16")), w, x)
    tenth = ((x * w["unit.w"] + w["unit.b"]).astype(np.float32) * np.float32(0.1)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits_of(y), bits_of(tenth - x))


def test_a_product_and_a_bias_round_twice_where_linear_rounds_once():
    x, policy = normal("bf16", (50, 8), 3), zs.Policy("bf16")
    once = autodiff.AutodiffUnit("unit", {"w": (8, 6), "b": (6,)}, lambda w, x: autodiff.linear(x, w["w"], w["b"]))
    twice = replace(once, function=lambda w, x: x @ w["w"] + w["b"])
    w = weights_of(once, "bf16")
    found = [unit.forward(Context.standalone(policy), w, x)[0] for unit in (once, twice)]
    product = (x.astype(np.float32) @ w["unit.w"].astype(np.float32)).astype(x.dtype)
    assert (bits_of(found[0]) != bits_of(found[1])).any()
    np.testing.assert_array_equal(bits_of(found[1]), bits_of(product + w["unit.b"]))


def test_every_array_is_counted_and_dies_with_its_last_use_without_the_garbage_collector():
    def function(w, x):
        return (x @ w["w"]).tanh() * x + 1.0

    unit = autodiff.AutodiffUnit("unit", {"w": (4, 4)}, function)
    ctx, recorder = recorded("bf16")
    gc.disable()
    try:
        y, saved = unit.forward(ctx, weights_of(unit, "bf16"), normal("bf16", (3, 4), 1))
        assert {name for _, name, *_ in recorder.allocated} == {
            "linear.y", "autodiff.tanh", "autodiff.multiply", "autodiff.constant", "autodiff.add"}
        assert +recorder.now == {"activation": 2 * 12 + y.nbytes}  # tanh's result, and y; x is the caller's
        gradients = unit.backward(ctx, weights_of(unit, "bf16"), saved, y)
        assert recorder.flops > 2 * 2 * 3 * 4 * 4
        del gradients, saved, y
        assert not +recorder.now
    finally:
        gc.enable()


# -- refusals ----------------------------------------------------------------------------------------------------------


def changed(change):
    def function(w, x):
        change(x)
        return x

    return function


def item(x):
    x[0] = 1


def former(w, x, kept=[]):  # noqa: B006  # kept from one forward to the next
    kept.append(x)
    return x + kept[0]


SAYS = {
    "np.sin": lambda w, x: np.sin(x),
    "np.add.reduce": lambda w, x: np.add.reduce(x),
    "np.sum": lambda w, x: np.sum(x),
    "np.concatenate": lambda w, x: np.concatenate([x, x]),
    "np.multiply was asked to write into an array": lambda w, x: np.multiply(x, x, out=np.ones((3, 4))),
    "a power, np.power too, is tracked where the exponent is a number": lambda w, x: np.power(2.0, x),
    "be written into": changed(item),
    **{f"be changed in place by {sign}": changed(change) for sign, change in (
        ("+=", lambda x: operator.iadd(x, 1)), ("*=", lambda x: operator.imul(x, 2)),
        ("**=", lambda x: operator.ipow(x, 2)), ("@=", lambda x: operator.imatmul(x, x)))},
    "be compared": lambda w, x: x > 0,
    "decide a branch": lambda w, x: x if x else -x,
    "become a NumPy array": lambda w, x: np.asarray(x),
    "become a number": lambda w, x: x + float(x),
    "must return a tracked array ... found ndarray": lambda w, x: np.ones(3),
    "where the exponent is a number; write (np.log(x) * y).exp() for x to the power y": lambda w, x: x ** x,
    "np.floor_divide is not tracked": lambda w, x: x // 2,
    "indexed by integers, slices, ... and None, found": lambda w, x: x[[0, 1]],
    "add takes tracked arrays, numbers and NumPy arrays, found str": lambda w, x: x + "1",
}
VALUES = {
    "found a constant array in float64; round it first, with astype(np.float32)": lambda w, x: x + np.ones(4),
    "add was given operands of shapes (3, 4) and (4, 4), which cannot be broadcast": lambda w, x: x + w["w"],
    "@ was given operands of shapes (1, 3, 4) and (2, 4, 3)": lambda w, x: x[None] @ autodiff.concatenate(
        [x[None].transpose(0, 2, 1)] * 2, 0),
    "over axis=2 was asked of an array of shape (3, 4); name each of its 2 axes once": lambda w, x: x.sum(2),
    "concatenate was given parts of shapes [(3, 4), (4,)] and axis=-1": lambda w, x: autodiff.concatenate([x, x[0]]),
    "tracked array of another forward": former,
    "the function of a unit asked for w['wight']; there are w, weight; did you mean 'weight'?": lambda w, x: w["wight"],
}


@pytest.mark.parametrize(("said", "function", "error"), [
    *((said, function, TypeError) for said, function in SAYS.items()),
    *((said, function, ValueError) for said, function in VALUES.items())], ids=lambda value: named(value)[:30])
def test_whatever_would_not_be_tracked_is_refused_by_its_name(said, function, error):
    unit, ctx = autodiff.AutodiffUnit("unit", {"w": (4, 4), "weight": (4,)}, function), Context.standalone(zs.Policy())
    w, x = weights_of(unit, "fp32"), normal("fp32", (3, 4))
    if function is former:
        unit.forward(ctx, w, x)
    assert_refused(lambda: unit.forward(ctx, w, x), literally(said), error)


def test_a_tracked_array_that_outlives_its_forward_and_an_initializer_of_nothing_are_refused():
    left = []
    unit = autodiff.AutodiffUnit("unit", {"w": (4, 4)}, lambda w, x: (left.append(x), x + 1)[1])
    unit.forward(Context.standalone(zs.Policy()), weights_of(unit, "fp32"), normal("fp32", (3, 4)))
    assert_refused(lambda: left[0] + 1, literally("after the forward in which it was made"))
    assert_refused(lambda: replace(unit, initializers={"b": None}), literally(
        "AutodiffUnit('unit') was given initializers for b; its parameters are w"))
    for wrong in ({"parameters": ["w"]}, {"function": 3}):
        assert_refused(lambda wrong=wrong: replace(unit, **wrong), literally(
            "AutodiffUnit('unit') takes shapes by name and a function of w and x, found"))
    for shape in (3, (3.0,), (-1, 2), "ab", [3]):
        assert_refused(lambda shape=shape: replace(unit, parameters={"c": shape}), literally(
            f"AutodiffUnit('unit') was given {shape!r} for the shape of c; a shape is a tuple of lengths, as (3,) or"))
