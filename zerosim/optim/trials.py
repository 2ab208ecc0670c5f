"""Trial runs of an optimizer on random tensors: whole, in pieces, beside others and alone.

Legend: n elements of a tensor. A run carries the state from step to step, and between steps rounds what rests in
16 bit, as the state's keeper does. Every trial is a function of its seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from zerosim.numerics import random
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Group, Optimizer, Slot, UpdateContext
from zerosim.optim.tensor_norms import with_norms

# The last one is a multiple of 2 to 16, of 100 and 1000 and of the powers of two up to 256: for what is done every so
# many steps only.
STEPS = (1, 2, 3, 10, 288_288_000)
Shape = tuple[int, ...]


@dataclass
class Trial:
    """A tensor or piece: weights and a gradient for each step, as the update wants them; state, at rest; its slots.

    ``tensor`` is the shape of the tensor; the arrays have it too, or are flat where the optimizer may be cut anywhere.
    """

    tensor: Shape
    w: np.ndarray
    gradients: list[np.ndarray]
    state: dict[str, np.ndarray]
    slots: dict[str, Slot]

    def copy(self) -> Trial:
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


def new_trial(optimizer: Optimizer, shape: Shape, seed: int) -> Trial:
    """A tensor as the optimizer wants it, with gradients of many magnitudes, some of them zero, and state of zeros."""
    count, flat = int(np.prod(shape)), optimizer.cut_of(shape) == "anywhere"
    own, slots = (count,) if flat else shape, optimizer.slots(shape)
    normal = random.normal((seed, "numbers", 0, str(shape)), 0, count * (1 + len(STEPS)))
    words = random.bits((seed, "magnitudes", 0, str(shape)), 0, count * len(STEPS)).reshape(len(STEPS), *own)
    w, *gradients = normal.reshape(1 + len(STEPS), *own)
    gradients = [np.where(word % 16 == 0, 0, g * 10.0 ** -(word % 5.0)).astype(np.float32)
                 for g, word in zip(gradients, words, strict=True)]
    state = {name: np.zeros(own if slot.shape == shape else slot.shape, np.float32) for name, slot in slots.items()}
    return Trial(shape, w.copy(), gradients, state, slots)


def pieces_of(trial: Trial, bounds: Sequence[int]) -> list[Trial]:
    """The tensor cut at these bounds, 0 and n included: flat pieces with their part of the state, which is flat too."""
    w, gradients = trial.w.reshape(-1), [g.reshape(-1) for g in trial.gradients]
    return [Trial(trial.tensor, w[a:b].copy(), [g[a:b].copy() for g in gradients],
                  {name: slot.reshape(-1)[a:b].copy() for name, slot in trial.state.items()}, trial.slots)
            for a, b in pairwise(bounds)]


class Run:
    """Steps of one optimizer. ``norms``, where given, are those that a run of the whole tensor found, by step."""

    def __init__(self, kernels: NumpyKernels, norms: Sequence[tuple[float, float] | None] = (),
                 group: Group | None = None) -> None:
        self.group = group
        self.kernels, self.given, self.norms = kernels, norms, list[tuple[float, float] | None]()

    def step(self, optimizer: Optimizer, trials: Sequence[Trial], at: int) -> list[object]:
        """Step number ``at`` of STEPS on each of the tensors or pieces, in their order; what the updates return."""
        contexts, answers = [self._context(optimizer, trial, at) for trial in trials], list[object]()
        for trial, ctx in zip(trials, contexts, strict=True):
            update: Callable[..., object] = optimizer.update  # a user's may return something, and should not
            answers.append(update(ctx, trial.w, trial.gradients[at], trial.state, STEPS[at], self.group))
            for name, slot in trial.slots.items():
                _rest(self.kernels, trial.state[name], slot.format)
        return answers

    def steps(self, optimizer: Optimizer, trials: Sequence[Trial]) -> None:
        """All steps."""
        for at in range(len(STEPS)):
            self.step(optimizer, trials, at)

    def _context(self, optimizer: Optimizer, trial: Trial, at: int) -> UpdateContext:
        """Moves the moments of those that need norms; a piece gets the whole tensor's norms, and not its own."""
        ctx = UpdateContext(self.kernels, factors=_factors(optimizer, trial.w.shape, at))
        ctx = with_norms(optimizer, ctx, trial.w, trial.gradients[at], trial.state, STEPS[at])
        if self.given:
            return replace(ctx, norms=self.given[at])
        self.norms.append(ctx.norms)
        return ctx


def reads_its_group(optimizer: Optimizer) -> bool:
    """False for an optimizer with an lr whose updates are the same, bit for bit, with any other for the call;
    True also where it updates no tensor of the shapes that are tried."""
    for shape in ((3, 4), (12,)):
        found = []
        for lr in (0.01, 0.0025):
            trial = new_trial(optimizer, shape, 0)
            try:
                Run(NumpyKernels(), group={"lr": lr}).steps(copy.deepcopy(optimizer), [trial])
            except Exception:  # a user's own class may refuse tensors of a shape in any way
                break
            found.append(trial.bits()["w"].tobytes())
        if len(found) == 2:
            return found[0] != found[1]
    return True


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
