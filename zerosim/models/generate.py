"""Writing with a model: the logits of a sequence, and sequences that are continued token by token.

Legend: B batch, t tokens so far, T tokens of the longest sequence, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from zerosim.models.checks import require_integer, require_positive
from zerosim.models.context import Context
from zerosim.models.gpt import GPT
from zerosim.models.units import Unit, Weights
from zerosim.numerics import random
from zerosim.numerics.checks import is_number

Logits = Callable[[np.ndarray], np.ndarray]


def logits_of(ctx: Context, model: GPT, weights: Callable[[Unit], AbstractContextManager[Weights]],
              tokens: np.ndarray) -> np.ndarray:
    """Forward without dropout, and nothing kept: tokens (B, t) -> logits (B, t, V) in the policy's output format.

    ``weights(unit)`` lends a unit's weights for a ``with`` block, as an engine does: gathering, so that where they rest
    sharded every rank takes part. Raises what the units raise.
    """
    x = tokens
    for unit, lent in zip(model.without_dropout().units, model.units, strict=True):
        with weights(lent) as w:
            x = unit.forward(ctx, w, x)[0]
    return x


def generate(logits: Logits, tokens: Any, count: int, *, context: int, temperature: float = 1.0,
             seed: int = 0) -> np.ndarray:
    """``tokens`` (t,) and ``count`` more, int64 (t + count,), each drawn from the softmax of its logits/temperature.

    ``logits`` takes the last tokens (1, t), at most ``context`` of them, and returns (1, t, V). At temperature 0 the
    likeliest token is taken. Token i after the first t is a function of the seed, i and the logits alone: of two models
    with equal bits both write the same.

    >>> def counting(tokens):  # always sure that the next token is one more, modulo 5
    ...     return np.where(np.arange(5) == (tokens[..., None] + 1) % 5, 100.0, 0.0)
    >>> generate(counting, [2], 6, context=4).tolist()
    [2, 3, 4, 0, 1, 2, 3]

    Raises ValueError for no tokens to continue, a negative temperature, and logits that are NaN or infinite.
    """
    written = [int(token) for token in tokens]
    require_integer("generate", seed=seed, count=count)
    require_positive("generate", context=context)
    if not written:
        raise ValueError("generate was asked to continue no tokens; give it one or more, as a prompt")
    if not is_number(temperature) or temperature < 0:
        raise ValueError(f"generate was given temperature={temperature!r}; it is 0 for the likeliest token, 1 for the "
                         "model's own probabilities, or any other number that is not negative")
    for u in random.uniform((seed, "generate", 0, "token"), 0, max(count, 0)):
        last = logits(np.array([written[-context:]]))[0, -1].astype(np.float64)
        if not np.isfinite(last).all():
            raise ValueError(f"generate was asked for token {len(written)}, and found logits that are NaN or infinite; "
                             "the model has diverged, so look at its loss")
        written.append(_choose(last, temperature, float(u)))
    return np.array(written, np.int64)


def _choose(logits: np.ndarray, temperature: float, u: float) -> int:
    """The token (V,) into whose share of [0, 1) u falls; ties at temperature 0 go to the first."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(all="ignore"):  # what is beyond all measure less likely has the probability 0
        shares = np.cumsum(np.exp((logits - logits.max()) / temperature))
    return min(int(np.searchsorted(shares, u * shares[-1], side="right")), len(logits) - 1)
