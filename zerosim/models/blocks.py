"""Transformer blocks: two residual parts each, attention and a feed-forward network, in units of any number of parts.

Legend: B batch, T tokens, C channels, H heads, F = 4C, M = B·T rows of a matrix. Pre-norm, as in GPT-2 (Radford et al.
2019, section 2.3). A part is x + dropout(closing(middle(opening(layernorm(x))))), opening and closing linear:
qkv and projection round attention, up and down round a GELU.

What a part keeps is the context's choice (`Context.keep`): "all", everything that backward needs; "selective", all but
the attention probabilities; "tiled", the same, with a log-sum-exp for each of their rows; "sub_block", the part's input
alone. LayerNorm's output is never kept, but computed again from its input.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zerosim.models import layers
from zerosim.models.checks import require_at_rest, require_shape
from zerosim.models.context import Context, Gradients
from zerosim.models.gpt_config import GPTConfig
from zerosim.models.initializers import Initializer, Normal, Ones, Zeros
from zerosim.models.recompute import ALL, SELECTIVE, SUB_BLOCK, TILED, require_inside
from zerosim.models.units import Unit, Weights

# GPT-2's first values: deviation 0.02 (Radford et al. 2018, section 4.1), and where a residual is added 1/√(number of
# residual parts) of it (Radford et al. 2019, section 2.3).
DEVIATION = 0.02
PROBABILITIES = {ALL: "probabilities", SELECTIVE: "nothing", SUB_BLOCK: "nothing", TILED: "tiled"}


# What backward needs of a part: what LayerNorm and what the middle kept, and the closing linear layer's input (M, I).
KeptByPart = tuple[Any, Any, np.ndarray]


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """y = x + dropout(closing(middle(opening(layernorm(x))))): x (B, T, C) -> y (B, T, C). ``block`` is its prefix."""

    block: str
    config: GPTConfig
    seed: int
    local_name: ClassVar[str]
    norm: ClassVar[str]
    opening: ClassVar[str]
    closing: ClassVar[str]

    @property
    def name(self) -> str:
        """The part's full name."""
        return f"{self.block}.{self.local_name}"

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Outputs of the opening linear layer, inputs of the closing one."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """LayerNorm's weight and bias (C,), the opening's (C, O) and (O,), the closing's (I, C) and (C,)."""
        c, (o, i) = self.config.channels, self.widths
        return {self.full(self.norm): (c,), self.full(self.norm, "bias"): (c,),
                self.full(self.opening): (c, o), self.full(self.opening, "bias"): (o,),
                self.full(self.closing): (i, c), self.full(self.closing, "bias"): (c,)}

    def full(self, layer: str, parameter: str = "weight") -> str:
        """A parameter's full name."""
        return f"{self.block}.{layer}.{parameter}"

    def initializer(self, name: str) -> Initializer:
        """Zeros for biases, ones for LayerNorm's weight, normal values for the others, by the seed and the name."""
        if name.endswith(".bias"):
            return Zeros()
        if name == self.full(self.norm):
            return Ones()
        return Normal(self.seed, DEVIATION / (2 * self.config.layers)**0.5 if name == self.full(self.closing)
                      else DEVIATION)

    @abstractmethod
    def middle_forward(self, ctx: Context, h: np.ndarray, shape: tuple[int, ...],
                       keep: str) -> tuple[np.ndarray, Any]:
        """h (M, O) -> (M, I), and what backward needs; ``shape`` is (B, T, C)."""

    @abstractmethod
    def middle_backward(self, ctx: Context, kept: Any, dy: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """dy (M, I) -> dh (M, O)."""

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """y (B, T, C), and what the context says is kept: x alone, or a KeptByPart."""
        kept = self._run(ctx, w, x, ctx.keep)
        y = layers.linear_forward(ctx, kept[-1], w[self.full(self.closing)], w[self.full(self.closing, "bias")])[0]
        y = layers.dropout_forward(ctx, y.reshape(x.shape), self.config.dropout, self.name)[0]
        _add_to(ctx, y, x)
        return y, x if ctx.keep == SUB_BLOCK else kept

    def _run(self, ctx: Context, w: Weights, x: np.ndarray, keep: str) -> KeptByPart:
        """Everything up to the input of the closing linear layer: what backward computes again of a sub-block."""
        h, norm = layers.layernorm_forward(ctx, _rows(x), w[self.full(self.norm)], w[self.full(self.norm, "bias")],
                                           self.config.epsilon)
        h = layers.linear_forward(ctx, h, w[self.full(self.opening)], w[self.full(self.opening, "bias")])[0]
        h, middle = self.middle_forward(ctx, h, x.shape, keep)
        return norm, middle, h

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray, grads: Gradients) -> np.ndarray:
        """dy (B, T, C) -> dx (B, T, C), and the gradients of the parameters; drops what it needs no more."""
        norm, middle, closing = self._run(ctx, w, kept, ALL) if ctx.keep == SUB_BLOCK else kept
        del kept
        dh = layers.dropout_backward(ctx, self.name, dy, self.config.dropout)
        dh = self._linear(ctx, w, self.closing, closing, _rows(dh), grads)
        del closing
        dh = self.middle_backward(ctx, middle, dh, dy.shape)
        del middle
        h = layers.layernorm_output(ctx, w[self.full(self.norm)], w[self.full(self.norm, "bias")], norm)
        dh = self._linear(ctx, w, self.opening, h, dh, grads)
        del h
        dx = layers.layernorm_backward(ctx, w[self.full(self.norm)], norm, dh, grads[self.full(self.norm)],
                                       grads[self.full(self.norm, "bias")]).reshape(dy.shape)
        _add_to(ctx, dx, dy)
        return dx

    def _linear(self, ctx: Context, w: Weights, layer: str, x: np.ndarray, dy: np.ndarray,
                grads: Gradients) -> np.ndarray:
        """One linear layer back: x (M, I), dy (M, O) -> dx (M, I)."""
        name = self.full(layer)
        ctx.observe(name, x, dy)
        return layers.linear_backward(ctx, w[name], x, dy, grads[name], grads[self.full(layer, "bias")])


