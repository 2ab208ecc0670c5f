"""May this optimizer's state be cut? A property that can be tested: update the pieces, and compare bits.

ZeRO may cut an optimizer's state anywhere if and only if the update of element i reads nothing but element i's weight,
gradient and state. What an optimizer says of itself is not asked; it is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer, UpdateContext

SHAPES = ((12, 7), (5, 5), (23,))
STEPS = 3
TRIALS = 4
Tensors = list[tuple[np.ndarray, dict[str, np.ndarray]]]  # weights and state, of each tensor or piece


@dataclass(frozen=True, slots=True)
class Shardability:
    """Where the state may be cut: "anywhere", on the borders of a "tensor", or "no"where; and what shows it.

    ``counterexample`` says what differed where a cut was not allowed; ``claimed`` is what the optimizer says of itself.
    """

    cut: str
    claimed: str
    counterexample: str | None

    @property
    def is_honest(self) -> bool:
        """True where the optimizer claims no more than was found."""
        allowed = {"anywhere": ("anywhere", "tensor", "matrix", "layer"), "tensor": ("tensor", "matrix", "layer"),
                   "no": ()}
        return self.claimed in allowed[self.cut]


def check_shardable(optimizer: Optimizer, seed: int = 0) -> Shardability:
    """Runs the optimizer on random tensors, whole and in pieces, together and alone, for several steps.

    Raises ValueError for what is no optimizer, and lets out what the optimizer raises on whole tensors.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"check_shardable asks for an optimizer with its settings, found {optimizer!r}; write "
                         "check_shardable(zs.optim.Adam(lr=0.01))")
    rng = np.random.default_rng(seed)
    shapes = [shape for shape in SHAPES if _accepts(optimizer, shape)]
    alone = _differs_alone(optimizer, shapes, rng)
    if alone is not None:
        return Shardability("no", optimizer.cut, alone)
    return Shardability(*_cut_found(optimizer, shapes, rng))


def _cut_found(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]],
               rng: np.random.Generator) -> tuple[str, str, str | None]:
    for shape in shapes:
        for _ in range(TRIALS):
            found = _differs_in_pieces(optimizer, shape, rng)
            if found is not None:
                return "tensor", optimizer.cut, found
    return "anywhere", optimizer.cut, None


def _accepts(optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
    """False for a shape of which the optimizer says that it is none of its tensors."""
    try:
        optimizer.slots(shape)
    except ValueError:
        return False
    return True


# -- one tensor, whole and in pieces ----------------------------------------------------------------------------------


def _differs_in_pieces(optimizer: Optimizer, shape: tuple[int, ...], rng: np.random.Generator) -> str | None:
    """What differs when a tensor is updated in two or three flat pieces; None where every bit agrees."""
    count = int(np.prod(shape))
    w, gradients = rng.standard_normal(shape, np.float32), rng.standard_normal((STEPS, *shape), np.float32)
    bounds = [0, *sorted(rng.choice(np.arange(1, count), rng.integers(1, 3), replace=False).tolist()), count]
    whole = _whole(optimizer, [w], [[g] for g in gradients])
    try:
        pieces = _trained(optimizer, [w.reshape(-1)[a:b] for a, b in pairwise(bounds)],
                          [[g.reshape(-1)[a:b] for a, b in pairwise(bounds)] for g in gradients])
    except ValueError as error:
        return f"a flat piece of a tensor {shape} is refused: {error}"
    together = np.concatenate([w for w, _ in pieces])
    return _difference(whole[0][0], together, f"a tensor {shape} cut at {bounds[1:-1]}")


# -- several tensors, together and alone ------------------------------------------------------------------------------


def _differs_alone(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]], rng: np.random.Generator) -> str | None:
    """What differs when each tensor is updated without the others: then something passes between them."""
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    gradients = [[rng.standard_normal(shape, np.float32) for shape in shapes] for _ in range(STEPS)]
    together = _whole(optimizer, weights, gradients)
    for at in reversed(range(len(shapes))):
        alone = _whole(optimizer, [weights[at]], [[of_step[at]] for of_step in gradients])
        found = _difference(together[at][0], alone[0][0], f"a tensor {shapes[at]} beside others and alone")
        if found is not None:
            return found
    return None


def _whole(optimizer: Optimizer, weights: list[np.ndarray], gradients: list[list[np.ndarray]]) -> Tensors:
    """Each tensor as the optimizer wants it: flat where it says so, else in its shape."""
    flat = [optimizer.cut_of(w.shape) == "anywhere" for w in weights]
    shaped = [[g.reshape(-1) if is_flat else g for g, is_flat in zip(of_step, flat, strict=True)]
              for of_step in gradients]
    return _trained(optimizer, [w.reshape(-1) if is_flat else w for w, is_flat in zip(weights, flat, strict=True)],
                    shaped)


# -- training ---------------------------------------------------------------------------------------------------------


def _trained(optimizer: Optimizer, weights: list[np.ndarray], gradients: list[list[np.ndarray]]) -> Tensors:
    """Weights and state after all steps. State that rests in 16 bit is rounded between steps, as its keeper does."""
    ctx = UpdateContext(NumpyKernels())
    slots = [optimizer.slots(w.shape) for w in weights]
    tensors: Tensors = [(w.copy(), {name: np.zeros(slot.shape, np.float32) for name, slot in of_tensor.items()})
                        for w, of_tensor in zip(weights, slots, strict=True)]
    for step, of_step in enumerate(gradients, 1):
        for (w, state), g, of_tensor in zip(tensors, of_step, slots, strict=True):
            optimizer.update(_context(ctx, optimizer, w, g, state, step), w, g, state, step)
            for name, slot in of_tensor.items():
                state[name][...] = state[name].astype(format_of(slot.format).dtype).astype(np.float32)
    return tensors


def _context(ctx: UpdateContext, optimizer: Any, w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray],
             step: int) -> UpdateContext:
    """What the optimizer needs beside its arrays: any factors at all; norms that are fixed, since to add them up over
    pieces is the engine's matter and not the update's."""
    if "tensor_norm" in optimizer.needs:
        optimizer.advance(ctx, w, g, state, step, None)
        return replace(ctx, norms=(3.0, 2.0))
    if "input_factors" in optimizer.needs and w.ndim == 2:
        return replace(ctx, factors=(np.eye(w.shape[0], dtype=np.float32), 2 * np.eye(w.shape[1], dtype=np.float32)))
    return ctx


def _difference(a: np.ndarray, b: np.ndarray, what: str) -> str | None:
    found = np.flatnonzero(a.reshape(-1).view(np.uint32) != b.reshape(-1).view(np.uint32))
    if not found.size:
        return None
    at = int(found[0])
    first, second = (x.reshape(-1)[at] for x in (a, b))
    return (f"{what}: {found.size} of {a.size} weights differ after {STEPS} steps; first at {at}: {first!r} and "
            f"{second!r}")
