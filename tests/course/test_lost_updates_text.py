"""The printed lesson on lost updates: it fits a terminal, and says only what the numbers show."""

from io import StringIO

import pytest
from rich.console import Console

from tests.cases import chosen
from tests.course.lost import lost_updates
from zerosim import display
from zerosim.course.lost_updates import LostUpdates
from zerosim.course.lost_updates import LostUpdatesQuestion as Question
from zerosim.display.numbers import fitted, percent, rough, short
from zerosim.display.terminal import plain_table


def printed(found: LostUpdates, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(display.text(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def found() -> LostUpdates:
    return lost_updates(Question())


@pytest.fixture(scope="module")
def lesson(found) -> str:
    return printed(found)


def line_with(text: str, *words: str) -> str:
    """The one line that has all these words."""
    (line,) = (line for line in text.splitlines() if all(word in line for word in words))
    return line


def test_the_lesson_shows_every_published_number(lesson):
    for number in ("1.1001358", "1.1005859", "1.1015625", "1.0001", "84 of them", "27.6 %", "1.86 lr", "1e+05 lr",
                   "0.000244", "0.000489", "2.98e-08", "5.96e-08", "0.24999999", "65504", "1.4e-45"):  # fmt: skip
        assert number in lesson


def test_methods_stand_side_by_side_for_both_updates(lesson):
    assert line_with(lesson, "fp32 master weight").split()[-6:] == ["1.1001358", "100.1", "%", "1", "0", "%"]
    assert line_with(lesson, "Kahan, remainder in fp32").split()[-1] == "%*"
    assert "stuck, when the remainder is 0.00391 (half gap 1.53e-05)" in lesson
    assert "the seeds 0 to 255" in lesson
    assert "bf16 is no cure" in lesson


def test_the_picture_puts_the_sum_into_the_gap(lesson):
    rule = line_with(lesson, "|", ":", "x")
    assert rule.index("x") < rule.index(":")
    assert "1.03 % of the way" in lesson


REASONS = [
    (Question(update=2.0**-11, steps=3), "halfway to the next number: a tie"),
    (Question(update=1e-8, steps=3), "fp16 has no number so small: δ itself becomes 0"),
    (Question(update=-3e-4, steps=3), "61.4 % of the way to the next number"),
    (Question(update=1.0, steps=3), "δ is 1.02e+03 times as large as the gap"),
    (Question("fp32", steps=3), "The update is kept; w moves by 1.00136e-05"),
    (Question(weight=65504.0, update=100.0, steps=3), "larger than every number of fp16: it becomes inf"),
    (Question(weight=0.1, steps=3), "fp16 has no 0.1; the nearest number is 0.099975586"),
]  # fmt: skip


@pytest.mark.parametrize("question", [
    *(question for question, _ in REASONS), Question("fp8_e5m2", -1.0 / 3, 1 / 3, 3), Question("bf16", 1e30, 1e26, 3),
    *chosen([], [Question(steps=3), Question("fp8_e4m3", update=0.03, steps=30), Question("bf16", 0.1, -1e-5, 30),
                 Question("fp32", 0.0, 3e-8, 3)])], ids=str)  # fmt: skip
def test_the_lesson_fits_80_columns_and_breaks_no_cell(question):
    text = printed(lost_updates(question))
    assert max(map(len, text.splitlines())) <= 80
    assert [line for line in text.splitlines() if line.strip() in {"format", "gap", "fp32", "weight", "%"}] == []


def test_a_narrow_terminal_keeps_the_indent_of_a_broken_line():
    lines = printed(lost_updates(Question(update=1.0, steps=3)), width=50).splitlines()
    (place,) = (i for i, line in enumerate(lines) if "Stochastic rounding: up" in line)
    assert lines[place + 1].startswith("  ")


@pytest.mark.parametrize(("question", "said"), REASONS, ids=str)
def test_each_reason_has_its_words(question, said):
    assert said in printed(lost_updates(question))


def test_a_remark_that_the_numbers_do_not_bear_out_is_not_made():
    text = printed(lost_updates(Question(update=1.0, steps=3)))
    for remark in ("bf16 is no cure", "bf16, δ = 1: stuck", "fp32 has gaps too", "The update is lost"):
        assert remark not in text


def test_an_update_downwards_is_drawn_to_the_left():
    rule = line_with(printed(lost_updates(Question(update=-1e-4, steps=3))), "|", ":", "x")
    assert rule.index("x") > rule.index(":")


def test_numbers_are_written_shortly():
    assert [short(1.0), short(0.5), short(1e-05)] == ["1", "0.5", "1e-05"]
    assert [percent(1.001358), percent(0.0), percent(-0.0), percent(1.0)] == ["100.1 %", "0 %", "0 %", "100 %"]
    assert rough(0.00048828125) == "0.000488"
    assert [fitted(1.1001358), fitted(0.099975586), fitted(-1 / 3), fitted(1e30), fitted(9.9814435e29)] == [
        "1.1001358", "0.09997559", "-0.3333333", "1e+30", "9.9814e+29"]


def test_columns_of_numbers_are_set_to_the_right():
    console = Console(file=StringIO(), width=40)
    console.print(plain_table("a", ">b", rows=[("x", "1"), ("y", "100")]))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == ["  a    b", "  x    1", "  y  100"]


def test_80_columns_are_enough_for_every_line(found, lesson):
    wide = printed(found, width=200).splitlines()
    assert [line.rstrip() for line in lesson.splitlines()] == [line.rstrip() for line in wide]
