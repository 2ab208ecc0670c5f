"""What lets ZeRO cut elementwise state anywhere, and what keeps matrices whole; blocks, empty pieces, null arrays."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.optim.papers import (
    ELEMENTWISE,
    EVERY,
    KERNELS,
    MATRIX,
    NORMED,
    WHOLE,
    factors_of,
    named,
    new_state,
    tensors,
    updated,
)
from zerosim import Cluster, Engine, optim
from zerosim.models import MLP
from zerosim.numerics import arrays, kernels
from zerosim.optim import UpdateContext, with_norms
from zerosim.ranks import Memory

NORMS = (3.0, 2.0)  # of the whole tensor, which a piece is told


def stepped(optimizer, w, gradients, kernels=KERNELS):
    """(weights, state) of a flat piece after all steps; where norms are needed they are the whole tensor's."""
    w, state, ctx = w.copy(), new_state(optimizer, w.shape), UpdateContext(kernels, norms=NORMS)
    for step, g in enumerate(gradients, 1):
        if optimizer in NORMED:
            optimizer.advance(ctx, w, g, state, step)
        optimizer.update(ctx, w, g, state, step)
    return w, state


def assert_equal_bits(found, expected):
    (w, state), (whole, whole_state) = found, expected
    assert w.tobytes() == whole.tobytes()
    assert state.keys() == whole_state.keys()
    for name, slot in state.items():
        assert slot.tobytes() == whole_state[name].tobytes(), name


@pytest.mark.parametrize("optimizer", [*ELEMENTWISE, *NORMED, *MATRIX], ids=named)
@given(count=st.integers(1, 300), cuts=st.lists(st.integers(0, 300), max_size=5), seed=st.integers(0, 2**32 - 1))
@example(count=2 * arrays.BLOCK + 7, cuts=[arrays.BLOCK - 3], seed=0)
def test_cutting_a_vector_anywhere_changes_no_bit(optimizer, count, cuts, seed):
    w, gradients = tensors((count,), 3, seed)
    whole = stepped(optimizer, w, gradients)
    pieces = [stepped(optimizer, w[a:b], [g[a:b] for g in gradients])
              for a, b in pairwise([0, *sorted(min(cut, count) for cut in cuts), count])]
    joined = {name: np.concatenate([state[name] for _, state in pieces]) for name in whole[1]}
    assert_equal_bits((np.concatenate([w for w, _ in pieces]), joined), whole)
    assert optimizer.cut_of((count,)) == "anywhere"


@pytest.mark.parametrize("optimizer", EVERY, ids=named)
def test_an_empty_tensor_is_updated_like_any_other(optimizer):
    for shape in ((0, 3), (3, 0)) if optimizer in WHOLE else ((0,),):
        w, _ = updated(optimizer, np.zeros(shape, np.float32), [np.zeros(shape, np.float32)] * 2,
                       factors=factors_of(shape))
        assert w.size == 0


@pytest.mark.parametrize("optimizer", EVERY, ids=named)
def test_an_update_leaves_the_gradient_and_the_factors_alone_and_a_users_errstate_changes_no_bit(optimizer):
    (w, gradients), factors = tensors((6, 4), 2), factors_of((6, 4))
    gradients *= np.float32(1e-25)  # whose squares underflow
    if optimizer in ELEMENTWISE:
        gradients[1, 0] = [np.inf, np.nan, 1e30, 0.0]
    before = [array.copy() for array in (gradients, *factors)]
    expected = updated(optimizer, w, gradients, factors=factors)
    with np.errstate(all="raise"):
        assert_equal_bits(updated(optimizer, w, gradients, factors=factors), expected)
    for array, copy in zip((gradients, *factors), before, strict=True):
        assert array.tobytes() == copy.tobytes()


