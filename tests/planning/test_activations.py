"""Kept activations by formulas: the published numbers, the closed forms, and what holds for every block and policy."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.course.published.activations import block_nbytes
from zerosim.planning.activations import (
    EXAMPLE,
    INSIDE_NAMES,
    Block,
    best_segment,
    fullest_nbytes,
    kept,
    logits_nbytes,
    parse,
    peak_nbytes,
    snapshots,
    tensors,
)

POLICIES = ["none", "block", "segment(2)", "segment(5)", *INSIDE_NAMES, "block+tiled", "segment(3)+selective"]
# d = 4096, H = 32, L = 2048, B = 4: elements of what flows between blocks, and of the probabilities.
BLD, SQUARE = 4 * 2048 * 4096, 4 * 32 * 2048**2


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    heads = draw(st.integers(1, 6))
    return Block(draw(st.integers(1, 5)), draw(st.integers(1, 40)), heads * draw(st.integers(1, 20)), heads,
                 draw(st.sampled_from([2, 4])))


def gigabytes(nbytes: int, digits: int = 1) -> float:
    return round(nbytes / 1e9, digits)


def at_length(tokens: int) -> Block:
    return Block(4, tokens, 4096, 32)


# -- published numbers ------------------------------------------------------------------------------------------------


def test_a_block_of_the_published_example_keeps_939_5_and_1073_7_megabytes() -> None:
    linear = sum(part.elements * 2 for name, part in tensors(EXAMPLE).items() if name != "probabilities")
    assert round(linear / 1e6, 1) == 939.5
    assert round(tensors(EXAMPLE)["probabilities"].nbytes / 1e6, 1) == 1073.7  # where 1072 is also in print


def test_its_32_blocks_keep_64_4_gigabytes() -> None:
    assert gigabytes(peak_nbytes(EXAMPLE, 32).nbytes) == 64.4
    # With 16 bytes for each of 7e9 parameters.
    assert gigabytes(peak_nbytes(EXAMPLE, 32).nbytes + 16 * 7_000_000_000) == 176.4


def test_twice_the_tokens_add_133_gigabytes_of_which_103_are_quadratic() -> None:
    added = peak_nbytes(at_length(4096), 32).elements * 2 - peak_nbytes(EXAMPLE, 32).elements * 2
    quadratic = 32 * 2 * (at_length(4096).square - EXAMPLE.square)
    assert (gigabytes(added, 0), gigabytes(quadratic, 0), gigabytes(added - quadratic, 0)) == (133, 103, 30)


def test_8192_tokens_keep_670_gigabytes_of_which_550_are_probabilities() -> None:
    block = at_length(8192)
    assert gigabytes(2 * peak_nbytes(block, 32).elements) == 670.0
    assert gigabytes(32 * tensors(block)["probabilities"].nbytes) == 549.8


def test_recomputing_blocks_leaves_one_block_of_the_quadratic_term() -> None:
    """Popular belief: checkpointing leaves the L² term intact. It leaves one n-th of it."""
    none, block = peak_nbytes(EXAMPLE, 32).elements, peak_nbytes(EXAMPLE, 32, "block").elements
    assert (gigabytes(2 * (none - 32 * 14 * BLD)), gigabytes(2 * (block - (32 + 13) * BLD), 2)) == (34.4, 1.07)


def test_the_probabilities_are_the_largest_tensor_of_a_block() -> None:
    """Popular belief: 8·BLd is the largest. The probabilities are 16·BLd here."""
    largest = max(tensors(EXAMPLE).items(), key=lambda item: item[1].nbytes)
    assert largest[0] == "probabilities"
    assert largest[1].elements == 16 * BLD


def test_the_literatures_count_is_sbh_times_34_plus_5as_over_h_bytes() -> None:
    s, b, h, a = 2048, 4, 4096, 32
    assert block_nbytes(EXAMPLE, "korthikanti-2022") == s * b * h * (34 + 5 * a * s // h)
    assert block_nbytes(EXAMPLE, "recomputed-outputs") == 2 * kept(EXAMPLE).elements


# -- the closed forms -------------------------------------------------------------------------------------------------


@given(blocks(), st.integers(1, 12))
def test_what_n_blocks_keep_is_the_closed_form(block: Block, n: int) -> None:
    bld, square, bl = block.stream, block.square, block.batch * block.tokens
    for policy, elements, statistics in [
            ("none", n * (14 * bld + square), 4 * n * bl),
            ("block", n * bld + 13 * bld + square, 4 * bl),
            ("selective", 14 * n * bld + square, 4 * n * bl),
            ("tiled", 14 * n * bld, 4 * n * bl + n * bl * block.heads)]:
        found = peak_nbytes(block, n, policy)
        assert (found.elements, found.statistics) == (elements, statistics)
        assert found.nbytes == elements * block.itemsize + 4 * statistics


@given(blocks(), st.integers(1, 12))
def test_sub_blocks_keep_their_inputs_and_the_larger_of_two_insides(block: Block, n: int) -> None:
    bld, bl = block.stream, block.batch * block.tokens
    found = peak_nbytes(block, n, "sub_block")
    assert found.elements == 2 * n * bld + max(4 * bld + block.square, 8 * bld)
    assert found.statistics == 2 * bl


@given(blocks(), st.integers(1, 6), st.integers(1, 6))
def test_segments_keep_the_inputs_of_the_others_and_all_of_one(block: Block, k: int, segments: int) -> None:
    whole = 14 * block.stream + block.square
    found = peak_nbytes(block, k * segments, f"segment({k})")
    assert found.elements == (segments - 1) * block.stream + k * whole
    # The published (n/k)BLd + k(14·BLd + BHL²) has the input of the segment in use in both of its terms.
    assert found.elements == segments * block.stream + k * whole - block.stream


@given(blocks(), st.integers(1, 20), st.integers(1, 25))
def test_a_shorter_last_segment_is_counted_as_it_is(block: Block, n: int, k: int) -> None:
    starts = range(0, n, k)
    whole = 14 * block.stream + block.square
    by_segment = [index * block.stream + min(k, n - start) * whole for index, start in enumerate(starts)]
    assert peak_nbytes(block, n, f"segment({k})").elements == max(by_segment)


@given(blocks(), st.integers(1, 12), st.sampled_from(POLICIES))
def test_no_policy_keeps_more_than_none_but_for_what_it_has_in_use(block: Block, n: int, policy: str) -> None:
    extra = block.square if "selective" in policy else block.positions * block.heads * n * 4
    assert peak_nbytes(block, n, policy).nbytes <= peak_nbytes(block, n).nbytes + block.itemsize * extra


@given(blocks(), st.sampled_from(POLICIES))
def test_what_a_block_keeps_is_the_sum_of_its_tensors(block: Block, policy: str) -> None:
    assert sum(part.nbytes for part in tensors(block, policy).values()) == kept(block, policy).nbytes


# -- the best segment -------------------------------------------------------------------------------------------------


def test_the_best_segment_of_the_published_example_is_one_block() -> None:
    """Popular belief: √n is best, 5 or 6 of 32 blocks. It takes a block's inside to weigh as much as its input."""
    assert best_segment(EXAMPLE, 32) == pytest.approx(math.sqrt(32 / 30), rel=1e-12)  # a double's rounding
    by_k = {k: peak_nbytes(EXAMPLE, 32, f"segment({k})").nbytes for k in range(1, 33)}
    assert min(by_k, key=by_k.__getitem__) == 1
    assert by_k[6] > 3 * by_k[1]


