"""Decoders, and GPT-2's among them: shapes and presets, blocks and ends as units, and text that they continue.

What a block normalizes with, opens and closes with, and computes between, the config's classes say: here GPT-2's, in
`zerosim.models.llama` Llama's.

Legend: B batch, T tokens (of the longest sequence, in a config), t tokens so far, M = B·T rows of a matrix, C channels,
H heads, V vocabulary.
Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np

from zerosim.models import layers
from zerosim.models.initializers import Filled, Initializer, Normal
from zerosim.models.layers import ALL, SUB_BLOCK, Context, Gradients, require_at_rest, rows_of
from zerosim.models.losses import CrossEntropy, Normalization
from zerosim.models.units import Model, Unit, Weights
from zerosim.numerics import random
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import (
    LINEAR_LAYERS,
    checked_heads,
    is_count,
    is_finite_number,
    is_number,
    require_integers,
    require_shape,
    unknown_name,
)
from zerosim.numerics.ranges import Count, CountOrZero, Range, require_ranges

# -- Shapes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecoderConfig(ABC):
    """Transformer blocks (``layers``) of C ``channels`` in H ``heads``, T tokens of ``context``, V of ``vocabulary``.

    ``dropout`` is the rate after the embedding and after both residual projections of each block; the attention
    probabilities have none, since tiled attention never holds them. ``epsilon`` is the norms', ``feed_forward`` F, the
    width of the feed-forward network's inside; 0 makes it 4C. Unless a kind of config is asked for them, every head has
    keys and values of its own, and C/H channels.
    Raises ValueError for counts below one, a rate outside [0, 1), and heads that do not divide the channels.
    """

    layers: Count
    channels: Count
    heads: Count
    context: Count
    vocabulary: Count
    dropout: Annotated[float, layers.RATE] = 0.0
    epsilon: Annotated[float, Range("it keeps a norm from dividing by 0, so take a small positive number, as 1e-5",
                                    lambda value: is_finite_number(value) and value > 0)] = 1e-5
    feed_forward: CountOrZero = 0
    key_value_heads: int = field(init=False, repr=False)
    head_channels: int = field(init=False, repr=False)
    learned_positions: ClassVar[bool] = False
    layer_norm: ClassVar[bool] = False
    last_norm: ClassVar[str]

    def __post_init__(self) -> None:
        require_ranges(self)
        shared, width = checked_heads(f"a {type(self).__name__}", self.channels, self.heads,
                                      getattr(self, "key_value_heads", 0), getattr(self, "head_channels", None))
        derived = {"feed_forward": self.feed_forward or 4 * self.channels, "key_value_heads": shared,
                   "head_channels": width}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def norm(self, name: str) -> "Norm":
        """The norm whose parameters have this name: a LayerNorm, or an RMSNorm."""
        return Norm(name, self.channels, self.epsilon, self.layer_norm)

    @abstractmethod
    def sub_blocks(self, block: str, seed: int) -> "list[SubBlock]":
        """The sub-blocks of a block of this name."""


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """GPT-2's: learned positions, LayerNorm, biases everywhere."""

    learned_positions: ClassVar[bool] = True
    layer_norm: ClassVar[bool] = True
    last_norm: ClassVar[str] = "ln_f"
    biases: ClassVar[tuple[str, ...]] = LINEAR_LAYERS

    def sub_blocks(self, block: str, seed: int) -> "list[SubBlock]":
        """Attention, and a feed-forward network round a GELU."""
        return [Attention(block, self, seed), FeedForward(block, self, seed)]


# gpt-nano is for tests: everything odd. gpt-micro reads bytes and trains in a minute or two on a laptop. The others:
# Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, with the head counts of the
# published checkpoints.
PRESETS: Mapping[str, GPTConfig] = {
    "gpt-nano": GPTConfig(layers=2, channels=12, heads=3, context=8, vocabulary=17),
    "gpt-micro": GPTConfig(layers=4, channels=128, heads=4, context=64, vocabulary=256),
    "gpt2": GPTConfig(layers=12, channels=768, heads=12, context=1024, vocabulary=50257),
    "gpt2-medium": GPTConfig(layers=24, channels=1024, heads=16, context=1024, vocabulary=50257),
    "gpt2-large": GPTConfig(layers=36, channels=1280, heads=20, context=1024, vocabulary=50257),
    "gpt2-xl": GPTConfig(layers=48, channels=1600, heads=25, context=1024, vocabulary=50257),
}


