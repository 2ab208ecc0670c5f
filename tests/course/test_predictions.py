"""Typed predictions: nothing of what was measured is shown before an answer of its kind is typed."""

import numpy as np
import pytest

import zerosim as zs

AGAIN = "above, and run its cell and this one again\n"


def said(capsys, answer, measured, **options):
    """What one question prints, without its number."""
    zs.Predictions({7: answer}).reveal(7, measured, **options)
    return capsys.readouterr().out.removeprefix("7. ")


@pytest.mark.parametrize("measured", [1.5, True, "ring", [1, 2], {"w1"}, np.float16(2048), np.arange(3)])
def test_before_an_answer_is_typed_nothing_of_the_measured_value_is_shown(capsys, measured):
    assert said(capsys, ..., measured) == f"type your prediction {AGAIN}"


@pytest.mark.parametrize(("answer", "measured", "verdict"), [
    (2.0, 1.5, "2; measured 1.5: off by 33%"), (1.51, 1.5, "1.51; measured 1.5: right"),
    (37, 36, "37; measured 36: off by 3%"), (36, np.int64(36), "36; measured 36: right"),
    (5e4, 98_304.0, "50,000; measured 98,304: off by 49%"), (1e38, 1.5, "1e+38; measured 1.5: far off"),
    (1, 0.0, "1; measured 0: not so"), (0, 0.0, "0; measured 0: right"), (100, np.inf, "100; measured inf: not so"),
    (np.nan, np.float32(np.nan), "nan; measured nan: right"), (np.nan, 4.0, "nan; measured 4: not so"),
    ("yes", True, "yes; measured yes: right"), (False, np.bool_(True), "no; measured yes: not so"),
    ("Overflow", "underflow", "overflow; measured underflow: not so"), ("Ring", "ring", "ring; measured ring: right"),
    ([2050, 2050], np.array([2050, 2048], np.float16), "[2,050, 2,050]; measured [2,050, 2,048]: 1 of 2 right"),
    ((3, "no"), [3, False], "[3, no]; measured [3, no]: right"),
    ([[1, 2], [3, 4]], [[1, 2], [3, 5]], "[[1, 2], [3, 4]]; measured [[1, 2], [3, 5]]: 1 of 2 right"),
    ({"LAMB", "Adam"}, {"Adam", "LAMB"}, "adam, lamb; measured adam, lamb: right"),
    (["w1"], {"w1", "w2"}, "w1; measured w1, w2: not so"), (set(), {0.1}, "none; measured 0.1: not so")])
def test_a_typed_answer_stands_beside_the_measured_value(capsys, answer, measured, verdict):
    assert said(capsys, answer, measured) == f"you predicted {verdict}\n"


def test_a_stated_tolerance_counts_for_whole_numbers_too(capsys):
    assert said(capsys, 40, 37) == "you predicted 40; measured 37: off by 8%\n"
    assert said(capsys, 40, 37, within=0.1) == "you predicted 40; measured 37: right\n"


@pytest.mark.parametrize(("answer", "measured", "kind"), [
    ("a lot", 1.5, "a number"), (True, 1, "a number"), (1, True, "yes or no"), ("perhaps", True, "yes or no"),
    (3, "ring", "a word"), ("ring", {"ring"}, "a set"), (None, 2, "a number"),
    (2, [1.5, True], "a list of 2: a number, yes or no"), ([1], [1.5, 2], "a list of 2: a number, a number"),
    ([1, 2], [1.5, "ring"], "a list of 2: a number, a word")])
def test_an_answer_of_another_kind_is_told_the_kind_and_not_the_value(capsys, answer, measured, kind):
    assert said(capsys, answer, measured) == f"you predicted {answer!r}, and the answer is {kind}: type that {AGAIN}"


@pytest.mark.parametrize("answers", [None, [..., ...], {}, {"1": ...}])
def test_answers_are_given_by_their_questions_numbers(answers):
    with pytest.raises(ValueError, match=r"give each answer by its question's number, as in zs.Predictions\(\{1: 1.5"):
        zs.Predictions(answers)


def test_a_question_without_a_place_for_its_answer_is_refused():
    with pytest.raises(ValueError, match="question 3 has no place for an answer; there are 1, 2"):
        zs.Predictions({1: ..., 2: ...}).reveal(3, 1.5)
