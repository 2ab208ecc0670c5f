"""Gradients from a unit's backward to the optimizer: where they are written, added up over micro-batches, and reduced.

Legend: n elements of the padded vector, s of this rank's shard, u of one padded unit; N ranks, k micro-batches.
Kept PARTIAL, the addends of all micro-batches are summed first and reduced once; kept SHARDED or REPLICATED, each
unit's gradient of each micro-batch is reduced as backward goes, then added. At k > 1 the two orders differ in bits.
"""

import numpy as np

from zerosim.models.context import Gradients
from zerosim.models.units import Unit
from zerosim.optim.base import Optimizer
from zerosim.zero.placements import PARTIAL, SHARDED, Placement, redistribute
from zerosim.zero.states import States, clear_padding


class Accumulator:
    """One step's gradients of one rank."""

    def __init__(self, states: States, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.states, self.rank, self.policy, self.layout = states, states.rank, states.policy, states.layout
        self.placement = states.stage.gradients
        self.micro_batch = 0
        self._lent: dict[str, np.ndarray] = {}  # by unit: the vector of which it was lent views

    # -- during backward ------------------------------------------------------------------------------------------

    def views(self, unit: Unit) -> Gradients:
        """Where the unit writes its gradients: views of one vector (u,) in the compute dtype, by name."""
        lies = self.layout.units[unit.name]
        whole = self._resting(lies) if self._writes_at_rest else self._whole_unit(unit, lies)
        self._lent[unit.name] = whole
        return self.layout.unit_views(unit.name, whole)

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

    def absorb(self, unit: Unit, gradients: Gradients) -> None:
        """Takes the gradients that a unit's backward returned: adds them to what rests, reduced first if need be.

        Raises ValueError unless there is one of the right shape for each parameter.
        """
        whole = self._collected(unit, gradients)
        if self._writes_at_rest:
            return
        lies = self.layout.units[unit.name]
        if self.placement is PARTIAL:
            self._add(whole, self._resting(lies))
            return
        resting = self._resting(lies)
        direct = self.micro_batch == 0 and resting.dtype == self.policy.reduce_dtype
        cut = self.layout.cut(lies.start, lies.stop)
        reduced = redistribute(self.rank, self._cast(whole), PARTIAL, self.placement, cut, policy=self.policy,
                               out=resting if direct else None, purpose="gradients", agreement=self._agreement())
        if not direct:
            self._add(reduced, resting)

    def _agreement(self) -> str:
        """What would make replicas drift apart unseen, were it not the same on all ranks."""
        return f"micro-batch {self.micro_batch}, loss scale {self.policy.loss_scale:g}, {self.optimizer}"

    def _collected(self, unit: Unit, gradients: Gradients) -> np.ndarray:
        """The unit's gradients in one vector (u,): the one whose views it was lent, and may have written to."""
        if unit.name not in self._lent:
            self.views(unit)
        whole = self._lent.pop(unit.name)
        lent = self.layout.unit_views(unit.name, whole)
        shapes = {name: gradient.shape for name, gradient in gradients.items()}
        if shapes != {name: view.shape for name, view in lent.items()}:
            raise ValueError(
                f"the backward of unit {unit.name!r} returned gradients of the shapes {shapes}; its parameters "
                f"have {dict(unit.shapes)}, so return one of that shape for each"
            )
        for name, gradient in gradients.items():
            if not is_same_memory(gradient, lent[name]):
                self.rank.kernels.cast_pack(gradient, lent[name])
        return whole

    def reset(self) -> None:
        """Forgets this step's gradients: the next micro-batch is the first."""
        self.micro_batch = 0
        self._lent.clear()

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
                redistribute(self.rank, vector, have, want, self.layout.cut(low, high), policy=self.policy,
                             out=out[goes], purpose="gradients", agreement=self._agreement())
        return out, want

    def _target(self, want: Placement) -> np.ndarray:
        """In place where an all-reduce can be; else a new array in the format that arrives."""
        dtype = self.policy.reduce_dtype if self.placement is PARTIAL else self.states.gradient.dtype
        if self.placement is PARTIAL and want is not SHARDED and dtype == self.states.gradient.dtype:
            return self.states.gradient
        out = self.rank.memory.alloc(self.states.length(want), dtype, "gradient", "reduced gradient")
        clear_padding(out, self.layout, want, self.rank)
        return out


def is_same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """True when both arrays are views of the same elements in the same order."""
    return a.__array_interface__ == b.__array_interface__
