"""Lost updates: the published numbers come out of the run, and the rule explains what the arithmetic does."""

import json
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerosim as zs
from tests.course.lost import lost_updates
from zerosim import course
from zerosim.course.lost_updates import (
    POPULAR_UPDATE,
    LostUpdates,
    LostUpdatesQuestion,
    Task,
    add_once,
    all_outcomes,
    kahan,
    last_that,
    neighbor_of,
    shortest,
    stochastic,
)
from zerosim.numerics.kernels import NumpyKernels

KERNELS = NumpyKernels()
LOST = {"below_half_gap", "tie_to_even", "update_rounds_to_zero"}
FEW = LostUpdatesQuestion(update=1e-8, steps=3)


@pytest.fixture(scope="module")
def found() -> LostUpdates:
    return lost_updates(LostUpdatesQuestion())


@pytest.fixture(scope="module")
def few() -> LostUpdates:
    return lost_updates(FEW)


# --- one addition -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "weight", "update", "why"), [
    ("fp16", 1.0, 1e-5, "below_half_gap"), ("bf16", 1.0, 1e-5, "below_half_gap"), ("fp32", 1.0, 1e-5, "kept"),
    ("fp16", 1.0, 1e-8, "update_rounds_to_zero"), ("bf16", 1.0, 1e-8, "below_half_gap"),
    ("fp16", 1.0, -3e-4, "kept"), ("fp16", 1.0, 3e-4, "below_half_gap"),
    ("fp16", 1.0, 2.0**-11, "tie_to_even"), ("fp16", 1.0, -(2.0**-12), "tie_to_even"),
    ("fp16", 1.0 + 2.0**-10, 2.0**-11, "kept"),  # as large a tie, but w is odd
    ("fp16", 65504.0, 16.0, "overflows"), ("fp8_e4m3", 448.0, 16.0, "tie_to_even"),
    ("fp8_e4m3", 448.0, 20.0, "overflows"),
    ("fp16", 1.0, 1e6, "overflows"), ("fp16", 1e6, 1.0, "weight_too_large"), ("bf16", 1e6, 1.0, "below_half_gap"),
    ("fp16", 0.0, 3e-8, "kept"), ("fp16", 0.0, 2.0**-25, "update_rounds_to_zero"), ("fp16", -1.0, 3e-4, "kept"),
])  # fmt: skip
def test_an_addition_is_lost_for_the_reason_that_the_rule_gives(fmt, weight, update, why):
    assert add_once(KERNELS, fmt, weight, update).why == why


@given(st.sampled_from(list(zs.FORMATS)), st.floats(-500, 500), st.floats(-2, 2), st.integers(-60, 2))
def test_the_rule_foretells_what_the_arithmetic_does(fmt, weight, mantissa, exponent):
    addition = add_once(KERNELS, fmt, weight, math.ldexp(mantissa, exponent))
    if addition.why != "weight_too_large":
        assert addition.lost == (addition.why in LOST)


@pytest.mark.parametrize("step", range(-6, 7))
@pytest.mark.parametrize("fmt", zs.FORMATS)
def test_the_rule_holds_at_ties_and_beside_them_on_both_sides_of_powers_of_two(fmt, step):
    gap = float(zs.spacing(1.0, fmt))
    for weight in (1.0, 1.0 + gap, 1.0 - gap / 2, 2.0, -1.0, -1.0 - gap, float(zs.FORMATS[fmt].smallest_subnormal)):
        addition = add_once(KERNELS, fmt, weight, step * gap / 8)
        assert addition.lost == (addition.why in LOST)


@pytest.mark.parametrize(("dtype", "fmt", "stride"), [
    (ml_dtypes.float8_e4m3fn, "fp8_e4m3", 1), (ml_dtypes.float8_e5m2, "fp8_e5m2", 1), (np.float16, "fp16", 37)])
