"""A model on paper: the parameter tensors of each unit, by name and shape, with exact counts.

Legend: d channels, n blocks, H heads of d_h channels, H_kv key and value heads, F channels inside the feed-forward
network, V vocabulary. A unit is what ZeRO gathers at a time: the embedding, each block, the head. Shapes are (inputs,
outputs) for the weight of a linear layer, (V, d) for an embedding.

The sizes of a transformer, and the types that configurations are of, are `zerosim.models`' own.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from zerosim.models.model_types import CONFIG, names_config, read_fields, text_model, transformer_of_fields
from zerosim.models.transformer import Experts, Transformer, pad_vocabulary
from zerosim.numerics.checks import checked_count, did_you_mean
from zerosim.numerics.files import facts

MOST_LAYERS = 100_000
Counted = TypeVar("Counted")
EXPERTS = ".experts"  # in the names of tensors that stack one matrix for each expert


class TensorShape(NamedTuple):
    """One parameter tensor, named inside its unit. `frozen`: no gradient, no optimizer's state; `bits` at rest of each
    element, where they are not those of the policy's compute format (0), what a quantization adds included."""

    name: str
    shape: tuple[int, ...]
    frozen: bool = False
    bits: Fraction | int = 0

    @property
    def parameters(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def nbytes(self, itemsize: int, padded: int = 0) -> int:
        """Bytes at rest, where an element of the compute format has `itemsize`; of `padded` elements, if there are."""
        elements = padded or self.parameters
        return math.ceil(elements * self.bits / 8) if self.bits else elements * itemsize


@dataclass(frozen=True)  # no slots: what is counted is counted once, and kept
class UnitShape:
    """One unit: its tensors in the order of the flat vector."""

    name: str
    tensors: tuple[TensorShape, ...]

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)


@dataclass(frozen=True)  # no slots: as UnitShape
class ModelShape:
    """A model's units, and pairs (unit, owner) of units that use another's tensors (tied weights), by their places.

    `transformer` has the sizes that activations and FLOPs need; None where only a number of parameters is known.
    """

    name: str
    units: tuple[UnitShape, ...]
    tied: tuple[tuple[int, int], ...] = ()
    transformer: Transformer | None = None

    @property
    def blocks(self) -> tuple[UnitShape, ...]:
        """The units that are gathered and recomputed one by one."""
        return self.units if self.transformer is None else self.units[1:-1]

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """Of each block the place of the first one with equal tensors."""
        first = dict[tuple[TensorShape, ...], int]()
        return tuple(first.setdefault(block.tensors, place) for place, block in enumerate(self.blocks))

    def of_blocks(self, count: Callable[[int], Counted]) -> list[Counted]:
        """A count of each block, by its place, made once for equal ones."""
        counted = {place: count(place) for place in dict.fromkeys(self.first_equal)}
        return [counted[place] for place in self.first_equal]

    @cached_property
    def unit_lengths(self) -> tuple[int, ...]:
        """Elements of each unit, without padding, as `closed_forms.Job` takes them."""
        lengths = self.of_blocks(lambda place: self.blocks[place].parameters)
        return tuple(lengths) if self.transformer is None else (
            self.units[0].parameters, *lengths, self.units[-1].parameters)

    @property
    def parameters(self) -> int:
        """Elements of the model; tied tensors count once."""
        return sum(self.unit_lengths)

    @cached_property
    def trainable_parameters(self) -> int:
        """Elements that are not frozen."""
        return self.parameters - sum(tensor.parameters for tensor in self.tensors if tensor.frozen)

    @property
    def has_frozen(self) -> bool:
        """True where some tensor is frozen."""
        return self.trainable_parameters < self.parameters

    @cached_property
    def first_trained(self) -> int:
        """The place of the first unit with a tensor that is not frozen: backward ends there."""
        return next((place for place, unit in enumerate(self.units)
                     if not all(tensor.frozen for tensor in unit.tensors)), len(self.units))

    @cached_property
    def active_parameters(self) -> int:
        """Elements without those of experts that a token does not pass.

        >>> model_shape("mixtral-8x7b").active_parameters, model_shape("gpt2").active_parameters
        (12879925248, 124439808)
        """
        experts = None if self.transformer is None else self.transformer.experts
        if experts is None:
            return self.parameters
        stacked = sum(tensor.parameters for tensor in self.tensors if f"{EXPERTS}." in tensor.name)
        return self.parameters - stacked + stacked * experts.per_token // experts.count

    @cached_property
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
        counts: Counter[tuple[str, str]] = Counter()
        for unit in self.units:
            for tensor in unit.tensors:
                counts[unit.name, tensor.name.rpartition(".")[0] or tensor.name] += tensor.parameters
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
    units = tuple(UnitShape(f"layer{i}", (TensorShape("weight", (n,)),)) for i, n in enumerate(lengths))
    return ModelShape(f"{count:,} parameters", units)


