"""Optimizers that look at one element at a time, so that their state may be cut anywhere.

Legend: n elements of a shard, b of a block. Arrays are fp32; scalars (1 - β and 1 - β^t among them) are computed in
double. Every operation rounds, in the order in which the formula is read.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.kernels import corrected_root, descend, move_average, move_square_average
from zerosim.numerics.ranges import AtLeastZero, Flag
from zerosim.optim.base import Cut, DecayRate, Optimizer, Slot, State, UpdateContext, require_update


class Elementwise(Optimizer):
    """An optimizer whose update of an element reads that element's weight, gradient and state alone.

    A subclass says what it ``keeps``, the format of each slot by its name, and how many blocks of ``scratch`` it needs,
    and has ``update_block``.
    """

    __slots__ = ()
    cut: ClassVar[Cut] = "anywhere"
    keeps: ClassVar[Mapping[str, str]] = {}
    scratch: ClassVar[int] = 2

    @abstractmethod
    def update_block(self, step: int, *blocks: Any, **_: Any) -> None:
        """One step on the blocks ``w, *slots, g, *scratch``, each (b,), in place but for g."""

    def slots(self, shape: tuple[int, ...]) -> dict[str, Slot]:
        """The slots that it keeps, each of the parameter's shape."""
        return {name: Slot(shape, format) for name, format in self.keeps.items()}

    def update(self, ctx: UpdateContext, w: Array, g: Array, state: State, step: int) -> None:
        """One step on w and every slot (n,), with g (n,), block by block."""
        require_update(self, w, g, state, step)
        ctx.kernels.step_blocks(partial(self.update_block, step), w, *(state[name] for name in self.keeps), g,
                                scratch=self.scratch)


@dataclass(frozen=True, slots=True)
class SGD(Elementwise):
    """w -= lr·g. No state."""

    scratch: ClassVar[int] = 1
    lr: AtLeastZero

    def update_block(self, step: int, w: Array, g: Array, change: Array) -> None:
        np.multiply(g, self.lr, out=change)
        np.subtract(w, change, out=w)


