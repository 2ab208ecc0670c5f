"""The same training side by side: whose bits are equal and whose are not, and the figure of it."""

import re
from dataclasses import replace

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen
from tests.display import seen
from zerosim.course.figures.comparison import comparison, comparison_data, save_comparison
from zerosim.course.training import OVER, Options, compare, values_of
from zerosim.display.drawing import DARK, LIGHT
from zerosim.models.text import Corpus, shipped

TINY = Options(model="gpt-nano", ranks=2, steps=3, batch=2)
STYLES = pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)


@pytest.fixture(scope="module")
def by_stage():
    return compare(replace(TINY, ranks=3), shipped(), "stage")


# -- bits -------------------------------------------------------------------------------------------------------------


def test_all_stages_agree_bit_for_bit_and_differ_in_memory_and_traffic(by_stage):
    assert by_stage.all_same_bits
    assert by_stage.same_bits == [[0, 1, 2, 3]]
    peaks = [run.peak_nbytes[0] for run in by_stage.runs]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    sent = [sum(run.sent_nbytes["parameters"]) + sum(run.sent_nbytes["gradients"]) for run in by_stage.runs]
    assert sent[0] == sent[1] == sent[2] < sent[3]


def test_accumulation_makes_two_orders_of_the_stages():
    found = compare(replace(TINY, ranks=3, micro_batches=2, compute="bf16"), shipped(), "stage")
    assert found.same_bits == [[0, 1], [2, 3]]


def test_formats_and_optimizers_end_in_different_bits():
    assert compare(TINY, shipped(), "compute").same_bits == [["fp32"], ["bf16"], ["fp16"]]
    assert compare(TINY, shipped(), "optimizer").same_bits == [["sgd"], ["adamw"], ["lion"], ["muon"]]


def test_recomputation_changes_no_bit_and_tiled_attention_does():
    found = compare(TINY, shipped(), "recompute", ["none", "block", "segment(2)", "tiled", "selective"])
    assert found.same_bits == [["none", "block", "segment(2)", "selective"], ["tiled"]]
    parameters = [run.sent_nbytes["parameters"][0] for run in found.runs]
    assert parameters[0] == parameters[1] < parameters[2]  # a segment of two units gathers the first of them again


def test_runs_that_see_the_same_nans_are_equal():
    found = compare(replace(TINY, lr=1e30), shipped(), "stage", [0, 3])
    assert found.runs[0].diverged_at == 2
    assert found.all_same_bits


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_comparing_hears_each_run_and_each_of_its_steps():
    heard, steps = [], []
    compare(replace(TINY, steps=1), shipped(), "stage", [0, 3], heard.append, steps.append)
    assert heard == ["stage 0", "stage 3"]
    assert [step.number for step in steps] == [1, 1]


@pytest.mark.parametrize(("over", "values", "text"), [
    ("compute", ["fp32", "fp61"], "no number format is named 'fp61'"),
    ("stages", None, r"asked to compare over 'stages'; choose one of stage, .* did you mean 'stage'"),
    ("stage", [0], "over stage the values 0; name two or more that differ, as in 0, 1, 2, 3"),
    ("stage", [0, 3, 0], "over stage the values 0, 3, 0; name two or more that differ"),
    ("stage", [], "over stage the values none; name two"), ("stage", [0, ""], "ZeRO has the stages")])
def test_what_cannot_be_compared_is_refused_before_the_first_run(over, values, text):
    heard = []
    with pytest.raises(ValueError, match=text):
        compare(TINY, shipped(), over, values, heard.append)
    assert heard == []


def test_what_one_of_the_engines_refuses_is_refused_before_the_first_run():
    heard = []
    with pytest.raises(ValueError, match="Muon needs all of"):
        compare(replace(TINY, layout="per_unit"), shipped(), "optimizer", ["adamw", "muon"], heard.append)
    with pytest.raises(zs.OutOfMemoryError, match=r"^stage 0: rank 0 asked for"):
        compare(replace(TINY, capacity_nbytes=70_000), shipped(), "stage", [3, 0], heard.append)
    with pytest.raises(ValueError, match="sequences of 8 need more"):
        compare(TINY, Corpus("short", shipped().tokens[:20]), "stage", None, heard.append)
    assert heard == []