def _embedding(of: Transformer) -> Iterator[TensorShape]:
    yield TensorShape("wte", (of.vocabulary, of.embedding_channels))
    for name, rows in {"wpe": of.positions, "wte_types": of.token_types}.items():
        if rows:
            yield TensorShape(name, (rows, of.channels))
    if of.embedding_channels != of.channels:
        yield TensorShape("project_in.weight", (of.embedding_channels, of.channels))
    if of.embedding_norm:
        yield from _norm(of, "ln_embed")


def _head(of: Transformer) -> Iterator[TensorShape]:
    square = (of.channels, of.channels)
    if of.last_norm:
        yield from _norm(of, "ln_f")
    if of.next_sentence:
        yield from (*_weights("pooler", square, bias=True), *_weights("next_sentence", (of.channels, 2), bias=True))
    if of.embedding_channels != of.channels:
        yield TensorShape("project_out.weight", (of.channels, of.embedding_channels))
    if of.masked_head:
        yield from (*_weights("transform", square, bias=True), *_norm(of, "transform.ln"))
    if not of.tied:
        yield TensorShape("lm_head.weight", (of.embedding_channels, of.vocabulary))
    if of.head_bias:
        yield TensorShape("lm_head.bias", (of.vocabulary,))


def _blocks(of: Transformer) -> Iterator[UnitShape]:
    """The blocks; equal ones share their tensors."""
    for stack, count in (("encoder", of.encoder_blocks), ("block", of.blocks)):
        kinds = dict[tuple[Any, ...], tuple[TensorShape, ...]]()
        for index in range(count):
            # the encoder's own last norm ends its last block
            kind = of.experts_of(index), index == 0, stack == "encoder" and index == count - 1
            if kind not in kinds:
                kinds[kind] = tuple(_block(of, *kind, across=of.encoder_blocks > 0 and stack == "block"))
            yield UnitShape(f"{stack}{index}", kinds[kind])


def _block(of: Transformer, experts: Experts | None, first: bool, ends: bool, *, across: bool) -> list[TensorShape]:
    """The tensors of one block, the ``first`` of its stack, or one that ``ends`` an encoder; in a decoder's attention
    goes ``across`` to the encoder too."""
    parts = _normed(of, "attention", _attention(of, "attention", relative=first))
    if across:
        parts += _normed(of, "cross_attention", _attention(of, "cross_attention", relative=False))
    network = _network(of, "ffn", of.feed_forward) if experts is None else _sparse(of, experts)
    parts += _normed(of, "ffn", network)
    return [*parts, *(_norm(of, "ln_f") if ends else ())]


def _normed(of: Transformer, name: str, layers: Iterator[TensorShape]) -> list[TensorShape]:
    """A part of a block with its norms: before it, after it, or both; one that is shared is the attention's."""
    before = of.norms in ("before", "around") or (of.norms == "shared" and name.endswith("attention"))
    after = {"after": "ln_after", "around": "ln_after", "last": "ln"}.get(of.norms)
    return [*(_norm(of, f"{name}.ln") if before else ()), *layers, *(_norm(of, f"{name}.{after}") if after else ())]


def _attention(of: Transformer, name: str, *, relative: bool) -> Iterator[TensorShape]:
    for layer, shape in of.opening.items():  # of latent attention what leads to the latents alone has biases
        bias = "qkv" in of.biases and (of.latent is None or layer.endswith("_a"))
        yield from _weights(f"{name}.{layer}", shape, bias=bias)
    yield from (tensor for part, width in of.normed_widths.items() for tensor in _norm(of, f"{name}.{part}", width))
    if relative and of.relative_buckets:
        yield TensorShape(f"{name}.relative.weight", (of.relative_buckets, of.heads))
    yield from _weights(f"{name}.projection", (of.attention_channels, of.channels), bias="projection" in of.biases)


