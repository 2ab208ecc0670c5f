"""Figures are pure functions of data that are measured anew here, drawn in one style, the same bytes every time."""

import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer

from tests.architecture.source import ROOT
from tests.cases import chosen
from tests.display import seen
from zerosim.course import figures
from zerosim.course.figures import FIGURES, draw
from zerosim.course.figures.memory import memory, memory_data
from zerosim.display.colors import KIND_COLORS, RANK_COLORS, ink_on, luminance, rank_color
from zerosim.display.drawing import DARK, LIGHT, Drawing, Style
from zerosim.ranks.memory import KINDS, RESTING_KINDS

SVG = "{http://www.w3.org/2000/svg}"
STYLES = pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)
NAMES = pytest.mark.parametrize("name", FIGURES)


UNITS = ("(bytes per parameter)", "(bytes)", "(MB)", "(GB)", "(µs)", "(ms)", "(ranks)", "(parameters)", "(tokens)",
         "(steps)", "(name)", "(no unit)", "(ratio)")
SMALL = {name: lambda style=LIGHT, figure=figure: figure.draw(figure.small(), style)
         for name, figure in FIGURES.items()}


@cache
def drawing(name: str, style: Style = LIGHT) -> Drawing:
    return FIGURES[name].draw(seen.data_of(name), style)


@cache
def svg(name: str, style: Style = LIGHT) -> str:
    return drawing(name, style).svg()


# -- bytes --------------------------------------------------------------------------------------------------------

@pytest.mark.slow  # the committed figures are another run's as well, of the same Matplotlib
@NAMES
def test_another_run_draws_the_same_bytes(name):
    assert FIGURES[name](LIGHT).svg() == svg(name)


@pytest.mark.slow
@STYLES
@NAMES
def test_two_draws_give_the_same_bytes(name, style, tmp_path):
    one, other = SMALL[name](style), SMALL[name](style)
    assert one.save(tmp_path / "a.svg").read_text(encoding="utf-8") == other.svg() == other._repr_svg_()
    assert one.png() == other.png()


def test_the_variants_differ_in_page_and_ink_only():
    light, dark = (drawing("ring", style).figure for style in (LIGHT, DARK))
    assert to_hex(light.get_facecolor()).upper() != to_hex(dark.get_facecolor()).upper() == DARK.background
    words = [[text.get_text() for text in seen.texts(drawing("ring", style))] for style in (LIGHT, DARK)]
    assert words[0] == words[1]


def committed(name: str, style: Style = LIGHT) -> str:
    return (ROOT / "figures" / f"{name}{'-dark' * (style is DARK)}.svg").read_text(encoding="utf-8")


# Their curves are losses, which BLAS adds in another order on another processor; all others are compared byte for byte.
OF_TRAININGS = ("format-losses", "loss-scale")


# The dark figures are the light ones in other colors, as the next test says; the ring's colors too are compared.
@pytest.mark.parametrize(("name", "style"), [
    *((name, LIGHT) for name in FIGURES), *((name, DARK) for name in chosen(["ring", "mixed-precision"], FIGURES))])
def test_the_committed_figures_are_drawn_from_what_the_package_does_now_whatever_a_reader_has_set(name, style):
    expected = committed(name, style)
    if seen.drawn_by(expected) != mpl.__version__:
        pytest.skip(f"{name} was drawn by Matplotlib {seen.drawn_by(expected)}, here is {mpl.__version__}, whose "
                    "coordinates may differ in their last digits")
    with mpl.rc_context({"font.size": 31, "svg.hashsalt": "mine", "axes.facecolor": "red", "svg.fonttype": "path"}):
        before = dict(mpl.rcParams)
        drawn = svg(name, style)
        assert dict(mpl.rcParams) == before, "the settings are left as they were"
    same = seen.same_picture if name in OF_TRAININGS else str.__eq__
    assert same(expected, drawn), "it has changed: look at it, then commit what `make figures` drew"


