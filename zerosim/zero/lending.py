"""Lending a unit's weights: for as long as a ``with`` block lasts, and no longer.

Legend: u elements of one padded unit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from zerosim.models.units import Unit, Weights
from zerosim.zero.placements import REPLICATED, SHARDED, redistribute
from zerosim.zero.states import States


class Lender:
    """Gives out one rank's weights, unit by unit, from wherever they rest."""

    def __init__(self, states: States) -> None:
        self.states, self.rank, self.layout = states, states.rank, states.layout

    @contextmanager
    def weights(self, unit: Unit) -> Iterator[Weights]:
        """The unit's parameters by name, read-only, in the compute format: gathered where sharded, freed on exit.

        Raises ValueError for a unit of another model.
        """
        if unit not in self.states.model.units:
            known = ", ".join(own.name for own in self.states.model.units)
            raise ValueError(f"weights() was asked for {unit!r}, which is no unit of this engine's model; take one of "
                             f"engine.model.units: {known}")
        lies, parameter = self.layout.units[unit.name], self.states.parameter
        if self.states.stage.parameters is REPLICATED:
            yield self._views(unit, parameter[lies])
            return
        own = parameter[self.layout.owned(self.rank.index, lies.start, lies.stop)]
        whole = self.rank.memory.alloc(lies.stop - lies.start, own.dtype, "gathered_parameter", unit.name)
        redistribute(self.rank, own, SHARDED, REPLICATED, self.layout.cut(lies.start, lies.stop), out=whole,
                     policy=self.states.policy, purpose="parameters", agreement=f"weights of {unit.name}")
        try:
            yield self._views(unit, whole)
        finally:
            self.rank.memory.free(whole)

    def _views(self, unit: Unit, whole: np.ndarray) -> Weights:
        views = self.layout.unit_views(unit.name, whole)
        for view in views.values():
            view.flags.writeable = False  # a write would be lost where weights are gathered, and drift elsewhere
        return views