def _network(of: Transformer, name: str, inside: int, stack: tuple[int, ...] = ()) -> Iterator[TensorShape]:
    """A feed-forward network, or a stack of so many, which have no biases."""
    widths = {"gate": inside, "up": inside} if of.gated else {"up": inside}
    bias = "feed_forward" in of.biases and not stack
    for layer, width in {"_".join(widths): sum(widths.values())}.items() if of.fused else widths.items():
        yield from _weights(f"{name}.{layer}", (of.channels, width), bias, stack)
    yield from _weights(f"{name}.down", (inside, of.channels), bias, stack)


def _sparse(of: Transformer, experts: Experts) -> Iterator[TensorShape]:
    yield from _weights("ffn.router", (of.channels, experts.count))
    yield from _network(of, f"ffn{EXPERTS}", experts.feed_forward, (experts.count,))
    if experts.shared:
        yield from _network(of, "ffn.shared", experts.shared)
    if experts.shared_gate:
        yield from _weights("ffn.shared_gate", (of.channels, 1))


def _weights(name: str, shape: tuple[int, int], bias: bool = False, stack: tuple[int, ...] = ()) -> list[TensorShape]:
    """Those of a linear layer, or of a stack of so many."""
    biases = [TensorShape(f"{name}.bias", shape[1:])] if bias else []
    return [TensorShape(f"{name}.weight", stack + shape), *biases]


def _norm(of: Transformer, name: str, width: int = 0) -> Sequence[TensorShape]:
    parts = ("weight", "bias")[:(1 + of.layer_norm) * of.norm_weights]
    return [TensorShape(f"{name}.{part}", (width or of.channels,)) for part in parts]


# -- presets: the sizes of published transformers ----------------------------------------------------------------------


class _Presets(Mapping[str, Transformer]):
    """Published transformers by name, each read when it is asked for: models.toml has their configurations' fields."""

    @cached_property
    def _fields(self) -> Mapping[str, Mapping[str, Any]]:
        rows = facts(__package__, "models")["models"]
        return {name: row["common"] | own for row in rows for name, own in row["of"].items()}

    def __getitem__(self, name: str) -> Transformer:
        return transformer_of_fields(name, self._fields[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


PRESETS: Mapping[str, Transformer] = _Presets()


# What hubs add to a model's name, in front of a version, and the version.
FOR_WHAT = re.compile(r"-(hf|base|chat|instruct|it|uncased)(?=-v0\.\d$|$)|-v0\.\d$")

# -- A preset's name, or the `config.json` of a Hugging Face checkpoint on disk ----------------------------------------


def model_shape(source: str | Path, *, vocabulary_multiple: int = 1) -> ModelShape:
    """The model of a preset's name, also as a hub writes it, of a configuration file, or of a folder that holds
    `config.json`.

    >>> model_shape("llama-2-7b").parameters, model_shape("gpt2", vocabulary_multiple=128).parameters
    (6738415616, 124475904)

    Raises ValueError for a name that is no preset and no file, as `model_of_config`
    does, and for a file that is not there or is not JSON.
    """
    text = str(source)
    preset = text if text in PRESETS or exists(text) else _as_published(text)
    if preset in PRESETS:
        return model_of(preset, pad_vocabulary(PRESETS[preset], vocabulary_multiple))
    if names_config(text):
        name, fields = read_fields(text)
        return model_of_config(fields, name=name, vocabulary_multiple=vocabulary_multiple)
    raise ValueError(f"no model is called {text!r}, and there is no such file; of those that zerosim "
                     f"models lists {len(PRESETS)} can be planned{did_you_mean(text, PRESETS, most=3)}")


def _as_published(text: str) -> str:
    """The preset of a name as the model's hub writes it, with its owner and what it was trained further for, which
    changes no size: meta-llama/Llama-2-7b-chat-hf is llama-2-7b. Another text as it is."""
    name, shorter = "", text.rpartition("/")[2].lower().removeprefix("meta-")
    while name != shorter and shorter not in PRESETS:
        name, shorter = shorter, FOR_WHAT.sub("", shorter, count=1)
    return shorter if shorter in PRESETS else text


def model_of_config(fields: Any, *, name: str = CONFIG, vocabulary_multiple: int = 1) -> ModelShape:
    """The model of a configuration's fields, as `json.loads` gives them.

    >>> model_of_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...                  "vocab_size": 50257}).parameters
    124439808

    Raises ValueError for what is no JSON object, for a model type without a row in `zerosim.models.model_types`, for
    fields that are missing, all of them by name, and for shapes that are impossible.
    """
    name, fields = text_model(name, fields)
    return model_of(name, pad_vocabulary(transformer_of_fields(name, fields), vocabulary_multiple))
