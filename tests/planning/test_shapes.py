"""Models on paper: exact counts of parameters by unit, presets, configuration files, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.models import GPT, GPTConfig
from zerosim.planning.shapes import (
    MODEL_TYPES,
    PRESETS,
    Transformer,
    model_of,
    model_of_config,
    model_of_parameters,
    model_shape,
    pad_vocabulary,
    read_config,
)

# Sizes as the checkpoints' own configuration files name them, and the number of parameters that they load.
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA2 = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
          "tie_word_embeddings": False}
LLAMA2_70B = LLAMA2 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                       "num_attention_heads": 64, "num_key_value_heads": 8}
QWEN2 = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
         "tie_word_embeddings": True}
MISTRAL = LLAMA2 | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}
BLOOM = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
T5 = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
      "vocab_size": 32128, "relative_attention_num_buckets": 32}
T5_V1_1 = T5 | {"d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6,
                "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
OPT = {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
       "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 768, "do_layer_norm_before": True}

CONFIGS = [(GPT2, 124_439_808), (LLAMA2, 6_738_415_616), (LLAMA2_70B, 68_976_648_192), (MISTRAL, 7_241_732_096),
           (QWEN2, 494_032_768), (QWEN3, 596_049_920), (BLOOM, 176_247_271_424), (T5, 60_506_624),
           (T5_V1_1, 76_961_152), (OPT, 125_239_296)]


@pytest.mark.parametrize(("fields", "parameters"), CONFIGS, ids=lambda value: str(value)[:30])
def test_a_configuration_file_counts_the_parameters_that_its_checkpoint_loads(
        fields: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float16", "rope_scaling": None}))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert model_shape(source).parameters == parameters


@pytest.mark.parametrize(("tied", "units"), [(True, 1), (False, 1)])
def test_a_gpt_on_paper_has_the_units_of_the_gpt_that_runs(tied: bool, units: int) -> None:
    config = GPTConfig(layers=3, channels=12, heads=3, context=8, vocabulary=17)
    runs = GPT(config, tied=tied)
    paper = model_of("nano", Transformer(12, 3, 3, 17, positions=8, fused_qkv=True, tied=tied))
    assert [unit.name for unit in paper.units] == [unit.name for unit in runs.units]
    assert paper.unit_lengths == tuple(unit.parameter_count for unit in runs.units)
    for unit, real in zip(paper.units, runs.units, strict=True):
        assert [tensor.shape for tensor in unit.tensors] == list(real.shapes.values())
    assert paper.tied == (((4, 0),) if tied else ())


@given(channels=st.integers(1, 8), heads=st.integers(1, 4), blocks=st.integers(1, 5), vocabulary=st.integers(1, 99),
       positions=st.integers(1, 64))
def test_a_gpt_has_12_d_squared_and_13_d_parameters_in_a_block(
        channels: int, heads: int, blocks: int, vocabulary: int, positions: int) -> None:
    d = channels * heads
    model = model_of("gpt", Transformer(d, blocks, heads, vocabulary, positions=positions))
    assert set(model.unit_lengths[1:-1]) == {12 * d * d + 13 * d}
    assert model.parameters == blocks * (12 * d * d + 13 * d) + (vocabulary + positions) * d + 2 * d
    assert model.parameters == sum(tensor.parameters for tensor in model.tensors)


def test_fewer_key_and_value_heads_save_their_columns_alone() -> None:
    full = PRESETS["llama-2-70b"]
    many, few = (model_of("", replace(full, key_value_heads=n)).parameters for n in (64, 8))
    assert many - few == full.blocks * 2 * full.channels * 56 * full.head_channels


def test_an_untied_head_adds_one_table_and_uses_no_other() -> None:
    tied = model_of("", PRESETS["gpt2"])
    untied = model_of("", replace(PRESETS["gpt2"], tied=False))
    assert untied.parameters - tied.parameters == 50257 * 768
    assert (tied.tied, untied.tied) == (((13, 0),), ())


@given(vocabulary=st.integers(1, 10**6), multiple=st.integers(1, 1024))
def test_a_padded_vocabulary_is_the_next_multiple(vocabulary: int, multiple: int) -> None:
    padded = pad_vocabulary(Transformer(4, 1, 2, vocabulary), multiple).vocabulary
    assert padded % multiple == 0
    assert 0 <= padded - vocabulary < multiple


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_units_named_once_and_is_as_large_as_its_name_says(name: str) -> None:
    model = model_shape(name)
    names = [tensor.name for tensor in model.tensors]
    assert len(set(names)) == len(names)
    said = re.search(r"([\d.]+)([bmt])(\d?)$", name)
    if said and not name.startswith(("bloom", "mistral", "qwen")):  # 7b1 is 7.07e9; the others round by feeling
        scale = {"m": 1e6, "b": 1e9, "t": 1e12}[said[2]]
        assert model.parameters == pytest.approx(float(said[1]) * scale, rel=0.07)


def test_the_largest_unit_is_not_the_largest_layer() -> None:
    """A unit is a block; DeepSpeed's largest layer is one linear layer or one table of it."""
    model = model_shape("llama-2-7b")
    assert (model.largest_unit.name, model.largest_unit.parameters) == ("block0", 202_383_360)
    assert model.largest_layer_parameters == 32_000 * 4096
    assert model_shape("t5-3b").largest_layer_parameters == 32_128 * 1024


