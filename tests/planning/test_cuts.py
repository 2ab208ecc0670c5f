"""Who owns which elements: every element has one owner, and padding stands where the layout says."""

import re
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.planning import (
    LAYOUTS,
    ceil_cut,
    chunk_lengths,
    clip,
    owned_ranges,
    padded_unit_lengths,
    region_cuts,
    unit_cuts,
)

WORLDS = st.sampled_from([1, 2, 3, 4, 5, 8, 64])
UNITS = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple)


@pytest.mark.parametrize(("length", "ranks", "lengths"), [
    (9, 4, (3, 3, 3, 0)), (5, 4, (2, 2, 1, 0)), (8, 4, (2, 2, 2, 2)), (0, 3, (0, 0, 0)),
    (2, 5, (1, 1, 0, 0, 0)), (7, 1, (7,))])
def test_the_ceil_cut_gives_equal_chunks_and_short_or_empty_last_ones(
        length: int, ranks: int, lengths: tuple[int, ...]) -> None:
    assert chunk_lengths(ceil_cut(length, ranks)) == lengths


@given(length=st.integers(0, 500), ranks=WORLDS)
def test_the_ceil_cut_covers_the_vector_with_n_chunks(length: int, ranks: int) -> None:
    cut = ceil_cut(length, ranks)
    assert len(cut) == ranks + 1
    assert cut[0] == 0
    assert sum(chunk_lengths(cut)) == length
    assert max(chunk_lengths(cut)) == -(-length // ranks)
    assert list(chunk_lengths(cut)) == sorted(chunk_lengths(cut), reverse=True)


@given(length=st.integers(0, 60), ranks=WORLDS, ends=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_a_clipped_cut_keeps_every_owner(length: int, ranks: int, ends: tuple[int, int]) -> None:
    low, high = sorted(min(length, end) for end in ends)
    cut = ceil_cut(length, ranks)
    owner = [rank for rank, n in enumerate(chunk_lengths(cut)) for _ in range(n)]
    clipped = [rank for rank, n in enumerate(chunk_lengths(clip(cut, low, high))) for _ in range(n)]
    assert clipped == owner[low:high]


def test_two_layouts_pad_the_same_units_differently() -> None:
    assert padded_unit_lengths((3, 5, 2), 4, "per_unit") == (4, 8, 4)
    assert padded_unit_lengths((3, 5, 2), 4, "contiguous") == (3, 5, 4)


def test_the_default_layout_is_per_unit() -> None:
    assert padded_unit_lengths((3, 5, 2), 4) == padded_unit_lengths((3, 5, 2), 4, "per_unit")


@given(units=UNITS, ranks=WORLDS, layout=st.sampled_from(LAYOUTS))
def test_every_element_has_exactly_one_owner_and_all_own_the_same_number(
        units: tuple[int, ...], ranks: int, layout: str) -> None:
    total = sum(padded_unit_lengths(units, ranks, layout))
    owned = [list(chain.from_iterable(ranges)) for ranges in owned_ranges(units, ranks, layout)]
    assert sorted(chain.from_iterable(owned)) == list(range(total))
    assert {len(elements) for elements in owned} == {total // ranks}
    assert all(elements == sorted(elements) for elements in owned)


@given(units=UNITS, ranks=WORLDS, layout=st.sampled_from(LAYOUTS))
def test_the_cuts_of_the_units_and_of_the_regions_name_the_same_owners(
        units: tuple[int, ...], ranks: int, layout: str) -> None:
    def owners(cuts: list[tuple[int, ...]]) -> list[int]:
        return [rank for cut in cuts for rank, n in enumerate(chunk_lengths(cut)) for _ in range(n)]

    by_unit = owners(unit_cuts(units, ranks, layout))
    assert by_unit == owners(region_cuts(units, ranks, layout))
    assert len(by_unit) == sum(padded_unit_lengths(units, ranks, layout))


@given(units=UNITS, ranks=WORLDS)
def test_padding_is_less_than_n_by_unit_or_in_all(units: tuple[int, ...], ranks: int) -> None:
    padded = padded_unit_lengths(units, ranks, "per_unit")
    assert all(0 <= with_padding - length < ranks for with_padding, length in zip(padded, units, strict=True))
    assert 0 <= sum(padded_unit_lengths(units, ranks, "contiguous")) - sum(units) < ranks


def test_a_contiguous_unit_may_lie_wholly_on_one_rank() -> None:
    assert unit_cuts((2, 2), 2, "contiguous") == [(0, 2, 2), (0, 0, 2)]
    assert unit_cuts((2, 2), 2, "per_unit") == [(0, 1, 2), (0, 1, 2)]


def test_owned_ranges_of_a_contiguous_layout_are_one_range_for_each_rank() -> None:
    for ranges in owned_ranges((3, 5, 2), 4, "contiguous"):
        assert len(ranges) == 1
    starts = [ranges[0].start for ranges in owned_ranges((3, 5, 2), 4, "contiguous")]
    assert [b - a for a, b in pairwise(starts)] == [3, 3, 3]


@pytest.mark.parametrize(("call", "text"), [
    (lambda: ceil_cut(4, 0), "ranks must be at least 1, got 0"),
    (lambda: ceil_cut(-1, 2), "length must be at least 0, got -1"),
    (lambda: ceil_cut(4.5, 2), "length must be a whole number, got 4.5; write length=int(...)"),
    (lambda: ceil_cut(1 << 62, 2), "length must be below 2^62, got a number of 63 bits"),
    (lambda: padded_unit_lengths((4, -3), 2), "unit_lengths[1] must be at least 0, got -3"),
    (lambda: padded_unit_lengths((4,), 0), "ranks must be at least 1, got 0"),
    (lambda: padded_unit_lengths((), 2), "unit_lengths is empty; a model has at least one unit, "
                                         "e.g. unit_lengths=(1000,)"),
    (lambda: unit_cuts((4,), 2, "per-unit"),
     "no layout is called 'per-unit'; the layouts are per_unit, contiguous; did you mean 'per_unit'?"),
    (lambda: region_cuts((4,), 2, "striped"),
     "no layout is called 'striped'; the layouts are per_unit, contiguous"),
])
def test_bad_input_is_refused_with_what_was_asked_and_what_to_do(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()
