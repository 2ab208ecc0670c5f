"""Puzzles: exercises on ranks, checked for bits on several N, and scored on memory, bytes and steps.

`list()` names them, `show(name)` states one and gives the stub to begin with, `hint(name, 1)` helps, `check(name,
function)` judges, `solution(name)` tells all; `grading` grades the functions that courses ask for. A check runs the
function on clusters of 1 to 8 ranks, with other data on every rank; what is wrong, it says in one sentence.
"""

import builtins
import inspect

from zerosim.course.puzzles import checker, grading
from zerosim.course.puzzles.puzzle import Answer, Puzzle, hole
from zerosim.course.puzzles.score import Page, Score, filled
from zerosim.course.puzzles.tasks import PUZZLES
from zerosim.numerics.checks import is_count, unknown_name

__all__ = ["Page", "Score", "check", "grading", "hint", "hole", "list", "names", "show", "solution",
           "statement", "stub"]


SOLUTION_HEAD = """\
from __future__ import annotations  # so that Rank and Array need no import

import numpy as np


"""


def names() -> builtins.list[str]:
    """The puzzles' names, in the order in which one does them."""
    return builtins.list(PUZZLES)


def list() -> Page:
    """The puzzles: name, title, number of hints."""
    wide = max(map(len, PUZZLES))
    lines = [f"{puzzle.name.ljust(wide)}  {puzzle.title}, {len(puzzle.hints)} hints" for puzzle in PUZZLES.values()]
    return Page("\n".join([*lines, "", 'zs.puzzles.show("mean") states the first.']))


def statement(name: str) -> Page:
    """The statement of a puzzle: shapes, a picture, allowed calls, targets. Raises ValueError for an unknown name."""
    puzzle = puzzle_named(name)
    return Page(f"{puzzle.title}\n\n{filled(puzzle.statement)}\n\n{puzzle.calls}\n\n"
                f"{filled('Targets: ' + puzzle.score + '.')}")


def show(name: str) -> Page:
    """The statement of a puzzle, and the stub to begin with. Raises ValueError for a name that there is not."""
    return Page(f"{statement(name)}\n\nBegin with\n\n{stub(name)}")


def stub(name: str) -> Page:
    """The code with holes from which to begin. Raises ValueError for a name that there is not."""
    return Page(puzzle_named(name).stub)


def hint(name: str, number: int = 1) -> Page:
    """Hint 1, or a later and franker one. Raises ValueError for a puzzle or a hint that there is not."""
    puzzle = puzzle_named(name)
    if not is_count(number) or not 1 <= number <= len(puzzle.hints):
        raise ValueError(f"no hint {number!r} for {name!r}; there are hints 1 to {len(puzzle.hints)}")
    return Page(filled(f"Hint {number} of {len(puzzle.hints)}: {puzzle.hints[number - 1]}"))


def check(name: str, answer: Answer) -> Score:
    """Runs ``answer`` as the puzzle says, on 1, 2, 3, 4, 5 and 8 ranks, and scores it.

    A wrong answer, or one with open holes, raises nothing: the Score says it. Raises ValueError for a puzzle that there
    is not, and for an answer that is no function.
    """
    return checker.check_answer(puzzle_named(name), answer)


def solution(name: str) -> Page:
    """The text of a solution, a file that passes. Raises ValueError for a name that there is not."""
    puzzle_named(name)
    from zerosim.course.puzzles.solutions import SOLUTIONS  # kept apart: nobody should meet it by accident

    found = SOLUTIONS[name]
    return Page(SOLUTION_HEAD + inspect.getsource(found).replace(f"def {found.__name__}(", f"def {name}(", 1))


def puzzle_named(name: str) -> Puzzle:
    """The puzzle of this name; ValueError for a name that there is not."""
    if name in PUZZLES:
        return PUZZLES[name]
    raise unknown_name(f"no puzzle is called {name!r}", name, PUZZLES, "there are")
