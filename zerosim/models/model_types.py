"""Model types, each a row: the keys of its config.json, what the engine runs of it, and the names of its weights.

The rows stand in ``model_types.toml``, with their sources. A row serves all who read configurations:
`from_hugging_face` makes a model that the engine trains, the planner counts it (`zerosim.planning.shapes`), and weights
go into files and come out of them under the names that they have there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any

from zerosim.models.gpt import Decoder, DecoderConfig
from zerosim.models.llama import decoder
from zerosim.models.rotary import LinearScaling, Llama3Scaling, RotaryScaling
from zerosim.models.stored import ONE_FILE, WEIGHTS_INDEX, StoredNames, find_weights, has_weights
from zerosim.models.transformer import Experts, LatentAttention, Transformer, config_of_transformer
from zerosim.numerics.checks import LINEAR_LAYERS, checked_count, require_count
from zerosim.numerics.files import facts, json_of

CONFIG = "config.json"
OTHER_WEIGHTS = re.compile(  # where the usual ones are not there
    r".*\.(safetensors|gguf)|(pytorch_model|model|consolidated|tf_model|flax_model).*\.(bin|pth?|h5|msgpack|index\.json)")
Fields = Mapping[str, Any]
Names = Sequence[tuple[str, Sequence[str], bool]]  # a pattern here, the names in files, whether transposed


@dataclass(frozen=True, slots=True)
class Runs:
    """The keys of a model type's configurations that the engine needs beside the sizes.

    ``keys`` are read, with what they are where they are left out (null is said, and stays None). ``numbers`` computes
    further fields of a config from them, from the transformer and from the longest sequence, and raises ValueError for
    what the engine has not. ``only``: keys that change what is computed, each with the values that the engine has.
    """

    keys: Fields
    numbers: Callable[[Fields, Transformer, int], dict[str, Any]]
    only: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class ModelType:
    """The configuration file of a model type: the fields it must have, those it may, and what they make.

    `aliases` are other names that files of the type use, and the field that each stands for. Of what may be left out
    the value shows the kind; None: a list, which `transformer` reads. `runs` is None for a type of which the engine has
    not the layers: it is counted alone.
    """

    required: tuple[str, ...]
    optional: Fields
    transformer: Callable[[Fields], Transformer]
    aliases: Mapping[str, str] = field(default_factory=dict)
    runs: Runs | None = None


# -- Model types: what is counted --------------------------------------------------------------------------------------


def _sized(of: Fields, **others: Any) -> Transformer:
    """A transformer by the keys that most types have, and ``others``."""
    return Transformer(of["hidden_size"], of["num_hidden_layers"], of["num_attention_heads"], of["vocab_size"],
                       **{"tied": of["tie_word_embeddings"], "tokens": of["max_position_embeddings"],
                          "activation": of.get("hidden_act", ""), **others})


def _gpt2(of: Fields) -> Transformer:
    if of["add_cross_attention"]:
        raise ValueError("a GPT-2 with add_cross_attention attends to an encoder, and its layers for that are not "
                         "counted here; take one without")
    return Transformer(of["n_embd"], of["n_layer"], of["n_head"], of["vocab_size"], of["n_inner"], fused=True,
                       positions=of["n_positions"], tokens=of["n_positions"], tied=of["tie_word_embeddings"],
                       activation=of["activation_function"])


def _opt(of: Fields) -> Transformer:
    """Two positions more than tokens stand for padding."""
    before = of["do_layer_norm_before"]
    return _sized(of, feed_forward=of["ffn_dim"], positions=of["max_position_embeddings"] + 2,
                  biases=LINEAR_LAYERS if of["enable_bias"] else (), norm_weights=of["layer_norm_elementwise_affine"],
                  norms="before" if before else "last", last_norm=before and not of["_remove_final_layer_norm"],
                  embedding_channels=of["word_embed_proj_dim"], activation=of["activation_function"])


def _bloom(of: Fields) -> Transformer:
    return Transformer(of["hidden_size"], of["n_layer"], of["n_head"], of["vocab_size"], fused=True,
                       embedding_norm=True, tied=of["tie_word_embeddings"], tokens=of["seq_length"])


def _llama(of: Fields, *, always: tuple[str, ...] = (), **others: Any) -> Transformer:
    attention_bias = of.get("attention_bias", False)  # keys that some types have not
    asked = {"qkv": of.get("qkv_bias", attention_bias), "projection": attention_bias,
             "feed_forward": of.get("mlp_bias", False)}
    biases = tuple(layer for layer in LINEAR_LAYERS if asked[layer] or layer in always)
    return _sized(of, **{"feed_forward": of["intermediate_size"], "key_value_heads": of.get("num_key_value_heads", 0),
                         "head_channels": of.get("head_dim", 0), "biases": biases, "layer_norm": False, "gated": True,
                         **others})


def _mixtral(of: Fields) -> Transformer:
    return _llama(of, experts=Experts(of["num_local_experts"], of["num_experts_per_tok"], of["intermediate_size"]))


def _qwen_moe(of: Fields, **others: Any) -> Transformer:
    shared, sparse = of.get("shared_expert_intermediate_size", 0), of["decoder_sparse_step"]
    dense = (i for i in range(of["num_hidden_layers"]) if i in (of["mlp_only_layers"] or ()) or (i + 1) % sparse)
    return _llama(of, experts=Experts(of["num_experts"], of["num_experts_per_tok"], of["moe_intermediate_size"], shared,
                                      bool(shared), tuple(dense)), **others)


def _llama4(of: Fields) -> Transformer:
    """Of a sparse block each expert, and the network beside them, has intermediate_size channels inside."""
    inside, step, blocks = of["intermediate_size"], of["interleave_moe_layer_step"], of["num_hidden_layers"]
    sparse = range(step - 1, blocks, step) if of["moe_layers"] is None else of["moe_layers"]
    dense = tuple(i for i in range(blocks) if i not in sparse)
    return _llama(of, feed_forward=of["intermediate_size_mlp"], experts=Experts(
        of["num_local_experts"], of["num_experts_per_tok"], inside, inside, dense=dense))


def _deepseek(of: Fields) -> Transformer:
    """Without the layers that predict further tokens (num_nextn_predict_layers): `transformers` makes none either."""
    inside, first, step = of["moe_intermediate_size"], of["first_k_dense_replace"], of["moe_layer_freq"]
    dense = tuple(i for i in range(of["num_hidden_layers"]) if i < first or i % step)
    return _llama(
        of, head_channels=of["qk_nope_head_dim"] + of["qk_rope_head_dim"],
        experts=Experts(of["n_routed_experts"], of["num_experts_per_tok"], inside, of["n_shared_experts"] * inside,
                        dense=dense),
        latent=LatentAttention(of["kv_lora_rank"], of["qk_rope_head_dim"], of["v_head_dim"], of["q_lora_rank"]))


def _phi(of: Fields) -> Transformer:
    return _sized(of, feed_forward=of["intermediate_size"], key_value_heads=of["num_key_value_heads"],
                  head_norms=of["qk_layernorm"], norms="shared", parallel=True, head_bias=True)


def _gpt_neox(of: Fields) -> Transformer:
    return _sized(of, feed_forward=of["intermediate_size"], fused=True, parallel=of["use_parallel_residual"],
                  biases=LINEAR_LAYERS if of["attention_bias"] else ("feed_forward",))


def _falcon(of: Fields) -> Transformer:
    new, parallel = of["new_decoder_architecture"], of["parallel_attn"]
    shared = parallel and (of["num_ln_in_parallel_attn"] or 1 + new) == 1
    return _sized(of, feed_forward=of["ffn_hidden_size"], fused=True, parallel=parallel, activation=of["activation"],
                  key_value_heads=of["num_kv_heads"] if new else int(of["multi_query"]),
                  biases=LINEAR_LAYERS if of["bias"] else (), norms="shared" if shared else "before")


def _bert(of: Fields) -> Transformer:
    makes = of["architectures"] or ["BertForPreTraining"]
    if makes not in (["BertForPreTraining"], ["BertForMaskedLM"]):
        raise ValueError(f"architectures={makes!r} is a BERT with another head; zerosim counts those of pretraining: "
                         "write BertForPreTraining, which predicts masked tokens and whether a sentence is the next, "
                         "or BertForMaskedLM")
    if of["add_cross_attention"] or of["is_decoder"] or not of["tie_word_embeddings"]:
        raise ValueError("a BERT with is_decoder, add_cross_attention or without tie_word_embeddings is not counted "
                         "here; take an encoder whose head is tied")
    return _sized(of, feed_forward=of["intermediate_size"], positions=of["max_position_embeddings"],
                  embedding_norm=True, norms="last", last_norm=False, token_types=of["type_vocab_size"],
                  head_bias=True, masked_head=True, next_sentence=makes == ["BertForPreTraining"])


def _t5(of: Fields) -> Transformer:
    gate, _, activation = str(of["feed_forward_proj"]).rpartition("-")
    return Transformer(of["d_model"], of["num_decoder_layers"] or of["num_layers"], of["num_heads"], of["vocab_size"],
                       of["d_ff"], head_channels=of["d_kv"], biases=(), layer_norm=False, gated=gate == "gated",
                       tied=of["tie_word_embeddings"], encoder_blocks=of["num_layers"], activation=activation,
                       relative_buckets=of["relative_attention_num_buckets"], tokens=of["n_positions"])


# -- Model types: what the engine runs ---------------------------------------------------------------------------------


def _llama_numbers(of: Fields, model: Transformer, tokens: int) -> dict[str, Any]:
    rotary = _rotary_fields(of)
    older = rotary.pop("type", "default")
    kind = rotary.pop("rope_type", older)
    base = rotary.pop("rope_theta", of["rope_theta"])
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ValueError(f"rope_type={kind!r} turns queries and keys as the engine cannot; it has "
                         f"{', '.join(SCALINGS)}")
    wanted, scaling = SCALINGS[kind]
    if "original_max_position_embeddings" in wanted:
        rotary.setdefault("original_max_position_embeddings", model.tokens)
    if differ := sorted(rotary.keys() ^ set(wanted)):
        raise ValueError(f"rotary positions of rope_type={kind!r} take {', '.join(wanted) or 'no numbers'}, and "
                         f"{', '.join(differ)} {'is' if len(differ) == 1 else 'are'} missing or of another type")
    return {"epsilon": of["rms_norm_eps"], "base": base,
            "scaling": None if scaling is None else scaling(*(rotary[key] for key in wanted))}


def _rotary_fields(of: Fields) -> dict[str, Any]:
    """The object that says how rotary positions turn, under either name, without what is null or changes nothing."""
    old, new = of["rope_scaling"], of["rope_parameters"]
    if old and new and old != new:
        raise ValueError(f"rope_scaling={old!r} and rope_parameters={new!r} are two names of one; say one")
    said = old or new or {}
    if not isinstance(said, Mapping) or any(isinstance(value, Mapping) for value in said.values()):
        raise ValueError(f"rotary positions are said as {said!r}; the engine turns all layers by the same "
                         "numbers, one object of them")
    return {key: value for key, value in said.items()
            if value is not None and not (key == "partial_rotary_factor" and value == 1)}


# Of each type of rotary positions the numbers that it takes, and the scaling that they make, in the same order.
SCALINGS: Mapping[str, tuple[tuple[str, ...], Callable[..., RotaryScaling] | None]] = {
    "default": ((), None),
    "linear": (("factor",), LinearScaling),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), Llama3Scaling)}


def _mistral_numbers(of: Fields, model: Transformer, tokens: int) -> dict[str, Any]:
    _refuse_window(of["sliding_window"], tokens)
    return _llama_numbers(of, model, tokens)


def _qwen_numbers(of: Fields, model: Transformer, tokens: int) -> dict[str, Any]:
    kinds = of["layer_types"] or ()
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ValueError(f"layer_types={kinds!r}; the engine's attention is full_attention")
    whole = model.blocks if of["max_window_layers"] is None else checked_count(
        "max_window_layers", of["max_window_layers"], 0)
    if "sliding_attention" in kinds or (not kinds and of["use_sliding_window"] and whole < model.blocks):
        _refuse_window(of["sliding_window"], tokens)
    return _llama_numbers(of, model, tokens)


def _refuse_window(window: Any, tokens: int) -> None:
    if window is not None and checked_count("sliding_window", window, 1) < tokens:
        raise ValueError(f"sliding_window={window} is shorter than the {tokens} tokens of the longest sequence, and "
                         "the engine's attention reaches back to the first; take shorter ones, by "
                         f"context={window}, or --sequence {window}")


# -- Names of weights --------------------------------------------------------------------------------------------------


def stored_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredNames]:
    """The names in files of a model's parameters, by their names here: those of the first type that has all of them,
    or their own."""
    for names in table()["names"].values():
        found = {name: one for name in shapes if (one := _named(name, shapes[name], names)) is not None}
        if found.keys() == shapes.keys():
            return found
    return {name: StoredNames((name,)) for name in shapes}


def _named(name: str, shape: tuple[int, ...], table: Names) -> StoredNames | None:
    for pattern, names, transposed in table:
        match = re.fullmatch(pattern, name)
        if match:
            return StoredNames(tuple(match.expand(there) for there in names), transposed and len(shape) == 2)
    return None


# -- The rows ----------------------------------------------------------------------------------------------------------

TRANSFORMERS: Mapping[str, Callable[..., Transformer]] = {
    "gpt2": _gpt2, "opt": _opt, "bloom": _bloom, "llama": _llama, "mixtral": _mixtral, "qwen_moe": _qwen_moe,
    "llama4": _llama4, "deepseek": _deepseek, "phi": _phi, "gpt_neox": _gpt_neox, "falcon": _falcon, "bert": _bert,
    "t5": _t5}
NUMBERS: Mapping[str, Callable[[Fields, Transformer, int], dict[str, Any]]] = {
    "gpt2": lambda of, *_: {"epsilon": of["layer_norm_epsilon"]}, "llama": _llama_numbers, "mistral": _mistral_numbers,
    "qwen": _qwen_numbers}


@cache
def table() -> Mapping[str, Any]:
    """All of model_types.toml: beside the rows, the keys of every type that have ``no_effect``, those of which the
    engine has some values ``only``, ``text_models``, the types of models that read pictures too, and windows."""
    return facts(__package__, "model_types")


@cache
def model_types() -> Mapping[str, ModelType]:
    """The rows of all model types, by name."""
    found = {}
    for name in table()["types"]:
        row = _row({**table()["common"], **table()["types"]}, name)
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in row.get("with", {}).items()}
        found[name] = ModelType(tuple(row["required"]), _left_out(row.get("optional", {})),
                                partial(TRANSFORMERS[row["transformer"]], **given), row.get("aliases", {}),
                                _runs(row["runs"]) if "runs" in row else None)
    return found


def _runs(name: str) -> Runs:
    row = _row(table()["runs"], name)
    return Runs(_left_out(row["keys"]), NUMBERS[name], row["only"])


def _row(rows: Fields, name: str) -> dict[str, Any]:
    """A row, after that which it is ``like``: lists go on, tables are joined, all else is its own."""
    row, found = rows[name], dict(_row(rows, rows[name]["like"])) if "like" in rows[name] else {}
    for key, value in row.items():
        before = found.get(key)
        found[key] = before + value if isinstance(before, list) else before | value if isinstance(
            before, dict) else value
    return found


def _left_out(values: Fields) -> dict[str, Any]:
    """The values of keys that are left out; an empty list stands for null, which TOML has not."""
    return {key: None if value == [] else value for key, value in values.items()}


# -- Reading a configuration -------------------------------------------------------------------------------------------


def names_config(text: str) -> bool:
    """True for a text that names a folder or a file, and so no preset: one that is there, or looks like a path."""
    return bool(text.strip()) and (text.endswith(".json") or "/" in text or os.path.exists(text))


def read_fields(source: Any) -> tuple[str, Any]:
    """The fields of a configuration, and a name to say where they are from: of a config.json on disk, of the folder
    that holds one, of a mapping, or of an object with ``to_dict``, as `transformers` has them.

    Raises ValueError for a file that is not there, is not JSON or says a key twice, and for anything else.
    """
    if hasattr(source, "to_dict") and not isinstance(source, type):
        source = source.to_dict()
    if isinstance(source, Mapping):
        return CONFIG, dict(source)
    if not isinstance(source, str | Path) or "\0" in str(source):
        raise ValueError(f"a model was asked for by {source!r}; name a Hugging Face folder or its config.json, or give "
                         "the configuration itself")
    file = Path(source)
    try:
        file = file / CONFIG if file.is_dir() else file
        return str(file), json_of(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} was asked for, and is not there; give the path of a model's config.json") from None
    except OSError as error:
        raise ValueError(f"{file} was asked for, and cannot be read: {error.strerror}") from None
    except ValueError as error:  # JSON's and UTF-8's
        raise ValueError(f"{file} is not JSON: {error}; give the path of a model's config.json") from None


def transformer_of_fields(name: str, fields: Any) -> Transformer:
    """The transformer of a configuration's fields, as `json.loads` gives them; ``name`` says where they are from.

    Raises ValueError for what is no object, for a model type without a row here, for fields that are missing, all of
    them by name, and for shapes that are impossible.
    """
    name, fields = text_model(name, fields)
    kind, row = _type_of(name, fields)
    said = _said(row, fields, name)
    if missing := [required for required in row.required if required not in said]:
        raise ValueError(f"{name} lacks {', '.join(missing)}; a configuration of {kind} has "
                         f"{', '.join(row.required)}")
    try:
        found = row.transformer(_checked(row, said))
        return replace(found, **_windows(kind, said, found.blocks))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _windows(kind: str, said: Fields, blocks: int) -> dict[str, Any]:
    """The window of attention, and the blocks that have it, as transformers has them (version 5.24)."""
    window = checked_count("sliding_window", said.get("sliding_window", 0), 0)
    every = said.get("_sliding_window_pattern", said.get("sliding_window_pattern", table()["every_whole"].get(kind, 0)))
    used = window > 0 and said.get("use_sliding_window", not kind.startswith("qwen"))
    whole = blocks // every if every else min(blocks, said.get("max_window_layers", 0))
    if kinds := said.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != blocks:
            raise ValueError(f"layer_types={kinds!r}; it lists the kind of attention of each of {blocks} blocks")
        whole = blocks - kinds.count("sliding_attention")
    return {"window": window, "windowed": blocks - whole} if used else {}


def text_model(name: str, fields: Any) -> tuple[str, Any]:
    """The fields of the text model, and where they are, of a type that reads pictures too; others as they are.

    Raises ValueError where they are not there.
    """
    kind = table()["text_models"].get(str(fields.get("model_type"))) if isinstance(fields, dict) else None
    if kind is None:
        return name, fields
    text, where = fields.get("text_config"), f"{name} (its text_config: zerosim counts no pictures)"
    if not isinstance(text, dict):
        raise ValueError(f"{name} has the model_type {fields['model_type']!r} and no text_config, an object with the "
                         "sizes of its text model, which is what zerosim counts")
    tied = {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}
    return where, {"model_type": kind, **tied, **text}


def _type_of(name: str, fields: Any) -> tuple[str, ModelType]:
    if not isinstance(fields, dict):
        raise ValueError(f"{name} holds a JSON {type(fields).__name__}; a model's configuration is an object, with "
                         "model_type and the model's sizes")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in model_types():
        asked = "has no model_type" if kind is None else f"has the model_type {kind!r}, which zerosim cannot count"
        raise ValueError(f"{name} {asked}; it counts {', '.join((*model_types(), *table()['text_models']))}")
    return kind, model_types()[kind]


def _said(row: ModelType, fields: Fields, where: str) -> dict[str, Any]:
    """The fields that the file gives, by the type's own names; null gives nothing."""
    said: dict[str, Any] = {}
    for key, value in ((key, value) for key, value in fields.items() if value is not None):
        name = row.aliases.get(key, key)
        if name in said and said[name] != value:
            raise ValueError(f"{where} says {name}={said[name]!r} and {key}={value!r}, two names of one; say one")
        said[name] = value
    return said


