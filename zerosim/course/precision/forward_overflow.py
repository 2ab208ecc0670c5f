"""Two overflows: one in backward, which a smaller loss scale cures, and one in forward, which none does.

The same small network learns the same task twice; only the unit in which its inputs and targets are measured differs.
In the small unit fp16 holds all its activations; in the large one fp16 still holds the inputs, but not what the first
layer adds up of them. Since the large unit is a power of two, and the learning rate is divided by its square, formats
of a wide range learn the same in both, to the bit.

Legend: B batch, N ranks, S loss scale, u the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from zerosim.models.small import MLP
from zerosim.models.units import first_weights, one_pass
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.loss_scale import Dynamic, LossScaleExhausted, Scaling, Static
from zerosim.numerics.policy import Policy
from zerosim.optim import SGD
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

WIDTHS = (8, 256, 1)
ROWS = 16  # B
RANKS = 2
STEPS = 40
SEED = 2
LR = 0.002  # at u = 1
LOWEST, HIGHEST = 0.5, 1.9  # the inputs, in units: of one sign, so that what a layer adds up does not cancel
INITIAL = 2.0**16
SCALINGS: Mapping[str, Scaling] = {
    "S = 1": Static(1.0), "S = 2^-16": Static(2.0**-16), "torch": Dynamic("torch", INITIAL),
    "deepspeed": Dynamic("deepspeed", INITIAL)}


@dataclass(frozen=True, slots=True)
class Trial:
    """How training went in one unit and format with one loss scaling; losses are in units squared, as at u = 1.

    ``scale`` is S at the end; ``gave_up`` is the step at which the scaler raised, or None.
    """

    unit: float
    format: str
    scaling: str
    steps: int
    skipped: int
    first_loss: float
    last_loss: float
    scale: float
    gave_up: int | None


@dataclass(frozen=True, slots=True)
class LargestValue:
    """The largest magnitude that comes out of a layer before the first step, in one unit, as one format computes it."""

    unit: float
    format: str
    layer: str
    value: float


def large_unit(fmt: str) -> float:
    """The largest power of two in which the format still holds the inputs; fp16's for formats that reach further."""
    largest = min(format_of(fmt).largest, FORMATS["fp16"].largest)
    return 2.0 ** math.floor(math.log2(largest / HIGHEST))


def trials(fmt: str, steps: int = STEPS) -> Iterator[Trial]:
    """Every scaling in the format, and the formats of fp32's range without scaling, in both units."""
    wide = [name for name in dict.fromkeys((fmt, "bf16", "fp32")) if has_wide_range(name)]
    for unit in (1.0, large_unit(fmt)):
        if not has_wide_range(fmt):
            for scaling in SCALINGS:
                yield trial(unit, fmt, scaling, steps)
        for name in wide:
            yield trial(unit, name, "S = 1", steps)


def has_wide_range(fmt: str) -> bool:
    """Whether a format has fp32's exponents."""
    return format_of(fmt).max_exponent == FORMATS["fp32"].max_exponent


def trial(unit: float, fmt: str, scaling: str, steps: int = STEPS) -> Trial:
    """Trains through the engine, on two ranks, with one of SCALINGS."""
    policy = Policy(fmt, loss_scale=SCALINGS[scaling])
    results, scale, gave_up = Cluster(RANKS).run(_program, unit, policy, steps)[0]
    losses = [loss / unit**2 for loss, _ in results]
    skipped = sum(skipped for _, skipped in results)
    return Trial(unit, fmt, scaling, steps, skipped, losses[0], losses[-1], scale, gave_up)


def largest_values(fmt: str) -> Iterator[LargestValue]:
    """What comes out of each layer in the first forward of rank 0, in both units, in the format and in fp32."""
    model = network()
    for unit in (1.0, large_unit(fmt)):
        for name in dict.fromkeys((fmt, "fp32")):
            seen = one_pass(model, first_weights(model), Policy(name), *batch(unit, 0, 0))
            yield from (LargestValue(unit, name, layer, value) for layer, value in seen.largest.items())


def network() -> MLP:
    """The network: ReLU keeps units, and so does every layer without a bias."""
    return MLP(WIDTHS, bias=False, seed=SEED)


def batch(unit: float, step: int, rank: int) -> tuple[Array, Array]:
    """x (B, 8) and target (B, 1), both in fp32 and in the unit; the target is x0·x1 + x2 of the numbers at u = 1."""
    shape = (ROWS, WIDTHS[0])
    words = random.uniform((0, "forward overflow", step, rank), 0, math.prod(shape)).reshape(shape)
    x = np.float32(LOWEST) + np.float32(HIGHEST - LOWEST) * words
    target = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    return x * np.float32(unit), target * np.float32(unit)


def _program(rank: Rank, unit: float, policy: Policy, steps: int) -> tuple[list[tuple[float, bool]], float, int | None]:
    """One rank: its losses and skips by step, S at the end, and the step at which the scaler gave up."""
    engine = Engine(rank, network(), SGD(LR / unit**2), stage=2, policy=policy)
    results: list[tuple[float, bool]] = []
    for step in range(steps):
        try:
            result = engine.step([batch(unit, step, rank.index)])
        except LossScaleExhausted:
            return results, engine.loss_scale.scale, step + 1
        results.append((result.losses[0], result.skipped))
    return results, engine.loss_scale.scale, None
