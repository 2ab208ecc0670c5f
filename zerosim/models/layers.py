"""Layers as pairs of functions: a forward that says what it kept, and a backward that needs no more.

Legend: B batch, I inputs, O outputs, n elements of any shape.

Every value at rest is in the compute dtype (2 bytes for a 16-bit format). What happens to it in between is
what hardware does: a matmul widens its inputs, adds up in fp32, adds the bias in fp32 and rounds once on the
way out; an elementwise function computes in fp32 and rounds once. No layer has hidden state, and nothing kept
is a weight.
"""

import math

import numpy as np

from zerosim.models.bits import pack_nonzero, packed_nbytes, select
from zerosim.models.checks import require_at_rest, require_matrix, require_shape
from zerosim.models.context import Context

# GELU's tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2).
GELU_SLOPE = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
# Beyond this the tanh is exactly -1 or 1, in float64 too; clamping there avoids an overflow of x³, and 0·inf.
GELU_SATURATED = 10.0

OWN_OUTPUT = "hand it the gradient of this layer's own output"


def linear_forward(ctx: Context, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None,
                   out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y = x @ w + b, rounded once: x (B, I), w (I, O), b (O,) -> y (B, O); keeps x.

    Raises ValueError for shapes that do not fit and for arrays that are not in the compute dtype.
    """
    where = "linear_forward"
    require_matrix(where, "x", x, "(B, I)")
    require_matrix(where, "w", w, "(I, O)")
    require_shape(where, "w", w, (x.shape[1], w.shape[1]), "w needs a row for each column of x")
    if b is not None:
        require_shape(where, "b", b, (w.shape[1],), "a bias has one element per column of w")
    require_at_rest(ctx, where, x=x, w=w, b=b)
    y = _out_or_new(ctx, where, out, (x.shape[0], w.shape[1]), "linear.y", kept=x)
    _matmul(ctx, x, w, y, bias=b)
    return y, x


def linear_backward(ctx: Context, w: np.ndarray, kept: np.ndarray, dy: np.ndarray, dw: np.ndarray,
                    db: np.ndarray | None = None, *, input_gradient: bool = True) -> np.ndarray | None:
    """dw = xᵀ @ dy, db = Σ_B dy, dx = dy @ wᵀ, each added up in fp32 and rounded once.

    w (I, O), kept = x (B, I), dy (B, O). Writes dw (I, O) and db (O,); returns dx (B, I), or None where
    nobody asks for it. Raises ValueError for shapes that do not fit and for a dy that is not in the compute
    dtype.
    """
    where, x = "linear_backward", kept
    require_shape(where, "dy", dy, (x.shape[0], w.shape[1]), OWN_OUTPUT)
    require_shape(where, "dw", dw, w.shape, "the gradient has the shape of the weight")
    require_at_rest(ctx, where, w=w, dy=dy)
    _matmul(ctx, x.T, dy, dw)
    if db is not None:
        require_shape(where, "db", db, (w.shape[1],), "the gradient has the shape of the bias")
        ctx.kernels.column_sum(dy, db)
        ctx.note(flops=dy.size, nbytes=dy.nbytes + db.nbytes)
    if not input_gradient:
        return None
    dx = ctx.empty(x.shape, "activation_gradient", name="linear.dx")
    _matmul(ctx, dy, w.T, dx)
    return dx


def relu_forward(ctx: Context, x: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y = max(x, 0), x and y of n elements; keeps a bit per element. NaN stays NaN; ``out`` may be x."""
    require_at_rest(ctx, "relu_forward", x=x)
    y = _out_or_new(ctx, "relu_forward", out, x.shape, "relu.y")
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
    y = _out_or_new(ctx, "gelu_forward", out, x.shape, "gelu.y", kept=x)
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


def _out_or_new(ctx: Context, where: str, out: np.ndarray | None, shape: tuple[int, ...], name: str,
                kept: np.ndarray | None = None) -> np.ndarray:
    """A new activation, or the caller's ``out`` where that fits and does not overwrite what is kept."""
    if out is None:
        return ctx.empty(shape, name=name)
    require_shape(where, "out", out, shape, "give it the shape of the result, or leave it out")
    require_at_rest(ctx, where, out=out)
    if kept is not None and ctx.xp.may_share_memory(out, kept):
        raise ValueError(f"{where} asked for an out of its own, and found one that shares memory with x, which it "
                         "keeps for backward; give it other memory, or leave it out")
    return out


def _matmul(ctx: Context, a: np.ndarray, b: np.ndarray, out: np.ndarray,
            bias: np.ndarray | None = None) -> None:
    """One matmul and what it cost: a multiplication and an addition for each of m·k·n products."""
    ctx.kernels.matmul(a, b, bias=bias, out=out)
    biased = 0 if bias is None else 1
    ctx.note(flops=2 * a.shape[0] * a.shape[1] * b.shape[1] + biased * out.size,
             nbytes=a.nbytes + b.nbytes + out.nbytes + (bias.nbytes if bias is not None else 0))


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
