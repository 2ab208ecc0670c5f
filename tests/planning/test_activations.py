"""Kept activations and operations by formulas, for every block and policy.

That layers keep and compute as much, `tests/models/test_gpt_activations.py` holds.

Published numbers are rows of `zerosim/course/published`, which `test_published` computes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from zerosim.course.published import quantities as published
from zerosim.planning import (
    PRESETS,
    Block,
    LatentAttention,
    Transformer,
    activations,
    flops,
    model_of,
    step_activations,
)

EXAMPLE = activations.EXAMPLE  # d = 4096, H = 32, L = 2048, B = 4, in 16 bit
POLICIES = ["none", "block", "segment(2)", "segment(5)", *[*activations.INSIDE][1:], "block+tiled",
            "segment(3)+selective"]
# Plain blocks of B, L, d, H, in 16 or 32 bits; and any others, with grouped queries, gates and insides of their own.
PLAIN = st.builds(lambda batch, tokens, width, heads, itemsize: Block(batch, tokens, heads * width, heads, itemsize),
                  st.integers(1, 5), st.integers(1, 40), st.integers(1, 20), st.integers(1, 6), st.sampled_from([2, 4]))
IN_16_BIT = PLAIN.map(lambda block: Block(block.batch, block.tokens, block.channels, block.heads))
ANY_BLOCK = st.builds(
    lambda batch, tokens, groups, shared, width, feed_forward, gated, norms, parallel, latents: Block.of(
        Transformer(3 * width, 1, groups * shared, 1, feed_forward, 0 if latents else groups, width, gated=gated,
                    norms=norms, parallel=parallel or norms == "shared",
                    latent=LatentAttention(latents, 1, width, 2 * latents) if latents else None), batch, tokens),
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40),
    st.booleans(), st.sampled_from(["before", "after", "around", "last", "shared"]), st.booleans(), st.integers(0, 9))
COUNT = st.integers(1, 12)


# -- bytes ------------------------------------------------------------------------------------------------------------


@given(PLAIN, COUNT, st.integers(1, 15))
def test_what_n_blocks_keep_is_the_closed_form(block, n, k):
    bld, square, bl = block.stream, block.square, block.batch * block.tokens
    whole, starts = 14 * bld + square, range(0, n, k)
    for policy, elements, statistics in [
            ("none", n * whole, 4 * n * bl), ("block", n * bld + 13 * bld + square, 4 * bl),
            ("selective", 14 * n * bld + square, 4 * n * bl),
            ("tiled", 14 * n * bld, 4 * n * bl + n * bl * block.heads),
            ("sub_block", 2 * n * bld + max(4 * bld + square, 8 * bld), 2 * bl)]:
        found = activations.peak_nbytes(block, n, policy)
        assert (found.elements, found.statistics) == (elements, statistics), policy
        assert found.nbytes == elements * block.itemsize + 4 * statistics
    # The inputs of the earlier segments and all of one: a shorter last segment is counted as it is. The published
    # (n/k)BLd + k(14·BLd + BHL²) has the input of the segment in use in both of its terms.
    by_segment = [index * bld + min(k, n - start) * whole for index, start in enumerate(starts)]
    assert activations.peak_nbytes(block, n, f"segment({k})").elements == max(by_segment)
    assert activations.peak_nbytes(block, n * k, f"segment({k})").elements == n * bld + k * whole - bld
    best = activations.best_segment(block, n)
    smooth = [n / length * bld + length * whole for length in (best * 0.99, best, best * 1.01)]
    assert smooth[1] == min(smooth)


@given(PLAIN, COUNT, st.sampled_from(POLICIES))
def test_what_a_block_keeps_is_the_sum_of_its_tensors_and_none_keeps_most_but_for_what_is_in_use(block, n, policy):
    nbytes = sum(part.nbytes for part in activations.tensors(block, policy).values())
    assert nbytes == activations.kept(block, policy).nbytes
    extra = block.square if "selective" in policy else block.positions * block.heads * n * 4
    most = activations.peak_nbytes(block, n).nbytes + block.itemsize * extra
    assert activations.peak_nbytes(block, n, policy).nbytes <= most


def test_grouped_queries_and_gates_keep_their_own_widths():
    block = Block.of(PRESETS["llama-2-70b"], 1, 2048)
    held = {name: part.elements // block.positions for name, part in activations.tensors(block).items()
            if part.elements and name != "probabilities"}
    assert held == {"LayerNorm 1 input": 8192, "QKV": 8192 + 2 * 1024, "attention output": 8192,
                    "LayerNorm 2 input": 8192, "pre-GELU": 2 * 28672, "post-GELU": 28672}
    plain = Block(2, 8, 12, 3)
    assert plain == Block.of(Transformer(12, 1, 3, 1, feed_forward=48), 2, 8)
    assert (plain.is_plain, Block.of(Transformer(12, 1, 3, 1, feed_forward=47), 2, 8).is_plain) == (True, False)


def test_norms_behind_parts_keep_what_these_give_and_parts_beside_each_other_one_input():
    """Of OLMo 2, Gemma 2 and Falcon: outputs of parts and their norms' numbers, by what each layer reads."""
    for name, streams, norms in (("llama-3-8b", 2, 2), ("olmo-2-7b", 4, 2), ("gemma-2-9b", 4, 4), ("bert-base", 3, 2),
                                 ("pythia-1b", 1, 2), ("falcon-7b", 1, 1)):
        block = Block.of(PRESETS[name], 2, 64)
        held = activations.tensors(block)
        inside = sum(held[part].elements for part in ("QKV", "probabilities", "attention output", "pre-GELU",
                                                      "post-GELU"))
        assert activations.kept(block).elements - inside == streams * block.stream, name
        inner = block.positions * (2 if name.startswith("olmo") else 0)
        assert activations.kept(block).statistics == norms * block.norm_statistics + inner, name


