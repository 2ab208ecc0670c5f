"""What a step shows of every rank, drawn and in tables; and the slider over all steps, real and played."""

import io
import re
import sys
import types

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.console import Console

import zerosim as zs
from tests.cases import covering
from tests.display import seen
from zerosim.display import html
from zerosim.display.objects import MOST_STEPS, values_text
from zerosim.display.traffic_plots import BLANK, step_sheet_data


def reduced(rank):
    return rank.reduce_scatter(np.arange(6.0) * 10**rank.index)


def messages(rank):
    if rank.index == 0:
        rank.send(np.array([7.0, 8.0]), 1)
    elif rank.index == 1:
        rank.recv(np.empty(2), 0)
    rank.barrier()


# -- the drawing --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("program", "ranks", "dark"), covering(
    [reduced, messages, lambda rank: rank.all_reduce(np.ones(7, np.float16)),
     lambda rank: rank.all_gather(np.array([rank.index, 300])), lambda rank: rank.broadcast(np.zeros((2, 3)))],
    [2, 3, 5], [False, True]))
def test_every_step_can_be_drawn_and_its_words_are_apart(program, ranks, dark):
    steps = list(zs.step_through(program, ranks=ranks))
    for step in (steps[0], steps[len(steps) // 2], steps[-1]):
        axes = step.draw(dark=dark)
        assert isinstance(axes, Axes)
        drawing = axes.figure.drawing
        assert seen.misplaced(drawing) == []
        assert min(text.get_fontsize() for text in seen.texts(drawing)) >= 11


def test_a_drawn_step_shows_the_hops_values_and_whose_chunk_moved():
    steps = list(zs.step_through(reduced, ranks=3))
    for step in steps:
        data = step_sheet_data(step)
        (source, destination, words), = data.arrows
        assert (source, destination) == (step.hop.source, step.hop.destination)
        assert words == f"c{step.hop.chunks[0]}, 16 B:\n{step.values[0]:g} {step.values[1]:g}"
        moved = {(row.rank, chunk.number) for row in data.rows for chunk in (*row.x, *row.out) if chunk.moved}
        assert moved == {(source, step.hop.chunks[0]), (destination, step.hop.chunks[0])}


@pytest.mark.parametrize("program", [lambda rank: rank.all_reduce(np.arange(6.0) + rank.index),
                                     lambda rank: rank.all_gather(np.array([rank.index]))])
def test_what_moves_is_marked_once_where_it_is_written_else_in_what_was_brought(program):
    for step in zs.step_through(program, ranks=3):
        for row in step_sheet_data(step).rows:
            marked = [chunk.number for chunk in (*row.x, *row.out) if chunk.moved]
            assert len(marked) == len(set(marked))
            written = {chunk.number for chunk in row.out if chunk.text != BLANK}
            assert all(chunk.number in written for chunk in row.out if chunk.moved)
            assert not any(chunk.number in written for chunk in row.x if chunk.moved)


def test_what_is_not_written_yet_is_blank_and_what_is_written_is_not():
    steps = list(zs.step_through(lambda rank: rank.all_gather(np.array([rank.index + 1.0, 5.0])), ranks=3))
    blanks = [[sum(chunk.text == BLANK for chunk in row.out) for row in step_sheet_data(step).rows] for step in steps]
    assert blanks[0] == [2, 1, 2]  # rank 1 has just got what rank 0 sent
    assert blanks[-1] == [0, 0, 0]
    whole = step_sheet_data(steps[-1]).rows[0].out
    assert [chunk.text for chunk in whole] == ["1 5", "2 5", "3 5"]


@pytest.mark.parametrize(("length", "splits"), [(0, None), (1, None), (2, None), (7, (0, 7, 7, 7)), (5, (0, 0, 2, 5))])
def test_short_and_uneven_chunks_are_drawn(length, splits):
    for step in zs.step_through(lambda rank: rank.all_reduce(np.ones(length), splits=splits), ranks=3):
        data = step_sheet_data(step)
        assert all(sum(len(row.x) for row in data.rows) <= 9 for _ in (0,))
        step.draw()


def test_a_collective_is_drawn_done_without_an_arrow():
    step, = zs.step_through(reduced, ranks=3, by="collective")
    data = step_sheet_data(step)
    assert data.arrows == ()
    assert [[chunk.text for chunk in row.out] for row in data.rows] == [["0 111"], ["222 333"], ["444 555"]]
    assert data.title.endswith("done")
    step.draw()


def test_more_ranks_than_a_page_holds_are_refused():
    step = next(zs.step_through(lambda rank: rank.all_reduce(np.ones(17)), ranks=17))
    with pytest.raises(ValueError, match=r"a page holds 16 ranks, found 17; look at step\.ranks instead"):
        step.draw()


def test_arrays_without_data_are_drawn_as_such():
    steps = zs.step_through(lambda rank: rank.all_reduce(rank.xp.empty(8, "float32")), cluster=zs.NullCluster(2))
    step = next(steps)
    assert {chunk.text for row in step_sheet_data(step).rows for chunk in row.x} == {"no data"}
    assert "8 values without data" in html(step)
    steps.close()


# -- the tables ---------------------------------------------------------------------------------------------------

def test_a_step_as_html_and_text_says_who_waits_where_and_what_moved():
    steps = list(zs.step_through(reduced, ranks=3))
    text, file = html(steps[2]), io.StringIO()
    Console(file=file, width=160).print(steps[2])
    for shown in (text, file.getvalue()):
        assert "test_stepping_displays.py:" in shown
        assert "in reduced" in shown
        assert " ".join(f"{value:g}" for value in steps[2].values) in shown
        assert "not written yet" in shown


@pytest.mark.parametrize(("array", "text"), [
    (None, "takes no part"), (np.array([]), "nothing"), (np.array([1.0, 2.5]), "1 2.5"),
    (np.full(3, np.nan), "not written yet"), (np.array([np.nan, 1.0]), "nan 1"),
    (np.arange(20), "0 1 2 3 4 5 6 7 8 9 10 11 … (20)")])
def test_an_array_is_shown_in_its_first_values(array, text):
    assert values_text(array) == text


def test_steps_show_the_latest_and_how_far_they_are():
    steps = zs.step_through(reduced, ranks=3)
    assert "0 taken" in html(steps)
    next(steps)
    next(steps)
    assert "2 taken" in html(steps)
    assert "What moved" in html(steps)
    assert repr(steps) == "<Steps by hop of 3 ranks, 2 taken>"
    steps.close()


# -- the slider ---------------------------------------------------------------------------------------------------

class Widget:
    """What the slider asks of any widget of the library: settings by name, and to be told of changes."""

    def __init__(self, *children, **settings):
        self.children, self.told = children, []
        self.value = children[0] if children and isinstance(children[0], str) else None
        self.__dict__.update(settings)

    def observe(self, told, names):
        assert names == "value"
        self.told.append(told)

    def slide(self, value):
        self.value = value
        for told in self.told:
            told({"new": value})


@pytest.fixture
def played(monkeypatch) -> types.ModuleType:
    module = types.ModuleType("ipywidgets")
    for name in ("IntSlider", "Play", "HTML", "VBox", "HBox"):
        setattr(module, name, type(name, (Widget,), {}))
    module.jslink = lambda *ends: None
    monkeypatch.setitem(sys.modules, "ipywidgets", module)
    return module


def test_the_slider_shows_the_step_that_it_is_moved_to(played):
    expected = [html(step) for step in zs.step_through(reduced, ranks=3)]
    widget = zs.step_through(reduced, ranks=3).slider()
    row, page = widget.children[0]
    _, number = row.children[0]
    assert (number.min, number.max, number.value) == (1, 6, 1)
    places = re.compile(r"test_stepping_displays.py:\d+")
    for place in (6, 2, 1, 4):
        number.slide(place)
        assert places.sub("", page.value) == places.sub("", expected[place - 1])


def test_the_slider_takes_the_steps_that_are_left_and_ends_the_run(played):
    cluster = zs.Cluster(3)
    steps = zs.step_through(reduced, cluster=cluster)
    next(steps)
    row, _ = steps.slider().children[0]
    assert row.children[0][1].max == 5
    assert len(cluster.runs) == 1
    with pytest.raises(ValueError, match="no step is left to slide over: the run has ended, or it makes no step"):
        steps.slider()


def test_a_run_of_too_many_steps_is_refused_and_left(played):
    def long(rank):
        for _ in range(MOST_STEPS):
            rank.broadcast(np.zeros(1))

    cluster = zs.Cluster(3)
    with pytest.raises(ValueError, match='step by="collective", or through a shorter program'):
        zs.step_through(long, cluster=cluster).slider()
    assert cluster.run(lambda rank: rank.index)[2] == 2


def test_as_many_steps_as_can_be_kept_are_and_one_more_is_not(played, monkeypatch):
    monkeypatch.setattr(sys.modules["zerosim.display.objects"], "MOST_STEPS", 4)
    zs.step_through(lambda rank: rank.all_reduce(np.ones(2)), ranks=2).slider()  # 4 hops
    with pytest.raises(ValueError, match="at most 4 steps"):
        zs.step_through(lambda rank: (rank.all_reduce(np.ones(2)), rank.broadcast(np.ones(1))), ranks=2).slider()


def test_without_ipywidgets_the_slider_says_what_to_install_and_takes_no_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    steps = zs.step_through(reduced, ranks=3)
    with pytest.raises(ModuleNotFoundError, match=r"steps\.slider\(\) needs ipywidgets, which is not installed here; "
                                                  r"pip install ipywidgets, or walk by hand"):
        steps.slider()
    assert steps.taken == 0
    assert len(list(steps)) == 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_slider_shows_the_step_that_it_is_moved_to():
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed here")
    expected = [html(step) for step in zs.step_through(reduced, ranks=3)]
    widget = zs.step_through(reduced, ranks=3).slider()
    row, page = widget.children
    number = row.children[1]
    places = re.compile(r"test_stepping_displays.py:\d+")
    for place in (6, 2, 1):
        number.value = place
        assert places.sub("", page.value) == places.sub("", expected[place - 1])


def test_in_a_split_group_the_table_names_ranks_of_the_whole_cluster():
    def program(rank):
        rank.split(rank.index % 2).all_reduce(np.ones(6))

    pairs = set()
    for step in zs.step_through(program, ranks=5):
        table = re.search(r"<caption>What moved</caption>.*?</table>", html(step), re.S)[0]
        _, source, destination, *_ = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table.partition("<tbody>")[2])
        if step.call.operation == "all_reduce":
            pairs.add((int(source), int(destination)))
    assert pairs == {(0, 2), (2, 4), (4, 0), (1, 3), (3, 1)}