KINDS: Mapping[type, str] = {bool: "true or false", str: "a text", list: "a list"}
MAY_BE_ZERO = ("first_k_dense_replace", "n_shared_experts")


def _checked(row: ModelType, said: Fields) -> dict[str, Any]:
    """The type's fields, said or left out: counts of at least 1, others of the kind that they have if left out."""
    found = dict(row.optional)
    for name in said.keys() & {*row.required, *row.optional}:
        value, kind = said[name], type(row.optional.get(name, 0))
        if kind is NoneType:
            kind = list
        if kind is not int and not isinstance(value, kind):
            raise ValueError(f"{name} must be {KINDS[kind]}, got {value!r}")
        if kind is int and isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, got {value}")
        found[name] = checked_count(name, value, int(name not in MAY_BE_ZERO)) if kind is int else value
    return found


# -- A model that the engine trains ------------------------------------------------------------------------------------


def from_hugging_face(source: Any, *, context: int | None = None, dropout: float = 0.0, ignore: Sequence[str] = (),
                      **options: Any) -> Decoder:
    """The model of a Hugging Face folder, with the folder's weights as its first values where it has any.

    ``source`` is the folder, its config.json alone (then first values are drawn), or the configuration: a mapping, or
    an object with ``to_dict``. ``context`` is the longest sequence that you will use, by default the model's own; a
    table of learned positions stays whole. As `from_pretrained` gives it, the model drops nothing: ``dropout`` is the
    engine's rate, whatever the file's. ``options`` are the Decoder's: ``seed``, ``units``, ``normalization``. Of the
    weights a rank reads what it keeps, when it keeps it: the files must stay as they are until the engines are made.

    Raises ValueError for what changes the result and is not built in, by its key: other model types, types of rotary
    positions and activations, windows shorter than the context; for a key that is not known, unless it stands in
    ``ignore``; for weights that are not of this model, and for weights in other files than safetensors.
    """
    name, found = read_fields(source)
    config, tied = config_of_fields(name, found, context, ignore)
    model = decoder(replace(config, dropout=dropout), tied=tied, **options)
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None and folder.is_dir():
        if has_weights(folder):
            try:
                model.first = find_weights(folder, stored_names(model.shapes), model.shapes)
            except OSError as error:
                raise ValueError(f"{error.filename} cannot be read: {error.strerror}; take another copy of the folder, "
                                 f"or name {name} for values that are drawn") from None
        elif others := sorted(file.name for file in folder.iterdir() if OTHER_WEIGHTS.fullmatch(file.name)):
            raise ValueError(f"{folder} has its weights in {others[0]}; zerosim reads {ONE_FILE}, or several by "
                             f"{WEIGHTS_INDEX}; save them so by save_pretrained, or name {name} for values that are "
                             "drawn")
    return model