def test_the_root_of_n_is_best_only_where_the_inside_weighs_as_much_as_the_input() -> None:
    thin = Block(1, 1, 64, 1)
    assert best_segment(thin, 14 * 100) < math.sqrt(14 * 100) / 3


@given(blocks(), st.integers(1, 40))
def test_the_best_segment_is_next_to_the_least_of_the_smooth_form(block: Block, n: int) -> None:
    def smooth(k: float) -> float:
        return n / k * block.stream + k * (14 * block.stream + block.square)

    k = best_segment(block, n)
    assert smooth(k) <= smooth(1.01 * k)
    assert smooth(k) <= smooth(0.99 * k)


# -- texts and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "all", "block+", "+tiled", "none+tiled", "tiled+block", "segment(0)", "segment()",
                                  "segment(2)+block", "tiled+selective", "Block", None])
def test_a_text_that_names_no_policy_is_refused(text: str | None) -> None:
    said = (f"{text!r} names no recomputation policy; there are none, block, segment(k), sub_block, selective, tiled, "
            "and two of them as in segment(2)+tiled")
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


@pytest.mark.parametrize(("arguments", "said"), [
    ((0, 1, 4, 2), "batch must be at least 1, got 0"),
    ((1, 1, 4, 3), "a block of 4 channels was asked for 3 heads; each head has as many channels as the others, so take "
     "a number of heads that divides the channels"),
    ((1, 1.5, 4, 2), "tokens must be a whole number, got 1.5; write tokens=int(...)"),
])
def test_a_block_of_no_such_shape_is_refused(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Block(*arguments)


def test_no_blocks_keep_nothing_that_could_be_asked_for() -> None:
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        peak_nbytes(EXAMPLE, 0)


def test_an_unknown_count_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("no published count 'x'; there are recomputed-outputs, korthi")):
        block_nbytes(EXAMPLE, "x")


