"""May an optimizer's state be cut? A property that can be tested: update the pieces, and compare bits.

ZeRO may cut an optimizer's state anywhere if and only if the update of element i reads nothing but element i's weight,
gradient and state. An optimizer is not taken at its word: it runs on random tensors, whole and in pieces, beside others
and alone. A tool for those who write optimizers: no engine needs it. Every trial is a function of its seed.

Legend: n elements of a tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_count
from zerosim.numerics.kernels import NumpyKernels
from zerosim.numerics.rounding import round_to
from zerosim.optim.base import BrokenPromise, Optimizer, Slot, UpdateContext
from zerosim.optim.promises import checked_slots, require_cut_and_needs, state_nbytes
from zerosim.optim.tensor_norms import with_norms

Shape = tuple[int, ...]
Verdict = Literal["anywhere", "tensor", "no"]
Finding = tuple[str, str]  # the reason, the counterexample

# From small to large, so that the first counterexample is a small one. The longest is longer than two blocks of the
# kernels; an engine hands over no piece that is longer than one.
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2), (5,), (3, 4), (4, 3), (23,), (12, 7), (1030,), (131089,))
# The last one is a multiple of 2 to 16, of 100 and 1000 and of the powers of two up to 256: for what is done every so
# many steps only.
STEPS = (1, 2, 3, 10, 288_288_000)
CUTS = 3  # random cuts of each tensor
LARGE = 1e3  # a change that no threshold overlooks
LARGEST_NBYTES = 1 << 27  # of state for one tensor of a trial

UNREPEATABLE = ("the same steps made again give other bits: it is no function of its arguments (it draws random "
                "numbers, or remembers something outside of its slots)")
REMEMBERED = ("something passes between tensors or steps outside of the slots (the optimizer remembers it): a rank "
              "that updates other tensors, or resumes, would compute other bits")


@dataclass(frozen=True, slots=True)
class Shardability:
    """The finding where an optimizer's state may be cut: "anywhere", on the borders of a "tensor" only, or "no"where.

    ``reason`` says what the update depends on, ``counterexample`` what differed where a cut was not allowed (None where
    every cut was). ``claimed`` is what the optimizer says of itself, and ``is_honest`` is False where it claims more,
    for tensors of any shape, than was found.
    """

    optimizer: str
    cut: Verdict
    claimed: str
    is_honest: bool
    reason: str
    counterexample: str | None

    def __str__(self) -> str:
        """The finding in one sentence or two."""
        where = {"anywhere": "may be cut anywhere", "tensor": "may be cut on the borders of tensors only",
                 "no": "may not be cut at all"}[self.cut]
        claim = "" if self.is_honest else f", and claims cut={self.claimed!r}, which is too much"
        shown = "" if self.counterexample is None else f". {self.counterexample}"
        return f"{self.optimizer} {where}{claim}: {self.reason}{shown}"


def check_shardable(optimizer: Optimizer, *, shapes: Sequence[Shape] = SHAPES, seed: int = 0) -> Shardability:
    """Finds by running it whether an update commutes with cutting tensors anywhere, on their borders, or not at all.

    Random tensors of these shapes (of those that the optimizer takes) are updated for several steps, with the state
    carried: whole and in random pieces, beside others and alone, by one optimizer and by one made anew for each step;
    the bits of weights and state are compared. An optimizer that needs norms of whole tensors, or a layer's factors, is
    given them. What happens at rare values only, or at steps that are not tried, is not found: this is a test, and no
    proof. Raises ValueError for what is no optimizer, and for one that breaks the promise of ``update``.

    >>> import zerosim as zs
    >>> check_shardable(zs.optim.Adam()).cut, check_shardable(zs.optim.Muon()).cut
    ('anywhere', 'tensor')
    """
    _check_optimizer(optimizer)
    kernels = NumpyKernels()
    trials = _usable_trials(optimizer, shapes, seed, kernels)
    name, claimed = type(optimizer).__name__, optimizer.cut
    hidden = _hidden_state(optimizer, kernels, [trial for trial in trials if trial.w.size < 10_000] or trials)
    if hidden is not None:
        return Shardability(name, "no", claimed, False, *hidden)
    broken, honest = None, True
    for trial in trials:
        found = _differing_in_pieces(optimizer, kernels, trial, seed)
        honest = honest and (found is None or optimizer.cut_of(trial.tensor) != "anywhere")
        broken = broken or found
    if broken is None:
        norms = ", and the norms of the whole tensor, which it is given" if "tensor_norm" in optimizer.needs else ""
        return Shardability(name, "anywhere", claimed, honest,
                            f"an element's update reads that element's weight, gradient and state alone{norms}", None)
    return Shardability(name, "tensor", claimed, honest, *broken)


# -- What is compared --------------------------------------------------------------------------------------------------


def _hidden_state(optimizer: Optimizer, kernels: NumpyKernels, trials: Sequence[TensorTrial]) -> Finding | None:
    """The first sign of state that passes between tensors or steps but by the slots; None where nothing does."""
    beside, again = ([trial.copy() for trial in trials] for _ in range(2))
    _run(optimizer, kernels, beside)
    _run(optimizer, kernels, again)
    anew = [_begun_anew_at_each_step(optimizer, kernels, trial) for trial in reversed(trials)]
    for others, reason, what in ((again, UNREPEATABLE, "in a second run of the same steps"),
                                 (reversed(anew), REMEMBERED, "alone and begun anew at each step")):
        for one, other in zip(beside, others, strict=True):
            found = _difference(one.bits(), other.bits(), f"A tensor {one.tensor} beside others, and {what}")
            if found is not None:
                return reason, found
    return None


def _begun_anew_at_each_step(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> TensorTrial:
    for at in range(len(STEPS)):
        trial = trial.copy()  # to other memory, as through a checkpoint
        _run(optimizer, kernels, [trial], steps=[at])
    return trial


def _differing_in_pieces(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial, seed: int) -> Finding | None:
    """The first difference when a tensor is updated in flat pieces; None where every bit agrees."""
    odd = next((name for name, slot in trial.slots.items() if slot.shape != trial.tensor), None)
    if odd is not None:
        return ("its state has another shape than the tensor, and belongs to all of it",
                f"For a tensor {trial.tensor} it keeps {odd!r} {trial.slots[odd].shape}, which cannot be cut with it.")
    whole = trial.copy()
    norms = _run(optimizer, kernels, [whole])
    for bounds in _random_bounds(trial.w.size, seed):
        pieces, cut = trial.pieces(bounds), f"A tensor {trial.tensor} whole, and cut at {bounds[1:-1]}"
        try:
            for piece in pieces:
                _run(optimizer, kernels, [piece], norms=norms)
        except Exception as error:
            return "it refuses pieces of a tensor", f"{cut}: {type(error).__name__}: {error}"
        together = {name: np.concatenate([piece.bits()[name] for piece in pieces]) for name in pieces[0].bits()}
        found = _difference(whole.bits(), together, cut)
        if found is not None:
            return _dependence(optimizer, kernels, trial), found
    return None


def _random_bounds(count: int, seed: int) -> Iterator[list[int]]:
    """Cuts of n elements into two or more pieces: every single cut of a few elements, else random ones."""
    if count <= 8:
        yield from ([0, at, count] for at in range(1, count))
        return
    words = random.bits((seed, "cuts", 0, count), 0, 4 * CUTS).reshape(CUTS, 4)
    for row in words:
        yield [0, *sorted({1 + int(word) % (count - 1) for word in row[:1 + int(row[3]) % 3]}), count]


def _difference(one: dict[str, Any], other: dict[str, Any], what: str) -> str | None:
    """The first element of weights or state that differs, as a sentence; None where every bit agrees."""
    for name, bits in one.items():
        at = np.flatnonzero(bits != other[name])
        if at.size:
            first, second = (x[name][at[:1]].view(np.float32)[0] for x in (one, other))
            return (f"{what}: {at.size} of {bits.size} elements of {name} differ after {len(STEPS)} steps; element "
                    f"{at[0]} becomes {first!s} and {second!s}.")
    return None


def _dependence(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> str:
    """In words, what an element's update depends on, found by changing one thing at a time.

    The trial is one whose pieces have differed.
    """
    if _reads_others(optimizer, kernels, trial):
        return "the update of an element reads other elements' gradients or weights"
    even, count = trial.copy(), trial.w.size
    even.w[...] = 0.5
    for at, g in enumerate(even.gradients):
        g[...] = np.float32(0.25 * (-1)**at / (1 + at))
    shorter = [even.pieces([0, length, count])[0] for length in {1, count // 2, count - 1}]
    for one in (even, *shorter):
        _run(optimizer, kernels, [one])
    bits = even.bits()["w"]
    if (bits != bits[0]).any():
        return "the update of an element depends on its index inside the piece"
    if any(one.bits()["w"][0] != bits[0] for one in shorter):
        return "the update of an element depends on the length of the piece"
    return "the update of an element depends on where the tensor is cut"


def _reads_others(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> bool:
    """True if changing one element's numbers, in one way or another, changes another element's update."""
    plain, count = trial.copy(), trial.w.size
    _run(optimizer, kernels, [plain])
    for at in {0, count // 2, count - 1}:
        for factor in (LARGE, -LARGE, 0.0):
            changed = trial.copy()
            changed.w.reshape(-1)[at] *= factor
            for g in changed.gradients:
                g.reshape(-1)[at] = factor
            _run(optimizer, kernels, [changed])
            others = np.arange(count) != at
            if (plain.bits()["w"] != changed.bits()["w"])[others].any():
                return True
    return False


# -- Trials: runs on random tensors ------------------------------------------------------------------------------------


@dataclass
class TensorTrial:
    """A tensor or piece: weights and a gradient for each step, as the update wants them; state, at rest; its slots.

    ``tensor`` is the shape of the tensor; the arrays have it too, or are flat where the optimizer may be cut anywhere.
    """

    tensor: Shape
    w: Array
    gradients: list[Array]
    state: dict[str, Array]
    slots: dict[str, Slot]

    def copy(self) -> TensorTrial:
        """The same, sharing no memory."""
        return replace(self, w=self.w.copy(), gradients=[g.copy() for g in self.gradients],
                       state={name: slot.copy() for name, slot in self.state.items()})

    def pieces(self, bounds: Sequence[int]) -> list[TensorTrial]:
        """Flat pieces, cut at these bounds, 0 and n included, each with its part of the state, which is flat too."""
        w, gradients = self.w.reshape(-1), [g.reshape(-1) for g in self.gradients]
        return [TensorTrial(self.tensor, w[a:b].copy(), [g[a:b].copy() for g in gradients],
                            {name: slot.reshape(-1)[a:b].copy() for name, slot in self.state.items()}, self.slots)
                for a, b in pairwise(bounds)]

    def bits(self) -> dict[str, Array]:
        """Weights and state as integers, all NaN as one."""
        arrays = {"w": self.w, **self.state}
        return {name: np.where(x != x, np.float32(np.nan), x).astype(np.float32).reshape(-1).view(np.uint32)
                for name, x in arrays.items()}


def _new_trial(optimizer: Optimizer, shape: Shape, seed: int) -> TensorTrial:
    """A tensor as the optimizer wants it, with gradients of many magnitudes, some of them zero, and state of zeros."""
    count, flat = int(np.prod(shape)), optimizer.cut_of(shape) == "anywhere"
    own, slots = (count,) if flat else shape, optimizer.slots(shape)
    normal = random.normal((seed, "numbers", 0, str(shape)), 0, count * (1 + len(STEPS)))
    words = random.bits((seed, "magnitudes", 0, str(shape)), 0, count * len(STEPS)).reshape(len(STEPS), *own)
    w, *gradients = normal.reshape(1 + len(STEPS), *own)
    magnitudes = 10.0 ** -np.arange(5.0)
    gradients = [np.where(word % 16 == 0, 0, g * magnitudes[word % 5]).astype(np.float32)
                 for g, word in zip(gradients, words, strict=True)]
    state = {name: np.zeros(own if slot.shape == shape else slot.shape, np.float32) for name, slot in slots.items()}
    return TensorTrial(shape, w.copy(), gradients, state, slots)


def _run(optimizer: Optimizer, kernels: NumpyKernels, trials: Sequence[TensorTrial], *,
         steps: Iterable[int] = range(len(STEPS)),
         norms: Sequence[tuple[float, float] | None] = ()) -> list[tuple[float, float] | None]:
    """Takes steps on each of the tensors or pieces, in their order, with a copy of the optimizer; returns the norms
    that the first one had, by step.

    The state is carried from step to step, and between steps what rests in 16 bits is rounded. ``norms``, where given,
    are those of the whole tensor, of which a piece is.
    """
    optimizer, found = copy.deepcopy(optimizer), []
    for at in steps:
        contexts = [_context(optimizer, kernels, trial, at) for trial in trials]
        if norms:
            contexts = [replace(ctx, norms=norms[at]) for ctx in contexts]
        found.append(contexts[0].norms)
        for trial, ctx in zip(trials, contexts, strict=True):
            optimizer.apply(ctx, trial.w, trial.gradients[at], trial.state, STEPS[at])
            for name, slot in trial.slots.items():
                if slot.format != "fp32":
                    round_to(trial.state[name], slot.format, out=trial.state[name])
    return found


def _context(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial, at: int) -> UpdateContext:
    """With random factors of a linear layer, and norms, for which moments are moved, where they are needed."""
    ctx, shape = UpdateContext(kernels), trial.w.shape
    if "input_factors" in optimizer.needs and len(shape) == 2:
        sides = (random.normal((at, "factor", 0, side), 0, n * n).reshape(n, n) for side, n in enumerate(shape))
        first, second = (x @ x.T + np.eye(len(x), dtype=np.float32) for x in sides)
        ctx = replace(ctx, factors=(first, second))
    return with_norms(optimizer, ctx, trial.w, trial.gradients[at], trial.state, STEPS[at])


# -- Refusals: no optimizer, no shapes, and broken promises of `update` ------------------------------------------------


def _check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optimizer, and for one that says of itself what nobody understands."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"check_shardable asks for an optimizer with its settings, found {optimizer!r}; write "
                         "check_shardable(zs.optim.Adam(lr=0.01)), or derive your own from zs.optim.Optimizer")
    require_cut_and_needs(optimizer)
    try:
        copy.deepcopy(optimizer)
    except Exception as error:
        raise ValueError(f"{type(optimizer).__name__} cannot be copied ({type(error).__name__}: {error}), and every "
                         "rank has one of its own; keep numbers in it, and state in its slots") from error


def _usable_trials(optimizer: Optimizer, shapes: Sequence[Shape], seed: int,
                   kernels: NumpyKernels) -> list[TensorTrial]:
    """A trial for each shape that the optimizer takes.

    Raises ValueError for what is no shape, if it takes none, and for an update that breaks its promise.
    """
    for shape in cast(Sequence[Any], shapes):
        if not isinstance(shape, tuple) or not all(map(is_count, shape)) or math.prod(shape) < 2:
            raise ValueError(f"check_shardable takes shapes of tensors that can be cut, found {shape!r}; write tuples "
                             "with two elements or more, as in shapes=[(23,), (12, 7)]")
    trials, said = [], "no shapes were given"
    for shape in shapes:
        try:
            trials.append(_tried(optimizer, shape, seed, kernels))
        except BrokenPromise:
            raise
        except Exception as error:  # a user's own class may refuse tensors of a shape in any way
            said = f"{type(error).__name__}: {error}"
    if not trials:
        raise ValueError(f"{type(optimizer).__name__} updates no tensor of the shapes "
                         f"{', '.join(map(str, shapes))}; it says {said}")
    return trials


def _tried(optimizer: Optimizer, shape: Shape, seed: int, kernels: NumpyKernels) -> TensorTrial:
    """A trial of this shape; BrokenPromise where steps change the gradient, or nothing, and ValueError for state too
    large to try."""
    name = type(optimizer).__name__
    checked_slots(optimizer, shape)
    if state_nbytes(optimizer, shape) > LARGEST_NBYTES:
        raise ValueError(f"{name} keeps {state_nbytes(optimizer, shape):,} bytes for a tensor {shape}, too many to try")
    trial = _new_trial(optimizer, shape, seed)
    after = trial.copy()
    _run(optimizer, kernels, [after])
    if any((before.view(np.uint32) != g.view(np.uint32)).any()
           for before, g in zip(trial.gradients, after.gradients, strict=True)):
        raise BrokenPromise(f"{name}.update changes the gradient, which others still read; work on a copy")
    if _difference(trial.bits(), after.bits(), "") is None:
        raise BrokenPromise(f"{name}.update changes nothing in {len(STEPS)} steps; update in place, with w -= ... and "
                            "state['m'][...] = ..., and not w = w - ..., which makes another w; what it returns is "
                            "not looked at")
    return trial
