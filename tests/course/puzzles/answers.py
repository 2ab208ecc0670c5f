"""Wrong answers are solutions with a few words changed; this changes them."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerosim.course import puzzles
from zerosim.course.puzzles import solutions


def changed(name: str, *changes: tuple[str, str]) -> Callable[..., Any]:
    """The solution of a puzzle, each ``(old, new)`` replaced in its text, once."""
    solution = solutions.SOLUTIONS[name]
    text = inspect.getsource(solution)
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        text = text.replace(old, new)
    return written(text, vars(inspect.getmodule(solution)))


def written(text: str, names: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function of a text."""
    space: dict[str, Any] = {"np": np, **(names or {})}
    before = set(space)
    exec(compile(textwrap.dedent(text), "answer.py", "exec"), space)
    name = textwrap.dedent(text).strip().partition("def ")[2].partition("(")[0]
    assert name in space
    assert name not in before or names is not None
    return space[name]


def refusal(name: str, answer: Callable[..., Any]) -> str:
    """The sentence that refuses an answer."""
    score = puzzles.check(name, answer)
    assert score.verdict == "refused", score
    assert score.stars == "☆☆☆"
    return score.sentence


def graded(name: str, changes: Sequence[tuple[str, str]]) -> str:
    """The sentence that refuses one of a course's functions, which is the solutions' with its text changed."""
    score = puzzles.adapters.GRADERS[name](function(name, changes))
    assert score.verdict == "refused", score
    return score.sentence


def function(name: str, changes: Sequence[tuple[str, str]] = ()) -> Callable[..., Any]:
    """A course's function of the solutions, the module's text changed."""
    text = inspect.getsource(solutions)
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    space = {"__name__": "answers"}
    exec(compile(text, "answers.py", "exec"), space)
    return space[name]
