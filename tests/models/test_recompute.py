"""Recomputation policies as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.models import BLOCK, NONE, Recompute, segment
from zerosim.models.units import NAMED


@pytest.mark.parametrize(("text", "policy"), [
    ("none", NONE), ("block", BLOCK), ("segment(1)", BLOCK), ("segment(2)", segment(2)),
    (" segment( 12 ) ", segment(12)), ("sub_block", Recompute(None, "sub_block")), ("selective", NAMED["selective"]),
    ("tiled", Recompute(None, "tiled")), ("block+selective", Recompute(1, "selective")),
    ("segment(3) + tiled", Recompute(3, "tiled")),
])
def test_a_text_names_a_policy(text, policy):
    assert Recompute.parse(text) == policy


@pytest.mark.parametrize("policy", [NONE, BLOCK, segment(2), segment(17), *NAMED.values(), Recompute(1, "tiled"),
                                    Recompute(4, "sub_block")])
def test_a_policy_prints_as_the_text_that_names_it(policy):
    assert Recompute.parse(str(policy)) == policy


@pytest.mark.parametrize("text", ["", "all", "segment", "segment()", "segment(0)", "segment(-1)", "segment(2", "Block",
                                  "none+tiled", "block+", "+tiled", "tiled+block", "block+all", "tiled+selective"])
def test_a_text_that_names_no_policy_is_refused(text):
    with pytest.raises(ValueError, match=r"names no policy; write 'none', 'block' or 'segment\(k\)' with k of at"):
        Recompute.parse(text)


@pytest.mark.parametrize("k", [0, -2, 1.5, True, None])
def test_a_segment_of_no_whole_unit_is_refused(k):
    with pytest.raises(ValueError, match=r"^segment\(k\) was given k=.*; k is a whole number, 1 or more"):
        segment(k)


def test_an_inside_that_there_is_not_is_refused():
    said = ("Recompute was asked to keep 'half' of the inside of a unit; it keeps one of 'all', 'sub_block', "
            "'selective', 'tiled'")
    with pytest.raises(ValueError, match=said):
        Recompute(None, "half")


def test_nothing_is_run_again_when_everything_is_kept():
    assert NONE.segments(5) == []


def test_the_last_segment_may_be_shorter():
    assert segment(2).segments(5) == [range(0, 2), range(2, 4), range(4, 5)]
    assert BLOCK.segments(3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert segment(9).segments(3) == [range(0, 3)]


@given(st.integers(1, 12), st.integers(0, 40))
def test_segments_hold_every_unit_once_and_in_order(k, unit_count):
    segments = segment(k).segments(unit_count)
    assert [unit for run in segments for unit in run] == list(range(unit_count))
    assert all(len(run) == k for run in segments[:-1])
