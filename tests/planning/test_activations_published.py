"""The literature's count of activations under every policy; tensor and sequence parallel; blocks that are not plain."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.course.published.activations import (
    block_nbytes,
    ends_nbytes,
    layer_nbytes,
    megatron_nbytes,
    peak_nbytes,
    tensors_nbytes,
)
from zerosim.planning import activations
from zerosim.planning.activations import INSIDE_NAMES, Block
from zerosim.planning.shapes import PRESETS

POLICIES = ["none", "block", "segment(2)", "segment(5)", *INSIDE_NAMES, "block+tiled", "segment(3)+selective"]


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    heads = draw(st.integers(1, 6))
    return Block(draw(st.integers(1, 4)), draw(st.integers(1, 30)), heads * draw(st.integers(1, 9)), heads)


@given(blocks())
def test_the_tensors_of_the_literatures_count_add_up_to_it(block: Block) -> None:
    formula = 34 * block.stream + 5 * block.square
    assert sum(tensors_nbytes(block).values()) == block_nbytes(block, "korthikanti-2022") == formula


@given(blocks(), st.integers(1, 12), st.sampled_from(POLICIES))
def test_the_literatures_count_is_never_less_than_what_is_needed(block: Block, n: int, policy: str) -> None:
    """It keeps masks and LayerNorm outputs beside; statistics are in neither count, log-sum-exps in one."""
    needed = peak_nbytes(block, n, policy, "recomputed-outputs")
    assert peak_nbytes(block, n, policy) >= needed == 2 * activations.peak_nbytes(block, n, policy).elements


@given(blocks(), st.integers(1, 12))
def test_policies_of_the_literatures_count_are_its_closed_forms(block: Block, n: int) -> None:
    sbh, square = block.stream, 5 * block.square
    assert peak_nbytes(block, n) == n * (34 * sbh + square)
    assert peak_nbytes(block, n, "selective") == n * 34 * sbh + square
    assert peak_nbytes(block, n, "block") == (n - 1) * 2 * sbh + 34 * sbh + square
    assert peak_nbytes(block, n, "sub_block") == n * 4 * sbh + max(11 * sbh + square, 19 * sbh)
    assert peak_nbytes(block, n, "tiled") == n * (34 * sbh + 4 * block.positions * block.heads)


@given(blocks(), st.integers(1, 5))
def test_tensor_and_sequence_parallelism_cut_what_the_table_says(block: Block, t: int) -> None:
    if block.heads % t or t == 1:
        return
    sbh, square = block.stream, 5 * block.square
    assert layer_nbytes(block, tensor_parallel=t) * t == 10 * sbh * t + 24 * sbh + square
    assert layer_nbytes(block, tensor_parallel=t, sequence_parallel=True) * t == 34 * sbh + square
    assert layer_nbytes(block, tensor_parallel=t, recompute="selective") * t == 10 * sbh * t + 24 * sbh
    assert layer_nbytes(block, tensor_parallel=t, recompute="full") == 2 * sbh


def test_one_rank_of_tensor_parallelism_cuts_nothing() -> None:
    block = Block(2, 8, 12, 3)
    assert layer_nbytes(block) == 34 * block.stream + 5 * block.square


def test_megatrons_estimate_is_the_published_count_selective_and_the_ends() -> None:
    block, n, vocabulary = Block(1, 2048, 6144, 64), 48, 51200
    table = n * layer_nbytes(block, tensor_parallel=8, sequence_parallel=True, recompute="selective")
    ends = ends_nbytes(block, vocabulary, tensor_parallel=8)
    assert megatron_nbytes(block, n, vocabulary, tensor_parallel=8) == table + ends + 8 * block.positions // 8
    assert ends == (block.stream + 4 * block.stream + 4 * block.positions * vocabulary) // 8


def test_grouped_queries_and_gates_keep_their_own_widths() -> None:
    block = PRESETS["llama-2-70b"].block(1, 2048)
    held = {name: kept.elements // block.positions for name, kept in activations.tensors(block).items()
            if kept.elements and name != "probabilities"}
    assert held == {"LayerNorm 1 input": 8192, "QKV": 8192 + 2 * 1024, "attention output": 8192,
                    "LayerNorm 2 input": 8192, "pre-GELU": 2 * 28672, "post-GELU": 28672}


def test_a_plain_block_said_in_full_is_the_plain_block() -> None:
    plain = Block(2, 8, 12, 3)
    assert plain == Block(2, 8, 12, 3, 2, query_channels=12, key_channels=12, feed_forward=48)
    assert plain.is_plain
    assert not Block(2, 8, 12, 3, feed_forward=47).is_plain


@pytest.mark.parametrize(("call", "said"), [
    (lambda: layer_nbytes(Block(1, 2, 6, 3), tensor_parallel=2), "tensor parallelism of 2 ranks was asked for 3 heads; "
     "take ranks that divide them"),
    (lambda: layer_nbytes(Block(1, 2, 6, 3), sequence_parallel=True), "sequence parallelism cuts what tensor "
     "parallelism leaves whole, and there is one rank; take tensor_parallel=2 or more"),
    (lambda: layer_nbytes(Block(1, 2, 6, 3), recompute="block"), "recompute='block' is not in the published table; it "
     "has none, selective, full; for block, segment(k), sub_block, selective, tiled take peak_nbytes"),
    (lambda: peak_nbytes(Block(1, 2, 6, 3), 2, "none", "x"), "no published count 'x'; there are recomputed-outputs"),
    (lambda: peak_nbytes(Block(1, 2, 6, 3, itemsize=4), 2), "the count sbh(34 + 5as/h) is in bytes of 16-bit training"),
    (lambda: peak_nbytes(PRESETS["llama-2-7b"].block(1, 8), 2), "the count sbh(34 + 5as/h) is of blocks with 4096 "
     "channels of queries and of keys and a feed-forward network of 16384; this one has 4096, 4096 and a gated network "
     "of 11008; take the count 'recomputed-outputs'"),
    (lambda: Block(1, 2, 6, 3, query_channels=7), "a block of 7 channels was asked for 3 heads"),
])
def test_what_was_not_published_is_refused(call, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        call()
