"""The same training with what rests between steps in other formats: master weights, Adam's state, products in fp8.

A network as small as this one shows it: weights that are updated in the format that computes move only where lr is half
a gap, or more; Adam's v in fp16 is 0, so that Adam divides by its ε. Legend: B batch, S loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerosim.course.precision.forward_overflow import has_wide_range
from zerosim.models.small import MLP
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.loss_scale import Dynamic
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine

WIDTHS = (8, 32, 32, 2)
ROWS = 32  # B
BATCHES = 20  # the data: they come round and round
LR = 1e-4


@dataclass(frozen=True, slots=True)
class Rested:
    """How training went. Losses are means over the first, the middle and the last round of the data.

    ``moved_share`` is the share of the weights that the last step changed, as far as their format shows it.
    """

    compute: str
    master: str
    state: str
    matmul: str | None
    steps: int
    skipped: int
    first_loss: float
    middle_loss: float
    last_loss: float
    moved_share: float


def policies(fmt: str) -> Iterator[Policy]:
    """fp32; then the format and bf16, each with fp32 masters and state, without masters, with state of its own; then
    bf16 with products in fp8."""
    yield Policy("fp32")
    for name in dict.fromkeys((fmt, "bf16")):
        if name != "fp32":
            scale = 1.0 if has_wide_range(name) else Dynamic("torch")
            yield Policy(name, loss_scale=scale)
            yield Policy(name, loss_scale=scale, master=name)
            yield Policy(name, loss_scale=scale, state=name)
    yield Policy("bf16", matmul="fp8")


def rested(policy: Policy, steps: int) -> Rested:
    """Trains with Adam through the engine; at least one round of the data."""
    if steps < BATCHES:
        raise ValueError(f"asked for {steps} steps; one round of the data takes {BATCHES}, so ask for that or more")
    losses, skipped, moved = Cluster(1).run(_program, policy, steps)[0]
    middle = (steps - BATCHES) // 2
    with np.errstate(all="ignore"):  # a mean of infinities is one
        first, halfway, last = (float(np.mean(losses[start:start + BATCHES])) for start in (0, middle, steps - BATCHES))
    return Rested(policy.compute, policy.master, policy.state, policy.matmul, steps, skipped, first, halfway, last,
                  moved)


def batch(step: int, rank: int = 0) -> tuple[Array, Array]:
    """x (B, 8), standard normal, and target (B, 2): sin(x0 + x1) and x2·x3/2; in fp32, other data on every rank."""
    shape = (ROWS, WIDTHS[0])
    x = random.normal((0, "resting formats", step % BATCHES, rank), 0, ROWS * WIDTHS[0]).reshape(shape)
    return x, np.stack([np.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3] / 2], axis=1)


def _program(rank: Rank, policy: Policy, steps: int) -> tuple[list[float], int, float]:
    """The losses by step, how many steps were skipped, and the share of weights that the last one moved."""
    engine = Engine(rank, MLP(WIDTHS, seed=0), Adam(LR), stage=1, policy=policy)
    results, before = [], _masters(engine)
    for step in range(steps):
        if step == steps - 1:
            before = _masters(engine)
        results.append(engine.step([batch(step)]))
    moved = float(np.mean(_masters(engine) != before))
    return [result.losses[0] for result in results], sum(result.skipped for result in results), moved


def _masters(engine: Engine) -> Array:
    """All weights that the optimizer updates, as bits, so that NaN equals itself (P,)."""
    found = [np.asarray(engine.state(name)["master"]).reshape(-1) for name in engine.model.shapes]
    return np.concatenate(found).view(f"u{found[0].dtype.itemsize}").copy()
