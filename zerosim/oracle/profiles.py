"""The update of an optimizer in the order of operations of real implementations, by name.

A profile's function takes fp32 arrays (n,) and returns alternatives, each the state after the update by slot: where a
library does not round every element in one way, as in the last elements of a vector, an element equals one of them.
Scalars are as wide as in that library. ``fma`` rounds a product and a sum once, as processors do since 2013.

Sources: PyTorch 2.13, ``torch/optim/adam.py``, ``sgd.py`` and ``aten/src/ATen/native/cpu``, and DeepSpeed 0.19.8,
``csrc/includes/cpu_adam.h``, read and compared bit by bit on a CPU with AVX-512 on 2026-11-25.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

LAST_FACTOR = 1 << 20  # of β^t: by then it is 0, or t is no step of a run that somebody records
Slots = Mapping[str, np.ndarray]  # "master", and the optimizer's slots
SLOTS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "sgd": (), "momentum": ("buffer",), "adam": ("m", "v"), "adamw": ("m", "v")})


class UpdateRule(NamedTuple):
    """An update's settings: ``decoupled`` decay moves the weight and not the gradient; ``inside`` is ε in the root;
    the corrections of the moments are those of step ``corrected``, or none."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    momentum: float
    decoupled: bool
    adam: bool
    corrected: int | None
    inside: bool = False

    @property
    def corrections(self) -> tuple[float, float]:
        """1 - β^t of both moments; 1 without correction."""
        return (1.0, 1.0) if self.corrected is None else (1 - self.beta1**self.corrected,
                                                          1 - self.beta2**self.corrected)


@dataclass(frozen=True, slots=True)
class Profile:
    """A row: the sentence that says whose order it is, and the updates; None where it has no such optimizer."""

    sentence: str
    adam: Callable[[UpdateRule, Slots, np.ndarray], Iterator[Slots]] | None
    sgd: Callable[[UpdateRule, Slots, np.ndarray], Iterator[Slots]] | None

    def updated(self, update: UpdateRule, before: Slots, g: np.ndarray) -> list[Slots]:
        """The alternatives of the state after a step; none where the profile has no such optimizer."""
        rule = self.adam if update.adam else self.sgd
        with np.errstate(all="ignore"):  # an overflow of the run is its own
            return [] if rule is None else list(rule(update, before, g))