@dataclass(frozen=True, eq=False)
class Attention(Part):
    """Causal attention of H heads between qkv (C, 3C) and projection (C, C)."""

    local_name: ClassVar[str] = "attention"
    norm: ClassVar[str] = "ln_1"
    opening: ClassVar[str] = "attention.qkv"
    closing: ClassVar[str] = "attention.projection"

    @property
    def widths(self) -> tuple[int, int]:
        """3C, C."""
        return 3 * self.config.channels, self.config.channels

    def middle_forward(self, ctx: Context, h: np.ndarray, shape: tuple[int, ...],
                       keep: str) -> tuple[np.ndarray, Any]:
        """h (M, 3C) -> (M, C)."""
        o, kept = layers.attention_forward(ctx, h.reshape(*shape[:2], h.shape[1]), self.config.heads,
                                           keep=PROBABILITIES[keep])
        return _rows(o), kept

    def middle_backward(self, ctx: Context, kept: Any, dy: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """dy (M, C) -> dh (M, 3C)."""
        return _rows(layers.attention_backward(ctx, kept, dy.reshape(shape)))


@dataclass(frozen=True, eq=False)
class FeedForward(Part):
    """A GELU in its tanh form, as GPT-2 has it, between up (C, F) and down (F, C)."""

    local_name: ClassVar[str] = "ffn"
    norm: ClassVar[str] = "ln_2"
    opening: ClassVar[str] = "ffn.up"
    closing: ClassVar[str] = "ffn.down"

    @property
    def widths(self) -> tuple[int, int]:
        """F, F."""
        return self.config.hidden, self.config.hidden

    def middle_forward(self, ctx: Context, h: np.ndarray, shape: tuple[int, ...],
                       keep: str) -> tuple[np.ndarray, Any]:
        """h (M, F) -> (M, F)."""
        return layers.gelu_forward(ctx, h)

    def middle_backward(self, ctx: Context, kept: Any, dy: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """dy (M, F) -> dh (M, F)."""
        return layers.gelu_backward(ctx, kept, dy)


class PartsUnit(Unit):
    """Parts one after the other, gathered and freed together: x (B, T, C) -> y (B, T, C)."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name, self.parts = name, tuple(parts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parts' parameters, in their order."""
        return {name: shape for part in self.parts for name, shape in part.shapes.items()}

    @property
    def factored(self) -> frozenset[str]:
        """The weights of all linear layers."""
        return frozenset(part.full(layer) for part in self.parts for layer in (part.opening, part.closing))

    def initializer(self, name: str) -> Initializer:
        """What makes the first values of one parameter."""
        return next(part for part in self.parts if name in part.shapes).initializer(name)

    def forward(self, ctx: Context, w: Weights, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """y (B, T, C), and what each part kept.

        Raises ValueError for an x of another shape or dtype, and for a ctx.keep that there is not.
        """
        require_inside(f"unit {self.name!r}", ctx.keep)
        channels = self.parts[0].config.channels
        require_shape(f"unit {self.name!r}", "x", x, (*x.shape[:2], channels), "x has C channels for each of B x T "
                      "tokens")
        require_at_rest(ctx, f"unit {self.name!r}", x=x)
        kept = []
        for part in self.parts:
            x, of_part = part.forward(ctx, w, x)
            kept.append(of_part)
            del of_part
        return x, kept

    def backward(self, ctx: Context, w: Weights, kept: Any, dy: np.ndarray) -> tuple[np.ndarray, Gradients]:
        """dx (B, T, C), and the gradient of each parameter; uses ``kept`` up."""
        grads = ctx.gradients(self)
        for part in reversed(self.parts):
            dy = part.backward(ctx, w, kept.pop(), dy, grads)
        return dy, grads


def _rows(x: np.ndarray) -> np.ndarray:
    """(B, T, C) as (M, C), the same memory."""
    return x.reshape(-1, x.shape[-1])


def _add_to(ctx: Context, y: np.ndarray, x: np.ndarray) -> None:
    """y += x, rounded once."""
    ctx.kernels.add_rounded(y, x, y)
    ctx.note(flops=y.size, nbytes=3 * y.nbytes)
