"""The pictures of mixed precision show real runs, found again here: by formulas, or another way through the package."""

import re

import numpy as np
import pytest
from matplotlib.colors import same_color

from tests.cases import chosen
from tests.display import seen
from zerosim.course.figures.losses import (
    EVERYWHERE,
    IN_THE_SUM,
    LOOKS,
    MARKS,
    SOMEWHERE,
    format_losses,
    format_losses_data,
    loss_scale,
    loss_scale_data,
)
from zerosim.course.figures.numbers import mixed_precision, mixed_precision_data
from zerosim.course.precision_runs import POLICIES, Passed, observed_step
from zerosim.display.drawing import DARK, LIGHT

STYLES = pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)


# -- the loss scale -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def scaled():
    return seen.data_of("loss-scale")


def test_the_scale_is_what_the_scaler_makes_of_the_skips(scaled):
    for rule, run in zip(scaled.rules, scaled.runs, strict=True):
        scaler = rule.start()
        for scale, skipped in zip(run.scales, run.skipped, strict=True):
            assert scale == scaler.scale
            scaler.update(skipped)


def test_every_skip_is_marked_once_by_where_a_gradient_overflowed(scaled):
    for place, run in enumerate(scaled.runs):
        skips = scaled.skips(place)
        assert sorted(step for steps in skips.values() for step in steps) == [
            number for number, skipped in enumerate(run.skipped, 1) if skipped]
        for where, count in ((EVERYWHERE, {3}), (SOMEWHERE, {1, 2}), (IN_THE_SUM, {0})):
            assert skips[where], where
            assert {len(run.overflowed[step - 1]) for step in skips[where]} <= count


def test_no_rank_overflows_in_a_step_that_was_not_skipped(scaled):
    for run in scaled.runs:
        assert not any(ranks for ranks, skipped in zip(run.overflowed, run.skipped, strict=True) if not skipped)


@STYLES
def test_the_stairs_and_marks_are_the_data(scaled, style):
    for place, (axes, run) in enumerate(zip(loss_scale(scaled, style).figure.axes, scaled.runs, strict=True)):
        stairs, *marks = axes.get_lines()
        assert tuple(stairs.get_ydata()) == run.scales
        for line, (where, steps) in zip(marks, scaled.skips(place).items(), strict=True):
            assert list(line.get_xdata()) == steps
            assert list(line.get_ydata()) == [run.scales[step - 1] for step in steps]
            assert (line.get_marker(), line.get_linestyle()) == (MARKS[where][0], "None")
            assert same_color(line.get_color(), MARKS[where][1])
    for words in ("torch, window 16: 11 of 120 steps skipped", "deepspeed, hysteresis 2, window 16: 14 of 120"):
        assert words in loss_scale(scaled, style).description


# -- loss curves --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def curves():
    return seen.data_of("format-losses")


def test_formats_with_a_master_and_scaling_keep_up_with_fp32_and_the_others_do_not(curves):
    last = {name: curves.curve(name)[-1] for name in curves.runs}
    exact = last["fp32"]
    assert set(last) == set(POLICIES)
    for name in ("bf16 with a master", "fp16 with a master and loss scaling"):
        assert last[name] == pytest.approx(exact, rel=0.005)  # measured: 0.05 %
    assert last["fp16 with a master, S = 1"] > 1.1 * exact
    assert last["bf16 without a master"] > 1.3 * exact


@STYLES
def test_the_curves_are_means_of_the_last_losses_and_say_where_they_end(curves, style):
    drawing = format_losses(curves, style)
    for line, (name, run) in zip(drawing.figure.axes[0].get_lines(), curves.runs.items(), strict=True):
        numbers = line.get_xdata()
        means = [np.mean(run.losses[number - curves.window:number]) for number in numbers]
        assert line.get_ydata() == pytest.approx(means, rel=1e-12)
        assert numbers[-1] == len(run.losses)
        assert line.get_label() == f"{name}: {means[-1]:.4f} at the end"
        assert same_color(line.get_color(), LOOKS[name]["color"])
        assert f"{name}: {means[0]:.3g} at first, {means[-1]:.3g} at the end" in drawing.description


