"""Forward and backward over the units, with the recomputation policy between them.

Legend: B batch, I inputs, O outputs. Each unit's weights live as long as its ``with`` block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.models.context import Context, Gradients
from zerosim.models.recompute import Recompute
from zerosim.models.units import Model, Unit, Weights
from zerosim.ranks.rank import Rank

Lend = Callable[[Unit], AbstractContextManager[Weights]]


@dataclass(slots=True)
class Tape:
    """What forward leaves for backward: the loss, and per unit what it kept, or at a segment's start its input."""

    loss: float
    kept_by_loss: Any
    kept: list[Any]
    inputs: dict[int, np.ndarray]
    used: bool = False


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs a model's units on one rank. ``lend(unit)`` gives the unit's weights inside a ``with`` block."""

    model: Model
    recompute: Recompute
    ctx: Context
    lend: Lend
    absorb: Callable[[Unit, Gradients], None]
    rank: Rank

    def forward(self, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> the tape, with the mean loss over the B rows."""
        starts = {segment.start for segment in self.recompute.segments(len(self.model.units))}
        kept: list[Any] = []
        inputs: dict[int, np.ndarray] = {}
        for index, unit in enumerate(self.model.units):
            if index in starts:
                inputs[index] = self._checkpoint(x)
            x, kept_here = self._forward(unit, x, "forward")
            kept.append(None if starts else kept_here)
            del kept_here
        with self.rank.trace.span("loss"):
            loss, kept_by_loss = self.model.loss.forward(self.ctx, x, target)
        return Tape(loss, kept_by_loss, kept, inputs)

    def backward(self, tape: Tape, scale: float) -> None:
        """Goes back unit by unit, handing each one's gradients to ``absorb``; uses the tape up. ``scale`` is S."""
        if tape.used:
            raise ValueError(
                "this tape has been taken back already, and what it kept is freed; make a new one by forward()"
            )
        tape.used = True
        with self.rank.trace.span("loss"):
            dy: np.ndarray | None = self.model.loss.backward(self.ctx, tape.kept_by_loss, scale)
        tape.kept_by_loss = None
        segments = self.recompute.segments(len(self.model.units)) or [range(len(self.model.units))]
        for segment in reversed(segments):
            if segment.start in tape.inputs:
                dy = self._backward(segment[-1], tape, dy, self._run_again(segment[:-1], tape))
                segment = segment[:-1]
            for index in reversed(segment):
                dy = self._backward(index, tape, dy, None)

    def _checkpoint(self, x: np.ndarray) -> np.ndarray:
        """Keeps a unit's input for the second forward; the batch itself is kept as the input that it is."""
        if self.rank.memory.kind_of(x) == "activation":
            self.rank.memory.reclassify(x, "checkpointed_input")
        return x

    def _run_again(self, units: range, tape: Tape) -> np.ndarray:
        """Recomputes what ``units`` kept from the segment's input; returns the input of the segment's last unit."""
        x = tape.inputs.pop(units.start)
        for index in units:
            x, tape.kept[index] = self._forward(self.model.units[index], x, "recompute")
        return x

    def _forward(self, unit: Unit, x: np.ndarray, span: str) -> tuple[np.ndarray, Any]:
        with self.rank.trace.span(span), self.rank.trace.span(unit.name), self.lend(unit) as w:
            return unit.forward(self.ctx, w, x)

    def _backward(self, index: int, tape: Tape, dy: np.ndarray | None, x: np.ndarray | None) -> np.ndarray | None:
        """One unit back; given its input ``x``, it first runs forward again under the same weights."""
        assert dy is not None, "only the first unit has no gradient of its input"
        unit = self.model.units[index]
        kept, tape.kept[index] = tape.kept[index], None
        with self.rank.trace.span("backward"), self.rank.trace.span(unit.name), self.lend(unit) as w:
            if x is not None:
                with self.rank.trace.span("recompute"):
                    kept = unit.forward(self.ctx, w, x)[1]
            dx, gradients = unit.backward(self.ctx, w, kept, dy)
            del kept, x, dy
            self.absorb(unit, gradients)
        return dx
