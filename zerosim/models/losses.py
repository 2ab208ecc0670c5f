"""Losses: one number for a batch, and the gradient of the model's output times the loss scale.

Legend: B batch, O outputs, T tokens of a sample, M = B·T places, V classes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np

from zerosim.models.layers import Context, require_at_rest
from zerosim.numerics.arrays import BLOCK, Array, spans
from zerosim.numerics.checks import require_shape


class Loss(Protocol):
    """A mean over the batch: what follows a model's last unit.

    ``integer_targets`` is True where targets are indices, which no cast may touch.
    """

    @property
    def integer_targets(self) -> bool:
        """False where targets are values."""

    @property
    def is_global(self) -> bool:
        """True where the mean is over the valid targets of all ranks, which the engine counts by ``tokens``."""

    def tokens(self, ctx: Context, target: Array) -> int:
        """The number of targets that are valid."""

    def forward(self, ctx: Context, y: Array, target: Array) -> tuple[float, Any]:
        """The loss of this batch, unscaled, and what backward needs."""

    def backward(self, ctx: Context, saved: Any, scale: float) -> Array:
        """The gradient of ``scale`` times the loss with respect to y, in the compute dtype."""


@dataclass(frozen=True, slots=True)
class HalfSquaredError:
    """The mean over the batch of ½·Σ(y - target)²: y (B, O) in the compute dtype, target (B, O) of any format."""

    integer_targets: ClassVar[bool] = False
    is_global: ClassVar[bool] = False

    def tokens(self, ctx: Context, target: Array) -> int:
        """All of them."""
        return target.size

    def forward(self, ctx: Context, y: Array, target: Array) -> tuple[float, tuple[Array, Array]]:
        """The loss; saves y and target.

        Differences are fp32, their squares are added up in float64 and the mean is rounded to fp32 once (all in
        float64 where the compute dtype is). Raises ValueError for other shapes, an empty batch, another dtype.
        """
        where = "HalfSquaredError"
        require_shape(where, "a target", target, y.shape, "a target has one value for each output of the "
                      "model; broadcasting would compare every row with every other")
        require_at_rest(ctx, where, y=y)
        if target.dtype.itemsize > ctx.wide_dtype.itemsize:
            raise ValueError(f"{where} computes in {ctx.wide_dtype}, and found a target in {target.dtype}; round "
                             "it first, with astype(np.float32), so that no arithmetic is wider than it says")
        if y.ndim == 0 or y.size == 0:
            raise ValueError(f"{where} asked for a batch, and found shape {y.shape}; a mean needs a row or more")
        total = _sum_of_squares(ctx, y.reshape(-1), target.reshape(-1))
        ctx.note(flops=3 * y.size, nbytes=y.nbytes + target.nbytes)
        return _mean(ctx, 0.5 * total, y.shape[0]), (y, target)

    def backward(self, ctx: Context, saved: tuple[Array, Array], scale: float) -> Array:
        """dy = (y - target)·(scale/B): (B, O); the factor is divided in double, the rest is fp32."""
        y, target = saved
        dy = ctx.empty(y.shape, "activation_gradient", name="loss.dy")
        function = partial(_scaled_difference, scale / y.shape[0])
        ctx.kernels.elementwise(function, y.reshape(-1), target.reshape(-1), out=dy.reshape(-1))
        ctx.note(flops=2 * y.size, nbytes=y.nbytes + target.nbytes + dy.nbytes)
        return dy


def _scaled_difference(factor: float, y: Array, target: Array, dy: Array) -> None:
    np.subtract(y, target, out=dy)
    dy *= factor


def _sum_of_squares(ctx: Context, y: Array, target: Array) -> float:
    """Σ(y - target)², in float64; one block of differences is all the memory this takes."""
    differences = ctx.empty(min(BLOCK, y.size), "workspace", ctx.wide_dtype, name="loss.differences")
    total = 0.0
    for here in spans(y.size):
        block = differences[:here.stop - here.start]
        ctx.kernels.elementwise(np.subtract, y[here], target[here], out=block)
        total += ctx.kernels.sum_of_squares(block)
    return total


def _mean(ctx: Context, total: float, count: int) -> float:
    """total/count, rounded to fp32 once."""
    with np.errstate(all="ignore"):  # a mean beyond fp32 is inf, whatever the caller's errstate
        return float(np.asarray(total / count).astype(ctx.wide_dtype))


# -- Cross-entropy of classes ------------------------------------------------------------------------------------------
# The loss of language models. A target of -1 names no class: its place has no loss.

Normalization = Literal["own", "global"]
NORMALIZATIONS = get_args(Normalization)
IGNORED = -1  # the target of a place without one


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean over tokens of log Σ exp(logits) - logit of the target: logits (..., V), target (...) integers.

    ``normalization`` "own" divides by this micro-batch's own valid targets. "global" divides by its M places, and the
    engine multiplies the mean gradient by places per token of all ranks and micro-batches together, so that every token
    weighs the same wherever it lies. Raises ValueError for another.
    """

    normalization: Normalization = "own"
    integer_targets: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"CrossEntropy was given normalization={self.normalization!r}; choose one of "
                             f"{', '.join(map(repr, NORMALIZATIONS))}")

    @property
    def is_global(self) -> bool:
        """True where the engine counts the tokens of all ranks."""
        return self.normalization == "global"

    def tokens(self, ctx: Context, target: Array) -> int:
        """The number of targets that are valid."""
        return ctx.kernels.count_targets(target)

    def forward(self, ctx: Context, y: Array, target: Array) -> tuple[float, Any]:
        """The mean loss: logits y (..., V) of any format, V classes from 0; -1 for no target.

        The log-sum-exp of a row is fp32, the losses are added up in float64, and the mean is rounded to fp32 once.
        Saves logits, target and the rows' log-sum-exps. Raises ValueError for other shapes and dtypes, a class that
        there is not, and, unless the mean is global, for no valid target; a global mean of none is 0.
        """
        where = "CrossEntropy"
        require_shape(where, "a target", target, y.shape[:-1], "there is one class for each row of logits")
        if target.dtype.kind not in "iu":
            raise ValueError(f"{where} asked for targets as integers, and found {target.dtype}; a target is a class")
        rows, classes = y.reshape(-1, y.shape[-1]), target.reshape(-1)
        smallest, largest = ctx.kernels.index_range(classes)
        if smallest < IGNORED or largest >= rows.shape[1]:
            raise ValueError(f"{where} asked for classes from 0 to {rows.shape[1] - 1}, and {IGNORED} where there is "
                             f"none, and found {smallest} to {largest}; " + (
                                 f"write np.where(target < 0, {IGNORED}, target)" if smallest < IGNORED else
                                 "let the logits have all classes"))
        count = classes.size if self.is_global else self.tokens(ctx, classes)
        if not count:
            raise ValueError(f"{where} asked for the mean over valid targets, and found none among {classes.size}; "
                             "leave such a batch out, or take normalization='global'")
        log_sums = ctx.empty(rows.shape[0], dtype=ctx.wide_dtype, name="loss.log_sums")
        total = ctx.kernels.softmax_loss(rows, classes, log_sums)
        ctx.note(flops=4 * rows.size, nbytes=rows.nbytes)
        return _mean(ctx, total, count), (y, classes, log_sums, count)

    def backward(self, ctx: Context, saved: tuple[Any, ...], scale: float) -> Array:
        """dlogits = (softmax(logits) - [class = target])·(scale/count), in the logits' format; 0 without a target.

        The factor is divided in double, the rest is fp32, rounded once.
        """
        logits, classes, log_sums, count = saved
        dlogits = ctx.empty(logits.shape, "activation_gradient", logits.dtype, name="loss.dlogits")
        rows = (-1, logits.shape[-1])
        ctx.kernels.softmax_loss_gradient(logits.reshape(rows), classes, log_sums, scale / count, dlogits.reshape(rows))
        ctx.note(flops=4 * logits.size, nbytes=2 * logits.nbytes)
        return dlogits
