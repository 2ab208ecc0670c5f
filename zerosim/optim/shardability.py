"""May this optimizer's state be cut? A property that can be tested: update the pieces, and compare bits.

ZeRO may cut an optimizer's state anywhere if and only if the update of element i reads nothing but element i's weight,
gradient and state. What an optimizer says of itself is not asked; it is run, whole and in pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer
from zerosim.optim.dependence import dependence_of
from zerosim.optim.refusals import checked_optimizer, usable_trials
from zerosim.optim.trials import STEPS, Run, Shape, Trial, pieces_of, random_bounds

Verdict = Literal["anywhere", "tensor", "no"]
# From small to large, so that the first counterexample is a small one. The longest is longer than two blocks of the
# kernels; an engine hands over no piece that is longer than one.
SHAPES: tuple[Shape, ...] = ((2,), (3,), (2, 2), (5,), (3, 4), (4, 3), (23,), (12, 7), (1030,), (131089,))
CUTS = 3  # random cuts of each tensor
UNREPEATABLE = ("the same steps made again give other bits: it is no function of its arguments (it draws random "
                "numbers, or remembers something outside of its slots)")
REMEMBERED = ("something passes between tensors or steps outside of the slots (the optimizer remembers it): a rank "
              "that updates other tensors, or resumes, would compute other bits")


@dataclass(frozen=True, slots=True)
class Shardability:
    """Where an optimizer's state may be cut: "anywhere", on the borders of a "tensor" only, or "no"where.

    ``reason`` says what the update depends on, ``counterexample`` what differed where a cut was not allowed (None where
    every cut was). ``claimed`` is what the optimizer says of itself, and ``is_honest`` is False where it claims more,
    for tensors of any shape, than was found.
    """

    optimizer: str
    cut: Verdict
    claimed: str
    is_honest: bool
    reason: str
    counterexample: str | None

    def __str__(self) -> str:
        """The finding in one sentence or two."""
        where = {"anywhere": "may be cut anywhere", "tensor": "may be cut on the borders of tensors only",
                 "no": "may not be cut at all"}[self.cut]
        claim = "" if self.is_honest else f", and claims cut={self.claimed!r}, which is too much"
        shown = "" if self.counterexample is None else f". {self.counterexample}"
        return f"{self.optimizer} {where}{claim}: {self.reason}{shown}"


def check_shardable(optimizer: Optimizer, *, shapes: Sequence[Shape] = SHAPES, seed: int = 0) -> Shardability:
    """Finds by running it whether an update commutes with cutting tensors anywhere, on their borders, or not at all.

    Random tensors of these shapes (of those that the optimizer takes) are updated for several steps, with the state
    carried: whole and in random pieces, beside others and alone, by one optimizer and by one made anew for each step;
    the bits of weights and state are compared. An optimizer that needs norms of whole tensors, or a layer's factors, is
    given them. What happens at rare values only, or at steps that are not tried, is not found: this is a test, and no
    proof. Raises ValueError for what is no optimizer, and for one that breaks the promise of ``update``.

    >>> import zerosim as zs
    >>> check_shardable(zs.optim.Adam()).cut, check_shardable(zs.optim.Muon()).cut
    ('anywhere', 'tensor')
    """
    checked_optimizer(optimizer)
    kernels = NumpyKernels()
    trials = usable_trials(optimizer, shapes, seed, kernels)
    name, claimed = type(optimizer).__name__, optimizer.cut
    hidden = _hidden_state(optimizer, kernels, [trial for trial in trials if trial.w.size < 10_000] or trials)
    if hidden is not None:
        return Shardability(name, "no", claimed, False, *hidden)
    torn, honest = None, True
    for trial in trials:
        found = _torn(optimizer, kernels, trial, seed)
        honest = honest and (found is None or optimizer.cut_of(trial.tensor) != "anywhere")
        torn = torn or found
    if torn is None:
        told = ", and the norms of the whole tensor, which it is told" if "tensor_norm" in optimizer.needs else ""
        return Shardability(name, "anywhere", claimed, honest,
                            f"an element's update reads that element's weight, gradient and state alone{told}", None)
    return Shardability(name, "tensor", claimed, honest, *torn)


Finding = tuple[str, str]  # the reason, the counterexample


# -- between tensors ---------------------------------------------------------------------------------------------------


def _hidden_state(optimizer: Optimizer, kernels: NumpyKernels, trials: Sequence[Trial]) -> Finding | None:
    """What passes from one tensor or step to another but by the slots; None where nothing does."""
    beside = [trial.copy() for trial in trials]
    Run(kernels).steps(copy.deepcopy(optimizer), beside)
    again = [trial.copy() for trial in trials]
    Run(kernels).steps(copy.deepcopy(optimizer), again)
    anew = [trial.copy() for trial in trials]
    for trial in reversed(anew):
        for at in range(len(STEPS)):
            trial.move()
            Run(kernels).step(copy.deepcopy(optimizer), [trial], at)
    for others, reason, what in ((again, UNREPEATABLE, "in a second run of the same steps"),
                                 (anew, REMEMBERED, "alone and begun anew at each step")):
        for one, other in zip(beside, others, strict=True):
            found = difference(one.bits(), other.bits(), f"A tensor {one.tensor} beside others, and {what}")
            if found is not None:
                return reason, found
    return None


# -- within a tensor ---------------------------------------------------------------------------------------------------


def _torn(optimizer: Optimizer, kernels: NumpyKernels, trial: Trial, seed: int) -> Finding | None:
    """What differs when a tensor is updated in flat pieces; None where every bit agrees."""
    odd = next((name for name, slot in trial.slots.items() if slot.shape != trial.tensor), None)
    if odd is not None:
        return ("its state has another shape than the tensor, and belongs to all of it",
                f"For a tensor {trial.tensor} it keeps {odd!r} {trial.slots[odd].shape}, which cannot be cut with it.")
    whole, run = trial.copy(), Run(kernels)
    run.steps(copy.deepcopy(optimizer), [whole])
    for bounds in random_bounds(trial.w.size, seed, CUTS):
        pieces, cut = pieces_of(trial, bounds), f"A tensor {trial.tensor} whole, and cut at {bounds[1:-1]}"
        try:
            for piece in pieces:
                Run(kernels, run.norms).steps(copy.deepcopy(optimizer), [piece])
        except Exception as error:
            return "it refuses pieces of a tensor", f"{cut}: {type(error).__name__}: {error}"
        together = {name: np.concatenate([piece.bits()[name] for piece in pieces]) for name in pieces[0].bits()}
        found = difference(whole.bits(), together, cut)
        if found is not None:
            return dependence_of(optimizer, kernels, trial), found
    return None


def difference(one: dict[str, Any], other: dict[str, Any], what: str) -> str | None:
    """The first element of weights or state that differs, as a sentence; None where every bit agrees."""
    for name, bits in one.items():
        at = np.flatnonzero(bits != other[name])
        if at.size:
            first, second = (x[name][at[:1]].view(np.float32)[0] for x in (one, other))
            return (f"{what}: {at.size} of {bits.size} elements of {name} differ after {len(STEPS)} steps; element "
                    f"{at[0]} becomes {first!s} and {second!s}.")
    return None