f32: Any = np.float32


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a·b + c, rounded to fp32 once (twice where the sum's double lies halfway, one time in 2^29)."""
    sums: np.ndarray = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return sums.astype(np.float32)


def exact(update: UpdateRule, before: Slots, g: np.ndarray) -> dict[str, np.ndarray]:
    """The state after a step in float64: what all profiles round."""
    w, s = before["master"].astype(np.float64), update
    if s.weight_decay and not s.decoupled:
        g = g + s.weight_decay * w
    w = w * (1 - s.lr * s.weight_decay * s.decoupled)
    if not s.adam:
        b = s.momentum * before["buffer"] + g if "buffer" in before else g
        return {"master": w - s.lr * b} | ({"buffer": b} if "buffer" in before else {})
    m, v = s.beta1 * before["m"] + (1 - s.beta1) * g, s.beta2 * before["v"] + (1 - s.beta2) * g * g
    c1, c2 = s.corrections
    with np.errstate(all="ignore"):
        root = np.sqrt(v / c2 + s.epsilon) if s.inside else np.sqrt(v / c2) + s.epsilon
        return {"master": w - s.lr * (m / c1) / root, "m": m, "v": v}


def turning_point(update: UpdateRule, before: Slots, near: np.ndarray) -> Any:
    """The gradient from which on a larger one moves a weight less, as √v̂ grows faster than m̂; 0 without moments.

    Where m / (√v + e) has a slope of 0: (1-β1)·(v' + e·√v) = (1-β2)·g·β1·m', the moments before the step with a dash;
    the √v in it is that of a gradient ``near``.
    """
    if not update.adam:
        return 0.0
    s, root = update, update.epsilon**(0.5 if update.inside else 1.0) * update.corrections[1]**0.5
    m, v = s.beta1 * before["m"].astype(np.float64), s.beta2 * before["v"].astype(np.float64)
    with np.errstate(all="ignore"):
        outside = root * np.sqrt(v + (1 - s.beta2) * near**2)
        found: Any = (1 - s.beta1) * (v + (root**2 if s.inside else outside)) / ((1 - s.beta2) * m)
        return np.nan_to_num(found, copy=False) - (0.0 if s.decoupled else s.weight_decay * before["master"])


def _zerosim(update: UpdateRule, before: Slots, g: np.ndarray) -> Iterator[Slots]:
    """`zerosim.optim`'s: every operation rounds, in the order of the formula."""
    s, (c1, c2), w = update, update.corrections, before["master"]
    if s.weight_decay and not s.decoupled:
        g = g + f32(s.weight_decay) * w
    w = w * f32(1 - s.lr * s.weight_decay) if s.weight_decay and s.decoupled else w
    if not s.adam:
        g = f32(s.momentum) * before["buffer"] + g if "buffer" in before else g
        yield {"master": w - f32(s.lr) * g} | ({"buffer": g} if "buffer" in before else {})
        return
    m = f32(s.beta1) * before["m"] + f32(1 - s.beta1) * g
    v = f32(s.beta2) * before["v"] + f32(1 - s.beta2) * (g * g)
    root = np.sqrt(v / f32(c2) + f32(s.epsilon)) if s.inside else np.sqrt(v / f32(c2)) + f32(s.epsilon)
    yield {"master": w - m / f32(c1) * f32(s.lr) / root, "m": m, "v": v}


def _torch_decayed(s: UpdateRule, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not s.weight_decay:
        return w, g
    return (w * f32(1 - s.lr * s.weight_decay), g) if s.decoupled else (w, fma(w, f32(s.weight_decay), g))


def _torch_adam(update: UpdateRule, before: Slots, g: np.ndarray) -> Iterator[Slots]:
    """Single-tensor and foreach. Torch's root of fp32 is MKL's, whose last bit may be another one."""
    s, (c1, c2) = update, update.corrections
    w, g = _torch_decayed(s, before["master"], g)
    m = fma(g - before["m"], f32(1 - s.beta1), before["m"])
    v = fma(f32(1 - s.beta2) * g, g, before["v"] * f32(s.beta2))
    nearest = np.sqrt(v)
    for root in (nearest, np.nextafter(nearest, f32(0)), np.nextafter(nearest, f32(np.inf))):
        yield {"master": w + f32(-s.lr / c1) * m / _torch_root(s, v, root, c2), "m": m, "v": v}


def _torch_root(s: UpdateRule, v: np.ndarray, root: np.ndarray, c2: float) -> np.ndarray:
    found: np.ndarray = np.sqrt(v / f32(c2) + f32(s.epsilon)) if s.inside else root / f32(c2**0.5) + f32(s.epsilon)
    return found


def _torch_fused_adam(update: UpdateRule, before: Slots, g: np.ndarray) -> Iterator[Slots]:
    """The CPU's fused kernel, whose last elements, behind the last whole vector, are added in another order."""
    s, (c1, c2) = update, update.corrections
    w, g = _torch_decayed(s, before["master"], g)
    m = fma(g - before["m"], f32(1 - s.beta1), before["m"])
    part = f32(1 - s.beta2) * g
    for v in (fma(part, g, before["v"] * f32(s.beta2)), fma(before["v"], f32(s.beta2), part * g)):
        yield {"master": w + f32(-s.lr / c1) * m / _torch_root(s, v, np.sqrt(v), c2), "m": m, "v": v}


def _torch_sgd(update: UpdateRule, before: Slots, g: np.ndarray) -> Iterator[Slots]:
    s, w = update, before["master"]
    g = fma(w, f32(s.weight_decay), g) if s.weight_decay else g
    if "buffer" in before:
        g = before["buffer"] * f32(s.momentum) + g
    yield {"master": fma(g, f32(-s.lr), w)} | ({"buffer": g} if "buffer" in before else {})


def _deepspeed_cpu_adam(update: UpdateRule, before: Slots, g: np.ndarray) -> Iterator[Slots]:
    """Scalars are fp32, powers of β too, a product a step; the last elements' moments are added in another order."""
    s, w = update, before["master"]
    b1, b2, lr, one = f32(s.beta1), f32(s.beta2), f32(s.lr), f32(1)
    factors = 0 if s.corrected is None else min(s.corrected, LAST_FACTOR)
    c1, c2 = (one - np.multiply.reduce(np.full(factors, beta)) if factors else one for beta in (b1, b2))
    if s.weight_decay and not s.decoupled:
        g = fma(w, f32(s.weight_decay), g)
    if s.weight_decay and s.decoupled:
        w = fma(w, -lr * f32(s.weight_decay), w)
    m, v, squares = before["m"], before["v"], g * g
    for m1, v1 in ((fma(g, one - b1, m * b1), fma(squares, one - b2, v * b2)),
                   (fma(m, b1, g * (one - b1)), fma(v, b2, squares * (one - b2)))):
        root = np.sqrt(v1 / c2 + f32(s.epsilon)) if s.inside else fma(np.sqrt(v1), one / np.sqrt(c2), f32(s.epsilon))
        yield {"master": fma(m1 / root, -lr / c1, w), "m": m1, "v": v1}


PROFILES: Mapping[str, Profile] = MappingProxyType({
    "zerosim": Profile("zerosim's optimizers", _zerosim, _zerosim),
    "torch": Profile("PyTorch's, single-tensor or foreach, on a CPU", _torch_adam, _torch_sgd),
    "torch-fused": Profile("PyTorch's with fused=True, on a CPU", _torch_fused_adam, _torch_sgd),
    "deepspeed-cpu": Profile("DeepSpeed's DeepSpeedCPUAdam", _deepspeed_cpu_adam, None),
})
