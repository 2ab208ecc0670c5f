"""What optimizers and schedules refuse, and in which words: hyperparameters, arrays, states, contexts."""

import inspect
import math
import re
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from tests.optim.papers import CTX, EVERY, KERNELS, WHOLE, factors_of, named, new_state
from tests.support import assert_refused, literally
from zerosim import optim
from zerosim.optim import Slot, UpdateContext, Warmup, WarmupCosine

DECAY_RATES = {"beta1", "beta2", "beta3", "alpha", "momentum"}
POSITIVE = {("Adafactor", "threshold"), ("Shampoo", "epsilon"), ("KFAC", "damping")}
HYPERPARAMETERS = sorted({(type(optimizer), field.name) for optimizer in EVERY for field in fields(optimizer)}, key=str)


def made(kind, name, value):
    return kind(**({"lr": 0.1} | {name: value}))


def test_a_hyperparameter_out_of_its_range_is_refused_by_name():
    for kind, name in HYPERPARAMETERS:
        of = kind.__name__
        if name in DECAY_RATES or (of, name) == ("KFAC", "decay"):
            bad, text = [-0.1, 1.0, 1.5, math.nan, "0.9", None], r"lies in \[0, 1\): at 1 the moment would never leave"
        elif (of, name) in POSITIVE:
            bad, text = [0, -1.0, math.nan, math.inf, "1"], "is a finite number above 0: something is divided by it$"
        elif name in ("iterations", "every"):
            bad, text = [0, -1, 1.5, True, "5"], "is a whole number, 1 or more$"
        elif name == "nesterov":
            bad, text = [1, 0.0, "yes", None], "is True or False$"
        elif name == "iteration":
            bad, text = ["septic", 5], "choose one of cubic, quintic$"
        else:
            bad, text = [-0.1, math.nan, math.inf, "0.1", True, None, 10**400], "is a finite number, 0 or more$"
        for value in bad:
            with pytest.raises(ValueError, match=f"^{of} was given {name}={re.escape(repr(value))}; .*{text}"):
                made(kind, name, value)


def test_the_border_of_a_range_is_allowed():
    for kind, name in HYPERPARAMETERS:
        value = {"nesterov": True, "iteration": "cubic", "iterations": 1, "every": 1}.get(name, np.float64(0))
        value = 1e-30 if (kind.__name__, name) in POSITIVE else value
        assert getattr(made(kind, name, value), name) == value, (kind, name)


@pytest.mark.parametrize("optimizer", EVERY, ids=named)
def test_an_optimizer_is_a_value_and_a_group_replaces_only_what_it_has(optimizer):
    assert optimizer == type(optimizer)(**{field.name: getattr(optimizer, field.name) for field in fields(optimizer)})
    assert optimizer != type(optimizer)(lr=0.75)
    assert hash(optimizer) == hash(optimizer.for_group({}))
    with pytest.raises(AttributeError):
        optimizer.lr = 1.0
    with pytest.raises(ValueError, match=rf"^{named(optimizer)} was given a group with warmth; its hyperparameters ar"):
        optimizer.for_group({"warmth": 1.0})
    with pytest.raises(ValueError, match=rf"^{named(optimizer)} was given lr=-1\.0"):
        optimizer.with_lr(-1.0)


def test_slots_are_what_the_docstrings_say():
    shapes = {"b": (2, 3), "v": (2, 3), "m": (2, 3), "n": (2, 3), "before": (2, 3), "rows": (2,), "columns": (3,),
              "left": (2, 2), "right": (3, 3), "left_basis": (2, 2), "right_basis": (3, 3), "inputs": (2, 2),
              "outputs": (3, 3)}
    expected = {"SGD": "", "Momentum": "b", "AdaGrad": "v", "RMSprop": "v", "Adam": "m v", "AdamW": "m v", "Lion": "m",
                "Adan": "m v n before", "LAMB": "m v", "LARS": "b", "Muon": "b", "Adafactor": "rows columns",
                "Shampoo": "left right", "SOAP": "m v left right left_basis right_basis", "KFAC": "inputs outputs"}
    for optimizer in EVERY:
        assert optimizer.slots((2, 3)) == {
            name: Slot(shapes[name], "bf16" if name == "before" else "fp32")
            for name in expected[named(optimizer)].split()}


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", EVERY, ids=named)
def test_an_update_refuses_arrays_and_a_state_that_are_not_its_own_and_changes_nothing(optimizer):
    """What may be cut anywhere is flat, all else whole: a flat piece of a matrix is refused, and one with gaps."""
    whole = optimizer in WHOLE
    shape, where = (4, 3) if whole else (4,), f"^{named(optimizer)}.update"
    ctx, w = UpdateContext(KERNELS, norms=(1.0, 1.0), factors=factors_of((4, 3))), np.ones(shape, np.float32)
    arrays = {"w": w, "g": w.copy(), **new_state(optimizer, shape)}
    piece, gaps, block = np.ones(7, np.float32), np.ones((4, 6), np.float32)[:, ::2], np.ones((2, 2), np.float32)
    hint = "hand it the whole tensor in its own shape" if whole else "hand it flat fp32 shards"
    refused = [({name: wrong}, 1, f"{where} asked for {name} in float32 of shape {array.shape}, and found {wrong.dtype}"
                f" of shape {wrong.shape}; {hint}") for name, array in arrays.items() if name != "w"
               for wrong in (array.astype(np.float64), np.ones((*array.shape, 1), np.float32))]
    refused.append(({"extra": w}, 1, f"{where} asked for the state ... of a tensor {shape}, and found ...extra"))
    refused += [({}, step, f"{where} was asked for step {step}; count steps from 1, since at 0 the corrections of")
                for step in (0, -1, 1.5, True)]
    refused += [
        ({name: piece if array.shape == shape else array for name, array in arrays.items()}, 1,
         "flat piece ...(7,)...never updates part of ...layout='whole_matrices'"),
        ({"w": gaps}, 2, "step_blocks needs arrays of float32 in C order, got array ... (4, 3) of type float32, with"),
    ] if whole else [({"w": block}, 1, f"{where} asked for w in float32 of shape (4,), and found float32 of shape (2,")]
    for changed, step, said in refused:
        state = arrays | changed
        weights, g = state.pop("w"), state.pop("g")
        assert_refused(partial(optimizer.update, ctx, weights, g, state, step), literally(said))
    assert all((array == 1).all() for array in (w, piece, gaps, block))


