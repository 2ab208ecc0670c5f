"""Each optimizer against its paper, transcribed in float64: the same steps within the rounding of fp32.

And what papers print: bytes per parameter, and Newton-Schulz's bands of singular values, which Muon's matrices go by.
"""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.optim import papers
from tests.optim.papers import CTX, KERNELS, factors_of, named, new_state, tensors, updated
from zerosim import optim
from zerosim.optim import UpdateContext, bytes_per_parameter, matrix, orthogonalize, state_nbytes

STEPS = 6
SHAPES = {"tall": (6, 4), "wide": (4, 6), "square": (4, 4), "vector": (30,)}
CASES = [
    (optim.SGD(lr=0.1), papers.momentum),
    (optim.Momentum(lr=0.1), papers.momentum),
    (optim.AdaGrad(lr=0.1), papers.adagrad),
    (optim.RMSprop(lr=0.1, alpha=0.9), papers.rmsprop),
    (optim.Adam(lr=0.1), papers.adam),
    (optim.AdamW(lr=0.1, weight_decay=0.1), papers.adam),
    (optim.Lion(lr=0.1, weight_decay=0.1), papers.lion),
    (optim.Adan(lr=0.1, weight_decay=0.1), papers.adan),
    (optim.LAMB(lr=0.1), papers.lamb),
    (optim.LARS(lr=0.1, trust=0.1, weight_decay=0.1), papers.lars),
    (optim.Adafactor(lr=0.5), papers.adafactor),
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


OTHER_VALUES = {"nesterov": True, "iteration": "cubic", "iterations": 2, "every": 3, "epsilon": 0.1,
                "epsilon1": 0.1, "epsilon2": 10.0, "threshold": 0.25, "weight_decay": 0.3, "vector_lr": 0.7,
                "trust": 0.5, "damping": 1.0}


@pytest.mark.parametrize(("optimizer", "paper"), CASES, ids=named)
def test_an_optimizer_follows_its_paper_whatever_its_hyperparameters(optimizer, paper):
    """Each of them has another value in turn."""
    groups = [{field.name: OTHER_VALUES.get(field.name, 0.35)} for field in fields(optimizer)]
    for shape in SHAPES.values():
        if paper is papers.soap and len(shape) == 2:
            shape = (4, 4)  # a gradient of less than full rank leaves eigenvectors open, and fp32 would choose others
        factors = factors_of(shape) if paper is papers.kfac else None
        if factors and len(shape) != 2:
            continue
        w, gradients = tensors(shape, STEPS)
        gradients.reshape(STEPS, -1)[:, 0] = 0
        wide = factors and tuple(factor.astype(np.float64) for factor in factors)
        bound = FACTOR_BOUND if len(shape) == 2 and paper in (papers.shampoo, papers.soap) else BOUND
        for group in ({}, *groups):
            changed = optimizer.for_group(group)
            found = updated(changed, w, gradients, factors=factors)[0].reshape(shape)
            expected = paper(w.astype(np.float64), gradients.astype(np.float64), changed, wide)
            moved = np.abs(expected - w).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound * max(1, moved), err_msg=f"{shape}, {group}")
            assert moved > 0.02, f"it moved by much more than the bound: {shape}, {group}"


def test_a_schedules_lr_changes_the_lr_of_muons_vectors_in_proportion():
    w, gradients = tensors((5,), 2)
    muon = optim.Muon(lr=0.02, vector_lr=0.01)
    halved = updated(muon.with_lr(0.01), w, gradients)[0]
    np.testing.assert_array_equal(halved, updated(replace(muon, vector_lr=0.005), w, gradients)[0])
    np.testing.assert_array_equal(updated(muon.with_lr(0.0), w, gradients)[0], w)
    np.testing.assert_array_equal(updated(replace(muon, lr=0.0), w, gradients)[0], w)


# -- what single lines of the papers say ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.LAMB(lr=0.1, weight_decay=0.0), optim.LARS(lr=0.1, weight_decay=0.0)],
                         ids=named)
def test_a_tensor_of_zeros_takes_an_unscaled_step(optimizer):
    found, _ = updated(optimizer, np.zeros(3, np.float32), [np.ones(3, np.float32)])
    np.testing.assert_allclose(found, -0.1, rtol=1e-5)  # LAMB's direction is 1 but for epsilon


@pytest.mark.parametrize("optimizer", [optim.LAMB(), optim.LARS(weight_decay=0.0), optim.Muon(), optim.Adafactor(),
                                       optim.Shampoo(), optim.SOAP(weight_decay=0.0)], ids=named)
def test_gradients_of_zeros_make_no_nan(optimizer):
    w = np.ones((3, 3), np.float32)
    found, state = updated(optimizer, w, [np.zeros((3, 3), np.float32)] * 3)
    assert np.isfinite(found).all()
    assert all(np.isfinite(slot).all() for slot in state.values())


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


# -- bytes per parameter in mixed precision: the published table -------------------------------------------------------

PER_PARAMETER = [(optim.SGD(lr=0.1), 8), (optim.Momentum(lr=0.1), 12), (optim.AdaGrad(), 12), (optim.RMSprop(), 12),
         (optim.Adam(), 16), (optim.AdamW(), 16), (optim.Lion(), 12), (optim.Adan(), 22), (optim.LAMB(), 16),
         (optim.LARS(), 12), (optim.Muon(), 12)]


@pytest.mark.parametrize(("optimizer", "nbytes"), PER_PARAMETER, ids=named)
def test_bytes_per_parameter_are_the_published_ones_and_those_of_the_arrays_that_slots_ask_for(optimizer, nbytes):
    assert bytes_per_parameter(optimizer) == nbytes
    assert bytes_per_parameter(optimizer, (7, 3)) == pytest.approx(nbytes, abs=1e-12)  # a quotient of doubles
    kept = 0
    for slot in optimizer.slots((6, 4)).values():
        kept += np.zeros(slot.shape, {"fp32": np.float32, "bf16": np.uint16}[slot.format]).nbytes
    assert kept == state_nbytes(optimizer, (6, 4)) == (nbytes - 8) * 24


def test_vectors_cost_what_their_own_update_keeps():
    assert [bytes_per_parameter(optimizer, (10,)) for optimizer in (
        optim.Muon(), optim.SOAP(), optim.Shampoo(), optim.Adafactor())] == [16, 16, 12, 12]


# -- Newton-Schulz: the published bands, what converges and what does not ----------------------------------------------


def iterated(s, steps, iteration):
    """The iteration on single numbers, in float64."""
    a, b, c = matrix.COEFFICIENTS[iteration]
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def test_five_quintic_steps_bring_singular_values_from_001_to_1_into_the_published_band():
    found = iterated(np.geomspace(0.01, 1, 100_000), 5, "quintic")
    assert (round(found.min(), 2), round(found.max(), 2)) == (0.68, 1.13)


def test_the_quintic_does_not_converge_and_the_cubic_is_slow_and_does():
    assert sum(matrix.COEFFICIENTS["quintic"]) == pytest.approx(0.701, abs=5e-4)
    assert all(abs(iterated(0.3, steps, "quintic") - 1) > 0.04 for steps in (5, 6, 20, 50))
    for steps, expected in ((5, 0.076), (10, 0.53), (20, 1.0)):
        assert iterated(0.01, steps, "cubic") == pytest.approx(expected, abs=5e-3)  # to the digits printed


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_the_scale_of_the_matrix_does_not_matter(power):
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    scaled = x * np.float32(2.0**power)
    for array in (x, scaled):
        orthogonalize(CTX, array)
    assert x.tobytes() == scaled.tobytes()
