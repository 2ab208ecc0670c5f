"""Every figure keeps one contract: it is drawn from what the package does now, the same bytes each time, with words."""

import io
import re
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from tests.architecture.source import ROOT
from tests.cases import chosen
from tests.display import seen
from tests.support import ask, assert_command_refuses, assert_refused
from zerosim.course import draw, figures
from zerosim.planning import activations, hardware

DARK, FIGURES, LIGHT = figures.DARK, figures.FIGURES, figures.LIGHT
SVG = "{http://www.w3.org/2000/svg}"
# Of figures whose trainings take seconds: data of a few steps, and those parts of their description, with the numbers
# that no later step changes, that must stand in the committed figure's, in this order.
BEGUN = {"adam-states": (lambda: figures.adam_states_data(50), r"(?<=[;:] )[\w ,]+ explodes at step \d+"),
         "loss-scale": (lambda: figures.loss_scale_data(steps=8), r"overflow (?:on|in)[a-z ]+: \d[\d, ]*"),
         "stages": (lambda: figures.stages_data(steps=2), r"stage \d|at most [\d,]+ bytes held, [\d,]+ bytes sent")}
MEASURED = chosen([name for name in FIGURES if name not in BEGUN], FIGURES)
EVERY = pytest.mark.parametrize("name", MEASURED)
UNITS = ("(bytes per parameter)", "(bytes)", "(MB)", "(GB)", "(µs)", "(ms)", "(ranks)", "(parameters)", "(tokens)",
         "(steps)", "(name)", "(ratio)", "(kB)")
NUMBERS = ("weight", "half the gap above it", "loss scale S", "loss, mean of 20 steps", "loss, mean over ranks",
           "stage", "v")


def committed(name, style=LIGHT):
    return (ROOT / "figures" / f"{name}{'-dark' * (style is DARK)}.svg").read_text(encoding="utf-8")


def drawing(name, style=LIGHT):
    return FIGURES[name].draw(seen.data_of(name), style)


drawn_once = cache(drawing)  # for who changes nothing of it


# The dark figures are the light ones in other colors, as the next test says; the ring's colors too are compared.
@pytest.mark.parametrize(("name", "style"), [
    *((name, LIGHT) for name in MEASURED), *((name, DARK) for name in chosen(["ring", "mixed-precision"], FIGURES))],
    ids=lambda value: value if isinstance(value, str) else value.name)
def test_the_committed_figures_are_drawn_from_what_the_package_does_now_whatever_a_reader_has_set(name, style):
    expected = committed(name, style)
    if seen.drawn_by(expected) != mpl.__version__:
        pytest.skip(f"{name} was drawn by Matplotlib {seen.drawn_by(expected)}, here is {mpl.__version__}, whose "
                    "coordinates may differ in their last digits")
    with mpl.rc_context({"font.size": 31, "svg.hashsalt": "mine", "axes.facecolor": "red", "svg.fonttype": "path"}):
        before = dict(mpl.rcParams)
        same = seen.is_committed(drawn_once(name, style), expected)
        assert dict(mpl.rcParams) == before, "the settings are left as they were"
    assert same, "it has changed: look at it, then commit what `make figures` drew"


@pytest.mark.parametrize("name", BEGUN)
def test_a_few_steps_of_a_long_training_go_as_the_committed_figure_says_in_its_words_and_colors(name):
    data, words = BEGUN[name]
    drawn, there = FIGURES[name].draw(data(), LIGHT), committed(name)
    seen.assert_readable(drawn)
    root, shown = ET.fromstring(there), set(re.findall("#[0-9a-f]{6}", there))
    said = re.findall(words, drawn.description)
    assert len(said) >= 5
    assert re.search(".*".join(map(re.escape, said)), root.findtext(f"{SVG}desc"))
    assert drawn.title == root.findtext(f"{SVG}title")
    assert set(re.findall("#[0-9a-f]{6}", drawn.svg())) == shown
    lines = {line for text in seen.texts(drawn) for line in text.get_text().split("\n")}
    assert {line for line in lines if not re.search(r"\d", line)} <= {
        "".join(one.itertext()) for one in root.iter(f"{SVG}text")}


