"""zs.draw: each figure by its name, tables that say what they are given, knobs that change the picture."""

import inspect
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

import zerosim as zs
from tests.display.seen import pixels_of
from tests.support import assert_refused, literally
from zerosim.course import draw, figures


def test_every_figure_has_its_name_and_its_own_arguments_and_draws_what_the_figure_draws():
    for name, figure in figures.FIGURES.items():
        named = getattr(zs.draw, name.replace("-", "_"))
        assert named is figure
        assert list(inspect.signature(named).parameters) == [*inspect.signature(figure.make_data).parameters, "dark"]
        assert inspect.getdoc(figure.make_data) in named.__doc__
    assert zs.draw.ring.data(3, 4, format="fp16") == figures.ring_data(3, 4, "fp16")
    fp16 = figures.spacing_data(["fp16"], update=1e-4)
    assert zs.draw.spacing(["fp16"], update=1e-4).svg() == figures.spacing(fp16).svg()
    assert zs.draw.spacing(["fp16"], update=1e-4, dark=True).svg() == figures.spacing(fp16, figures.DARK).svg()


def test_a_figure_takes_what_the_engine_takes_for_a_name_and_nothing_where_that_can_be():
    assert zs.draw.ring.data(2, 2, zs.format_of("bf16")) == zs.draw.ring.data(2, 2, "bf16")
    assert zs.draw.ring.data(2, 0).chunk_nbytes == (0, 0)
    small = {"widths": (4, 4), "rows": 2, "ranks": 2}
    by_row, by_number = (zs.draw.timeline.data(stage=stage, **small) for stage in (zs.STAGES[1], 1))
    assert replace(by_row, what=by_number.what) == by_number
    few = {"ranks": 4, "sizes": np.array([4096, 8192]), "worlds": np.array([2, 4])}
    assert zs.draw.latency_wall.data(most_run=0, **few).by_ranks.marked == ()


def test_a_picture_in_a_notebook_is_a_png_of_its_colors_that_is_as_wide_as_its_inches_or_the_page():
    drawn = zs.draw.spacing(("fp16",))
    png, about = drawn._repr_png_()
    assert about == {"width": 960, "alt": drawn.title}
    software, pixels = pixels_of(png)
    assert software.startswith("Matplotlib ")
    assert pixels.shape == (768, 1200, 3)
    ink = [[int(color[at:at + 2], 16) for at in (1, 3, 5)] for color in ("#FFFFFF", "#1A1A1A", "#D55E00")]
    for color in ink:  # 64 colors stand for all, with little loss
        assert abs(pixels - color).max(axis=2).min() <= 6
    assert not hasattr(drawn, "_repr_svg_"), "JupyterLab shows SVG first, and of an untrusted notebook in place of all"


def test_an_argument_that_a_figure_does_not_have_is_refused_by_the_figures_name():
    for call in (zs.draw.latency_wall, zs.draw.latency_wall.data):
        assert_refused(lambda call=call: call(link="nvlink4"), literally(
            "zs.draw.latency_wall: got an unexpected keyword argument 'link'; it has wire, ranks, nbytes, sizes, "),
            TypeError)


def test_a_table_is_html_in_a_notebook_and_text_elsewhere_and_numbers_stand_to_the_right():
    shown = zs.draw.table(("stage", "bytes", ">GB"), [("<0>", 123456, "1.2"), ("1", 7, "0.05")], "What a rank holds")
    assert repr(shown).splitlines() == ["What a rank holds", "  stage    bytes    GB", "  <0>    123,456   1.2",
                                        "  1            7  0.05"]
    page = ElementTree.fromstring(shown._repr_html_().partition("</style>")[2])
    assert ["".join(cell.itertext()) for cell in page.iter("td")] == ["123,456", "1.2", "7", "0.05"]
    assert [cell.get("class") for cell in page.iter("th")] == [None, "n", "n", None, None]
    assert page.findtext(".//caption") == "What a rank holds"
    assert_refused(lambda: zs.draw.table(("stage", "bytes"), [(0, 1), (2,)]),
                   r"row 1 of a table has 1 cells.* 2 columns \(stage, bytes\); give it one cell for each")
    for row in (3, "ab"):
        assert_refused(lambda row=row: zs.draw.table(("stage", "bytes"), [row]), literally(
            f"row 0 of a table is {row!r}; give it a list of cells, one for each of stage, bytes"))
    for given in (3, "ab", None):
        assert_refused(lambda given=given: zs.draw.table(("stage", "bytes"), given), literally(
            f"a table was given the rows {given!r}; give it a list of them"))
        assert_refused(lambda given=given: zs.draw.table(given, [(1, 2)]), literally(
            f"a table was given the columns {given!r}; give it a list of their names"))


def test_a_knob_that_is_turned_changes_the_picture_and_a_setting_that_cannot_be_is_said():
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed; pip install 'zerosim[notebook]'")
    shown = zs.draw.turn(zs.draw.spacing, formats=(["fp16"], ["fp9"]), update=(1e-5, 1e-3))
    formats, update, said, image = shown.widget().children
    first, second = (zs.draw.spacing(["fp16"], update=value).on_screen() for value in (1e-5, 1e-3))
    assert image.value == first == shown._repr_png_()[0]
    update.value = 1e-3
    assert image.value == second != first
    formats.value = ["fp9"]
    assert "'fp9'" in said.value
    assert image.value == second
    formats.value = ["fp16"]
    assert (said.value, image.value) == ("", second)
    assert set(shown._repr_mimebundle_()) == {draw.WIDGET}


def test_without_ipywidgets_knobs_show_their_first_picture_and_none_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = zs.draw.turn(zs.draw.ring, ranks=[2, 3])
    assert shown._repr_mimebundle_() == {}
    assert shown._repr_png_() == zs.draw.ring(2)._repr_png_()
    assert repr(shown) == repr(zs.draw.ring(2))
    for values in ((), 4, "42"):
        assert_refused(lambda values=values: zs.draw.turn(zs.draw.ring, ranks=values), literally(
            f"asked to turn ranks={values!r}; give each knob a list of its values, the one to begin with first, as in"))
    assert_refused(lambda: zs.draw.turn(zs.draw.ring), "asked to turn nothing")
