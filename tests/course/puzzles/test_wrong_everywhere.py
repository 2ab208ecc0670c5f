"""What is wrong in any puzzle is refused in every one: nothing returned, a wrong shape, a deadlock, hidden arrays."""

import numpy as np
import pytest

from tests.course.puzzles.answers import refusal
from zerosim.course.puzzles import PUZZLES
from zerosim.course.puzzles.solutions import SOLUTIONS

EVERY = pytest.mark.parametrize("name", list(PUZZLES))
FIRST = {name: f"On N=1 ({puzzle.cases()[0].title}) rank 0 " for name, puzzle in PUZZLES.items()}


def copied(value):
    """The same arrays, in new memory that no ledger knows."""
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def first_lent(name, given):
    """The first array among the arguments that may not be changed, in a list or not; None if there is none."""
    for parameter, value in zip(PUZZLES[name].parameters, given, strict=True):
        found = value[0] if isinstance(value, list) else value
        if parameter not in PUZZLES[name].changes and isinstance(found, np.ndarray):
            return found
    return None


@EVERY
def test_an_answer_that_returns_nothing_is_refused(name):
    def answer(rank, *given):
        SOLUTIONS[name](rank, *given)

    assert refusal(name, answer).startswith(FIRST[name] + "returned what is wrong: the result is None where ")


@EVERY
def test_an_answer_of_another_shape_is_refused(name):
    def answer(rank, *given):
        SOLUTIONS[name](rank, *given)
        return np.zeros((9, 9), np.float32)

    said = refusal(name, answer)
    assert said.startswith(FIRST[name] + "returned what is wrong: the result ")
    assert "(9, 9)" in said


@EVERY
def test_an_answer_in_which_rank_0_waits_where_nobody_else_does_is_refused(name):
    def answer(rank, *given):
        if rank.index == 0 and rank.size > 1:
            rank.recv(np.empty(1), 1)
        return SOLUTIONS[name](rank, *given)

    said = refusal(name, answer)
    assert "On N=2 (" in said
    if name in ("ring", "gather"):  # where rank 1 does send something, of another size
        assert "float32) to rank 0, which expects ((1,), float64); both sides must name the same shape" in said
    else:
        assert " no rank can go on: rank 0: in recv((1,), float64) from rank 1 at test_wrong_everywhere.py:" in said


@EVERY
def test_an_answer_in_which_only_rank_0_leaves_early_is_refused(name):
    def answer(rank, *given):
        if rank.size == 3 and rank.index == 0:
            return copied(PUZZLES[name].case(3, PUZZLES[name].sizes[3][0]).expected[0])
        return SOLUTIONS[name](rank, *given)

    said = refusal(name, answer)
    assert "On N=3 (" in said
    assert " no rank can go on: " in said


@EVERY
def test_an_answer_that_changes_what_it_is_lent_is_refused(name):
    def answer(rank, *given):
        found = SOLUTIONS[name](rank, *given)
        lent = first_lent(name, given)
        if lent is not None:
            lent += 1
        elif name not in ("broadcast", "zero2", "overlap"):  # which are lent no array
            raise AssertionError(name)
        return copied(found)

    said = refusal(name, answer)
    if name in ("broadcast", "zero2", "overlap"):
        assert "its ledger does not know" in said
    else:
        assert said.startswith(FIRST[name] + "changed its argument ")
        assert said.endswith(", which is read-only; work on a copy that you take from rank.memory.alloc().")


@EVERY
def test_an_answer_whose_result_is_in_no_ledger_is_refused(name):
    if not PUZZLES[name].audit_length:
        pytest.skip("one number is too small to stand out")
    said = refusal(name, lambda rank, *given: copied(SOLUTIONS[name](rank, *given)))
    assert said.startswith("On N=4 (")
    assert "bytes that its ledger does not know" in said


@EVERY
def test_an_answer_that_fails_on_one_rank_is_refused_with_its_name_and_line(name):
    def answer(rank, *given):
        if rank.index == 2:
            raise OSError("the disk is full. Really")
        return SOLUTIONS[name](rank, *given)

    said = refusal(name, answer)
    assert said.startswith("On N=3 (")
    assert "rank 2 raised OSError in line " in said
    assert said.endswith(" of answer: the disk is full.")
