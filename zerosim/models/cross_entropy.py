"""Cross-entropy of classes, the loss of language models.

Legend: B batch, T tokens of a sample, M = B·T places, V classes. A target of -1 names no class: its place has no loss.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from zerosim.models.checks import require_shape
from zerosim.models.context import Context

Normalization = Literal["own", "global"]
NORMALIZATIONS = ("own", "global")
IGNORED = -1  # the target of a place without one


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean over tokens of log Σ exp(logits) - logit of the target.

    ``normalization`` "own" divides by this micro-batch's own valid targets. "global" divides by its M places, and the
    engine multiplies the mean gradient by places per token of all ranks and micro-batches together, so that every token
    weighs the same wherever it lies.
    """

    normalization: Normalization = "own"
    integer_targets: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises ValueError for another normalization."""
        _require_normalization("CrossEntropy", self.normalization)

    @property
    def is_global(self) -> bool:
        """True where the engine counts the tokens of all ranks."""
        return self.normalization == "global"

    def tokens(self, ctx: Context, target: np.ndarray) -> int:
        """How many targets are valid."""
        return ctx.kernels.count_targets(target)

    def forward(self, ctx: Context, y: np.ndarray, target: np.ndarray) -> tuple[float, Any]:
        """See `cross_entropy_forward`."""
        return cross_entropy_forward(ctx, y, target, self.normalization)

    def backward(self, ctx: Context, kept: Any, scale: float) -> np.ndarray:
        """See `cross_entropy_backward`."""
        return cross_entropy_backward(ctx, kept, scale)


def cross_entropy_forward(ctx: Context, logits: np.ndarray, target: np.ndarray,
                          normalization: Normalization = "own") -> tuple[float, tuple[Any, ...]]:
    """The mean loss: logits (..., V) of any format, target (...) integers, V classes from 0; -1 for no target.

    The log-sum-exp of a row is fp32, the losses are added up in float64, and the mean is rounded to fp32 once. Keeps
    logits, target and the rows' log-sum-exps. Raises ValueError for other shapes and dtypes, a class that there is
    not, and, unless the mean is global, for no valid target; a global mean of none is 0.
    """
    where = "cross_entropy_forward"
    _require_normalization(where, normalization)
    require_shape(where, "a target", target, logits.shape[:-1], "there is one class for each row of logits")
    if target.dtype.kind not in "iu":
        raise ValueError(f"{where} asked for targets as integers, and found {target.dtype}; a target is a class")
    rows, classes = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    smallest, largest = ctx.kernels.index_range(classes)
    if smallest < IGNORED or largest >= rows.shape[1]:
        raise ValueError(f"{where} asked for classes from 0 to {rows.shape[1] - 1}, and {IGNORED} where there is none, "
                         f"and found {smallest} to {largest}; let the logits have all classes")
    count = ctx.kernels.count_targets(classes) if normalization == "own" else classes.size
    if not count:
        raise ValueError(f"{where} asked for the mean over valid targets, and found none among {classes.size}; leave "
                         "such a batch out, or take normalization='global'")
    log_sums = ctx.empty(rows.shape[0], dtype=ctx.wide_dtype, name="loss.log_sums")
    total = ctx.kernels.softmax_loss(rows, classes, log_sums)
    ctx.note(flops=4 * rows.size, nbytes=rows.nbytes)
    with np.errstate(all="ignore"):  # a mean beyond fp32 is inf, whatever the caller's errstate
        return float(np.asarray(total / count).astype(ctx.wide_dtype)), (logits, classes, log_sums, count)


def cross_entropy_backward(ctx: Context, kept: tuple[Any, ...], scale: float) -> np.ndarray:
    """dlogits = (softmax(logits) - [class = target])·(scale/count), in the logits' format; 0 where there is no target.

    The factor is divided in double, the rest is fp32, rounded once.
    """
    logits, classes, log_sums, count = kept
    dlogits = ctx.empty(logits.shape, "activation_gradient", logits.dtype, name="loss.dlogits")
    rows = (-1, logits.shape[-1])
    ctx.kernels.softmax_loss_gradient(logits.reshape(rows), classes, log_sums, scale / count, dlogits.reshape(rows))
    ctx.note(flops=4 * logits.size, nbytes=2 * logits.nbytes)
    return dlogits


def _require_normalization(where: str, normalization: Any) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{where} was given normalization={normalization!r}; choose one of "
                         f"{', '.join(map(repr, NORMALIZATIONS))}")
