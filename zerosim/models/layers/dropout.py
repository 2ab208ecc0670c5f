"""Dropout with random numbers that can be drawn again: no mask is kept.

Legend: n elements of any shape.
Source: Srivastava et al. 2014, "Dropout", section 10 (the scaling by 1/(1 - rate) in training).
"""

from functools import partial

import numpy as np

from zerosim.models.checks import require_at_rest
from zerosim.models.context import Context
from zerosim.numerics.checks import is_number


def dropout_forward(ctx: Context, x: np.ndarray, rate: float, name: str) -> tuple[np.ndarray, str]:
    """y = x/(1 - rate) where the word drawn for the element is at least rate·2³², else 0; rate 0 returns x itself.

    ``name`` says which random numbers these are: one for each place of the model. Keeps the name. Raises ValueError
    for a rate outside [0, 1).
    """
    require_rate("dropout_forward", rate)
    require_at_rest(ctx, "dropout_forward", x=x)
    return (x if rate == 0 else _dropped(ctx, x, rate, name, "activation")), name


def dropout_backward(ctx: Context, kept: str, dy: np.ndarray, rate: float) -> np.ndarray:
    """dx = dy/(1 - rate) where the element was let through, else 0: the same words are drawn again."""
    require_at_rest(ctx, "dropout_backward", dy=dy)
    return dy if rate == 0 else _dropped(ctx, dy, rate, kept, "activation_gradient")


def require_rate(where: str, rate: float) -> None:
    """Raises ValueError for a rate outside [0, 1)."""
    if not is_number(rate) or not 0 <= rate < 1:
        raise ValueError(f"{where} was given rate={rate!r}; the share of elements that are dropped lies in [0, 1)")


def _dropped(ctx: Context, x: np.ndarray, rate: float, name: str, kind: str) -> np.ndarray:
    y = ctx.empty(x.shape, kind, name=f"{name}.dropped")
    ctx.kernels.drop(x, partial(ctx.draw, name, x.size), round(rate * 2**32), 1 / (1 - rate), y)
    ctx.note(flops=x.size, nbytes=x.nbytes + y.nbytes)
    return y
