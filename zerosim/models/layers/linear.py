"""The linear layer.

Legend: B rows (samples, or samples times tokens), I inputs, O outputs.
"""

from typing import Literal, overload

import numpy as np

from zerosim.models.checks import require_at_rest, require_matrix, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT, out_or_new


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
    y = out_or_new(ctx, where, out, (x.shape[0], w.shape[1]), "linear.y", kept=x)
    ctx.matmul(x, w, y, bias=b)
    return y, x


@overload
def linear_backward(ctx: Context, w: np.ndarray, kept: np.ndarray, dy: np.ndarray, dw: np.ndarray,
                    db: np.ndarray | None = None, *, input_gradient: Literal[True] = True) -> np.ndarray: ...


@overload
def linear_backward(ctx: Context, w: np.ndarray, kept: np.ndarray, dy: np.ndarray, dw: np.ndarray,
                    db: np.ndarray | None = None, *, input_gradient: bool) -> np.ndarray | None: ...


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
    wide = ctx.kernels.widen(dy)
    ctx.matmul(x.T, wide, dw, gradient="b")
    if db is not None:
        require_shape(where, "db", db, (w.shape[1],), "the gradient has the shape of the bias")
        ctx.kernels.column_sum(wide, db)
        ctx.note(flops=dy.size, nbytes=dy.nbytes + db.nbytes)
    if not input_gradient:
        return None
    dx = ctx.empty(x.shape, "activation_gradient", name="linear.dx")
    ctx.matmul(wide, w.T, dx, gradient="a")
    return dx