def test_neighbors_are_the_next_codes(dtype, fmt, stride):
    word = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    codes = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(word).view(dtype).astype(np.float64)
    grid = [*sorted(set(codes[np.isfinite(codes)])), math.inf]
    for place in range(1, len(grid) - 2, stride):
        below, here, above = grid[place - 1 : place + 2]
        assert neighbor_of(here, zs.FORMATS[fmt], upward=True) == (above, above - here)
        assert neighbor_of(here, zs.FORMATS[fmt], upward=False) == (below, here - below)


def test_there_is_no_number_beyond_the_largest_but_a_gap():
    assert neighbor_of(65504.0, zs.FORMATS["fp16"], upward=True) == (math.inf, 32.0)
    assert neighbor_of(-65504.0, zs.FORMATS["fp16"], upward=False) == (-math.inf, 32.0)


def test_fp32_keeps_1e_5_as_84_of_its_gaps(found):
    kept = found.addition("fp32")
    assert (kept.lost, kept.moved) == (False, 84 * 2.0**-23)
    assert [found.addition(name).lost for name in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")] == [True] * 4


# --- the cures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "method", "fmt", "result"), [
    (1e-5, "nothing", "fp16", 1.0), (1e-5, "nothing", "bf16", 1.0), (1e-5, "fp32_master", "fp32", 1.1001358),
    (1e-5, "kahan", "fp16", 1.1005859), (1e-5, "kahan", "bf16", 1.0), (1e-5, "kahan_fp32_remainder", "bf16", 1.1015625),
    (1e-8, "fp32_master", "fp32", 1.0), (1e-8, "kahan", "fp16", 1.0), (1e-8, "kahan", "bf16", 1.0),
    (1e-8, "kahan", "fp32", 1.0001), (1e-8, "stochastic_update_in_format", "fp16", 1.0)])
def test_ten_thousand_steps_end_where_was_measured(found, update, method, fmt, result):
    assert found.outcome(method, fmt, update).result == result


def test_the_exact_results_stand_beside(found):
    assert (found.updates, found.exact) == ((1e-5, 1e-8), (1.1, 1.0001))


def test_bf16_kahan_is_stuck_because_its_remainder_has_gaps_too(found):
    outcome = found.outcome("kahan", "bf16", 1e-5)
    assert (outcome.moves, outcome.remainder) == (0.0, 2.0**-8)
    assert outcome.remainder_half_gap == pytest.approx(1.5e-5, rel=0.02)
    small, large = kahan(KERNELS, Task(1.0, (1.5e-5, 1.6e-5), 10_000), "bf16", "bf16")
    assert (small.moves, large.result > 1.15) == (0.0, True)


def test_what_a_fp32_remainder_holds_is_not_lost(found):
    outcome = found.outcome("kahan_fp32_remainder", "bf16", 1e-8)
    assert outcome.result == 1.0
    assert outcome.remainder == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(("fmt", "update"), [("fp16", 1e-5), ("bf16", 1e-5), ("fp16", 1e-8), ("fp32", 1e-8)])
def test_stochastic_rounding_is_right_on_average(found, fmt, update):
    outcome = found.outcome("stochastic", fmt, update)
    # Five standard errors: the seeds are fixed, so this holds always or never; a bias of a few percent would break it.
    assert abs(outcome.result - found.exact[found.updates.index(update)]) < 5 * outcome.standard_error
    assert outcome.lowest <= outcome.result <= outcome.highest


def test_stochastic_rounding_jumps_a_tenth_of_a_time_in_ten_thousand_steps_of_1e_8(found):
    outcome = found.outcome("stochastic", "fp16", 1e-8)
    expected = 10_000 * 1e-8 / 2**-10
    assert abs(outcome.moves - expected) < 5 * math.sqrt(expected / len(found.seeds))


def test_other_seeds_give_other_runs_and_the_same_seeds_the_same():
    task = Task(1.0, (1e-5,), 300)
    first, again, other = (list(stochastic(KERNELS, task, "fp16", seeds)) for seeds in ((0, 1), (0, 1), (2, 3)))
    assert first == again
    assert first[0].moves != other[0].moves


