"""The loop of every optimizer's step: blocks of the arrays and scratch of the same length, in place; SGD and Adam.

Scalars are Python floats, that is double, up to the moment when they meet an array; 1 - β and 1 - β^t are therefore
correct to the last bit of a float32, which 1 - float32(β) is not (float32's 1 - 0.999 is 0.00099998713). Arrays are
float32; what is done to an element depends neither on the block it lies in nor on the block's length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zerosim.numerics.blocks import Array, Scratch, spans
from zerosim.numerics.checks import FP32, check_shapes, check_state

_quiet = np.errstate(all="ignore")


class StepKernels:
    """The part of the kernels that takes optimizers' steps."""

    _scratch: Scratch

    @_quiet
    def step_blocks(self, function: Callable[..., object], *arrays: Array, scratch: int = 1) -> None:
        """Calls ``function(*blocks, *scratch)`` for each block of the arrays, which it may write to.

        All in float32, of one shape and without gaps; the function sees rows (b,), and scratch that holds whatever was
        in it. Raises ValueError for other arrays.
        """
        check_shapes("step_blocks", **{f"array {i}": x for i, x in enumerate(arrays)})
        for i, x in enumerate(arrays):
            if x.dtype != FP32 or not x.flags.c_contiguous:
                gaps = "" if x.flags.c_contiguous else ", with gaps or in another order"
                raise ValueError(f"step_blocks needs arrays of float32 in C order, got array {i} {x.shape} of type "
                                 f"{x.dtype.name}{gaps}")
        self._step([x.reshape(-1) for x in arrays], function, scratch)

    def _step(self, rows: list[Array], function: Callable[..., object], scratch: int) -> None:
        names = [f"step {i}" for i in range(scratch)]
        for span in spans(rows[0].size):
            blocks = [row[span] for row in rows]
            function(*blocks, *[self._scratch.array(name, blocks[0].size, FP32) for name in names])

    @_quiet
    def sgd_step(self, w: Array, g: Array, *, lr: float) -> None:
        """w -= lr·g, in place; w, g (n,) in float32."""
        check_state("sgd_step", w=w, g=g)

        def block(w: Array, g: Array, update: Array) -> None:
            np.multiply(g, lr, out=update)
            np.subtract(w, update, out=w)

        self._step([w, g], block, 1)

    @_quiet
    def adam_step(self, w: Array, m: Array, v: Array, g: Array, *, lr: float, beta1: float, beta2: float,
                  epsilon: float, step: int, weight_decay: float = 0.0) -> None:  # fmt: skip
        """One step of Adam (Kingma and Ba 2015, algorithm 1), or of AdamW (Loshchilov and Hutter 2019, algorithm 2)
        where there is weight decay; w, m, v in place; w, m, v, g (n,) in float32; `step` counts from 1."""
        check_state("adam_step", w=w, m=m, v=v, g=g)
        if step < 1:
            raise ValueError(f"adam_step counts steps from 1, got step {step}")
        correction1, correction2, decay = 1.0 - beta1**step, 1.0 - beta2**step, 1.0 - lr * weight_decay

        def block(w: Array, m: Array, v: Array, g: Array, update: Array, root: Array) -> None:
            move_average(m, g, beta1, update)
            move_square_average(v, g, beta2, update)
            np.divide(v, correction2, out=root)
            np.sqrt(root, out=root)
            np.add(root, epsilon, out=root)
            np.divide(m, correction1, out=update)
            np.multiply(update, lr, out=update)
            np.divide(update, root, out=update)
            if decay != 1.0:
                np.multiply(w, decay, out=w)
            np.subtract(w, update, out=w)

        self._step([w, m, v, g], block, 2)


def move_average(average: Array, x: Array, beta: float, scratch: Array) -> None:
    """average = β·average + (1-β)·x; x is left as it is, unless it is the scratch. Every operation rounds, in the order
    in which the line is read."""
    np.multiply(average, beta, out=average)
    np.multiply(x, 1.0 - beta, out=scratch)
    np.add(average, scratch, out=average)


def move_square_average(average: Array, x: Array, beta: float, scratch: Array) -> None:
    """average = β·average + (1-β)·(x·x); x is left as it is, unless it is the scratch."""
    np.multiply(average, beta, out=average)
    np.multiply(x, x, out=scratch)
    np.multiply(scratch, 1.0 - beta, out=scratch)
    np.add(average, scratch, out=average)