@EVERY
def test_a_committed_figure_says_in_words_what_it_shows_and_is_the_same_in_the_dark(name):
    light, dark, drawn = committed(name, LIGHT), committed(name, DARK), drawn_once(name, LIGHT)
    for text in (light, dark):
        root = ET.fromstring(text)
        title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
        assert root.get("role") == "img"
        assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
        assert (title.text, description.text) == (drawn.title, drawn.description)
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
    assert len(drawn.description) > 200
    assert repr(drawn) == f"{drawn.title}. {drawn.description}"
    assert "<dc:date>" not in light
    assert light != dark
    assert seen.without_colors(light) == seen.without_colors(dark)


@EVERY
def test_every_axis_has_a_unit_no_text_is_small_and_no_words_lie_on_others_or_leave_the_page(name):
    drawn = drawn_once(name, LIGHT)
    seen.assert_readable(drawn)
    assert seen.repeated_in_a_legend(drawn) == []
    assert drawn.figure.get_figwidth() <= 15
    for axes in drawn.figure.axes:
        if axes.axison:
            shared = [other.get_ylabel() for other in axes.get_shared_y_axes().get_siblings(axes) if other.get_ylabel()]
            named = any(text.get_text() in ("compute", "communication") for text in axes.get_yticklabels())
            numbered = any(label.get_visible() and label.get_text() for label in axes.get_xticklabels())
            bare = not len(axes.get_yticks())  # its lines have names of their own
            assert len(shared) == (not named and not bare)
            for label in (*[axes.get_xlabel()] * numbered, *shared):
                assert label.endswith(UNITS) or label in NUMBERS, f"no unit in {label!r}"
        else:  # a sheet without axes counts in words: bytes in every message
            assert all(" B" in text.get_text() for text in axes.texts if text.get_text().startswith("c0:"))


WIRE = hardware.Link("wire", 20e9, 3e-6, "made up for a test", "2025-01-01")
OTHERS = {  # data that stretch a picture: long names, few and many panels, one rank, large and small numbers
    "memory of three worlds": lambda style: figures.memory(figures.memory_data((2, 4, 8), (12, 12, 12), 2), style),
    "traffic of two worlds": lambda style: figures.traffic(figures.traffic_data((1, 2), (4, 4)), style),
    "liveness of three stages": lambda style: figures.liveness(
        figures.liveness_data((0, 2, 3), (128,) * 4, 64, 2), style),
    "small models": lambda style: figures.memory_scaling(
        figures.memory_scaling_data(1e4, 2, (1, 2, 4), (1e3, 1e4)), style),
    "one format": lambda style: figures.spacing(figures.spacing_data(("fp16",)), style),
    "an update downwards": lambda style: figures.lost_updates(
        figures.lost_updates_data((-1e-8, 3e-4), (20, 20), 0.5), style),
    "one rule": lambda style: figures.loss_scale(
        figures.loss_scale_data((("deepspeed-legacy", 2),), 30, ranks=2), style),
    "data in their own unit": lambda style: figures.format_losses(figures.format_losses_data(30, 1.0), style),
    "few published numbers": lambda style: figures.published(figures.published_data(("states",)), style),
    "a small transformer": lambda style: figures.activations(figures.activations_data(
        activations.Block(2, 8, 12, 3), 2, 19, ("none", "tiled", "block", "segment(2)"), (8, 16, 32, 64)), style),
    "a short wall": lambda style: figures.latency_wall(figures.latency_wall_data(
        WIRE, 8, 2**20, (2**12, 2**20, 2**28), (2, 8, 32), 8), style),
    "a wide step in bf16": lambda style: figures.mixed_precision(
        figures.mixed_precision_data("bf16", (1024, 1024, 1024), 64, ranks=3), style),
    "a short ring": lambda style: figures.ring(figures.ring_data(2, 5), style),
    "a long ring": lambda style: figures.ring(figures.ring_data(chosen([3], [5])[0], 14), style),
}


@pytest.mark.parametrize("case", chosen(list(OTHERS)[::2], OTHERS))
def test_other_data_keep_their_words_apart_in_another_picture(case):
    for style in chosen([DARK], [LIGHT, DARK]):
        drawn = OTHERS[case](style)
        seen.assert_readable(drawn)
        assert drawn.svg() != committed(drawn.name, style)


