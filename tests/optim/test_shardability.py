"""Where an optimizer may be cut, found by running it: the package's own, and users' that it has never seen."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import zerosim as zs
from zerosim.optim import Shardability, check_shardable
from zerosim.optim.base import Optimizer, Slot

ELEMENTWISE = [zs.optim.SGD(lr=0.1), zs.optim.Momentum(lr=0.1), zs.optim.Momentum(lr=0.1, nesterov=True),
               zs.optim.AdaGrad(), zs.optim.RMSprop(), zs.optim.Adam(), zs.optim.Adam(epsilon=0.0), zs.optim.AdamW(),
               zs.optim.Lion(), zs.optim.Adan()]
NORMED = [zs.optim.LAMB(), zs.optim.LARS()]
MATRIX = [zs.optim.Muon(), zs.optim.Muon(iteration="cubic"), zs.optim.Shampoo(), zs.optim.SOAP(), zs.optim.KFAC()]


def named(value):
    return type(value).__name__ if isinstance(value, Optimizer) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=named)
def test_elementwise_optimizers_may_be_cut_anywhere(optimizer):
    assert check_shardable(optimizer) == Shardability(
        named(optimizer), "anywhere", "anywhere", True,
        "an element's update reads that element's weight, gradient and state alone", None)


@pytest.mark.parametrize("optimizer", NORMED, ids=named)
def test_optimizers_of_tensor_norms_may_be_cut_anywhere_once_they_are_told_them(optimizer):
    found = check_shardable(optimizer)
    assert (found.cut, found.is_honest) == ("anywhere", True)
    assert found.reason.endswith(", and the norms of the whole tensor, which it is given")


@pytest.mark.parametrize("optimizer", MATRIX, ids=named)
def test_matrix_optimizers_may_be_cut_on_the_borders_of_tensors_only(optimizer):
    found = check_shardable(optimizer)
    assert (found.cut, found.claimed, found.is_honest) == ("tensor", optimizer.cut, True)
    assert found.reason == "it refuses pieces of a tensor"
    assert "never updates part of" in found.counterexample


def test_adafactor_reads_all_of_a_vector_too():
    for shapes in ([(23,)], [(12, 7)]):
        found = check_shardable(zs.optim.Adafactor(), shapes=shapes)
        assert (found.cut, found.is_honest) == ("tensor", True)
    assert check_shardable(zs.optim.Adafactor()).reason == (
        "the update of an element reads other elements' gradients or weights")


@pytest.mark.parametrize("optimizer", MATRIX[:-1], ids=named)
def test_what_a_matrix_optimizer_does_to_vectors_may_be_cut_anywhere(optimizer):
    assert check_shardable(optimizer, shapes=[(5,), (23,), (1030,)]).cut == "anywhere"


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


class Cubed(Own):
    def of(self, w, m, step):
        return m * m * m + w * np.float32(0.01) + np.float32(1 / step)


class Modest(Cubed):
    """Elementwise, and claims less."""

    cut: ClassVar[str] = "tensor"


class Halved(Cubed):
    """Elementwise, with state that rests in 16 bit."""

    def slots(self, shape):
        return {"m": Slot(shape, "bf16")}


class Clipped(Own):
    """Clips by the norm of whatever it is handed."""

    def of(self, w, m, step):
        return m / np.sqrt((m * m).sum())


class Centered(Clipped):
    """The same, and says so."""

    cut: ClassVar[str] = "tensor"


class Neighborly(Own):
    def of(self, w, m, step):
        return m + np.roll(m, 1)


class Thresholded(Own):
    """Looks at another element only where that is large."""

    def of(self, w, m, step):
        return m + np.float32(m.reshape(-1)[0] > 1.0)


class Periodic(Own):
    """Looks at the others every hundred steps."""

    def of(self, w, m, step):
        return m + (m.mean() if step % 100 == 0 else np.float32(0))


class Blockwise(Own):
    """Scales by the largest in each block of 1024, as 8-bit optimizers quantize."""

    def of(self, w, m, step):
        rows = np.pad(m.reshape(-1), (0, -m.size % 1024)).reshape(-1, 1024)
        return (rows / (1 + np.abs(rows).max(1, keepdims=True))).reshape(-1)[:m.size].reshape(m.shape)


class LongBlocks(Own):
    """Differs only behind the first 65536 elements."""

    def of(self, w, m, step):
        return np.where(np.arange(m.size) < 65536, m.reshape(-1), 0).reshape(m.shape)


class Positional(Own):
    def of(self, w, m, step):
        return m / np.arange(1, m.size + 1, dtype=np.float32).reshape(m.shape)


class Lengthwise(Own):
    def of(self, w, m, step):
        return m / np.float32(m.size)


class RowWise(Own):
    """Keeps a number for each row, and claims to be elementwise."""

    def slots(self, shape):
        return {"m": Slot(shape), "rows": Slot(shape[:1])}

    def of(self, w, m, step):
        return m


class Aligned(Own):
    """Refuses pieces that are no multiple of 4."""

    def of(self, w, m, step):
        return m.reshape(-1, 4).reshape(m.shape)


class Counting(Own):
    """Keeps a number to itself: a step depends on how many tensors have been updated before it."""

    def __init__(self):
        object.__setattr__(self, "seen", [])

    def of(self, w, m, step):
        self.seen.append(1)
        return m * np.float32(len(self.seen))


class Global(Counting):
    """Scales by the norm of everything that it has seen in this step, over all tensors."""

    def of(self, w, m, step):
        self.seen.append((step, float((m * m).sum())))
        return m / np.float32(1 + sum(square for at, square in self.seen if at == step))


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


class Random(Own):
    def of(self, w, m, step):
        return m * np.random.default_rng().random(dtype=np.float32)


OTHERS = "reads other elements' gradients or weights"


@pytest.mark.parametrize(("kind", "cut", "honest", "reason"), [
    (Cubed, "anywhere", True, "alone"), (Modest, "anywhere", True, "alone"), (Halved, "anywhere", True, "alone"),
    (Clipped, "tensor", False, OTHERS), (Centered, "tensor", True, OTHERS), (Neighborly, "tensor", False, OTHERS),
    (Thresholded, "tensor", False, OTHERS), (Periodic, "tensor", False, OTHERS), (Blockwise, "tensor", False, OTHERS),
    (LongBlocks, "tensor", False, "index inside the piece"), (Positional, "tensor", False, "index inside the piece"),
    (Lengthwise, "tensor", False, "the length of the piece"), (RowWise, "tensor", False, "has another shape than"),
    (Aligned, "tensor", False, "refuses pieces of a tensor"), (Counting, "no", False, "outside of the slots"),
    (Global, "no", False, "outside of the slots"), (Secretive, "no", False, "outside of the slots"),
    (Shared, "no", False, "no function of its arguments"), (Random, "no", False, "no function of its arguments")],
    ids=named)
def test_a_users_optimizer_is_judged_by_what_it_does_and_not_by_what_it_claims(kind, cut, honest, reason):
    found = check_shardable(kind())
    assert (found.cut, found.is_honest) == (cut, honest)
    assert reason in found.reason
    assert (found.counterexample is None) == (cut == "anywhere")
    assert found.claimed == kind.cut


def test_the_counterexample_is_a_small_one_and_can_be_run():
    """What it says of two elements of a Clipped is what happens when one runs it."""
    found = check_shardable(Clipped())
    assert found.counterexample.startswith("A tensor (2,) whole, and cut at [1]: ")
    assert "elements of w differ after 5 steps; element 0 becomes " in found.counterexample
    assert check_shardable(Clipped()) == found, "the same seed, the same trial"
    assert check_shardable(Clipped(), seed=1).counterexample != found.counterexample


def test_the_finding_is_a_sentence():
    assert str(check_shardable(zs.optim.Adam())) == (
        "Adam may be cut anywhere: an element's update reads that element's weight, gradient and state alone")
    text = str(check_shardable(Clipped()))
    assert text.startswith("Clipped may be cut on the borders of tensors only, and claims cut='anywhere', which is too "
                           f"much: the update of an element {OTHERS}. A tensor (2,) whole, and cut at [1]: ")
    assert str(check_shardable(Random())).startswith("Random may not be cut at all, and claims cut='anywhere', which")


def test_an_optimizer_that_takes_matrices_only_is_tried_on_matrices():
    class Picky(Centered):
        def slots(self, shape):
            if len(shape) != 2:
                raise TypeError("matrices only")
            return super().slots(shape)

    assert "A tensor (2, 2) whole" in check_shardable(Picky()).counterexample


def test_an_unseen_optimizer_that_passes_trains_under_every_stage_to_one_devices_bits():
    model = zs.models.MLP((3, 5, 2), seed=1)

    def program(rank, stage, optimizer, gather):
        data = np.random.default_rng(rank.index)
        engine = zs.Engine(rank, model, optimizer, stage=stage, gather=gather)
        for _ in range(2):
            engine.step([(data.normal(size=(2, 3)), data.normal(size=(2, 2)))])
        return b"".join(engine.state(name)["parameter"].tobytes() for name in model.shapes)

    for kind, gather in ((Cubed, False), (Centered, True)):
        found = {zs.Cluster(3).run(program, stage, kind(), gather)[0] for stage in zs.STAGES}
        assert len(found) == 1, kind


# -- what is no optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [None, 3, zs.optim.Adam, "adam", lambda w, g: w - g])
def test_what_is_no_optimizer_is_refused(found):
    with pytest.raises(ValueError, match=r"asks for an optimizer with its settings, found .*check_shardable\(zs.optim"):
        check_shardable(found)


class NoCut(Own):
    cut: ClassVar[str] = "rows"


class Needy(Own):
    needs: ClassVar[frozenset] = frozenset({"luck"})


class Normless(Own):
    needs: ClassVar[frozenset] = frozenset({"tensor_norm"})


class Slotless(Own):
    def slots(self, shape):
        return {"m": shape}


class Greedy(Own):
    """Changes the gradient."""

    def update(self, ctx, w, g, state, step):
        g *= 2
        w -= g


class Functional(Own):
    """Returns new weights, and changes nothing."""

    def update(self, ctx, w, g, state, step):
        return w - g


class Broken(Own):
    def of(self, w, m, step):
        raise RuntimeError("not today")


class Uncopied(Own):
    def __deepcopy__(self, memo):
        raise TypeError("mine")


@pytest.mark.parametrize(("kind", "text"), [
    (NoCut, r"NoCut does not say where its state may be cut, found cut='rows'; write one of 'anywhere', 'tensor', 'matrix', 'layer' into its class"),
    (Needy, r"Needy says needs=frozenset\({'luck'}\); write a frozenset of input_factors, tensor_norm, whole_matrix"),
    (Normless, r"updates no tensor .* needs norms of whole tensors, and has no direction\(\) that says of what"),
    (Slotless, r"Slotless\.slots\(\(2,\)\) returns {'m': \(2,\)}; return a dict of names and Slot\(shape, format\)"),
    (Greedy, r"Greedy\.update changes the gradient, which others still read; work on a copy"),
    (Functional, r"Functional\.update changes nothing in 5 steps; update in place, with w -= .* what it returns is not lo"),
    (Broken, r"Broken updates no tensor of the shapes \(2,\), .*; it says RuntimeError: not today"),
    (Uncopied, r"Uncopied cannot be copied \(TypeError: mine\), and every rank has one of its own; keep numbers in")],
    ids=named)
def test_an_optimizer_that_breaks_its_promise_is_refused_with_the_reason(kind, text):
    with pytest.raises(ValueError, match=text):
        check_shardable(kind())


@pytest.mark.parametrize("shapes", [[()], [(1,)], [5], ["ab"], [(2, -1)], [(2.0, 3)], [None]], ids=str)
def test_shapes_that_cannot_be_cut_are_refused(shapes):
    with pytest.raises(ValueError, match=r"takes shapes of tensors that can be cut, found .*write tuples with two"):
        check_shardable(zs.optim.Adam(), shapes=shapes)


def test_no_shapes_are_refused():
    with pytest.raises(ValueError, match="it says no shapes were given"):
        check_shardable(zs.optim.Adam(), shapes=[])
