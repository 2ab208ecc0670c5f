"""Sizes as the checkpoints' own configuration files name them, and the number of parameters that they load; a link and
a device as a user writes them into a file of his own; whether a plan has a row with its margin."""

from itertools import product

import zerosim as zs

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

OWN_LINK = """
[link.mine]
bytes_per_second = 400e9
latency_seconds = 2.1e-6
source = "measured"
date = 2025-06-01
"""
OWN_DEVICE = """
[device.mine]
capacity_nbytes = 96e9
reported_nbytes = 95_000_000_000
memory_bytes_per_second = 4e12
flops_per_second = { bf16 = 1e15 }
source = "a data sheet"
date = "2025-06"
"""


def some_row_fits(config: zs.planning.PlanConfig) -> bool:
    """By its bytes, which are those of the plan's rows: `test_plan`, and `test_plans_agree`."""
    return any(config.has_margin(stage, policy) for stage, policy in product(config.stages, config.policies))
