"""Small networks trained in many formats, step by step: what overflows, what underflows, and what stands still.

Their data may be measured in another unit u, a power of two: inputs and targets are u times as large, losses and
gradients u² times. That changes no bit of what formats of a wide range learn, for SGD's learning rate is divided by u²,
and Adam divides the gradient by its own size (its ε is given in the unit too); but a large u makes activations large,
and a small one makes gradients small, as averages over many tokens do in large models.

Legend: B batch, N ranks, S loss scale, u the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from types import MappingProxyType

import numpy as np

from zerosim.models.small import MLP
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.loss_scale import Dynamic, LossScaleExhausted, Static, scaling_of
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam, Optimizer
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine
from zerosim.zero.skipped import unreported_skips


@dataclass(frozen=True, slots=True)
class SmallRun:
    """The course of a training by step; all of it is the same on every rank but the losses.

    ``losses_by_rank`` are in units squared, as at u = 1; ``scales`` are the S of each step; ``overflowed`` are the
    ranks whose own gradients were not all finite. ``gave_up`` is the step at which the scaler raised, or None;
    ``scale`` is S after the last step, and ``moved_share`` the share of rank 0's weights that it changed, as far as
    their format shows it.
    """

    losses_by_rank: tuple[tuple[float, ...], ...]
    scales: tuple[float, ...]
    skipped: tuple[bool, ...]
    overflowed: tuple[tuple[int, ...], ...]
    gave_up: int | None
    scale: float
    moved_share: float

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.losses_by_rank[0])

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean over ranks of each step."""
        return tuple(sum(losses) / self.ranks for losses in self.losses_by_rank)


def trained(network: Callable[[], MLP], optimizer: Optimizer, batch: Callable[[int, int], tuple[Array, Array]],
            policy: Policy, steps: int, *, ranks: int = 1, unit: float = 1.0) -> SmallRun:
    """Trains through the engine on x and target in fp32 and in the unit, ``batch(step, rank)``.

    Skipped steps are part of what is found out, and no number of them is an error.
    """
    rule = scaling_of(policy.loss_scale)
    if isinstance(rule, Static):
        policy = replace(policy, loss_scale=replace(rule, skips=None))

    def program(rank: Rank) -> SmallRun:
        """The run as one rank sees it: its own losses, and its own number where its gradients overflowed."""
        engine = Engine(rank, network(), optimizer, stage=1, policy=policy)
        losses, scales, skipped, overflowed = list[tuple[float]](), list[float](), list[bool](), list[tuple[int, ...]]()
        gave_up, moved_share = None, 0.0
        for step in range(steps):
            tape = engine.forward(*batch(step, rank.index))
            engine.backward(tape)
            overflowed.append(() if rank.kernels.all_finite(engine.param_group.gradient) else (rank.index,))
            engine.reduce()
            before = _bits(engine.param_group.master)
            try:
                result = engine.update([tape.loss])
            except LossScaleExhausted:
                gave_up = step + 1
                break
            engine.all_gather_parameters()
            losses.append((tape.loss / unit**2,))
            scales.append(result.scale)
            skipped.append(result.skipped)
            moved_share = float(np.mean(_bits(engine.param_group.master) != before))
        return SmallRun(tuple(losses), tuple(scales), tuple(skipped), tuple(overflowed), gave_up,
                        engine.loss_scale.scale, moved_share)

    with unreported_skips():
        found: list[SmallRun] = list(Cluster(ranks).run(program))
    return replace(found[0], losses_by_rank=tuple(zip(*(run.losses for run in found), strict=True)),
                   overflowed=tuple(tuple(chain(*at)) for at in zip(*(run.overflowed for run in found), strict=True)))


def _bits(weights: Array) -> np.ndarray:
    """A copy as whole numbers, so that NaN equals itself."""
    return weights.view(f"u{weights.dtype.itemsize}").copy()


# -- one task learned with Adam in many formats: losses, loss scale, and whose gradients overflowed --------------------

WIDTHS = (8, 32, 32, 2)
ROWS = 32  # B
BATCHES = 20  # the data: they come round and round
FORMAT_RUN_LR = 3e-4
EPSILON = 1e-8  # Adam's, at u = 1
SMALL_UNIT = 2.0**-10
POLICIES: Mapping[str, Policy] = MappingProxyType({
    "fp32": Policy(),
    "bf16 with a master": Policy("bf16"),
    "fp16 with a master and loss scaling": Policy("fp16", loss_scale=Dynamic(window=100)),
    "fp16 with a master, S = 1": Policy("fp16"),
    "bf16 without a master": Policy("bf16", master="bf16"),
})


def format_run(policy: Policy, steps: int, *, ranks: int = 1, unit: float = 1.0) -> SmallRun:
    """Trains with Adam, on data of its own on every rank."""
    adam = Adam(FORMAT_RUN_LR, epsilon=EPSILON * unit**2)
    return trained(format_run_network, adam, partial(samples, unit=unit), policy, steps, ranks=ranks, unit=unit)


def format_run_network() -> MLP:
    """Without biases, so that its outputs are u times as large where its inputs are."""
    return MLP(WIDTHS, bias=False, seed=0)


def samples(step: int, rank: int = 0, unit: float = 1.0) -> tuple[Array, Array]:
    """x (B, 8), standard normal, and target (B, 2): sin(x0 + x1) and x2·x3/2 of the numbers at u = 1; in fp32, u times
    as large, and different data on every rank."""
    x, target = _batch(step % BATCHES, rank)
    return x * x.dtype.type(unit), target * target.dtype.type(unit)


@cache
def _batch(number: int, rank: int) -> tuple[Array, Array]:
    x = random.normal((0, "resting formats", number, rank), 0, ROWS * WIDTHS[0]).reshape(ROWS, WIDTHS[0])
    return x, np.stack([np.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3] / 2], axis=1)
