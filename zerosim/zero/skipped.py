"""Steps that are skipped since some gradient is inf or NaN: reported, unless the loss scaler learns from them.

A dynamic loss scaler tries a smaller scale next, and takes an overflow without a word. With any other scaler the next
step will most likely fail in the same way: the first skipped step is a warning, the last of several in a row an error,
and in debug mode any. All ranks know whether a step is skipped, and so raise, or do not, together.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from zerosim.numerics.formats import FORMATS
from zerosim.numerics.loss_scale import LossScaler, StaticScaler
from zerosim.ranks.errors import PACKAGE
from zerosim.ranks.rank import Rank
from zerosim.zero.param_group import ParamGroup

NAMED = 4  # parameters at most, of those whose gradients are no numbers


class SkippedStepWarning(RuntimeWarning):
    """A step was skipped, and no dynamic loss scaler learns from it; said once by each engine."""


class NonFiniteGradients(ValueError):
    """A step's gradients have inf or NaN: in debug mode, or as many times in a row as the loss scale allows."""


@contextmanager
def unreported_skips() -> Iterator[None]:
    """No warning of skipped steps inside the ``with`` block, for who reports them in a way of his own."""
    with warnings.catch_warnings(action="ignore", category=SkippedStepWarning):
        yield


class SkippedSteps:
    """The steps that one engine skips, and says so."""

    def __init__(self, rank: Rank, loss_scale: LossScaler) -> None:
        self.rank, self.loss_scale, self.warned = rank, loss_scale, False

    def report(self, groups: Sequence[ParamGroup], taken: int) -> None:
        """Says that a step was skipped on every rank, after ``taken`` good ones, while its gradients are still there.

        Raises NonFiniteGradients on every rank, or warns on rank 0, where that is due.
        """
        scaler = self.loss_scale
        if not isinstance(scaler, StaticScaler):
            return
        too_many = scaler.skips is not None and scaler.in_a_row >= scaler.skips
        if self.warned and not (too_many or self.rank.memory.debug):
            return
        who = f"{scaler.in_a_row} steps in a row were" if scaler.in_a_row > 1 else "a step was"
        text = (f"{who} skipped on every rank (steps taken: {taken}), and changed nothing: {_where(groups)} inf or "
                f"NaN, and the loss scale {scaler.scale:g} stays as it is. {_remedy(groups)}.")
        if too_many or self.rank.memory.debug:
            raise NonFiniteGradients(text)
        self.warned = True
        if self.rank.index == 0:
            limit = "" if scaler.skips is None else f", and {scaler.skips} in a row are an error"
            warnings.warn(f"{text} StepResult.skipped says it of each step{limit}.", SkippedStepWarning,
                          stacklevel=_levels_to_the_program())


def _remedy(groups: Sequence[ParamGroup]) -> str:
    narrow = {FORMATS[name].dtype for name in ("fp16", "fp8_e4m3", "fp8_e5m2")}
    if any({group.policy.compute_dtype, group.policy.reduce_dtype} & narrow for group in groups):
        return ("Take loss_scale=zs.numerics.loss_scale.Dynamic('torch') or bf16, and where that does not help look "
                "for inf or NaN in the data and in what the layers compute")
    return "Look for inf or NaN in the data and in what the layers compute, or lower the learning rate"


def _where(groups: Sequence[ParamGroup]) -> str:
    """The parameters whose sums of gradients are not all finite, whoever holds them."""
    found = [name for group in groups for name in _not_finite(group)]
    if not found:  # its sum is finite, and dividing that by a scale below 1 is not
        return "the norm of the mean gradient is"
    others = f" and {len(found) - NAMED} others" if len(found) > NAMED else ""
    return f"the gradient of {', '.join(found[:NAMED])}{others} has"


def _not_finite(group: ParamGroup) -> list[str]:
    kernels, names = group.rank.kernels, list(group.optimizers)
    flags = np.zeros(len(names), np.uint8)
    for piece in group.pieces:
        if not all(kernels.all_finite(x) for x in group.store.read_stretches(group.gradient_sum(piece))):
            flags[names.index(piece.entry.name)] = 1
    flags = group.all_gather_scalars(flags).reshape(-1, len(names)).max(axis=0)
    return [name for name, flag in zip(names, flags, strict=True) if flag]


def _levels_to_the_program() -> int:
    """The stacklevel of a warning whose place is the caller's program, seen from the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