def test_the_instruments_see_another_shape_color_or_word_an_overlap_and_a_cut_label_but_no_other_rounding():
    found = committed("traffic")
    number = re.search(r"M (\d+\.\d+) ", found)[0]
    near, far = (f"M {float(number[2:]) + by:.6f} " for by in (0.001, 1.0))
    assert seen.same_picture(found, found.replace(number, near))
    for changed in (found.replace(number, far), found.replace("stage 3", "stage 4"),
                    found.replace(re.search("#[0-9a-f]{6}", found)[0], "#123456"), found.replace(number, number * 2)):
        assert changed != found
        assert not seen.same_picture(found, changed)
    ring = drawing("ring")
    ring.figure.axes[0].text(0.25, 0.34, "over the last line")
    ring.figure.axes[0].text(-0.3, 5, "out of the page")
    said = seen.misplaced(ring)
    assert any("'over the last line'" in one and one.endswith("lie on each other") for one in said)
    assert [one for one in said if one.endswith("leaves the page")] == ["'out of the page' leaves the page"]


def test_draw_writes_the_figures_asked_for_and_returns_their_paths_and_none_that_is_committed_is_an_orphan(
        tmp_path, monkeypatch):
    expected = {f"{name}{variant}.svg" for name in FIGURES for variant in ("", "-dark")}
    expected |= {f"{name}{rest}" for name, figure in FIGURES.items() if figure.animate
                 for rest in (".gif", "-dark.gif")}
    assert {path.name for path in (ROOT / "figures").iterdir()} == expected
    few = {"ring": figures.Figure(lambda: figures.ring_data(2, 5), figures.ring, figures.ring_animation),
           "spacing": figures.Figure(lambda: figures.spacing_data(("fp16",)), figures.spacing)}
    monkeypatch.setattr(figures, "FIGURES", few)
    assert figures.draw(["ring"], tmp_path / "new" / "folder") == [tmp_path / "new" / "folder" / "ring.svg"]
    assert figures.draw(["ring"], str(tmp_path), format="png") == [tmp_path / "ring.png"]
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
    assert figures.draw(out=tmp_path) == [tmp_path / f"{name}.svg" for name in few]
    assert (tmp_path / "ring.svg").read_text(encoding="utf-8") == OTHERS["a short ring"](LIGHT).svg()
    done = ask("figures", "ring", "--out", str(tmp_path), "--dark", columns=200)
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'ring-dark.svg'}\n")
    assert (tmp_path / "ring-dark.svg").read_text(encoding="utf-8") == OTHERS["a short ring"](DARK).svg()


