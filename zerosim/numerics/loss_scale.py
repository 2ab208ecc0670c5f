"""Loss scaling: the factor S of the loss, and what a step that overflowed does to it.

Small gradients underflow in fp16; those of S·loss are S times as large, and the reduced gradient is divided by S in
fp32. Scaling cures no overflow: a dynamic scaler notices by it that S is too large, and the step is skipped.
Source: Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2. The dynamic machines in use differ, and have names:

torch             grows on the W-th good step in a row; every overflow shrinks it, without end
deepspeed         grows on the W+1-th step after an overflow (or from the start), then on every W-th; shrinks on the
                  H-th overflow since it last grew, and on all that follow; raises below the smallest scale
deepspeed-legacy  grows on the W-th step after an overflow, then on every W-th; else as deepspeed

They are those of PyTorch's `torch.amp.GradScaler` and of DeepSpeed's `DynamicLossScaler`, now and before. No scale
grows beyond fp32's largest number. torch's is an fp32 number: shrunk past the smallest one it is 0, and from then on
every step is skipped, since 0/0 is no gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from zerosim.numerics.checks import is_count, is_number, require_count, unknown_name
from zerosim.numerics.formats import FORMATS
from zerosim.numerics.ranges import Count, Range, require_range, require_ranges

SCALERS = ("torch", "deepspeed", "deepspeed-legacy")
LARGEST = FORMATS["fp32"].largest  # S meets gradients in fp32


class LossScaleExhausted(ValueError):
    """Steps overflow at the smallest scale that the scaler allows: it is not the scale that they overflow by."""


class LossScaler(ABC):
    """The scale of one training run, which moves from step to step; the same on every rank.

    Its state is the scale, and some counts by name, each of at least so much.
    """

    scale: float
    kind: str
    least: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """Hears whether the step overflowed on any rank."""

    def state(self) -> dict[str, Any]:
        """The scale and the counts with which a later run goes on from here, as plain numbers."""
        return {"scale": self.scale} | {name: getattr(self, name) for name in self.least}

    def restore(self, state: Any) -> None:
        """Goes on from there. Raises ValueError for what no scaler of this kind comes to, and changes nothing."""
        names = {"scale", *self.least}
        if not isinstance(state, Mapping) or state.keys() != names:
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
            raise ValueError(f"a loss scaler of the kind {self.kind!r} goes on from {', '.join(sorted(names))}, and "
                             f"was given {found or 'nothing'}; restore the state of a scaler of the same kind")
        wrong = [name for name, low in self.least.items() if not is_count(state[name]) or state[name] < low]
        scale = state["scale"]
        if wrong or not is_number(scale) or not 0 <= scale <= LARGEST:
            name = wrong[0] if wrong else "scale"
            raise ValueError(f"{name}={state[name]!r} is no state that a loss scaler of the kind {self.kind!r} comes "
                             "to; restore what its state() said")
        self.scale = float(scale)
        for name in self.least:
            setattr(self, name, int(state[name]))


class Scaling(Protocol):
    """A rule of loss scaling, as a value."""

    def start(self) -> LossScaler:
        """The scaler at the start of a run."""


SCALE = Range("it is a positive finite number of fp32's normal range; 1.0 scales nothing",
              lambda value: is_number(value) and FORMATS["fp32"].smallest_normal <= value <= LARGEST)


@dataclass(frozen=True, slots=True)
class Static:
    """The same scale for ever: a step that overflows is skipped with a warning, and the next one tries again.

    So many ``skips`` in a row are an error (None: no number is).
    """

    scale: float = 1.0
    skips: int | None = field(default=10, repr=False)

    def __post_init__(self) -> None:
        require_range("Static", "loss_scale", self.scale, SCALE)
        require_count("skips", self.skips, 1, "a number of steps",
                      none="where no number of skipped steps in a row is an error")

    def start(self) -> LossScaler:
        """A scaler that never moves."""
        return StaticScaler(float(self.scale), self.skips)


@dataclass
class StaticScaler(LossScaler):
    """A scale that never moves. ``skips`` is its rule's, ``in_a_row`` how many steps it has skipped up to now."""

    scale: float
    skips: int | None = field(default=None, repr=False)
    in_a_row: int = field(default=0, repr=False)
    kind = "static"

    def update(self, overflow: bool) -> None:
        """Counts overflows in a row."""
        self.in_a_row = self.in_a_row + 1 if overflow else 0


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A scale that grows by ``factor`` after ``window`` good steps and shrinks by it on overflow, as its ``kind`` does.

    ``hysteresis`` (DeepSpeed's) is how many overflows it takes; ``smallest`` the least scale: DeepSpeed's kinds come
    down to it without a word, and raise LossScaleExhausted at the next overflow. ``torch`` goes on shrinking, and takes
    neither.
    """

    kind: str = "torch"
    initial: Annotated[float, SCALE] = 2.0**16
    window: Count = 2000
    hysteresis: Count = 1
    factor: Annotated[float, Range("{name} is a number above 1; 2.0 moves the exponent alone",
                                   lambda value: is_number(value) and 1 < value <= LARGEST)] = 2.0
    smallest: Annotated[float, SCALE] = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown kind and for settings that it does not have or that cannot be."""
        if self.kind not in SCALERS:
            raise unknown_name(f"no dynamic loss scaler is called {self.kind!r}", self.kind, SCALERS)
        require_ranges(self)
        if self.kind != "torch":
            if self.initial < self.smallest:
                raise ValueError(f"initial={self.initial!r} lies below smallest={self.smallest!r}; begin at the "
                                 "smallest scale or above")
        elif self.hysteresis != 1 or self.smallest != 1:
            name = "smallest" if self.hysteresis == 1 else "hysteresis"
            raise ValueError("the kind 'torch' shrinks on every overflow, without end, and was given "
                             f"{name}={getattr(self, name)!r}; take 'deepspeed', or leave it out")

    def start(self) -> LossScaler:
        """The scaler at the start of a run."""
        return TorchScaler(self) if self.kind == "torch" else DeepSpeedScaler(self)


class TorchScaler(LossScaler):
    """Grows on the W-th good step in a row; every overflow shrinks it."""

    kind = "torch"
    least = MappingProxyType({"good_steps": 0})

    def __init__(self, rule: Dynamic) -> None:
        self.rule, self.scale, self.good_steps = rule, fp32(rule.initial), 0

    def update(self, overflow: bool) -> None:
        """One step: good or not."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = fp32(self.scale / self.rule.factor)
        elif self.good_steps == self.rule.window:
            self.scale, self.good_steps = fp32(grown(self.scale, self.rule.factor)), 0


class DeepSpeedScaler(LossScaler):
    """Counts steps since the last overflow; hysteresis is used up by overflows and refilled by growth alone."""

    least = MappingProxyType({"steps_since": 0, "overflows_left": 1})

    def __init__(self, rule: Dynamic) -> None:
        self.rule, self.kind = rule, rule.kind
        self.scale, self.overflows_left = float(rule.initial), rule.hysteresis
        self.steps_since = 0  # since the last overflow, or the start

    def update(self, overflow: bool) -> None:
        """One step: good or not. Raises LossScaleExhausted where it would shrink below the smallest scale."""
        if overflow:
            self.steps_since = 0
            self._shrink()
            return
        self.steps_since += 1
        steps = self.steps_since - (self.kind == "deepspeed")
        if steps > 0 and steps % self.rule.window == 0:
            self.scale, self.overflows_left = grown(self.scale, self.rule.factor), self.rule.hysteresis

    def _shrink(self) -> None:
        if self.overflows_left > 1:
            self.overflows_left -= 1
        elif self.scale <= self.rule.smallest:
            raise LossScaleExhausted(
                f"a step overflowed at the smallest loss scale, {self.scale:g}: no scale would help. Look for inf or "
                "NaN in the data and in the forward pass, lower the learning rate, or compute in bf16")
        else:
            self.scale = max(self.scale / self.rule.factor, self.rule.smallest)


def grown(scale: float, factor: float) -> float:
    """The scale times the factor, unless that is no fp32 number: then it stays."""
    return scale * factor if scale * factor <= LARGEST else scale


def fp32(scale: float) -> float:
    """The fp32 number nearest to a scale."""
    return float(np.float32(scale))


def scaling_of(loss_scale: float | Scaling) -> Scaling:
    """The rule that a policy names: a number is a static scale."""
    return Static(loss_scale) if is_number(loss_scale) else loss_scale  # type: ignore[arg-type, return-value]
