"""What a rank holds of a model between steps: parameters, gradients, master weights, optimizer state.

Legend: n elements of the padded vector, s of this rank's shard; at rest an array is (n,) or (s,) by its placement.
"""

from collections.abc import Iterator

import numpy as np

from zerosim.models.units import Model
from zerosim.numerics.blocks import spans
from zerosim.numerics.formats import format_of
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.ranks.memory import poison
from zerosim.ranks.rank import Rank
from zerosim.zero.layout import Entry, Layout, Piece
from zerosim.zero.placements import REPLICATED, SHARDED, Placement, Stage

FP32 = np.dtype(np.float32)


class States:
    """The arrays at rest, each under its placement, and the views of them that a step works on."""

    def __init__(
        self, rank: Rank, model: Model, optimizer: Optimizer, layout: Layout, stage: Stage, policy: Policy
    ) -> None:
        self.rank, self.model, self.layout, self.stage, self.policy = rank, model, layout, stage, policy
        self.parameter = self._alloc(stage.parameters, policy.compute_dtype, "parameter")
        self.gradient = self._alloc(stage.gradients, policy.accumulate_dtype, "gradient")
        self.master = self.parameter if self.parameter_is_master else self._alloc(stage.optimizer, FP32, "master")
        length = self.length(stage.optimizer)
        self.slots = {name: self._alloc(stage.optimizer, format_of(slot.format).dtype, "optimizer_state", name)
                      for name, slot in optimizer.slots((length,)).items()}
        for slot in self.slots.values():
            for piece in self.pieces(stage.optimizer):
                slot[at(piece, stage.optimizer)] = 0
        self._initialize()

    @property
    def parameter_is_master(self) -> bool:
        """True where compute is fp32 and the rank's parameters cover what its optimizer updates: no second copy."""
        covered = self.stage.parameters is REPLICATED or self.stage.optimizer is SHARDED
        return self.policy.compute_dtype == FP32 and covered

    @property
    def master_placement(self) -> Placement:
        """How ``master`` rests: as the optimizer's state, or as the parameter that it is."""
        return self.stage.parameters if self.parameter_is_master else self.stage.optimizer

    def length(self, placement: Placement) -> int:
        """Elements at rest under a placement."""
        return self.layout.shard_length(self.rank.index) if placement is SHARDED else self.layout.length

    def pieces(self, placement: Placement) -> list[Piece]:
        """The valid pieces that this rank holds under a placement: its own, or every rank's in rank order."""
        owners = [self.rank.index] if placement is SHARDED else range(self.layout.ranks)
        return [piece for owner in owners for piece in self.layout.valid(owner)]

    def _alloc(self, placement: Placement, dtype: np.dtype, kind: str, name: str = "") -> np.ndarray:
        array = self.rank.memory.alloc(self.length(placement), dtype, kind, name or kind)
        clear_padding(array, self.layout, placement, self.rank)
        return array

    def _initialize(self) -> None:
        """Draws the first values piece by piece: no rank holds more than it keeps, and no value depends on N."""
        kernels, stage = self.rank.kernels, self.stage
        for array, placement in ((self.master, self.master_placement), (self.parameter, stage.parameters)):
            for piece in self.pieces(placement):
                target = array[at(piece, placement)]
                for entry, low, high in self._entries_in(piece.vector):
                    values = self._first_values(entry, low - entry.low, high - low)
                    kernels.cast_pack(values, target[low - piece.vector.start:high - piece.vector.start])

    def _entries_in(self, vector: slice) -> Iterator[tuple[Entry, int, int]]:
        """The parameters that overlap a stretch of the vector, each with the overlap, in blocks."""
        for entry in self.layout.entries:
            low, high = max(entry.low, vector.start), min(entry.high, vector.stop)
            for span in spans(max(0, high - low)):
                yield entry, low + span.start, low + span.stop

    def _first_values(self, entry: Entry, start: int, count: int) -> np.ndarray:
        unit = next(unit for unit in self.model.units if unit.name == entry.unit)
        return unit.initial(entry.name, start, count)


def at(piece: Piece, placement: Placement) -> slice:
    """Where a piece lies in an array that rests under a placement."""
    return piece.shard if placement is SHARDED else piece.vector


def clear_padding(array: np.ndarray, layout: Layout, placement: Placement, rank: Rank) -> None:
    """Sets padding to zero, so that no chance bits travel; in debug mode to NaN, so that a leak is seen."""
    for low, high in padding_of(layout, placement, rank.index):
        if rank.memory.debug:
            poison(array[low:high])
        else:
            array[low:high] = 0


def padding_of(layout: Layout, placement: Placement, rank: int) -> Iterator[tuple[int, int]]:
    """The stretches of padding in an array at rest."""
    if placement is not SHARDED:
        yield from ((region.valid_high, region.high) for region in layout.regions)
        return
    for piece, region in zip(layout.valid(rank), layout.regions, strict=True):
        yield piece.shard.stop, piece.shard.start + region.bounds[rank + 1] - region.bounds[rank]
