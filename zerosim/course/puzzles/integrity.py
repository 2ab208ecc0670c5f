"""Names that an answer must not use, and those that it must leave as they are: with them it could see what is not its
own, or say what is not so."""

import atexit
import builtins
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NoReturn

import numpy as np

from zerosim.course.puzzles.score import Refused
from zerosim.ranks.errors import PACKAGE

# With these one looks behind the rank that one was handed or at memory that is not one's own, hides from these names,
# or ends the process before it has a verdict.
BACK_DOORS = frozenset({"_state", "as_strided", "ctypes", "gc", "get_objects", "_getframe", "f_back", "f_locals",
                        "stride_tricks", "_transport", "greenlet", "getcurrent", "exec", "eval", "__import__",
                        "import_module", "__globals__", "__closure__", "settrace", "setprofile", "SIG_IGN", "_exit",
                        "abort", "fork", "execv", "__stdout__"})


def refuse_back_doors(answer: Callable[..., Any]) -> None:
    """Refuses a function that names one of BACK_DOORS, in its own code or in that of what it calls, if it is no
    package's; of a class, in its methods."""
    waiting, seen = [answer], set[int]()
    while waiting:
        one = _whole(waiting.pop())
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, type):
            waiting += [value for value in vars(one).values() if isinstance(value, FunctionType)]
        code = getattr(one, "__code__", None)
        if not isinstance(code, CodeType) or code.co_filename.startswith((PACKAGE, *_LIBRARIES)):
            continue
        names = set(_names(code))
        if found := sorted(names & BACK_DOORS):
            raise Refused(f"It uses {found[0]}, with which one sees what is not one's own; a rank knows its arguments, "
                          "and what others send it")
        space = getattr(one, "__globals__", {})
        waiting += [space[name] for name in names if isinstance(space.get(name), FunctionType | type)]


_LIBRARIES = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})


def _whole(answer: Any) -> Any:
    while isinstance(answer, functools.partial):
        answer = answer.func
    return inspect.unwrap(answer)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# -- What is left as it is ---------------------------------------------------------------------------------------------


class Snapshot:
    """The names of the package, of NumPy and of Python's builtins with what they stand for, and the code of the
    package's functions. New names are no change."""

    def __init__(self) -> None:
        spaces, functions = _watched(tuple(name for name in sys.modules if name.partition(".")[0] == "zerosim"))
        self._spaces = [(where, owner, dict(_names_of(owner))) for where, owner in spaces]
        self._functions = [(where, one, one.__code__, one.__defaults__) for where, one in functions]

    def put_back(self) -> list[str]:
        """Puts back whatever has been replaced since; returns its names."""
        replaced = []
        for where, owner, names in self._spaces:
            now = _names_of(owner)
            if all(map(is_, now.values(), names.values())) and len(now) >= len(names):
                continue  # the same in the same order, and maybe more behind
            for name, value in names.items():
                if now.get(name, self) is not value:
                    replaced.append(f"{where}.{name}")
                    owner.__setitem__(name, value) if isinstance(owner, dict) else setattr(owner, name, value)
        for where, function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                replaced.append(where)
                function.__code__, function.__defaults__ = code, defaults
        return replaced

    def refuse_changes(self) -> None:
        """Raises Refused where something has been replaced since, after putting it back."""
        if replaced := self.put_back():
            raise Refused(f"It replaced {replaced[0]}; an answer may use the package and NumPy, and leaves them as "
                          "they are")


def _names_of(owner: Any) -> Mapping[Any, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


@cache
def _watched(modules: tuple[str, ...]) -> tuple[list[tuple[str, Any]], list[tuple[str, FunctionType]]]:
    """Modules, their classes and the puzzles' tables; and their functions: each with its full name."""
    spaces: list[tuple[str, Any]] = [("builtins", builtins), ("numpy", np)]
    functions: list[tuple[str, FunctionType]] = []
    for where in modules:
        spaces.append((where, sys.modules[where]))
        for name, value in vars(sys.modules[where]).items():
            full = f"{where}.{name}"
            if isinstance(value, FunctionType) and value.__module__ == where:
                functions.append((full, value))
            elif (isinstance(value, type) and value.__module__ == where) or (
                    type(value) is dict and where.startswith("zerosim.course.puzzles") and name[:2] != "__"):
                spaces.append((full, value))
    return spaces, functions


# -- What ends the process ---------------------------------------------------------------------------------------------

_ENDINGS = ("_exit", "execv", "execve", "execl", "execle", "execlp", "execlpe", "execvp", "execvpe")


@contextmanager
def kept_running() -> Iterator[None]:
    """Keeps the functions of ``os`` that end the process with a code of their own from doing so: in the ``with`` block
    they raise SystemExit, and so they do in what the block gives to ``atexit``."""
    def without_end(*_: Any, **__: Any) -> NoReturn:
        raise SystemExit("the process would end without a verdict")

    def register(handler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        def guarded() -> None:
            with kept_running():
                handler(*arguments, **options)

        kept[atexit, "register"](guarded)
        return handler

    kept: dict[tuple[Any, str], Any] = {(os, name): getattr(os, name) for name in _ENDINGS}
    kept[atexit, "register"] = atexit.register
    for module, name in kept:
        setattr(module, name, register if module is atexit else without_end)
    try:
        yield
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)
