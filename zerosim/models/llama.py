"""Llama's model: its shape and presets, rotary attention with shared keys and values, and SwiGLU.

The walk through a block, its ends and what recomputation keeps are those of `zerosim.models.gpt`; here is what differs.
Mistral and Qwen are of this kind: Qwen 2 has biases in its qkv, Qwen 3 a norm of each head's queries and keys.

Legend: B batch, T tokens, M = B·T rows, C channels, H heads of D channels, H_kv heads of keys and of values, O = (H +
2·H_kv)·D, F channels inside the feed-forward network.
Sources: Touvron et al. 2023, "Llama 2" (arXiv:2307.09288), section 2.2; Ainslie et al. 2023, "GQA" (arXiv:2305.13245);
Qwen Team 2025, "Qwen3 Technical Report" (arXiv:2505.09388), section 2, for the norms of heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from zerosim.models import gpt, layers
from zerosim.models.gpt import Attention, Decoder, DecoderConfig, FeedForward, SubBlock
from zerosim.models.layers import OWN_OUTPUT, Context, Gradients, require_at_rest, rows_of
from zerosim.models.rotary import RotaryScaling, frequencies
from zerosim.models.units import Weights
from zerosim.numerics.arrays import Array
from zerosim.numerics.checks import is_finite_number, require_biases, require_shape
from zerosim.numerics.ranges import CountOrZero, Flag, Range


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A decoder with rotary positions, RMSNorm and gates.

    Where 0: ``key_value_heads`` (H_kv) is H, ``head_channels`` (D) is C/H. ``base`` is that of the rotary angles,
    ``scaling`` slows them down for longer contexts: a LinearScaling or a Llama3Scaling. ``biases`` are the linear
    layers that have one, of "qkv", "projection" and "feed_forward"; ``head_norms``: an RMSNorm of each head's queries
    and keys.
    Raises ValueError for heads that do not divide, heads of odd width, which cannot be turned, and other biases.
    """

    key_value_heads: CountOrZero = 0
    head_channels: CountOrZero = 0
    base: Annotated[float, Range("the rotary angles are its powers, so take a positive number, as 10000",
                                 lambda value: is_finite_number(value) and value > 0)] = 10_000.0
    scaling: Annotated[RotaryScaling | None, Range("it is a LinearScaling, a Llama3Scaling or None",
                                                   lambda value: isinstance(value, RotaryScaling | None))] = None
    biases: tuple[str, ...] = ()
    head_norms: Flag = False
    last_norm: ClassVar[str] = "norm"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_biases("LlamaConfig", self.biases)
        if self.head_channels % 2:
            raise ValueError(f"LlamaConfig was given heads of {self.head_channels} channels; rotary positions turn "
                             "pairs of them, so take an even number")

    @cached_property
    def frequencies(self) -> tuple[float, ...]:
        """Radians by which each plane of a head turns from one place to the next (D/2,)."""
        return frequencies(self.head_channels, self.base, self.scaling)

    def sub_blocks(self, block: str, seed: int) -> list[SubBlock]:
        """Attention, and a gated feed-forward network."""
        return [RotaryAttention(block, self, seed), GatedFeedForward(block, self, seed)]


# llama-nano is for tests: two heads share keys and values. llama-micro reads bytes and trains as long as gpt-micro.
PRESETS: Mapping[str, LlamaConfig] = {
    "llama-nano": LlamaConfig(layers=2, channels=12, heads=2, context=8, vocabulary=17, key_value_heads=1,
                              feed_forward=20),
    "llama-micro": LlamaConfig(layers=4, channels=128, heads=4, context=64, vocabulary=256, key_value_heads=2,
                               feed_forward=352),
}


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


