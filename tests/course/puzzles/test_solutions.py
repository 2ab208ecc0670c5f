"""Solutions pass with every star; stubs are open; words fit the terminal; nothing is met by accident."""

import ast
import inspect
import re

import pytest

from tests.course.puzzles.answers import written
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES
from zerosim.course.puzzles.solutions import SOLUTIONS

EVERY = pytest.mark.parametrize("name", list(PUZZLES))
WORLDS = {1, 2, 3, 4, 5, 8}


@EVERY
def test_a_solution_passes_on_every_world_and_meets_every_target(name):
    score = puzzles.check(name, SOLUTIONS[name])
    assert score.passed, score
    assert score.stars == "★★★", score
    assert {row.ranks for row in score.rows} == WORLDS


@EVERY
def test_a_stub_is_open_or_for_the_broken_program_refused(name):
    score = puzzles.check(name, written(str(puzzles.stub(name))))
    assert score.verdict == ("refused" if name == "repair" else "open"), score
    assert not score.passed
    assert name == "repair" or score.sentence.startswith("A hole is open: ")


@EVERY
def test_there_are_two_to_four_hints_and_none_that_is_not(name):
    hints = [puzzles.hint(name, number) for number in range(1, len(PUZZLES[name].hints) + 1)]
    assert 2 <= len(hints) <= 4
    assert all(hint.startswith(f"Hint {number} of {len(hints)}: ") for number, hint in enumerate(hints, 1))
    for number in (0, len(hints) + 1, "1", True):
        with pytest.raises(ValueError, match=rf"no hint {number!r} for '{name}'; there are hints 1 to {len(hints)}"):
            puzzles.hint(name, number)


@EVERY
def test_a_statement_has_a_picture_shapes_targets_and_fits_80_columns(name):
    text, stub = str(puzzles.show(name)), str(puzzles.stub(name))
    assert stub.strip() in text
    words = text.partition("Begin with")[0]
    assert max(map(len, words.splitlines())) <= 80
    assert max(map(len, stub.splitlines())) <= 120
    assert len([line for line in words.splitlines() if line.startswith("    ")]) >= 5, "a picture and a signature"
    assert f"    {name}(rank, " in words
    assert "->" in words
    assert "fp32" in words
    assert "Allowed: " in " ".join(words.split())
    assert "Targets: peak: " in words


@EVERY
def test_a_stub_names_the_arguments_that_the_checker_hands_over(name):
    function = next(node for node in ast.parse(puzzles.stub(name)).body if isinstance(node, ast.FunctionDef))
    puzzle = PUZZLES[name]
    assert function.name == name
    assert tuple(argument.arg for argument in function.args.args) == ("rank", *puzzle.parameters)
    assert tuple(inspect.signature(SOLUTIONS[name]).parameters) == ("rank", *puzzle.parameters)
    assert puzzle.changes <= set(puzzle.parameters)


@EVERY
def test_data_differ_from_rank_to_rank_lengths_fall_short_of_n_and_some_do_not_divide(name):
    sizes = PUZZLES[name].sizes
    assert set(sizes) == WORLDS
    if name != "mean":  # which is of one number
        assert any(length < ranks for ranks, lengths in sizes.items() for length in lengths)
        assert any(length > ranks and length % ranks for ranks, lengths in sizes.items() for length in lengths)
    assert not any(mistake.results is case.expected for case in PUZZLES[name].cases() for mistake in case.mistakes)


def test_a_solution_is_shown_only_when_asked_for():
    for name in PUZZLES:
        assert puzzles.solution(name).startswith(f"def {name}(rank: Rank")
        shown = puzzles.show(name) + "".join(puzzles.hint(name, 1))
        body = [line.strip() for line in puzzles.solution(name).splitlines()[2:] if len(line.strip()) > 25]
        assert any(line not in shown for line in body) or len(body) < 2


@pytest.mark.parametrize("ask", [puzzles.show, puzzles.stub, puzzles.hint, puzzles.solution,
                                 lambda name: puzzles.check(name, print)])
def test_a_name_that_there_is_not_is_refused_with_the_nearest(ask):
    with pytest.raises(ValueError, match=r"no puzzle is called 'rng'; there are mean, .* did you mean 'ring'\?"):
        ask("rng")


def test_what_is_no_function_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"found None; write check\('ring', my_function\), without calling it"):
        puzzles.check("ring", None)


def test_the_list_names_every_puzzle_once_in_order():
    assert re.findall(r"^(\w+)  ", puzzles.list(), re.M) == puzzles.names() == list(PUZZLES)
    assert 12 <= len(PUZZLES) <= 14
