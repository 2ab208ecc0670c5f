"""A piece of a parameter in an update: its arrays where they rest, where the update is made, and by blocks in fp32.

Legend: n elements of a stretch of a piece. In the code w are master weights, gradient the sum over ranks as it rests, g
its mean in fp32.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.checks import FP32
from zerosim.numerics.places import DEVICE, DISK
from zerosim.optim.base import upcast
from zerosim.zero.layout import ParameterPiece, Piece
from zerosim.zero.param_group import ParamGroup, at
from zerosim.zero.updated_parameters import UpdatedParameters

MASTER, GRADIENT = "", "the gradient"  # among the names of slots


@dataclass(frozen=True, slots=True)
class StepContext:
    """The numbers that all updates of one step share: its own, the factor of clipping, the schedule's factor of lr, and
    the factors of activations and output gradients by weight.

    ``updated`` are the parameters that the host updates.
    """

    step: int
    clip_factor: float
    lr_factor: float | None
    factors: Mapping[str, Any]
    updated: UpdatedParameters

    def optimizer(self, group: ParamGroup, name: str) -> Any:
        """The optimizer of a parameter, with the lr of this step where a schedule changes it."""
        optimizer: Any = group.optimizers[name]
        return optimizer if self.lr_factor is None else optimizer.with_lr(optimizer.lr * self.lr_factor)


def gradient_of(group: ParamGroup, piece: Piece) -> np.ndarray:
    """The piece of the gradient's sum."""
    return group.reduced_gradient.gradient[at(piece, group.reduced_gradient.placement)]


def stretches(group: ParamGroup, piece: ParameterPiece, context: StepContext, *,
              unchanged: Collection[str] = (GRADIENT,)) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """The piece of each array at rest, by name, where the update is made: as it is, or copies, stretch by stretch."""
    transfers, at_rest = group.transfers, arrays_at_rest(group, piece, context)
    for here in transfers.stretches(piece.count):
        transfers.read_ahead(*(x[transfers.after(here)] for x in at_rest.values()))
        with transfers.staged({name: x[here] for name, x in at_rest.items()}, transfers.update_place,
                              written=at_rest.keys() - unchanged) as arrays:
            yield here, arrays


def read_next(group: ParamGroup, piece: ParameterPiece, context: StepContext) -> None:
    """Begins to read from disk what the update of the next piece needs first, where that is of elements."""
    if group.transfers.offload.optimizer == DISK:
        for after in group.pieces[group.pieces.index(piece) + 1:][:1]:
            if group.optimizers[after.entry.name].cut_of(after.entry.shape) == "anywhere":
                group.transfers.read_ahead(
                    *(x[group.transfers.after(slice(0))] for x in arrays_at_rest(group, after, context).values()))


def update_kernels(group: ParamGroup) -> Any:
    """The arithmetic of the place where the update is made."""
    return group.transfers.kernels_at(group.transfers.update_place)


def blocks(group: ParamGroup, arrays: Mapping[str, np.ndarray],
           context: StepContext) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """(w, g, state) of a stretch in blocks, all fp32 (n,): the arrays themselves, or copies that are rounded back."""
    kernels, divisor = update_kernels(group), group.reduced_gradient.divisor
    gradient, state = arrays[GRADIENT], {name: x for name, x in arrays.items() if name != GRADIENT}
    g32 = kernels.scratch("gradient", min(kernels.BLOCK, len(gradient)), FP32)
    for here in spans(len(gradient), kernels.BLOCK):
        g = g32[:here.stop - here.start]
        kernels.gradient_block(gradient[here], divisor, context.clip_factor, g)
        with upcast(kernels, lambda name, shape: kernels.scratch(f"upcast {name}", shape[0], FP32),
                    {name: x[here] for name, x in state.items()}) as wide:
            yield wide[MASTER], g, {name: x for name, x in wide.items() if name != MASTER}


def arrays_at_rest(group: ParamGroup, piece: ParameterPiece, context: StepContext) -> dict[str, np.ndarray]:
    """The piece of the master, of the reduced gradient and of each slot."""
    return {MASTER: context.updated.master(group, piece), GRADIENT: gradient_of(group, piece),
            **{name: group.slot(piece, name) for name in group.slots_of(piece.entry)}}


def note_update(group: ParamGroup, arrays: Mapping[str, np.ndarray], cast_nbytes: int) -> None:
    """Notes what the device moves for an update, which is what it costs on any: the gradient is read, the rest read and
    written, and what is cast.

    The operations per element differ from one optimizer to the next, and none takes longer than its memory traffic.
    """
    if group.transfers.update_place == DEVICE:
        group.rank.trace.compute(nbytes=2 * sum(x.nbytes for x in arrays.values()) - arrays[GRADIENT].nbytes
                                 + cast_nbytes)