def test_the_chunks_in_which_random_words_are_drawn_change_nothing(monkeypatch):
    task = Task(1.0, (1e-5, 1e-4), 50)
    whole = list(stochastic(KERNELS, task, "bf16", range(8)))
    monkeypatch.setattr(course.lost_updates, "CHUNK", 7)
    assert list(stochastic(KERNELS, task, "bf16", range(8))) == whole


def test_an_update_ends_alike_whichever_others_run_beside_it():
    alone, together = (list(all_outcomes(KERNELS, Task(1.0, updates, 40), ["fp16", "fp32"], range(4)))
                       for updates in ((1e-4,), (3e-3, 1e-4)))
    assert alone == [outcome for outcome in together if outcome.update == 1e-4]


def test_kahan_in_fp16_makes_the_additions_of_half_precision_one_by_one():
    w, remainder, delta = np.float16(1), np.float16(0), np.float16(1e-4)
    for _ in range(200):
        y = np.float16(delta + remainder)
        t = np.float16(w + y)
        remainder = np.float16(y + np.float16(w - t))
        w = t
    (outcome,) = kahan(KERNELS, Task(1.0, (1e-4,), 200), "fp16", "fp16")
    assert (outcome.result, outcome.remainder) == (shortest(w), shortest(remainder))


def test_overflow_is_shown_and_warns_of_nothing():
    outcome = lost_updates(LostUpdatesQuestion(weight=65504.0, update=100.0, steps=3)).outcome("nothing", "fp16", 100.0)
    assert outcome.result == math.inf


# --- fp32, SGD and Adam -------------------------------------------------------------------------------------


def test_fp32_loses_1e_8_at_1_and_at_a_half_and_upwards_at_a_quarter(found):
    assert {s.weight: (s.down_lost, s.up_lost) for s in found.survivors} == {
        1.0: (True, True), 0.5: (True, True), 0.25: (False, True), 0.1: (False, False)}
    assert found.popular_limit == shortest(np.nextafter(np.float32(0.25), np.float32(0)))


def test_the_popular_update_is_sgds_and_adams_is_the_learning_rate(found):
    popular = next(step for step in found.first_steps if step.gradient == 1e-5)
    assert (popular.sgd_update, popular.sgd_lost, popular.adam_lost) == (POPULAR_UPDATE, True, False)
    for step in found.first_steps:
        assert step.adam_update == pytest.approx(1e-3 * step.gradient / (step.gradient + 1e-8), rel=1e-6)


def test_adams_updates_are_lost_at_1_below_half_a_gap_and_kept_right_above(found):
    limits = {(t.format, t.direction): t.lost_up_to for t in found.thresholds}
    assert limits["fp16", "down"] == pytest.approx(2.4e-4, rel=0.02)
    assert limits["fp16", "up"] == pytest.approx(4.9e-4, rel=0.02)
    assert limits["bf16", "down"] == pytest.approx(8 * limits["fp16", "down"], rel=0.01)
    assert len(limits) == 10


def test_bisection_finds_the_last_number_before_the_change():
    assert last_that(lambda x: x <= 0.3, up_to=1.0) == 0.3
    assert last_that(lambda x: x < 2.0**-1060, up_to=1e300) == np.nextafter(2.0**-1060, 0)
    assert last_that(lambda x: x == 0, up_to=1.0) == 0.0


# --- moments and formats ------------------------------------------------------------------------------------


def moments_of(found, fmt):
    return {row.step: row for row in found.moments if row.format == fmt}


def test_fp16_has_no_second_moment_from_the_first_step_on_and_the_update_explodes(found):
    rows = moments_of(found, "fp16")
    assert [row.v for row in rows.values()] == [0.0] * len(rows)
    assert all(row.update == pytest.approx(1e5, rel=0.005) for row in rows.values())


