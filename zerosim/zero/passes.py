"""Forward and backward over the units, with the recomputation policy between them.

Legend: B batch, I inputs, O outputs. Each unit's weights live as long as its ``with`` block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.models.context import Context, Gradients
from zerosim.models.recompute import Recompute
from zerosim.models.units import Model, Unit
from zerosim.ranks.rank import Rank
from zerosim.zero.lending import Lender


@dataclass(slots=True)
class Tape:
    """What forward leaves for backward: the loss, and per unit what it kept, or at a segment's start its input.

    ``ctx`` is that of this micro-batch: what was drawn forward is drawn again by it.
    """

    ctx: Context
    loss: float
    kept_by_loss: Any
    kept: list[Any]
    inputs: dict[int, np.ndarray]
    tokens: int
    places: int
    weights: object = None  # stands for the weights that it was made with
    used: bool = False


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs a model's units on one rank, their weights lent by ``lender`` inside ``with`` blocks."""

    model: Model
    recompute: Recompute
    lender: Lender
    absorb: Callable[[Unit, Gradients], None]
    rank: Rank

    def forward(self, ctx: Context, x: np.ndarray, target: np.ndarray) -> Tape:
        """x (B, I), target (B, O) -> the tape, with the mean loss, as the model's loss takes it."""
        units = self.model.units
        starts = {segment.start for segment in self.recompute.segments(len(units))}
        kept: list[Any] = []
        inputs: dict[int, np.ndarray] = {}
        self.lender.follow(range(len(units)))
        for index, unit in enumerate(units):
            if index in starts:
                inputs[index] = self._checkpoint(x)
            x, kept_here = self._forward(ctx, unit, x, "forward")
            kept.append(None if starts else kept_here)
            del kept_here
        with self.rank.trace.span("loss"):
            loss, kept_by_loss = self.model.loss.forward(ctx, x, target)
        return Tape(ctx, loss, kept_by_loss, kept, inputs, self.model.loss.tokens(ctx, target), target.size)

    def backward(self, tape: Tape, scale: float) -> None:
        """Goes back unit by unit, handing each one's gradients to ``absorb``; uses the tape up. ``scale`` is S."""
        if tape.used:
            raise ValueError(
                "this tape has been taken back already, and what it kept is freed; make a new one by forward()"
            )
        tape.used = True
        segments = self.recompute.segments(len(self.model.units)) or [range(len(self.model.units))]
        self.lender.follow([index for segment in reversed(segments) for index in self._order(segment, tape)])
        with self.rank.trace.span("loss"):
            dy: np.ndarray | None = self.model.loss.backward(tape.ctx, tape.kept_by_loss, scale)
        tape.kept_by_loss = None
        for segment in reversed(segments):
            if segment.start in tape.inputs:
                dy = self._backward(segment[-1], tape, dy, self._run_again(segment[:-1], tape))
                segment = segment[:-1]
            for index in reversed(segment):
                dy = self._backward(index, tape, dy, None)

    @staticmethod
    def _order(segment: range, tape: Tape) -> list[int]:
        """In which order a segment's units are lent in backward: those that are run again first."""
        again = segment[:-1] if segment.start in tape.inputs else range(0)
        return [*again, *reversed(segment)]

    def _checkpoint(self, x: np.ndarray) -> np.ndarray:
        """Keeps a unit's input for the second forward; the batch itself is kept as the input that it is."""
        if self.rank.memory.kind_of(x) == "activation":
            self.rank.memory.reclassify(x, "checkpointed_input")
        return x

    def _run_again(self, units: range, tape: Tape) -> np.ndarray:
        """Recomputes what ``units`` kept from the segment's input; returns the input of the segment's last unit."""
        x = tape.inputs.pop(units.start)
        for index in units:
            x, tape.kept[index] = self._forward(tape.ctx, self.model.units[index], x, "recompute")
        return x

    def _forward(self, ctx: Context, unit: Unit, x: np.ndarray, span: str) -> tuple[np.ndarray, Any]:
        with self.rank.trace.span(span), self.rank.trace.span(unit.name), self.lender.weights(unit, in_pass=True) as w:
            return unit.forward(ctx, w, x)

    def _backward(self, index: int, tape: Tape, dy: np.ndarray | None, x: np.ndarray | None) -> np.ndarray | None:
        """One unit back; given its input ``x``, it first runs forward again under the same weights."""
        unit = self.model.units[index]
        if dy is None:
            after = self.model.units[index + 1].name
            raise ValueError(f"unit {after!r} gave back no gradient of its input, which unit {unit.name!r} needs; only "
                             "the model's first unit may leave it out (of linear units, first=True says so)")
        kept, tape.kept[index] = tape.kept[index], None
        with (self.rank.trace.span("backward"), self.rank.trace.span(unit.name),
              self.lender.weights(unit, in_pass=True) as w):
            if x is not None:
                with self.rank.trace.span("recompute"):
                    kept = unit.forward(tape.ctx, w, x)[1]
            dx, gradients = unit.backward(tape.ctx, w, kept, dy)
            del kept, x, dy
            self.absorb(unit, gradients)
        return dx
