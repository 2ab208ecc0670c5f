"""LayerNorm: its output is not kept, because it can be had again from its input and two numbers per row.

Legend: M rows (samples times tokens), C channels. Statistics are fp32.
Source: Ba, Kiros & Hinton 2016 (arXiv:1607.06450), section 3.
"""

import numpy as np

from zerosim.models.checks import require_at_rest, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT, out_or_new
from zerosim.numerics.checks import is_number

EPSILON = 1e-5
Kept = tuple[np.ndarray, np.ndarray, np.ndarray]


def layernorm_forward(ctx: Context, x: np.ndarray, w: np.ndarray, b: np.ndarray, epsilon: float = EPSILON,
                      out: np.ndarray | None = None) -> tuple[np.ndarray, Kept]:
    """y = (x - mean)/√(variance + ε)·w + b over the last axis: x, y (..., C), w and b (C,) of any format.

    Keeps x and, in fp32, mean and 1/√(variance + ε) (M,) each. Raises ValueError for shapes that do not fit.
    """
    where = "layernorm_forward"
    if not is_number(epsilon) or epsilon < 0:
        raise ValueError(f"{where} was given epsilon={epsilon!r}; it is added to a variance, so take 0 or a small "
                         "positive number")
    require_shape(where, "w", w, x.shape[-1:], "w has one element per channel of x")
    require_shape(where, "b", b, x.shape[-1:], "b has one element per channel of x")
    require_at_rest(ctx, where, x=x)
    y = out_or_new(ctx, where, out, x.shape, "layernorm.y", kept=x)
    rows, results = _rows(x), _rows(y)
    if out is not None and not ctx.xp.may_share_memory(results, out):
        raise ValueError(f"{where} asked for an out whose rows can be numbered, and found strides {out.strides}; give "
                         "it contiguous memory, or leave it out")
    mean, rstd = (ctx.empty(rows.shape[0], dtype=ctx.wide_dtype, name=f"layernorm.{name}") for name in ("mean", "rstd"))
    ctx.kernels.normalize_rows(rows, w, b, epsilon, mean, rstd, results)
    ctx.note(flops=8 * x.size, nbytes=x.nbytes + y.nbytes + mean.nbytes + rstd.nbytes)
    return y, (x, mean, rstd)


def layernorm_output(ctx: Context, w: np.ndarray, b: np.ndarray, kept: Kept) -> np.ndarray:
    """The output again, from what was kept: the same bits."""
    x, mean, rstd = kept
    y = ctx.empty(x.shape, "activation", name="layernorm.y")
    ctx.kernels.scale_rows(_rows(x), w, b, mean, rstd, _rows(y))
    ctx.note(flops=4 * x.size, nbytes=x.nbytes + y.nbytes)
    return y


def layernorm_backward(ctx: Context, w: np.ndarray, kept: Kept, dy: np.ndarray, dw: np.ndarray,
                       db: np.ndarray) -> np.ndarray:
    """dx (..., C) in fp32, rounded once; writes dw = Σ_M dy·x̂ and db = Σ_M dy, each added up in fp32, rounded once."""
    x, mean, rstd = kept
    require_shape("layernorm_backward", "dy", dy, x.shape, OWN_OUTPUT)
    require_at_rest(ctx, "layernorm_backward", dy=dy)
    dx = ctx.empty(x.shape, "activation_gradient", name="layernorm.dx")
    ctx.kernels.normalize_rows_gradient(_rows(x), w, mean, rstd, _rows(dy), _rows(dx), dw, db)
    ctx.note(flops=14 * x.size, nbytes=x.nbytes + dy.nbytes + dx.nbytes)
    return dx


def _rows(x: np.ndarray) -> np.ndarray:
    """(..., C) as (M, C)."""
    return x.reshape(-1, x.shape[-1])