def test_latent_attention_keeps_its_latents_and_experts_what_a_token_passes():
    """Of DeepSeek-V3: 128 heads of 192 for queries and keys, of 128 for values; 1,536, 512 and 64 between; 9 of 257."""
    held = {name: part.elements // 8 for name, part in activations.tensors(
        Block.of(PRESETS["deepseek-v3"], 1, 8)).items()}
    assert held["QKV"] == 128 * (192 + 192 + 128) + 1536 + 512 + 64
    assert (held["attention output"], held["post-GELU"]) == (128 * 128, 9 * 2048)
    kinds = Block.kinds(PRESETS["deepseek-v2-lite"], 1, 8)
    assert {(block.sizes.feed_forward, block.router): count for block, count in kinds.items()} == {
        (10_944, 0): 1, (8 * 1408, 64): 26}


@given(ANY_BLOCK, st.integers(1, 5), st.integers(1, 50), st.sampled_from(POLICIES))
def test_after_forward_blocks_hold_what_they_keep_and_the_fullest_moment_of_any_batch_is_the_fullest_of_all(
        block, blocks, vocabulary, policy):
    moments = step_activations.snapshots(block, blocks, vocabulary, policy)
    (loss,) = [moment for moment in moments if (moment.phase, moment.step) == ("forward", "loss")]
    head = block.stream * 2 + block.positions * (2 * vocabulary + 3 * 4)  # its input, the logits, three numbers each
    if zs.models.Recompute.parse(policy).units_per_segment is None and policy != "sub_block":
        assert loss.nbytes == {"activation": blocks * activations.kept(block, policy).nbytes + head}
    most = max(moment.total_nbytes for moment in moments)
    assert step_activations.fullest_nbytes(block, blocks, vocabulary, policy) == most


def test_logits_cost_an_element_each_and_a_position_a_log_sum_exp():
    for itemsize in (2, 4):
        block = Block(4, 2048, 4096, 32, itemsize)
        assert activations.logits_nbytes(block, 32000) == block.positions * (itemsize * 32000 + 4)


# -- bytes as the literature counts them ------------------------------------------------------------------------------