def test_the_count_in_bytes_of_16_bit_is_refused_for_other_bytes() -> None:
    with pytest.raises(ValueError, match=r"is in bytes of 16-bit training, and the block has elements of 4 bytes"):
        block_nbytes(Block(1, 1, 2, 1, itemsize=4), "korthikanti-2022")


# -- the walk through every moment, of any block ----------------------------------------------------------------------


ANY_BLOCK = st.builds(
    lambda batch, tokens, groups, shared, width, feed_forward, gated: Block(
        batch, tokens, 3 * width, groups * shared, 2, query_channels=groups * shared * width,
        key_channels=groups * width, feed_forward=feed_forward, gated=gated),
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40),
    st.booleans())


@given(ANY_BLOCK, st.integers(1, 5), st.integers(1, 50), st.sampled_from(["none", "selective", "tiled"]))
def test_after_forward_blocks_hold_what_they_keep_and_the_head_its_input_and_logits(block, blocks, vocabulary, policy):
    (loss,) = [moment for moment in snapshots(block, blocks, vocabulary, policy)
               if (moment.phase, moment.step) == ("forward", "loss")]
    head = block.stream * 2 + block.positions * (2 * vocabulary + 3 * 4)
    assert loss.nbytes == {"activation": blocks * kept(block, policy).nbytes + head}


@given(ANY_BLOCK, st.integers(1, 5), st.integers(1, 50),
       st.sampled_from(["none", "block", "segment(2)", "sub_block", "selective", "tiled"]))
def test_the_fullest_moment_of_any_batch_is_the_fullest_of_all_moments(block, blocks, vocabulary, policy):
    most = max(moment.total_nbytes for moment in snapshots(block, blocks, vocabulary, policy))
    assert fullest_nbytes(block, blocks, vocabulary, policy) == most


def test_logits_in_16_bit_cost_six_bytes_where_the_softmax_copies_them() -> None:
    block = Block(4, 2048, 4096, 32)
    assert logits_nbytes(block, 32000) == block.positions * (6 * 32000 + 4)
    assert logits_nbytes(block, 32000, fp32_copy=False) == block.positions * (2 * 32000 + 4)
    assert logits_nbytes(Block(4, 2048, 4096, 32, itemsize=4), 32000) == block.positions * (4 * 32000 + 4)