@dataclass(frozen=True, slots=True)
class Adam(Elementwise):
    """m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·(g·g); w -= lr·(m/(1-β1^t))/(√(v/(1-β2^t)) + ε).

    Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1. With ε = 0 a weight whose gradients have all been 0
    becomes NaN (0/0), and the update does not change at all when the loss is scaled by a power of two.
    """

    keeps: ClassVar[Mapping[str, str]] = {"m": "fp32", "v": "fp32"}
    lr: AtLeastZero = 1e-3
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: AtLeastZero = 1e-8

    @property
    def decay(self) -> float:
        """The share of a weight that decay leaves in one step."""
        return 1.0

    def update_block(self, step: int, w: Array, m: Array, v: Array, g: Array, change: Array, root: Array) -> None:
        correction1, correction2, decay = 1.0 - self.beta1**step, 1.0 - self.beta2**step, self.decay
        move_average(self.beta1, m, g, change)
        move_square_average(self.beta2, v, g, change)
        corrected_root(v, correction2, self.epsilon, root)
        np.divide(m, correction1, out=change)
        np.multiply(change, self.lr, out=change)
        np.divide(change, root, out=change)
        if decay != 1.0:
            np.multiply(w, decay, out=w)
        np.subtract(w, change, out=w)


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam after w *= 1 - lr·weight_decay: the decay is decoupled, no part of g, m or v.

    Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2. Every weight decays, biases too; a group with
    weight_decay 0 exempts some.
    """

    weight_decay: AtLeastZero = 0.01

    @property
    def decay(self) -> float:
        """1 - lr·weight_decay."""
        return 1.0 - self.lr * self.weight_decay


@dataclass(frozen=True, slots=True)
class Momentum(Elementwise):
    """b = momentum·b + g; w -= lr·b, or with Nesterov's look ahead w -= lr·(momentum·b + g).

    Polyak 1964, "Some methods of speeding up the convergence of iteration methods", equation 9; Nesterov's form as
    Sutskever et al. 2013 ("On the importance of initialization and momentum", section 2) write it, seen from the point
    that it looks ahead to, as practice has it.
    """

    keeps: ClassVar[Mapping[str, str]] = {"b": "fp32"}
    scratch: ClassVar[int] = 1
    lr: AtLeastZero
    momentum: DecayRate = 0.9
    nesterov: Flag = False

    def update_block(self, step: int, w: Array, b: Array, g: Array, change: Array) -> None:
        np.multiply(b, self.momentum, out=b)
        np.add(b, g, out=b)
        if self.nesterov:
            np.multiply(b, self.momentum, out=change)
            np.add(change, g, out=change)
            np.multiply(change, self.lr, out=change)
        else:
            np.multiply(b, self.lr, out=change)
        np.subtract(w, change, out=w)


@dataclass(frozen=True, slots=True)
class AdaGrad(Elementwise):
    """v += g·g; w -= lr·g/(√v + ε).

    Duchi, Hazan and Singer 2011, "Adaptive subgradient methods", section 1.1, the diagonal form.
    """

    keeps: ClassVar[Mapping[str, str]] = {"v": "fp32"}
    lr: AtLeastZero = 1e-2
    epsilon: AtLeastZero = 1e-10

    def update_block(self, step: int, w: Array, v: Array, g: Array, change: Array, root: Array) -> None:
        np.multiply(g, g, out=change)
        np.add(v, change, out=v)
        _subtract_quotient(w, g, v, self.lr, self.epsilon, change, root)


@dataclass(frozen=True, slots=True)
class RMSprop(Elementwise):
    """v = α·v + (1-α)·(g·g); w -= lr·g/(√v + ε).

    Tieleman and Hinton 2012, "Neural networks for machine learning", lecture 6.5; ε as in practice outside of the root.
    """

    keeps: ClassVar[Mapping[str, str]] = {"v": "fp32"}
    lr: AtLeastZero = 1e-2
    alpha: DecayRate = 0.99
    epsilon: AtLeastZero = 1e-8

    def update_block(self, step: int, w: Array, v: Array, g: Array, change: Array, root: Array) -> None:
        move_square_average(self.alpha, v, g, change)
        _subtract_quotient(w, g, v, self.lr, self.epsilon, change, root)


@dataclass(frozen=True, slots=True)
class Lion(Elementwise):
    """c = β1·m + (1-β1)·g; w = (1 - lr·weight_decay)·w - lr·sign(c); m = β2·m + (1-β2)·g. The sign of 0 is 0.

    Chen et al. 2023 (arXiv:2302.06675), algorithm 2.
    """

    keeps: ClassVar[Mapping[str, str]] = {"m": "fp32"}
    lr: AtLeastZero = 1e-4
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.99
    weight_decay: AtLeastZero = 0.0

    def update_block(self, step: int, w: Array, m: Array, g: Array, change: Array, part: Array) -> None:
        np.multiply(m, self.beta1, out=change)
        np.multiply(g, 1.0 - self.beta1, out=part)
        np.add(change, part, out=change)
        np.sign(change, out=change)
        descend(self.lr, 1.0 - self.lr * self.weight_decay, w, change)
        move_average(self.beta2, m, g, part)


@dataclass(frozen=True, slots=True)
class Adan(Elementwise):
    """Adam of three averages: of gradients, of their differences, and of the squares of both together.

    d = g - before (0 in the first step); m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·d; u = g + β2·d;
    n = β3·n + (1-β3)·(u·u); w = (w - lr·(m̂ + β2·v̂)/(√n̂ + ε))/(1 + lr·weight_decay), x̂ = x/(1-β^t); before = g.
    Xie et al. 2022 (arXiv:2208.06677), algorithm 1, with β the share that is kept, as in the paper's code (the text's β
    is 1 - β here), and that code's corrections. The gradient before rests in bf16: fp32's range, 2 bytes.
    """

    keeps: ClassVar[Mapping[str, str]] = {"m": "fp32", "v": "fp32", "n": "fp32", "before": "bf16"}
    lr: AtLeastZero = 1e-3
    beta1: DecayRate = 0.98
    beta2: DecayRate = 0.92
    beta3: DecayRate = 0.99
    epsilon: AtLeastZero = 1e-8
    weight_decay: AtLeastZero = 0.0

    def update_block(self, step: int, w: Array, m: Array, v: Array, n: Array, before: Array,
                     g: Array, d: Array, part: Array) -> None:
        corrections = [1.0 - beta**step for beta in (self.beta1, self.beta2, self.beta3)]
        np.subtract(g, g if step == 1 else before, out=d)
        np.copyto(before, g)
        move_average(self.beta1, m, g, part)
        move_average(self.beta2, v, d, part)
        np.multiply(d, self.beta2, out=d)
        np.add(g, d, out=d)
        move_square_average(self.beta3, n, d, part)
        np.divide(v, corrections[1], out=d)
        np.multiply(d, self.beta2, out=d)
        np.divide(m, corrections[0], out=part)
        np.add(part, d, out=d)
        corrected_root(n, corrections[2], self.epsilon, part)
        np.multiply(d, self.lr, out=d)
        np.divide(d, part, out=d)
        np.subtract(w, d, out=w)
        if self.weight_decay:
            np.divide(w, 1.0 + self.lr * self.weight_decay, out=w)


def _subtract_quotient(w: Array, g: Array, v: Array, lr: float, epsilon: float, change: Array, root: Array) -> None:
    """w -= lr·g/(√v + ε)."""
    np.sqrt(v, out=root)
    np.add(root, epsilon, out=root)
    np.multiply(g, lr, out=change)
    np.divide(change, root, out=change)
    np.subtract(w, change, out=w)
