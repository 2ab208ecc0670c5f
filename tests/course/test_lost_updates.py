"""Lost updates: the published numbers come out of the run, the rule explains what the arithmetic does, and the printed
page shows it."""

import json
import math
from functools import cache

import numpy as np
import pytest

import zerosim as zs
from tests.support import broken_lines, printed
from zerosim.course import lost_updates as lesson

Question, Task, shortest = lesson.LostUpdatesQuestion, lesson.Task, lesson.shortest
LOST = {"below_half_gap", "tie_to_even", "update_rounds_to_zero"}
OVERFLOWS = Question(weight=65504.0, update=100.0, steps=3)


@pytest.fixture(scope="module")
def found():
    return lesson.lost_updates(Question(), seeds=lesson.SEEDS[:64])


@cache
def quickly(question):
    """The answer with few seeds and few steps of Adam's moments, which no question changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "MOMENT_STEPS", (1, 2, 3))
        return lesson.lost_updates(question, seeds=(0, 1, 2))


def test_an_addition_is_lost_for_the_reason_that_the_rule_gives():
    for fmt, weight, update, why in [
            ("fp32", 1.0, 1e-5, "kept"), ("fp16", 1.0, 1e-8, "update_rounds_to_zero"),
            ("fp16", 1.0, -3e-4, "kept"), ("fp16", 1.0, 3e-4, "below_half_gap"),
            ("fp16", 1.0, 2.0**-11, "tie_to_even"), ("fp16", 1.0, -(2.0**-12), "tie_to_even"),
            ("fp16", 1.0 + 2.0**-10, 2.0**-11, "kept"),  # as large a tie, but w is odd
            ("fp16", 65504.0, 16.0, "overflows"), ("fp8_e4m3", 448.0, 16.0, "tie_to_even"),
            ("fp8_e4m3", 448.0, 20.0, "overflows"), ("fp16", 1.0, 1e6, "overflows"),
            ("fp16", 1e6, 1.0, "weight_too_large"), ("fp16", 0.0, 3e-8, "kept"), ("fp16", -1.0, 3e-4, "kept")]:
        assert lesson.add_once(fmt, weight, update).why == why, (fmt, weight, update)


def test_the_rule_holds_at_ties_and_beside_them_on_both_sides_of_powers_of_two():
    for fmt, row in zs.FORMATS.items():
        gap = float(zs.spacing(1.0, fmt))
        for weight in (1.0, 1.0 + gap, 1.0 - gap / 2, 2.0, -1.0, -1.0 - gap, float(row.smallest_subnormal)):
            for step in range(-6, 7):
                addition = lesson.add_once(fmt, weight, step * gap / 8)
                assert addition.lost == (addition.why in LOST), (fmt, weight, step)


@pytest.mark.parametrize(("fmt", "stride"), [("fp8_e4m3", 1), ("fp8_e5m2", 1), ("fp16", 137)])
def test_neighbors_are_the_next_codes_and_beyond_the_largest_there_is_a_gap_but_no_number(fmt, stride):
    row = zs.FORMATS[fmt]
    codes = np.arange(2**row.bits).astype(f"u{row.nbytes}").view(row.dtype).astype(np.float64)
    grid = sorted(set(codes[np.isfinite(codes)]))
    for place in range(1, len(grid) - 1, stride):
        below, here, above = grid[place - 1:place + 2]
        assert lesson.neighbor_of(here, row, upward=True) == (above, above - here)
        assert lesson.neighbor_of(here, row, upward=False) == (below, here - below)
    for end, last, sign in ((grid[-1], grid[-1] - grid[-2], 1), (grid[0], grid[1] - grid[0], -1)):
        assert lesson.neighbor_of(end, row, upward=sign > 0) == (sign * math.inf, last)


def test_ten_thousand_steps_end_where_was_measured(found):
    assert (found.updates, found.exact) == ((1e-5, 1e-8), (1.1, 1.0001))
    for update, method, fmt, result in [
            (1e-5, "nothing", "fp16", 1.0), (1e-5, "nothing", "bf16", 1.0), (1e-5, "fp32_master", "fp32", 1.1001358),
            (1e-5, "kahan", "fp16", 1.1005859), (1e-5, "kahan", "bf16", 1.0),
            (1e-5, "kahan_fp32_remainder", "bf16", 1.1015625), (1e-8, "fp32_master", "fp32", 1.0),
            (1e-8, "kahan", "fp16", 1.0), (1e-8, "kahan", "bf16", 1.0), (1e-8, "kahan", "fp32", 1.0001),
            (1e-8, "stochastic_update_in_format", "fp16", 1.0)]:
        assert found.outcome(method, fmt, update).result == result, (update, method, fmt)
    waits = found.outcome("kahan_fp32_remainder", "bf16", 1e-8)  # with a remainder that loses nothing
    assert (waits.result, waits.remainder) == (1.0, pytest.approx(1e-4, rel=1e-3))


def test_stochastic_rounding_is_right_on_average_and_jumps_as_often_as_it_should(found):
    # Five standard errors: the seeds are fixed, so this holds always or never; a bias of a few percent would break it.
    for fmt, update in (("fp16", 1e-5), ("bf16", 1e-5), ("fp16", 1e-8), ("fp32", 1e-8)):
        outcome = found.outcome("stochastic", fmt, update)
        assert abs(outcome.result - found.exact[found.updates.index(update)]) < 5 * outcome.standard_error, fmt
        assert outcome.lowest <= outcome.result <= outcome.highest
    rare, expected = found.outcome("stochastic", "fp16", 1e-8), 10_000 * 1e-8 / 2**-10
    assert abs(rare.moves - expected) < 5 * math.sqrt(expected / len(found.seeds))
    assert rare.standard_error == pytest.approx(2**-10 * math.sqrt(expected / len(found.seeds)), rel=0.3)


def test_seeds_alone_decide_stochastic_rounding_not_chunks_of_random_words_nor_other_updates(monkeypatch):
    def outcomes(seeds, updates):
        return [one for one in lesson.stochastic(Task(1.0, updates, 100), "bf16", seeds) if one.update == 1e-4]

    first = outcomes((0, 1), (1e-5, 1e-4))
    assert first == outcomes((0, 1), (1e-5, 1e-4)) == outcomes((0, 1), (1e-4,))
    assert first[0].moves != outcomes((2, 3), (1e-5, 1e-4))[0].moves
    monkeypatch.setattr(lesson, "CHUNK", 7)
    assert outcomes((0, 1), (1e-5, 1e-4)) == first


def test_fp32_loses_1e_8_at_1_and_at_a_half_and_upwards_at_a_quarter():
    for weight, lost in ((1.0, (True, True)), (0.5, (True, True)), (0.25, (False, True)), (0.1, (False, False))):
        assert tuple(lesson.add_once("fp32", weight, update).lost for update in (-1e-8, 1e-8)) == lost, weight


def test_the_popular_update_is_sgds_and_adams_is_the_learning_rate(found):
    popular = next(step for step in found.first_steps if step.gradient == 1e-5)
    assert (popular.sgd_update, popular.sgd_lost, popular.adam_lost) == (lesson.POPULAR_UPDATE, True, False)
    for step in found.first_steps:
        assert step.adam_update == pytest.approx(1e-3 * step.gradient / (step.gradient + 1e-8), rel=1e-6)


def test_adams_updates_are_lost_at_1_below_half_a_gap_and_kept_right_above(found):
    limits = {(t.format, t.direction): t.lost_up_to for t in found.thresholds}
    assert limits["fp16", "down"] == pytest.approx(2.4e-4, rel=0.02)
    assert limits["fp16", "up"] == pytest.approx(4.9e-4, rel=0.02)
    assert limits["bf16", "down"] == pytest.approx(8 * limits["fp16", "down"], rel=0.01)
    assert len(limits) == 10


def test_the_json_leaves_out_formats_too_small_has_the_shortest_decimals_and_names_what_is_not_finite(found):
    data = quickly(OVERFLOWS).as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert Question(format="bf16", weight=1e6).formats == ["bf16", "fp32"]
    assert found.as_json()["question"] == {"format": "fp16", "weight": 1.0, "update": 1e-5, "steps": 10_000}
    for outcome in found.as_json()["outcomes"]:
        if not outcome["method"].startswith("stochastic"):
            assert repr(outcome["result"]) == str(np.float32(outcome["result"]))
    addition = next(a for a in data["additions"] if a["format"] == "fp16")
    assert (addition["result"], addition["neighbor"], addition["why"]) == ("inf", "inf", "overflows")


def line_with(text, *words):
    """The one line that has all these words."""
    (line,) = (line for line in text.splitlines() if all(word in line for word in words))
    return line


def test_the_lesson_shows_every_published_number_and_fits_80_columns(found):
    text = printed(found)
    for words in ("1.1001358", "1.1005859", "1.1015625", "1.0001", "27.6 %", "1.86 lr", "1e+05 lr",
                  "0.000244", "0.000489", "2.98e-08", "5.96e-08", "64 seeds"):
        assert words in text
    assert line_with(text, "fp32 master weight").split()[-6:] == ["1.1001358", "100.1", "%", "1", "0", "%"]
    assert line_with(text, "Kahan, remainder in fp32").split()[-1] == "%*"


def test_each_reason_has_its_words_and_no_cell_of_any_question_breaks():
    for question, said in [
            (Question(update=2.0**-11, steps=3), "lost: tie, w is even"),
            (Question(update=1e-8, steps=3), "lost: δ becomes 0"),
            (Question(update=-1e-4, steps=3), "lost: below half gap"), (OVERFLOWS, "overflows"),
            (Question("fp32", steps=3), "kept: 1.0014e-05"), (Question(weight=0.1, steps=3), "lost: below half gap"),
            (Question("fp8_e5m2", -1.0 / 3, 1 / 3, 3), "0.3333"),
            (Question("bf16", 1e30, 1e26, 3), "w is too large")]:
        text = printed(quickly(question))
        assert said in text, question
        assert broken_lines(text) == [], question