def swiglu_forward(ctx: Context, h: Array) -> tuple[Array, Array]:
    """y (M, F) = silu(gate)·up, silu(x) = x/(1 + e⁻ˣ), in fp32, rounded once; gate and up side by side in h (M, 2F).

    Saves h. Raises ValueError for an odd number of columns. Source: Shazeer 2020 (arXiv:2002.05202), section 2.
    """
    if h.ndim != 2 or h.shape[1] % 2:
        raise ValueError(f"swiglu_forward asked for gate and up side by side (M, 2F), and found shape {h.shape}")
    require_at_rest(ctx, "swiglu_forward", h=h)
    y = ctx.empty((h.shape[0], h.shape[1] // 2), name="swiglu.y")
    ctx.kernels.swiglu(h, y)
    ctx.note(flops=5 * y.size, nbytes=h.nbytes + y.nbytes)
    return y, h


def swiglu_backward(ctx: Context, saved: Array, dy: Array) -> Array:
    """dy (M, F) -> dh (M, 2F), in fp32, rounded once."""
    require_shape("swiglu_backward", "dy", dy, (saved.shape[0], saved.shape[1] // 2), OWN_OUTPUT)
    require_at_rest(ctx, "swiglu_backward", dy=dy)
    dh = ctx.empty(saved.shape, "activation_gradient", name="swiglu.dh")
    ctx.kernels.swiglu_gradient(saved, dy, dh)
    ctx.note(flops=14 * dy.size, nbytes=saved.nbytes + dy.nbytes + dh.nbytes)
    return dh


class GatedFeedForward(FeedForward):
    """silu(gate)·up between gate and up, one matrix (C, 2F), and down (F, C)."""

    norm_name: ClassVar[str] = "ffn_norm"
    opening: ClassVar[str] = "ffn.gate_up"
    functions = swiglu_forward, swiglu_backward
    sides: ClassVar[int] = 2


# -- Rotary positions, shared keys and values, norms of heads ----------------------------------------------------------


class RotaryAttention(Attention):
    """Causal attention between qkv (C, O) and projection (H·D, C), queries and keys turned by their places.

    They are turned in place, in what the opening made, so that nothing is kept beside it. Where heads have norms, what
    the opening made is kept as it is, with a number of fp32 for each head and row; backward norms and turns again.
    """

    norm_name: ClassVar[str] = "attention_norm"

    @property
    def between(self) -> dict[str, tuple[int, ...]]:
        """The norms' weights of queries and of keys (D,)."""
        names = ("query_norm", "key_norm") if self.config.head_norms else ()
        return {self.full(f"attention.{name}"): (self.config.head_channels,) for name in names}

    def middle_forward(self, ctx: Context, w: Weights, h: Array, shape: tuple[int, ...]) -> tuple[Array, Any]:
        """h (M, O) -> (M, H·D)."""
        qkv, rstds = self._norm_heads(ctx, w, h) if self.between else (h, ())
        self._turn(ctx, qkv.reshape(*shape[:2], -1))
        o, saved = super().middle_forward(ctx, w, qkv, shape)
        return o, (replace(saved, qkv=h.reshape(saved.qkv.shape)), rstds)

    def middle_backward(self, ctx: Context, w: Weights, saved: Any, dy: Array, shape: tuple[int, ...],
                        grads: Gradients) -> Array:
        """dy (M, H·D) -> dh (M, O), and the gradients of the heads' norms."""
        attention, rstds = saved
        h = rows_of(attention.qkv)
        if self.between:
            qkv, _ = self._norm_heads(ctx, w, h, rstds)
            attention = replace(attention, qkv=qkv.reshape(attention.qkv.shape))
            self._turn(ctx, attention.qkv)
        dh = super().middle_backward(ctx, w, attention, dy, shape, grads)
        self._turn(ctx, dh.reshape(attention.qkv.shape), back=True)
        for (name, x, dx), rstd in zip(self._heads_of(h, dh), rstds, strict=True):
            layers.norm_backward(ctx, w[name], (x, None, rstd), dx, grads[name], out=dx)
        return dh

    def _turn(self, ctx: Context, qkv: Array, *, back: bool = False) -> None:
        """Turns the queries and keys of qkv (B, T, O) in place."""
        of = self.config
        ctx.kernels.rotate(qkv, of.heads + of.key_value_heads, of.frequencies, back=back)
        turned = qkv.size // (of.heads + 2 * of.key_value_heads) * (of.heads + of.key_value_heads)
        ctx.note(flops=3 * turned, nbytes=2 * turned * qkv.itemsize)

    def _norm_heads(self, ctx: Context, w: Weights, h: Array,
                    rstds: Sequence[Array] = ()) -> tuple[Array, Sequence[Array]]:
        """A copy of h (M, O) in which each query and key is normed, and the norms' statistics, or with these again."""
        of, found = self.config, list(rstds)
        qkv = ctx.empty(h.shape, name="attention.normed")
        values = (of.heads + of.key_value_heads) * of.head_channels
        ctx.kernels.cast_pack(h[:, values:], qkv[:, values:])
        for index, (name, x, y) in enumerate(self._heads_of(h, qkv)):
            if rstds:
                layers.norm_output(ctx, (x, None, rstds[index]), w[name], out=y)
            else:
                found.append(layers.norm_forward(ctx, x, w[name], epsilon=of.epsilon, out=y)[1][2])
        return qkv, found

    def _heads_of(self, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """For each norm of heads its weight's name, and of each array (M, O) the heads that it is of (M, h, D)."""
        of = self.config
        places = slice(of.heads), slice(of.heads, of.heads + of.key_value_heads)
        for name, here in zip(self.between, places, strict=False):
            yield name, *(x.reshape(len(x), -1, of.head_channels)[:, here] for x in arrays)


# -- The model ---------------------------------------------------------------------------------------------------------


class Llama(Decoder):
    """A Llama; the head is a matrix of its own unless ``tied``.

    >>> Llama("llama-nano").parameter_count, [unit.name for unit in Llama("llama-nano").units]
    (2772, ['embed', 'block0', 'block1', 'head'])
    """

    config_class: ClassVar[type[DecoderConfig]] = LlamaConfig
    presets: ClassVar[Mapping[str, Any]] = PRESETS
    config: LlamaConfig

    def __init__(self, config: LlamaConfig | str = "llama-nano", *, tied: bool = False, **options: Any) -> None:
        """``config`` is a LlamaConfig or a preset's name; ``options`` and what is raised are Decoder's."""
        super().__init__(config, tied=tied, **options)


def config_of(config: Any) -> DecoderConfig:
    """The config of a preset's name, of a GPT or of a Llama, or a config itself; ValueError for anything else."""
    found: DecoderConfig = gpt.find_config("a model", config, DecoderConfig, {**gpt.PRESETS, **PRESETS})
    return found


def decoder(config: DecoderConfig | str, **options: Any) -> Decoder:
    """The model of a config, or of a preset's name: a GPT, or a Llama.

    >>> type(decoder("llama-nano")).__name__, type(decoder("gpt-nano")).__name__
    ('Llama', 'GPT')

    ``options`` are those of the model. Raises ValueError for a preset that there is not.
    """
    config = config_of(config)
    return (Llama if isinstance(config, LlamaConfig) else gpt.GPT)(config, **options)  # type: ignore[arg-type]