def test_bf16s_second_moment_stalls_at_28_percent_and_the_update_nearly_doubles(found):
    rows = moments_of(found, "bf16")
    assert rows[1000].v == rows[2000].v
    assert round(rows[2000].v_share, 2) == 0.28
    assert round(rows[2000].update, 2) == 1.86
    assert round(rows[1].v_share, 2) == 1.0


def test_the_lessons_moments_in_fp32_are_the_bits_of_the_packages_adam(found):
    adam, g = zs.optim.Adam(lr=1.0), np.full(1, 1e-3, np.float32)
    state = {name: np.zeros(1, np.float32) for name in ("m", "v")}
    rows = moments_of(found, "fp32")
    for step in range(1, 2001):
        w = np.zeros(1, np.float32)
        adam.update(zs.optim.UpdateContext(KERNELS), w, g, state, step)
        if step in rows:
            row = rows[step]
            assert [row.m, row.v, row.update] == [shortest(x[0]) for x in (state["m"], state["v"], -w)]


def test_the_formats_end_where_their_rows_say_and_zero_begins_at_half_the_smallest_number(found):
    facts = {row.format: row for row in found.format_facts}
    assert list(facts) == list(zs.FORMATS)
    for row in facts.values():
        assert row.zero_up_to == row.smallest_subnormal / 2
    assert facts["fp16"].zero_up_to == 2.0**-25
    assert facts["bf16"].gap_at_one == 8 * facts["fp16"].gap_at_one


def test_small_gradients_are_not_zero_in_fp16_until_3e_8(found):
    assert [u.stored == 0 for u in found.underflows] == [u.value <= 2.0**-25 for u in found.underflows]
    assert {u.value: u.stored for u in found.underflows}[4e-8] == 5.9604645e-08


# --- questions and data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"format": "bf16"}, {"weight": 0.1}, {"update": 3e-4}, {"steps": 4}], ids=str)
def test_every_part_of_the_question_changes_the_answer(few, change):
    changed = lost_updates(replace(FEW, **change))
    assert replace(changed, question=FEW) != few


@pytest.mark.parametrize(("change", "text"), [
    ({"format": "fp17"}, "no number format is named 'fp17'; there are fp1"),
    ({"weight": math.nan}, "weight must be a finite number, found nan"),
    ({"weight": 1e6}, "fp16 has no number as large as the weight 1e\\+06: its largest is 65504; take a smaller weight"),
    ({"update": 0.0}, "a finite number other than 0, found 0.0"), ({"update": math.inf}, "other than 0, found inf"),
    ({"steps": 0}, "at least once, found steps=0")], ids=str)
def test_questions_without_an_answer_are_refused_with_what_to_do(change, text):
    with pytest.raises(ValueError, match=text):
        replace(FEW, **change)


def test_formats_too_small_for_the_weight_are_left_out():
    assert LostUpdatesQuestion(format="bf16", weight=1e6).formats == ["bf16", "fp32"]
    assert LostUpdatesQuestion(format="fp8_e5m2").formats == ["fp8_e5m2", "fp16", "bf16", "fp32"]


def test_the_json_is_plain_and_survives_a_round_trip(found):
    data = found.as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["question"] == {"format": "fp16", "weight": 1.0, "update": 1e-5, "steps": 10_000}
    assert {o["method"]: o["result"] for o in data["outcomes"] if o["update"] == 1e-5}["fp32_master"] == 1.1001358


def test_results_are_the_shortest_decimals_of_their_fp32(found):
    for outcome in found.outcomes:
        if not outcome.method.startswith("stochastic"):
            assert repr(outcome.result) == str(np.float32(outcome.result))


def test_what_is_not_finite_is_named_in_the_json():
    data = lost_updates(LostUpdatesQuestion(weight=65504.0, update=100.0, steps=3)).as_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    addition = next(a for a in data["additions"] if a["format"] == "fp16")
    assert (addition["result"], addition["neighbor"], addition["why"]) == ("inf", "inf", "overflows")
