"""Configurations drawn at random: what zerosim counts of them, and what `transformers` makes and multiplies."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerosim.models import model_types
from zerosim.planning import flops, model_shape, shapes

FLAG, FEW, SOME, WIDTH = st.booleans(), st.integers(1, 3), st.integers(1, 20), st.sampled_from([4, 8, 12])
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@st.composite
def sizes(draw, grouped=True, head_dim=True, heads="num_attention_heads"):
    """The fields of most types."""
    groups = draw(FEW)
    count, width = groups * draw(FEW), draw(WIDTH)
    return {"hidden_size": draw(FEW) * 4 * count if head_dim else width * count, "intermediate_size": draw(SOME),
            "num_hidden_layers": draw(st.integers(1, 4)), heads: count, "vocab_size": draw(st.integers(20, 60)),
            "max_position_embeddings": 16, "tie_word_embeddings": draw(FLAG), **SPECIAL,
            **({"num_key_value_heads": groups} if grouped else {}), **({"head_dim": width} if head_dim else {})}


@st.composite
def experts(draw, base, count="num_experts", **others):
    """Of a sparse type the sizes of `base`, and experts."""
    found = draw(st.fixed_dictionaries({count: st.integers(2, 5), **others}))
    return draw(base) | found | {"num_experts_per_tok": draw(st.integers(1, found[count]))}


def of(base, **others):
    """Sizes, and other fields each drawn by its own strategy."""
    return st.builds(lambda first, more: first | more, base, st.fixed_dictionaries(others))


def renamed(base, *left_out, **names):
    """Sizes under other names."""
    return base.map(lambda found: {names.get(key, key): value for key, value in found.items() if key not in left_out})


def opts(found):
    """An embedding as wide as the blocks, or narrower."""
    return found | {"word_embed_proj_dim": found["word_embed_proj_dim"] or found["hidden_size"]}


PLAIN, WIDE = sizes(), sizes(head_dim=False)
SAME, BIASED = sizes(grouped=False, head_dim=False), {"attention_bias": FLAG}
QWEN_MOE = {"moe_intermediate_size": SOME, "decoder_sparse_step": FEW, "mlp_only_layers": st.lists(st.integers(0, 3))}
DEEPSEEK = experts(
    SAME, "n_routed_experts", moe_intermediate_size=SOME, kv_lora_rank=WIDTH, q_lora_rank=st.none() | SOME,
    qk_nope_head_dim=WIDTH, qk_rope_head_dim=WIDTH, v_head_dim=SOME, first_k_dense_replace=st.integers(0, 4),
    n_shared_experts=FEW, n_group=st.just(1), topk_group=st.just(1), **BIASED)
T5 = st.fixed_dictionaries({
    "d_model": SOME, "d_kv": SOME, "d_ff": SOME, "num_layers": FEW, "num_decoder_layers": st.none() | FEW,
    "num_heads": FEW, "vocab_size": SOME, "relative_attention_num_buckets": st.sampled_from([8, 32]),
    "feed_forward_proj": st.sampled_from(["relu", "gated-gelu"]), "tie_word_embeddings": FLAG})
DRAWN = {
    "gpt2": of(renamed(SAME, "intermediate_size", hidden_size="n_embd", num_hidden_layers="n_layer",
                       num_attention_heads="n_head", max_position_embeddings="n_positions"), n_inner=st.none() | SOME),
    "opt": of(renamed(SAME, intermediate_size="ffn_dim"), word_embed_proj_dim=st.sampled_from([0, 5]),
              do_layer_norm_before=FLAG, enable_bias=FLAG, layer_norm_elementwise_affine=FLAG,
              _remove_final_layer_norm=FLAG).map(opts),
    "bloom": renamed(SAME, "intermediate_size", "max_position_embeddings", num_hidden_layers="n_layer",
                     num_attention_heads="n_head"),
    "llama": of(PLAIN, mlp_bias=FLAG, **BIASED), "mistral": PLAIN, "qwen2": WIDE, "qwen3": of(PLAIN, **BIASED),
    "mixtral": experts(PLAIN, "num_local_experts"),
    "qwen2_moe": experts(WIDE, shared_expert_intermediate_size=SOME, qkv_bias=FLAG, **QWEN_MOE),
    "qwen3_moe": experts(PLAIN, **QWEN_MOE, **BIASED),
    "llama4_text": experts(PLAIN, "num_local_experts", intermediate_size_mlp=SOME, interleave_moe_layer_step=FEW,
                           moe_layers=st.none() | st.lists(st.integers(0, 3)), **BIASED),
    "gemma": of(PLAIN, **BIASED), "gemma2": of(PLAIN, **BIASED), "gemma3_text": of(PLAIN, **BIASED),
    "phi": of(WIDE, qk_layernorm=FLAG), "phi3": WIDE,
    "gpt_neox": of(SAME, use_parallel_residual=FLAG, **BIASED),
    "falcon": of(renamed(WIDE, num_key_value_heads="num_kv_heads", intermediate_size="ffn_hidden_size"), bias=FLAG,
                 new_decoder_architecture=FLAG, multi_query=FLAG, parallel_attn=FLAG,
                 num_ln_in_parallel_attn=st.sampled_from([None, 1, 2])),
    "olmo": of(WIDE, **BIASED), "olmo2": of(WIDE, **BIASED), "deepseek_v2": of(DEEPSEEK, mlp_bias=FLAG),
    "deepseek_v3": DEEPSEEK, "t5": T5,
    "bert": of(SAME, type_vocab_size=FEW, tie_word_embeddings=st.just(True),
               architectures=st.sampled_from([["BertForPreTraining"], ["BertForMaskedLM"]]))}
DRAWS = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def made(kind, drawn, device):
    """The configuration that `transformers` makes of fields, and its model."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**drawn)
    config._attn_implementation = config._experts_implementation = "eager"
    name = (config.architectures or [""])[0] or {"t5": "AutoModelForSeq2SeqLM"}.get(kind, "AutoModelForCausalLM")
    maker = getattr(transformers, name)
    with torch.device(device):
        return config, maker.from_config(config) if name.startswith("Auto") else maker(config)


