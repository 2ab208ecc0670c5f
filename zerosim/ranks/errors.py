"""Errors between ranks: the exceptions, the sentences that say who, where and what to do, and how a run ends by one.

A run that fails leaves nothing behind. Ctrl-C waits while a ledger is being written (`Interrupts`, `guarded`), and the
frames of an error hold no arrays when it comes out (`clear_frames`).
"""

import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

from zerosim.ranks.call import Call


class MismatchError(ValueError):
    """Ranks of one group called different collectives, or a message did not fit where it arrived."""


class DeadlockError(RuntimeError):
    """No rank can go on; the text says who waits for whom, and where in the source."""


class PendingWorkError(RuntimeError):
    """An asynchronous collective was used wrongly: read before ``wait()``, its input changed, or never waited for."""


class OutOfMemoryError(MemoryError):
    """A rank asked for more bytes than its capacity leaves; the text lists what it holds by kind."""


class RankUseError(RuntimeError):
    """A rank was used outside its own running program: in another thread, another rank's program, or no run."""


class AsymmetryError(ValueError):
    """One rank was to stand for all of them in something that not every rank would do in the same way."""


class BackendError(RuntimeError):
    """A world of ranks that cannot be had here; the text says what is missing and how to get it."""

    def __init__(self, backend: str, text: str) -> None:
        super().__init__(text)
        self.backend = backend

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.backend, str(self))


class RemoteError(RuntimeError):
    """A rank in another process raised an exception that cannot be made again in this one; the text says which."""


class RankStopped(BaseException):
    """Unwinds a rank because another one failed; a BaseException, so that ``except Exception`` lets it pass."""


# -- Sentences: who is in which call, who waits for whom, and where in the source ------------------------------------

PACKAGE = str(Path(__file__).parent.parent) + os.sep


def place_of(frame: FrameType | None) -> str:
    """``file:line in function`` of the innermost frame outside the package; or of the innermost one there is."""
    outer = frame
    while outer is not None and outer.f_code.co_filename.startswith(PACKAGE):
        outer = outer.f_back
    found = outer or frame
    if found is None:
        return "an unknown place"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"


def place_of_call() -> str:
    """The place in the user's program that called into the package."""
    return place_of(sys._getframe(1))


def mismatch_text(calls: Mapping[int, Call]) -> str:
    """Names every group of ranks that made the same call. ``calls``: rank -> its call, in rank order."""
    show = str if len({str(call) for call in calls.values()}) > 1 else Call.in_full
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(show(call), []).append(rank)
    said = "; ".join(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {text}"
                     for text, ranks in groups.items())
    return (f"the ranks of a group must make the same collective calls in the same order, but {said}. "
            "Look for a branch that depends on the rank, or for shapes, dtypes or options that differ.")


class RankPosition(NamedTuple):
    """A rank in ``what`` at ``where``, waiting for the ranks ``missing`` if it is a collective's."""

    what: str | None  # None: it has finished
    where: str = ""
    missing: list[int] | None = None

    def __str__(self) -> str:
        if self.what is None:
            return "finished"
        for_whom = "" if self.missing is None else f", waiting for {ranks_text(self.missing)}"
        return f"in {self.what} at {self.where}{for_whom}"


