"""Answers that a reader types before a notebook measures, and what was measured, which is hidden until then.

``predictions = zs.Predictions({1: ..., 2: ...})`` has a place for each answer; the cell that measures ends with
``predictions.reveal(1, measured)``.
"""

import math
from collections.abc import Mapping
from typing import Any

from zerosim.numerics.checks import is_count


class Predictions:
    """The answers to numbered questions; ``...`` is one that is not typed yet.

    An answer is a number, a word, True or False (also "yes" or "no"), or a list or a set of these. Raises ValueError
    for what is no mapping of the questions' numbers.
    """

    def __init__(self, answers: Mapping[int, Any]) -> None:
        asked: Any = answers
        if not isinstance(asked, Mapping) or not asked or not all(map(is_count, asked)):
            raise ValueError(f"predictions were given {answers!r}; give each answer by its question's number, as in "
                             "zs.Predictions({1: 1.5, 2: ...})")
        self._answers = dict(answers)

    def reveal(self, question: int, measured: Any, *, within: float = 0) -> None:
        """Prints the answer beside the measured value; before one of its kind is typed, what to do, and no value.

        A number is right if it is within that share of the measured one (0: 1 %, and exactly if that is whole).
        Raises ValueError for a question without a place for its answer.
        """
        if question not in self._answers:
            raise ValueError(f"question {question!r} has no place for an answer; there are "
                             f"{', '.join(map(str, self._answers))}")
        answer, measured = _plain(self._answers[question]), _plain(measured)
        if answer is ...:
            print(f"{question}. type your prediction above, and run its cell and this one again")
        elif (given := _read(answer, measured)) is None:
            print(f"{question}. you predicted {answer!r}, and the answer is {_kind(measured)}: type that above, and "
                  "run its cell and this one again")
        else:
            print(f"{question}. you predicted {_text(given)}; measured {_text(measured)}: "
                  f"{_verdict(given, measured, within)}")


def _plain(value: Any) -> Any:
    """The value without NumPy's types, its words in small letters."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple | set | frozenset):
        return (list if isinstance(value, list | tuple) else set)(map(_plain, value))
    return value.casefold() if isinstance(value, str) else value


def _kind(measured: Any) -> str:
    """The kind of a measured value, in words that say nothing of it."""
    if isinstance(measured, list):
        return f"a list of {len(measured)}: {', '.join(map(_kind, measured))}"
    return {bool: "yes or no", str: "a word", set: "a set"}.get(type(measured), "a number")


def _read(answer: Any, measured: Any) -> Any:
    """The answer as a value of the measured one's kind, or None where it is of another."""
    if isinstance(measured, list):
        as_long = isinstance(answer, list) and len(answer) == len(measured)
        found = [_read(*both) for both in zip(answer, measured, strict=True)] if as_long else [None]
        return None if None in found else found
    if isinstance(measured, bool) and isinstance(answer, str):
        answer = {"yes": True, "no": False}.get(answer)
    if isinstance(measured, set) and isinstance(answer, list):
        answer = set(answer)
    kinds = (int, float) if isinstance(measured, int | float) else type(measured)
    return answer if isinstance(answer, kinds) and isinstance(answer, bool) == isinstance(measured, bool) else None


def _verdict(given: Any, measured: Any, within: float) -> str:
    """"right", or how much of it is."""
    if isinstance(measured, list):
        right = sum(_verdict(*both, within) == "right" for both in zip(given, measured, strict=True))
        return "right" if right == len(measured) else f"{right} of {len(measured)} right"
    if given == measured or (given != given and measured != measured):  # NaN, which is not equal to itself
        return "right"
    if isinstance(measured, bool | str | set) or not measured or not all(map(math.isfinite, (given, measured))):
        return "not so"
    off, whole = abs(given / measured - 1), measured == int(measured)
    return "right" if off <= (within or 0.01 * (not whole)) else f"off by {off:.0%}" if off < 10 else "far off"


def _text(value: Any) -> str:
    """A value as one writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, set):
        return ", ".join(sorted(map(_text, value))) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 or value == 0 else f"{value:.4g}"
