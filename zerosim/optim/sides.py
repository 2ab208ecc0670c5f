"""What optimizers with a factor for each side of a matrix share.

Legend: a matrix (I, O); left factors (I, I), right ones (O, O). Products accumulate in fp32; results are workspace of
the context.
"""

import numpy as np

from zerosim.numerics.step_kernels import move_average
from zerosim.optim.base import UpdateContext


def outer_products(ctx: UpdateContext, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G Gᵀ (I, I) and Gᵀ G (O, O)."""
    return _product(ctx, g, g.T), _product(ctx, g.T, g)


def between(ctx: UpdateContext, left: np.ndarray, x: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ x @ right (I, O), from the left."""
    return _product(ctx, _product(ctx, left, x), right)


def move_factor(ctx: UpdateContext, factor: np.ndarray, product: np.ndarray, kept: float) -> None:
    """factor = kept·factor + (1-kept)·product, in place; the product is left as it is."""

    def block(factor: np.ndarray, product: np.ndarray, part: np.ndarray) -> None:
        move_average(factor, product, kept, part)

    ctx.kernels.step_blocks(block, factor, product)


def subtract(ctx: UpdateContext, w: np.ndarray, direction: np.ndarray, rate: float) -> None:
    """w -= rate·direction, in place."""

    def block(w: np.ndarray, direction: np.ndarray, part: np.ndarray) -> None:
        np.multiply(direction, rate, out=part)
        np.subtract(w, part, out=w)

    ctx.kernels.step_blocks(block, w, direction)


def _product(ctx: UpdateContext, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = ctx.empty((a.shape[0], b.shape[1]))
    ctx.matmul(a, b, out)
    return out
