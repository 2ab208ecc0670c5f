"""A model on paper: the parameter tensors of each unit, by name and shape, with exact counts.

Legend: d channels, n blocks, H heads of d_h channels, H_kv key and value heads, F channels inside the feed-forward
network, V vocabulary. A unit is what ZeRO gathers at a time: the embedding, each block, the head. Shapes are (inputs,
outputs) for the weight of a linear layer, (V, d) for an embedding.

Sources of the kinds: Radford et al. 2019 (GPT-2), Zhang et al. 2022 (OPT), BigScience 2022 (BLOOM), Touvron et al.
2023 (Llama 2), Ainslie et al. 2023 (grouped queries), Shazeer 2020 (gated feed-forward), Raffel et al. 2020 (T5).
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zerosim.numerics.checks import LINEAR_LAYERS, did_you_mean, require_biases
from zerosim.planning.activations import Block
from zerosim.planning.cuts import checked_count, count_fields

MOST_LAYERS = 100_000
MOST_BLOCKS = 10_000  # each is looked at, and so is every moment of its activations


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)  # no slots: what is counted is counted once, and kept
class UnitShape:
    """One unit: its tensors in the order of the flat vector."""

    name: str
    tensors: tuple[TensorShape, ...]

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes that fix a transformer's parameters, and those that a family chooses.

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
        if not self.head_channels and self.channels % self.heads:
            raise ValueError(f"a transformer of {self.channels} channels was asked for {self.heads} heads, which do "
                             "not divide them; take a number of heads that does, or say head_channels")
        derived = {"head_channels": self.channels // self.heads, "key_value_heads": self.heads,
                   "feed_forward": 4 * self.channels, "positions": 0, "encoder_blocks": 0, "relative_buckets": 0,
                   "tokens": 0}
        for name, value in derived.items():
            object.__setattr__(self, name, checked_count(name, getattr(self, name), 0) or value)
        if (blocks := self.blocks + self.encoder_blocks) > MOST_BLOCKS:
            raise ValueError(f"a transformer of {blocks:,} blocks was asked for; zerosim plans up to {MOST_BLOCKS:,}, "
                             "so take fewer")
        if self.heads % self.key_value_heads:
            raise ValueError(f"{self.heads} heads were asked to share {self.key_value_heads} key and value heads; each "
                             "of these serves as many heads as the others, so take a number that divides the heads")
        require_biases("a transformer", self.biases)

    @property
    def query_channels(self) -> int:
        """H·d_h: channels of all queries together."""
        return self.heads * self.head_channels

    @property
    def key_channels(self) -> int:
        """H_kv·d_h: channels of all keys together, and of all values."""
        return self.key_value_heads * self.head_channels

    def block(self, batch: int, tokens: int, itemsize: int = 2) -> Block:
        """One block and the batch that it sees, for `planning.activations` and `planning.flops`.

        Raises ValueError for counts below one, and for a model of encoder and decoder, whose blocks differ.
        """
        if self.encoder_blocks:
            raise ValueError("what a block keeps and computes is counted for decoders alone, and this model has "
                             f"{self.encoder_blocks} blocks of encoder beside {self.blocks} of decoder; its states and "
                             "its traffic are counted")
        return Block(batch, tokens, self.channels, self.heads, itemsize, query_channels=self.query_channels,
                     key_channels=self.key_channels, feed_forward=self.feed_forward, gated=self.gated,
                     rms=not self.layer_norm, head_norms=self.head_norms, biases=self.biases)


@dataclass(frozen=True)  # no slots: as UnitShape
class ModelShape:
    """A model's units, and pairs (unit, owner) of units that use another's tensors (tied weights), by their places.

    `transformer` has the sizes that activations and FLOPs need; None where only a number of parameters is known.
    """

    name: str
    units: tuple[UnitShape, ...]
    tied: tuple[tuple[int, int], ...] = ()
    transformer: Transformer | None = None

    @cached_property
    def unit_lengths(self) -> tuple[int, ...]:
        """Elements of each unit, without padding, as `closed_forms.Job` takes them."""
        return tuple(unit.parameters for unit in self.units)

    @property
    def parameters(self) -> int:
        """Elements of the model; tied tensors count once."""
        return sum(self.unit_lengths)

    @property
    def tensors(self) -> tuple[TensorShape, ...]:
        """All tensors, unit by unit."""
        return tuple(tensor for unit in self.units for tensor in unit.tensors)

    @property
    def largest_unit(self) -> UnitShape:
        """The unit that takes most when it is gathered; the first of several."""
        return max(self.units, key=lambda unit: unit.parameters)

    @property
    def largest_layer_parameters(self) -> int:
        """Elements of the largest single layer, weight and bias together: what DeepSpeed calls the largest layer."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.name.rpartition(".")[0] or tensor.name] += tensor.parameters
        return max(counts.values())


