"""One small training in many formats, step by step: its losses, its loss scale, and which ranks' gradients overflowed.

The data may be measured in another unit u, a power of two: inputs and targets are u times as large, losses and
gradients u² times. That changes no bit of what formats of a wide range learn, for Adam divides the gradient by its own
size (its ε is given in the unit too); but a small u makes gradients small, as averages over many tokens do in large
models. Legend: B batch, N ranks, S loss scale, u the unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.course.precision.resting_formats import WIDTHS, batch
from zerosim.models.small import MLP
from zerosim.numerics.arrays import Array
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

LR = 3e-4
EPSILON = 1e-8  # Adam's, at u = 1
SMALL_UNIT = 2.0**-10
POLICIES: Mapping[str, Policy] = MappingProxyType({
    "fp32": Policy(),
    "bf16 with a master": Policy("bf16"),
    "fp16 with a master and loss scaling": Policy("fp16", loss_scale=Dynamic(window=100)),
    "fp16 with a master, S = 1": Policy("fp16"),
    "bf16 without a master": Policy("bf16", master="bf16"),
})


@dataclass(frozen=True, slots=True)
class FormatRun:
    """A training, step by step; all of it is the same on every rank but the losses, which are means over ranks.

    ``losses`` are in units squared, as at u = 1; ``scales`` are the S of each step; ``overflowed`` are the ranks whose
    own gradients were not all finite, in each step.
    """

    policy: Policy
    ranks: int
    unit: float
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    overflowed: tuple[tuple[int, ...], ...]


def format_run(policy: Policy, steps: int, *, ranks: int = 1, unit: float = 1.0, lr: float = LR) -> FormatRun:
    """Trains the network of `resting_formats` with Adam through the engine, on other data on every rank."""
    found = list(Cluster(ranks).run(_program, policy, steps, unit, lr))
    losses = tuple(sum(losses) / ranks / unit**2 for losses in zip(*(losses for losses, *_ in found), strict=True))
    overflowed = tuple(tuple(rank for rank, (_, finite, _) in enumerate(found) if not finite[step])
                       for step in range(steps))
    results = found[0][2]
    return FormatRun(policy, ranks, unit, losses, tuple(scale for scale, _ in results),
                     tuple(skipped for _, skipped in results), overflowed)


def network() -> MLP:
    """Without biases, so that its outputs are u times as large where its inputs are."""
    return MLP(WIDTHS, bias=False, seed=0)


def samples(step: int, rank: int, unit: float = 1.0) -> tuple[Array, Array]:
    """x (B, 8) and target (B, 2) of `resting_formats`, u times as large; other data on every rank."""
    x, target = batch(step, rank)
    return x * x.dtype.type(unit), target * target.dtype.type(unit)


def _program(rank: Rank, policy: Policy, steps: int, unit: float,
             lr: float) -> tuple[list[float], list[bool], list[tuple[float, bool]]]:
    """One rank: its losses, whether its own gradients were finite, and (S, skipped), by step."""
    engine = Engine(rank, network(), Adam(lr, epsilon=EPSILON * unit**2), stage=1, policy=policy)
    losses, finite, results = [], [], []
    for step in range(steps):
        tape = engine.forward(*samples(step, rank.index, unit))
        engine.backward(tape)
        finite.append(rank.kernels.all_finite(engine.param_group.gradient))
        engine.reduce()
        result = engine.update([tape.loss])
        engine.all_gather_parameters()
        losses.append(tape.loss)
        results.append((result.scale, result.skipped))
    return losses, finite, results
