"""What the optimizers refuse, and in which words: hyperparameters, arrays, states, what is missing in a context."""

import math
from dataclasses import fields

import numpy as np
import pytest

from tests.optim.papers import KERNELS, factors_of, new_state
from zerosim import optim
from zerosim.optim import Slot, UpdateContext, with_norms

CTX = UpdateContext(KERNELS)
FLAT = [optim.Momentum(lr=0.1), optim.AdaGrad(), optim.RMSprop(), optim.Lion(), optim.Adan(), optim.LAMB(),
        optim.LARS()]
WHOLE = [optim.Muon(), optim.Adafactor(), optim.Shampoo(), optim.SOAP(), optim.KFAC()]
DECAY_RATES = {"beta1", "beta2", "beta3", "alpha", "momentum"}
POSITIVE = {(optim.Adafactor, "threshold"), (optim.Shampoo, "epsilon"), (optim.KFAC, "damping")}
CHOICES = {"nesterov", "iteration", "iterations", "every"}


def named(value):
    return type(value).__name__ if isinstance(value, optim.Optimizer) else str(value)


def hyperparameters():
    """(class, its lr where it has no default, hyperparameter) for all of them."""
    for optimizer in [*FLAT, *WHOLE]:
        kind = type(optimizer)
        for field in fields(optimizer):
            yield pytest.param(kind, {} if kind is not optim.Momentum else {"lr": 0.1}, field.name,
                               id=f"{kind.__name__}-{field.name}")


@pytest.mark.parametrize(("kind", "settings", "name"), list(hyperparameters()))
def test_a_hyperparameter_out_of_its_range_is_refused_by_name(kind, settings, name):
    if name in DECAY_RATES or (kind, name) == (optim.KFAC, "decay"):
        bad, text = [-0.1, 1.0, 1.5, math.nan, "0.9", None], r"lies in \[0, 1\): at 1 the moment would never leave 0$"
    elif (kind, name) in POSITIVE:
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
        with pytest.raises(ValueError, match=f"^{kind.__name__} was given {name}=.*; .*{text}"):
            kind(**{**settings, name: value})


@pytest.mark.parametrize(("kind", "settings", "name"), list(hyperparameters()))
def test_the_border_of_a_range_is_allowed(kind, settings, name):
    value = {"nesterov": True, "iteration": "cubic", "iterations": 1, "every": 1}.get(name, 0)
    value = 1e-30 if (kind, name) in POSITIVE else value
    assert getattr(kind(**{**settings, name: value}), name) == value


@pytest.mark.parametrize("optimizer", [*FLAT, *WHOLE], ids=named)
def test_an_optimizer_is_a_value(optimizer):
    assert optimizer == type(optimizer)(**{field.name: getattr(optimizer, field.name) for field in fields(optimizer)})
    assert hash(optimizer) == hash(optimizer.for_group({}))
    with pytest.raises(AttributeError):
        optimizer.lr = 1.0


@pytest.mark.parametrize("optimizer", [*FLAT, *WHOLE], ids=named)
def test_a_group_with_an_unknown_hyperparameter_is_refused(optimizer):
    text = rf"^{named(optimizer)} was given a group with warmth; its hyperparameters are lr"
    with pytest.raises(ValueError, match=text):
        optimizer.for_group({"warmth": 1.0})


def test_slots_are_what_the_docstrings_say():
    shapes = {"b": (2, 3), "v": (2, 3), "m": (2, 3), "n": (2, 3), "before": (2, 3), "rows": (2,), "columns": (3,),
              "left": (2, 2), "right": (3, 3), "left_basis": (2, 2), "right_basis": (3, 3), "inputs": (2, 2),
              "outputs": (3, 3)}
    expected = {"Momentum": "b", "AdaGrad": "v", "RMSprop": "v", "Lion": "m", "Adan": "m v n before", "LAMB": "m v",
                "LARS": "b", "Muon": "b", "Adafactor": "rows columns", "Shampoo": "left right",
                "SOAP": "m v left right left_basis right_basis", "KFAC": "inputs outputs"}
    for optimizer in [*FLAT, *WHOLE]:
        assert optimizer.slots((2, 3)) == {
            name: Slot(shapes[name], "bf16" if name == "before" else "fp32")
            for name in expected[named(optimizer)].split()}


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", FLAT, ids=named)
def test_an_elementwise_update_refuses_what_is_not_flat_fp32_and_a_state_that_is_not_its_own(optimizer):
    w, state, ctx = np.ones(4, np.float32), new_state(optimizer, (4,)), UpdateContext(KERNELS, norms=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"asked for g in flat float32, of w's 4 elements, and found float32 of shape"):
        optimizer.update(ctx, w, np.ones(3, np.float32), state, 1)
    with pytest.raises(ValueError, match=rf"^{named(optimizer)}\.update asked for the state .*, and found nothing; al"):
        optimizer.update(ctx, w, w.copy(), {}, 1)
    for step in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=rf"was asked for step {step}; count steps from 1, since at 0 the corr"):
            optimizer.update(ctx, w, w.copy(), state, step)
    assert (w == 1).all()


