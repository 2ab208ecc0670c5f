"""The two ends of a GPT: tokens to channels, and channels to logits.

Legend: B batch, T tokens, C channels, V vocabulary, M = B·T rows of a matrix.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerosim.models import layers
from zerosim.models.blocks import DEVIATION
from zerosim.models.context import Context, Gradients
from zerosim.models.gpt_config import GPTConfig
from zerosim.models.initializers import Initializer, Normal, Ones, Zeros
from zerosim.models.units import Unit, Weights


class Embed(Unit):
    """y = dropout(wte[tokens] + wpe): tokens (B, T) of any integer type -> y (B, T, C), each sum rounded once."""

    name = "embed"
    integer_inputs = True

    def __init__(self, config: GPTConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A row for each token of the vocabulary, and one for each place in the context."""
        return {"wte": (self.config.vocabulary, self.config.channels),
                "wpe": (self.config.context, self.config.channels)}

    def initializer(self, name: str) -> Initializer:
        """Normal values of GPT-2's deviation."""
        return Normal(self.seed, DEVIATION)

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """tokens (B, T) -> y (B, T, C); keeps the tokens.

        Raises ValueError for another number of dimensions, for more tokens than the context has places, and for a token
        outside the vocabulary.
        """
        if x.ndim != 2 or not 1 <= x.shape[1] <= self.config.context:
            raise ValueError(f"unit 'embed' asked for tokens (B, T), T from 1 to the context's {self.config.context}, "
                             f"and found shape {x.shape}; cut longer texts into several sequences")
        y, tokens = layers.embedding_forward(ctx, x, w["wte"])
        places = w["wpe"][:x.shape[1]]
        for sequence in range(x.shape[0]):
            ctx.kernels.add_rounded(y[sequence], places, y[sequence])
        ctx.note(flops=y.size, nbytes=3 * y.nbytes)
        y, _ = layers.dropout_forward(ctx, y, self.config.dropout, self.name)
        return y, tokens

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray) -> tuple[None, Gradients]:
        """dy (B, T, C) -> None, and the gradients of both tables; a place that no token took has zeros."""
        dy = layers.dropout_backward(ctx, self.name, dy, self.config.dropout)
        grads = ctx.gradients(self)
        layers.embedding_backward(ctx, kept, dy, grads["wte"])
        batch, tokens, channels = dy.shape
        places = grads["wpe"]
        ctx.kernels.column_sum(dy.reshape(batch, tokens * channels), places[:tokens].reshape(-1))
        places[tokens:].fill(0)
        ctx.note(flops=dy.size, nbytes=dy.nbytes + places.nbytes)
        return None, grads


class Head(Unit):
    """logits = layernorm(x) @ w: x (B, T, C) -> logits (B, T, V) in the policy's output format.

    w is ``lm_head.weight`` (C, V), or, where ``tied``, the transpose of the embedding's wte (V, C), which is borrowed.
    """

    name = "head"

    def __init__(self, config: GPTConfig, seed: int, *, tied: bool) -> None:
        self.config, self.seed, self.tied = config, seed, tied

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The last LayerNorm's parameters, and the projection's where it is not borrowed."""
        c, v = self.config.channels, self.config.vocabulary
        return {"ln_f.weight": (c,), "ln_f.bias": (c,)} | ({} if self.tied else {"lm_head.weight": (c, v)})

    @property
    def borrows(self) -> Mapping[str, str]:
        """The embedding's table, where tied."""
        return {"wte": "embed"} if self.tied else {}

    @property
    def factored(self) -> frozenset[str]:
        """The projection, unless it is the embedding too."""
        return frozenset() if self.tied else frozenset({"lm_head.weight"})

    def initializer(self, name: str) -> Initializer:
        """Ones and zeros for the LayerNorm, GPT-2's normal values for the projection."""
        if name == "ln_f.weight":
            return Ones()
        return Zeros() if name == "ln_f.bias" else Normal(self.seed, DEVIATION)

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """logits (B, T, V); keeps x and its statistics."""
        h, kept = layers.layernorm_forward(ctx, x.reshape(-1, x.shape[-1]), w["ln_f.weight"], w["ln_f.bias"],
                                           self.config.epsilon)
        logits = ctx.empty((*x.shape[:2], self.config.vocabulary), dtype=ctx.output_dtype, name="head.logits")
        ctx.matmul(h, w["wte"].T if self.tied else w["lm_head.weight"], logits.reshape(h.shape[0], -1))
        return logits, kept

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray) -> tuple[np.ndarray, Gradients]:
        """dlogits (B, T, V), of any format -> dx (B, T, C) and the gradients, that of a borrowed wte among them."""
        d = ctx.cast(dy.reshape(-1, dy.shape[-1]), "activation_gradient", "head.dlogits")
        grads = ctx.gradients(self)
        h = layers.layernorm_output(ctx, w["ln_f.weight"], w["ln_f.bias"], kept)
        dh = ctx.empty(h.shape, "activation_gradient", name="head.dh")
        if self.tied:
            ctx.matmul(d.T, h, grads["wte"], gradient="a")
            ctx.matmul(d, w["wte"], dh, gradient="a")
        else:
            ctx.observe("lm_head.weight", h, d)
            ctx.matmul(h.T, d, grads["lm_head.weight"], gradient="b")
            ctx.matmul(d, w["lm_head.weight"].T, dh, gradient="a")
        del h, d
        dx = layers.layernorm_backward(ctx, w["ln_f.weight"], kept, dh, grads["ln_f.weight"], grads["ln_f.bias"])
        return dx.reshape(*dy.shape[:2], -1), grads