@given(parameters=st.integers(1, 10**13), layers=st.integers(1, 500))
def test_a_number_of_parameters_makes_layers_of_the_largest_and_a_rest(parameters: int, layers: int) -> None:
    largest = -(-parameters // layers)
    model = model_of_parameters(parameters, largest)
    assert model.parameters == parameters
    assert max(model.unit_lengths) == largest == model.largest_unit.parameters == model.largest_layer_parameters
    assert len(set(model.unit_lengths[:-1])) <= 1
    assert model.transformer is None


def test_a_number_alone_is_one_unit() -> None:
    assert model_of_parameters(7_500_000_000).unit_lengths == (7_500_000_000,)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "said"), [
    ([1], "c holds a JSON list; a model's configuration is an object, with model_type and the model's sizes"),
    ({}, f"c has no model_type; it counts {', '.join(MODEL_TYPES)}"),
    ({"model_type": "lama"}, "c has the model_type 'lama', which zerosim cannot count; it counts gpt2, opt, bloom, "
     "llama, mistral, qwen2, qwen3, t5; did you mean 'llama'?"),
    ({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_positions": None},
     "c lacks n_layer, n_positions, vocab_size; a configuration of gpt2 has n_embd, n_layer, n_head, n_positions, "
     "vocab_size"),
    (GPT2 | {"n_head": 7}, "c: a transformer of 768 channels was asked for 7 heads, which do not divide them; take a "
     "number of heads that does, or say head_channels"),
    (LLAMA2 | {"num_key_value_heads": 5}, "c: 32 heads were asked to share 5 key and value heads; each of these serves "
     "as many heads as the others, so take a number that divides the heads"),
    (GPT2 | {"n_layer": 0}, "c: n_layer must be at least 1, got 0"),
    (GPT2 | {"n_inner": -4}, "c: n_inner must be at least 1, got -4"),
    (GPT2 | {"n_layer": "12"}, "c: n_layer must be a whole number, got '12'; write n_layer=int(...)"),
    (GPT2 | {"n_layer": True}, "c: n_layer must be a whole number, got True"),
    (T5 | {"num_decoder_layers": 0}, "c: num_decoder_layers must be at least 1, got 0"),
    (T5 | {"feed_forward_proj": 7}, "c: feed_forward_proj must be a text, got 7"),
    (LLAMA2 | {"tie_word_embeddings": "false"}, "c: tie_word_embeddings must be true or false, got 'false'"),
    (LLAMA2 | {"attention_bias": 0}, "c: attention_bias must be true or false, got 0"),
    (LLAMA2 | {"vocab_size": 10**400}, "c: vocab_size must be below 2^62, got a number of 1329 bits"),
    (LLAMA2 | {"num_hidden_layers": 10**7}, "c: a transformer of 10,000,000 blocks was asked for; zerosim plans up to "
     "10,000, so take fewer"),
    (LLAMA2 | {"model_type": "mistral"}, "c lacks num_key_value_heads; a configuration of mistral has hidden_size, "
     "intermediate_size, num_hidden_layers, num_attention_heads, vocab_size, num_key_value_heads"),
    (GPT2 | {"hidden_size": 1024}, "c says n_embd=768 and hidden_size=1024, two names of one; say one"),
    (GPT2 | {"add_cross_attention": True}, "c: a GPT-2 with add_cross_attention attends to an encoder, and its layers "
     "for that are not counted here; take one without"),
    (OPT | {"word_embed_proj_dim": 512}, "c: an OPT whose embedding has 512 channels where its blocks have 768, or "
     "whose LayerNorms come last, as opt-350m, is not counted here; take another OPT"),
])
def test_a_configuration_that_makes_no_model_is_refused_with_the_reason(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        model_of_config(fields, name="c")


def test_a_file_that_is_not_there_or_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json was asked for, and is not there; give the path of"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{gpt2")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: Expecting property name .*; give the path of"):
        model_shape(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: 'utf-8' codec"):
        read_config(tmp_path / "config.json")


def test_brackets_without_end_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON: .*recursion.*; give the path of"):
        read_config(tmp_path / "config.json")


def test_a_blank_name_is_no_file_in_the_folder_where_one_stands(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.chdir(tmp_path)
    assert model_shape(".").parameters == 124_439_808
    for blank in ("", " "):
        with pytest.raises(ValueError, match=f"^no model is called '{blank}', and there is no such file"):
            model_shape(blank)


def test_a_name_that_is_no_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no model is called 'lama-2-7b', and there is no such file; the presets are "
                                         r"gpt2, .*\; did you mean 'llama-2-7b'"):
        model_shape("lama-2-7b")


@pytest.mark.parametrize(("arguments", "said"), [
    ((0,), "parameters must be at least 1, got 0"),
    ((7.5e9,), "parameters must be a whole number, got 7500000000.0; write parameters=int(...)"),
    ((10, 11), "a largest layer of 11 parameters was asked for in a model of 10; take at most the model's own"),
    ((10**9, 10), "a largest layer of 10 parameters makes 100,000,000 layers of 1,000,000,000 parameters; zerosim "
                  "plans models of up to 100,000, so take a larger one"),
])
def test_a_number_of_parameters_that_makes_no_model_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        model_of_parameters(*arguments)


def test_impossible_transformers_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        Transformer(8, 0, 2, 10)
    with pytest.raises(ValueError, match="biases were asked for in norms; they can be in qkv, projection, feed_f"):
        Transformer(8, 1, 2, 10, biases=("norms",))
    with pytest.raises(ValueError, match="vocabulary_multiple must be at least 1, got 0"):
        model_shape("gpt2", vocabulary_multiple=0)
