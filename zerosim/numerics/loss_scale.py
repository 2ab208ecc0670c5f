"""Loss scaling: the factor S of the loss, and what a step that overflowed does to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LossScaler(Protocol):
    """The scale of one training run, which moves from step to step."""

    scale: float

    def update(self, overflow: bool) -> None:
        """Hears whether the step overflowed on any rank."""


class Scaling(Protocol):
    """A rule of loss scaling, as a value."""

    def start(self) -> LossScaler:
        """The scaler at the start of a run."""


@dataclass(frozen=True, slots=True)
class Static:
    """The same scale for ever."""

    scale: float = 1.0

    def start(self) -> LossScaler:
        """A scaler that never moves."""
        return FixedScaler(self.scale)


@dataclass(slots=True)
class FixedScaler:
    """A scale that never moves."""

    scale: float

    def update(self, overflow: bool) -> None:
        """Changes nothing: the step is skipped, and the next one tries again."""


def scaling_of(loss_scale: float | Scaling) -> Scaling:
    """The rule that a policy names: a number is a static scale."""
    return Static(float(loss_scale)) if isinstance(loss_scale, int | float) else loss_scale
