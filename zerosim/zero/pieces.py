"""The optimizer's work on pieces of parameters, block by block.

Legend: n elements of a piece. The gradient's fp32 copy never exists as a whole: fp32(sum) / divisor is made per block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from zerosim.numerics.blocks import spans
from zerosim.optim.base import Group, Optimizer, UpdateContext
from zerosim.zero import norms
from zerosim.zero.layout import ParameterPiece
from zerosim.zero.states import States, at
from zerosim.zero.wide import FP32, wide

Norms = tuple[float, float]  # of a tensor's weights, and of the direction of its update


@dataclass(frozen=True, slots=True)
class Moment:
    """What all updates of one step share: its number, the factor of clipping, the schedule's factor of lr, and the
    factors of activations and output gradients by weight."""

    step: int
    clip_factor: float = 1.0
    lr_factor: float | None = None
    factors: Mapping[str, Any] = field(default_factory=dict)

    def group(self, optimizer: Optimizer) -> Group | None:
        """The hyperparameters of this step, where a schedule changes them."""
        return None if self.lr_factor is None else {"lr": optimizer.lr * self.lr_factor}  # type: ignore[attr-defined]


def blocks(states: States, piece: ParameterPiece,
           moment: Moment) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """(w, g, state) of a piece in blocks, all fp32 (n,): the arrays at rest, or wide copies that are rounded back."""
    kernels, divisor = states.rank.kernels, states.gradient_sum.divisor
    w, s, slots = _at_rest(states, piece)
    g32 = kernels.scratch("gradient", min(kernels.BLOCK, len(w)), FP32)
    for here in spans(len(w), kernels.BLOCK):
        g = g32[:here.stop - here.start]
        kernels.gradient_block(s[here], divisor, moment.clip_factor, g)
        at_rest = {name: slot[here] for name, slot in slots.items()} | {"": w[here]}
        with wide(kernels, partial(_scratch, kernels), at_rest) as arrays:
            yield arrays[""], g, {name: arrays[name] for name in slots}


def _at_rest(states: States, piece: ParameterPiece) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The piece of the master, of the reduced gradient and of each slot."""
    reduced = states.gradient_sum
    return (states.master[at(piece, states.master_placement)], reduced.array[at(piece, reduced.placement)],
            {name: states.slot(piece, name) for name in states.slots_of(piece.entry)})


def _scratch(kernels: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Memory of the kernels' for the wide copy of one block of a slot, or of the weights."""
    found: np.ndarray = kernels.scratch(f"wide {name}", shape[0], FP32)
    return found


def update_piece(states: States, piece: ParameterPiece, moment: Moment, norms_of_tensor: Norms | None) -> None:
    """One step on a piece of a parameter whose state may be cut anywhere."""
    optimizer = states.optimizers[piece.entry.name]
    ctx, group = UpdateContext(states.rank.kernels, norms=norms_of_tensor), moment.group(optimizer)
    for w, g, state in blocks(states, piece, moment):
        optimizer.apply(ctx, w, g, state, moment.step, group)
    note_update(states, *_at_rest(states, piece))


def note_update(states: States, w: np.ndarray, s: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
    """What an update moves, which is what it costs on any hardware: the gradient is read, the rest read and written.

    The operations per element differ from one optimizer to the next, and none takes longer than its memory traffic.
    """
    states.rank.trace.compute(nbytes=s.nbytes + 2 * (w.nbytes + sum(slot.nbytes for slot in slots.values())))


def tensor_norms(states: States, moment: Moment) -> dict[str, Norms]:
    """The first half of the step of optimizers that need norms of whole tensors: moves the moments, and measures."""
    names = [name for name, optimizer in states.optimizers.items() if "tensor_norm" in optimizer.needs]
    return norms.tensor_norms(states, names, partial(_squares, states, moment))


def _squares(states: States, moment: Moment, piece: ParameterPiece) -> Norms:
    """The sums of squares of a piece's weights and of the direction in which its moments, moved now, point.

    The direction is that of the moments as they rest, rounded to their format: `update_piece` finds the same.
    """
    optimizer: Any = states.optimizers[piece.entry.name]
    kernels, group = states.rank.kernels, moment.group(optimizer)
    ctx, direction = UpdateContext(kernels), kernels.scratch("direction", min(kernels.BLOCK, piece.count), FP32)
    weights = directions = 0.0
    for w, g, state in blocks(states, piece, moment):
        optimizer.advance(ctx, w, g, state, moment.step, group)
    for w, g, state in blocks(states, piece, moment):
        optimizer.direction(ctx, w, g, state, moment.step, group, direction[:len(w)])
        weights += kernels.sum_of_squares(w)
        directions += kernels.sum_of_squares(direction[:len(w)])
    return weights, directions
