"""Gradients from a unit's backward to the optimizer: where they are written, added up over micro-batches, and reduced.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches.
Kept PARTIAL, the addends of all micro-batches are summed first and reduced once; kept SHARDED or REPLICATED, each
unit's gradient of each micro-batch is reduced as backward goes, then added. At k > 1 the two orders differ in bits.
"""

import numpy as np

from zerosim.models.context import Gradients
from zerosim.models.units import Unit
from zerosim.zero.placements import PARTIAL, SHARDED, Placement, redistribute
from zerosim.zero.states import States, clear_padding


class Accumulator:
    """One step's gradients of one rank."""

    def __init__(self, states: States) -> None:
        self.states, self.rank, self.policy, self.layout = states, states.rank, states.policy, states.layout
        self.placement = states.stage.gradients
        self.micro_batch = 0
        self._unit: np.ndarray | None = None

    # -- during backward ------------------------------------------------------------------------------------------

    def views(self, unit: Unit) -> Gradients:
        """Where the unit writes its gradients: views of one vector (u,) in the compute dtype, by name."""
        lies = self.layout.units[unit.name]
        self._unit = self._resting(lies) if self._writes_at_rest else self._whole_unit(unit, lies)
        return {entry.name: self._unit[entry.low - lies.start:entry.high - lies.start].reshape(entry.shape)
                for entry in self.layout.unit_entries(unit.name)}

    @property
    def _writes_at_rest(self) -> bool:
        """True where the first micro-batch's local gradient is what rests, format and all."""
        same_format = self.policy.accumulate_dtype == self.policy.compute_dtype
        return self.placement is PARTIAL and self.micro_batch == 0 and same_format

    def _resting(self, lies: slice) -> np.ndarray:
        """The resting gradient of a unit: (u,), or this rank's chunk of it."""
        if self.placement is SHARDED:
            lies = self.layout.owned(self.rank.index, lies.start, lies.stop)
        return self.states.gradient[lies]

    def _whole_unit(self, unit: Unit, lies: slice) -> np.ndarray:
        whole = self.rank.memory.alloc(lies.stop - lies.start, self.policy.compute_dtype, "unit_gradient", unit.name)
        padding = self.layout.padding(lies.start, lies.stop)
        if not self.rank.memory.debug:
            whole[padding.start - lies.start:] = 0
        return whole

    def absorb(self, unit: Unit) -> None:
        """Takes the gradients that the unit has written: adds them to what rests, after reducing them if need be."""
        whole, self._unit = self._unit, None
        if whole is None or self._writes_at_rest:
            return
        lies = self.layout.units[unit.name]
        if self.placement is PARTIAL:
            self._add(whole, self._resting(lies))
            return
        resting = self._resting(lies)
        direct = self.micro_batch == 0 and resting.dtype == self.policy.reduce_dtype
        cut = self.layout.cut(lies.start, lies.stop)
        reduced = redistribute(self.rank, self._cast(whole), PARTIAL, self.placement, cut, policy=self.policy,
                               out=resting if direct else None)
        if not direct:
            self._add(reduced, resting)

    def _cast(self, whole: np.ndarray) -> np.ndarray:
        """The gradient in the reduce format."""
        if whole.dtype == self.policy.reduce_dtype:
            return whole
        cast = self.rank.memory.alloc(len(whole), self.policy.reduce_dtype, "communication_buffer", "cast gradient")
        self.rank.kernels.cast_pack(whole, cast)
        return cast

    def _add(self, addend: np.ndarray, resting: np.ndarray) -> None:
        """The first micro-batch sets what rests, later ones add to it, each addition rounded to the resting format."""
        if self.micro_batch == 0:
            self.rank.kernels.cast_pack(addend, resting)
        else:
            self.rank.kernels.add_rounded(resting, addend, resting)

    # -- after backward -------------------------------------------------------------------------------------------

    def reduce(self) -> tuple[np.ndarray, Placement]:
        """The sum over ranks as the optimizer needs it, and its placement: (n,) or (s,), at rest or a new array."""
        have, want = self.placement, self.states.stage.optimizer
        if have is want:
            return self.states.gradient, have
        if have is not PARTIAL and want is SHARDED:
            return self.states.gradient, have  # the optimizer reads its slices of the replicated sum
        out = self._target(want)
        for region in self.layout.regions:
            low, high = region.low, region.high
            lies = slice(low, high) if have is not SHARDED else self.layout.owned(self.rank.index, low, high)
            goes = slice(low, high) if want is not SHARDED else self.layout.owned(self.rank.index, low, high)
            vector = self.states.gradient[lies]
            vector = self._cast(vector) if have is PARTIAL else vector
            with self.rank.trace.span(region.name):
                redistribute(
                    self.rank, vector, have, want, self.layout.cut(low, high), policy=self.policy, out=out[goes]
                )
        return out, want

    def _target(self, want: Placement) -> np.ndarray:
        """In place where an all-reduce can be; else a new array in the format that arrives."""
        dtype = self.policy.reduce_dtype if self.placement is PARTIAL else self.states.gradient.dtype
        if self.placement is PARTIAL and want is not SHARDED and dtype == self.states.gradient.dtype:
            return self.states.gradient
        out = self.rank.memory.alloc(self.states.length(want), dtype, "gradient", "reduced gradient")
        clear_padding(out, self.layout, want, self.rank)
        return out