@pytest.mark.parametrize("optimizer", EVERY, ids=named)
def test_null_arrays_go_through_every_step(optimizer):
    for shape in ((8, 4), (10**6,)):
        if isinstance(optimizer, optim.KFAC) and len(shape) == 1:
            continue
        own = (int(np.prod(shape)),) if optimizer.cut_of(shape) == "anywhere" else shape
        factors = tuple(arrays.NullArray((n, n), np.float32) for n in own) if len(own) == 2 else None
        ctx = UpdateContext(kernels.NullKernels(), factors=factors)
        w, g = arrays.NullArray(own, np.float32), arrays.NullArray(own, np.float32)
        state = {name: arrays.NullArray(slot.shape, np.float32) for name, slot in optimizer.slots(own).items()}
        for step in (1, 2, 10):
            optimizer.update(with_norms(optimizer, ctx, w, g, state, step), w, g, state, step)


# -- whole matrices ---------------------------------------------------------------------------------------------------


def test_matrix_optimizers_say_which_tensors_they_need_whole():
    for optimizer in MATRIX:
        assert [optimizer.cut_of(shape) for shape in ((), (5,), (2, 3), (2, 3, 4))] == ["anywhere"] * 2 + [
            "matrix", "anywhere"]
    assert {optim.Adafactor().cut_of(shape) for shape in ((), (5,), (2, 3))} == {"tensor"}
    assert optim.KFAC().cut_of((2, 3)) == "layer"
    assert all("whole_matrix" in optimizer.needs for optimizer in WHOLE)
    assert optim.KFAC().needs == {"whole_matrix", "input_factors"}


@pytest.mark.parametrize("optimizer", WHOLE, ids=named)
def test_matrix_optimizers_take_their_workspace_from_the_context(optimizer):
    asked = []

    def alloc(shape):
        asked.append(shape)
        return np.full(shape, np.nan, np.float32)  # as debug mode fills it: nothing is read before it is written

    (w, gradients), factors = tensors((6, 4), 2), factors_of((6, 4))
    expected, _ = updated(optimizer, w, gradients, factors=factors)
    found, state = w.copy(), new_state(optimizer, w.shape)
    for step, g in enumerate(gradients, 1):
        optimizer.update(UpdateContext(KERNELS, factors=factors, alloc=alloc), found, g, state, step)
    assert found.tobytes() == expected.tobytes()
    assert asked


def test_an_engine_charges_the_workspace_of_a_matrix_optimizer(monkeypatch):
    """Muon on one weight (6, 4) in fp32: the gradient, its look ahead, a change of as many, and two products (4, 4)."""
    rng, held, alloc = np.random.default_rng(0), [], Memory.alloc

    def watched(memory, *arguments, **options):
        array = alloc(memory, *arguments, **options)
        held.append(memory.now_nbytes_by_kind.get("workspace", 0))
        return array

    def program(rank):
        engine = Engine(rank, MLP((6, 4), bias=False), optim.Muon())
        engine.backward(engine.forward(rng.standard_normal((2, 6)), rng.standard_normal((2, 4))))
        engine.reduce()
        monkeypatch.setattr(Memory, "alloc", watched)
        engine.update()

    cluster = Cluster(1)
    cluster.run(program)
    assert max(held) == 4 * (3 * 6 * 4 + 2 * 4 * 4)
    assert "workspace" not in cluster.memory[0].now_nbytes_by_kind, "and gives it back"


def test_a_context_notes_what_the_arithmetic_of_matrices_costs():
    a, noted = np.eye(3, dtype=np.float32), []
    out = np.empty_like(a)
    ctx = UpdateContext(KERNELS, note=lambda *, flops, nbytes: noted.append((flops, nbytes)))
    ctx.matmul(np.ones((2, 3), np.float32), a, np.empty((2, 3), np.float32))
    ctx.symmetric_power(a, -0.5, 0.1, out)
    ctx.eigenvectors(a, out)
    ctx.orthogonal_factor(a, out)
    assert noted == [(2 * 2 * 3 * 3, 4 * (6 + 9 + 6)), (11 * 27, 2 * 36), (9 * 27, 2 * 36), (8 * 9, 2 * 36)]