# -- Norms -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A norm of the rows of x (M, C) as a layer with parameters of a name: LayerNorm's ``name.weight`` and
    ``name.bias`` (C,), or RMSNorm's weight alone."""

    name: str
    channels: int
    epsilon: float
    biased: bool

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """(C,) each."""
        return {f"{self.name}.{parameter}": (self.channels,) for parameter in ("weight", "bias")[:1 + self.biased]}

    def of(self, arrays: Weights) -> list[Array]:
        """The arrays of the parameters, in their order."""
        return [arrays[name] for name in self.shapes]

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """y (M, C), and what is saved, from which `output` makes y again: x and its rows' statistics."""
        return layers.norm_forward(ctx, x, *self.of(w), epsilon=self.epsilon)

    def output(self, ctx: Context, w: Weights, saved: Any) -> Array:
        """The same y (M, C) again."""
        return layers.norm_output(ctx, saved, *self.of(w))

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, grads: Gradients) -> Array:
        """dy (M, C) -> dx (M, C), and the gradients of the parameters."""
        return layers.norm_backward(ctx, self.of(w)[0], saved, dy, *self.of(grads))


# -- Blocks: two residual sub-blocks each, in units of any number -----------------------------------------------------
# Pre-norm. A sub-block is x + dropout(closing(middle(opening(norm(x))))), opening and closing linear: in GPT-2, qkv and
# projection round attention, up and down round a GELU.
#
# The context chooses what a sub-block saves (`Context.keep`): its input alone, or what backward needs, with attention's
# probabilities, without, or in tiles. The norm's output is never saved, but computed again from its input.


# GPT-2's first values: deviation 0.02 (Radford et al. 2018, section 4.1), and where a residual is added 1/√(number of
# residual sub-blocks) of it (Radford et al. 2019, section 2.3).
DEVIATION = 0.02


# What backward needs: what the norm and what the middle saved, and the closing linear layer's input (M, I).
SavedBySubBlock = tuple[Any, Any, Array]


