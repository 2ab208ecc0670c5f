"""What a step shows of every rank, drawn and in tables; and the slider over all steps."""

import re
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes

import zerosim as zs
from tests.cases import covering
from tests.display import seen
from tests.display.browser import Dom
from tests.support import assert_refused, printed
from zerosim.display import html, objects, step_plots


def reduced(rank):
    return rank.reduce_scatter(np.arange(6.0) * 10**rank.index)


def messages(rank):
    if rank.index == 0:
        rank.send(np.array([7.0, 8.0]), 1)
    elif rank.index == 1:
        rank.recv(np.empty(2), 0)
    rank.barrier()


def sheets(program, **options):
    return [step_plots.step_sheet_data(step) for step in zs.step_through(program, ranks=3, **options)]


# -- the drawing --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("program", "ranks", "dark"), covering(
    [reduced, messages, lambda rank: rank.all_reduce(np.ones(7, np.float16)),
     lambda rank: rank.all_reduce(np.ones(5), splits=(0, *[2] * (rank.size - 1), 5)),
     lambda rank: rank.all_gather(np.array([rank.index, 300])), lambda rank: rank.broadcast(np.zeros((2, 3))),
     lambda rank: rank.all_reduce(np.ones(0))], [2, 3, 5], [False, True]))
def test_every_step_can_be_drawn_and_its_words_are_apart(program, ranks, dark):
    steps = list(zs.step_through(program, ranks=ranks))
    for step in (steps[0], steps[-1]):
        axes = step.draw(dark=dark)
        assert isinstance(axes, Axes)
        seen.assert_readable(axes.figure.drawing)


def test_a_drawn_step_shows_the_hops_values_and_marks_what_moved_once_where_it_is_written_else_in_what_was_brought():
    for program in (reduced, lambda rank: rank.all_reduce(np.arange(6.0)), lambda rank: rank.all_gather(np.ones(2))):
        for step in zs.step_through(program, ranks=3):
            data, (chunk,) = step_plots.step_sheet_data(step), step.hop.chunks
            words = f"c{chunk}, 16 B:\n{step.values[0]:g} {step.values[1]:g}"
            assert data.arrows == ((step.hop.source, step.hop.destination, words),)
            marked = [(row.rank, one.number) for row in data.rows for one in (*row.x, *row.out) if one.moved]
            assert sorted(marked) == sorted([(step.hop.source, chunk), (step.hop.destination, chunk)])
            for row in data.rows:
                written = {one.number for one in row.out if one.text != step_plots.BLANK}
                assert not any(one.moved for one in row.x if one.number in written)


def test_what_is_not_written_yet_is_blank_and_a_collective_is_drawn_done_without_an_arrow():
    found = sheets(lambda rank: rank.all_gather(np.array([rank.index + 1.0, 5.0])))
    blanks = [[sum(chunk.text == step_plots.BLANK for chunk in row.out) for row in sheet.rows] for sheet in found]
    assert blanks[0] == [2, 1, 2]  # rank 1 has just got what rank 0 sent
    assert blanks[-1] == [0, 0, 0]
    assert [chunk.text for chunk in found[-1].rows[0].out] == ["1 5", "2 5", "3 5"]
    (whole,) = sheets(reduced, by="collective")
    assert whole.arrows == ()
    assert [[chunk.text for chunk in row.out] for row in whole.rows] == [["0 111"], ["222 333"], ["444 555"]]
    assert whole.title.endswith("done")


def test_more_ranks_than_a_page_holds_are_refused_and_arrays_without_data_are_drawn_as_such():
    step = next(zs.step_through(lambda rank: rank.all_reduce(np.ones(17)), ranks=17))
    assert_refused(step.draw, r"a page holds 16 ranks, found 17; look at step\.ranks instead")
    steps = zs.step_through(lambda rank: rank.all_reduce(rank.xp.empty(8, "float32")), cluster=zs.NullCluster(2))
    step = next(steps)
    assert {chunk.text for row in step_plots.step_sheet_data(step).rows for chunk in row.x} == {"no data"}
    assert "8 values without data" in html(step)
    steps.close()


# -- the tables ---------------------------------------------------------------------------------------------------

def test_a_step_as_html_and_text_says_who_waits_where_and_what_moved():
    steps = list(zs.step_through(reduced, ranks=3))
    for shown in (html(steps[2]), printed(steps[2], 160)):
        for words in ("test_stepping_displays.py:", "in reduced", "not written yet",
                      " ".join(f"{value:g}" for value in steps[2].values)):
            assert words in shown
    for array, text in ((None, "takes no part"), (np.array([]), "nothing"), (np.array([1.0, 2.5]), "1 2.5"),
                        (np.full(3, np.nan), "not written yet"), (np.array([np.nan, 1.0]), "nan 1"),
                        (np.arange(20), "0 1 2 3 4 5 6 7 8 9 10 11 … (20)")):
        assert objects.values_text(array) == text


def test_in_a_split_group_the_table_names_ranks_of_the_whole_cluster():
    pairs = set()
    for step in zs.step_through(lambda rank: rank.split(rank.index % 2).all_reduce(np.ones(6)), ranks=5):
        (_, source, destination, *_), = Dom(html(step)).rows("What moved")
        if step.call.operation == "all_reduce":
            pairs.add((int(source), int(destination)))
    assert pairs == {(0, 2), (2, 4), (4, 0), (1, 3), (3, 1)}


# -- the slider ---------------------------------------------------------------------------------------------------

@pytest.fixture
def widgets():
    return pytest.importorskip("ipywidgets", reason="ipywidgets is not installed here")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_slider_takes_the_steps_that_are_left_and_shows_the_one_that_it_is_moved_to(widgets):
    cluster, places = zs.Cluster(3), re.compile(r"test_stepping_displays.py:\d+")
    expected = [places.sub("", html(step)) for step in zs.step_through(reduced, ranks=3)]
    steps = zs.step_through(reduced, cluster=cluster)
    next(steps)
    row, page = steps.slider().children
    number = row.children[1]
    assert (number.min, number.max, number.value) == (1, 5, 1)
    for place in (5, 2, 1, 4):
        number.value = place
        assert places.sub("", page.value) == expected[place]
    assert len(cluster.runs) == 1
    assert_refused(steps.slider, "no step is left to slide over: the run has ended, or it makes no step")
    assert "6 taken" in html(steps)
    assert repr(steps) == "<Steps by hop of 3 ranks, 6 taken>"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_as_many_steps_as_can_be_kept_are_and_one_more_is_not(widgets, monkeypatch):
    cluster = zs.Cluster(2)
    for most, is_kept in ((4, True), (3, False)):  # it takes 4 hops
        monkeypatch.setattr(step_plots, "MOST_STEPS", most)
        slider = zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), cluster=cluster).slider
        if is_kept:
            slider()
        else:
            assert_refused(slider, 'at most 3 steps.*step by="collective", or through a shorter program')
    assert cluster.run(lambda rank: rank.index)[1] == 1


def test_without_ipywidgets_the_slider_says_what_to_install_and_takes_no_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    steps = zs.step_through(reduced, ranks=3)
    assert_refused(steps.slider, "not installed here; pip install ipywidgets, or walk by hand", ModuleNotFoundError)
    assert steps.taken == 0
    assert len(list(steps)) == 6
