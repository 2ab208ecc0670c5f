"""The dynamic loss scalers in use, on the same overflows: what is called dynamic loss scaling is not one machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.numerics.loss_scale import Dynamic

PATTERN = tuple(digit == "1" for digit in "000001100001011")  # which steps overflow
INITIAL = 256.0
WINDOW = 2  # good steps until a scale grows; in earnest, 2,000 (PyTorch) or 1,000 (DeepSpeed)
MACHINES = (("torch", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed-legacy", 2))


@dataclass(frozen=True, slots=True)
class ScalerTrace:
    """The scale after each step of PATTERN."""

    dialect: str
    hysteresis: int
    scales: tuple[float, ...]


def traces() -> Iterator[ScalerTrace]:
    """Each of MACHINES, from INITIAL on."""
    for dialect, hysteresis in MACHINES:
        scaler = Dynamic(dialect, INITIAL, WINDOW, hysteresis).start()
        scales = []
        for overflow in PATTERN:
            scaler.update(overflow)
            scales.append(scaler.scale)
        yield ScalerTrace(dialect, hysteresis, tuple(scales))