@dataclass(frozen=True, eq=False)
class SubBlock(ABC):
    """y = x + dropout(closing(middle(opening(norm(x))))): x (B, T, C) -> y (B, T, C). ``block`` is its prefix.

    ``norm_name`` and the linear layers' names are those of parameters; ``called`` is what a config's biases call these
    layers.
    """

    block: str
    config: Any  # of the sub-block's own kind
    seed: int
    local_name: ClassVar[str]
    norm_name: ClassVar[str]
    opening: ClassVar[str]
    closing: ClassVar[str]
    called: ClassVar[tuple[str, str]]

    @property
    def name(self) -> str:
        """The sub-block's full name."""
        return f"{self.block}.{self.local_name}"

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Outputs of the opening linear layer, inputs of the closing one."""

    @cached_property
    def biased(self) -> tuple[str, ...]:
        """The linear layers with a bias."""
        layers = zip((self.opening, self.closing), self.called, strict=True)
        return tuple(layer for layer, called in layers if called in self.config.biases)

    @cached_property
    def norm(self) -> Norm:
        """The norm that the sub-block begins with."""
        norm: Norm = self.config.norm(f"{self.block}.{self.norm_name}")
        return norm

    @property
    def between(self) -> dict[str, tuple[int, ...]]:
        """Parameters of the middle, which most have none of."""
        return {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The norm's (C,), the opening's (C, O) and its bias's (O,), the middle's, the closing's (I, C) and (C,)."""
        c, (o, i) = self.config.channels, self.widths
        return {**self.norm.shapes, **self._linear_shapes(self.opening, (c, o)), **self.between,
                **self._linear_shapes(self.closing, (i, c))}

    def _linear_shapes(self, layer: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        return {self.full(layer): shape} | ({self.full(layer, "bias"): shape[1:]} if layer in self.biased else {})

    def full(self, layer: str, parameter: str = "weight") -> str:
        """A parameter's full name."""
        return f"{self.block}.{layer}.{parameter}"

    def _of(self, layer: str, arrays: Weights) -> tuple[Array, Array | None]:
        """The arrays of a layer's weight and, where it has one, its bias."""
        return arrays[self.full(layer)], arrays[self.full(layer, "bias")] if layer in self.biased else None

    def initializer(self, name: str) -> Initializer:
        """Zeros for biases, ones for the norms' weights, normal values for the others, by the seed and the name."""
        if name.endswith(".bias"):
            return Filled(0)
        if name in self.norm.shapes or name in self.between:
            return Filled(1)
        return Normal(self.seed, DEVIATION / (2 * self.config.layers)**0.5 if name == self.full(self.closing)
                      else DEVIATION)

    @abstractmethod
    def middle_forward(self, ctx: Context, w: Weights, h: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
        """h (M, O) -> (M, I), and what backward needs; ``shape`` is (B, T, C)."""

    @abstractmethod
    def middle_backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, shape: tuple[int, ...],
                        grads: Gradients) -> Array:
        """dy (M, I) -> dh (M, O), and the gradients of the middle's parameters."""

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """y (B, T, C), and what the context says is saved: x alone, or a SavedBySubBlock."""
        saved = self._run(ctx, w, x)
        y = layers.linear_forward(ctx, saved[-1], *self._of(self.closing, w))[0]
        y = layers.dropout_forward(ctx, y.reshape(x.shape), self.config.dropout, self.name)[0]
        _add_to(ctx, y, x)
        return y, x if ctx.keep == SUB_BLOCK else saved

    def _run(self, ctx: Context, w: Weights, x: Array) -> SavedBySubBlock:
        """Everything up to the input of the closing linear layer: what backward computes again of a sub-block."""
        h, norm = self.norm.forward(ctx, w, rows_of(x))
        h = layers.linear_forward(ctx, h, *self._of(self.opening, w))[0]
        h, middle = self.middle_forward(ctx, w, h, x.shape)
        return norm, middle, h

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, grads: Gradients) -> Array:
        """dy (B, T, C) -> dx (B, T, C), and the gradients of the parameters; drops what it needs no more."""
        norm, middle, closing = self._run(replace(ctx, keep=ALL), w, saved) if ctx.keep == SUB_BLOCK else saved
        del saved
        dh = layers.dropout_backward(ctx, self.name, dy, self.config.dropout)
        dh = self._linear(ctx, w, self.closing, closing, rows_of(dh), grads)
        del closing
        dh = self.middle_backward(ctx, w, middle, dh, dy.shape, grads)
        del middle
        h = self.norm.output(ctx, w, norm)
        dh = self._linear(ctx, w, self.opening, h, dh, grads)
        del h
        dx = self.norm.backward(ctx, w, norm, dh, grads).reshape(dy.shape)
        _add_to(ctx, dx, dy)
        return dx

    def _linear(self, ctx: Context, w: Weights, layer: str, x: Array, dy: Array, grads: Gradients) -> Array:
        """One linear layer back: x (M, I), dy (M, O) -> dx (M, I)."""
        name = self.full(layer)
        ctx.observe(name, x, dy)
        return layers.linear_backward(ctx, w[name], x, dy, *self._of(layer, grads))


@dataclass(frozen=True, eq=False)
class Attention(SubBlock):
    """Causal attention of H heads between qkv (C, O), O = (H + 2·H_kv)·D, and projection (H·D, C)."""

    local_name: ClassVar[str] = "attention"
    norm_name: ClassVar[str] = "ln_1"
    opening: ClassVar[str] = "attention.qkv"
    closing: ClassVar[str] = "attention.projection"
    called: ClassVar[tuple[str, str]] = ("qkv", "projection")

    @property
    def widths(self) -> tuple[int, int]:
        """O, H·D."""
        of = self.config
        return (of.heads + 2 * of.key_value_heads) * of.head_channels, of.heads * of.head_channels

    def middle_forward(self, ctx: Context, w: Weights, h: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
        """h (M, O) -> (M, H·D)."""
        qkv = h.reshape(*shape[:2], h.shape[1])
        o, saved = layers.attention_forward(ctx, qkv, self.config.heads, self.config.key_value_heads)
        return rows_of(o), saved

    def middle_backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, shape: tuple[int, ...],
                        grads: Gradients) -> Array:
        """dy (M, H·D) -> dh (M, O)."""
        return rows_of(layers.attention_backward(ctx, saved, dy.reshape(*shape[:2], dy.shape[1])))


