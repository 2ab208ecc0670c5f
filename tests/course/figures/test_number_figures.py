"""The pictures of gaps and of lost updates are drawn from numbers that NumPy and ml_dtypes know too."""

import numpy as np
import pytest

import zerosim as zs
from tests.display import seen
from zerosim.course.figures.numbers import lost_updates, lost_updates_data, spacing, spacing_data
from zerosim.course.lost_updates import Task, path_of, plain
from zerosim.display.drawing import DARK, LIGHT
from zerosim.numerics.kernels import NumpyKernels

STYLES = pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)


def next_number(number):
    """The next larger number of a format's array type, by its code."""
    return (np.array([number]).view(f"u{number.dtype.itemsize}") + 1).view(number.dtype)[0]


# -- gaps ---------------------------------------------------------------------------------------------------------

def test_half_a_gap_is_half_the_way_to_the_next_code():
    data, compared = spacing_data(formats=tuple(zs.FORMATS)), 0
    for name, halves in zip(data.formats, data.half_gaps, strict=True):
        row = zs.format_of(name)
        for weight, half in zip(data.weights, halves, strict=True):
            if not row.smallest_subnormal <= weight <= row.largest:
                assert np.isnan(half)
                continue
            here = np.array(weight).astype(row.dtype)
            above = float(next_number(here))
            if np.isfinite(above):  # the largest number has no next one
                assert half == (above - float(here)) / 2, (name, weight)
                compared += 1
    assert compared > 150


def test_what_the_picture_says_of_an_update_is_what_an_addition_does():
    for update in (1e-5, 3e-4, 6e-4, 0.005, 0.07):
        data = spacing_data(formats=tuple(zs.FORMATS), update=update)
        for name in data.formats:
            one = np.float32(1).astype(zs.format_of(name).dtype)
            lost = (np.float32(1) + np.float32(update)).astype(one.dtype) == one
            assert lost == (update < data.half_gap(name, 1.0))
            assert f"{name}, so that {update:g} is {'lost' if lost else 'kept'}" in spacing(data).description


@STYLES
def test_the_lines_of_gaps_are_the_data_and_each_is_named(style):
    data = spacing_data()
    drawing = spacing(data, style)
    *lines, level = drawing.figure.axes[0].get_lines()
    for line, halves in zip(lines, data.half_gaps, strict=True):
        assert np.array_equal(line.get_ydata(), halves, equal_nan=True)
        assert np.array_equal(line.get_xdata(), data.weights)
    assert set(level.get_ydata()) == {data.update}
    assert {*data.formats, "an update of 1e-05"} <= {text.get_text() for text in seen.texts(drawing)}
    assert len({line.get_color() for line in lines}) == len(data.formats)


# -- lost updates -------------------------------------------------------------------------------------------------

def test_a_path_ends_where_the_lesson_on_lost_updates_ends():
    kernels, task = NumpyKernels(), Task(1.0, (1e-5, 6e-4, -3e-4), 500)
    for name in ("fp16", "bf16", "fp32"):
        path = path_of(kernels, task, name)
        assert path.shape == (501, 3)
        assert path.dtype == zs.format_of(name).dtype
        assert [float(np.float32(w)) for w in path[-1]] == [
            float(np.float32(outcome.result)) for outcome in plain(kernels, task, name)]


def test_each_weight_of_a_path_is_the_one_before_and_one_rounded_addition():
    data = lost_updates_data((1e-5, 6e-4), (300, 40))
    for run in data.runs:
        for name, path in zip(("fp32", *data.formats), (run.master, *run.alone), strict=True):
            dtype = zs.format_of(name).dtype
            delta = np.array(run.update).astype(dtype).astype(np.float32)
            w = np.array(data.weight).astype(dtype)
            for found in path:
                assert found == float(w)
                w = (w.astype(np.float32) + delta).astype(dtype)
        for name, copy in zip(data.formats, run.copies, strict=True):
            assert np.array_equal(copy, np.float32(run.master).astype(zs.format_of(name).dtype).astype(np.float64))


def test_small_updates_are_lost_without_a_master_and_larger_ones_go_too_far_in_fp16():
    small, larger = lost_updates_data().runs
    assert {w for alone in small.alone for w in alone} == {1.0}
    assert small.master[-1] == pytest.approx(1 + small.steps * small.update, rel=1e-4)
    bf16, fp16 = larger.alone
    assert set(bf16) == {1.0}
    assert fp16[-1] - 1 == larger.steps * 2.0**-10 > 1.6 * (larger.master[-1] - 1)


@STYLES
def test_the_lines_of_weights_are_the_data(style):
    data = lost_updates_data((1e-5, 1e-3), (30, 40))
    drawing = lost_updates(data, style)
    for axes, run in zip(drawing.figure.axes, data.runs, strict=True):
        drawn = [tuple(line.get_ydata()) for line in axes.get_lines()]
        assert drawn == [run.master, *run.copies, *run.alone]
        assert {tuple(line.get_xdata()) for line in axes.get_lines()} == {tuple(range(run.steps + 1))}
        assert len({(line.get_color(), line.get_linewidth()) for line in axes.get_lines()}) == 5
    for words in ("After 40 times 0.001", "the fp32 master 1.04"):
        assert words in drawing.description


@STYLES
def test_other_numbers_keep_their_words_apart(style):
    for drawing in (spacing(spacing_data(("bf16", "fp16", "fp32")), style), spacing(spacing_data(("fp16",)), style),
                    lost_updates(lost_updates_data((1e-5,), (200,), 0.1), style),
                    lost_updates(lost_updates_data((-1e-8, 3e-4), (20, 20), 0.5), style)):
        assert seen.misplaced(drawing) == []
