"""Which optimizers may be cut, found by running them; bytes per parameter; what matrices are spared."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim import UpdateContext, bytes_per_parameter, check_shardable
from zerosim.optim.base import Optimizer, Slot
from zerosim.optim.newton_schulz import orthogonalized

CTX = UpdateContext(NumpyKernels())
SGD = zs.optim.SGD
ELEMENTWISE = [SGD(lr=0.1), zs.optim.Momentum(lr=0.1), zs.optim.Momentum(lr=0.1, nesterov=True), zs.optim.AdaGrad(),
               zs.optim.RMSprop(), zs.optim.Adam(), zs.optim.AdamW(), zs.optim.Lion(), zs.optim.Adan()]
NORMED = [zs.optim.LAMB(), zs.optim.LARS()]
MATRIX = [zs.optim.Muon(), zs.optim.Muon(iteration="cubic"), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.Adafactor(),
          zs.optim.KFAC()]


def named(optimizer):
    return type(optimizer).__name__


@pytest.mark.parametrize("optimizer", ELEMENTWISE + NORMED, ids=named)
def test_elementwise_optimizers_may_be_cut_anywhere(optimizer):
    found = check_shardable(optimizer)
    assert (found.cut, found.claimed, found.is_honest, found.counterexample) == ("anywhere", "anywhere", True, None)


@pytest.mark.parametrize("optimizer", MATRIX, ids=named)
def test_matrix_optimizers_may_be_cut_on_the_borders_of_tensors_only(optimizer):
    found = check_shardable(optimizer)
    assert (found.cut, found.is_honest) == ("tensor", True)
    assert "a tensor (12, 7) cut at" in found.counterexample or "is refused" in found.counterexample


# -- optimizers that it has never seen --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Optimizer):
    """A user's optimizer: the update is what a subclass makes of w, g and one slot."""

    cut: ClassVar[str] = "anywhere"

    def slots(self, shape):
        return {"m": Slot(shape)}

    def update(self, ctx, w, g, state, step, group=None):
        state["m"][...] = state["m"] * np.float32(0.9) + g
        w -= np.float32(0.1) * self.of(w, state["m"])


class Cubed(Own):
    def of(self, w, m):
        return m * m * m + w * np.float32(0.01)


class Clipped(Own):
    """Clips by the norm of whatever it is handed."""

    def of(self, w, m):
        return m / np.sqrt((m * m).sum())


class Positional(Own):
    """Decays by the index inside the shard."""

    def of(self, w, m):
        return m / np.arange(1, m.size + 1, dtype=np.float32).reshape(m.shape)


class Lengthwise(Own):
    """Depends on how long a block is."""

    def of(self, w, m):
        return m / np.float32(m.size)


class Neighborly(Own):
    """Smooths the moment with its neighbor."""

    def of(self, w, m):
        return m + np.roll(m, 1)


class Rare(Own):
    """Looks at its neighbors in one element of a thousand or so: only where the first is very large."""

    def of(self, w, m):
        return m + np.float32(m.reshape(-1)[0] > 1.0)


class Remembering(Own):
    """Keeps a number to itself: a step depends on how many tensors have been updated before."""

    seen: ClassVar[list] = []

    def of(self, w, m):
        self.seen.append(1)
        return m * np.float32(len(self.seen))


class Modest(Cubed):
    cut: ClassVar[str] = "tensor"


@pytest.mark.parametrize(("kind", "cut", "honest"), [
    (Cubed, "anywhere", True), (Modest, "anywhere", True), (Clipped, "tensor", False), (Positional, "tensor", False),
    (Lengthwise, "tensor", False), (Neighborly, "tensor", False), (Rare, "tensor", False),
    (Remembering, "no", False)])
def test_a_users_optimizer_is_judged_by_what_it_does_and_not_by_what_it_claims(kind, cut, honest):
    found = check_shardable(kind())
    assert (found.cut, found.is_honest) == (cut, honest)
    assert (found.counterexample is None) == (cut == "anywhere")


def test_the_counterexample_says_where_and_by_how_many_bits_it_differs():
    text = check_shardable(Clipped()).counterexample
    assert text.startswith("a tensor (12, 7) cut at [")
    assert "weights differ after 3 steps; first at 0: np.float32(" in text


@pytest.mark.parametrize("found", [None, 3, zs.optim.Adam, "adam"])
def test_what_is_no_optimizer_is_refused(found):
    with pytest.raises(ValueError, match=r"asks for an optimizer with its settings, found .*check_shardable\(zs.optim"):
        check_shardable(found)


# -- cuts and blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=named)
@given(count=st.integers(1, 200_000), cut=st.floats(0, 1), seed=st.integers(0, 99))
def test_any_cut_gives_the_same_bits_also_across_blocks(optimizer, count, cut, seed):
    rng, at = np.random.default_rng(seed), int(cut * count)
    w, g = rng.standard_normal((2, count), np.float32)

    def stepped(w, g):
        state = {name: np.zeros(w.size, np.float32) for name in optimizer.slots(w.shape)}
        for step in (1, 2):
            optimizer.update(CTX, w, g * np.float32(step), state, step)
        return w

    whole = stepped(w.copy(), g)
    pieces = np.concatenate([stepped(w[:at].copy(), g[:at]), stepped(w[at:].copy(), g[at:])])
    assert whole.tobytes() == pieces.tobytes()


