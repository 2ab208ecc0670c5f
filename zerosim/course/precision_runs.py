"""Two small networks trained in many formats, step by step: what overflows, what underflows, and what stands still.

The data of each may be measured in another unit u, a power of two: inputs and targets are u times as large, losses and
gradients u² times. That changes no bit of what formats of a wide range learn, for SGD's learning rate is divided by u²,
and Adam divides the gradient by its own size (its ε is given in the unit too); but a large u makes activations large,
and a small one makes gradients small, as averages over many tokens do in large models.

Legend: B batch, N ranks, S loss scale, u the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType

import numpy as np

from zerosim.models.small import MLP
from zerosim.models.units import first_weights, one_pass
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.formats import FORMATS, format_of
from zerosim.numerics.loss_scale import Dynamic, LossScaleExhausted, Scaling, Static
from zerosim.numerics.policy import Policy
from zerosim.optim import SGD, Adam, Optimizer
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine


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
    """Trains through the engine on x and target in fp32 and in the unit, ``batch(step, rank)``."""
    found: list[SmallRun] = list(Cluster(ranks).run(_program, network, optimizer, batch, policy, steps, unit))
    return replace(found[0], losses_by_rank=tuple(zip(*(run.losses for run in found), strict=True)),
                   overflowed=tuple(tuple(chain(*at)) for at in zip(*(run.overflowed for run in found), strict=True)))


def _program(rank: Rank, network: Callable[[], MLP], optimizer: Optimizer,
             batch: Callable[[int, int], tuple[Array, Array]], policy: Policy, steps: int, unit: float) -> SmallRun:
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
    return SmallRun(tuple(losses), tuple(scales), tuple(skipped), tuple(overflowed), gave_up, engine.loss_scale.scale,
                    moved_share)


def _bits(weights: Array) -> np.ndarray:
    """A copy as whole numbers, so that NaN equals itself."""
    return weights.view(f"u{weights.dtype.itemsize}").copy()


def has_wide_range(fmt: str) -> bool:
    """True when a format has fp32's exponents."""
    return format_of(fmt).max_exponent == FORMATS["fp32"].max_exponent


# -- Two overflows: one in backward, which a smaller loss scale cures, and one in forward, which none does ------------
# The same network learns the same task in a small unit, in which fp16 holds all its activations, and in a large one, in
# which fp16 still holds the inputs, but not what the first layer adds up of them.

OVERFLOW_WIDTHS = (8, 256, 1)
OVERFLOW_ROWS = 16  # B
RANKS = 2
STEPS = 40
SEED = 2
OVERFLOW_LR = 0.002  # at u = 1
LOWEST, HIGHEST = 0.5, 1.9  # the inputs, in units: of one sign, so that what a layer adds up does not cancel
OVERFLOW_INITIAL = 2.0**16
SCALINGS: Mapping[str, Scaling] = {
    "S = 1": Static(1.0), "S = 2^-16": Static(2.0**-16), "torch": Dynamic("torch", OVERFLOW_INITIAL),
    "deepspeed": Dynamic("deepspeed", OVERFLOW_INITIAL)}


@dataclass(frozen=True, slots=True)
class Trial:
    """The course of a training in one unit and format with one loss scaling; losses are in units squared, as at u = 1.

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


def trial(unit: float, fmt: str, scaling: str, steps: int = STEPS) -> Trial:
    """Trains on two ranks, with one of SCALINGS; the losses are rank 0's."""
    run = trained(overflow_network, SGD(OVERFLOW_LR / unit**2), partial(overflow_batch, unit),
                  Policy(fmt, loss_scale=SCALINGS[scaling]), steps, ranks=RANKS, unit=unit)
    return Trial(unit, fmt, scaling, steps, sum(run.skipped), run.losses_by_rank[0][0], run.losses_by_rank[-1][0],
                 run.scale, run.gave_up)


def largest_values(fmt: str) -> Iterator[LargestValue]:
    """The largest output of each layer in the first forward of rank 0, in both units, in the format and in fp32."""
    model = overflow_network()
    for unit in (1.0, large_unit(fmt)):
        for name in dict.fromkeys((fmt, "fp32")):
            seen = one_pass(model, first_weights(model), Policy(name), *overflow_batch(unit, 0, 0))
            yield from (LargestValue(unit, name, layer, value) for layer, value in seen.largest.items())


def overflow_network() -> MLP:
    """The network: ReLU keeps units, and so does every layer without a bias."""
    return MLP(OVERFLOW_WIDTHS, bias=False, seed=SEED)


def overflow_batch(unit: float, step: int, rank: int) -> tuple[Array, Array]:
    """x (B, 8) and target (B, 1), both in fp32 and in the unit; the target is x0·x1 + x2 of the numbers at u = 1."""
    shape = (OVERFLOW_ROWS, OVERFLOW_WIDTHS[0])
    words = random.uniform((0, "forward overflow", step, rank), 0, math.prod(shape)).reshape(shape)
    x = np.float32(LOWEST) + np.float32(HIGHEST - LOWEST) * words
    target = x[:, :1] * x[:, 1:2] + x[:, 2:3]
    return x * np.float32(unit), target * np.float32(unit)


# -- The same data learned with Adam in many formats: losses, loss scale, and whose gradients overflowed --------------

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
    x = random.normal((0, "resting formats", step % BATCHES, rank), 0, ROWS * WIDTHS[0]).reshape(ROWS, WIDTHS[0])
    target = np.stack([np.sin(x[:, 0] + x[:, 1]), x[:, 2] * x[:, 3] / 2], axis=1)
    return x * x.dtype.type(unit), target * target.dtype.type(unit)


# -- The same data with what rests between steps in other formats: master weights, Adam's state, products in fp8 ------
# A network as small as this one shows it: weights that are updated in the format that computes move only where lr is
# half a gap, or more; Adam's v in fp16 is 0, so that Adam divides by its ε.

RESTING_LR = 1e-4


@dataclass(frozen=True, slots=True)
class Rested:
    """The course of a training. Losses are means over the first, the middle and the last round of the data.

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
    """Trains with Adam, at least one round of the data."""
    if steps < BATCHES:
        raise ValueError(f"asked for {steps} steps; one round of the data takes {BATCHES}, so ask for that or more")
    run = trained(lambda: MLP(WIDTHS, seed=0), Adam(RESTING_LR), samples, policy, steps)
    starts = (0, (steps - BATCHES) // 2, steps - BATCHES)
    with np.errstate(all="ignore"):  # a mean of infinities is one
        first, middle, last = (float(np.mean(run.losses[start:start + BATCHES])) for start in starts)
    return Rested(policy.compute, policy.master, policy.state, policy.matmul, steps, sum(run.skipped), first,
                  middle, last, run.moved_share)