@dataclass(frozen=True, eq=False)
class FeedForward(SubBlock):
    """A GELU in its tanh form, as GPT-2 has it, between up (C, F) and down (F, C).

    ``functions`` are the middle's own, of rows: forward and backward. It reads as many matrices of F columns, side by
    side, as it has ``sides``.
    """

    local_name: ClassVar[str] = "ffn"
    norm_name: ClassVar[str] = "ln_2"
    opening: ClassVar[str] = "ffn.up"
    closing: ClassVar[str] = "ffn.down"
    called: ClassVar[tuple[str, str]] = ("feed_forward", "feed_forward")
    functions: ClassVar[tuple[Callable[..., tuple[Array, Any]], Callable[..., Array]]] = (
        layers.gelu_forward, layers.gelu_backward)
    sides: ClassVar[int] = 1

    @property
    def widths(self) -> tuple[int, int]:
        """F for each of the ``sides``, F."""
        return self.sides * self.config.feed_forward, self.config.feed_forward

    def middle_forward(self, ctx: Context, w: Weights, h: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
        """h (M, O) -> (M, F)."""
        return self.functions[0](ctx, h)

    def middle_backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, shape: tuple[int, ...],
                        grads: Gradients) -> Array:
        """dy (M, F) -> dh (M, O)."""
        return self.functions[1](ctx, saved, dy)


class BlockUnit(Unit):
    """Sub-blocks one after the other, gathered and freed together: x (B, T, C) -> y (B, T, C)."""

    def __init__(self, name: str, sub_blocks: Sequence[SubBlock]) -> None:
        self.name, self.sub_blocks = name, tuple(sub_blocks)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The sub-blocks' parameters, in their order."""
        return {name: shape for one in self.sub_blocks for name, shape in one.shapes.items()}

    @property
    def factored(self) -> frozenset[str]:
        """The weights of all linear layers."""
        return frozenset(one.full(layer) for one in self.sub_blocks for layer in (one.opening, one.closing))

    @property
    def in_compute_format(self) -> frozenset[str]:
        """The parameters of linear layers: norms read theirs in any format."""
        return frozenset(name for one in self.sub_blocks for name in one.shapes
                         if name not in one.norm.shapes and name not in one.between)

    def initializer(self, name: str) -> Initializer:
        """The initializer of one parameter, which makes its first values."""
        return next(one for one in self.sub_blocks if name in one.shapes).initializer(name)

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """y (B, T, C), and what each sub-block saved.

        Raises ValueError for an x of another shape or dtype.
        """
        channels = self.sub_blocks[0].config.channels
        require_shape(f"unit {self.name!r}", "x", x, (*x.shape[:2], channels), "x has C channels for each of B x T "
                      "tokens")
        require_at_rest(ctx, f"unit {self.name!r}", x=x)
        saved = []
        for one in self.sub_blocks:
            x, of_one = one.forward(ctx, w, x)
            saved.append(of_one)
            del of_one
        return x, saved

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[Array, Gradients]:
        """dx (B, T, C), and the gradient of each parameter; uses ``saved`` up."""
        grads = ctx.gradients(self)
        for one in reversed(self.sub_blocks):
            dy = one.backward(ctx, w, saved.pop(), dy, grads)
        return dy, grads


def _add_to(ctx: Context, y: Array, x: Array) -> None:
    """y += x, rounded once."""
    ctx.kernels.add_rounded(y, x, y)
    ctx.note(flops=y.size, nbytes=3 * y.nbytes)


# -- The two ends: tokens to channels, and channels to logits ----------------------------------------------------------

class Embed(Unit):
    """y = dropout(wte[tokens] + wpe): tokens (B, T) of any integer type -> y (B, T, C), each sum rounded once.

    A model without learned positions has no wpe, and adds nothing.
    """

    name = "embed"
    integer_inputs = True

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A row for each token of the vocabulary, and, where positions are learned, one for each place in the
        context."""
        tables: dict[str, tuple[int, ...]] = {"wte": (self.config.vocabulary, self.config.channels)}
        if self.config.learned_positions:
            tables["wpe"] = (self.config.context, self.config.channels)
        return tables

    @property
    def in_compute_format(self) -> frozenset[str]:
        """The table of tokens."""
        return frozenset({"wte"})

    def initializer(self, name: str) -> Initializer:
        """Normal values of GPT-2's deviation."""
        return Normal(self.seed, DEVIATION)

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """tokens (B, T) -> y (B, T, C); saves the tokens.

        Raises ValueError for another number of dimensions, for more tokens than the context has places, and for a token
        outside the vocabulary.
        """
        if x.ndim != 2 or not x.size or x.shape[1] > self.config.context:
            raise ValueError(f"unit 'embed' asked for tokens (B, T), B from 1, T from 1 to the context's "
                             f"{self.config.context}, and found shape {x.shape}; cut longer texts into several "
                             "sequences")
        y, tokens = layers.embedding_forward(ctx, x, w["wte"])
        if self.config.learned_positions:
            places = w["wpe"][:x.shape[1]]
            for sequence in range(x.shape[0]):
                ctx.kernels.add_rounded(y[sequence], places, y[sequence])
            ctx.note(flops=y.size, nbytes=3 * y.nbytes)
        y, _ = layers.dropout_forward(ctx, y, self.config.dropout, self.name)
        return y, tokens

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[None, Gradients]:
        """dy (B, T, C) -> None, and the gradients of the tables; a place that no token took has zeros."""
        dy = layers.dropout_backward(ctx, self.name, dy, self.config.dropout)
        grads = ctx.gradients(self)
        layers.embedding_backward(ctx, saved, dy, grads["wte"])
        if self.config.learned_positions:
            batch, tokens, channels = dy.shape
            places = grads["wpe"]
            ctx.kernels.column_sum(dy.reshape(batch, tokens * channels), places[:tokens].reshape(-1))
            places[tokens:].fill(0)
            ctx.note(flops=dy.size, nbytes=dy.nbytes + places.nbytes)
        return None, grads


