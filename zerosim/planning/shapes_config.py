"""A model on paper from a name or from a file: a preset, or the `config.json` of a Hugging Face checkpoint on disk.

A family is a row: the fields that a file must have, those that it may leave out and what they then are, and the
transformer that they make. What may be left out is what the `transformers` library's configuration classes (version
4.44, 2024) have a default for that is no number of the model's own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerosim.numerics.names import did_you_mean
from zerosim.planning.cuts import checked_count
from zerosim.planning.shapes import ModelShape, Transformer, model_of, pad_vocabulary
from zerosim.planning.shapes_presets import PRESETS

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's configuration file says: the fields it must have, those it may, and what they make.

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
    if not isinstance(kind, str) or kind not in FAMILIES:
        asked = "has no model_type" if kind is None else f"has the model_type {kind!r}, which zerosim cannot count"
        raise ValueError(f"{name} {asked}; it counts {', '.join(FAMILIES)}"
                         f"{did_you_mean(kind, FAMILIES, most=3)}")
    family = FAMILIES[kind]
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
    """What the file says, by the family's own names; null says nothing."""
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
    return Transformer(of["n_embd"], of["n_layer"], of["n_head"], of["vocab_size"], feed_forward=of["n_inner"],
                       positions=of["n_positions"], fused_qkv=True, tied=of["tie_word_embeddings"],
                       tokens=of["n_positions"])


def _opt(of: Fields) -> Transformer:
    inner = of["word_embed_proj_dim"] or of["hidden_size"]
    if inner != of["hidden_size"] or not of["do_layer_norm_before"]:
        raise ValueError(f"an OPT whose embedding has {inner} channels where its blocks have {of['hidden_size']}, or "
                         "whose LayerNorms come last, as opt-350m, is not counted here; take another OPT")
    return Transformer(of["hidden_size"], of["num_hidden_layers"], of["num_attention_heads"], of["vocab_size"],
                       feed_forward=of["ffn_dim"], positions=of["max_position_embeddings"] + 2,
                       tied=of["tie_word_embeddings"], tokens=of["max_position_embeddings"])


def _bloom(of: Fields) -> Transformer:
    return Transformer(of["hidden_size"], of["n_layer"], of["n_head"], of["vocab_size"], fused_qkv=True,
                       embedding_norm=True, tied=of["tie_word_embeddings"], tokens=of["seq_length"])


def _llama(of: Fields) -> Transformer:
    return _rotary(of, ("qkv", "projection") if of["attention_bias"] else ())


def _qwen2(of: Fields) -> Transformer:
    return _rotary(of, ("qkv",))


def _rotary(of: Fields, biases: tuple[str, ...], *, head_norms: bool = False) -> Transformer:
    mlp = ("feed_forward",) if of["mlp_bias"] else ()
    return Transformer(of["hidden_size"], of["num_hidden_layers"], of["num_attention_heads"], of["vocab_size"],
                       feed_forward=of["intermediate_size"], key_value_heads=of["num_key_value_heads"],
                       head_channels=of["head_dim"], biases=(*biases, *mlp), layer_norm=False, gated=True,
                       tied=of["tie_word_embeddings"], head_norms=head_norms, tokens=of["max_position_embeddings"])


def _qwen3(of: Fields) -> Transformer:
    return _rotary(of, ("qkv", "projection") if of["attention_bias"] else (), head_norms=True)


def _t5(of: Fields) -> Transformer:
    return Transformer(of["d_model"], of["num_decoder_layers"] or of["num_layers"], of["num_heads"], of["vocab_size"],
                       feed_forward=of["d_ff"], head_channels=of["d_kv"], biases=(), layer_norm=False,
                       gated=str(of["feed_forward_proj"]).startswith("gated-"), tied=of["tie_word_embeddings"],
                       encoder_blocks=of["num_layers"], relative_buckets=of["relative_attention_num_buckets"],
                       tokens=of["n_positions"])


ROTARY_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ROTARY_OPTIONS = {"num_key_value_heads": 0, "head_dim": 0, "max_position_embeddings": 0, "attention_bias": False,
                  "mlp_bias": False, "tie_word_embeddings": False}
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(("n_embd", "n_layer", "n_head", "n_positions", "vocab_size"),
                   {"n_inner": 0, "tie_word_embeddings": True, "add_cross_attention": False}, _gpt2,
                   {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                    "max_position_embeddings": "n_positions"}),
    "opt": Family(("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "max_position_embeddings",
                   "vocab_size"),
                  {"word_embed_proj_dim": 0, "do_layer_norm_before": True, "tie_word_embeddings": True}, _opt),
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
