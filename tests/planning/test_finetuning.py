"""Models on paper that are trained further: what is frozen, what adapters add, what is stored in fewer bits."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.optim import Adam, state_nbytes
from zerosim.planning import (
    ADAM_8BIT,
    PRESETS,
    STAGES,
    Job,
    Transformer,
    frozen,
    lora,
    model_of,
    model_shape,
    quantized,
    runtimes,
    saved_tensors,
    shapes,
    states_nbytes,
)

NAMES = ("llama-3.2-1b", "gpt2", "phi-3-mini", "mixtral-8x7b", "deepseek-v2-lite", "t5-small", "opt-350m")
FEW_BLOCKS = st.builds(lambda heads, width, blocks, fused, gated: Transformer(
    heads * width, blocks, heads, 99, feed_forward=24, key_value_heads=1, fused=fused, gated=gated),
    *[st.integers(1, 4)] * 3, st.booleans(), st.booleans())


@given(FEW_BLOCKS, st.integers(1, 16), st.sampled_from(["", "nf4", "int8"]))
def test_an_adapter_of_rank_r_has_r_parameters_for_each_input_and_output_and_all_else_is_frozen(of, rank, stored):
    """By the sizes of the layers: d -> H·d_h, here d, and d -> H_kv·d_h, twice, or one matrix for all three."""
    base, d, key = model_of("m", of), of.channels, of.key_channels
    adapted = lora(base, rank, stored=stored)
    wide = rank * of.blocks * ((d + d + 2 * key) if of.fused else (d + d) + (d + key))
    assert adapted.trainable_parameters == wide
    assert adapted.parameters == base.parameters + adapted.trainable_parameters
    opening = (2 * d + 2 * key) if of.fused else (d + d) + 2 * (d + key)
    up = (d + 2 * of.feed_forward) if of.fused and of.gated else (1 + of.gated) * (d + of.feed_forward)
    everywhere = opening + 2 * d + up + of.feed_forward + d
    assert lora(base, rank, ["all"]).trainable_parameters == rank * of.blocks * everywhere
    assert [tensor for tensor in adapted.tensors if tensor.frozen and not tensor.bits] == [
        tensor for tensor in frozen(base).tensors if not stored or len(tensor.shape) == 1 or tensor.name.startswith(
            ("wte", "lm_head"))]


@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_the_blocks_matrices_and_cannot_be_trained(name):
    base = model_shape(name)
    for stored, bits in (("nf4", 4 + Fraction(8, 64) + Fraction(32, 64 * 256)), ("nf4-single", Fraction(9, 2))):
        found = quantized(base, stored)
        small = [tensor for unit in found.units for tensor in unit.tensors if tensor.bits]
        assert {tensor.bits for tensor in small} == {bits}
        assert all(tensor.frozen and len(tensor.shape) > 1 for tensor in small)
        assert not any(tensor.bits for unit in (found.units[0], found.units[-1]) for tensor in unit.tensors)
        assert not any(part in tensor.name for tensor in small for part in ("router", "relative", ".ln"))
        assert found.parameters == base.parameters == found.trainable_parameters + sum(
            tensor.parameters for tensor in small)
        assert sum(tensor.nbytes(2) for tensor in found.tensors) == 2 * found.trainable_parameters + sum(
            math.ceil(tensor.parameters * bits / 8) for tensor in small)
    assert frozen(base, but=["wte"]).trainable_parameters == base.tensors[0].parameters


@given(st.lists(st.integers(1, 300) | st.sampled_from([512, 4095, 4096]), min_size=1, max_size=3))
def test_states_in_8_bits_take_a_byte_and_an_absmax_for_each_256_of_what_is_large_enough_and_of_matrices_whole_blocks(
        shape):
    count = math.prod(shape)
    blocks = len(range(0, count, 256))
    small = count >= 4096 and (len(shape) == 1 or not count % 256)
    assert state_nbytes(ADAM_8BIT, tuple(shape)) == 2 * (count + 4 * blocks if small else 4 * count)


def test_adam_in_8_bits_keeps_a_quarter_of_adams_state_and_is_counted_in_a_plan_of_states():
    whole, small = (states_nbytes(model_shape("gpt2"), 1, STAGES[0], optimizer=of)["optimizer_state"]
                    for of in (Adam(), ADAM_8BIT))
    assert whole == 8 * model_shape("gpt2").parameters
    assert 2 * whole / 8 < small < 2.05 * whole / 8


def test_state_is_of_shards_of_tensors_in_fsdp2_and_of_one_flat_share_in_deepspeed():
    """Of Llama 3.2 1B on 8 ranks: matrices d x d, d x d/4, d x 4d, and norms of d = 2,048, whose shards are small."""
    asked = {"ranks": 8, "recompute": "block", "sequence": 2048}
    parameters, norms = model_shape("llama-3.2-1b").parameters, 33 * 2048

    def state(runtime, stage, optimizer):
        (row,) = zs.plan("llama-3.2-1b", runtime=runtime, stage=stage, optimizer=optimizer, **asked).rows
        return sum(one.nbytes for one in row.held if one.kind == "optimizer" and "state" in one.what), row

    for stage in (2, 3):  # m and v are of a byte in blocks of 256; and of four, of norms, of which 256 are of a rank
        found, row = state("fsdp2", stage, "adamw8bit")
        assert found == 2 * ((parameters - norms) // 8 * 65 // 64 + 4 * norms // 8)
        assert row.update_seconds < state("fsdp2", stage, "adamw")[1].update_seconds
        assert state("fsdp2", stage, "Muon")[0] == 4 * (parameters + norms) // 8  # a buffer, of norms two
    share = parameters // 8
    assert state("deepspeed", 3, "adamw8bit")[0] == 2 * (share + 4 * -(-share // 256))
    assert state("deepspeed", 3, "adafactor")[0] == 4 * share  # a vector has no rows and columns
    assert state("fsdp2", 3, "adafactor")[0] < share / 50


@given(st.sampled_from(["gpt2", "llama-3.2-1b"]), st.sampled_from([0, 1, 2, 3]), st.sampled_from(runtimes.RECOMPUTED),
       st.sets(st.sampled_from(["embed", "block?", "block1?", "head", "ln*", "down"]), min_size=1))
def test_the_more_is_trained_the_more_is_held_sent_and_computed_and_with_all_it_is_the_whole_model(
        name, stage, policy, trained):
    asked = {"stage": stage, "recompute": policy, "ranks": 8, "sequence": 512}
    more, all_of_it = [*trained, "projection", "block?"], [*trained, "*"]
    (some,), (wider,), (every,) = (zs.plan(name, **asked, train_only=names).rows for names in (
        sorted(trained), more, all_of_it))
    assert [every] == [*zs.plan(name, **asked).rows]
    for measure in ("total_nbytes", "sent_nbytes_per_step", "model_flops_per_step", "flops_per_step",
                    "compute_seconds", "update_seconds"):
        values = [getattr(row, measure) for row in (some, wider, every)]
        assert values == sorted(values), measure


def test_gradients_of_adapters_alone_are_sent_and_frozen_weights_are_gathered_as_they_rest():
    """Of a ring of 4 ranks 3/4 of a vector are sent: gradients in fp32, parameters in bf16 twice, but for
    the root, which stays."""
    asked, full = {"ranks": 4, "recompute": "none", "sequence": 512}, model_shape("llama-2-7b")
    adapters = lora(full, 16).trainable_parameters
    rows = {stage: zs.plan("llama-2-7b", stage=stage, lora=16, **asked).rows[0] for stage in (0, 2, 3)}
    control = 100
    for stage, nbytes in ((0, 2 * 4 * adapters), (2, 4 * adapters + 2 * adapters),
                          (3, 4 * adapters + 2 * 2 * (full.parameters + adapters) - 2 * (2 * 32_000 + 1) * 4096)):
        assert 0 <= rows[stage].sent_nbytes_per_step - nbytes * 3 // 4 < control
    (packed,) = zs.plan("llama-2-7b", stage=3, lora=16, weights="nf4", **asked).rows
    assert 0.27 < packed.sent_nbytes_per_step / rows[3].sent_nbytes_per_step < 0.30
    (whole,) = zs.plan("llama-2-7b", stage=3, **asked).rows
    assert 2 / 3 < rows[3].compute_seconds / whole.compute_seconds < 0.85
    assert rows[3].update_seconds < whole.update_seconds / 100
    (head,) = zs.plan("llama-2-7b", stage=3, train_only="head", **asked).rows
    assert head.compute_seconds < 0.4 * whole.compute_seconds
    assert head.sent_nbytes_per_step < rows[3].sent_nbytes_per_step  # blocks are gathered once


def test_a_block_keeps_with_adapters_what_autograd_was_measured_to_keep():
    """Bytes of a token over 2d in a Llama's block, d = 256, F = 768, of transformers 5.24 with peft 0.21, 2026-11."""
    model = shapes.model_of_config({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "vocab_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": False})
    for changed, measured in ((model, 22.578125), (lora(model, 16), 16.703125), (lora(model, 16, ["all"]), 21.015625)):
        sizes = runtimes.StepSizes(changed, Job((1,), 1, STAGES[2]), saved_tensors.Forward(2, 128), "none", Adam(), 1,
                                   True)
        assert {kept / (2 * 128 * 2 * 256) for kept in sizes.kept} == {measured}


def test_of_experts_a_token_meets_those_that_it_passes():
    """Mixtral's: two of eight networks of 3·d·F in each block; the rest, the router included, is met."""
    for name in ("mixtral-8x7b", "mixtral-8x22b"):
        of, model = PRESETS[name], model_shape(name)
        assert model.parameters - model.active_parameters == 6 * of.blocks * 3 * of.channels * of.experts.feed_forward
    assert model_shape("llama-3.1-8b").active_parameters == model_shape("llama-3.1-8b").parameters
