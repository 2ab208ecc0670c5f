"""What the figures of scaling, traffic and liveness show is what formulas and real runs say, found another way."""

import io
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

import zerosim as zs
from tests.architecture.source import ROOT
from tests.cases import chosen
from tests.display import seen
from tests.display.browser import browser, dom_of
from zerosim.course.figures import draw
from zerosim.course.figures.memory import (
    OPTIMIZERS,
    memory_scaling,
    memory_scaling_data,
    traffic,
    traffic_data,
    widths_of,
)
from zerosim.course.figures.ring import ring_animation, ring_data
from zerosim.course.figures.timeline import GRADIENT_KINDS, liveness, liveness_data
from zerosim.course.measured import measured_bytes
from zerosim.display.colors import RANK_COLORS, luminance
from zerosim.display.drawing import DARK, LIGHT
from zerosim.ranks.trace import Held

SIXTEENTHS = {  # bytes per parameter at rest, replicated and shared, of Adam: ZeRO's paper, section 5
    0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}


# -- memory -------------------------------------------------------------------------------------------------------

def test_memory_at_rest_is_zeros_formula_for_every_n_and_p():
    data = memory_scaling_data(parameters=1e6, ranks=16, worlds=(1, 4, 16), sizes=(1e4, 1e6))
    of_n, of_p, of_optimizer = data.panels
    for panel, points in ((of_n, [(1e6, n) for n in (1, 4, 16)]), (of_p, [(size, 16) for size in (1e4, 1e6)])):
        for stage, (replicated, shared) in SIXTEENTHS.items():
            for (size, ranks), nbytes in zip(points, panel.resting_nbytes[stage], strict=True):
                width = widths_of(size)[0]
                padded = 8 * (-(-(width * width + width) // ranks) * ranks)
                assert nbytes == replicated * padded + Fraction(shared * padded, ranks)
    for place, (slots, name) in enumerate(((0, "SGD"), (1, "Lion"), (2, "Adam"))):
        assert of_optimizer.names[place] == name
        per_parameter = of_optimizer.resting_nbytes[0][place] / of_n.resting_nbytes[0][0]
        assert per_parameter == pytest.approx((8 + 4 * slots) / 16, rel=1e-3)
    assert tuple(OPTIMIZERS) == of_optimizer.names


def test_the_papers_numbers_stand_in_the_committed_figure():
    """120, 31.4, 16.6 and 1.9 GB for 7.5e9 parameters on 64 ranks. Source: Rajbhandari et al. 2020, figure 1."""
    panel = seen.data_of("memory-scaling").panels[0]
    at = panel.names.index("64")
    assert [round(column[at] / 1e9, 1) for column in panel.resting_nbytes] == [120.0, 31.4, 16.6, 1.9]


def test_a_run_without_data_measures_what_a_run_with_data_holds_and_sends():
    for stage in zs.STAGES:
        found = measured_bytes((6, 7, 5), zs.optim.Adam(), ranks=4, stage=stage, policy=zs.Policy("fp16"))
        cluster = zs.Cluster(4)

        def program(rank, stage=stage):
            engine = zs.Engine(rank, zs.models.MLP([6, 7, 5]), zs.optim.Adam(), stage=stage, policy=zs.Policy("fp16"))
            engine.step([(np.ones((1, 6), np.float32), np.ones((1, 5), np.float32))])
            return engine

        engines = cluster.run(program)
        assert found.resting_nbytes == cluster.memory[0].now_nbytes_by_kind
        assert found.sent_nbytes == {purpose: cluster.trace[0].sent_nbytes(purpose) for purpose in found.sent_nbytes}
        assert len(engines) == 4


# -- traffic ------------------------------------------------------------------------------------------------------

def test_traffic_is_two_vectors_and_three_at_stage_3_for_every_n():
    data = traffic_data(worlds=(1, 2, 8, 32), widths=(64, 64, 64))
    for stage, row in enumerate(data.sent):
        for ranks, sent in zip(data.worlds, row, strict=True):
            assert sent == pytest.approx((3 if stage > 2 else 2) * 2 * (ranks - 1) / ranks, rel=1e-12)


def test_the_lines_of_the_traffic_figure_are_its_data():
    data = traffic_data(worlds=(1, 2, 4), widths=(8, 8, 8))
    axes = traffic(data).figure.axes[0]
    lines = [line for line in axes.lines if line.get_label().startswith("stage")]
    assert [line.get_label() for line in lines] == [f"stage {stage}" for stage in range(4)]
    assert [tuple(line.get_ydata()) for line in lines] == list(data.sent)
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 4


# -- liveness -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_live_as_the_ledger_of_a_real_run_says(stage):
    widths, rows, ranks = (16, 16, 16), 4, 2
    life = liveness_data((stage,), widths, rows, ranks).lives[0]

    def program(rank):
        engine = zs.Engine(rank, zs.models.MLP(widths, bias=False), zs.optim.Adam(), stage=stage,
                           policy=zs.Policy("fp16"))
        before = Counter(rank.memory.now_nbytes_by_kind)
        rank.trace.rows.clear()
        engine.step([(np.ones((rows, 16), np.float32), np.zeros((rows, 16), np.float32))])
        return engine, before  # whose arrays live as long as it

    cluster = zs.Cluster(ranks)
    now = cluster.run(program)[0][1]
    totals = [sum(now[kind] for kind in GRADIENT_KINDS)]
    for row in cluster.trace[0].rows:
        if isinstance(row, Held):
            now[row.kind] += row.nbytes
            totals.append(sum(now[kind] for kind in GRADIENT_KINDS))
    assert max(life.totals) == pytest.approx(max(totals) / (2 * 256), rel=1e-12)
    assert life.totals[0] == totals[0] / 512
    assert life.totals[-1] == pytest.approx(totals[-1] / 512)


def test_stage_1_keeps_all_gradients_and_stage_2_its_share_and_one_unit():
    one, two = liveness_data(ranks=4).lives
    assert min(one.held["gradient"]) == 2
    assert min(two.held["gradient"]) == max(two.held["gradient"]) == 0.5
    assert max(two.held["unit_gradient"]) == pytest.approx(2 / 8)
    assert max(one.held["unit_gradient"]) == 0
    drawn = liveness(liveness_data(ranks=4))
    assert seen.misplaced(drawn) == []


@pytest.mark.parametrize("style", chosen([LIGHT], [LIGHT, DARK]), ids=lambda style: style.name)
def test_other_data_keep_their_words_apart(style):
    for drawing in (traffic(traffic_data((1, 2), (4, 4)), style),
                    liveness(liveness_data((0, 2, 3), (128,) * 4, 64, 2), style),
                    memory_scaling(memory_scaling_data(1e4, 2, (1, 2, 4), (1e3, 1e4)), style)):
        assert seen.misplaced(drawing) == []


# -- the ring, animated -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", chosen([2, 4], [2, 3, 4, 5]))
def test_the_animation_has_a_frame_before_and_two_for_each_step(ranks):
    data = ring_data(ranks, 2 * ranks)
    found = ring_animation(data)
    assert len(found.frames) == 1 + 2 * 2 * (ranks - 1)
    assert len({frame.name for frame in found.frames}) == len(found.frames)
    for number, frame in enumerate(found.frames):
        words = [text.get_text() for text in seen.texts(frame)]
        arrows = [word for word in words if word.endswith(" B")]
        moving = data.of_step((number + 1) // 2) if number % 2 else []
        assert sorted(arrows) == sorted(f"c{message.chunk}: {message.nbytes} B" for message in moving)
        digits = Counter(word for word in words if word.isdigit())
        board = data.boards[number // 2]
        assert digits == Counter(str(rank) for cells in board for cell in cells if cell.needed for rank in cell.addends)
        assert seen.misplaced(frame) == []
        assert len(frame.description) > 60


def test_the_gif_has_every_frame_and_plays_for_ever_the_same_each_time():
    found = ring_animation(ring_data(2, 2))
    content = found.gif()
    assert content == ring_animation(ring_data(2, 2)).gif()
    image = Image.open(io.BytesIO(content))
    assert (image.n_frames, image.info["loop"]) == (5, 0)
    durations = []
    for number in range(image.n_frames):
        image.seek(number)
        durations.append(image.info["duration"])
    assert durations == [1200, 1200, 1200, 1200, 3600]


def test_the_gif_keeps_the_colors_of_the_ranks():
    with Image.open(ROOT / "figures/ring.gif") as moving:
        image = moving.convert("RGB")
    shown = {f"#{r:02X}{g:02X}{b:02X}" for _, (r, g, b) in image.getcolors(1_000_000)}
    for color in RANK_COLORS[:4]:
        assert min(abs(luminance(color) - luminance(other)) for other in shown) < 0.01


def test_the_committed_gif_and_page_are_those_of_the_committed_ring():
    for name in ("ring.gif", "ring-dark.gif"):
        with Image.open(ROOT / "figures" / name) as image:
            assert image.n_frames == 13
    text = (ROOT / "figures/ring.html").read_text(encoding="utf-8")
    assert text.count("<img ") == 13
    for frame in ring_animation(ring_data()).frames[:3]:
        assert frame.description in text


def test_figures_that_do_not_move_are_refused_as_gif_and_drawn_by_none(tmp_path):
    with pytest.raises(ValueError, match="the figure 'memory' does not move, so there is no gif of it; those that do: "
                                         "ring"):
        draw(["ring", "memory"], tmp_path, "gif")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"asked to save an animation as 'ring.png'; end the name in .gif or .html"):
        ring_animation(ring_data(2, 2)).save(tmp_path / "ring.png")


WATCH = "window.struck = []; window.addEventListener('error', (e) => window.struck.push(e.message));"
TELL = ("for (const id of ['on', 'on', 'back', 'back', 'back']) document.getElementById(id).click(); "
        "document.documentElement.dataset.errors = window.struck.join('; ');")


@pytest.mark.skipif(browser() is None, reason="there is no chromium here to open the page in")
def test_in_a_browser_the_animation_shows_one_picture_and_its_buttons_walk_round(tmp_path):
    path = ring_animation(ring_data(2, 2)).save(tmp_path / "ring.html")
    dom = dom_of(path, first=WATCH, last=TELL)
    (root, _), = dom.all("html")
    assert (root["data-errors"], root["data-ready"]) == ("", "5")
    shown = [number for number, (given, _) in enumerate(dom.all("img")) if "hidden" not in given]
    assert shown == [4]  # two on, three back
    assert dom.all("output")[0][1] == "5 of 5"
