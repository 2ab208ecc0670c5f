"""Activation functions, one operation per element.

Legend: n elements of any shape.
"""

import math

import numpy as np

from zerosim.models.bits import pack_nonzero, packed_nbytes, select
from zerosim.models.checks import require_at_rest, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT, out_or_new

# GELU's tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2).
GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
# Beyond this the tanh is exactly -1 or 1, in float64 too; clamping there avoids an overflow of x³, and 0·inf.
GELU_SATURATED = 10.0


def relu_forward(ctx: Context, x: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y = max(x, 0), x and y of n elements; keeps a bit per element. NaN stays NaN; ``out`` may be x."""
    require_at_rest(ctx, "relu_forward", x=x)
    y = out_or_new(ctx, "relu_forward", out, x.shape, "relu.y")
    ctx.kernels.elementwise(_relu, x.reshape(-1), out=y.reshape(-1))
    bits = ctx.empty(packed_nbytes(y.size), dtype=np.uint8, name="relu.bits")
    pack_nonzero(ctx.xp, y, bits)
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
    select(ctx.xp, kept, dy, dx)
    ctx.note(flops=dy.size, nbytes=kept.nbytes + dy.nbytes + dx.nbytes)
    return dx


def gelu_forward(ctx: Context, x: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y = x/2 · (1 + tanh(√(2/π)·(x + 0.044715 x³))), the tanh form; n elements in and out; keeps x."""
    require_at_rest(ctx, "gelu_forward", x=x)
    y = out_or_new(ctx, "gelu_forward", out, x.shape, "gelu.y", kept=x)
    ctx.kernels.elementwise(_gelu, x.reshape(-1), out=y.reshape(-1))
    ctx.note(flops=8 * x.size, nbytes=x.nbytes + y.nbytes)
    return y, x


def gelu_backward(ctx: Context, kept: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """dx = dy · d gelu/dx at the kept x, in fp32, rounded once; n elements in and out."""
    require_shape("gelu_backward", "dy", dy, kept.shape, OWN_OUTPUT)
    require_at_rest(ctx, "gelu_backward", dy=dy)
    dx = ctx.empty(dy.shape, "activation_gradient", name="gelu.dx")
    ctx.kernels.elementwise(_gelu_gradient, kept.reshape(-1), dy.reshape(-1), out=dx.reshape(-1))
    ctx.note(flops=14 * dy.size, nbytes=kept.nbytes + dy.nbytes + dx.nbytes)
    return dx


def _relu(x: np.ndarray, y: np.ndarray) -> None:
    np.maximum(x, 0, out=y)
    # Which of -0 and +0 is the maximum, the processor decides (x86: the second operand). Adding +0 makes it +0 on
    # all of them, so that "not the pattern of +0" means "let through".
    np.add(y, 0, out=y)


def _gelu(x: np.ndarray, y: np.ndarray) -> None:
    # x is clamped from below only: there the factor is exactly 0, and -inf·0 would be NaN.
    factor = _gelu_tanh(np.clip(x, -GELU_SATURATED, GELU_SATURATED))
    factor += 1
    factor *= 0.5
    np.maximum(x, -GELU_SATURATED, out=y)
    y *= factor


def _gelu_gradient(x: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> None:
    clamped = np.clip(x, -GELU_SATURATED, GELU_SATURATED)
    tanh = _gelu_tanh(clamped)
    inner = GELU_SLOPE * (1 + 3 * GELU_CUBIC * clamped * clamped)
    np.multiply(dy, 0.5 * (1 + tanh) + 0.5 * clamped * (1 - tanh * tanh) * inner, out=dx)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = x * x
    inner *= GELU_CUBIC
    inner += 1
    inner *= x
    inner *= GELU_SLOPE
    result: np.ndarray = np.tanh(inner, out=inner)
    return result