@pytest.mark.parametrize("optimizer", WHOLE, ids=named)
def test_an_update_of_a_whole_tensor_refuses_what_does_not_fit(optimizer):
    shape, ctx = (4, 3), UpdateContext(KERNELS, factors=factors_of((4, 3)))
    w, state = np.ones(shape, np.float32), new_state(optimizer, shape)
    first = next(iter(state))
    for arrays, text in (
            ((w, np.ones((3, 4), np.float32), state), r"g in float32 of shape \(4, 3\), and found float32 of shape"),
            ((w, w.astype(np.float64), state), r"asked for g in float32 of shape \(4, 3\), and found float64"),
            ((w, w.copy(), {**state, first: np.zeros(1, np.float32)}), rf"asked for {first} in float32 of shape \("),
            ((w, w.copy(), {**state, "extra": w}), r"asked for the state .* of a tensor \(4, 3\), and found .*extra"),
            ((w.reshape(-1), w.reshape(-1), {}), r"asked for the state|was asked for a tensor")):
        with pytest.raises(ValueError, match=text):
            optimizer.update(ctx, *arrays, 1)
    with pytest.raises(ValueError, match=r"was asked for step 0; count steps from 1"):
        optimizer.update(ctx, w, w.copy(), state, 0)
    assert (w == 1).all()


@pytest.mark.parametrize("optimizer", WHOLE, ids=named)
def test_a_matrix_with_gaps_in_memory_is_refused_and_not_silently_left_alone(optimizer):
    w, g = np.ones((4, 6), np.float32)[:, ::2], np.ones((4, 3), np.float32)
    ctx, state = UpdateContext(KERNELS, factors=factors_of((4, 3))), new_state(optimizer, (4, 3))
    with pytest.raises(ValueError, match=r"step_blocks needs arrays of float32 in C order, got array \d \(4, 3\) of ty"
                                         "pe float32, with gaps or in another order"):
        optimizer.update(ctx, w, g, state, 2)  # SOAP moves no weights in its first step


def test_arrays_of_three_dimensions_are_flat_for_optimizers_of_matrices():
    w = np.ones((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"AdamW.update asked for w in flat float32, .* of shape \(2, 3, 4\)"):
        optim.Muon().update(CTX, w, w.copy(), new_state(optim.Muon(), w.shape), 1)


# -- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.LAMB(), optim.LARS()], ids=named)
def test_a_step_without_the_tensors_norms_is_refused(optimizer):
    w = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=rf"^{named(optimizer)}\.update needs the norms of the whole tensor, .* a piece"
                                         r" does not know them\. An engine measures them; by hand call with_norms\(\)"):
        optimizer.update(CTX, w, w.copy(), new_state(optimizer, (3,)), 1)
    assert (w == 1).all()


def test_norms_are_measured_of_what_direction_says_and_for_those_who_need_them():
    w, g = np.array([3, 4], np.float32), np.array([6, 8], np.float32)
    lars = optim.LARS()
    assert with_norms(lars, CTX, w, g, new_state(lars, (2,)), 1).norms == (5.0, 10.0)
    lamb, state = optim.LAMB(weight_decay=0.0, epsilon=0.0), new_state(optim.LAMB(), (2,))
    assert with_norms(lamb, CTX, w, g, state, 1).norms == (5.0, pytest.approx(2**0.5))
    assert state["m"].all(), "the moments have moved"
    assert with_norms(optim.Adam(), CTX, w, g, {}, 1) is CTX


def test_kfac_without_factors_or_with_those_of_another_layer_is_refused():
    w, kfac = np.ones((3, 2), np.float32), optim.KFAC()
    with pytest.raises(ValueError, match=r"KFAC\.update needs the layer's factors, and found none in its context; an"):
        kfac.update(CTX, w, w.copy(), new_state(kfac, (3, 2)), 1)
    with pytest.raises(ValueError, match=r"asked for factors of shapes \(\(3, 3\), \(2, 2\)\) for a weight \(3, 2\), "
                                         r"and found \(\(2, 2\), \(3, 3\)\); hand it those of the same layer, inputs"):
        kfac.update(UpdateContext(KERNELS, factors=factors_of((2, 3))), w, w.copy(), new_state(kfac, (3, 2)), 1)
    assert (w == 1).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)], ids=str)
def test_kfac_takes_weights_alone(shape):
    with pytest.raises(ValueError, match=r"KFAC updates the weights of linear layers, .* of shape \(.*\); it never up.*"
                                         r"give the others another optimizer by a Group$"):
        optim.KFAC().slots(shape)


@pytest.mark.parametrize("optimizer", [optim.Shampoo(), optim.SOAP()], ids=named)
def test_factors_that_overflow_are_refused_with_the_reason(optimizer):
    w, g = np.ones((2, 2), np.float32), np.full((2, 2), 1e20, np.float32)
    with pytest.raises(ValueError, match=r"found inf or NaN in a matrix \(2, 2\): sums of squares of gradients have le"
                                         "ft float32's range; clip the gradients, or scale the loss less"):
        optimizer.update(CTX, w, g, new_state(optimizer, (2, 2)), 1)
