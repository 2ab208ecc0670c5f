"""Operations of transformer blocks: the published numbers, and what holds for every block."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.planning.activations import EXAMPLE, INSIDE_NAMES, Block, peak_nbytes
from zerosim.planning.flops import backward, forward, matmul_flops, recomputed, savings, step_matmul_flops


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    heads = draw(st.integers(1, 6))
    return Block(draw(st.integers(1, 5)), draw(st.integers(1, 40)), heads * draw(st.integers(1, 20)), heads)


def two_digits(number: float) -> float:
    return float(f"{number:.2g}")


# -- published numbers ------------------------------------------------------------------------------------------------


def test_making_the_scores_again_takes_137_gflop() -> None:
    """68.7e9 multiplications and as many additions, where 70 GFLOP are in print."""
    assert round(forward(EXAMPLE)["scores"] / 1e9) == 137
    assert forward(EXAMPLE)["scores"] == 2 * 4 * 32 * 2048**2 * 128


def test_bytes_saved_per_operation_are_the_published_ones() -> None:
    found = {row.tensor: two_digits(row.nbytes_per_flop) for row in savings(EXAMPLE)}
    assert found == {"post-GELU": 0.25, "probabilities": 7.7e-3, "attention output": 4.9e-4,
                     "LayerNorm statistics": 3.9e-4, "LayerNorm 2 input": 2.4e-4, "pre-GELU": 2.4e-4, "QKV": 2.4e-4}
    assert list(found)[:4] == ["post-GELU", "probabilities", "attention output", "LayerNorm statistics"]


@given(st.integers(1, 8), st.integers(1, 4096), st.integers(1, 64), st.integers(1, 128), st.integers(1, 10**5))
def test_a_step_with_recomputed_blocks_takes_96_bslhh_and_the_two_corrections(batch, tokens, heads, width, vocabulary):
    b, s, h, layers = batch, tokens, heads * width, 7
    found = step_matmul_flops(Block(b, s, h, heads), layers, vocabulary, "block")
    assert found == 96 * b * s * layers * h * h + 16 * b * s * s * layers * h + 6 * b * s * h * vocabulary


# -- what holds for every block ---------------------------------------------------------------------------------------


@given(blocks())
def test_forward_is_its_matmuls_and_at_most_some_dozen_operations_for_each_element(block: Block) -> None:
    rest = sum(forward(block).values()) - matmul_flops(block)
    elements = 14 * block.stream + block.square
    assert 0 < rest < 12 * elements


@given(blocks(), st.sampled_from(["none", *INSIDE_NAMES]))
def test_backward_has_twice_the_matmuls_of_forward(block: Block, policy: str) -> None:
    rest = sum(backward(block, policy).values()) - 2 * matmul_flops(block) - recomputed(block, 1, policy)
    assert 0 < rest < 20 * (14 * block.stream + block.square)


@given(blocks(), st.integers(1, 9))
def test_segments_of_any_length_make_every_block_again_once(block: Block, n: int) -> None:
    once = n * sum(forward(block).values())
    assert {recomputed(block, n, policy) for policy in ("block", "segment(2)", "segment(99)")} == {once}
    assert recomputed(block, n) == 0


@given(blocks())
def test_joined_policies_make_again_what_both_do(block: Block) -> None:
    joined, segment, inside = (recomputed(block, 3, policy) for policy in ("block+selective", "block", "selective"))
    assert joined == segment + inside


def test_recomputing_blocks_costs_about_a_third() -> None:
    plain = sum(forward(EXAMPLE).values()) + sum(backward(EXAMPLE).values())
    assert recomputed(EXAMPLE, 1, "block") / plain == pytest.approx(1 / 3, abs=0.01)


def test_sub_blocks_do_not_halve_what_is_made_again() -> None:
    """Popular belief: half of it. All but two matmuls, 10 of 24 d² for each token, is made again."""
    share = recomputed(EXAMPLE, 1, "sub_block") / recomputed(EXAMPLE, 1, "block")
    assert 0.6 < share < 0.63


def test_finer_policies_keep_more_memory_for_fewer_operations() -> None:
    flops, nbytes = ([amount(policy) for policy in ("selective", "sub_block", "block")] for amount in (
        lambda policy: recomputed(EXAMPLE, 32, policy), lambda policy: peak_nbytes(EXAMPLE, 32, policy).nbytes))
    assert flops == sorted(flops)
    assert nbytes == sorted(nbytes, reverse=True)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("'most' names no recomputation policy; there are none, block")):
        recomputed(EXAMPLE, 1, "most")
