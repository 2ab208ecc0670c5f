"""Colors tell kinds, ranks and words apart, for every kind of color vision and on every page."""

import itertools

import pytest

from tests.display import seen
from zerosim.display import drawing, style
from zerosim.ranks import memory, trace

PAGES = (drawing.LIGHT, drawing.DARK)


def test_every_kind_of_memory_and_every_rank_has_its_own_color():
    assert set(style.KIND_COLORS) == set(trace.KINDS)
    assert len(set(style.KIND_COLORS.values())) == len(trace.KINDS)
    assert len(set(style.RANK_COLORS)) == len(style.RANK_COLORS) == 8
    assert [style.rank_color(rank) for rank in range(10)] == [*style.RANK_COLORS, *style.RANK_COLORS[:2]]


@pytest.mark.parametrize("vision", seen.VISIONS)
def test_colors_stay_apart_for_every_kind_of_color_vision(vision):
    for palette in (tuple(style.KIND_COLORS.values()), style.RANK_COLORS, tuple(style.EVENT_COLORS.values())):
        for one, other in itertools.combinations(palette, 2):
            assert seen.difference(one, other, vision) > 15, (one, other)
        for color, page in itertools.product(palette, PAGES):
            assert seen.difference(color, page.background, vision) > 15, (color, page.name)


def test_words_contrast_with_what_they_stand_on():
    """At least 4.5 to 1. Source: WCAG 2.1, success criterion 1.4.3."""
    pairs = [(style.ink_on(color), color) for color in style.RANK_COLORS]
    pairs += [(ink, page.background) for page in PAGES for ink in (page.ink, page.muted)]
    for one, other in pairs:
        low, high = sorted(map(style.luminance, (one, other)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (one, other)


def test_every_color_is_seen_on_the_dark_page_and_the_gray_on_both():
    """At least 3 to 1. Source: WCAG 2.1, success criterion 1.4.11, of graphics."""
    found = [(color, drawing.DARK) for colors in (style.KIND_COLORS.values(), style.RANK_COLORS,
                                                  style.EVENT_COLORS.values()) for color in colors]
    for color, page in (*found, (style.GRAY, drawing.LIGHT)):
        low, high = sorted(map(style.luminance, (color, page.background)))
        assert (high + 0.05) / (low + 0.05) >= 3, (color, page.name)


def test_kinds_that_live_inside_a_step_are_hatched_and_those_at_rest_are_not():
    for kind in trace.KINDS:
        assert bool(drawing.look(kind, drawing.LIGHT)["hatch"]) == (kind not in memory.RESTING_KINDS)
