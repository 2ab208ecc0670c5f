"""An optimizer stepped by hand, without ranks and without an engine."""

from typing import Any

import numpy as np

from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import FP32, require_shape
from zerosim.numerics.formats import format_of
from zerosim.numerics.kernels import NumpyKernels
from zerosim.optim.base import Optimizer, UpdateContext, round_back, upcast
from zerosim.optim.promises import checked_slots
from zerosim.optim.tensor_norms import with_norms


class Stepper:
    """An optimizer, its state and the steps taken, and one tensor that it updates in place.

    ``weights`` are float32, of any shape, and contiguous; ``state`` has the optimizer's slots by name, each in its own
    format. Raises ValueError for other weights and gradients, and for an optimizer that needs factors of a layer.

    >>> import zerosim as zs
    >>> w = np.float32([1.0, -2.0])
    >>> adam = Stepper(zs.optim.Adam(lr=0.5), w)
    >>> adam.step(np.float32([0.25, -8.0]))
    >>> w.tolist(), adam.steps_taken, sorted(adam.state)
    ([0.5, -1.5], 1, ['m', 'v'])
    """

    def __init__(self, optimizer: Optimizer, weights: Array) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"a Stepper takes an optimizer with its settings, found {optimizer!r}; write "
                             "zs.optim.Adam(lr=...)")
        given: Any = weights
        if not isinstance(given, np.ndarray) or given.dtype != FP32 or not given.flags.c_contiguous:
            raise ValueError("a Stepper updates contiguous weights of float32 in place, found "
                             f"{getattr(given, 'dtype', type(given).__name__)}; pass "
                             "np.ascontiguousarray(weights, np.float32)")
        if "input_factors" in optimizer.needs:
            raise ValueError(f"{type(optimizer).__name__} needs the factors of a layer's inputs and output gradients, "
                             "which a tensor by itself does not have; train it by an Engine")
        self.optimizer, self.weights, self.steps_taken = optimizer, weights, 0
        self.kernels = NumpyKernels()
        self.state = {name: np.zeros(slot.shape, format_of(slot.format).dtype)
                      for name, slot in checked_slots(optimizer, weights.shape).items()}

    def step(self, gradient: Array) -> None:
        """One step on a gradient of the weights' shape, rounded to fp32."""
        gradient = np.asarray(gradient)
        require_shape("a Stepper", "a gradient", gradient, self.weights.shape, "it has an element for each weight")
        w, g, at_rest = self.weights, np.array(gradient, np.float32), self.state
        if self.optimizer.cut_of(w.shape) == "anywhere":  # such optimizers take flat arrays
            w, g, at_rest = w.reshape(-1), g.reshape(-1), {name: slot.reshape(-1) for name, slot in at_rest.items()}
        self.steps_taken += 1
        state = upcast(self.kernels, lambda _, shape: self.kernels.empty(shape, np.float32), at_rest)
        ctx = with_norms(self.optimizer, UpdateContext(self.kernels), w, g, state, self.steps_taken)
        self.optimizer.update(ctx, w, g, state, self.steps_taken)
        round_back(self.kernels, state, at_rest)
