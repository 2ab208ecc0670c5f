"""A transformer on paper: the sizes that fix its parameters, by kind, and those of a config of the engine's.

Legend: d channels, n blocks, H heads of d_h channels, H_kv key and value heads, F channels inside the feed-forward
network, V vocabulary, E experts.

Sources of the kinds: Radford et al. 2019 (GPT-2), Zhang et al. 2022 (OPT), BigScience 2022 (BLOOM), Touvron et al.
2023 (Llama 2), Ainslie et al. 2023 (grouped queries), Shazeer 2020 (gated feed-forward), Raffel et al. 2020 (T5), Wang
& Komatsuzaki 2021 (parallel blocks), Shazeer et al. 2017 (experts), DeepSeek-AI 2024 (latent attention, experts that
every token passes), Gemma Team 2024 (norms before and after), OLMo Team 2025 (norms after), Devlin et al. 2019 (BERT).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from zerosim.models.gpt import DecoderConfig, GPTConfig
from zerosim.models.llama import LlamaConfig
from zerosim.numerics.checks import LINEAR_LAYERS, checked_count, checked_heads, count_fields, require_biases

MOST_WIDE = 28  # bits of a size: products of two still have less than 2^62 bytes
MOST_BLOCKS = 10_000  # each is looked at, and so is every moment of its activations
# Where a block has norms: of what attention and network read, of what they give, of both, of the sums after them; or
# one for both, which then read the same.
NORMS = ("before", "after", "around", "last", "shared")


@dataclass(frozen=True, slots=True)
class Experts:
    """E feed-forward networks of `feed_forward` channels inside, of which each token passes `per_token`, by a router.

    `shared` are the channels inside of a network beside them that every token passes (0: none), with `shared_gate`
    scaled by a number of its own. The blocks of the places `dense` have a plain network.
    Raises ValueError for counts that are no whole numbers or too small, and for more per token than there are.
    """

    count: int
    per_token: int
    feed_forward: int
    shared: int = 0
    shared_gate: bool = False
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count_fields(self, count=1, per_token=1, feed_forward=1, shared=0)
        if self.per_token > self.count:
            raise ValueError(f"each token was asked to pass {self.per_token} of {self.count} experts; take at most all")

    @property
    def active(self) -> int:
        """Channels inside of all networks that a token passes."""
        return self.per_token * self.feed_forward + self.shared

    @property
    def router(self) -> int:
        """Numbers that a token's route is chosen by, and that scales the shared network."""
        return self.count + self.shared_gate


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values from a common vector of `key_value_rank` channels, and queries from one of `query_rank` (0:
    from the stream). Of a head's channels of query and key `rotary` are turned, and those of the key are one for all
    heads; values have `value_channels`. Source: DeepSeek-AI 2024 (DeepSeek-V2, arXiv:2405.04434), section 2.1.

    Raises ValueError for counts that are no whole numbers or too small.
    """

    key_value_rank: int
    rotary: int
    value_channels: int
    query_rank: int = 0

    def __post_init__(self) -> None:
        count_fields(self, key_value_rank=1, rotary=1, value_channels=1, query_rank=0)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes that fix a transformer's parameters, and those that a kind of model chooses.

    `head_channels` 0 is d/H, `key_value_heads` 0 is H, `feed_forward` 0 is 4d. `positions` are learned ones (0: none,
    or not learned), `biases` the linear layers that have one. `layer_norm`: weight and bias; else RMSNorm, a weight;
    neither without `norm_weights`. `fused`: one matrix makes queries, keys and values, and one a gate and what it
    gates. `head_norms`: RMSNorm of each head's query and key. `encoder_blocks` above 0 makes the n blocks a decoder
    that attends to an encoder of so many; `relative_buckets` are T5's learned position biases. `tokens` is the longest
    sequence of the pretrained model; 0 does not say.

    `norms` are where NORMS says, `parallel` blocks have attention and network beside each other, `last_norm` the head's
    own; `joint_norms`: of all heads' queries together, and of all keys. `activation` is the network's (left out: SiLU
    in a gate, else GELU), `caps` of "attention" and "logits" those that tanh limits. `embedding_channels` 0 is d, else
    two matrices change widths; `token_types` are learned too. Of BERT's pretraining, the head has a linear layer and
    a norm of its own (`masked_head`), and there is one for the next sentence (`next_sentence`). In `windowed` of the
    blocks a token attends to `window` tokens at most.

    Raises ValueError for counts that are no whole numbers or too small, for heads that do not divide the channels, for
    key and value heads that do not divide the heads, and for norms that are none of NORMS or do not go together.
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
    norms: str = "before"
    parallel: bool = False
    last_norm: bool = True
    joint_norms: bool = False
    activation: str = ""
    caps: tuple[str, ...] = ()
    embedding_channels: int = 0
    token_types: int = 0
    head_bias: bool = False
    masked_head: bool = False
    next_sentence: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: int = 0
    windowed: int = 0

    def __post_init__(self) -> None:
        count_fields(self, MOST_WIDE, channels=1, blocks=1, heads=1, vocabulary=1)
        count_fields(self, MOST_WIDE, head_channels=0, key_value_heads=0, feed_forward=0, positions=0, encoder_blocks=0,
                     relative_buckets=0, tokens=0, embedding_channels=0, token_types=0)
        shared, width = checked_heads("a transformer", self.channels, self.heads, self.key_value_heads,
                                      self.head_channels)
        derived = {"key_value_heads": shared, "head_channels": width,
                   "feed_forward": self.feed_forward or 4 * self.channels,
                   "activation": self.activation or ("silu" if self.gated else "gelu"),
                   "embedding_channels": self.embedding_channels or self.channels}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if (blocks := self.blocks + self.encoder_blocks) > MOST_BLOCKS:
            raise ValueError(f"a transformer of {blocks:,} blocks was asked for; zerosim plans up to {MOST_BLOCKS:,}, "
                             "so take fewer")
        require_biases("a transformer", self.biases)
        if self.norms not in NORMS or (self.norms == "shared" and not self.parallel):
            raise ValueError(f"a transformer was asked for norms={self.norms!r}{' and parallel' * self.parallel}; take "
                             f"one of {', '.join(NORMS)}, the last for parallel blocks alone")
        if self.latent is not None and self.latent.rotary > width:
            raise ValueError(f"of a head's {width} channels {self.latent.rotary} were asked to turn; take at most all")

    @property
    def query_channels(self) -> int:
        """H·d_h: channels of all queries together."""
        return self.heads * self.head_channels

    @property
    def key_channels(self) -> int:
        """H_kv·d_h: channels of all keys together."""
        return self.key_value_heads * self.head_channels

    @property
    def value_channels(self) -> int:
        """Channels of all values together: as of all keys, but with latent attention."""
        return self.key_channels if self.latent is None else self.heads * self.latent.value_channels

    @property
    def attention_channels(self) -> int:
        """Channels of the attention's output, which the projection reads: a value for each head of queries."""
        return self.value_channels * self.heads // self.key_value_heads

    @property
    def opening(self) -> dict[str, tuple[int, int]]:
        """The linear layers that make queries, keys and values, each (inputs, outputs), by name."""
        d, latent = self.channels, self.latent
        if latent is None:
            widths = {"q": self.query_channels, "k": self.key_channels, "v": self.value_channels}
            return {"qkv": (d, sum(widths.values()))} if self.fused else {name: (d, n) for name, n in widths.items()}
        rank, made = latent.key_value_rank, self.query_channels - self.heads * latent.rotary + self.value_channels
        queries = {"q": (d, self.query_channels)} if not latent.query_rank else {
            "q_a": (d, latent.query_rank), "q_b": (latent.query_rank, self.query_channels)}
        return {**queries, "kv_a": (d, rank + latent.rotary), "kv_b": (rank, made)}

    @property
    def normed_widths(self) -> dict[str, int]:
        """The norms inside of attention, and the channels that each has a weight for, by name."""
        if self.latent is not None:
            ranks = {"q_a": self.latent.query_rank, "kv_a": self.latent.key_value_rank}
            return {f"{name}_norm": rank for name, rank in ranks.items() if rank}
        widths = (self.query_channels, self.key_channels) if self.joint_norms else (self.head_channels,) * 2
        return dict(zip(("q_norm", "k_norm"), widths, strict=True)) if self.joint_norms or self.head_norms else {}

    def experts_of(self, block: int) -> Experts | None:
        """The experts of a block by its place; None where its network is plain."""
        return None if self.experts is None or block in self.experts.dense else self.experts


