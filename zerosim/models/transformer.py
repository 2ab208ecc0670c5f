"""A transformer on paper: the sizes that fix its parameters, by kind, and those of a config of the engine's.

Legend: d channels, n blocks, H heads of d_h channels, H_kv key and value heads, F channels inside the feed-forward
network, V vocabulary.

Sources of the kinds: Radford et al. 2019 (GPT-2), Zhang et al. 2022 (OPT), BigScience 2022 (BLOOM), Touvron et al.
2023 (Llama 2), Ainslie et al. 2023 (grouped queries), Shazeer 2020 (gated feed-forward), Raffel et al. 2020 (T5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zerosim.models.gpt import DecoderConfig, GPTConfig
from zerosim.models.llama import LlamaConfig
from zerosim.numerics.checks import LINEAR_LAYERS, checked_count, checked_heads, count_fields, require_biases

MOST_BLOCKS = 10_000  # each is looked at, and so is every moment of its activations


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes that fix a transformer's parameters, and those that a kind of model chooses.

    `head_channels` 0 is d/H, `key_value_heads` 0 is H, `feed_forward` 0 is 4d. `positions` are learned ones (0: none,
    or not learned), `biases` the linear layers that have one. `layer_norm`: weight and bias; else RMSNorm, a weight;
    neither without `norm_weights`. `fused`: one matrix makes queries, keys and values, and one a gate and what it
    gates. `head_norms`: RMSNorm of each head's query and key. `encoder_blocks` above 0 makes the n blocks a decoder
    that attends to an encoder of so many; `relative_buckets` are T5's learned position biases. `tokens` is the longest
    sequence of the pretrained model; 0 does not say.

    Raises ValueError for counts that are no whole numbers or too small, for heads that do not divide the channels, and
    for key and value heads that do not divide the heads.
    """

    channels: int
    blocks: int
    heads: int
    vocabulary: int
    feed_forward: int = 0
    key_value_heads: int = 0
    head_channels: int = 0
    positions: int = 0
    biases: tuple[str, ...] = LINEAR_LAYERS
    layer_norm: bool = True
    gated: bool = False
    tied: bool = True
    fused: bool = False
    embedding_norm: bool = False
    head_norms: bool = False
    norm_weights: bool = True
    encoder_blocks: int = 0
    relative_buckets: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        count_fields(self, channels=1, blocks=1, heads=1, vocabulary=1)
        count_fields(self, head_channels=0, key_value_heads=0, feed_forward=0, positions=0, encoder_blocks=0,
                     relative_buckets=0, tokens=0)
        shared, width = checked_heads("a transformer", self.channels, self.heads, self.key_value_heads,
                                      self.head_channels)
        derived = {"key_value_heads": shared, "head_channels": width,
                   "feed_forward": self.feed_forward or 4 * self.channels}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if (blocks := self.blocks + self.encoder_blocks) > MOST_BLOCKS:
            raise ValueError(f"a transformer of {blocks:,} blocks was asked for; zerosim plans up to {MOST_BLOCKS:,}, "
                             "so take fewer")
        require_biases("a transformer", self.biases)

    @property
    def query_channels(self) -> int:
        """H·d_h: channels of all queries together."""
        return self.heads * self.head_channels

    @property
    def key_channels(self) -> int:
        """H_kv·d_h: channels of all keys together, and of all values."""
        return self.key_value_heads * self.head_channels


def pad_vocabulary(transformer: Transformer, multiple: int) -> Transformer:
    """The transformer with its vocabulary rounded up to a multiple, as implementations do for faster products.

    >>> pad_vocabulary(Transformer(768, 12, 12, 50257), 128).vocabulary
    50304

    Source: Shoeybi et al. 2019 (Megatron-LM), section 5.1, where it is 128 times the tensor-parallel degree.
    Raises ValueError for a multiple below one.
    """
    step = checked_count("vocabulary_multiple", multiple, 1)
    return replace(transformer, vocabulary=transformer.vocabulary + -transformer.vocabulary % step)


# -- By kind -----------------------------------------------------------------------------------------------------------


GPT2_VOCABULARY = 50_257


def gpt(channels: int, blocks: int, heads: int, vocabulary: int = GPT2_VOCABULARY, positions: int = 1024,
        **others: Any) -> Transformer:
    """A GPT: learned positions, LayerNorm, biases everywhere, tied. Source: Radford et al. 2019, section 2.3."""
    return Transformer(channels, blocks, heads, vocabulary, positions=positions, fused=True, tokens=positions,
                       **others)


