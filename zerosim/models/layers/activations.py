"""Activation functions, one operation per element.

Legend: n elements of any shape.
"""

import numpy as np

from zerosim.models.checks import require_at_rest, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT, out_or_new
from zerosim.numerics.bits import packed_nbytes


def relu_forward(ctx: Context, x: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y = max(x, 0), x and y of n elements; keeps a bit per element. NaN stays NaN; ``out`` may be x."""
    require_at_rest(ctx, "relu_forward", x=x)
    y = out_or_new(ctx, "relu_forward", out, x.shape, "relu.y")
    bits = ctx.empty(packed_nbytes(y.size), dtype=np.uint8, name="relu.bits")
    ctx.kernels.relu(x, y, bits)
    ctx.note(flops=x.size, nbytes=x.nbytes + y.nbytes + bits.nbytes)
    return y, bits


def relu_backward(ctx: Context, kept: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx = dy where x was positive or NaN, else 0: a choice, not a product, so no NaN is multiplied by 0.

    kept (⌈n/8⌉,) uint8, dy and dx of n elements. Raises ValueError for a dy of another length or dtype.
    """
    if kept.size != packed_nbytes(dy.size):
        raise ValueError(f"relu_backward asked for dy with one element per bit that was kept ({kept.size} "
                         f"bytes of them), and found shape {dy.shape}; {OWN_OUTPUT}")
    require_at_rest(ctx, "relu_backward", dy=dy)
    dx = ctx.empty(dy.shape, "activation_gradient", name="relu.dx")
    ctx.kernels.relu_gradient(kept, dy, dx)
    ctx.note(flops=dy.size, nbytes=kept.nbytes + dy.nbytes + dx.nbytes)
    return dx


def gelu_forward(ctx: Context, x: np.ndarray, out: np.ndarray | None = None, *,
                 exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715 x³))), the tanh form, in fp32, rounded once; keeps x.

    ``exact``: y = x·Φ(x), Φ the normal distribution function. x and y of n elements.
    Source: Hendrycks & Gimpel 2016 (arXiv:1606.08415), section 2, for both.
    """
    require_at_rest(ctx, "gelu_forward", x=x)
    y = out_or_new(ctx, "gelu_forward", out, x.shape, "gelu.y", kept=x)
    ctx.kernels.gelu(x, y, exact=exact)
    ctx.note(flops=8 * x.size, nbytes=x.nbytes + y.nbytes)
    return y, x


def gelu_backward(ctx: Context, kept: np.ndarray, dy: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """dx = dy · d gelu/dx at the kept x, in fp32, rounded once; n elements in and out, ``exact`` as it was forward."""
    require_shape("gelu_backward", "dy", dy, kept.shape, OWN_OUTPUT)
    require_at_rest(ctx, "gelu_backward", dy=dy)
    dx = ctx.empty(dy.shape, "activation_gradient", name="gelu.dx")
    ctx.kernels.gelu_gradient(kept, dy, dx, exact=exact)
    ctx.note(flops=14 * dy.size, nbytes=kept.nbytes + dy.nbytes + dx.nbytes)
    return dx
