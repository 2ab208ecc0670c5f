"""Models from Hugging Face's folders: from config.json and weights to a trained step, and back; what is refused."""

import json
import math
import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import zerosim as zs
from tests.support import ask, assert_refused, literally
from tests.zero.training import alone, bits
from zerosim.models import LinearScaling, Llama3Scaling, from_hugging_face, model_types
from zerosim.numerics import random
from zerosim.planning import model_shape
from zerosim.zero import CheckpointError, export_weights

ROTARY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
CONFIGS = {
    "llama 3": {"model_type": "llama", **ROTARY, "rms_norm_eps": 1e-5,
                "rope_parameters": {**LLAMA3, "rope_theta": 20.0}},
    "linear": {"model_type": "llama", **ROTARY, "head_dim": 10, "attention_bias": True, "mlp_bias": True,
               "tie_word_embeddings": True, "rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", **ROTARY, "vocab_size": 800, "sliding_window": 64},  # of more than a block
    "qwen 2": {"model_type": "qwen2", **ROTARY, "tie_word_embeddings": True},
    "qwen 3": {"model_type": "qwen3", **ROTARY, "head_dim": 12, "rope_theta": 1e6},
    "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61,
             "n_inner": 40, "layer_norm_epsilon": 1e-3, "bos_token_id": 0, "eos_token_id": 0},
}
# Loss and norm of the gradient of `sequences` under the weights of `folder_of`, in float64 by `transformers` 5.23.0 and
# PyTorch 2.13.0 (2026-11-24); a test below measures them anew where these are installed.
GOLDEN = {
    "llama 3": (5.356349425, 2.602173914), "linear": (4.86475065, 1.585322631), "mistral": (7.723201292, 2.020750273),
    "qwen 2": (5.124168392, 2.109396065), "qwen 3": (5.053606615, 1.704837634), "gpt2": (5.532046026, 2.675174486)}
LR = 16.0


def folder_of(kind, tmp_path):
    """A folder with config.json and weights that are functions of their names alone; and the weights by name here."""
    fields = CONFIGS[kind]
    model = from_hugging_face(fields)
    weights = {name: (len(shape) == 1) * np.float32(not name.endswith("bias")) + np.float32(0.3) * random.normal(
        (29, "golden", 0, name), 0, math.prod(shape)).reshape(shape) for name, shape in model.shapes.items()}
    alone(lambda rank: zs.Engine(rank, model, zs.optim.SGD(lr=1.0), weights=weights).save(tmp_path / "first"))
    export_weights(tmp_path / "first", tmp_path / "theirs", config=fields, shard_nbytes=9000)
    return tmp_path / "theirs", weights


def sequences():
    """Tokens and targets of two ranks, (2, 3, 64) each."""
    words = random.bits((29, "golden", 0, "tokens"), 0, 2 * 2 * 3 * 64).reshape(2, 2, 3, 64) % 61
    return words.astype(np.int64)


def trained(model, folder, ranks=2, **options):
    """The mean loss and the gradient's norm of one step of plain SGD, after which the run is saved."""
    x, target = sequences()

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=LR), **{"stage": 3} | options)
        result = engine.step(x[rank.index::ranks].reshape(-1, 64), target[rank.index::ranks].reshape(-1, 64))
        engine.save(folder)
        return result.losses[0], result.norm
    results = zs.Cluster(ranks).run(program)
    return np.mean([loss for loss, _ in results]), results[0][1]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folders_model_begins_with_its_weights_and_has_the_loss_and_gradients_of_transformers(kind, tmp_path):
    folder, weights = folder_of(kind, tmp_path)
    model = from_hugging_face(folder)

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=1.0), stage=rank.size)
        return {name: engine.state(name)["master"] for name in model.shapes}
    assert bits(pickle.loads(pickle.dumps(model)).first("wte", 30, 50)) == bits(weights["wte"].reshape(-1)[30:80])
    for ranks in (1, 3):
        found = zs.Cluster(ranks).run(program)[0]
        assert all(bits(found[name]) == bits(weights[name]) for name in weights)
    assert trained(model, tmp_path / "run") == pytest.approx(GOLDEN[kind], rel=1e-6)
    assert model_shape(folder).parameters == model.parameter_count