class Head(Unit):
    """logits = norm(x) @ w: x (B, T, C) -> logits (B, T, V) in the policy's output format.

    w is ``lm_head.weight`` (C, V), or, where ``tied``, the transpose of the embedding's wte (V, C), its tied weight.
    """

    name = "head"

    def __init__(self, config: DecoderConfig, seed: int, *, tied: bool) -> None:
        self.config, self.seed, self.tied = config, seed, tied
        self.norm = config.norm(config.last_norm)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The last norm's parameters, and the projection's where it is not tied."""
        c, v = self.config.channels, self.config.vocabulary
        return self.norm.shapes | ({} if self.tied else {"lm_head.weight": (c, v)})

    @property
    def tied_weights(self) -> Mapping[str, str]:
        """The embedding's table, where tied."""
        return {"wte": "embed"} if self.tied else {}

    @property
    def factored(self) -> frozenset[str]:
        """The projection, unless it is the embedding too."""
        return frozenset() if self.tied else frozenset({"lm_head.weight"})

    @property
    def in_compute_format(self) -> frozenset[str]:
        """The projection."""
        return self.factored

    def initializer(self, name: str) -> Initializer:
        """Ones and zeros for the norm, GPT-2's normal values for the projection."""
        if name in self.norm.shapes:
            return Filled(0 if name.endswith(".bias") else 1)
        return Normal(self.seed, DEVIATION)

    def forward(self, ctx: Context, w: Weights, x: Array) -> tuple[Array, Any]:
        """logits (B, T, V); saves x and its statistics."""
        h, saved = self.norm.forward(ctx, w, rows_of(x))
        logits = ctx.empty((*x.shape[:2], self.config.vocabulary), dtype=ctx.policy.output_dtype,
                           name="head.logits")
        ctx.matmul(h, w["wte"].T if self.tied else w["lm_head.weight"], logits.reshape(h.shape[0], -1))
        return logits, saved

    def backward(self, ctx: Context, w: Weights, saved: Any, dy: Array) -> tuple[Array, Gradients]:
        """dlogits (B, T, V), of any format -> dx (B, T, C) and the gradients, that of a tied wte among them."""
        d = ctx.cast(rows_of(dy), "activation_gradient", "head.dlogits")
        grads = ctx.gradients(self)
        h = self.norm.output(ctx, w, saved)
        dh = ctx.empty(h.shape, "activation_gradient", name="head.dh")
        if self.tied:
            ctx.matmul(d.T, h, grads["wte"], gradient="a")
            ctx.matmul(d, w["wte"], dh, gradient="a")
        else:
            ctx.observe("lm_head.weight", h, d)
            ctx.matmul(h.T, d, grads["lm_head.weight"], gradient="b")
            ctx.matmul(d, w["lm_head.weight"].T, dh, gradient="a")
        del h, d
        dx = self.norm.backward(ctx, w, saved, dh, grads)
        return dx.reshape(*dy.shape[:2], -1), grads


# -- The model ---------------------------------------------------------------------------------------------------------