# -- single calls -----------------------------------------------------------------------------------------------------

MATRIX, VECTOR, BLOCK = (np.ones(shape, np.float32) for shape in ((3, 2), (3,), (2, 3, 4)))
SQUARE, HUGE = np.ones((2, 2), np.float32), np.full((2, 2), 1e20, np.float32)


def step(optimizer, w, g=None, ctx=CTX):
    optimizer.update(ctx, w, w.copy() if g is None else g, new_state(optimizer, w.shape), 1)


REFUSED = [
    (lambda: step(optim.LAMB(), VECTOR), "^LAMB.update needs the norms of the whole tensor, ... a piece does not know "
     "them. An engine measures them; by hand call with_norms()"),
    (lambda: step(optim.LARS(), VECTOR), "^LARS.update needs the norms of the whole tensor"),
    (lambda: step(optim.KFAC(), MATRIX), "^KFAC.update needs the layer's factors, and found none in its context; an"),
    (lambda: step(optim.KFAC(), MATRIX, ctx=UpdateContext(KERNELS, factors=factors_of((2, 3)))),
     "asked for factors of shapes ((3, 3), (2, 2)) for a weight (3, 2), and found ((2, 2), (3, 3)); hand it those of "
     "the same layer, inputs first"),
    *((lambda shape=shape: optim.KFAC().slots(shape), "KFAC updates the weights of linear layers, ... of shape "
       f"{shape}; it never updates part of a matrix. ...give the others another optimizer by a Group")
      for shape in ((), (3,), (2, 3, 4))),
    *((lambda optimizer=optimizer: step(optimizer, SQUARE, HUGE), "found inf or NaN in a matrix (2, 2): sums of squares"
       " of gradients have left float32's range; clip the gradients, or scale the loss less")
      for optimizer in (optim.Shampoo(), optim.SOAP())),
    *((lambda optimizer=optimizer: step(optimizer, BLOCK), "update asked for w in float32 of shape (24,), and found "
       "float32 of shape (2, 3, 4); hand it flat fp32 shards") for optimizer in (optim.Muon(), optim.Shampoo())),
    (lambda: optim.bytes_per_parameter(optim.Adam(), (0, 3)), "was asked for a tensor of shape (0, 3), which has no e"),
    (lambda: Warmup(0), "^Warmup was given steps=0; steps is a whole number, 1 or more"),
    (lambda: Warmup(True), "^Warmup was given steps=True; steps is a whole number"),
    (lambda: Warmup(2.0), "^Warmup was given steps=2.0; steps is a whole number"),
    (lambda: WarmupCosine(-1, 5), "^WarmupCosine was given warmup=-1; warmup is a whole number, 0 or more"),
    (lambda: WarmupCosine(0, "5"), "^WarmupCosine was given steps='5'; steps is a whole number, 1 or more"),
    (lambda: WarmupCosine(5, 5), "^WarmupCosine was given warmup=5 of steps=5; the cosine needs steps after the"),
    (lambda: WarmupCosine(1, 5, final=-0.1), "^WarmupCosine was given final=-0.1; final is a finite number, 0 or more"),
    (lambda: WarmupCosine(1, 5, final=math.nan), "^WarmupCosine was given final=nan; final is a finite number"),
]


def test_what_cannot_be_is_refused_in_words_that_help():
    for call, text in REFUSED:
        assert_refused(call, literally(text))
    assert all((array == 1).all() for array in (MATRIX, VECTOR, BLOCK, SQUARE))


def test_a_signature_says_in_words_what_a_hyperparameter_may_be():
    assert "lr: Annotated[float, it is a finite number, 0 or more] = 0.001" in \
        str(inspect.signature(optim.Adam)).replace("typing.", "")
