"""Models on paper: exact counts of parameters by unit, presets, configuration files."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.configurations import CONFIGS, GPT2
from zerosim.models import GPT, GPTConfig
from zerosim.planning import PRESETS, Transformer, model_of, model_of_parameters, model_shape, shapes


def test_a_configuration_file_counts_the_parameters_that_its_checkpoint_loads(tmp_path, monkeypatch):
    for fields, parameters in CONFIGS:
        (tmp_path / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float16", "rope_scaling": None}))
        for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
            assert model_shape(source).parameters == parameters, fields
    assert shapes.model_of_config(GPT2).parameters == CONFIGS[0][1]
    monkeypatch.chdir(tmp_path)
    assert model_shape(".").parameters == CONFIGS[-1][1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_on_paper_has_the_units_of_the_gpt_that_runs(tied):
    runs = GPT(GPTConfig(layers=3, channels=12, heads=3, context=8, vocabulary=17), tied=tied)
    paper = model_of("nano", Transformer(12, 3, 3, 17, positions=8, fused=True, tied=tied))
    assert [unit.name for unit in paper.units] == [unit.name for unit in runs.units]
    assert paper.unit_lengths == tuple(unit.parameter_count for unit in runs.units)
    for unit, real in zip(paper.units, runs.units, strict=True):
        assert [tensor.shape for tensor in unit.tensors] == list(real.shapes.values())
    assert paper.tied == (((4, 0),) if tied else ())


@given(channels=st.integers(1, 8), heads=st.integers(1, 4), blocks=st.integers(1, 5), vocabulary=st.integers(1, 99),
       positions=st.integers(1, 64), multiple=st.integers(1, 1024))
def test_a_gpt_has_12_d_squared_and_13_d_parameters_in_a_block_and_tables_of_its_padded_vocabulary(
        channels, heads, blocks, vocabulary, positions, multiple):
    d = channels * heads
    transformer = shapes.pad_vocabulary(Transformer(d, blocks, heads, vocabulary, positions=positions), multiple)
    assert transformer.vocabulary == -(-vocabulary // multiple) * multiple
    model = model_of("gpt", transformer)
    assert set(model.unit_lengths[1:-1]) == {12 * d * d + 13 * d}
    assert model.parameters == blocks * (12 * d * d + 13 * d) + (transformer.vocabulary + positions) * d + 2 * d
    assert model.parameters == sum(tensor.parameters for tensor in model.tensors)


def test_every_preset_has_units_named_once_and_is_as_large_as_its_name_says():
    for name in PRESETS:
        model = model_shape(name)
        names = [(unit.name, tensor.name) for unit in model.units for tensor in unit.tensors]
        assert len(set(names)) == len(names), name
        said = re.search(r"([\d.]+)([bmt])(\d?)$", name)
        if said and name.startswith(("gpt3", "opt", "llama-2", "t5", "zero", "megatron")):
            scale = {"m": 1e6, "b": 1e9, "t": 1e12}[said[2]]
            assert model.parameters == pytest.approx(float(said[1]) * scale, rel=0.07), name



def test_a_preset_is_found_by_the_name_that_its_hub_writes_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    for written, preset in {"meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b", "LLAMA-2-7B": "llama-2-7b",
                            "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b", "Qwen/Qwen3-8B-Base": "qwen3-8b",
                            "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3"}.items():
        assert model_shape(written).name == preset
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/llama-2-7b-hf").mkdir(parents=True)
    for written in ("owner/llama-2-7b-hf", "owner/llama-9b"):
        with pytest.raises(ValueError, match=r"is not there; give the path of a model.s config\.json"):
            model_shape(written)


def test_the_largest_unit_is_not_the_largest_layer():
    """A unit is a block; DeepSpeed's largest layer is one linear layer or one table of it."""
    model = model_shape("llama-2-7b")
    assert (model.largest_unit.name, model.largest_unit.parameters) == ("block0", 202_383_360)
    assert model.largest_layer_parameters == 32_000 * 4096
    assert model_shape("t5-3b").largest_layer_parameters == 32_128 * 1024


@given(parameters=st.integers(1, 10**13), layers=st.integers(1, 500))
def test_a_number_of_parameters_makes_layers_of_the_largest_and_a_rest(parameters, layers):
    largest = -(-parameters // layers)
    model = model_of_parameters(parameters, largest)
    assert model.parameters == parameters
    assert max(model.unit_lengths) == largest == model.largest_unit.parameters == model.largest_layer_parameters
    assert len(set(model.unit_lengths[:-1])) <= 1
    assert model.transformer is None
    assert model_of_parameters(parameters).unit_lengths == (parameters,)


def test_each_switch_of_an_opts_configuration_counts():
    """Of d channels, n blocks and F = 4d: biases 4d + F + d of a block, norms 2d of each and two of a block."""
    fields = {"model_type": "opt", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 32,
              "max_position_embeddings": 16, "vocab_size": 50}
    d, n, f = 8, 3, 32
    full = shapes.model_of_config(fields).parameters
    assert full == 50 * d + 18 * d + n * (4 * d * d + 2 * d * f + 4 * d + f + d + 4 * d) + 2 * d
    assert shapes.model_of_config(fields | {"enable_bias": False}).parameters == full - n * (4 * d + f + d)
    bare = shapes.model_of_config(fields | {"layer_norm_elementwise_affine": False})
    assert bare.parameters == full - (2 * n + 1) * 2 * d
    for switch, fewer in (({"_remove_final_layer_norm": True}, 2 * d), ({"do_layer_norm_before": False}, 2 * d),
                          ({"word_embed_proj_dim": 4}, 50 * (d - 4) - 2 * 4 * d)):
        assert shapes.model_of_config(fields | switch).parameters == full - fewer, switch
