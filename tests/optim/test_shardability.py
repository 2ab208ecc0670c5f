"""Where an optimizer may be cut, found by running it: the package's own, and users' that it has never seen."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import zerosim as zs
from tests.optim.papers import ELEMENTWISE, MATRIX, NORMED, named
from tests.support import assert_refused, literally
from zerosim.optim import Optimizer, Shardability, Slot, check_shardable


def test_elementwise_optimizers_may_be_cut_anywhere_and_those_of_tensor_norms_once_they_are_told_them():
    for optimizer in (*ELEMENTWISE, zs.optim.Adam(epsilon=0.0), *NORMED):
        norms = ", and the norms of the whole tensor, which it is given" if optimizer in NORMED else ""
        assert check_shardable(optimizer) == Shardability(
            named(optimizer), "anywhere", "anywhere", True,
            f"an element's update reads that element's weight, gradient and state alone{norms}", None)


def test_matrix_optimizers_may_be_cut_on_the_borders_of_tensors_only_and_with_vectors_anywhere():
    for optimizer in (*MATRIX, zs.optim.KFAC()):
        found = check_shardable(optimizer)
        assert (found.optimizer, found.cut, found.claimed, found.is_honest) == (
            named(optimizer), "tensor", optimizer.cut, True)
        assert found.reason == "it refuses pieces of a tensor"
        assert "never updates part of" in found.counterexample
        if optimizer in MATRIX:
            assert check_shardable(optimizer, shapes=[(5,), (23,), (1030,)]).cut == "anywhere", named(optimizer)


def test_adafactor_reads_all_of_a_vector_too():
    for shapes in ([(23,)], [(12, 7)]):
        found = check_shardable(zs.optim.Adafactor(), shapes=shapes)
        assert (found.cut, found.is_honest) == ("tensor", True)
    assert check_shardable(zs.optim.Adafactor()).reason == (
        "the update of an element reads other elements' gradients or weights")


# -- optimizers that it has never seen --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Optimizer):
    """A user's optimizer: the update is what a subclass makes of w, g and one slot. It claims to be elementwise."""

    cut: ClassVar[str] = "anywhere"

    def slots(self, shape):
        return {"m": Slot(shape)}

    def update(self, ctx, w, g, state, step):
        state["m"][...] = state["m"] * np.float32(0.9) + g
        w -= np.float32(0.1) * self.of(w, state["m"], step)


def own(name, of, **attributes):
    """A user's class of this name that updates by of(w, m, step)."""
    return type(name, (Own,), {"of": staticmethod(of), **attributes})


def cubed(w, m, step):
    return m * m * m + w * np.float32(0.01) + np.float32(1 / step)


def clipped(w, m, step):
    """Clips by the norm of whatever it is handed."""
    return m / np.sqrt((m * m).sum())


def seeing_others_at_zero(self, ctx, w, g, state, step):
    """Reads other elements where a gradient is 0 only."""
    w -= np.where(g == 0, g.sum(), g)


def blockwise(w, m, step):
    """Scales by the largest in each block of 1024, as 8-bit optimizers quantize."""
    rows = np.pad(m.reshape(-1), (0, -m.size % 1024)).reshape(-1, 1024)
    return (rows / (1 + np.abs(rows).max(1, keepdims=True))).reshape(-1)[:m.size].reshape(m.shape)


Cubed, Clipped = own("Cubed", cubed), own("Clipped", clipped)
Centered = own("Centered", clipped, cut="tensor")  # the same as Clipped, and says so


class RowWise(Own):
    """Keeps a number for each row, and claims to be elementwise."""

    def slots(self, shape):
        return {"m": Slot(shape), "rows": Slot(shape[:1])}

    def of(self, w, m, step):
        return m


class Counting(Own):
    """Keeps a number to itself: a step depends on how many tensors have been updated before it."""

    def __init__(self):
        object.__setattr__(self, "seen", [])

    def of(self, w, m, step):
        self.seen.append(1)
        return m * np.float32(len(self.seen))


class Secretive(Counting):
    """Keeps its moment to itself, by address."""

    def of(self, w, m, step):
        kept = dict(self.seen).get(w.ctypes.data, np.zeros_like(m))
        self.seen.append((w.ctypes.data, kept + m))
        return kept + m


class Shared(Own):
    """Counts in its class, where every copy sees it."""

    seen: ClassVar[list] = []

    def of(self, w, m, step):
        self.seen.append(1)
        return m * np.float32(len(self.seen))


OTHERS = "reads other elements' gradients or weights"
INDEX, LENGTH, SLOTS = "index inside the piece", "the length of the piece", "outside of the slots"


@pytest.mark.parametrize(("kind", "cut", "honest", "reason"), [
    (Cubed, "anywhere", True, "alone"), (own("Modest", cubed, cut="tensor"), "anywhere", True, "alone"),
    (own("Halved", cubed, slots=lambda self, shape: {"m": Slot(shape, "bf16")}), "anywhere", True, "alone"),
    (Clipped, "tensor", False, OTHERS), (Centered, "tensor", True, OTHERS),
    # Another element counts only where it is large; or at every hundredth step.
    (own("Thresholded", lambda w, m, step: m + np.float32(m.reshape(-1)[0] > 1.0)), "tensor", False, OTHERS),
    (own("Periodic", lambda w, m, step: m + (m.mean() if step % 100 == 0 else np.float32(0))), "tensor", False, OTHERS),
    (own("Blockwise", blockwise), "tensor", False, OTHERS),
    (own("AtZero", cubed, update=seeing_others_at_zero), "tensor", False, OTHERS),
    # Differs only behind the first 65536 elements.
    (own("LongBlocks", lambda w, m, step: np.where(np.arange(m.size) < 65536, m.reshape(-1), 0).reshape(m.shape)),
     "tensor", False, INDEX),
    (own("Positional", lambda w, m, step: m / np.arange(1, m.size + 1, dtype=np.float32).reshape(m.shape)),
     "tensor", False, INDEX),
    (own("Lengthwise", lambda w, m, step: m / np.float32(m.size)), "tensor", False, LENGTH),
    (RowWise, "tensor", False, "has another shape than"),
    # Refuses pieces that are no multiple of 4.
    (own("Aligned", lambda w, m, step: m.reshape(-1, 4).reshape(m.shape)), "tensor", False, "refuses pieces of a ten"),
    (Counting, "no", False, SLOTS), (Secretive, "no", False, SLOTS),
    (Shared, "no", False, "no function of its arguments"),
    (own("Random", lambda w, m, step: m * np.random.default_rng().random(dtype=np.float32)),
     "no", False, "no function of its arguments")], ids=named)
