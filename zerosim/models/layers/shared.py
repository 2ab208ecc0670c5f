"""What the layers share: a place for the result, and the words for a gradient that is not theirs."""

import numpy as np

from zerosim.models.checks import require_at_rest, require_shape
from zerosim.models.context import Context

OWN_OUTPUT = "hand it the gradient of this layer's own output"


def out_or_new(ctx: Context, where: str, out: np.ndarray | None, shape: tuple[int, ...], name: str,
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
