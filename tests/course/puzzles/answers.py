"""Wrong answers: solutions with a few words changed, whole texts, and a rank that hears of others without messages."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np

from zerosim.course import puzzles
from zerosim.course.puzzles import grading, solutions

Change = str | tuple[str, str] | Callable[..., Any]


def answer_of(name: str, *changes: Change) -> Callable[..., Any]:
    """An answer to a puzzle, or one of a course's functions: the solution, with ``new`` for each ``old`` in its text.

    Or the function of a whole text, or a function as it is.
    """
    if changes and not isinstance(changes[0], tuple):
        return written(changes[0]) if isinstance(changes[0], str) else changes[0]
    text = inspect.getsource(solutions if name in grading.GRADERS else solutions.SOLUTIONS[name])
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        text = text.replace(old, new)
    return written(text, name, vars(solutions))


def written(text: str, name: str = "", names: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function of a text, of this name or the first."""
    text = textwrap.dedent(text)
    space: dict[str, Any] = {"np": np, **(names or {})}
    exec(compile(text, "answer.py", "exec"), space)
    return space[name or text.partition("def ")[2].partition("(")[0]]


def score_of(name: str, answer: Callable[..., Any]) -> puzzles.Score:
    """The score of an answer to a puzzle, or of one of a course's functions."""
    return grading.GRADERS[name](answer) if name in grading.GRADERS else puzzles.check(name, answer)


def refusal(name: str, answer: Callable[..., Any]) -> str:
    """The sentence that refuses an answer."""
    score = score_of(name, answer)
    assert score.verdict == "refused", score
    assert score.stars == "☆☆☆"
    return score.sentence


class Hearsay:
    """A rank that reads in a dict that all ranks share what others send; it sends messages too if it is ``aloud``, and
    else empty ones."""

    def __init__(self, rank, shared, *, aloud=False):
        self.rank, self.shared, self.calls, self.aloud = rank, shared, 0, aloud

    def __getattr__(self, name):
        return getattr(self.rank, name)

    def exchange(self, x, to, out, source):
        self.calls += 1
        self.shared[self.size, self.calls, self.index] = x.copy()
        shown = slice(None if self.aloud else 0)
        self.rank.exchange(x[shown], to, out[shown], source)
        out[...] = self.shared[self.size, self.calls, source]

    def reduce_scatter(self, x):
        return solutions.ring(self, x).copy()

    def all_gather(self, shard, length):
        return solutions.gather(self, shard, length)

    def all_reduce(self, x, out):
        out[...] = self.all_gather(self.reduce_scatter(x.reshape(-1)), x.size).reshape(x.shape)

    def broadcast(self, x, out):
        out[...] = self.all_gather(x.reshape(-1), self.size * x.size)[:x.size].reshape(x.shape)


def by_hearsay(factory: Callable[..., Any], *, aloud: bool = False) -> Callable[..., Any]:
    """A course's function whose object reads in shared memory, from its making on."""
    shared: dict[Any, Any] = {}
    return lambda rank, *given: factory(Hearsay(rank, shared, aloud=aloud), *given)