def test_a_users_optimizer_is_judged_by_what_it_does_and_not_by_what_it_claims(kind, cut, honest, reason):
    found = check_shardable(kind())
    assert (found.cut, found.is_honest) == (cut, honest)
    assert reason in found.reason
    assert (found.counterexample is None) == (cut == "anywhere")
    assert found.claimed == kind.cut


def test_the_finding_is_a_sentence_with_a_small_counterexample_and_the_same_for_one_seed():
    assert str(check_shardable(zs.optim.Adam())) == (
        "Adam may be cut anywhere: an element's update reads that element's weight, gradient and state alone")
    found = check_shardable(Clipped())
    assert str(found).startswith(
        "Clipped may be cut on the borders of tensors only, and claims cut='anywhere', which is too much: the update "
        f"of an element {OTHERS}. A tensor (2,) whole, and cut at [1]: 2 of 2 elements of w differ after 5 steps; ")
    assert check_shardable(Clipped()) == found
    assert check_shardable(Clipped(), seed=1).counterexample != found.counterexample
    assert str(check_shardable(Shared())).startswith("Shared may not be cut at all, and claims cut='anywhere', which")


def test_an_optimizer_that_takes_matrices_only_is_tried_on_matrices():
    class Picky(Centered):
        def slots(self, shape):
            if len(shape) != 2:
                raise TypeError("matrices only")
            return super().slots(shape)

    assert "A tensor (2, 2) whole" in check_shardable(Picky()).counterexample


# -- refusals ---------------------------------------------------------------------------------------------------------


class Uncopied(Own):
    def __deepcopy__(self, memo):
        raise TypeError("mine")


def greedy(self, ctx, w, g, state, step):
    """Changes the gradient."""
    g *= 2
    w -= g


def rebinding(self, ctx, w, g, state, step):
    """Puts another array into the state."""
    state["m"] = state["m"] + g
    w -= state["m"]


def functional(self, ctx, w, g, state, step):
    """Returns new weights, and changes nothing."""
    return w - g


def broken(w, m, step):
    raise RuntimeError("not today")


ADAM, NONE = zs.optim.Adam(), "asks for an optimizer with its settings, found ...check_shardable(zs.optim"
SHAPELESS = "takes shapes of tensors that can be cut, found ...write tuples with two"


@pytest.mark.parametrize(("asked", "shapes", "text"), [
    *((found, [(2,)], NONE) for found in (None, 3, zs.optim.Adam, "adam", lambda w, g: w - g)),
    *((ADAM, shapes, SHAPELESS) for shapes in ([()], [(1,)], [5], ["ab"], [(2, -1)], [(2.0, 3)], [None])),
    (ADAM, [], "it says no shapes were given"),
    (own("Vast", cubed, slots=lambda self, shape: {"m": Slot((9, *shape))}), [(9**9,)], "bytes for a tensor "
     "(387420489,), too many to try"),
    (own("NoCut", cubed, cut="rows"), [(2,)], "NoCut does not say where its state may be cut, found cut='rows'; write "
     "one of 'anywhere', 'tensor', 'matrix', 'layer' into its class"),
    (own("Needy", cubed, needs=frozenset({"luck"})), [(2,)], "Needy says needs=frozenset({'luck'}); write a frozenset "
     "of input_factors, tensor_norm, whole_matrix"),
    (own("Normless", cubed, needs=frozenset({"tensor_norm"})), [(2,)],
     "updates no tensor ...needs norms of whole tensors, and has no direction() that says of what"),
    (own("Slotless", cubed, slots=lambda self, shape: {"m": shape}), [(2,)],
     "Slotless.slots((2,)) returns {'m': (2,)}; return a dict of names and Slot(shape, format)"),
    (own("Greedy", cubed, update=greedy), [(2,)], "Greedy.update changes the gradient, which others still read; work"),
    (own("Rebinding", cubed, update=rebinding), [(2,)], "Rebinding.update replaced the state 'm'"),
    (own("Functional", cubed, update=functional), [(2,)], "Functional.update changes nothing in 5 steps; update in "
     "place, with w -= ...; what it returns is not looked at"),
    (own("Broken", broken), [(2,), (3,)], "Broken updates no tensor of the shapes (2,), (3,); it says RuntimeError: "
     "not today"),
    (Uncopied, [(2,)], "Uncopied cannot be copied (TypeError: mine), and every rank has one of its own; keep numbers")],
    ids=named)
def test_what_cannot_be_tried_is_refused_with_the_reason(asked, shapes, text):
    optimizer = asked() if isinstance(asked, type) and asked.__module__ != ADAM.__module__ else asked
    assert_refused(lambda: check_shardable(optimizer, shapes=shapes), literally(text))