# -- the flow of a step -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_a_step_passes_what_the_formulas_say(compute, ranks):
    """4 + 2 + 2 + 8 bytes per parameter with Adam. Source: Rajbhandari et al. 2020, section 3.1; the all-reduce sends
    2(N - 1)/N of the gradient, here cut into N equal chunks."""
    widths, rows = (30, 60, 60, 30), 7
    p = 30 * 60 + 60 * 60 + 60 * 30
    found = observed_step(compute, widths, rows, ranks=ranks, scale=8.0)
    assert (found.parameter_count, found.ranks, found.scale, found.skipped) == (p, ranks, 8.0, False)
    assert found.master == Passed("fp32", 4 * p)
    assert found.weights == found.gradient == Passed(compute, 2 * p)
    assert found.state == Passed("fp32", 8 * p)
    assert found.wide_gradient == Passed("fp32", 4 * p)
    assert found.block_nbytes == 4 * 60 * 60
    assert found.output == found.output_gradient == Passed(compute, 2 * rows * 30)
    assert found.kept == Passed(compute, 2 * rows * (30 + 60 + 60))
    assert found.signs_nbytes == 2 * -(-rows * 60 // 8)
    assert found.sent_nbytes == 2 * p * 2 * (ranks - 1) // ranks
    assert found.gradient_divisor == 8 * ranks


def test_a_large_gradient_is_widened_block_by_block():
    found = observed_step(widths=(300, 300), rows=2)
    assert (found.wide_gradient.nbytes, found.block_nbytes) == (4 * 90_000, 4 * 65_536)


def test_an_fp32_step_has_no_master_to_watch():
    with pytest.raises(ValueError, match=r"computes in fp32, which has one copy .*; take compute=.fp16. or .bf16."):
        observed_step("fp32", (4, 4), 2)


@STYLES
def test_every_number_of_bytes_in_the_drawing_is_of_the_step(style):
    for data in (mixed_precision_data(), observed_step("bf16", (5, 6, 7), 3, ranks=4)):
        words = " ".join(text.get_text() for text in seen.texts(mixed_precision(data, style)))
        drawn = {int(number.replace(",", "")) for number in re.findall(r"([\d,]+) B\b", words)}
        passed = [data.master, data.weights, data.kept, data.output, data.output_gradient, data.gradient, data.state,
                  data.wide_gradient]
        assert drawn == {one.nbytes for one in passed} | {data.signs_nbytes, data.sent_nbytes, data.block_nbytes}
        held = [one.nbytes / data.parameter_count for one in (data.master, data.weights, data.gradient, data.state)]
        assert f"{' + '.join(f'{nbytes:g}' for nbytes in held)} = {sum(held):g}" in words


def test_an_arrow_ends_on_a_box_and_begins_on_another():
    axes = mixed_precision(mixed_precision_data()).figure.axes[0]
    boxes = [patch.get_bbox() for patch in axes.patches if hasattr(patch, "get_boxstyle")]
    assert len(boxes) == 7
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 9
    for arrow in arrows:
        ends = [[place for place, box in enumerate(boxes) if box.padded(0.01).contains(*point)]
                for point in (arrow.xyann, arrow.xy)]
        assert [len(end) for end in ends] == [1, 1]
        assert ends[0] != ends[1]


# -- what the eye meets -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("style", chosen([LIGHT], [LIGHT, DARK]), ids=lambda style: style.name)
def test_other_runs_keep_their_words_apart(style):
    for drawing in (loss_scale(loss_scale_data((("deepspeed-legacy", 2),), 30, ranks=2), style),
                    loss_scale(loss_scale_data((("torch", 1), ("deepspeed", 1), ("deepspeed", 2)), 20), style),
                    format_losses(format_losses_data(30, 1.0), style),
                    mixed_precision(observed_step("bf16", (1024, 1024, 1024), 64, ranks=3), style)):
        assert seen.misplaced(drawing) == []
