"""Causal multi-head attention, with the probabilities kept, computed again, or never whole.

Legend: B batch, T tokens, C channels, H heads, D = C/H. Sources: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2;
Korthikanti et al. 2022 (arXiv:2205.05198), section 5, for leaving out P alone; Dao et al. 2022 (arXiv:2205.14135).
"""

from dataclasses import dataclass

import numpy as np

from zerosim.models.checks import require_at_rest, require_positive, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT

KEEP = ("probabilities", "nothing", "tiled")

# Operations per score, beside the products of matrices.
SOFTMAX = 5  # ·1/√D, - maximum, exp, the sum, the division
FROM_LOG_SUM = 3  # ·1/√D, - log-sum-exp, exp
SOFTMAX_GRADIENT = 5  # P·dP, its sum; dP - that, ·P, ·1/√D
ROW_SUM = 2  # the first two of them


@dataclass(frozen=True, slots=True)
class KeptAttention:
    """qkv (B, T, 3C), and: P (B, H, T, T), or nothing, or fp32 log-sum-exps (B, H, T) and the output (B, T, C)."""

    heads: int
    qkv: np.ndarray
    p: np.ndarray | None = None
    log_sums: np.ndarray | None = None
    o: np.ndarray | None = None


def attention_forward(ctx: Context, qkv: np.ndarray, heads: int,
                      keep: str = "probabilities") -> tuple[np.ndarray, KeptAttention]:
    """o (B, T, C) = softmax(QKᵀ/√D, over the past) V from qkv (B, T, 3C); ``keep`` says what backward gets.

    "probabilities" and "nothing" give the same bits; "tiled" rounds P before it is divided by its sum, and adds in
    another order: o and the gradients differ by at most four roundings to the compute dtype, and T to fp32, of the sum
    of the magnitudes of what they are sums of. Raises ValueError for shapes, heads and keeps that cannot be.
    """
    where = "attention_forward"
    if keep not in KEEP:
        raise ValueError(f"{where} was given keep={keep!r}; choose one of {', '.join(KEEP)}")
    require_positive(where, heads=heads)
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"{where} asked for qkv (B, T, 3C) with C a multiple of {heads} heads, and found shape "
                         f"{qkv.shape}; queries, keys and values lie side by side")
    require_at_rest(ctx, where, qkv=qkv)
    batch, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    o = ctx.empty((batch, tokens, channels), name="attention.o")
    _note(ctx, qkv, heads, products=2, per_score=SOFTMAX)
    if keep == "tiled":
        log_sums = ctx.empty((batch, heads, tokens), dtype=ctx.wide_dtype, name="attention.log_sums")
        ctx.kernels.attend_tiled(qkv, heads, log_sums, o)
        return o, KeptAttention(heads, qkv, log_sums=log_sums, o=o)
    p = ctx.empty((batch, heads, tokens, tokens), name="attention.p") if keep == "probabilities" else None
    ctx.kernels.attend(qkv, heads, p, o)
    return o, KeptAttention(heads, qkv, p)


def attention_backward(ctx: Context, kept: KeptAttention, dy: np.ndarray) -> np.ndarray:
    """do (B, T, C) -> dqkv (B, T, 3C).

    dV = Pᵀ dO; dS = P·(dP - Σ P·dP) with dP = dO Vᵀ; dQ = dS K/√D; dK = dSᵀ Q/√D.
    """
    qkv = kept.qkv
    require_shape("attention_backward", "dy", dy, (*qkv.shape[:2], qkv.shape[2] // 3), OWN_OUTPUT)
    require_at_rest(ctx, "attention_backward", dy=dy)
    dqkv = ctx.empty(qkv.shape, "activation_gradient", name="attention.dqkv")
    if kept.log_sums is not None and kept.o is not None:
        ctx.kernels.attend_tiled_gradient(qkv, kept.heads, kept.log_sums, kept.o, dy, dqkv)
        _note(ctx, qkv, kept.heads, products=5, per_score=FROM_LOG_SUM + SOFTMAX_GRADIENT - ROW_SUM)
        ctx.note(flops=ROW_SUM * dy.size)  # of dO·O, which stands for that of P·dP
        return dqkv
    p, again = kept.p, kept.p is None
    if p is None:
        p = ctx.empty((len(qkv), kept.heads, qkv.shape[1], qkv.shape[1]), name="attention.p")
    ctx.kernels.attend_gradient(qkv, kept.heads, p, dy, dqkv, again=again)
    _note(ctx, qkv, kept.heads, products=4 + again, per_score=SOFTMAX_GRADIENT + again * SOFTMAX)
    return dqkv


def _note(ctx: Context, qkv: np.ndarray, heads: int, products: int, per_score: int) -> None:
    """Products of matrices, 2·B·T²·C operations each, and what each of B·H·T² scores costs beside them: all of them,
    as published formulas count them, those of the future too."""
    batch, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    flops = batch * tokens * tokens * (products * 2 * channels + heads * per_score)
    ctx.note(flops=flops, nbytes=2 * qkv.nbytes)