def test_values_are_read_from_a_text():
    assert values_of("stage", "0, 3") == [0, 3]
    assert values_of("compute", "fp32,bf16") == ["fp32", "bf16"]
    assert values_of("compute", None) is None


# -- the figure -------------------------------------------------------------------------------------------------------


@STYLES
def test_the_figure_of_a_comparison_shows_each_run_in_bars_and_words(style, by_stage):
    data = comparison_data(by_stage)
    drawing = comparison(data, style)
    for run in by_stage.runs:
        assert f"{run.peak_nbytes[0]:,} bytes held" in drawing.description
        assert f"last loss {run.steps[-1].loss:.3f} nats" in drawing.description
    lines = drawing.figure.axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines[:4]] == [list(losses) for losses in data.losses]
    assert set(lines[4].get_ydata()) == {shipped().unigram_entropy}
    held = [run.peak_nbytes[0] for run in by_stage.runs]
    sent = [(run.sent_nbytes["parameters"][0] + run.sent_nbytes["gradients"][0]) / 3 for run in by_stage.runs]
    for axes, expected in zip(drawing.figure.axes[1:], (held, sent), strict=True):
        heights = [sum(patch.get_height() for patch in axes.patches
                       if round(patch.get_x() + patch.get_width() / 2) == place) for place in range(4)]
        # Bars are megabytes in binary floating point, added up here in another order.
        assert heights == pytest.approx([nbytes / 1e6 for nbytes in expected], rel=1e-12)


@pytest.mark.parametrize("over", chosen(["recompute"], OVER))  # the most runs, and the longest names
def test_no_words_of_the_figure_lie_on_others_or_leave_the_page(over):
    drawing = comparison(comparison_data(compare(replace(TINY, steps=2), shipped(), over)))
    assert seen.misplaced(drawing) == []
    assert min(text.get_fontsize() for text in seen.texts(drawing)) >= 11
    assert drawing.figure.get_figwidth() <= 15


def test_two_drawings_of_one_comparison_are_the_same_bytes_and_replace_each_other_whole(by_stage, tmp_path):
    once = save_comparison(by_stage, str(tmp_path / "it.svg")).read_bytes()
    assert save_comparison(by_stage, str(tmp_path / "it.svg")).read_bytes() == once
    assert save_comparison(by_stage, str(tmp_path / "it.svg"), dark=True).read_bytes() != once
    assert [path.name for path in tmp_path.iterdir()] == ["it.svg"]


def test_a_drawing_that_fails_half_way_leaves_what_was_there(by_stage, tmp_path, monkeypatch):
    place = tmp_path / "it.svg"
    place.write_text("what was there")

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ValueError, match=re.escape("but: No space left on device; name a file that can be written")):
        save_comparison(by_stage, str(place))
    assert place.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [place]


def test_bytes_are_those_of_the_fullest_rank_in_words_and_in_the_figure():
    """Whole matrices on five ranks: rank 0 owns nothing."""
    found = compare(replace(TINY, ranks=5, optimizer="muon"), shipped(), "stage", [0, 3])
    run = found.runs[1]
    assert run.fullest_rank > 0
    assert run.peak_nbytes[0] < max(run.peak_nbytes) == sum(run.peak_nbytes_by_kind.values())
    assert sum(comparison_data(found).peaks[1].values()) == max(run.peak_nbytes)


def test_the_name_of_a_text_does_not_decide_its_batches():
    text = shipped()
    renamed = type(text)("other", text.tokens)
    assert np.array_equal(text.batch(0, 1, 2, 3, 8)[0], renamed.batch(0, 1, 2, 3, 8)[0])
