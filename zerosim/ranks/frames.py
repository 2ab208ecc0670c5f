"""What the frames of an error hold is let go, so that a ledger is empty while the error is still looked at.

A traceback keeps frames, and a frame its variables. `frame.clear` empties those, but not what the frame's function
closed over: a comprehension (a function of its own before CPython 3.12), a generator expression or a nested function
keeps the cells of the variables that it shares with the function around it. Where nobody but such frames holds the
function and the cell, the cell is emptied too.
"""

import gc
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, FrameType, FunctionType
from typing import TypeVar

Raised = TypeVar("Raised", bound=BaseException)


def clear_frames(error: BaseException, *, chain: bool = True) -> None:
    """Empties the frames of an error, and with ``chain`` of those behind it, apart from frames that still run."""
    functions = [function for raised in _behind(error, chain) for function in _functions_of(raised)]
    for raised in _behind(error, chain):
        traceback.clear_frames(raised.__traceback__)
    _empty([function.__closure__ or () for function in _orphans(functions)])


def forget_frames(error: Raised) -> Raised:
    """The error without any frames: one that is kept, and may be raised later, keeps neither arrays nor itself."""
    for raised in _behind(error, True):
        raised.__traceback__ = None
    return error


def _behind(error: BaseException, chain: bool) -> Iterator[BaseException]:
    """The error and, with ``chain``, what it was raised from or during, each once."""
    raised: BaseException | None = error
    seen: set[int] = set()
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        yield raised
        raised = (raised.__cause__ or raised.__context__) if chain else None


def _functions_of(error: BaseException) -> Iterator[FunctionType]:
    """The function of each frame of an error, those that run still apart."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        function = _function_of(frame)
        if function is not None:
            yield function


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs; None where the frame is still running, and does not say."""
    for held in gc.get_referents(frame):
        if isinstance(held, FunctionType) and held.__code__ is frame.f_code:
            return held
    return None


def _orphans(functions: list[FunctionType]) -> list[FunctionType]:
    """Each function that nobody holds but as many frames as it stands here for, once."""
    frames = Counter(map(id, functions))
    # Each frame's reference, and this list's for it; the comprehension's variable, and getrefcount's argument.
    held = {id(f): f for f in functions if sys.getrefcount(f) <= 2 * frames[id(f)] + 2}
    return list(held.values())


def _empty(closures: list[tuple[CellType, ...]]) -> None:
    """Empties the cells that nothing holds but these closures."""
    holders = Counter(id(cell) for closure in closures for cell in closure)
    for closure in closures:
        for cell in closure:
            if sys.getrefcount(cell) <= holders[id(cell)] + 2:  # the loop's variable, and getrefcount's argument
                with suppress(ValueError):  # it is empty already
                    del cell.cell_contents