def opt(channels: int, blocks: int, heads: int, vocabulary: int = 50_272, tokens: int = 2048,
        **others: Any) -> Transformer:
    """An OPT: as GPT, and two positions more that stand for padding. Source: Zhang et al. 2022, table 1."""
    return Transformer(channels, blocks, heads, vocabulary, positions=tokens + 2, tokens=tokens, **others)


def bloom(channels: int, blocks: int, heads: int, vocabulary: int = 250_880, tokens: int = 2048,
          **others: Any) -> Transformer:
    """A BLOOM: ALiBi, a LayerNorm after the embedding, tied. Source: BigScience 2022, table 3 and section 3.2."""
    return Transformer(channels, blocks, heads, vocabulary, fused=True, embedding_norm=True, tokens=tokens,
                       **others)


def llama(channels: int, blocks: int, heads: int, vocabulary: int, feed_forward: int, key_value_heads: int = 0,
          tokens: int = 4096, *, biases: tuple[str, ...] = (), tied: bool = False, **others: Any) -> Transformer:
    """A Llama: rotary positions, RMSNorm, gated, no biases, not tied. Source: Touvron et al. 2023, section 2.2."""
    return Transformer(channels, blocks, heads, vocabulary, feed_forward=feed_forward, key_value_heads=key_value_heads,
                       biases=biases, layer_norm=False, gated=True, tied=tied, tokens=tokens, **others)


def t5(channels: int, blocks: int, heads: int, feed_forward: int, head_channels: int = 64, vocabulary: int = 32_128,
       tokens: int = 512, *, encoder_blocks: int = 0, relative_buckets: int = 32, **others: Any) -> Transformer:
    """A T5: n blocks in encoder and decoder, relative positions, RMSNorm. Source: Raffel et al. 2020, section 2.1."""
    return Transformer(channels, blocks, heads, vocabulary, feed_forward=feed_forward, head_channels=head_channels,
                       biases=(), layer_norm=False, encoder_blocks=encoder_blocks or blocks,
                       relative_buckets=relative_buckets, tokens=tokens, **others)


# -- The engine's configs, and a transformer of the same layers --------------------------------------------------------


def transformer_of(config: DecoderConfig, *, tied: bool) -> Transformer:
    """The transformer of a config that the engine runs; queries, keys and values are one matrix there.

    >>> transformer_of(GPTConfig(12, 768, 12, 1024, 50257), tied=True) == gpt(768, 12, 12)
    True
    """
    sizes = Transformer(config.channels, config.layers, config.heads, config.vocabulary, config.feed_forward,
                        fused=True, tied=tied, tokens=config.context)
    if isinstance(config, LlamaConfig):
        return replace(sizes, key_value_heads=config.key_value_heads, head_channels=config.head_channels,
                       biases=config.biases, layer_norm=False, gated=True, head_norms=config.head_norms)
    return replace(sizes, positions=config.context)


def config_of_transformer(of: Transformer, *, tokens: int | None = None, **numbers: Any) -> DecoderConfig:
    """The engine's config of a transformer: a GPTConfig or a LlamaConfig, with other ``numbers`` of it, as epsilon.

    ``tokens`` is the context of a model without learned positions, its own where nothing is said.
    Raises ValueError for a transformer that has other layers than these, and for more tokens than learned positions.
    """
    sizes = {"layers": of.blocks, "channels": of.channels, "heads": of.heads, "vocabulary": of.vocabulary,
             "feed_forward": of.feed_forward, **numbers}
    found: DecoderConfig | None = None
    if of.positions and of.layer_norm:
        found = GPTConfig(context=of.positions, **sizes)
    elif of.gated and not of.layer_norm:
        found = LlamaConfig(context=tokens or of.tokens or 1, key_value_heads=of.key_value_heads,
                            head_channels=of.head_channels, biases=of.biases, head_norms=of.head_norms, **sizes)
    if found is None or transformer_of(found, tied=of.tied) != replace(of, fused=True, tokens=found.context):
        raise ValueError("zerosim's layers make models of GPT-2's kind, with learned positions, biases and plain "
                         "blocks, and of Llama's, with rotary positions, RMSNorm and gates, and this is another")
    if found.learned_positions and tokens and tokens > of.positions:
        raise ValueError(f"a context of {tokens} was asked for, and there are {of.positions} learned positions; take "
                         "shorter sequences")
    return found
