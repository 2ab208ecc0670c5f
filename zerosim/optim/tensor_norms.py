"""Optimizers whose step is as long as a tensor's norms say: elementwise but for two numbers per tensor.

Legend: n elements of a piece. A step has two halves: ``advance`` moves the moments, and ``direction`` says which
vector's norm is wanted; then ``update``, which finds ‖w‖ and that norm, of the whole tensor, in its context. Between
the halves the ranks exchange the sums of squares of their pieces: one message of two numbers per tensor. Tensors
of any number of dimensions are treated in one way; practice often leaves biases and gains to another optimizer, by a
Group.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, cast

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.kernels import corrected_root, descend, move_average, move_square_average
from zerosim.numerics.ranges import AtLeastZero
from zerosim.optim.base import Cut, DecayRate, Optimizer, Slot, State, UpdateContext, require_update
from zerosim.optim.promises import require_halves


class TensorNormOptimizer(Optimizer):
    """An optimizer that may be cut anywhere once it is given the norms of whole tensors."""

    __slots__ = ()
    cut: ClassVar[Cut] = "anywhere"
    needs: ClassVar[frozenset[str]] = frozenset({"tensor_norm"})

    @abstractmethod
    def advance(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """Moves the moments (n,) by g (n,)."""

    @abstractmethod
    def direction(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int, out: Array) -> None:
        """Writes the vector (n,) whose norm counts, from moments that have been moved."""


@dataclass(frozen=True, slots=True)
class LAMB(TensorNormOptimizer):
    """Adam's direction u = m̂/(√v̂ + ε) + weight_decay·w; w -= lr·(‖w‖/‖u‖)·u, the ratio 1 where a norm is 0.

    You et al. 2020 (arXiv:1904.00962), algorithm 2, with φ the identity.
    """

    lr: AtLeastZero = 1e-3
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: AtLeastZero = 1e-6
    weight_decay: AtLeastZero = 0.01

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The two moments, m and v."""
        return {"m": Slot(shape), "v": Slot(shape)}

    def advance(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·(g·g)."""
        require_update(self, w, g, state, step)
        ctx.kernels.step_blocks(self._move_moments, state["m"], state["v"], g)

    def _move_moments(self, m: Array, v: Array, g: Array, part: Array) -> None:
        move_average(self.beta1, m, g, part)
        move_square_average(self.beta2, v, g, part)

    def direction(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int, out: Array) -> None:
        """Writes u (n,)."""
        ctx.kernels.step_blocks(partial(self._direction, step), w, state["m"], state["v"], out)

    def _direction(self, step: int, w: Array, m: Array, v: Array, u: Array, root: Array) -> None:
        corrected_root(v, 1.0 - self.beta2**step, self.epsilon, root)
        np.divide(m, 1.0 - self.beta1**step, out=u)
        np.divide(u, root, out=u)
        np.multiply(w, self.weight_decay, out=root)
        np.add(u, root, out=u)

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """The second half of a step: moves w (n,) by moments that have been moved."""
        weights, direction = norms_in(ctx, self)
        require_update(self, w, g, state, step)
        rate = self.lr * (weights / direction if weights > 0 and direction > 0 else 1.0)
        ctx.kernels.step_blocks(partial(self._move, step, rate), w, state["m"], state["v"], scratch=2)

    def _move(self, step: int, rate: float, w: Array, m: Array, v: Array, u: Array, root: Array) -> None:
        self._direction(step, w, m, v, u, root)
        descend(rate, 1.0, w, u)


@dataclass(frozen=True, slots=True)
class LARS(TensorNormOptimizer):
    """b = momentum·b + lr·λ·(g + weight_decay·w); w -= b, with λ = trust·‖w‖/(‖g‖ + weight_decay·‖w‖).

    λ is 1 where ‖w‖ or its divisor is 0, as practice has it. You, Gitman and Ginsburg 2017 (arXiv:1708.03888),
    algorithm 1.
    """

    lr: AtLeastZero = 0.1
    momentum: DecayRate = 0.9
    trust: AtLeastZero = 1e-3
    weight_decay: AtLeastZero = 5e-4

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The buffer b."""
        return {"b": Slot(shape)}

    def advance(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """Moves nothing: the buffer takes up a gradient that the norms have scaled."""
        require_update(self, w, g, state, step)

    def direction(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int, out: Array) -> None:
        """Writes g (n,)."""
        ctx.kernels.cast_pack(g, out)

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """The second half of a step, on w and b (n,), with g (n,)."""
        weights, gradient = norms_in(ctx, self)
        require_update(self, w, g, state, step)
        divisor = gradient + self.weight_decay * weights
        rate = self.lr * (self.trust * weights / divisor if weights > 0 and divisor > 0 else 1.0)
        ctx.kernels.step_blocks(partial(self._move, rate), w, state["b"], g)

    def _move(self, rate: float, w: Array, b: Array, g: Array, part: Array) -> None:
        np.multiply(w, self.weight_decay, out=part)
        np.add(g, part, out=part)
        np.multiply(part, rate, out=part)
        np.multiply(b, self.momentum, out=b)
        np.add(b, part, out=b)
        np.subtract(w, b, out=w)


def norms_in(ctx: UpdateContext, optimizer: Optimizer) -> tuple[float, float]:
    """The two norms of a context; ValueError without them."""
    if ctx.norms is None:
        raise ValueError(f"{type(optimizer).__name__}.update needs the norms of the whole tensor, and found none in "
                         "its context: a piece does not know them. An engine measures them; by hand call with_norms() "
                         "for a whole tensor, or advance() and direction() on all pieces, and add up their squares")
    return ctx.norms


def with_norms(optimizer: Optimizer, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> UpdateContext:
    """The context of an update of a whole tensor w (n,): where norms are needed, moves the moments and measures them.

    Other optimizers get the context back as it is. Raises ValueError for one that needs norms and does not say of what.
    """
    if "tensor_norm" not in optimizer.needs:
        return ctx
    require_halves(optimizer)
    halves, direction = cast(TensorNormOptimizer, optimizer), ctx.empty(w.shape)
    halves.advance(ctx, w, g, state, step)
    halves.direction(ctx, w, g, state, step, direction)
    squares = [ctx.kernels.sum_of_squares(x) for x in (w, direction)]
    return replace(ctx, norms=(squares[0]**0.5, squares[1]**0.5))
