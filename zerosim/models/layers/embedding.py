"""The embedding: a row of a table for each token.

Legend: B batch, T tokens of a sample, V vocabulary, C channels.
"""

import numpy as np

from zerosim.models.checks import require_at_rest, require_matrix, require_shape
from zerosim.models.context import Context
from zerosim.models.layers.shared import OWN_OUTPUT


def embedding_forward(ctx: Context, tokens: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y[..., :] = w[tokens]: tokens (B, T) of integers, w (V, C) -> y (B, T, C); keeps the tokens.

    Raises ValueError for tokens that are no integers, or that the table has not.
    """
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"embedding_forward asked for tokens as integers, and found {tokens.dtype}; a token is the "
                         "index of a row")
    require_matrix("embedding_forward", "w", w, "(V, C)")
    require_at_rest(ctx, "embedding_forward", w=w)
    smallest, largest = ctx.kernels.index_range(tokens)
    if smallest < 0 or largest >= w.shape[0]:
        raise ValueError(f"embedding_forward asked for tokens from 0 to {w.shape[0] - 1}, and found {smallest} to "
                         f"{largest}; take a vocabulary that has them all")
    y = ctx.empty((*tokens.shape, w.shape[1]), name="embedding.y")
    ctx.kernels.take_rows(w, tokens.reshape(-1), y.reshape(-1, w.shape[1]))
    ctx.note(nbytes=2 * y.nbytes)
    return y, tokens


def embedding_backward(ctx: Context, kept: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """Writes dw (V, C): for each row the sum of dy (B, T, C) over its tokens, in the order of the batch, in fp32,
    rounded once; 0 for rows that no token named."""
    require_matrix("embedding_backward", "dw", dw, "(V, C)")
    require_shape("embedding_backward", "dy", dy, (*kept.shape, dw.shape[1]), OWN_OUTPUT)
    require_at_rest(ctx, "embedding_backward", dy=dy)
    ctx.kernels.add_rows(dy.reshape(-1, dw.shape[1]), kept.reshape(-1), dw)
    ctx.note(flops=dy.size, nbytes=dy.nbytes + dw.nbytes)