def pad_vocabulary(transformer: Transformer, multiple: int) -> Transformer:
    """The transformer with its vocabulary rounded up to a multiple, as implementations do for faster products.

    >>> pad_vocabulary(Transformer(768, 12, 12, 50257), 128).vocabulary
    50304

    Source: Shoeybi et al. 2019 (Megatron-LM), section 5.1, where it is 128 times the tensor-parallel degree.
    Raises ValueError for a multiple below one.
    """
    step = checked_count("vocabulary_multiple", multiple, 1)
    return replace(transformer, vocabulary=transformer.vocabulary + -transformer.vocabulary % step)


# -- The engine's configs, and a transformer of the same layers --------------------------------------------------------


def transformer_of(config: DecoderConfig, *, tied: bool) -> Transformer:
    """The transformer of a config that the engine runs; queries, keys and values are one matrix there.

    >>> found = transformer_of(GPTConfig(12, 768, 12, 1024, 50257), tied=True)
    >>> found == Transformer(768, 12, 12, 50257, positions=1024, fused=True, tokens=1024)
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
    Its activation may be another, and windows of attention: that changes what is computed, not what is kept and sent.
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
    if found is None or replace(transformer_of(found, tied=of.tied), activation=of.activation) != replace(
            of, fused=True, tokens=found.context, window=0, windowed=0):
        raise ValueError("zerosim's layers make models of GPT-2's kind, with learned positions, biases and plain "
                         "blocks, and of Llama's, with rotary positions, RMSNorm and gates, and this is another")
    if found.learned_positions and tokens and tokens > of.positions:
        raise ValueError(f"a context of {tokens} was asked for, and there are {of.positions} learned positions; take "
                         "shorter sequences")
    return found