def model_of(name: str, transformer: Transformer) -> ModelShape:
    """The units of a transformer: the embedding, the blocks (an encoder's first), the head.

    >>> gpt2 = model_of("gpt2", Transformer(768, 12, 12, 50257, positions=1024, fused=True))
    >>> gpt2.parameters, gpt2.units[1].parameters, gpt2.tied
    (124439808, 7087872, ((13, 0),))

    Of T5 the decoder uses the embedding too, but for its tokens alone; that use is the first of all, and is not
    listed. A tied head uses the table that makes tokens into channels.
    """
    blocks = list(_blocks(transformer))
    units = (UnitShape("embed", tuple(_embedding(transformer))), *blocks,
             UnitShape("head", tuple(_head(transformer))))
    return ModelShape(name, units, ((len(units) - 1, 0),) if transformer.tied else (), transformer)


def model_of_parameters(parameters: int, largest_layer: int | None = None) -> ModelShape:
    """A model of which only the number of parameters is known: as many layers of the largest as go in, and the rest.

    >>> model_of_parameters(1000, 300).unit_lengths
    (300, 300, 300, 100)

    Without a largest layer it is one unit. Raises ValueError for counts below one, for a layer larger than the model,
    and for one so small that the model would have more than 100,000.
    """
    count = checked_count("parameters", parameters, 1)
    largest = count if largest_layer is None else checked_count("largest_layer", largest_layer, 1)
    if largest > count:
        raise ValueError(f"a largest layer of {largest:,} parameters was asked for in a model of {count:,}; take at "
                         "most the model's own")
    layers, rest = divmod(count, largest)
    if layers > MOST_LAYERS:
        raise ValueError(f"a largest layer of {largest:,} parameters makes {layers:,} layers of {count:,} parameters; "
                         f"zerosim plans models of up to {MOST_LAYERS:,}, so take a larger one")
    lengths = [largest] * layers + [rest] * bool(rest)
    units = tuple(UnitShape(f"layer{i}", (TensorShape(f"layer{i}.weight", (n,)),)) for i, n in enumerate(lengths))
    return ModelShape(f"{count:,} parameters", units)


def pad_vocabulary(transformer: Transformer, multiple: int) -> Transformer:
    """The transformer with its vocabulary rounded up to a multiple, as implementations do for faster products.

    >>> pad_vocabulary(Transformer(768, 12, 12, 50257), 128).vocabulary
    50304

    Source: Shoeybi et al. 2019 (Megatron-LM), section 5.1, where it is 128 times the tensor-parallel degree.
    Raises ValueError for a multiple below one.
    """
    step = checked_count("vocabulary_multiple", multiple, 1)
    return replace(transformer, vocabulary=transformer.vocabulary + -transformer.vocabulary % step)


def _embedding(of: Transformer) -> Iterator[TensorShape]:
    yield TensorShape("wte", (of.vocabulary, of.channels))
    if of.positions:
        yield TensorShape("wpe", (of.positions, of.channels))
    if of.embedding_norm:
        yield from _norm(of, "ln_embed")


def _head(of: Transformer) -> Iterator[TensorShape]:
    yield from _norm(of, "ln_f")
    if not of.tied:
        yield TensorShape("lm_head.weight", (of.channels, of.vocabulary))


