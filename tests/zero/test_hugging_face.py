"""Weights in Hugging Face's files: names, shapes and bits as its libraries have them, there and back."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import zerosim as zs
from tests.support import assert_refused
from tests.zero.training import ADAM, BF16, MODELS, bits
from zerosim.models import MLP, Llama, LlamaConfig
from zerosim.zero import CheckpointError, export_weights

TYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(bool)}


def read(path):
    """All tensors of a file, by the format's description alone."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert start % 8 == 0, "elements of 8 bytes may begin here"
    return {name: np.frombuffer(content[start + one["data_offsets"][0]:start + one["data_offsets"][1]],
                                TYPES[one["dtype"]]).reshape(one["shape"]) for name, one in header.items()}


def write(path, tensors):
    """A file with these tensors, by the format's description alone."""
    header, end = {}, 0
    for name, array in tensors.items():
        code = next(code for code, dtype in TYPES.items() if dtype == array.dtype)
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def saved(folder, model, ranks=3, **options):
    """A checkpoint of a model that has been moved a little from its first values, and its masters by name."""
    def program(rank):
        engine = zs.Engine(rank, model, ADAM, **{"stage": 3, "policy": BF16} | options)
        for group in engine.param_groups:
            group.master += np.random.default_rng(rank.index).random(group.master.size, np.float32)
        engine.save(folder)
        return {name: engine.state(name)["master"] for name in model.shapes}
    return zs.Cluster(ranks).run(program)[0]


def loaded(path, model, ranks=2, kind="master", **options):
    """Every parameter's state after loading weights."""
    def program(rank):
        engine = zs.Engine(rank, model, ADAM, **{"stage": 3, "policy": BF16} | options)
        engine.load_weights(path)
        return {name: engine.state(name)[kind] for name in model.shapes}
    return zs.Cluster(ranks).run(program)[0]


def same(a, b):
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def of_gpt2(masters):
    """These weights as `transformers` has them, but for the head, which is the embedding."""
    renamed = [("attention.qkv", "attn.c_attn"), ("attention.projection", "attn.c_proj"), ("ffn.up", "mlp.c_fc"),
               ("ffn.down", "mlp.c_proj"), ("block", "h.")]
    found = {}
    for name, array in masters.items():
        for here, there in renamed:
            name = name.replace(here, there)
        found["transformer." + name + (".weight" if name in ("wte", "wpe") else "")] = array
    return found