def config_of_fields(name: str, found: Any, context: int | None = None,
                     ignore: Sequence[str] = ()) -> tuple[DecoderConfig, bool]:
    """The engine's config of a configuration's fields, and whether its head is tied; raises as `from_hugging_face`."""
    model = transformer_of_fields(name, found)
    kind, row = _type_of(name, found)
    if row.runs is None:
        trained = ", ".join(one for one, of in model_types().items() if of.runs is not None)
        raise ValueError(f"{name} has the model_type {kind!r}: the engine has no such layers; it has those of {trained}"
                         "; zerosim plan counts it")
    only = {**table()["only"], **row.runs.only}
    known = {*table()["no_effect"], *only, *row.runs.keys, *row.required, *row.optional, *row.aliases, *ignore}
    for key, value in found.items():
        if key not in known and not key.startswith("_") and value is not None:
            raise ValueError(f"{name} says {key}={value!r}, and zerosim does not know whether that changes what a "
                             f"{kind} computes; if it does not, say ignore=({key!r},) to from_hugging_face, or take it "
                             "out of the file")
        if key in only and value is not None and value not in only[key]:
            raise ValueError(f"{name} says {key}={value!r}, which the engine has not; it has "
                             f"{' and '.join(map(repr, only[key])) or 'none'}")
    require_count("context", context, 1, none="for the model's own")
    tokens = context or model.tokens
    if not tokens:
        raise ValueError(f"{name} lacks max_position_embeddings; say your longest sequence by context=")
    try:
        numbers = row.runs.numbers({key: found.get(key, left_out) for key, left_out in row.runs.keys.items()},
                                   model, tokens)
        return config_of_transformer(model, tokens=tokens, **numbers), model.tied
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def refuse_other_model(folder: Path, model: Any) -> None:
    """Raises ValueError where a folder's config.json is of another model than a GPT or Llama here: it computes
    something else with the same weights. The longest sequence and dropout are the engine's own."""
    if not isinstance(model, Decoder) or not (folder / CONFIG).is_file():
        return
    name, found = read_fields(folder)
    own = model.config
    theirs, tied = config_of_fields(name, found, None if own.learned_positions else own.context)
    here, there = ({"kind": type(config).__name__.removesuffix("Config"),
                    **{one.name: getattr(config, one.name) for one in fields(config) if one.name != "dropout"},
                    "tied": of_tied} for config, of_tied in ((own, model.tied), (theirs, tied)))
    differ = ["kind"] if here["kind"] != there["kind"] else [key for key in here if here[key] != there[key]]
    if differ:
        said = "; ".join(f"{key} is {there[key]} there, and {here[key]} here" for key in differ)
        raise ValueError(f"{name} is of another model: {said}; build the one that the weights are of, by "
                         f"zs.models.from_hugging_face or zerosim train --model {folder}")
