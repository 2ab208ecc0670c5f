"""May an optimizer's state be cut? A property that can be tested: update the pieces, and compare bits.

ZeRO may cut an optimizer's state anywhere if and only if the update of element i reads nothing but element i's weight,
gradient and state. An optimizer is not taken at its word: it runs on random tensors, whole and in pieces, beside others
and alone. A tool for those who write optimizers: no engine needs it. Every trial is a function of its seed.

Legend: n elements of a tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.checks import is_count
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer, Slot, UpdateContext, state_nbytes
from zerosim.optim.tensor_norms import with_norms

# -- Trials: runs on random tensors ------------------------------------------------------------------------------------
# A run carries the state from step to step, and between steps rounds what rests in 16 bits.

# The last one is a multiple of 2 to 16, of 100 and 1000 and of the powers of two up to 256: for what is done every so
# many steps only.
STEPS = (1, 2, 3, 10, 288_288_000)
Shape = tuple[int, ...]


@dataclass
class TensorTrial:
    """A tensor or piece: weights and a gradient for each step, as the update wants them; state, at rest; its slots.

    ``tensor`` is the shape of the tensor; the arrays have it too, or are flat where the optimizer may be cut anywhere.
    """

    tensor: Shape
    w: np.ndarray
    gradients: list[np.ndarray]
    state: dict[str, np.ndarray]
    slots: dict[str, Slot]

    def copy(self) -> TensorTrial:
        """The same, sharing no memory."""
        return copy.deepcopy(self)

    def move(self) -> None:
        """Everything moves to other memory, as it does through a checkpoint."""
        self.w, self.state = self.w.copy(), {name: slot.copy() for name, slot in self.state.items()}

    def bits(self) -> dict[str, np.ndarray]:
        """Weights and state as integers, all NaN as one."""
        arrays = {"w": self.w, **self.state}
        return {name: np.where(x != x, np.float32(np.nan), x).astype(np.float32).reshape(-1).view(np.uint32)
                for name, x in arrays.items()}


def new_trial(optimizer: Optimizer, shape: Shape, seed: int) -> TensorTrial:
    """A tensor as the optimizer wants it, with gradients of many magnitudes, some of them zero, and state of zeros."""
    count, flat = int(np.prod(shape)), optimizer.cut_of(shape) == "anywhere"
    own, slots = (count,) if flat else shape, optimizer.slots(shape)
    normal = random.normal((seed, "numbers", 0, str(shape)), 0, count * (1 + len(STEPS)))
    words = random.bits((seed, "magnitudes", 0, str(shape)), 0, count * len(STEPS)).reshape(len(STEPS), *own)
    w, *gradients = normal.reshape(1 + len(STEPS), *own)
    gradients = [np.where(word % 16 == 0, 0, g * 10.0 ** -(word % 5.0)).astype(np.float32)
                 for g, word in zip(gradients, words, strict=True)]
    state = {name: np.zeros(own if slot.shape == shape else slot.shape, np.float32) for name, slot in slots.items()}
    return TensorTrial(shape, w.copy(), gradients, state, slots)


def pieces_of(trial: TensorTrial, bounds: Sequence[int]) -> list[TensorTrial]:
    """The tensor cut at these bounds, 0 and n included: flat pieces with their part of the state, which is flat too."""
    w, gradients = trial.w.reshape(-1), [g.reshape(-1) for g in trial.gradients]
    return [TensorTrial(trial.tensor, w[a:b].copy(), [g[a:b].copy() for g in gradients],
                  {name: slot.reshape(-1)[a:b].copy() for name, slot in trial.state.items()}, trial.slots)
            for a, b in pairwise(bounds)]


class TrialRun:
    """Steps of one optimizer. ``norms``, where given, are those that a run of the whole tensor found, by step."""

    def __init__(self, kernels: NumpyKernels, norms: Sequence[tuple[float, float] | None] = ()) -> None:
        self.kernels, self.given, self.norms = kernels, norms, list[tuple[float, float] | None]()

    def step(self, optimizer: Optimizer, trials: Sequence[TensorTrial], at: int) -> list[object]:
        """Step number ``at`` of STEPS on each of the tensors or pieces, in their order; what the updates return."""
        contexts, answers = [self._context(optimizer, trial, at) for trial in trials], list[object]()
        for trial, ctx in zip(trials, contexts, strict=True):
            update: Callable[..., object] = optimizer.update  # a user's may return something, and should not
            answers.append(update(ctx, trial.w, trial.gradients[at], trial.state, STEPS[at]))
            for name, slot in trial.slots.items():
                _rest(self.kernels, trial.state[name], slot.format)
        return answers

    def steps(self, optimizer: Optimizer, trials: Sequence[TensorTrial]) -> None:
        """All steps."""
        for at in range(len(STEPS)):
            self.step(optimizer, trials, at)

    def _context(self, optimizer: Optimizer, trial: TensorTrial, at: int) -> UpdateContext:
        """Moves the moments of those that need norms; a piece gets the whole tensor's norms, and not its own."""
        ctx = UpdateContext(self.kernels, factors=_factors(optimizer, trial.w.shape, at))
        ctx = with_norms(optimizer, ctx, trial.w, trial.gradients[at], trial.state, STEPS[at])
        if self.given:
            return replace(ctx, norms=self.given[at])
        self.norms.append(ctx.norms)
        return ctx