def _blocks(of: Transformer) -> Iterator[UnitShape]:
    for stack, count in (("encoder", of.encoder_blocks), ("block", of.blocks)):
        for index in range(count):
            name = f"{stack}{index}"
            parts = [*_attention(of, f"{name}.attention", relative=index == 0)]
            if of.encoder_blocks and stack == "block":
                parts += _attention(of, f"{name}.cross_attention", relative=False)
            parts += _feed_forward(of, f"{name}.ffn")
            if stack == "encoder" and index == count - 1:  # the encoder's own last norm ends its last block
                parts += _norm(of, f"{name}.ln_f")
            yield UnitShape(name, tuple(parts))


def _attention(of: Transformer, name: str, *, relative: bool) -> Iterator[TensorShape]:
    yield from _norm(of, f"{name}.ln")
    widths = {"q": of.query_channels, "k": of.key_channels, "v": of.key_channels}
    for layer, width in {"qkv": sum(widths.values())}.items() if of.fused else widths.items():
        yield from _linear(of, f"{name}.{layer}", (of.channels, width), "qkv")
    if of.head_norms:
        yield from (TensorShape(f"{name}.{part}_norm.weight", (of.head_channels,)) for part in "qk")
    if relative and of.relative_buckets:
        yield TensorShape(f"{name}.relative.weight", (of.relative_buckets, of.heads))
    yield from _linear(of, f"{name}.projection", (of.query_channels, of.channels), "projection")


def _feed_forward(of: Transformer, name: str) -> Iterator[TensorShape]:
    yield from _norm(of, f"{name}.ln")
    widths = {"gate": of.feed_forward, "up": of.feed_forward} if of.gated else {"up": of.feed_forward}
    for layer, width in {"_".join(widths): sum(widths.values())}.items() if of.fused else widths.items():
        yield from _linear(of, f"{name}.{layer}", (of.channels, width), "feed_forward")
    yield from _linear(of, f"{name}.down", (of.feed_forward, of.channels), "feed_forward")


def _linear(of: Transformer, name: str, shape: tuple[int, int], kind: str) -> Sequence[TensorShape]:
    bias = [TensorShape(f"{name}.bias", shape[1:])] if kind in of.biases else []
    return [TensorShape(f"{name}.weight", shape), *bias]


def _norm(of: Transformer, name: str) -> Sequence[TensorShape]:
    parts = ("weight", "bias")[:(1 + of.layer_norm) * of.norm_weights]
    return [TensorShape(f"{name}.{part}", (of.channels,)) for part in parts]


# -- presets: the sizes of published transformers, each with its source -----------------------------------------------
# Sizes of published checkpoints are those of their configuration files; where a paper gives only channels, blocks and
# heads, the vocabulary and the positions are GPT-2's, and the comment says so.


GPT2_VOCABULARY = 50_257
MEGATRON_VOCABULARY = 51_200  # GPT-2's, padded to a multiple of 1024


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