@pytest.mark.peer
@pytest.mark.parametrize("kind", model_types.model_types())
def test_each_type_has_the_parameters_of_the_model_that_transformers_makes(kind):
    pytest.importorskip("transformers")

    @DRAWS
    @given(DRAWN[kind])
    def check(drawn):
        config, model = made(kind, drawn, "meta")
        counted = shapes.model_of_config(config.to_dict())
        assert counted.parameters == sum(one.numel() for one in model.parameters())
        wrapper = next((name for name, text in model_types.table()["text_models"].items() if text == kind), None)
        if wrapper:
            inside = {"model_type": wrapper, "text_config": config.to_dict()}
            assert shapes.model_of_config(inside).units == counted.units
    check()


@pytest.mark.peer
@pytest.mark.parametrize("kind", [kind for kind in model_types.model_types() if kind != "t5"])
def test_a_forward_pass_of_each_type_multiplies_as_often_as_counted(kind):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode  # asks for torch

    @DRAWS
    @given(DRAWN[kind], FEW, st.integers(1, 8))
    def check(drawn, batch, tokens):
        if kind == "llama4_text":  # all experts compute all tokens there, and those that are not chosen read zeros
            drawn["num_experts_per_tok"] = drawn["num_local_experts"]
        if kind == "falcon":  # of other combinations `transformers` has the weights, and cannot run them
            drawn["parallel_attn"] |= drawn["new_decoder_architecture"]
            if not drawn["new_decoder_architecture"]:
                drawn |= {"num_ln_in_parallel_attn": None, "num_kv_heads": None}
        if kind == "deepseek_v3":  # left out, 128
            drawn["num_key_value_heads"] = drawn["num_attention_heads"]
        config, model = made(kind, drawn, "cpu")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros((batch, tokens), dtype=torch.long))
        counted = flops.step_flops(shapes.model_of_config(config.to_dict()).transformer, batch, tokens)
        assert counter.get_total_flops() == counted.forward
    check()


def test_a_checkpoint_that_reads_pictures_is_counted_without_them_and_says_so():
    """Sizes of google/gemma-3-4b-pt: its file leaves out heads and vocabulary."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    found = shapes.model_of_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, name="c")
    assert found.name == "c (its text_config: zerosim counts no pictures)"
    assert found.parameters == model_shape("gemma-3-4b").parameters
