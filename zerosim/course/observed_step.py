"""One step of mixed precision, watched: which arrays pass from where to where, in which dtype, and how many bytes.

Nothing is derived: the units and the optimizer are watched as in the worked example, the rest is read from memory, the
trace and the arrays at rest. Legend: P parameters, N ranks, S loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerosim.course.worked_example import UnitPass, WatchedUnit
from zerosim.models.small import MLP
from zerosim.models.units import Model
from zerosim.numerics import random
from zerosim.numerics.formats import format_of
from zerosim.numerics.policy import Policy
from zerosim.optim import Adam, UpdateContext
from zerosim.optim.base import State
from zerosim.ranks.cluster import Cluster
from zerosim.ranks.rank import Rank
from zerosim.zero.engine import Engine


@dataclass(frozen=True, slots=True)
class Passed:
    """Arrays of one format that passed together."""

    format: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """The memory that rank 0 held, the values that it handed on and the bytes that it sent in a step.

    ``master``, ``weights``, ``gradient`` and ``state`` rest between steps. ``kept`` are the inputs of layers that
    forward keeps for backward, beside ``signs_nbytes`` of ReLU's signs; ``output`` is what it hands to the loss,
    ``output_gradient`` the gradient of S times the loss that backward begins with. ``sent_nbytes`` is what the sum of
    gradients over ranks sent, and ``gradient_divisor`` what it is divided by; ``wide_gradient`` is what the optimizer
    was handed then, in blocks of at most ``block_nbytes``.
    """

    parameter_count: int
    ranks: int
    scale: float
    skipped: bool
    master: Passed
    weights: Passed
    kept: Passed
    signs_nbytes: int
    output: Passed
    output_gradient: Passed
    gradient: Passed
    sent_nbytes: int
    gradient_divisor: float
    wide_gradient: Passed
    block_nbytes: int
    state: Passed


@dataclass(frozen=True)
class _WatchedAdam(Adam):
    """Adam; copies the gradients that it is handed."""

    handed: list[np.ndarray] = field(default_factory=list, repr=False)

    def update(self, ctx: UpdateContext, w: np.ndarray, g: np.ndarray, state: State, step: int) -> None:
        self.handed.append(g.copy())
        super().update(ctx, w, g, state, step)


def observed_step(compute: str = "fp16", widths: Sequence[int] = (256,) * 4, rows: int = 32, *, ranks: int = 2,
                  scale: float = 1024.0) -> ObservedStep:
    """Takes one step of an MLP without biases with Adam, at stage 0, on ``rows`` samples of each rank.

    Raises ValueError for a format that needs no master beside it, and for a step that overflows.
    """
    if format_of(compute).name == "fp32":
        raise ValueError("asked to watch a step that computes in fp32, which has one copy of the weights and nothing "
                         "to cast; take compute='fp16' or 'bf16'")
    policy = Policy(compute, loss_scale=scale)
    found: ObservedStep = Cluster(ranks).run(_observed_program, policy, tuple(widths), rows)[0]
    return found


def _observed_program(rank: Rank, policy: Policy, widths: tuple[int, ...], rows: int) -> ObservedStep:
    model, passes, adam = MLP(widths, bias=False), list[UnitPass](), _WatchedAdam()
    watched = Model([WatchedUnit(unit, passes) for unit in model.units], model.loss)
    engine = Engine(rank, watched, adam, stage=0, policy=policy)
    x, target = (random.normal((0, "observed step", rank.index, name), 0, rows * width).reshape(rows, width)
                 for name, width in (("x", widths[0]), ("target", widths[-1])))
    tape = engine.forward(x, target)
    saved = list(_arrays(tape.saved))
    kept = _passed(*(array for array in saved if array.dtype == policy.compute_dtype))
    signs_nbytes = sum(array.nbytes for array in saved if array.dtype == np.uint8)
    del saved
    engine.backward(tape)
    engine.reduce()
    divisor = engine.param_group.reduced_gradient.divisor
    result = engine.update([tape.loss])
    if result.skipped:
        raise ValueError(f"the step overflowed in {policy.compute} with the loss scale {result.scale:g} and was "
                         "skipped, so that nothing reached the optimizer; take a smaller scale")
    engine.all_gather_parameters()
    resting, group = rank.memory.now_nbytes_by_kind, engine.param_group
    last_forward, first_backward = passes[len(model.units) - 1:][:2]

    def rests(kind: str, *arrays: np.ndarray) -> Passed:
        return Passed(_passed(*arrays).format, resting[kind])

    return ObservedStep(
        model.parameter_count, rank.size, result.scale, result.skipped,
        master=rests("master", group.master), weights=rests("parameter", group.parameter), kept=kept,
        signs_nbytes=signs_nbytes, output=_passed(last_forward.values_out),
        output_gradient=_passed(first_backward.values_in), gradient=rests("gradient", group.gradient),
        sent_nbytes=rank.trace.sent_nbytes("gradients"), gradient_divisor=divisor,
        wide_gradient=_passed(*adam.handed), block_nbytes=max(g.nbytes for g in adam.handed),
        state=rests("optimizer_state", *group.slots.values()))


def _passed(*arrays: np.ndarray) -> Passed:
    """The format and the bytes of arrays, which have one format."""
    (dtype,) = {array.dtype for array in arrays}
    return Passed(format_of(dtype).name, sum(array.nbytes for array in arrays))


def _arrays(kept: Any) -> Iterator[np.ndarray]:
    """The arrays in lists and tuples of such, each once more for each time that it is there."""
    if isinstance(kept, np.ndarray):
        yield kept
    elif kept is not None:
        for one in kept:
            yield from _arrays(one)
