"""The verdict of an answer's attempts, with what they waste and print; they must leave what judges them as it is."""

import builtins
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from zerosim.course.puzzles.score import MEASURES, OPEN, PASSED, REFUSED, Hole, Measured, Refused, Score

PRINTED = 1_000  # characters that are kept of what an answer prints


def judged(name: str, attempts: Iterable[Measured], right: Callable[[list[Measured]], str],
           reasons: Mapping[str, str] | None = None) -> Score:
    """The score of attempts that are made one after the other, until one raises Refused or Hole.

    ``right(rows)`` is the sentence of an answer that passed, ``reasons`` the words for a measure above its target. What
    the attempts have replaced in the package, in NumPy or among Python's own names is put back, and refuses them. What
    is printed meanwhile goes into the score.
    """
    rows: list[Measured] = []
    originals = Originals()
    with redirect_stdout(Beginning()) as printed:
        try:
            with np.errstate(all="ignore"):  # inf and NaN are part of some cases
                rows.extend(attempts)
        except Hole as error:
            verdict, sentence = OPEN, ended(f"A hole is open: {error}")
        except Refused as error:
            verdict, sentence = REFUSED, ended(str(error))
        else:
            verdict, sentence = PASSED, right(rows)
        finally:
            replaced = originals.put_back()
    if replaced:
        verdict, sentence = REFUSED, (f"It replaced {replaced[0]}; an answer may use the package and NumPy, and leaves "
                                      "them as they are.")
    return Score(name, verdict, sentence, tuple(rows), _wasted(rows, reasons or {}) if verdict == PASSED else (),
                 printed.getvalue())


def ended(text: str) -> str:
    """The text as a sentence: with a full stop, unless a mark ends it already."""
    return text if text.endswith(("?", "!", ".")) else f"{text}."


def _wasted(rows: Sequence[Measured], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each measure that is above its target: of the case where it is furthest above."""
    found = []
    for measure in MEASURES:
        worst = max(rows, key=lambda row: getattr(row, measure) / max(1, getattr(row.target, measure)))
        if said := worst.excess(measure):
            why = reasons.get(measure, "")
            found.append(said + (f": {why}." if why else "."))
    return tuple(found)


class Beginning(io.StringIO):
    """Keeps the first characters that are written, and lets the others go."""

    def write(self, text: str) -> int:
        """Returns the number of characters that it was given."""
        super().write(text[:max(0, PRINTED - self.tell())])
        return len(text)


class Originals:
    """The values of the names of Python's builtins, of NumPy, of the package and of its classes."""

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "zerosim"]
        classes = [value for module in modules for value in vars(module).values()
                   if isinstance(value, type) and value.__module__ == module.__name__]
        owners: list[Any] = [builtins, np, *modules, *classes]
        self._kept = [(owner, vars(owner), dict(vars(owner))) for owner in owners]
        self._codes = [(owner, name, value, value.__code__) for owner, _, kept in self._kept
                       for name, value in kept.items() if isinstance(value, FunctionType)]

    def put_back(self) -> list[str]:
        """Puts back whatever has been replaced since, and takes away from modules what hides a builtin; returns the
        names of both."""
        replaced: list[tuple[Any, str]] = []
        for owner, names, kept in self._kept:  # Python's own first, by no function that may be one of those replaced
            for name, value in kept.items():
                if names.get(name) is not value:
                    replaced.append((owner, name))
                    if owner is builtins:
                        names[name] = value
                    else:
                        setattr(owner, name, value)
            hiding = names.keys() & self._kept[0][2].keys() - kept.keys() if isinstance(owner, ModuleType) else ()
            for name in hiding:
                if not isinstance(names[name], ModuleType):  # zerosim.display, where IPython has a builtin of that name
                    replaced.append((owner, name))
                    delattr(owner, name)
        for owner, name, function, code in self._codes:
            if function.__code__ is not code:
                replaced.append((owner, name))
                function.__code__ = code
        return [f"{owner.__module__}.{owner.__qualname__}.{name}" if isinstance(owner, type) else
                f"{owner.__name__}.{name}" for owner, name in replaced]