@given(IN_16_BIT, st.integers(2, 5))
def test_the_literatures_count_is_sbh_times_34_plus_5as_over_h_and_its_closed_forms(block, t):
    """It keeps masks and LayerNorm outputs beside; statistics are in neither count."""
    sbh, square = block.stream, 5 * block.square
    assert published.layer_nbytes(block) == 34 * sbh + square >= 2 * activations.kept(block).elements
    if block.heads % t == 0:
        cut = {"none": 24 * sbh + square, "selective": 24 * sbh}
        for recompute, shared in cut.items():
            nbytes = published.layer_nbytes(block, tensor_parallel=t, recompute=recompute)
            assert nbytes * t == 10 * sbh * t + shared
        assert published.layer_nbytes(block, tensor_parallel=t, sequence_parallel=True) * t == 34 * sbh + square
        assert published.layer_nbytes(block, tensor_parallel=t, recompute="full") == 2 * sbh


# -- operations of a block --------------------------------------------------------------------------------------------


def test_the_published_example_saves_its_published_bytes_for_each_operation():
    savings = {row.tensor: float(f"{row.nbytes_per_flop:.2g}") for row in flops.savings(EXAMPLE)}
    assert savings == {"post-GELU": 0.25, "probabilities": 7.7e-3, "attention output": 4.9e-4,
                       "LayerNorm statistics": 3.9e-4, "LayerNorm 2 input": 2.4e-4, "pre-GELU": 2.4e-4, "QKV": 2.4e-4}
    assert list(savings)[:4] == ["post-GELU", "probabilities", "attention output", "LayerNorm statistics"]


def test_what_is_made_again_inside_a_block_is_what_the_layers_note_but_for_elementwise_functions():
    """Of large blocks the products are all but a per mille."""
    block = Block(2, 2048, 8192, 64)
    for policy in ("block", "sub_block", "segment(2)+selective"):
        assert flops.recomputed_flops(block, policy) == pytest.approx(flops.recomputed(block, 1, policy), rel=5e-3)


def test_groups_shrink_keys_and_values_alone_and_selective_as_published_makes_twice_what_keeping_the_output_makes():
    many, few = (flops.matmuls(Block.of(Transformer(64, 1, 8, 1, key_value_heads=heads), 1, 8)) for heads in (8, 2))
    assert few == many | {"QKV": many["QKV"] // 2}
    products, again = flops.matmuls(Block(1, 2048, 12288, 96)), flops.AGAIN["tiled"]
    assert sum(products[name] for name in flops.SELECTIVE_AS_PUBLISHED) == 2 * sum(products[name] for name in again)


# -- operations of a model --------------------------------------------------------------------------------------------


@st.composite
def transformers(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    return Transformer(heads * draw(st.integers(1, 9)), draw(st.integers(1, 5)), heads, draw(st.integers(1, 200)),
                       feed_forward=draw(st.integers(0, 40)), key_value_heads=draw(st.sampled_from([0, 1, heads])),
                       head_channels=draw(st.integers(0, 9)), gated=draw(st.booleans()), biases=(),
                       tied=draw(st.booleans()))


@given(transformers(), st.integers(1, 4), COUNT, st.sampled_from(["none", "block", *[*activations.INSIDE][1:]]))
def test_a_token_costs_two_operations_for_each_weight_that_it_meets_and_attention_and_only_blocks_are_run_again(
        model, batch, tokens, policy):
    weights = sum(tensor.parameters for tensor in model_of("m", model).tensors
                  if len(tensor.shape) == 2 and tensor.name not in ("wte", "lm_head.weight"))
    met, block = weights + model.vocabulary * model.channels, Block.of(model, batch, tokens)
    step = flops.step_flops(model, batch, tokens, policy)
    assert step.forward == 2 * batch * tokens * met + 4 * model.blocks * batch * tokens**2 * model.query_channels
    assert step.backward == 2 * step.forward
    assert step.recomputed == model.blocks * flops.recomputed_flops(block, policy)
    assert step.hardware == step.model + step.recomputed
    assert step.recomputed <= step.forward - flops.ends_flops(model, batch, tokens)[1]
    assert (step.recomputed == 0) == (policy == "none")