@pytest.mark.parametrize("ranks", chosen([3], [2, 3, 4, 5]))
def test_the_animation_has_a_frame_before_and_two_for_each_step(ranks):
    data = figures.ring_data(ranks, 2 * ranks)
    found = figures.ring_animation(data)
    assert len(found.frames) == 1 + 2 * 2 * (ranks - 1)
    assert len({frame.name for frame in found.frames}) == len(found.frames)
    for number, frame in enumerate(found.frames):
        words = [text.get_text() for text in seen.texts(frame)]
        moving = data.of_step((number + 1) // 2) if number % 2 else []
        assert sorted(word for word in words if word.endswith(" B")) == sorted(
            f"c{message.chunk}: {message.nbytes} B" for message in moving)
        board = data.boards[number // 2]
        assert Counter(word for word in words if word.isdigit()) == Counter(
            str(rank) for cells in board for cell in cells if cell.needed for rank in cell.addends)
        seen.assert_readable(frame)
        assert len(frame.description) > 60


@pytest.mark.slow
def test_the_gif_plays_every_frame_for_ever_in_the_colors_of_the_ranks_and_gif_and_page_are_those_committed():
    animation = figures.ring_animation(figures.ring_data(2, 2))
    content = animation.gif()
    assert content == animation.gif()
    with Image.open(io.BytesIO(content)) as image:
        assert (image.n_frames, image.info["loop"]) == (5, 0)
        durations = [image.seek(number) or image.info["duration"] for number in range(image.n_frames)]
    assert durations == [1200, 1200, 1200, 1200, 3600]
    with Image.open(ROOT / "figures/ring.gif") as image, Image.open(ROOT / "figures/ring-dark.gif") as dark:
        assert image.n_frames == dark.n_frames == 13
        shown = np.array([color for _, color in image.convert("RGB").getcolors(1_000_000)])
    for color in ("#0072B2", "#E69F00", "#009E73", "#CC79A7"):
        channels = [int(color[at:at + 2], 16) for at in (1, 3, 5)]
        assert np.abs(shown - channels).max(axis=1).min() <= 8


REFUSALS = [
    (lambda: figures.ring_data(6), "a ring of 6 ranks cannot be drawn on one sheet; ask for 2 to 5"),
    (lambda: figures.ring_data(4, 8, "fp8_e5m2"), "fp8_e5m2 cannot tell the sums of 4 ranks' .* ask for at most 3 ran"),
    *((lambda given=given: figures.latency_wall_data(**given),
       "a latency wall takes lengths of vectors and worlds of 2 ranks at least")
      for given in ({"ranks": 1}, {"worlds": (1, 2)}, {"worlds": ()}, {"sizes": ()})),
    (lambda: figures.adam_states_data(49), "are means of 50 steps; take so many or more, found 49"),
    (lambda: figures.format_losses_data(names=("fp31",)), "found 'fp31' and"),
    (lambda: figures.format_losses_data(names=()), "found 0 and"),
    (lambda: figures.format_losses_data(6, window=7), "and 7"),
    (lambda: figures.format_losses_data(6, window=0), "means of 1 to 6 steps; found 5 and 0"),
    (lambda: figures.format_losses_data(6, 0.0, window=2), "of data in a unit above 0, found 0.0"),
    (lambda: figures.latency_wall_data("nvlnk4"), "no link is called 'nvlnk4'.*did you mean 'nvlink4'"),
    *((lambda of=of, options=options: getattr(draw, of).data(**options), rf"zs\.draw\.{of} was given {words}")
      for of, options, words in (
          ("ring", {"ranks": "4"}, "ranks='4'; ranks is a whole number, 1 or more, as 4"),
          ("stages", {"steps": 0}, "steps=0; steps is a whole number, 1 or more, as 30"),
          ("timeline", {"stage": -1}, "stage=-1; stage is a whole number, 0 or more, as 3"),
          ("memory_scaling", {"parameters": "7B"}, "parameters='7B'; parameters is a finite number, as 7500000000.0"),
          ("memory", {"worlds": 4}, "worlds=4; worlds is a list with something in it$"),
          ("memory", {"worlds": "4"}, "worlds='4'; worlds is a list with"),
          ("memory", {"worlds": []}, r"worlds=\[\]; worlds is a list with something in it$"),
          ("ring", {"format": 16}, "format=16; format is a name, as 'fp32'"),
          ("timeline", {"options": ["overlap"]}, r"options=\['overlap'\]; options is a mapping of names$"),
          ("activations", {"block": 4}, "block=4; block is a Block$"))),
    *((lambda exponents=exponents, update=update: figures.spacing_data(exponents=exponents, update=update),
       r"takes a first and a last exponent of weights, as \(-30, 17\), and an update above 0; found")
      for exponents, update in (((3,), 1e-5), ((5, 1), 1e-5), ((1.5, 3), 1e-5), ((-3, 3), 0.0))),
    (lambda: figures.spacing_data(exponents=(100, 120)),
     r"the gaps of fp8_e4m3, fp16: none of the weights from 2\^100 to 2\^120 is a number of that format"),
    (lambda: figures.lost_updates_data([1e-3], [3, 4]), "a number of steps for each update, found 2 for 1 updates"),
    (lambda: figures.published_data(("shapes",)), "no run checks a published number about shapes; those that runs ch"),
    (lambda: figures.timeline_of("nothing", {}), "a timeline was asked for of no runs"),
    (lambda: figures.draw(["memory", "rings"], "never"),
     "no figure is called 'rings'; the figures are activations, .*; did you mean 'ring'"),
    (lambda: figures.draw(["ring"], "never", format="pdf"),
     "no figure can be saved as 'pdf'; choose one of svg, png, "),
    (lambda: figures.draw(["ring", "memory"], "never", "gif"),
     "the figure 'memory' does not move, so there is no gif of it; those that do: ring"),
    (lambda: figures.draw(["ring"], "file/folder"), "asked to draw into 'file/folder', but: .*; name a folder that"),
    (lambda: OTHERS["a short ring"](LIGHT).save("ring.gif"),
     r"asked to save a figure as 'ring.gif'; end the name in .svg or .png"),
    (lambda: figures.ring_animation(figures.ring_data(2, 2)).save("ring.png"),
     r"asked to save an animation as 'ring.png'; end the name in .gif"),
]


def test_what_cannot_be_drawn_is_refused_in_words_of_the_picture_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for call, words in REFUSALS:
        assert_refused(call, words)
    assert_command_refuses("no figure is called 'memry'", "figures", "memry", "--out", "never")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