@pytest.mark.peer
@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_agrees_on_loss_and_gradients_and_reads_the_weights_back(kind, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, output_loading_info=True)
    folder, _ = folder_of(kind, tmp_path)
    theirs, about = read(folder, dtype=torch.float64)
    assert not any(about.values()), about
    x, target = (torch.tensor(one.reshape(-1, 64)) for one in sequences())
    loss = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), target.flatten())
    loss.backward()
    first = {name: (parameter.detach().clone(), parameter.grad) for name, parameter in theirs.named_parameters()}
    norm = math.sqrt(sum((gradient**2).sum().item() for _, gradient in first.values()))
    assert (loss.item(), norm) == pytest.approx(GOLDEN[kind], rel=1e-7)
    trained(from_hugging_face(folder), tmp_path / "run")
    export_weights(tmp_path / "run", tmp_path / "back", config=folder)
    back, about = read(tmp_path / "back")
    assert not any(about.values()), about
    assert (type(back), back.dtype) == (type(theirs), torch.float32)
    # The step leaves the gradient as a difference of weights, whose rounding to fp32 the learning rate makes small.
    # Whatever the weights' type, `transformers` computes RMSNorm and rotary angles in fp32: of a GPT-2, which has none
    # of them, it is 1e-15 from zerosim in fp64, of the others 1e-6, and as much again from zerosim in fp32.
    within = 1e-6 if kind == "gpt2" else 5e-6
    for name, parameter in back.named_parameters():
        before, gradient = first[name]
        found = (before - parameter.detach()) / LR
        assert (found - gradient).abs().max() < within * gradient.abs().max().clip(1e-2), name
    export_weights(tmp_path / "first", tmp_path / "same", config=folder)
    one, other = (read(place)[0].state_dict() for place in (folder, tmp_path / "same"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    own = json.loads((tmp_path / "back" / "config.json").read_text())
    assert own == {**CONFIGS[kind], "dtype": "float32"}
    config = transformers.AutoConfig.from_pretrained(folder)
    assert from_hugging_face(config).config == from_hugging_face(folder).config == from_hugging_face(back.config).config


def test_both_spellings_of_rotary_positions_are_one_config_and_each_scaling_changes_the_loss(tmp_path):
    plain = {key: value for key, value in CONFIGS["llama 3"].items() if key != "rope_parameters"}

    def config(**fields):
        return from_hugging_face(plain | fields).config
    new = config(rope_parameters={**LLAMA3, "rope_theta": 20.0})
    kind = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    assert new == config(rope_theta=20.0, rope_scaling=kind, rope_parameters=None)
    assert new == config(rope_theta=7.0, rope_scaling={**LLAMA3, "rope_theta": 20.0, "partial_rotary_factor": 1.0})
    assert (new.base, new.scaling) == (20.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    without = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert config(rope_scaling=without).scaling.original_context == 64, "the longest sequence, where nothing is said"
    assert config(rope_scaling={"type": "linear", "factor": 4}).scaling == LinearScaling(4)
    assert config() == config(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    _, weights = folder_of("llama 3", tmp_path)
    x, target = (one[0].reshape(-1, 64) for one in sequences())
    losses = {zs.models.one_pass(from_hugging_face(plain | {"rope_theta": 20.0, "rope_scaling": scaling}), weights,
                                 "fp32", x, target).loss
              for scaling in (None, LLAMA3, LLAMA3 | {"factor": 4.0}, LLAMA3 | {"low_freq_factor": 0.5},
                              LLAMA3 | {"high_freq_factor": 8.0}, LLAMA3 | {"original_max_position_embeddings": 64},
                              {"type": "linear", "factor": 8.0})}
    assert len({round(loss, 5) for loss in losses}) == 7, "each number of a scaling counts"


def test_what_planes_turn_and_what_layers_have_is_as_the_configuration_says():
    """Of Llama 3.1's own numbers: planes of at least 4 turns in 8,192 places stay, of at most 1 turn go 8 times slower.
    """
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    turns = np.array([40.0, 4.0, 2.5, 1.0, 0.1])
    slower = scaling.scaled(turns * 2 * math.pi / 8192) / (turns * 2 * math.pi / 8192)
    assert slower == pytest.approx([1, 1, (1 / 8 + 1) / 2, 1 / 8, 1 / 8])
    for kind, fields in CONFIGS.items():
        model = from_hugging_face(fields, dropout=0.25, seed=3, units="sub_block")
        assert model_shape_of(fields).parameters == model.parameter_count, kind
        assert (model.config.dropout, model.seed, len(model.units)) == (0.25, 3, 6)
        assert from_hugging_face(fields | {"tie_word_embeddings": True}).tied
        assert not from_hugging_face(fields | {"tie_word_embeddings": False}).tied
        epsilon = {"layer_norm_epsilon" if kind == "gpt2" else "rms_norm_eps": 0.5}
        assert from_hugging_face(fields | epsilon).config.epsilon == 0.5
    assert from_hugging_face(CONFIGS["mistral"] | {"sliding_window": None}, context=7).config.context == 7
    assert from_hugging_face(CONFIGS["gpt2"], context=7).config.context == 64, "a table stays whole"
    assert from_hugging_face(CONFIGS["qwen 3"] | {"attention_bias": True}).config.biases == ("qkv", "projection")
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    for qwen in (sliding | {"max_window_layers": 2}, sliding | {"layer_types": ["full_attention"] * 2},
                 {"sliding_window": 8}):
        assert from_hugging_face(CONFIGS["qwen 2"] | qwen).config.context == 64, qwen


def model_shape_of(fields):
    """The model as the planner counts it."""
    return zs.planning.shapes.model_of_config(fields)


# As their publishers wrote them, with what is of no consequence; and the parameters that the checkpoints load.
SAVED = {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
         "torch_dtype": "bfloat16", "initializer_range": 0.02, "transformers_version": "4.40.1", "use_cache": True}
PUBLISHED = [
    (SAVED | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
              "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
              "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
              "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
              "use_sliding_window": False, "vocab_size": 151936}, 494_032_768),  # Qwen2.5-0.5B
    (SAVED | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 576,
              "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
              "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
              "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
              "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152}, 134_515_008),  # SmolLM2-135M
    (SAVED | {"attention_bias": False, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192,
              "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 24,
              "num_hidden_layers": 28, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
              "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                               "original_max_position_embeddings": 8192, "rope_type": "llama3"},
              "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256}, 3_212_749_824),  # Llama 3.2
    ({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
      "bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
      "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
      "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
      "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
      "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}, 124_439_808),
    (SAVED | {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
              "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
              "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
              "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000}, 7_241_732_096)]


@pytest.mark.parametrize(("fields", "parameters"), PUBLISHED, ids=[str(count) for _, count in PUBLISHED])
def test_published_configurations_are_taken_as_they_are_and_count_what_their_checkpoints_load(fields, parameters):
    saved = SimpleNamespace(to_dict=lambda: fields)
    assert from_hugging_face(saved, context=1024).parameter_count == model_shape_of(fields).parameters == parameters


LLAMA, GPT2, QWEN, MISTRAL = (CONFIGS[kind] for kind in ("llama 3", "gpt2", "qwen 3", "mistral"))
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
BLOOM = {"model_type": "bloom", "hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}

class WithDict:
    """A configuration's class, given in place of a configuration."""

    def to_dict(self):
        return LLAMA


REFUSED = [
    (LLAMA | {"rope_parameters": {"rope_type": kind, "factor": 2.0}}, f"config.json: rope_type={kind!r} turns queries "
     "and keys as the engine cannot; it has default, linear, llama3") for kind in ("dynamic", "yarn", "longrope")] + [
    (LLAMA | {"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' take factor, and factor is missing or"),
    (LLAMA | {"rope_parameters": LLAMA3 | {"attention_factor": 2.0, "beta_fast": 1}}, "llama3' take factor, ..., and "
     "attention_factor, beta_fast are missing or of another type"),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "'default' take no numbers, and partial_rotary_fac"),
    (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "the engine turns all layers by the s"),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling={...} and rope_parameters={...} are tw"
     "o names of one; say one"),
    (LLAMA | {"rope_parameters": LLAMA3 | {"factor": 0}}, "config.json: Llama3Scaling was given factor=0; take a posi"),
    (LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 0}}, "config.json: LlamaConfig was given base=0; the rot"),
    (LLAMA | {"rms_norm_eps": math.inf}, "config.json: LlamaConfig was given epsilon=inf; it keeps a norm from div"),
    (LLAMA | {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "given low=4.0 and high=4.0, turns in the origin"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "config.json says partial_rotary_factor=0.5, which the engine has not; it"
     " has 1"),
    (LLAMA | {"hidden_act": "gelu"}, "says hidden_act='gelu', which the engine has not; it has 'silu' and 'swish'"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "says quantization_config={...}, which the engine has not; it has "),
    (LLAMA | {"head_dim": 5}, "config.json: LlamaConfig was given heads of 5 channels; rotary positions turn pairs"),
    (LLAMA | {"num_experts": 8}, "config.json says num_experts=8, and zerosim does not know whether that changes what a"
     " llama computes; if it does not, say ignore=('num_experts',) to from_hugging_face, or take it out"),
    (QWEN | {"mlp_bias": True}, "says mlp_bias=True, and zerosim does not know whether that changes what a qwen3 comp"),
    (LLAMA | {"max_position_embeddings": None}, "lacks max_position_embeddings; say your longest sequence by context="),
    (MISTRAL | {"sliding_window": 63}, "config.json: sliding_window=63 is shorter than the 64 tokens of the longest seq"
     "uence, ...; take shorter ones, by context=63, or --sequence 63"),
    ({key: value for key, value in MISTRAL.items() if key != "sliding_window"} | {"max_position_embeddings": 8192},
     "sliding_window=4096 is shorter than the 8192 tokens"),
    (QWEN | SLIDING | {"max_window_layers": 1}, "sliding_window=8 is shorter than the 64 tokens"),
    (QWEN | SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=8 is shorter"),
    (QWEN | {"layer_types": ["chunked_attention"] * 2}, "layer_types=['chunked_attention', 'chunked_attention']; the"),
    (QWEN | {"layer_types": 5}, "config.json: layer_types=5; it lists the kind of attention of each of 2 blocks"),
    (MISTRAL | {"sliding_window": "8"}, "config.json: sliding_window must be a whole number, got '8'"),
    (LLAMA | {"rope_parameters": {"rope_type": []}}, "rope_type=[] turns queries and keys as the engine cannot"),
    (GPT2 | {"activation_function": "relu"}, "says activation_function='relu', which the engine has not; it has 'gelu"),
    (GPT2 | {"scale_attn_weights": False}, "says scale_attn_weights=False, which the engine has not; it has True"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "says scale_attn_by_inverse_layer_idx=True, which the engine h"),
    (GPT2 | {"reorder_and_upcast_attn": True}, "says reorder_and_upcast_attn=True, which the engine has not"),
    (GPT2 | {"add_cross_attention": True}, "a GPT-2 with add_cross_attention"),
    (BLOOM, "config.json has the model_type 'bloom': the engine has no such layers; it has those of gpt2, llama, mistra"
     "l, qwen2, qwen3; zerosim plan counts it"),
    ({"model_type": "mamba"}, "has the model_type 'mamba', which zerosim cannot count; it counts gpt2, "),
    (7, "a model was asked for by 7; name a Hugging Face folder or its config.json, or give the configuration itself"),
    (WithDict, "a model was asked for by <class '...WithDict'>; name a Hugging Face folder or its config.json"),
    ("x" * 5000, "xxx was asked for, and cannot be read: File name too long"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_what_would_change_the_result_is_refused_by_its_key(fields, words):
    assert_refused(lambda: from_hugging_face(fields), literally(words))


def test_keys_that_change_nothing_are_ignored_and_others_if_one_says_so():
    idle = dict.fromkeys(model_types.table()["no_effect"], "anything") | {"_attn_implementation": "eager"}
    del idle["model_type"]
    for fields in CONFIGS.values():
        assert from_hugging_face(fields | idle).config == from_hugging_face(fields).config
        assert from_hugging_face(fields | {"mine": 1}, ignore=["mine"]).config == from_hugging_face(fields).config
    assert_refused(lambda: from_hugging_face(GPT2, context=0), "context=0 must be a whole number, 1 or more; pass None")
    assert_refused(lambda: from_hugging_face(GPT2, context=65), "a context of 65 .* there are 64 learned positions")


def test_weights_of_other_files_or_of_another_model_are_refused_and_a_configuration_alone_has_none(tmp_path):
    folder, _ = folder_of("llama 3", tmp_path)
    alone_ = from_hugging_face(folder / "config.json", seed=2)
    assert alone_.first is None
    assert alone_.config == from_hugging_face(str(folder)).config
    for file in folder.glob("model*"):
        file.rename(tmp_path / file.name)
    assert from_hugging_face(folder).first is None
    for other in ("pytorch_model-1.bin", "adapter_model.safetensors", "pytorch_model.bin.index.json", "tf_model.h5",
                  "llama.Q8_0.gguf", "consolidated.00.pth", "model.fp16.safetensors"):
        (folder / other).write_bytes(b"")
        assert_refused(lambda: from_hugging_face(folder), f"has its weights in {other}; zerosim reads model.safe")
        (folder / other).unlink()
    for file in tmp_path.glob("model*"):
        file.rename(folder / file.name)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    assert_refused(lambda: from_hugging_face(folder), "model.layers.1.* is of no weight of this model")
    assert_refused(lambda: from_hugging_face(tmp_path / "none"), "none was asked for, and is not there")


def test_a_folder_that_is_not_whole_is_refused_by_the_file_that_is_missing_or_cannot_be_read(tmp_path):
    folder, _ = folder_of("llama 3", tmp_path)
    second = sorted(folder.glob("model-*"))[1]
    content = second.read_bytes()
    second.unlink()
    words = f"{second.name}', and there is no such file beside it; take the whole folder"
    assert_refused(lambda: from_hugging_face(folder), words)
    done = ask("train", "--model", str(folder), "--steps", "1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    second.write_bytes(content)
    from_hugging_face(folder)
    (folder / "model.safetensors").symlink_to(tmp_path / "nowhere")  # as in a cache without its blobs
    assert_refused(lambda: from_hugging_face(folder), "model.safetensors cannot be read: No such file or directory; ta")
    (folder / "model.safetensors").unlink()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"vocab_size": 7, ', 1))
    assert_refused(lambda: from_hugging_face(folder), "is not JSON: the key 'vocab_size' stands there twice")


def test_of_one_file_and_several_the_one_is_read_as_transformers_does_and_what_is_no_number_is_refused(tmp_path):
    folder, weights = folder_of("llama 3", tmp_path)

    def first(rank):
        return zs.Engine(rank, from_hugging_face(folder), zs.optim.SGD(lr=1.0), stage=3).state("norm.weight")["master"]
    masters = {name: array + np.float32(name == "norm.weight") for name, array in weights.items()}
    model = from_hugging_face(folder)
    alone(lambda rank: zs.Engine(rank, model, zs.optim.SGD(lr=1.0), weights=masters).save(tmp_path / "other"))
    export_weights(tmp_path / "other", folder / "one.safetensors")
    (folder / "one.safetensors").rename(folder / "model.safetensors")
    assert bits(alone(first)) == bits(masters["norm.weight"])
    content = bytearray((folder / "model.safetensors").read_bytes())
    place = content.index(masters["norm.weight"].tobytes())
    content[place:place + 4] = np.float32(np.nan).tobytes()
    (folder / "model.safetensors").write_bytes(content)
    assert_refused(lambda: zs.Cluster(2).run(first), "norm.weight has NaN, inf or numbers beyond fp32 in 1 of 24 val")


@pytest.mark.parametrize(("kind", "other", "words"), [
    ("llama 3", {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
     "scaling is None there, and Llama3Scaling(...) here; build the one that the weights are of"),
    ("qwen 2", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rms_norm_eps": 1e-5},
     "is of another model: epsilon is 1e-05 there, and 1e-06 here; scaling is LinearScaling(factor=2.0) there"),
    ("mistral", {"sliding_window": 8}, "sliding_window=8 is shorter than the 64 tokens"),
    ("qwen 3", {"vocab_size": 62, "head_dim": 6}, "vocabulary is 62 there, and 61 here; head_channels is 6 there"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False, which the engine has not"),
    ("linear", CONFIGS["gpt2"], "is of another model: kind is GPT there, and Llama here; build the one"),
    ("linear", {"tie_word_embeddings": False}, "is of another model: tied is False there, and True here"),
    ("linear", {"model_type": "mamba"}, "has the model_type 'mamba', which zerosim cannot count"),
])
def test_weights_are_not_loaded_from_a_folder_whose_configuration_is_of_another_model(kind, other, words, tmp_path):
    folder, weights = folder_of(kind, tmp_path)
    model = from_hugging_face(CONFIGS[kind], dropout=0.5)

    def program(rank):
        engine = zs.Engine(rank, model, zs.optim.SGD(lr=0.1), stage=3)
        engine.load_weights(folder)
        assert all(bits(engine.state(name)["master"]) == bits(weights[name]) for name in weights)
        rank.barrier()
        if rank.index == 0:
            (folder / "config.json").write_text(json.dumps(other if "model_type" in other else CONFIGS[kind] | other))
        rank.barrier()
        assert_refused(lambda: engine.load_weights(folder), literally(words), CheckpointError)
        assert all(bits(engine.state(name)["master"]) == bits(weights[name]) for name in weights)
    zs.Cluster(2).run(program)


def test_a_configuration_goes_with_exported_weights_of_its_own_model_alone(tmp_path):
    folder_of("qwen 2", tmp_path)
    export = partial(export_weights, tmp_path / "first", tmp_path / "out")
    assert_refused(lambda: export(config=CONFIGS["qwen 2"] | {"num_hidden_layers": 3}),
                   r"config.json is of a model with block2.* of shape .*, and in the checkpoint it is of None; give")
    assert_refused(lambda: export(config=CONFIGS["qwen 3"]), "config.json is of a model with .*; give the config")
    assert not (tmp_path / "out").exists()
    written = export(config=CONFIGS["qwen 2"] | {"torch_dtype": "bfloat16", "mine": [1]})
    assert [file.name for file in written] == ["model.safetensors", "config.json"]
    assert json.loads(written[-1].read_text()) == CONFIGS["qwen 2"] | {"torch_dtype": "float32", "mine": [1]}


def test_a_folder_trains_on_bytes_from_its_weights_and_goes_back_by_commands(tmp_path):
    fields = CONFIGS["mistral"] | {"vocab_size": 300, "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    train = partial(ask, "train", "--ranks", "2", "--batch", "1", "--sample", "4", "--compute", "fp32", "--model")
    assert "take shorter ones, by context=16, or --sequence 16" in train(str(tmp_path)).output
    run = str(tmp_path / "run")
    found = train(str(tmp_path), "--sequence", "16", "--steps", "2", "--checkpoint", run, "--save-every", "2")
    assert "Steps: 2, of 32 tokens each" in found.output
    assert "The text's bytes are tokens 0 to 255 of 300: no tokenizer cut it." in found.output
    assert ask("export", run, str(tmp_path / "out"), "--config", str(tmp_path)).exit_code == 0
    again = [json.loads(train(str(place), "--sequence", "16", "--steps", "1", "--json").stdout)
             for place in (tmp_path, tmp_path / "out")]
    assert again[0]["steps"][0]["loss"] != again[1]["steps"][0]["loss"], "one is drawn, one goes on"
    assert "vocabulary is 300 there, and 256 here" in train("llama-nano", "--weights", str(tmp_path / "out")).output
    assert "--sequence 9 is more than the context of gpt-nano, 8 tokens" in train("gpt-nano", "--sequence", "9").output
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 255}))
    assert "has a vocabulary of 255 tokens, and a text is read as bytes, tokens 0 to 255; take a model with" in (
        train(str(tmp_path), "--sequence", "16").output.replace("\n", " "))