PRESETS: Mapping[str, Transformer] = {
    # Radford et al. 2019, table 2; heads as in the published checkpoints.
    "gpt2": gpt(768, 12, 12),
    "gpt2-medium": gpt(1024, 24, 16),
    "gpt2-large": gpt(1280, 36, 20),
    "gpt2-xl": gpt(1600, 48, 25),
    # Brown et al. 2020, table 2.1; 2048 positions.
    "gpt3-2.7b": gpt(2560, 32, 32, positions=2048),
    "gpt3-6.7b": gpt(4096, 32, 32, positions=2048),
    "gpt3-175b": gpt(12_288, 96, 96, positions=2048),
    # Zhang et al. 2022, table 1. (OPT-350m, whose embedding is narrower than its blocks, is not of this shape.)
    "opt-125m": opt(768, 12, 12),
    "opt-1.3b": opt(2048, 24, 32),
    "opt-2.7b": opt(2560, 32, 32),
    "opt-6.7b": opt(4096, 32, 32),
    "opt-13b": opt(5120, 40, 40),
    "opt-30b": opt(7168, 48, 56),
    "opt-66b": opt(9216, 64, 72),
    "opt-175b": opt(12_288, 96, 96),
    # BigScience 2022, table 3.
    "bloom-560m": bloom(1024, 24, 16),
    "bloom-1b1": bloom(1536, 24, 16),
    "bloom-1b7": bloom(2048, 24, 16),
    "bloom-3b": bloom(2560, 30, 32),
    "bloom-7b1": bloom(4096, 30, 32),
    "bloom-176b": bloom(14_336, 70, 112),
    # Touvron et al. 2023, section 2.2 and table 1 (grouped queries); widths and heads as in the published checkpoints.
    "llama-2-7b": llama(4096, 32, 32, 32_000, 11_008),
    "llama-2-13b": llama(5120, 40, 40, 32_000, 13_824),
    "llama-2-70b": llama(8192, 80, 64, 32_000, 28_672, 8),
    # Grattafiori et al. 2024, table 3.
    "llama-3-8b": llama(4096, 32, 32, 128_256, 14_336, 8, 8192),
    "llama-3-70b": llama(8192, 80, 64, 128_256, 28_672, 8, 8192),
    "llama-3.1-405b": llama(16_384, 126, 128, 128_256, 53_248, 8, 131_072),
    # Jiang et al. 2023, table 1.
    "mistral-7b": llama(4096, 32, 32, 32_000, 14_336, 8, 32_768),
    # Yang et al. 2024, table 1; queries, keys and values have biases, and the small ones are tied.
    "qwen2-0.5b": llama(896, 24, 14, 151_936, 4864, 2, 32_768, biases=("qkv",), tied=True),
    "qwen2-7b": llama(3584, 28, 28, 152_064, 18_944, 4, 131_072, biases=("qkv",)),
    "qwen2-72b": llama(8192, 80, 64, 152_064, 29_568, 8, 131_072, biases=("qkv",)),
    # Qwen Team 2025 (Qwen3), table 1: blocks and heads, the small ones tied; widths as in the published checkpoints.
    "qwen3-0.6b": llama(1024, 28, 16, 151_936, 3072, 8, 40_960, head_channels=128, head_norms=True, tied=True),
    "qwen3-8b": llama(4096, 36, 32, 151_936, 12_288, 8, 40_960, head_channels=128, head_norms=True),
    # Raffel et al. 2020, section 3.7.
    "t5-small": t5(512, 6, 8, 2048),
    "t5-base": t5(768, 12, 12, 3072),
    "t5-large": t5(1024, 24, 16, 4096),
    "t5-3b": t5(1024, 24, 32, 16_384, 128),
    "t5-11b": t5(1024, 24, 128, 65_536, 128),
    # Rajbhandari et al. 2020, table 4: channels and blocks; appendix: heads; vocabulary and positions are GPT-2's.
    "zero-1.5b": gpt(1600, 48, 16),
    "zero-8b": gpt(3072, 72, 24),
    "zero-40b": gpt(6144, 88, 32),
    "zero-100b": gpt(8192, 125, 64),
    "zero-170b": gpt(8192, 212, 64),
    # Korthikanti et al. 2022, table 3: vocabulary 51,200, 2048 positions.
    "megatron-22b": gpt(6144, 48, 64, MEGATRON_VOCABULARY, 2048),
    "megatron-175b": gpt(12_288, 96, 96, MEGATRON_VOCABULARY, 2048),
    "megatron-530b": gpt(20_480, 105, 128, MEGATRON_VOCABULARY, 2048),
    "megatron-1t": gpt(25_600, 128, 160, MEGATRON_VOCABULARY, 2048),
}


# -- a preset's name, or the `config.json` of a Hugging Face checkpoint on disk ----------------------------------------
# A family is a row: the fields that a file must have, those that it may leave out and what they then are, and the
# transformer that they make. What may be left out is what the `transformers` library's configuration classes (version
# 4.44, 2024) have a default for that is no number of the model's own.


Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """The configuration file of a family: the fields it must have, those it may, and what they make.

    `aliases` are other names that files of the family use, and the field that each stands for.
    """

    required: tuple[str, ...]
    optional: Fields
    transformer: Callable[[Fields], Transformer]
    aliases: Mapping[str, str] = field(default_factory=dict)