class Decoder(Model):
    """Units ``embed``, ``block0``, ``block1``, …, ``head``: tokens (B, T) -> logits (B, T, V), with cross-entropy.

    ``units`` is what is gathered at a time: "block"; "sub_block", attention and feed-forward network each; or a number
    of blocks that are joined. Parameters have the same names, order and first values with any of them.
    """

    config_class: ClassVar[type[DecoderConfig]]
    presets: ClassVar[Mapping[str, Any]]

    def __init__(self, config: DecoderConfig | str, *, tied: bool, seed: int = 0, units: str | int = "block",
                 normalization: Normalization = "own") -> None:
        """``config`` is one of the model's own or a preset's name; ``tied``: the head uses the embedding's table too.

        ``normalization`` is the loss's: over the rank's own tokens, or "global". Raises ValueError for a preset that
        there is not, a seed that is no whole number, and units of no whole number of blocks.
        """
        require_integers(type(self).__name__, seed=seed)
        found = find_config(type(self).__name__, config, self.config_class, self.presets)
        self.config, self.tied, self.seed = found, bool(tied), seed
        self.granularity, self.normalization = units, normalization
        super().__init__([Embed(self.config, seed), *_units(type(self).__name__, self.config, seed, units),
                          Head(self.config, seed, tied=self.tied)], CrossEntropy(normalization))

    def without_dropout(self) -> "Decoder":
        """The same model, units and names, in which nothing is dropped: for evaluation, and for what it writes."""
        return type(self)(replace(self.config, dropout=0.0), tied=self.tied, seed=self.seed, units=self.granularity,
                          normalization=self.normalization)


def find_config(where: str, config: Any, kind: type, presets: Mapping[str, Any]) -> Any:
    """The config of a preset's name, or one of this kind itself; ValueError for anything else."""
    if isinstance(config, kind):
        return config
    if not isinstance(config, str) or config not in presets:
        raise unknown_name(f"{where} was asked for {config!r}, which is no {kind.__name__} and no preset", config,
                           presets, "the presets are")
    return presets[config]


class GPT(Decoder):
    """GPT-2's decoder, with a tied head.

    >>> GPT("gpt2").parameter_count
    124439808
    >>> [unit.name for unit in GPT("gpt-nano", units="sub_block").units]
    ['embed', 'block0.attention', 'block0.ffn', 'block1.attention', 'block1.ffn', 'head']
    """

    config_class: ClassVar[type[DecoderConfig]] = GPTConfig
    presets: ClassVar[Mapping[str, Any]] = PRESETS
    config: GPTConfig

    def __init__(self, config: GPTConfig | str = "gpt-nano", *, tied: bool = True, **options: Any) -> None:
        """``config`` is a GPTConfig or a preset's name; ``options`` and what is raised are Decoder's."""
        super().__init__(config, tied=tied, **options)


def _units(where: str, config: DecoderConfig, seed: int, units: Any) -> list[BlockUnit]:
    blocks = [config.sub_blocks(f"block{index}", seed) for index in range(config.layers)]
    if units == "sub_block":
        return [BlockUnit(one.name, [one]) for block in blocks for one in block]
    per_unit = 1 if units == "block" else units
    if not is_count(per_unit) or per_unit < 1:
        raise ValueError(f"{where} was asked for units={units!r}; a unit is a 'block', a 'sub_block', or a whole "
                         "number of blocks, 1 or more")
    return [BlockUnit(_name(start, min(start + per_unit, len(blocks)) - 1),
                      [one for block in blocks[start:start + per_unit] for one in block])
            for start in range(0, len(blocks), per_unit)]


def _name(first: int, last: int) -> str:
    return f"block{first}" if first == last else f"block{first}-{last}"


# -- Continuing a text, token by token ---------------------------------------------------------------------------------

Logits = Callable[[Array], Array]


def logits_of(ctx: Context, model: Decoder, weights: Callable[[Unit], AbstractContextManager[Weights]],
              tokens: Array) -> Array:
    """Forward without dropout, and nothing saved: tokens (B, t) -> logits (B, t, V) in the policy's output format.

    ``weights(unit)`` gives a unit's weights for a ``with`` block, as an engine does: gathering, so that where they rest
    sharded every rank takes part. Raises what the units raise.
    """
    x = tokens
    for unit, original in zip(model.without_dropout().units, model.units, strict=True):
        with weights(original) as w:
            x = unit.forward(ctx, w, x)[0]
    return x


def generate(logits: Logits, tokens: Any, count: int, *, context: int, temperature: float = 1.0,
             seed: int = 0) -> Array:
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
    require_integers("generate", seed=seed, count=count)
    require_integers("generate", 1, context=context)
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


def _choose(logits: Array, temperature: float, u: float) -> int:
    """The token (V,) into whose share of [0, 1) u falls; ties at temperature 0 go to the first."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(all="ignore"):  # what is beyond all measure less likely has the probability 0
        shares = np.cumsum(np.exp((logits - logits.max()) / temperature))
    return min(int(np.searchsorted(shares, u * shares[-1], side="right")), len(logits) - 1)