class Shaped(Protocol):
    """An array, or a note about one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def misfit_text(sender: int, send: Shaped, receiver: int, out: Shaped) -> str:
    """The text about a message that does not fit where it arrives."""
    return (f"rank {sender} sends ({send.shape}, {send.dtype}) to rank {receiver}, which expects ({out.shape}, "
            f"{out.dtype}); both sides must name the same shape and dtype")


def deadlock_text(positions: Sequence[RankPosition]) -> str:
    """The text of a deadlock: who waits for whom; ``positions`` in rank order."""
    lines = []
    for text, members in groupby(enumerate(positions), key=lambda item: str(item[1])):
        ranks = [rank for rank, _ in members]
        lines.append(f"  rank {ranks[0]}: {text}" if len(ranks) == 1 else f"  ranks {ranks[0]}-{ranks[-1]}: {text}")
    return ("no rank can go on:\n" + "\n".join(lines) + "\nEvery send needs a receive of the same size that is waiting "
            "for it (exchange() does both at once), and every rank of a group must enter each collective.")


def left_over_text(found: Iterable[str]) -> str:
    """The text about messages that were sent and never received, though every rank's program has returned."""
    lines = "\n".join(f"  {text}" for text in found)
    return (f"all ranks have finished, but not all messages have arrived:\n{lines}\nThe library took them only because "
            "they are small; larger ones would wait for ever. Every send needs a receive, and every rank of a group "
            "must enter each collective.")


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks [1, 2]``."""
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


# -- Ctrl-C in the midst of a run: raised at once in programs and arithmetic, a moment later inside the bookkeeping ---
# Python runs a signal's handler between any two bytecodes. Inside a ledger's entry the exception would leave half an
# entry, and inside the callback that notices an array's death, or a collection of garbage, nobody could catch it: Python
# prints it and goes on. Where a group of NCCL's calls begins or ends it would leave the group open, which swallows all
# later calls.


Guarded = TypeVar("Guarded", bound=Callable[..., Any])

GUARDED: set[CodeType] = set()
# Helpers' own frames are part of whoever called them; "<string>" is the code that a dataclass makes.
TRANSPARENT = ("<string>", "contextlib.py", "collections/__init__.py", "threadpoolctl.py")


def guarded(thing: Guarded) -> Guarded:
    """Marks a function, or all methods of a class, as bookkeeping in which Ctrl-C waits until it is done.

    Write it above all other decorators. A subclass marks its own methods itself.
    """
    for function in vars(thing).values() if isinstance(thing, type) else [thing]:
        _guard(function)
    return thing


def _guard(function: Any) -> None:
    if isinstance(function, property):
        for part in (function.fget, function.fset, function.fdel):
            _guard(part)
        return
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):  # functions that it defines are among its constants
            GUARDED.add(code)
            codes.extend(code.co_consts)


class Interrupts:
    """A handler of SIGINT that remembers what came inside the bookkeeping; the hub asks after every switch of ranks."""

    def __init__(self) -> None:
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename.endswith(TRANSPARENT):
            frame = frame.f_back
        if frame is not None and (_in_a_collection(frame)
                                  or (not self.pending and frame.f_code in GUARDED)):
            self.pending = True
            return
        self.pending = False
        raise KeyboardInterrupt

    def raise_pending(self) -> None:
        """Raises the KeyboardInterrupt that had to wait, if there is one."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


def _in_a_collection(frame: FrameType | None) -> bool:
    """True where a callback of the garbage collector is running, out of which no exception comes."""
    watchers = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None and frame.f_code not in watchers:
        frame = frame.f_back
    return frame is not None


@contextmanager
def patient_interrupts(interrupts: Interrupts | None = None) -> Iterator[Interrupts]:
    """Handles SIGINT inside the ``with`` block where Python's own handler would; a run inside a run shares one.

    A run that stops and goes on brings the ``interrupts`` that its hub asks.
    """
    interrupts, current = interrupts or Interrupts(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
    elif isinstance(current, Interrupts):
        yield current
    elif current is not signal.default_int_handler:
        yield interrupts
    else:
        signal.signal(signal.SIGINT, interrupts)
        try:
            yield interrupts
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.raise_pending()


# -- What the frames of an error hold is let go, so that a ledger is empty while the error is still looked at --------
# A traceback keeps frames, and a frame its variables. `frame.clear` empties those, but not what the frame's function
# closed over: a comprehension (a function of its own before CPython 3.12), a generator expression or a nested function
# keeps the cells of the variables that it shares with the function around it. Where nobody but such frames holds the
# function and the cell, the cell is emptied too.


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