def model_shape(source: str | Path, *, vocabulary_multiple: int = 1) -> ModelShape:
    """The model of a preset's name, of a configuration file, or of a folder that holds `config.json`.

    >>> model_shape("llama-2-7b").parameters, model_shape("gpt2", vocabulary_multiple=128).parameters
    (6738415616, 124475904)

    Raises ValueError for a name that is no preset and no file, and as `read_config` does.
    """
    text, path = str(source), Path(source)
    if text not in PRESETS and text.strip() and (path.suffix == ".json" or path.exists() or "/" in text):
        return read_config(path, vocabulary_multiple=vocabulary_multiple)
    if text not in PRESETS:
        raise ValueError(f"no model is called {text!r}, and there is no such file; the presets are {', '.join(PRESETS)}"
                         f"{did_you_mean(text, PRESETS, most=3)}")
    return model_of(text, pad_vocabulary(PRESETS[text], vocabulary_multiple))


def read_config(path: str | Path, *, vocabulary_multiple: int = 1) -> ModelShape:
    """The model of a `config.json` on disk, or of the folder that holds one.

    Raises ValueError for a file that is not there or holds no JSON object, for a model type without a family here, for
    fields that are missing, all of them by name, and for shapes that are impossible.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        fields = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} was asked for, and is not there; give the path of a model's config.json") from None
    except OSError as error:
        raise ValueError(f"{file} was asked for, and cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's, and one for too deep nesting
        raise ValueError(f"{file} is not JSON: {error}; give the path of a model's config.json") from None
    return model_of_config(fields, name=str(file), vocabulary_multiple=vocabulary_multiple)


def model_of_config(fields: Any, *, name: str = "config.json", vocabulary_multiple: int = 1) -> ModelShape:
    """The model of a configuration's fields, as `json.loads` gives them; raises ValueError as `read_config` does.

    >>> model_of_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...                  "vocab_size": 50257}).parameters
    124439808
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name} holds a JSON {type(fields).__name__}; a model's configuration is an object, with "
                         "model_type and the model's sizes")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        asked = "has no model_type" if kind is None else f"has the model_type {kind!r}, which zerosim cannot count"
        raise ValueError(f"{name} {asked}; it counts {', '.join(MODEL_TYPES)}"
                         f"{did_you_mean(kind, MODEL_TYPES, most=3)}")
    family = MODEL_TYPES[kind]
    said = _said(family, fields, name)
    if missing := [required for required in family.required if required not in said]:
        raise ValueError(f"{name} lacks {', '.join(missing)}; a configuration of {kind} has "
                         f"{', '.join(family.required)}")
    try:
        transformer = family.transformer(_checked(family, said))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return model_of(name, pad_vocabulary(transformer, vocabulary_multiple))


def _said(family: Family, fields: Fields, where: str) -> dict[str, Any]:
    """The fields that the file gives, by the family's own names; null gives nothing."""
    said: dict[str, Any] = {}
    for key, value in ((key, value) for key, value in fields.items() if value is not None):
        name = family.aliases.get(key, key)
        if name in said and said[name] != value:
            raise ValueError(f"{where} says {name}={said[name]!r} and {key}={value!r}, two names of one; say one")
        said[name] = value
    return said


def _checked(family: Family, said: Fields) -> dict[str, Any]:
    """The family's fields, said or left out: counts of at least 1, others of the kind that they have if left out."""
    found = dict(family.optional)
    for name in said.keys() & {*family.required, *family.optional}:
        value, kind = said[name], type(family.optional.get(name, 0))
        if kind is not int and not isinstance(value, kind):
            raise ValueError(f"{name} must be {'true or false' if kind is bool else 'a text'}, got {value!r}")
        if kind is int and isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, got {value}")
        found[name] = checked_count(name, value, 1) if kind is int else value
    return found


def _gpt2(of: Fields) -> Transformer:
    if of["add_cross_attention"]:
        raise ValueError("a GPT-2 with add_cross_attention attends to an encoder, and its layers for that are not "
                         "counted here; take one without")
    return gpt(of["n_embd"], of["n_layer"], of["n_head"], of["vocab_size"], of["n_positions"],
               feed_forward=of["n_inner"], tied=of["tie_word_embeddings"])


