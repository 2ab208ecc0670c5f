"""Models that have a name: the sizes of published transformers, each with its source.

Sizes of published checkpoints are those of their configuration files; where a paper gives only channels, blocks and
heads, the vocabulary and the positions are GPT-2's, and the comment says so.
"""

from collections.abc import Mapping
from dataclasses import replace

from zerosim.planning.shapes import Transformer

GPT2_VOCABULARY = 50_257
MEGATRON_VOCABULARY = 51_200  # GPT-2's, padded to a multiple of 1024


def gpt(channels: int, blocks: int, heads: int, vocabulary: int = GPT2_VOCABULARY, positions: int = 1024,
        feed_forward: int = 0) -> Transformer:
    """A GPT: learned positions, LayerNorm, biases everywhere, tied. Source: Radford et al. 2019, section 2.3."""
    return Transformer(channels, blocks, heads, vocabulary, feed_forward=feed_forward, positions=positions,
                       fused_qkv=True, tokens=positions)


def opt(channels: int, blocks: int, heads: int) -> Transformer:
    """An OPT: as GPT, 2048 positions and two more that stand for padding. Source: Zhang et al. 2022, table 1."""
    return Transformer(channels, blocks, heads, 50_272, positions=2050, tokens=2048)


def bloom(channels: int, blocks: int, heads: int) -> Transformer:
    """A BLOOM: ALiBi, a LayerNorm after the embedding, tied. Source: BigScience 2022, table 3 and section 3.2."""
    return Transformer(channels, blocks, heads, 250_880, fused_qkv=True, embedding_norm=True, tokens=2048)


def llama(channels: int, blocks: int, heads: int, vocabulary: int, feed_forward: int, key_value_heads: int = 0,
          tokens: int = 4096) -> Transformer:
    """A Llama: rotary positions, RMSNorm, gated, no biases, not tied. Source: Touvron et al. 2023, section 2.2."""
    return Transformer(channels, blocks, heads, vocabulary, feed_forward=feed_forward, key_value_heads=key_value_heads,
                       biases=(), layer_norm=False, gated=True, tied=False, tokens=tokens)


def t5(channels: int, blocks: int, heads: int, feed_forward: int, head_channels: int = 64) -> Transformer:
    """A T5: n blocks in encoder and decoder, relative positions, RMSNorm. Source: Raffel et al. 2020, section 2.1."""
    return Transformer(channels, blocks, heads, 32_128, feed_forward=feed_forward, head_channels=head_channels,
                       biases=(), layer_norm=False, encoder_blocks=blocks, relative_buckets=32, tokens=512)


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
    # Touvron et al. 2023, section 2.2 and table 1.
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
    "qwen2-0.5b": replace(llama(896, 24, 14, 151_936, 4864, 2, 32_768), biases=("qkv",), tied=True),
    "qwen2-7b": replace(llama(3584, 28, 28, 152_064, 18_944, 4, 131_072), biases=("qkv",)),
    "qwen2-72b": replace(llama(8192, 80, 64, 152_064, 29_568, 8, 131_072), biases=("qkv",)),
    # Raffel et al. 2020, section 3.7.
    "t5-small": t5(512, 6, 8, 2048),
    "t5-base": t5(768, 12, 12, 3072),
    "t5-large": t5(1024, 24, 16, 4096),
    "t5-3b": t5(1024, 24, 32, 16_384, 128),
    "t5-11b": t5(1024, 24, 128, 65_536, 128),
    # Rajbhandari et al. 2020, appendix, table 4: channels, blocks and heads; vocabulary and positions are GPT-2's.
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
