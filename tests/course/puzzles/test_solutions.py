"""Solutions pass with every star; stubs are open; words fit the terminal; nothing is met by accident."""

import inspect
import re

import pytest

from tests.course.puzzles.answers import answer_of
from tests.support import assert_refused
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, solutions

BROKEN = ("repair", "find_batch", "find_ring", "find_skip")
EVERY = pytest.mark.parametrize("name", PUZZLES)


@EVERY
def test_a_solution_meets_every_target_and_a_stub_is_open_or_for_the_broken_program_refused(name):
    score = puzzles.check(name, answer_of(name, str(puzzles.solution(name))))
    assert (score.verdict, score.stars) == ("passed", "★★★"), score
    assert {row.ranks for row in score.rows} == {1, 2, 3, 4, 5, 8}
    assert f"import numpy as np\n\n\ndef {name}(rank: Rank" in puzzles.solution(name)
    score = puzzles.check(name, answer_of(name, str(puzzles.stub(name))))
    assert (score.verdict, score.passed) == ("refused" if name in BROKEN else "open", False), score
    assert name in BROKEN or score.sentence.startswith("A hole is open: ")


@EVERY
def test_a_statement_has_a_picture_shapes_targets_and_fits_80_columns_and_there_are_two_to_four_hints(name):
    text, stub, puzzle = str(puzzles.show(name)), str(puzzles.stub(name)), PUZZLES[name]
    assert stub.strip() in text
    words = text.partition("Begin with")[0]
    assert max(map(len, words.splitlines())) <= 80
    assert max(map(len, stub.splitlines())) <= 120
    assert len([line for line in words.splitlines() if line.startswith("    ")]) >= 5, "a picture and a signature"
    assert f"    {name}(rank, " in words
    assert ("out=array, of a collective" in text) == bool(puzzle.allowed)
    assert ("its values are right. Write into arrays: /=, out=." in text) == bool(puzzle.audit_length)
    for said in ("->", "fp32", "Allowed: ", "Targets: peak: "):
        assert said in " ".join(words.split()), said
    hints = [puzzles.hint(name, number) for number in range(1, len(puzzle.hints) + 1)]
    assert 2 <= len(hints) <= 4
    assert all(hint.startswith(f"Hint {number} of {len(hints)}: ") for number, hint in enumerate(hints, 1))
    for number in (0, len(hints) + 1, "1", True):
        assert_refused(lambda number=number: puzzles.hint(name, number),
                       rf"no hint {number!r} for '{name}'; there are hints 1 to {len(hints)}")


@EVERY
def test_a_stub_has_the_solutions_arguments_and_lengths_fall_short_of_n_and_some_do_not_divide(name):
    puzzle = PUZZLES[name]
    assert ["rank", *puzzle.parameters] == list(inspect.signature(solutions.SOLUTIONS[name]).parameters)
    assert set(puzzle.changes) <= set(puzzle.parameters)
    assert set(puzzle.sizes) == {1, 2, 3, 4, 5, 8}
    if name != "mean":  # which is of one number
        sizes = [(ranks, length) for ranks, lengths in puzzle.sizes.items() for length in lengths]
        assert any(length < ranks for ranks, length in sizes)
        assert any(length > ranks and length % ranks for ranks, length in sizes)


def test_the_list_names_every_puzzle_once_in_order_and_what_there_is_not_is_refused():
    assert re.findall(r"^(\w+)  ", puzzles.list(), re.M) == puzzles.names() == list(PUZZLES)
    assert 12 <= len(PUZZLES) <= 17
    for ask in (puzzles.show, puzzles.stub, puzzles.hint, puzzles.solution, lambda name: puzzles.check(name, print)):
        assert_refused(lambda ask=ask: ask("rng"),
                       r"no puzzle is called 'rng'; there are mean, .* did you mean 'ring'\?")
    assert_refused(lambda: puzzles.check("ring", None),
                   r"found None; write check\('ring', my_function\), without calling it")