def _opt(of: Fields) -> Transformer:
    inner = of["word_embed_proj_dim"] or of["hidden_size"]
    if inner != of["hidden_size"] or not of["do_layer_norm_before"] or of["_remove_final_layer_norm"]:
        raise ValueError(f"an OPT whose embedding has {inner} channels where its blocks have {of['hidden_size']}, or "
                         "whose LayerNorms come last, as opt-350m, or which lacks the last one, is not counted here; "
                         "take another OPT")
    return opt(of["hidden_size"], of["num_hidden_layers"], of["num_attention_heads"], of["vocab_size"],
               of["max_position_embeddings"], feed_forward=of["ffn_dim"], tied=of["tie_word_embeddings"],
               biases=LINEAR_LAYERS if of["enable_bias"] else (), norm_weights=of["layer_norm_elementwise_affine"])


def _bloom(of: Fields) -> Transformer:
    return bloom(of["hidden_size"], of["n_layer"], of["n_head"], of["vocab_size"], of["seq_length"],
                 tied=of["tie_word_embeddings"])


def _llama(of: Fields, *, always: tuple[str, ...] = (), head_norms: bool = False) -> Transformer:
    asked = {"qkv": of["attention_bias"], "projection": of["attention_bias"], "feed_forward": of["mlp_bias"]}
    return llama(of["hidden_size"], of["num_hidden_layers"], of["num_attention_heads"], of["vocab_size"],
                 of["intermediate_size"], of["num_key_value_heads"], of["max_position_embeddings"],
                 biases=tuple(layer for layer in LINEAR_LAYERS if asked[layer] or layer in always),
                 tied=of["tie_word_embeddings"], head_channels=of["head_dim"], head_norms=head_norms)


def _qwen2(of: Fields) -> Transformer:
    return _llama({**of, "attention_bias": False}, always=("qkv",))


def _qwen3(of: Fields) -> Transformer:
    return _llama(of, head_norms=True)


def _t5(of: Fields) -> Transformer:
    return t5(of["d_model"], of["num_decoder_layers"] or of["num_layers"], of["num_heads"], of["d_ff"], of["d_kv"],
              of["vocab_size"], of["n_positions"], encoder_blocks=of["num_layers"],
              relative_buckets=of["relative_attention_num_buckets"], tied=of["tie_word_embeddings"],
              gated=str(of["feed_forward_proj"]).startswith("gated-"))


ROTARY_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ROTARY_OPTIONS = {"num_key_value_heads": 0, "head_dim": 0, "max_position_embeddings": 0, "attention_bias": False,
                  "mlp_bias": False, "tie_word_embeddings": False}
MODEL_TYPES: Mapping[str, Family] = {
    "gpt2": Family(("n_embd", "n_layer", "n_head", "n_positions", "vocab_size"),
                   {"n_inner": 0, "tie_word_embeddings": True, "add_cross_attention": False}, _gpt2,
                   {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                    "max_position_embeddings": "n_positions"}),
    "opt": Family(("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "max_position_embeddings",
                   "vocab_size"),
                  {"word_embed_proj_dim": 0, "do_layer_norm_before": True, "tie_word_embeddings": True,
                   "enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
                  _opt),
    "bloom": Family(("hidden_size", "n_layer", "n_head", "vocab_size"), {"seq_length": 0, "tie_word_embeddings": True},
                    _bloom, {"n_embed": "hidden_size", "num_hidden_layers": "n_layer",
                             "num_attention_heads": "n_head"}),
    "llama": Family(ROTARY_FIELDS, ROTARY_OPTIONS, _llama),
    # Left out, these have 8 or 32 key and value heads, and 128 channels in each: numbers of one model.
    "mistral": Family((*ROTARY_FIELDS, "num_key_value_heads"), ROTARY_OPTIONS, _llama),
    "qwen2": Family((*ROTARY_FIELDS, "num_key_value_heads"), ROTARY_OPTIONS, _qwen2),
    "qwen3": Family((*ROTARY_FIELDS, "num_key_value_heads", "head_dim"), ROTARY_OPTIONS, _qwen3),
    "t5": Family(("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size"),
                 {"num_decoder_layers": 0, "relative_attention_num_buckets": 32, "n_positions": 0,
                  "feed_forward_proj": "relu", "tie_word_embeddings": True}, _t5),
}