def test_a_gpt_is_exported_and_loaded_under_the_names_of_gpt2_in_one_file_or_several(tmp_path):
    model = MODELS["gpt"]()
    masters = saved(tmp_path / "c", model)
    (file,) = export_weights(tmp_path / "c", tmp_path / "one")
    assert same(read(file), of_gpt2(masters))
    *files, index = export_weights(tmp_path / "c", tmp_path / "several", shard_nbytes=4000)
    found = json.loads(index.read_text())
    names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
    assert len(files) > 2
    assert [file.name for file in files] == names
    assert all(sum(array.nbytes for array in read(file).values()) <= 4000 or len(read(file)) == 1 for file in files)
    assert found["metadata"]["total_size"] == 4 * model.parameter_count
    assert found["weight_map"] == {name: file.name for file in files for name in read(file)}
    for path in (file, tmp_path / "one", tmp_path / "several"):
        for options in ({}, {"stage": 1, "policy": zs.Policy()}, {"layout": "contiguous"}):
            assert same(loaded(path, model, **options), masters)
    # As others store them: without a prefix, with masks that are no parameters, and of another type.
    bare = {name.removeprefix("transformer."): array.astype(ml_dtypes.bfloat16)
            for name, array in of_gpt2(masters).items()}
    write(tmp_path / "bare.safetensors", bare | {"h.0.attn.bias": np.ones((1, 1, 8, 8), bool),
                                                 "lm_head.weight": bare["wte.weight"]})
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in masters.items()}
    assert same(loaded(tmp_path / "bare.safetensors", model, kind="parameter"), rounded)
    begun = zs.Policy("bf16", master_from="compute")  # what is loaded begins as first values do
    wide = {name: array.astype(np.float32) for name, array in rounded.items()}
    assert same(loaded(file, model, policy=begun), wide)
    assert not same(wide, masters)
    (file,) = export_weights(tmp_path / "c", tmp_path / "narrow", kind="parameter")
    assert {array.dtype for array in read(file).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_an_untied_head_is_transposed_and_other_models_keep_their_names(tmp_path):
    untied = MODELS["untied"]()
    masters = saved(tmp_path / "u", untied)
    (file,) = export_weights(tmp_path / "u", tmp_path / "one")
    assert bits(read(file)["lm_head.weight"]) == bits(masters["lm_head.weight"].T)
    assert same(loaded(file, untied, ranks=5), masters)
    large = MLP((70, 300, 2))  # of more than a block
    for name, model in {"odd": MODELS["odd"](), "nothing": MODELS["scalars"](), "large": large}.items():
        masters = saved(tmp_path / name, model)
        (file,) = export_weights(tmp_path / name, tmp_path / "own" / name)
        assert same(read(file), masters)
        assert same(loaded(file, model), masters)
        assert len(export_weights(tmp_path / name, tmp_path / "each" / name, shard_nbytes=1)) == len(masters) + 1


def of_llama(masters, of):
    """These weights as `transformers` has them: outputs by inputs, what is joined here in matrices of its own."""
    queries, keys = (heads * of.head_channels for heads in (of.heads, of.key_value_heads))
    parts = {"attention_norm": {"input_layernorm": 0}, "ffn_norm": {"post_attention_layernorm": 0},
             "attention.qkv": {"self_attn.q_proj": 0, "self_attn.k_proj": queries, "self_attn.v_proj": queries + keys},
             "attention.projection": {"self_attn.o_proj": 0}, "attention.query_norm": {"self_attn.q_norm": 0},
             "attention.key_norm": {"self_attn.k_norm": 0}, "ffn.down": {"mlp.down_proj": 0},
             "ffn.gate_up": {"mlp.gate_proj": 0, "mlp.up_proj": of.feed_forward}}
    found = {"model.embed_tokens.weight": masters["wte"], "model.norm.weight": masters["norm.weight"]}
    for name, array in masters.items():
        block, _, rest = name.partition(".")
        layer, _, parameter = rest.rpartition(".")
        if name == "lm_head.weight":
            found[name] = array.T
        elif block.startswith("block"):
            pieces = np.split(array, [*parts[layer].values()][1:], axis=-1)
            found |= {f"model.layers.{block.removeprefix('block')}.{there}.{parameter}": piece.T
                      for there, piece in zip(parts[layer], pieces, strict=True)}
    return found


BIASED = LlamaConfig(2, 6, 4, 8, 7, key_value_heads=2, head_channels=4, feed_forward=5,
                     biases=("qkv", "projection", "feed_forward"))


@pytest.mark.parametrize("model", [MODELS["llama"](), MODELS["qwen"](), Llama(BIASED)], ids=["llama", "qwen", "biased"])
def test_every_weight_of_a_llama_has_its_name_and_form_there_and_comes_back(model, tmp_path):
    masters = saved(tmp_path / "c", model)
    (file,) = export_weights(tmp_path / "c", tmp_path)
    assert same(read(file), of_llama(masters, model.config))
    assert same(loaded(file, model, ranks=3), masters)


def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_changed(tmp_path):
    model = MODELS["gpt"]()
    saved(tmp_path / "c", model)
    (file,) = export_weights(tmp_path / "c", tmp_path / "one")
    weights, wpe = read(file), "transformer.wpe.weight"

    def refused(words, path=tmp_path / "x.safetensors", model=model):
        def program(rank):
            engine = zs.Engine(rank, model, ADAM, stage=rank.size, policy=BF16)
            before = {name: bits(array) for name, array in engine.state_dict().items()}
            assert_refused(lambda: engine.load_weights(path), words, CheckpointError)
            assert {name: bits(array) for name, array in engine.state_dict().items()} == before
        zs.Cluster(2).run(program)

    write(tmp_path / "x.safetensors", {name: array for name, array in weights.items() if name != wpe})
    refused(f"there is no tensor {wpe}, which is wpe here")
    write(tmp_path / "x.safetensors", weights | {wpe: weights[wpe][:-1]})
    refused(rf"wpe is of shape \(8, 12\), and there is {wpe} \(7, 12\)")
    write(tmp_path / "x.safetensors", weights | {wpe: weights[wpe] > 0})
    refused("is of type bool")
    write(tmp_path / "x.safetensors", weights | {"transformer.h.2.ln_1.bias": weights[wpe]})
    refused("the tensor transformer.h.2.ln_1.bias is of no weight of this model; build the model that the file is of")
    write(tmp_path / "x.safetensors", weights | {"lm_head.weight": -weights["transformer.wte.weight"]})
    refused("lm_head.weight is .* another than the embedding, to which the head is tied here")
    for spoiled in (np.nan, -np.inf):  # in the last row, of which one rank alone keeps a part
        table = weights[wpe].copy()
        table[-1, -1] = spoiled
        write(tmp_path / "x.safetensors", weights | {wpe: table})
        refused(f"x.safetensors: {wpe} has NaN, inf or numbers beyond fp32 in 1 of .* values; look at where they")
    (tmp_path / "x.safetensors").write_bytes(file.read_bytes()[:-1])
    refused("was cut off")
    refused("No such file", tmp_path / "none.safetensors")
    refused("which has neither model.safetensors nor model.safetensors.index.json; name the folder or", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../one/model.safetensors"}}')
    refused("names files of other folders", tmp_path)
    for name in ("model-00001-of-00002.safetensors", "..", "a\0b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        refused("names .*, and there is no such file beside it; take the whole folder", tmp_path)
    assert_refused(lambda: export_weights(tmp_path / "one", tmp_path), "holds no checkpoint")
    assert_refused(lambda: export_weights(tmp_path / "c", tmp_path / "one", shard_nbytes=4000), "are others: model.")
    assert export_weights(tmp_path / "c", tmp_path / "one") == [file]
    assert_refused(lambda: export_weights(tmp_path / "c", tmp_path), "others: model.safetensors.index.json; name")
    assert_refused(lambda: export_weights(tmp_path / "c", tmp_path, shard_nbytes=0), "shard_nbytes=0 must be")
    assert_refused(lambda: export_weights(tmp_path / "c", tmp_path, kind="moment"), "has no moment of wte")


@pytest.mark.peer
def test_the_formats_own_library_reads_a_shard_and_an_export(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    masters = saved(tmp_path / "c", MODELS["untied"](), policy=zs.Policy())
    (file,) = export_weights(tmp_path / "c", tmp_path / "one")
    assert same(numpy.load_file(file), read(file))
    for shard in Path(tmp_path / "c").glob("*.safetensors"):
        tensors = numpy.load_file(shard)
        assert all(array.size <= masters[name.partition("/")[2]].size for name, array in tensors.items())
