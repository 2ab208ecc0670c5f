"""One block of an elementwise optimizer step, in place: SGD, Adam, AdamW.

Scalars are Python floats, that is double, up to the moment when they meet an array; 1 - β and 1 - β^t are
therefore correct to the last bit of a float32, which 1 - float32(β) is not (float32's 1 - 0.999 is
0.00099998713). Arrays are (n,), float32, with n at most BLOCK.
"""

from __future__ import annotations

import numpy as np

from zerosim.numerics.blocks import Array, Scratch


def sgd_block(w: Array, g: Array, scratch: Scratch, *, lr: float) -> None:
    """w -= lr·g."""
    update = scratch.array("update", w.size, w.dtype)
    np.multiply(g, lr, out=update)
    np.subtract(w, update, out=w)


def adam_block(
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    scratch: Scratch,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    correction1: float,
    correction2: float,
    decay: float,
) -> None:
    """m = β1·m + (1-β1)·g; v = β2·v + (1-β2)·(g·g); w = decay·w - lr·(m/correction1) / (√(v/correction2) + ε).

    The order of the operations is the order in which the line is read; every one of them rounds.
    """
    update = scratch.array("update", w.size, w.dtype)
    root = scratch.array("root", w.size, w.dtype)
    np.multiply(m, beta1, out=m)
    np.multiply(g, 1.0 - beta1, out=update)
    np.add(m, update, out=m)
    np.multiply(v, beta2, out=v)
    np.multiply(g, g, out=update)
    np.multiply(update, 1.0 - beta2, out=update)
    np.add(v, update, out=v)
    np.divide(v, correction2, out=root)
    np.sqrt(root, out=root)
    np.add(root, epsilon, out=root)
    np.divide(m, correction1, out=update)
    np.multiply(update, lr, out=update)
    np.divide(update, root, out=update)
    if decay != 1.0:
        np.multiply(w, decay, out=w)
    np.subtract(w, update, out=w)