@pytest.mark.parametrize("optimizer", [o for o in MATRIX if "whole_matrix" in o.needs], ids=named)
def test_no_matrix_optimizer_updates_part_of_a_matrix(optimizer):
    shape = (4, 3)
    state = {name: np.zeros(slot.shape, np.float32) for name, slot in optimizer.slots(shape).items()}
    piece, before = np.ones(7, np.float32), np.ones(7, np.float32)
    with pytest.raises(
        ValueError, match=r"whole tensors in their own shape, and found \(7,\)|KFAC updates the weights"
    ):
        optimizer.update(CTX, piece, piece.copy(), state, 1)
    assert (piece == before).all()


@pytest.mark.parametrize("optimizer", NORMED, ids=named)
def test_a_step_without_the_tensors_norms_is_refused(optimizer):
    w = np.ones(3, np.float32)
    state = {name: np.zeros(3, np.float32) for name in optimizer.slots((3,))}
    with pytest.raises(ValueError, match=r"needs the norms of the whole tensor, .* call advance\(\) and direction\(\)"):
        optimizer.update(CTX, w, w.copy(), state, 1)


def test_kfac_without_factors_and_with_a_bias_is_refused():
    w = np.ones((3, 2), np.float32)
    state = {name: np.zeros(slot.shape, np.float32) for name, slot in zs.optim.KFAC().slots((3, 2)).items()}
    with pytest.raises(ValueError, match="needs the layer's factors, and found none in its context"):
        zs.optim.KFAC().update(CTX, w, w.copy(), state, 1)
    with pytest.raises(
        ValueError, match=r"was asked for a tensor of shape \(3,\); give it another optimizer by a Group"
    ):
        zs.optim.KFAC().slots((3,))


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "nbytes"), [
    (SGD(lr=0.1), 8), (zs.optim.Momentum(lr=0.1), 12), (zs.optim.AdaGrad(), 12), (zs.optim.RMSprop(), 12),
    (zs.optim.Adam(), 16), (zs.optim.AdamW(), 16), (zs.optim.Lion(), 12), (zs.optim.Adan(), 22), (zs.optim.LAMB(), 16),
    (zs.optim.LARS(), 12), (zs.optim.Muon(), 12)], ids=str)
def test_bytes_per_parameter_are_the_published_ones(optimizer, nbytes):
    assert bytes_per_parameter(optimizer) == nbytes


def test_factored_state_is_small_for_adafactor_and_large_for_soap():
    shape = (100, 50)
    assert bytes_per_parameter(zs.optim.Adafactor(), shape) == 8 + 4 * (100 + 50) / 5000
    assert bytes_per_parameter(zs.optim.Shampoo(), shape) == 8 + 4 * (100**2 + 50**2) / 5000
    assert bytes_per_parameter(zs.optim.SOAP(), shape) == 16 + 4 * 2 * (100**2 + 50**2) / 5000


# -- Newton-Schulz ----------------------------------------------------------------------------------------------------


def after(s, steps, iteration):
    """The singular values of the iteration's result on a matrix that has s, scaled to Frobenius norm 1."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (len(s), len(s) + 3))
    g = (left * s) @ right[:len(s)]
    return np.linalg.svd(orthogonalized(CTX.kernels, g.astype(np.float32), steps, iteration).astype(np.float64))[1]


def test_five_quintic_steps_bring_singular_values_near_one_and_no_nearer():
    s = np.geomspace(0.01, 1, 40)
    for steps in (5, 20):
        found = after(s / np.linalg.norm(s) * 1.0, steps, "quintic")
        assert found.max() < 1.21
    single = [after(np.array([x, np.sqrt(1 - x * x)]), 5, "quintic") for x in np.geomspace(0.01, 0.7, 60)]
    assert min(pair.min() for pair in single) > 0.67
    assert max(pair.max() for pair in single) < 1.14
    assert np.abs(after(np.array([0.3, np.sqrt(1 - 0.09)]), 50, "quintic") - 1).max() > 0.1


@pytest.mark.parametrize(("steps", "expected"), [(5, 0.076), (10, 0.53), (20, 1.0)])
def test_the_cubic_is_slow_and_converges(steps, expected):
    small = after(np.array([0.01, np.sqrt(1 - 1e-4)]), steps, "cubic").min()
    assert small == pytest.approx(expected, abs=6e-3)


def test_a_matrix_of_zeros_stays_zero():
    assert not orthogonalized(CTX.kernels, np.zeros((3, 5), np.float32), 5, "quintic").any()


# -- schedules --------------------------------------------------------------------------------------------------------


def test_schedules_are_factors_by_step():
    assert [zs.optim.Constant()(step) for step in (1, 99)] == [1.0, 1.0]
    assert [zs.optim.Warmup(4)(step) for step in (1, 4, 9)] == [0.25, 1.0, 1.0]
    cosine = zs.optim.WarmupCosine(2, 6, final=0.1)
    assert [round(cosine(step), 6) for step in (1, 2, 4, 6, 9)] == [0.5, 1.0, 0.55, 0.1, 0.1]


@pytest.mark.parametrize(("make", "text"), [
    (lambda: zs.optim.Warmup(0), "Warmup was given steps=0; it is a number of steps"),
    (lambda: zs.optim.WarmupCosine(5, 5), "warmup=5 of steps=5; the cosine needs steps after the warmup")])
def test_schedules_that_cannot_be_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
