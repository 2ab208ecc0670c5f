"""Each optimizer against its paper, transcribed in float64: the same steps within the rounding of fp32."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.optim import papers
from tests.optim.papers import CTX, KERNELS, factors_of, named, new_state, tensors, updated
from zerosim import optim
from zerosim.optim import UpdateContext

STEPS = 6
SHAPES = {"tall": (6, 4), "wide": (4, 6), "square": (4, 4), "vector": (30,)}
CASES = [
    (optim.SGD(lr=0.1), papers.sgd),
    (optim.Momentum(lr=0.1), papers.momentum),
    (optim.Momentum(lr=0.1, momentum=0.7, nesterov=True), papers.momentum),
    (optim.AdaGrad(lr=0.1), papers.adagrad),
    (optim.RMSprop(lr=0.1, alpha=0.9), papers.rmsprop),
    (optim.Adam(lr=0.1), papers.adam),
    (optim.AdamW(lr=0.1, weight_decay=0.1), papers.adam),
    (optim.Lion(lr=0.1, weight_decay=0.1), papers.lion),
    (optim.Adan(lr=0.1, weight_decay=0.1), papers.adan),
    (optim.LAMB(lr=0.1), papers.lamb),
    (optim.LARS(lr=0.1, trust=0.1, weight_decay=0.1), papers.lars),
    (optim.Adafactor(lr=0.5), papers.adafactor),
    (optim.Adafactor(lr=0.5, threshold=0.5, decay=0.5), papers.adafactor),
    (optim.Muon(lr=0.1, weight_decay=0.1, vector_lr=0.1), papers.muon),
    (optim.Muon(lr=0.1, nesterov=False, iteration="cubic", iterations=9, vector_lr=0.1), papers.muon),
    (optim.Shampoo(lr=0.1), papers.shampoo),
    (optim.SOAP(lr=0.1, every=2), papers.soap),
    (optim.KFAC(lr=0.1), papers.kfac),
]
# Some dozen roundings of 6e-8 a step, on updates of 0.1 to 1 and weights up to 4, six steps, all of one sign: 1e-5.
BOUND = 1e-5
# A factor's small eigenvalues are known to fp32's rounding of the large ones; roots and eigenvectors magnify that.
FACTOR_BOUND = 1e-3


@pytest.mark.parametrize(("optimizer", "paper", "shape"), [
    (optimizer, paper, shape) for optimizer, paper in CASES for shape in SHAPES.values()
    if len(shape) == 2 or paper is not papers.kfac], ids=named)
def test_an_optimizer_follows_its_paper(optimizer, paper, shape):
    if paper is papers.soap and len(shape) == 2:
        shape = (4, 4)  # a gradient of less than full rank leaves eigenvectors open, and fp32 would choose others
    factors = factors_of(shape) if paper is papers.kfac else None
    w, gradients = tensors(shape, STEPS)
    found = updated(optimizer, w, gradients, factors=factors)[0].reshape(shape)
    wide = factors and tuple(factor.astype(np.float64) for factor in factors)
    expected = paper(w.astype(np.float64), gradients.astype(np.float64), optimizer, wide)
    bound = FACTOR_BOUND if len(shape) == 2 and paper in (papers.shampoo, papers.soap) else BOUND
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    assert np.abs(expected - w).max() > 0.02, "it moved by much more than the bound"


@pytest.mark.parametrize("optimizer", [case[0] for case in CASES], ids=named)
def test_the_reference_tells_the_optimizers_apart(optimizer):
    shape, (w, gradients) = SHAPES["square"], tensors(SHAPES["square"], 3)
    factors = factors_of(shape)
    found = updated(optimizer, w, gradients, factors=factors)[0].reshape(shape)
    for other, paper in CASES:
        if other != optimizer:
            expected = paper(w.astype(np.float64), gradients.astype(np.float64), other, factors)
            assert np.abs(found - expected).max() > 10 * FACTOR_BOUND, named(other)


OTHER_VALUES = {"nesterov": True, "iteration": "cubic", "iterations": 2, "every": 3, "epsilon": 0.1,
                "epsilon1": 0.1, "epsilon2": 10.0, "threshold": 0.25, "weight_decay": 0.3, "vector_lr": 0.7,
                "trust": 0.5, "damping": 1.0}
GROUPED = [(optimizer, field.name) for optimizer, _ in CASES[:12] + CASES[13:14] + CASES[15:]
           for field in fields(optimizer) if getattr(optimizer, field.name) is not True]


@pytest.mark.parametrize(("optimizer", "name"), GROUPED, ids=named)
def test_a_group_replaces_each_hyperparameter(optimizer, name):
    """And each hyperparameter changes bits, of a matrix or of a vector."""
    group, changed = {name: OTHER_VALUES.get(name, 0.35)}, False
    assert optimizer.for_group(group) == replace(optimizer, **group)
    for shape in (SHAPES["square"], SHAPES["vector"]):
        if isinstance(optimizer, optim.KFAC) and len(shape) != 2:
            continue
        w, gradients = tensors(shape, STEPS)
        factors = factors_of(shape) if isinstance(optimizer, optim.KFAC) else None
        grouped, plain = (updated(o, w, gradients, factors=factors)[0] for o in (optimizer.for_group(group), optimizer))
        changed = changed or bool((grouped != plain).any())
    assert changed


def test_a_schedules_lr_changes_the_lr_of_muons_vectors_in_proportion():
    w, gradients = tensors((5,), 2)
    muon = optim.Muon(lr=0.02, vector_lr=0.01)
    halved = updated(muon.with_lr(0.01), w, gradients)[0]
    np.testing.assert_array_equal(halved, updated(replace(muon, vector_lr=0.005), w, gradients)[0])
    np.testing.assert_array_equal(updated(muon.with_lr(0.0), w, gradients)[0], w)
    np.testing.assert_array_equal(updated(replace(muon, lr=0.0), w, gradients)[0], w)


# -- what single lines of the papers say ------------------------------------------------------------------------------


def test_lions_step_has_the_size_of_lr_whatever_the_gradients_size_and_none_at_zero():
    w = np.zeros(4, np.float32)
    found, _ = updated(optim.Lion(lr=0.5), w, [np.array([1e-30, -1e30, 0.0, -0.0], np.float32)])
    np.testing.assert_array_equal(found, np.array([-0.5, 0.5, 0, 0], np.float32))


def test_adan_keeps_the_gradient_before_in_16_bit_and_sees_no_difference_in_the_first_step():
    optimizer, (w, gradients) = optim.Adan(), tensors((50,), 3)
    _, state = updated(optimizer, w, gradients[:1])
    assert not state["v"].any()
    np.testing.assert_array_equal(state["before"], gradients[0])
    assert optimizer.slots((50,))["before"].format == "bf16"
    exact, rounded, states = w.copy(), w.copy(), [new_state(optimizer, (50,)) for _ in range(2)]
    for step, g in enumerate(gradients, 1):
        optimizer.update(CTX, exact, g, states[0], step)
        optimizer.update(CTX, rounded, g, states[1], step)
        papers.at_rest(states[1], optimizer, (50,))
    assert (exact != rounded).any()
    # A difference is off by up to 2^-9 of a gradient of at most 4, the update by no more than that share of lr.
    np.testing.assert_allclose(rounded, exact, rtol=0, atol=3 * optimizer.lr * 4 * 2**-9)


@pytest.mark.parametrize("optimizer", [optim.LAMB(lr=0.1, weight_decay=0.0), optim.LARS(lr=0.1, weight_decay=0.0)],
                         ids=named)
def test_a_tensor_of_zeros_takes_an_unscaled_step(optimizer):
    found, _ = updated(optimizer, np.zeros(3, np.float32), [np.ones(3, np.float32)])
    np.testing.assert_allclose(found, -0.1, rtol=1e-5)  # LAMB's direction is 1 but for epsilon


@pytest.mark.parametrize("optimizer", [optim.LAMB(), optim.LARS(), optim.Muon(), optim.Adafactor(), optim.Shampoo(),
                                       optim.SOAP(weight_decay=0.0)], ids=named)
def test_gradients_of_zeros_make_no_nan(optimizer):
    w = np.ones((3, 3), np.float32)
    found, state = updated(optimizer, w, [np.zeros((3, 3), np.float32)] * 3)
    assert np.isfinite(found).all()
    assert all(np.isfinite(slot).all() for slot in state.values())


def test_adafactor_forgets_at_first_and_never_steps_longer_than_its_threshold_allows():
    w, gradients = tensors((6, 4), 1)
    found, state = updated(optim.Adafactor(lr=0.5), w, gradients)
    np.testing.assert_allclose(state["rows"], (gradients[0].astype(np.float64)**2).mean(1), rtol=1e-6)  # one rounding
    np.testing.assert_allclose(state["columns"], (gradients[0].astype(np.float64)**2).mean(0), rtol=1e-6)
    assert papers.rms(found - w) <= 0.5 * papers.rms(w) * (1 + 1e-6)


def test_soaps_first_step_only_begins():
    w, gradients = tensors((3, 5), 1)
    found, state = updated(optim.SOAP(), w, gradients)
    np.testing.assert_array_equal(found, w)
    assert not state["m"].any()
    for side in ("left", "right"):
        basis = state[f"{side}_basis"].astype(np.float64)
        turned = basis.T @ state[side] @ basis
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-6)  # rounded to fp32 once
        assert (np.diff(np.diag(turned)) <= 1e-6).all(), "the largest eigenvalue first"


def test_kfacs_factors_are_plain_means_at_first_and_then_running_ones():
    optimizer, w = optim.KFAC(), np.zeros((2, 3), np.float32)
    state, g = new_state(optimizer, (2, 3)), np.ones((2, 3), np.float32)
    seen = [factors_of((2, 3), seed)[0] for seed in range(30)]
    expected = 0.0
    for step, a in enumerate(seen, 1):
        optimizer.update(UpdateContext(KERNELS, factors=(a, np.eye(3, dtype=np.float32))), w, g, state, step)
        kept = min(1 - 1 / step, 0.95)
        expected = kept * expected + (1 - kept) * a.astype(np.float64)
        if step == 20:
            np.testing.assert_allclose(state["inputs"], np.mean(seen[:20], axis=0), rtol=1e-5)  # fp32 roundings
    np.testing.assert_allclose(state["inputs"], expected, rtol=1e-5)