def test_the_instrument_sees_another_shape_color_or_word_but_no_other_rounding():
    found = committed("traffic")
    number = re.search(r"M (\d+\.\d+) ", found)[0]
    near, far = (f"M {float(number[2:]) + by:.6f} " for by in (0.001, 1.0))
    assert seen.same_picture(found, found.replace(number, near))
    for changed in (found.replace(number, far), found.replace("stage 3", "stage 4"),
                    found.replace(re.search("#[0-9a-f]{6}", found)[0], "#123456"), found.replace(number, number * 2)):
        assert changed != found
        assert not seen.same_picture(found, changed)


@NAMES
def test_a_dark_committed_figure_is_the_light_one_in_other_colors(name):
    assert committed(name, LIGHT) != committed(name, DARK)
    assert seen.without_colors(committed(name, LIGHT)) == seen.without_colors(committed(name, DARK))


def test_no_committed_figure_is_an_orphan():
    expected = {f"{name}{variant}.svg" for name in FIGURES for variant in ("", "-dark")}
    expected |= {f"{name}{rest}" for name, figure in FIGURES.items() if figure.animate
                 for rest in (".gif", "-dark.gif", ".html")}
    assert {path.name for path in (ROOT / "figures").iterdir()} == expected


def test_matplotlib_is_imported_when_something_is_drawn_and_pyplot_never():
    program = ("import sys; from zerosim.course import figures; assert 'matplotlib' not in sys.modules; "
               "figures.ring(figures.ring_data(2, 2)).svg(); assert 'matplotlib' in sys.modules; "
               "assert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True)


# -- words --------------------------------------------------------------------------------------------------------

@STYLES
@NAMES
def test_every_svg_has_a_title_and_a_description_that_it_points_to(name, style):
    root = ET.fromstring(committed(name, style))
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert title.text == drawing(name).title
    assert description.text == drawing(name).description
    assert len(description.text) > 200
    assert repr(drawing(name)) == f"{title.text}. {description.text}"


@NAMES
def test_no_svg_has_a_date_and_its_ids_are_unique(name):
    root = ET.fromstring(committed(name))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert "<dc:date>" not in committed(name)


@NAMES
def test_every_axis_that_is_shown_has_a_unit(name):
    for axes in drawing(name).figure.axes:
        if axes.axison:
            shared = [other.get_ylabel() for other in axes.get_shared_y_axes().get_siblings(axes) if other.get_ylabel()]
            named = any(text.get_text() in ("compute", "communication") for text in axes.get_yticklabels())
            numbered = any(label.get_visible() and label.get_text() for label in axes.get_xticklabels())
            bare = not len(axes.get_yticks())  # its lines have names of their own
            assert len(shared) == (not named and not bare)
            for label in (*[axes.get_xlabel()] * numbered, *shared):
                assert label.endswith(UNITS), f"no unit in {label!r}"
        else:  # a sheet without axes counts in words: bytes in every message
            assert all(" B" in text.get_text() for text in axes.texts if text.get_text().startswith("c0:"))


# -- what the eye meets -------------------------------------------------------------------------------------------

@NAMES
def test_no_words_lie_on_others_or_leave_the_page(name):
    assert seen.misplaced(drawing(name)) == []


@pytest.mark.parametrize("worlds", [(1,), (3,), (2, 4, 8)], ids=str)
def test_memory_of_other_worlds_keeps_its_words_apart(worlds):
    found = memory(memory_data(worlds, widths=(12, 12, 12), rows=2))
    assert seen.misplaced(found) == []


def test_one_rank_is_told_of_as_one():
    words = memory(memory_data((1, 2), widths=(4, 4), rows=1)).description
    assert " On 1 rank: stage 0 rests" in words
    assert " On 2 ranks: stage 0 rests" in words


def test_the_instrument_sees_an_overlap_and_a_cut_label():
    found = FIGURES["ring"](LIGHT)
    found.figure.axes[0].text(0.25, 0.34, "over the last line")
    found.figure.axes[0].text(-0.3, 5, "out of the page")
    said = seen.misplaced(found)
    assert any("'over the last line'" in one and one.endswith("lie on each other") for one in said)
    assert [one for one in said if one.endswith("leaves the page")] == ["'out of the page' leaves the page"]


@NAMES
def test_no_text_is_small(name):
    """11 points on a page of at most 15 inches: as large as a footnote when the page is a slide."""
    assert min(text.get_fontsize() for text in seen.texts(drawing(name))) >= 11
    assert drawing(name).figure.get_figwidth() <= 15


def test_every_kind_of_memory_and_every_rank_has_its_own_color():
    assert set(KIND_COLORS) == set(KINDS)
    assert len(set(KIND_COLORS.values())) == len(KINDS)
    assert len(set(RANK_COLORS)) == len(RANK_COLORS) == 8
    assert [rank_color(rank) for rank in range(10)] == [*RANK_COLORS, RANK_COLORS[0], RANK_COLORS[1]]


@pytest.mark.parametrize("vision", seen.VISIONS)
def test_colors_stay_apart_for_every_kind_of_color_vision(vision):
    for colors in (tuple(KIND_COLORS.values()), RANK_COLORS):
        for one, other in itertools.combinations(colors, 2):
            assert seen.difference(one, other, vision) > 15
    for color in {*KIND_COLORS.values(), *RANK_COLORS}:
        for page in (LIGHT.background, DARK.background):
            assert seen.difference(color, page, vision) > 15


def test_the_instrument_sees_that_red_and_green_look_alike_to_some():
    assert seen.difference("#C05A5A", "#7D7D3C", "full") > 30
    assert seen.difference("#C05A5A", "#7D7D3C", "deuteranopia") < 15


def test_words_contrast_with_what_they_stand_on():
    """At least 4.5 to 1. Source: WCAG 2.1, success criterion 1.4.3."""
    pairs = [(ink_on(color), color) for color in RANK_COLORS]
    pairs += [(ink, style.background) for style in (LIGHT, DARK) for ink in (style.ink, style.muted)]
    for one, other in pairs:
        low, high = sorted((luminance(one), luminance(other)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (one, other)


def test_kinds_that_live_inside_a_step_are_hatched_and_those_at_rest_are_not():
    hatched = {}
    for axes in drawing("memory").figure.axes:
        for bar in itertools.chain.from_iterable(c for c in axes.containers if isinstance(c, BarContainer)):
            hatched.setdefault(to_hex(bar.get_facecolor()).upper(), set()).add(bool(bar.get_hatch()))
    assert len(hatched) > 8
    for kind, color in KIND_COLORS.items():
        assert hatched.get(color, {kind not in RESTING_KINDS}) == {kind not in RESTING_KINDS}


# -- by name ------------------------------------------------------------------------------------------------------

def test_draw_writes_the_figures_asked_for_and_returns_their_paths(tmp_path, monkeypatch):
    few = {name: replace(FIGURES[name], data=FIGURES[name].small) for name in chosen(["ring", "traffic"], FIGURES)}
    monkeypatch.setattr(figures, "FIGURES", few)
    assert draw(["ring"], tmp_path / "new" / "folder") == [tmp_path / "new" / "folder" / "ring.svg"]
    assert draw(["ring"], tmp_path, dark=True) == [tmp_path / "ring-dark.svg"]
    assert draw(["ring"], str(tmp_path), format="png") == [tmp_path / "ring.png"]
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
    assert draw(out=tmp_path) == [tmp_path / f"{name}.svg" for name in few]
    assert (tmp_path / "ring.svg").read_text(encoding="utf-8") == SMALL["ring"]().svg()


def test_an_unknown_figure_is_refused_with_the_nearest_name_before_anything_is_drawn(tmp_path):
    said = f"no figure is called 'rings'; the figures are {', '.join(FIGURES)}; did you mean 'ring'?"
    with pytest.raises(ValueError, match=re.escape(said)):
        draw(["memory", "rings"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_and_a_file_in_the_folders_place_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no figure can be saved as 'pdf'; choose one of svg, png, gif, html"):
        draw(["ring"], tmp_path, format="pdf")
    Path(tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(ValueError, match=r"asked to draw into '.*file.*', but: .*; name a folder that can be made"):
            draw(["ring"], place)
    with pytest.raises(ValueError, match=r"asked to save a figure as 'ring.gif'; end the name in .svg or .png"):
        drawing("ring").save(tmp_path / "ring.gif")