def _rest(kernels: NumpyKernels, x: np.ndarray, fmt: str) -> None:
    """Rounds x (fp32) in place to what it is after resting in a format."""
    if format_of(fmt).dtype != x.dtype:
        at_rest = np.empty(x.shape, format_of(fmt).dtype)
        kernels.cast_pack(x, at_rest)
        kernels.cast_pack(at_rest, x)


def random_bounds(count: int, seed: int, trials: int) -> Iterator[list[int]]:
    """Cuts of n elements into two or more pieces: every single cut of a few elements, else random ones."""
    if count <= 8:
        yield from ([0, at, count] for at in range(1, count))
        return
    words = random.bits((seed, "cuts", 0, count), 0, 4 * trials).reshape(trials, 4)
    for row in words:
        yield [0, *sorted({1 + int(word) % (count - 1) for word in row[:1 + int(row[3]) % 3]}), count]


def _factors(optimizer: Optimizer, shape: Shape, at: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Random factors of a linear layer, where they are needed."""
    if "input_factors" not in optimizer.needs or len(shape) != 2:
        return None
    sides = (random.normal((at, "factor", 0, side), 0, n * n).reshape(n, n) for side, n in enumerate(shape))
    first, second = (x @ x.T + np.eye(len(x), dtype=np.float32) for x in sides)
    return first, second


# -- Dependence: found by changing one thing at a time -----------------------------------------------------------------

LARGE = 1e3  # a change that no threshold overlooks


def dependence_of(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> str:
    """In words: other elements' numbers, the index, or the length. The trial is one whose pieces have differed."""
    if _reads_others(optimizer, kernels, trial):
        return "the update of an element reads other elements' gradients or weights"
    if _uneven(optimizer, kernels, trial):
        return "the update of an element depends on its index inside the piece"
    if _long_and_short(optimizer, kernels, trial):
        return "the update of an element depends on the length of the piece"
    return "the update of an element depends on where the tensor is cut"


def _reads_others(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> bool:
    """True if changing one element's numbers, in one way or another, changes another element's update."""
    plain = trial.copy()
    _run(optimizer, kernels, plain)
    count = trial.w.size
    for at in {0, count // 2, count - 1}:
        for factor in (LARGE, -LARGE, 0.0):
            changed = trial.copy()
            changed.w.reshape(-1)[at] *= factor
            for g in changed.gradients:
                g.reshape(-1)[at] = factor
            _run(optimizer, kernels, changed)
            others = np.arange(count) != at
            if (plain.bits()["w"] != changed.bits()["w"])[others].any():
                return True
    return False


def _uneven(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> bool:
    """True if equal elements become unequal."""
    even = _even(trial)
    _run(optimizer, kernels, even)
    bits = even.bits()["w"]
    return bool((bits != bits[0]).any())


def _long_and_short(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> bool:
    """True if equal elements become others in a shorter tensor."""
    long = _even(trial)
    _run(optimizer, kernels, long)
    for count in {1, trial.w.size // 2, trial.w.size - 1}:
        short = pieces_of(_even(trial), [0, count, trial.w.size])[0]
        _run(optimizer, kernels, short)
        if long.bits()["w"][0] != short.bits()["w"][0]:
            return True
    return False


def _even(trial: TensorTrial) -> TensorTrial:
    """The same tensor with the same number everywhere."""
    even = trial.copy()
    even.w[...] = 0.5
    for at, g in enumerate(even.gradients):
        g[...] = np.float32(0.25 * (-1)**at / (1 + at))
    return even


def _run(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> None:
    TrialRun(kernels).steps(copy.deepcopy(optimizer), [trial])


# -- Refusals: no optimizer, and broken promises of `update` -----------------------------------------------------------

KNOWN_CUTS = ("anywhere", "tensor", "matrix", "layer")
NEEDS = frozenset({"whole_matrix", "tensor_norm", "input_factors"})
LARGEST_NBYTES = 1 << 27  # of state for one tensor of a trial


def checked_optimizer(optimizer: Any) -> None:
    """Raises ValueError for what is no optimizer, and for one that says of itself what nobody understands."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"check_shardable asks for an optimizer with its settings, found {optimizer!r}; write "
                         "check_shardable(zs.optim.Adam(lr=0.01)), or derive your own from zs.optim.Optimizer")
    name, cut = type(optimizer).__name__, getattr(optimizer, "cut", None)
    needs: Any = getattr(optimizer, "needs", None)
    if cut not in KNOWN_CUTS:
        raise ValueError(f"{name} says cut={cut!r}; write one of {', '.join(map(repr, KNOWN_CUTS))} into its class")
    if not isinstance(needs, frozenset | set) or not needs <= NEEDS:
        raise ValueError(f"{name} says needs={needs!r}; write a frozenset of {', '.join(sorted(NEEDS))} into its class")
    try:
        copy.deepcopy(optimizer)
    except Exception as error:
        raise ValueError(f"{name} cannot be copied ({type(error).__name__}: {error}), and every rank has one of its "
                         "own; keep numbers in it, and state in its slots") from error


def usable_trials(optimizer: Optimizer, shapes: Sequence[Shape], seed: int, kernels: NumpyKernels) -> list[TensorTrial]:
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
            _check_slots(optimizer, shape)
            trial = new_trial(optimizer, shape, seed)
            _try_a_step(optimizer, kernels, trial.copy())
        except BrokenPromise:
            raise
        except Exception as error:  # a user's own class may refuse tensors of a shape in any way
            said = f"{type(error).__name__}: {error}"
        else:
            trials.append(trial)
    if not trials:
        raise ValueError(f"{type(optimizer).__name__} updates no tensor of the shapes "
                         f"{', '.join(map(str, shapes))}; it says {said}")
    return trials


class BrokenPromise(ValueError):
    """An update does what none may do, or not what each must."""


def _check_slots(optimizer: Optimizer, shape: Shape) -> None:
    """Raises BrokenPromise for slots that are none, ValueError for state too large to try."""
    name, slots = type(optimizer).__name__, cast(Any, optimizer.slots(shape))  # a user's may return anything
    if not isinstance(slots, dict) or not all(isinstance(slot, Slot) and slot.format in FORMATS
                                              for slot in slots.values()):
        raise BrokenPromise(f"{name}.slots({shape}) returns {slots!r}; return a dict of names and Slot(shape, format), "
                            f"with a format of {', '.join(FORMATS)}")
    if state_nbytes(optimizer, shape) > LARGEST_NBYTES:
        raise ValueError(f"{name} keeps {state_nbytes(optimizer, shape):,} bytes for a tensor {shape}, too many to try")


def _try_a_step(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial) -> None:
    """Steps must work in place and leave the gradient alone."""
    name, before, handed = type(optimizer).__name__, trial.copy(), dict(trial.state)
    answers = TrialRun(kernels).step(copy.deepcopy(optimizer), [trial], 0)
    if (before.gradients[0].view(np.uint32) != trial.gradients[0].view(np.uint32)).any():
        raise BrokenPromise(f"{name}.update changes the gradient, which others still read; work on a copy")
    if any(trial.state.get(slot) is not handed.get(slot) for slot in {**handed, **trial.state}):
        raise BrokenPromise(f"{name}.update replaces its state, and what it puts there is lost; declare it in slots(), "
                            "and write into it: state['m'][...] = ...")
    if _equal_bits(before, trial) and any(answer is not None for answer in answers):
        raise BrokenPromise(f"{name}.update returns something and changes nothing; update in place: w -= ..., "
                            "state['m'][...] = ...")
    TrialRun(kernels).steps(copy.deepcopy(optimizer), [trial])
    if _equal_bits(before, trial):
        raise BrokenPromise(f"{name}.update changes nothing in {1 + len(STEPS)} steps; update in place, with w -= ..., "
                            "and not w = w - ..., which makes another w")


def _equal_bits(one: TensorTrial, other: TensorTrial) -> bool:
    """True where weights and state are the same."""
    return all((a == b).all() for a, b in zip(one.bits().values(), other.bits().values(), strict=True))


# -- The check ---------------------------------------------------------------------------------------------------------

Verdict = Literal["anywhere", "tensor", "no"]
# From small to large, so that the first counterexample is a small one. The longest is longer than two blocks of the
# kernels; an engine hands over no piece that is longer than one.
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2), (5,), (3, 4), (4, 3), (23,), (12, 7), (1030,), (131089,))
CUTS = 3  # random cuts of each tensor
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
    checked_optimizer(optimizer)
    kernels = NumpyKernels()
    trials = usable_trials(optimizer, shapes, seed, kernels)
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


Finding = tuple[str, str]  # the reason, the counterexample


def _hidden_state(optimizer: Optimizer, kernels: NumpyKernels, trials: Sequence[TensorTrial]) -> Finding | None:
    """The first sign of state that passes between tensors or steps but by the slots; None where nothing does."""
    beside = [trial.copy() for trial in trials]
    TrialRun(kernels).steps(copy.deepcopy(optimizer), beside)
    again = [trial.copy() for trial in trials]
    TrialRun(kernels).steps(copy.deepcopy(optimizer), again)
    anew = [trial.copy() for trial in trials]
    for trial in reversed(anew):
        for at in range(len(STEPS)):
            trial.move()
            TrialRun(kernels).step(copy.deepcopy(optimizer), [trial], at)
    for others, reason, what in ((again, UNREPEATABLE, "in a second run of the same steps"),
                                 (anew, REMEMBERED, "alone and begun anew at each step")):
        for one, other in zip(beside, others, strict=True):
            found = difference(one.bits(), other.bits(), f"A tensor {one.tensor} beside others, and {what}")
            if found is not None:
                return reason, found
    return None


def _differing_in_pieces(optimizer: Optimizer, kernels: NumpyKernels, trial: TensorTrial, seed: int) -> Finding | None:
    """The first difference when a tensor is updated in flat pieces; None where every bit agrees."""
    odd = next((name for name, slot in trial.slots.items() if slot.shape != trial.tensor), None)
    if odd is not None:
        return ("its state has another shape than the tensor, and belongs to all of it",
                f"For a tensor {trial.tensor} it keeps {odd!r} {trial.slots[odd].shape}, which cannot be cut with it.")
    whole, run = trial.copy(), TrialRun(kernels)
    run.steps(copy.deepcopy(optimizer), [whole])
    for bounds in random_bounds(trial.w.size, seed, CUTS):
        pieces, cut = pieces_of(trial, bounds), f"A tensor {trial.tensor} whole, and cut at {bounds[1:-1]}"
        try:
            for piece in pieces:
                TrialRun(kernels, run.norms).steps(copy.deepcopy(optimizer), [piece])
        except Exception as error:
            return "it refuses pieces of a tensor", f"{cut}: {type(error).__name__}: {error}"
        together = {name: np.concatenate([piece.bits()[name] for piece in pieces]) for name in pieces[0].bits()}
        found = difference(whole.bits(), together, cut)
        if found is not None:
            return dependence_of(optimizer, kernels, trial), found
    return None


def difference(one: dict[str, Any], other: dict[str, Any], what: str) -> str | None:
    """The first element of weights or state that differs, as a sentence; None where every bit agrees."""
    for name, bits in one.items():
        at = np.flatnonzero(bits != other[name])
        if at.size:
            first, second = (x[name][at[:1]].view(np.float32)[0] for x in (one, other))
            return (f"{what}: {at.size} of {bits.size} elements of {name} differ after {len(STEPS)} steps; element "
                    f"{at[0]} becomes {first!s} and {second!s}.")
    return None
